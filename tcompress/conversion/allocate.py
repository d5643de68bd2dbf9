"""Which size every layer gets: a budget is spent where it saves the most predicted loss.

One label-free backward pass gives the moments of every layer's inputs and output gradients. With
them the loss of every way to store a layer is known before anything is converted, in one unit for
all layers (methods: Which error matters, and where to spend parameters).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tcompress.anatomy import Layer
from tcompress.conversion.backward import Worth
from tcompress.conversion.fit import CURVATURE_DAMPING
from tcompress.linalg.curvature import curved_constant, damped_curvature
from tcompress.planning.budget import BudgetSite, Option, allocate
from tcompress.planning.entries import LayerPlan
from tcompress.planning.planner import Choice, plan_terms, term_cost
from tcompress.structures import Layout, Refusal, Site, Spec, Target, structure
from tcompress.structures.base import predicted_loss

Terms = tuple[Layout, ...]

SMALLEST, STEP = 0.01, 1.06
FRACTIONS = tuple(SMALLEST * STEP**n for n in range(78))
"""Kept fractions that a layer is offered, up to nine tenths."""


@dataclass(frozen=True)
class Sized:
    """A layer as the allocator sees it.

    Attributes:
        key: Weight name in the checkpoint.
        site: Its options, whose labels are choices.
    """

    key: str
    site: BudgetSite


@dataclass(frozen=True)
class _Aim:
    """One part of a layer: what its fit aims at, and what it costs to leave it out."""

    target: Target
    constant: float


def size_options(
    entry: LayerPlan,
    layer: Layer,
    weight: Tensor,
    worth: Worth,
    methods: Sequence[Spec],
    damping: float,
    sharing: int,
) -> Sized:
    """Lists what a layer may become, with parameters and predicted losses.

    Args:
        entry: Its plan, of any size.
        layer: The layer in the model.
        weight: Dense weight.  # (out, in)
        worth: What its inputs and outputs are worth.
        methods: Methods to choose among.
        damping: Ridge on the input moment, as a fraction of its mean diagonal.
        sharing: How many layers read the same input.
    """
    aims = list(_aims(entry, weight, worth, damping))
    options = []
    for method in methods:
        offered = list(_offered(entry, layer, method, sharing))
        losses = [
            part_losses(aim, [terms[index] for _, _, terms in offered])
            for index, aim in enumerate(aims)
        ]
        for place, (choice, cost, _) in enumerate(offered):
            loss = sum(part[place] for part in losses) * worth.rows
            options.append(Option(cost, loss, choice))
    key = f"{entry.name}.{entry.parameter}"
    return Sized(key, BudgetSite(key, options, entry.dense_parameters, may_stay=False))


def choose(sized: Sequence[Sized], target: float) -> dict[str, Choice]:
    """Spends a budget: a fraction of the parameters of all these layers.

    Raises:
        PlanError: Even the smallest options do not fit.
    """
    budget = int(target * sum(item.site.dense for item in sized))
    chosen = allocate([item.site for item in sized], budget).choices
    found: dict[str, Choice] = {}
    for item, option in zip(sized, chosen, strict=True):
        assert isinstance(option.label, Choice)
        found[item.key] = option.label
    return found


def part_losses(aim: _Aim, offered: Sequence[Terms]) -> list[float]:
    """Predicts the loss of every way to store one weight.

    A low-rank term beside another one is judged by what the other leaves over, once for all ranks.
    """
    losses = [0.0] * len(offered)
    alone = [index for index, terms in enumerate(offered) if len(terms) == 1]
    for index, loss in zip(alone, _losses(aim, [offered[i][0] for i in alone]), strict=True):
        losses[index] = loss
    beside: dict[Layout, list[int]] = {}
    for index, terms in enumerate(offered):
        if len(terms) > 1:
            beside.setdefault(terms[0], []).append(index)
    for main, places in beside.items():
        rest = _rest(aim, main)
        for index, loss in zip(places, _losses(rest, [offered[i][1] for i in places]), strict=True):
            losses[index] = loss
    return losses


def _losses(aim: _Aim, layouts: Sequence[Layout]) -> list[float]:
    if not layouts:
        return []
    kind = structure(layouts[0].structure)
    return kind.losses(aim.target, aim.constant, layouts)


def _rest(aim: _Aim, main: Layout) -> _Aim:
    """What the first term of a sum leaves to the second."""
    kind, target = structure(main.structure), aim.target
    dense = kind.quick_fit(target, main)
    left = replace(target, product=target.product - dense @ target.full_gram())
    return _Aim(left, predicted_loss(dense, target, aim.constant))


def _offered(
    entry: LayerPlan, layer: Layer, method: Spec, sharing: int
) -> Iterator[tuple[Choice, int, tuple[Terms, ...]]]:
    """Choices, their parameters and the terms of every part."""
    readers = sharing * len(entry.parts)
    for fraction in FRACTIONS:
        choice = Choice(method, target=fraction)
        try:
            terms = tuple(
                plan_terms(choice, Site(layer.in_features, part.size, layer.side), readers)
                for part in layer.parts
            )
        except Refusal:
            continue
        cost = sum(term_cost(term, readers, 1) for part in terms for term in part)
        if cost < entry.dense_parameters:
            yield choice, round(cost), terms


def _aims(entry: LayerPlan, weight: Tensor, worth: Worth, damping: float) -> Iterator[_Aim]:
    gram = worth.moment(centred=entry.bias)
    gram = gram + damping * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
    curvature = worth.curvature / worth.rows
    start = 0
    for part in entry.parts:
        stop = start + part.out_features
        rows = weight[start:stop].double()
        curve = damped_curvature(curvature[start:stop, start:stop], CURVATURE_DAMPING)
        target = Target(rows @ gram, gram, curvature=curve)
        yield _Aim(target, float(curved_constant(rows, gram, curve)))
        start = stop
