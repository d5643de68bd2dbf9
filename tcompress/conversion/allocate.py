"""Which size every layer gets: a budget is spent where it saves the most predicted loss.

One label-free backward pass gives the moments of every layer's inputs and output gradients. With
them the loss of every way to store a layer is known before anything is converted, in one unit for
all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tcompress.conversion.backward import Worth
from tcompress.conversion.fit import CURVATURE_DAMPING
from tcompress.linalg.curvature import (
    curved_constant,
    damped_curvature,
    lowrank_losses,
    lowrank_spectrum,
)
from tcompress.planning.budget import BudgetSite, Option, allocate
from tcompress.planning.entries import LayerPlan
from tcompress.planning.planner import Choice
from tcompress.structures import Spec, Target
from tcompress.structures.lowrank import LowRankSpec

RANKS = 96  # sizes that a layer is offered, at most


@dataclass(frozen=True)
class Sized:
    """A layer as the allocator sees it.

    Attributes:
        key: Weight name in the checkpoint.
        site: Its options; labels are choices.
    """

    key: str
    site: BudgetSite


def size_options(
    entry: LayerPlan, weight: Tensor, worth: Worth, methods: Sequence[Spec], damping: float
) -> Sized:
    """Lists what a layer may become, with parameters and predicted losses.

    Args:
        entry: Plan of the layer, whose parts are sized alike.
        weight: Dense weight.  # (out, in)
        worth: What its inputs and outputs are worth.
        methods: Methods to choose among.
        damping: Ridge on the input moment, as a fraction of its mean diagonal.
    """
    targets = list(_targets(entry, weight, worth, damping))
    options = [
        Option(cost, loss * worth.rows, choice)
        for method in methods
        for choice, cost, loss in _options(entry, method, targets)
    ]
    key = f"{entry.name}.{entry.parameter}"
    return Sized(key, BudgetSite(key, options, entry.dense_parameters))


def choose(sized: Sequence[Sized], target: float) -> dict[str, Choice | None]:
    """Spends a budget: a fraction of the parameters of all these layers.

    Raises:
        PlanError: Even the smallest options do not fit.
    """
    budget = int(target * sum(item.site.dense for item in sized))
    chosen = allocate([item.site for item in sized], budget).choices
    return {
        item.key: option.label if isinstance(option.label, Choice) else None
        for item, option in zip(sized, chosen, strict=True)
    }


@dataclass(frozen=True)
class _Aim:
    target: Target
    constant: Tensor


def _targets(entry: LayerPlan, weight: Tensor, worth: Worth, damping: float) -> Iterator[_Aim]:
    gram = worth.moment(centred=entry.bias)
    gram = gram + damping * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
    curvature = worth.curvature / worth.rows
    start = 0
    for part in entry.parts:
        stop = start + part.out_features
        rows = weight[start:stop].double()
        curve = damped_curvature(curvature[start:stop, start:stop], CURVATURE_DAMPING)
        target = Target(rows @ gram, gram, curvature=curve)
        yield _Aim(target, curved_constant(rows, gram, curve))
        start = stop


def _options(
    entry: LayerPlan, method: Spec, aims: Sequence[_Aim]
) -> Iterator[tuple[Choice, int, float]]:
    if isinstance(method, LowRankSpec):
        yield from _lowrank(method, aims)
        return
    raise NotImplementedError


def _lowrank(method: LowRankSpec, aims: Sequence[_Aim]) -> Iterator[tuple[Choice, int, float]]:
    losses = [_rank_losses(aim) for aim in aims]
    widths = sum(sum(aim.target.product.shape) for aim in aims)
    least = min(len(item) for item in losses)
    step = max(1, least // RANKS)
    for rank in range(1, least, step):
        loss = sum(float(item[rank]) for item in losses)
        yield Choice(method.model_copy(update={"rank": rank})), rank * widths, loss


def _rank_losses(aim: _Aim) -> Tensor:
    target = aim.target
    assert target.curvature is not None
    spectrum = lowrank_spectrum(target.product, target.full_gram(), target.curvature)
    return lowrank_losses(spectrum, aim.constant)
