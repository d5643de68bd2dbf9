"""What every layer may become, what that is predicted to lose, and how far off this is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, fsum, log

import torch
from torch import Tensor

from tcompress.conversion.fit import CURVATURE_DAMPING, Judge, LayerMoments, fit_layers
from tcompress.conversion.sensitivity import Worth
from tcompress.linalg.fits import curved_constant, damped_curvature
from tcompress.linalg.moments import Moments
from tcompress.planning.costs import Choice, plan_terms, term_cost
from tcompress.planning.entries import LayerPlan
from tcompress.planning.knapsack import BudgetSite, Option
from tcompress.roles import Block
from tcompress.structures import Layout, Refusal, Site, Spec, Target, structure
from tcompress.structures.base import predicted_loss
from tcompress.structures.modules.linear import PartLayout

# What every layer may become, and what that is predicted to lose.
#
# One label-free backward pass gives the moments of every layer's inputs and output gradients. With
# them the loss of every way to store a layer is known before anything is converted, in one unit for
# all layers (methods: Which error matters, and where to spend parameters).


Terms = tuple[Layout, ...]
Parts = tuple[PartLayout, ...]

SMALLEST, STEP = 0.01, 1.06
FRACTIONS = tuple(SMALLEST * STEP**n for n in range(78))
"""Kept fractions that a layer is offered, up to nine tenths."""


@dataclass
class LayerCandidates:
    """What one layer may become.

    Attributes:
        key: Weight name in the checkpoint.
        role: What the layer does.
        dense: Its parameters.
        left_out: Predicted loss of leaving it out.
        unit: What one parameter costs: 1, or its bytes.
        offers: By name of the method options, labelled with the layouts of the layer's parts.
        quick: The same before calibration fits corrected the losses.
        alone: By name of the method what it offers where all layers take it.
    """

    key: str
    role: str
    dense: int
    left_out: float
    unit: int = 1
    offers: dict[str, list[Option]] = field(default_factory=dict)
    quick: dict[str, list[Option]] = field(default_factory=dict)
    alone: dict[str, list[Option]] = field(default_factory=dict)

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
    sites: Sequence[Site],
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
        sites: Where its parts sit.
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
        offered = list(_offered(entry, sites, choices, sharing, calibrated=calibrated))
        if not offered:
            continue
        losses = [
            part_losses(aim, [parts[index].terms for parts, _ in offered])
            for index, aim in enumerate(aims)
        ]
        return [
            Option(cost, max(0.0, sum(part[place] for part in losses)) * rows, parts)
            for place, (parts, cost) in enumerate(offered)
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
    sites: Sequence[Site],
    choices: Sequence[Choice],
    sharing: int,
    *,
    calibrated: bool,
) -> Iterator[tuple[Parts, int]]:
    """Layouts that differ, and their parameters."""
    readers = sharing * len(sites)
    before: Parts = ()
    for choice in choices:
        try:
            parts = tuple(
                PartLayout(
                    name=site.role, terms=plan_terms(choice, site, readers, calibrated=calibrated)
                )
                for site in sites
            )
        except Refusal:
            continue
        cost = sum(term_cost(term, readers, 1) for part in parts for term in part.terms)
        if parts != before and cost < entry.dense_parameters:
            yield parts, round(cost)
        before = parts


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


# A few real fits, which tell how far quick predictions of a method's losses are off.
#
# Quick predictions leave out what takes long: fitted transforms, terms of a sum that make room for
# each other. They also know only the rows that were looked at, to which structures adapt more or
# less. Both depend on the method and on the role of a layer far more than on its depth; so the
# layers of one or two blocks are fitted as the conversion will, on half of the rows, and judged by
# the other half. The ratio of both losses corrects the predictions for all layers of a role.


MARGIN = 1.15
"""A method stays in question for a role while it is at most so much worse than the best one."""

AROUND = 4.0
"""Kept fractions that count for that: up to so many times less or more than the budget's."""

LEAST, MOST = 0.02, 5.0  # bounds of a ratio that is believed


def blocks_to_fit(blocks: Sequence[Block], *, several: int = 4) -> frozenset[str]:
    """Names the blocks to fit: of all that have the same layers the last and one in the middle.

    Args:
        blocks: Blocks of a model, in its order.
        several: How many of a kind there have to be for a second one.
    """
    kinds: dict[frozenset[str], list[str]] = defaultdict(list)
    for block in blocks:
        kinds[frozenset(layer.role for layer in block.layers)].append(block.name)
    found = []
    for names in kinds.values():
        found += [names[-1], *([names[len(names) // 2]] if len(names) >= several else [])]
    return frozenset(found)


@dataclass(frozen=True)
class Moment:
    """Moments of one layer, per row and not damped.

    Attributes:
        gram: G.  # (in, in)
        curvature: S, or None where only the inputs count.  # (out, out)
        rows: Number of rows.
    """

    gram: Tensor
    curvature: Tensor | None
    rows: int

    @classmethod
    def of(cls, worth: Worth, *, centred: bool) -> Moment:
        """Takes the moments of what was seen."""
        return cls(worth.moment(centred=centred), worth.curvature / worth.rows, worth.rows)


@dataclass(frozen=True)
class Seen:
    """One layer and what is known of it.

    Attributes:
        weight: Dense weight.  # (out, in)
        whole: Moments of all rows.
        halves: Those that a calibration fit sees, and those of other rows that it is judged by.
    """

    weight: Tensor
    whole: Moment
    halves: tuple[Moment, Moment]

    @classmethod
    def of(cls, weight: Tensor, worth: Worth, *, centred: bool) -> Seen:
        """Makes it of what was seen in a backward pass."""
        whole = Moment.of(worth, centred=centred)
        half = worth.half
        if half is None or not 0 < half.rows < worth.rows:
            return cls(weight, whole, (whole, whole))
        first = Moment.of(worth.include(half, -1), centred=centred)
        return cls(weight, whole, (first, Moment.of(half, centred=centred)))


@dataclass
class CalibrationFits:
    """What real fits gain over predictions, by method and role.

    Attributes:
        fraction: Kept fraction that the budget comes to.
    """

    fraction: float
    _ratios: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _dropped: set[tuple[str, str]] = field(default_factory=set)

    def option(self, layer: LayerCandidates, method: str) -> Option | None:
        """Picks the size to fit: the one closest to the budget."""
        wanted = log(self.fraction * layer.dense)
        options = layer.offers.get(method, ())
        return min(options, key=lambda item: abs(log(max(1, item.cost)) - wanted), default=None)

    def fit(
        self,
        method: str,
        group: Sequence[LayerPlan],
        layers: Mapping[str, LayerCandidates],
        seen: Mapping[str, Seen],
        damping: float,
    ) -> None:
        """Fits layers that read one input, and notes how much less than predicted they lose.

        Args:
            method: Name of the method.
            group: Their plans, of the sizes that `option` picked.
            layers: What the layers may become, by weight name.
            seen: Their moments, by layer name.
            damping: As for the conversion.
        """
        halves = {entry.name: seen[entry.name].halves for entry in group}
        fitted = fit_layers(
            group,
            [seen[entry.name].weight for entry in group],
            [[_moments(halves[entry.name][0])] for entry in group],
            dtype=torch.float32,
            damping=damping,
            curvatures={
                name: first.curvature
                for name, (first, _) in halves.items()
                if first.curvature is not None
            },
            judges={
                name: Judge(second.gram, second.curvature) for name, (_, second) in halves.items()
            },
        )
        for entry, layer in zip(group, fitted, strict=True):
            own = layers[entry.key]
            option = self.option(own, method)
            if option is not None and option.loss > 0 and layer.loss is not None:
                ratio = layer.loss * own.left_out / option.loss
                self._ratios[method, own.role].append(min(MOST, max(LEAST, ratio)))

    def drop(self, layers: Iterable[LayerCandidates], spared: Collection[str] = ()) -> None:
        """Drops methods that lose clearly more than others for a role, at all sizes that count.

        Args:
            layers: Layers that were fitted.
            spared: Methods that stay in any case.
        """
        for item in layers:
            curves = {name: self.corrected(item, name) for name in item.offers}
            for name in curves.keys() - set(spared):
                others = [o for other, options in curves.items() if other != name for o in options]
                if others and not self._competes(item, curves[name], others):
                    self._dropped.add((name, item.role))

    def keeps(self, method: str, role: str) -> bool:
        """Tells whether a method is still in question for a role."""
        return (method, role) not in self._dropped

    def corrected(self, layer: LayerCandidates, method: str) -> list[Option]:
        """Returns the options of one method with losses as real fits would have them."""
        ratio = self.ratio(method, layer.role)
        return [
            replace(option, loss=min(option.loss * ratio, max(option.loss, layer.left_out)))
            for option in layer.offers.get(method, ())
        ]

    def ratio(self, method: str, role: str) -> float:
        """Returns the factor for predicted losses: of the role, of all roles, or one."""
        found = self._ratios.get((method, role)) or [
            ratio
            for (name, _), ratios in self._ratios.items()
            if name == method
            for ratio in ratios
        ]
        return exp(fsum(map(log, found)) / len(found)) if found else 1.0

    def _competes(
        self, item: LayerCandidates, own: Sequence[Option], others: Sequence[Option]
    ) -> bool:
        low, high = (self.fraction * item.dense * by for by in (1 / AROUND, AROUND))
        for option in own:
            if low <= option.cost <= high:
                rivals = [other.loss for other in others if other.cost <= option.cost]
                if not rivals or option.loss <= MARGIN * min(rivals):
                    return True
        return False


def _moments(seen: Moment) -> LayerMoments:
    """Moments of an input that is still that of the dense model."""
    zero = torch.zeros_like(seen.gram[0])
    return LayerMoments(Moments(seen.gram, seen.gram, seen.gram, zero, zero, seen.rows))
