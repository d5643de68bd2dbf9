"""What flows through a search: what it is about, sites, their candidates, and what these cost.

What one layer may become is predicted here too. One label-free backward pass gives the moments of
every layer's inputs and output gradients. With them the loss of every way to store a layer is known
before anything is converted, in one unit for all layers (methods: Which error matters, and where to
spend parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log

import torch
from torch import Tensor

from tcompress.data.calibration import CalibrationData
from tcompress.fitting.channel_orders import ChannelOrder
from tcompress.fitting.layer_fits import CURVATURE_DAMPING
from tcompress.fitting.workdir import FitWorkplace
from tcompress.linalg.fits import curved_constant, damped_curvature
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.method_options import NARROWING
from tcompress.planning.costs import Choice, plan_terms, term_cost
from tcompress.planning.entries import LayerForm, LayerPlan, Plan
from tcompress.progress import Progress
from tcompress.structures import Layout, Refusal, Spec, Target, structure
from tcompress.structures import Site as StructureSite
from tcompress.structures.base import predicted_loss
from tcompress.structures.modules.linear import PartLayout

PARAMETERS, BYTES, NANOSECONDS = "parameters", "bytes", "nanoseconds"
"""Resources, by the unit that they are counted in."""

Costs = Mapping[str, int]  # a whole number for each resource that is counted

Forms = tuple[tuple[str, LayerForm | None], ...]
"""What layers become, by weight name in the checkpoint; None for those that stay dense."""


@dataclass(frozen=True, eq=False)
class SearchInputs:
    """A model, and what is asked of it."""

    source: SourceModel
    recipe: Convert  # what was asked for
    plan: Plan  # a plan of equal sizes
    data: CalibrationData | None  # to measure on; what is held out is for comparisons alone
    workdir: FitWorkplace  # where moments are kept
    device: torch.device
    progress: Progress
    several: bool = False  # whether each method that takes all layers may be an answer by itself


@dataclass(frozen=True)
class Candidate:
    """What could stand at a site."""

    method: str  # name of the structure; empty where there are several, or none
    forms: Forms  # what every layer of the site becomes
    loss: float  # predicted loss of the model, in one unit for all sites
    costs: Costs

    @property
    def form(self) -> LayerForm:
        """The form of the one layer that it is for."""
        [(_, form)] = self.forms
        assert form is not None
        return form

    def costing(self, unit: str, cost: int) -> Candidate:
        """Return the same that takes so much of one more resource."""
        return replace(self, costs={**self.costs, unit: cost})

    def scaled(self, factor: float) -> Candidate:
        """Return the same with another loss, in proportion."""
        return replace(self, loss=self.loss * factor)


@dataclass(frozen=True)
class Site:
    """A layer, or layers that are chosen together, and what may stand there."""

    keys: tuple[str, ...]  # names of the weights in the checkpoint
    role: str  # of the layer in its block
    dense: Costs  # what the site takes as it is
    candidates: tuple[Candidate, ...]  # in any order; useless ones do no harm
    left_out: float = 0.0  # predicted loss of leaving it out
    unit: float = 1.0  # bytes of one parameter where bytes are limited, else one
    may_stay: bool = True  # whether it may stay as it is, at no loss

    @property
    def key(self) -> str:
        """Name of its first weight, for messages too."""
        return self.keys[0]

    @property
    def stays(self) -> Candidate:
        """The site as it is."""
        return Candidate("", tuple((key, None) for key in self.keys), 0.0, self.dense)

    @property
    def every(self) -> tuple[Candidate, ...]:
        """All candidates, to stay among them."""
        return (*self.candidates, self.stays) if self.may_stay else self.candidates

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """Methods of its candidates, in their order."""
        return tuple(dict.fromkeys(item.method for item in self.candidates))

    def of(self, method: str) -> tuple[Candidate, ...]:
        return tuple(item for item in self.candidates if item.method == method)

    def offering(self, methods: Collection[str], *, may_stay: bool) -> Site:
        """Return the same with the candidates of these methods, in their order.

        Where no method has one, the layer stays dense.
        """
        offered = tuple(item for method in methods for item in self.of(method))
        return replace(self, candidates=offered, may_stay=may_stay or not offered)

    def closest(self, method: str, fraction: float) -> Candidate | None:
        """Pick the candidate of a method that is closest to a kept fraction, in proportion."""
        size = log(fraction * self.dense[PARAMETERS])

        def distance(item: Candidate) -> float:
            return abs(log(max(1, item.costs[PARAMETERS])) - size)

        return min(self.of(method), key=distance, default=None)


@dataclass(frozen=True)
class WidthSite(Site):
    """Layers that have channels in common, and the sizes that they may have together."""

    orders: tuple[ChannelOrder, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()  # of each candidate, by order

    @property
    def is_attention(self) -> bool:
        """Whether it is about whole heads, of what other sites tell the parts of."""
        return self.orders[0].coupling.kind == "heads"


def of_one_layer(methods: Collection[str]) -> list[str]:
    """List the methods whose candidates are of one layer."""
    return [name for name in methods if name != NARROWING]


# Candidates of one layer, and what they are predicted to lose.


Parts = tuple[PartLayout, ...]

SMALLEST, STEP = 0.01, 1.06
FRACTIONS = tuple(SMALLEST * STEP**n for n in range(78))
"""Kept fractions that a layer is offered, up to nine tenths."""


FitTarget = tuple[Target, float]
"""What the fit of one output split of a layer aims at, and what it costs to leave it out."""


def layer_candidates(
    method: str,
    specs: Sequence[Spec],
    entry: LayerPlan,
    sites: Sequence[StructureSite],
    aims: Sequence[FitTarget],
    fractions: Sequence[float],
    *,
    costs: Callable[[int], Costs],
    residual_rank: int,
    rows: int,
    sharing: int,
    calibrated: bool,
) -> tuple[Candidate, ...]:
    """List what a layer may become with one method.

    Sites and fit targets are those of its output splits. Of the options the first that the layer's
    dimensions allow counts; fractions ascend. Targets are means over so many rows of data.
    """
    readers = sharing * len(sites)
    for spec in specs:
        offered: list[tuple[Parts, int]] = []  # layouts that differ, and their parameters
        before: Parts = ()
        for fraction in fractions:
            choice = Choice(spec, residual_rank, fraction)
            try:
                terms = [plan_terms(choice, s, readers, calibrated=calibrated) for s in sites]
            except Refusal:
                continue
            cost = sum(term_cost(layout, readers, 1) for split in terms for layout in split)
            parts = tuple(
                PartLayout(name=site.role, terms=split)
                for site, split in zip(sites, terms, strict=True)
            )
            if parts != before and cost < entry.dense_parameters:
                offered.append((parts, round(cost)))
            before = parts
        if offered:
            losses = [
                _split_losses(aim, [parts[index].terms for parts, _ in offered])
                for index, aim in enumerate(aims)
            ]
            totals = [max(0.0, sum(of_splits)) * rows for of_splits in zip(*losses, strict=True)]
            return tuple(
                Candidate(method, ((entry.key, LayerForm(parts)),), loss, costs(parameters))
                for (parts, parameters), loss in zip(offered, totals, strict=True)
            )
    return ()


def fine_fractions(entry: LayerPlan) -> tuple[float, ...]:
    """Kept fractions close enough that no rank is passed over."""
    widest = max(part.dense_features for part in entry.parts)
    narrowest = min(part.dense_features for part in entry.parts)
    step = (entry.in_features + narrowest) / (2.0 * entry.in_features * widest)
    return tuple(step * n for n in range(1, int(1 / step) + 1))


def _split_losses(aim: FitTarget, offered: Sequence[tuple[Layout, ...]]) -> list[float]:
    """Predicts the loss of every way to store one weight.

    A low-rank summand beside another one is judged by what the other leaves over, once for all
    ranks. Where the other one differs, one pair is, and the rest by what the others lose alone.
    """
    single = [index for index, terms in enumerate(offered) if len(terms) == 1]
    pairs = [index for index, terms in enumerate(offered) if len(terms) > 1]
    mains = {offered[index][0] for index in pairs}
    predicted = _losses(aim, [offered[index][0] for index in single])
    if len(mains) > 1:
        main_losses = _losses(aim, [offered[index][0] for index in pairs])
        middle = len(pairs) // 2
        main, residual = offered[pairs[middle]]
        both = _losses(_remainder(aim, main), [residual])[0]
        ratio = both / main_losses[middle] if main_losses[middle] > 0 else 0.0
        predicted += [ratio * loss for loss in main_losses]
    elif mains:
        rest = _remainder(aim, mains.pop())
        predicted += _losses(rest, [offered[index][1] for index in pairs])
    losses = dict(zip([*single, *pairs], predicted, strict=True))
    return [losses[index] for index in range(len(offered))]


def _losses(aim: FitTarget, layouts: Sequence[Layout]) -> list[float]:
    if not layouts:
        return []
    return [*structure(layouts[0].structure).losses(*aim, layouts)]


def _remainder(aim: FitTarget, main: Layout) -> FitTarget:
    """What the first summand leaves to the second."""
    target, constant = aim
    dense = structure(main.structure).quick_fit(target, main)
    remainder = replace(target, product=target.product - dense @ target.full_gram())
    return remainder, predicted_loss(dense, target, constant)


def fit_targets_of(
    entry: LayerPlan, weight: Tensor, gram: Tensor, curvature: Tensor
) -> list[FitTarget]:
    """Lists what the fits of a layer's output splits aim at, in the norm of both moments.

    The moments of inputs are damped, those of gradients are not.
    """
    aims, start = [], 0
    for part in entry.parts:
        stop = start + part.dense_features
        rows = weight[start:stop].double()
        curve = damped_curvature(curvature[start:stop, start:stop], CURVATURE_DAMPING)
        target = Target(rows @ gram, gram, curvature=curve)
        aims.append((target, float(curved_constant(rows, gram, curve))))
        start = stop
    return aims
