"""What every layer may become, and what that is predicted to lose.

One label-free backward pass gives the moments of every layer's inputs and output gradients. With
them the loss of every way to store a layer is known before anything is converted, in one unit for
all layers (methods: Which error matters, and where to spend parameters).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from tcompress.anatomy import Layer
from tcompress.conversion.fit import CURVATURE_DAMPING
from tcompress.linalg.curvature import curved_constant, damped_curvature
from tcompress.planning.budget import BudgetSite, Option
from tcompress.planning.entries import LayerPlan
from tcompress.planning.terms import Choice, plan_terms, term_cost
from tcompress.structures import Layout, Refusal, Site, Spec, Target, structure
from tcompress.structures.base import predicted_loss

Terms = tuple[Layout, ...]

SMALLEST, STEP = 0.01, 1.06
FRACTIONS = tuple(SMALLEST * STEP**n for n in range(78))
"""Kept fractions that a layer is offered, up to nine tenths."""


@dataclass
class Sized:
    """A layer as the allocator sees it.

    Attributes:
        key: Weight name in the checkpoint.
        role: What the layer does.
        dense: Its parameters.
        zero: Predicted loss of leaving it out.
        unit: What one parameter costs: 1, or its bytes.
        offers: What it may become, by name of the method: options labelled with choices.
        quick: The same before trials corrected the losses; empty where there were none.
    """

    key: str
    role: str
    dense: int
    zero: float
    unit: int = 1
    offers: dict[str, list[Option]] = field(default_factory=dict)
    quick: dict[str, list[Option]] = field(default_factory=dict)

    def site(self, methods: Sequence[str], *, may_stay: bool) -> BudgetSite:
        """Returns what a budget may choose from.

        Args:
            methods: Names of the methods that count.
            may_stay: Whether it may stay dense; it must where no method can take it.
        """
        options = [option for name in methods for option in self.offers.get(name, ())]
        priced = [replace(option, cost=option.cost * self.unit) for option in options]
        return BudgetSite(self.key, priced, self.dense * self.unit, may_stay or not priced)


@dataclass(frozen=True)
class Aim:
    """One part of a layer: what its fit aims at, and what it costs to leave it out."""

    target: Target
    constant: float


def options_of(
    entry: LayerPlan,
    layer: Layer,
    aims: Sequence[Aim],
    specs: Sequence[Spec],
    fractions: Sequence[float],
    *,
    residual_rank: int,
    rows: int,
    sharing: int,
    calibrated: bool,
) -> list[Option]:
    """Lists what a layer may become with one method, with parameters and predicted losses.

    Args:
        entry: Its plan, of any size.
        layer: The layer in the model.
        aims: What its parts aim at.
        specs: Options of the method; the first that the layer's dimensions allow counts.
        fractions: Kept fractions to try, ascending.
        residual_rank: Rank of the low-rank term beside it; 0 leaves it to the fraction.
        rows: How many rows of data the aims are the mean of.
        sharing: How many layers read the same input.
        calibrated: Whether the fit will have data.
    """
    for spec in specs:
        choices = [Choice(spec, residual_rank, fraction) for fraction in fractions]
        offered = list(_offered(entry, layer, choices, sharing, calibrated=calibrated))
        if not offered:
            continue
        losses = [
            part_losses(aim, [terms[index] for _, _, terms in offered])
            for index, aim in enumerate(aims)
        ]
        return [
            Option(cost, max(0.0, sum(part[place] for part in losses)) * rows, choice)
            for place, (choice, cost, _) in enumerate(offered)
        ]
    return []


def fine_fractions(entry: LayerPlan) -> tuple[float, ...]:
    """Kept fractions close enough that no rank is passed over."""
    widest = max(part.out_features for part in entry.parts)
    least = min(part.out_features for part in entry.parts)
    step = (entry.in_features + least) / (2.0 * entry.in_features * widest)
    return tuple(step * n for n in range(1, int(1 / step) + 1))


def part_losses(aim: Aim, offered: Sequence[Terms]) -> list[float]:
    """Predicts the loss of every way to store one weight.

    A low-rank term beside another one is judged by what the other leaves over, once for all ranks.
    Where the other one differs, one pair is, and the rest by what the other terms lose alone.
    """
    losses = [0.0] * len(offered)
    alone = [index for index, terms in enumerate(offered) if len(terms) == 1]
    for index, loss in zip(alone, _losses(aim, [offered[i][0] for i in alone]), strict=True):
        losses[index] = loss
    beside: dict[Layout, list[int]] = {}
    for index, terms in enumerate(offered):
        if len(terms) > 1:
            beside.setdefault(terms[0], []).append(index)
    if len(beside) > 1:
        pairs = [index for places in beside.values() for index in places]
        for index, loss in zip(pairs, _pair_losses(aim, [offered[i] for i in pairs]), strict=True):
            losses[index] = loss
        return losses
    for main, places in beside.items():
        rest = _rest(aim, main)
        for index, loss in zip(places, _losses(rest, [offered[i][1] for i in places]), strict=True):
            losses[index] = loss
    return losses


def _pair_losses(aim: Aim, offered: Sequence[Terms]) -> list[float]:
    """Losses of terms of growing size, each beside a low-rank term of one rank."""
    alone = _losses(aim, [terms[0] for terms in offered])
    middle = len(offered) // 2
    main, residual = offered[middle]
    both = _losses(_rest(aim, main), [residual])[0]
    ratio = both / alone[middle] if alone[middle] > 0 else 0.0
    return [ratio * loss for loss in alone]


def _losses(aim: Aim, layouts: Sequence[Layout]) -> list[float]:
    if not layouts:
        return []
    kind = structure(layouts[0].structure)
    return kind.losses(aim.target, aim.constant, layouts)


def _rest(aim: Aim, main: Layout) -> Aim:
    """What the first term of a sum leaves to the second."""
    kind, target = structure(main.structure), aim.target
    dense = kind.quick_fit(target, main)
    left = replace(target, product=target.product - dense @ target.full_gram())
    return Aim(left, predicted_loss(dense, target, aim.constant))


def _offered(
    entry: LayerPlan,
    layer: Layer,
    choices: Sequence[Choice],
    sharing: int,
    *,
    calibrated: bool,
) -> Iterator[tuple[Choice, int, tuple[Terms, ...]]]:
    """Choices that differ, their parameters and the terms of every part."""
    readers = sharing * len(entry.parts)
    before: tuple[Terms, ...] = ()
    for choice in choices:
        try:
            terms = tuple(
                plan_terms(
                    choice,
                    Site(layer.in_features, part.size, layer.side),
                    readers,
                    calibrated=calibrated,
                )
                for part in layer.parts
            )
        except Refusal:
            continue
        cost = sum(term_cost(term, readers, 1) for part in terms for term in part)
        if terms != before and cost < entry.dense_parameters:
            yield choice, round(cost), terms
        before = terms


def aims_of(entry: LayerPlan, weight: Tensor, gram: Tensor, curvature: Tensor) -> list[Aim]:
    """Lists what the parts of a layer aim at, in the norm of both moments.

    Args:
        entry: The layer.
        weight: Dense weight.  # (out, in)
        gram: G, damped.  # (in, in)
        curvature: S, not damped.  # (out, out)
    """
    aims, start = [], 0
    for part in entry.parts:
        stop = start + part.out_features
        rows = weight[start:stop].double()
        curve = damped_curvature(curvature[start:stop, start:stop], CURVATURE_DAMPING)
        target = Target(rows @ gram, gram, curvature=curve)
        aims.append(Aim(target, float(curved_constant(rows, gram, curve))))
        start = stop
    return aims
