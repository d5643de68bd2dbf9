"""What flows through a search: what it is about, sites, their candidates, and what these cost.

What one layer may become is predicted here too. One label-free backward pass gives the moments of
every layer's inputs and output gradients. With them the loss of every way to store a layer is known
before anything is converted, in one unit for all layers (methods: Which error matters, and where to
spend parameters).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
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

PARAMETERS, BYTES, NANOSECONDS = "parameters", "bytes", "nanoseconds"  # units of resources

Costs = Mapping[str, int]  # a whole number for each resource that is counted


@dataclass(frozen=True, eq=False)
class SearchInputs:
    """A model, and what is asked of it."""

    source: SourceModel
    recipe: Convert  # what is to be done to these blocks
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
    forms: tuple[tuple[str, LayerForm | None], ...]
    """What layers become, by weight name in the checkpoint; None for those that stay dense."""
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

    def costs_of(self, parameters: int) -> Costs:
        """Return what so many parameters take of each resource that is counted here."""
        units = {BYTES: self.unit}
        return {name: round(parameters * units.get(name, 1)) for name in self.dense}

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

FRACTIONS = tuple(0.01 * 1.06**n for n in range(78))  # kept ones on offer, up to nine tenths

FitTarget = tuple[Target, float]
"""What the fit of one output split of a layer aims at, and what it costs to leave it out."""


def layer_candidates(
    site: Site,
    splits: Sequence[tuple[StructureSite, FitTarget]],
    method: str,
    specs: Sequence[Spec],
    fractions: Sequence[float],
    *,
    residual_rank: int,
    rows: int,
    readers: int,
    calibrated: bool,
) -> tuple[Candidate, ...]:
    """List what a layer may become with one method; fractions ascend.

    Of the options the first that the layer's dimensions allow counts. Targets of its output splits
    are means over so many rows of data.
    """

    def planned(spec: Spec, fraction: float) -> Parts | None:
        choice, parts = Choice(spec, residual_rank, fraction), []
        for split, _ in splits:
            try:
                terms = plan_terms(choice, split, readers, calibrated=calibrated)
            except Refusal:
                return None
            parts.append(PartLayout(name=split.role, terms=terms))
        return tuple(parts)

    for spec in specs:
        layouts = filter(None, (planned(spec, fraction) for fraction in fractions))
        sized = [(parts, _parameters(parts, readers)) for parts, _ in groupby(layouts)]
        offered = [(parts, size) for parts, size in sized if size < site.dense[PARAMETERS]]
        if offered:
            losses = [
                _split_losses(aim, [parts[index].terms for parts, _ in offered])
                for index, (_, aim) in enumerate(splits)
            ]
            totals = [max(0.0, sum(of_splits)) * rows for of_splits in zip(*losses, strict=True)]
            return tuple(
                Candidate(method, ((site.key, LayerForm(parts)),), loss, site.costs_of(round(size)))
                for (parts, size), loss in zip(offered, totals, strict=True)
            )
    return ()


def _parameters(parts: Parts, readers: int) -> float:
    return sum(term_cost(layout, readers, 1) for part in parts for layout in part.terms)


def fine_fractions(entry: LayerPlan) -> tuple[float, ...]:
    """Kept fractions close enough that no rank is passed over."""
    widths = [part.dense_features for part in entry.parts]
    step = (entry.in_features + min(widths)) / (2.0 * entry.in_features * max(widths))
    return tuple(step * n for n in range(1, int(1 / step) + 1))


def _split_losses(aim: FitTarget, offered: Sequence[tuple[Layout, ...]]) -> list[float]:
    """Predicts the loss of every way to store one weight.

    A low-rank summand beside another one is judged by what the other leaves over, once for all
    ranks. Where the other one differs, one pair is, and the rest by what the others lose alone.
    """
    pairs = [terms for terms in offered if len(terms) > 1]
    mains = [main for main, _ in pairs]
    middle = len(pairs) // 2
    of_pairs: list[float] = []
    if len({*mains}) > 1:
        of_mains = _losses(aim, mains)
        [both] = _losses(_remainder(aim, mains[middle]), [pairs[middle][1]])
        ratio = both / of_mains[middle] if of_mains[middle] > 0 else 0.0
        of_pairs = [ratio * loss for loss in of_mains]
    elif pairs:
        of_pairs = _losses(_remainder(aim, mains[0]), [residual for _, residual in pairs])
    singles = iter(_losses(aim, [terms[0] for terms in offered if len(terms) == 1]))
    doubles = iter(of_pairs)
    return [next(doubles if len(terms) > 1 else singles) for terms in offered]


def _losses(aim: FitTarget, layouts: Sequence[Layout]) -> list[float]:
    return structure(layouts[0].structure).losses(*aim, layouts) if layouts else []


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
    aims = []
    for start, stop in pairwise(accumulate((p.dense_features for p in entry.parts), initial=0)):
        rows = weight[start:stop].double()
        curve = damped_curvature(curvature[start:stop, start:stop], CURVATURE_DAMPING)
        target = Target(rows @ gram, gram, curvature=curve)
        aims.append((target, float(curved_constant(rows, gram, curve))))
    return aims
