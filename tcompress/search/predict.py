"""What every layer may become, what that is predicted to lose, and how far off this is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import exp, fsum, inf, log

import torch
from torch import Tensor

from tcompress.fitting.layer_fits import (
    CURVATURE_DAMPING,
    LayerMoments,
    LayerStatistics,
    fit_layers,
)
from tcompress.linalg.fits import curved_constant, damped_curvature
from tcompress.linalg.moments import Moments
from tcompress.planning.costs import Choice, plan_terms, term_cost
from tcompress.planning.entries import Form, LayerPlan
from tcompress.roles import Block
from tcompress.search.knapsack import BudgetSite, Option
from tcompress.structures import Layout, Refusal, Site, Spec, Target, structure
from tcompress.structures.base import predicted_loss
from tcompress.structures.modules.linear import PartLayout

# One label-free backward pass gives the moments of every layer's inputs and output gradients. With
# them the loss of every way to store a layer is known before anything is converted, in one unit for
# all layers (methods: Which error matters, and where to spend parameters).


Parts = tuple[PartLayout, ...]

SMALLEST, STEP = 0.01, 1.06
FRACTIONS = tuple(SMALLEST * STEP**n for n in range(78))
"""Kept fractions that a layer is offered, up to nine tenths."""


@dataclass
class LayerCandidates:
    """What one layer may become: options by name of the method, labelled with layouts."""

    key: str  # weight name in the checkpoint
    role: str
    dense: int  # its parameters
    left_out: float  # predicted loss of leaving it out
    unit: float = 1  # what one parameter costs: 1, or its bytes
    time: int = 0  # nanoseconds that it takes as it is, where time counts
    offers: dict[str, list[Option]] = field(default_factory=dict)
    quick: dict[str, list[Option]] = field(default_factory=dict)
    """Offers before calibration fits corrected the losses."""
    alone: dict[str, list[Option]] = field(default_factory=dict)
    """What a method offers where all layers take it."""

    def closest(self, method: str, fraction: float) -> Option | None:
        """Picks the option of a method that is closest to a kept fraction, in proportion."""
        wanted = log(fraction * self.dense)
        options = self.offers.get(method, ())
        return min(options, key=lambda own: abs(log(max(1, own.cost)) - wanted), default=None)

    def site(self, methods: Sequence[str], *, may_stay: bool, timed: bool = False) -> BudgetSite:
        """Returns what a budget may choose from; where no method can, a layer stays dense.

        Labels say what becomes of the layer, by its key; where `timed`, time is what it costs.
        """
        options = [option for name in methods for option in self.offers.get(name, ())]
        priced = [
            replace(
                own,
                cost=own.time if timed else round(own.cost * self.unit),
                label=((self.key, Form(own.label)),),  # type: ignore[arg-type]
            )
            for own in options
        ]
        dense = self.time if timed else round(self.dense * self.unit)
        return BudgetSite(self.key, priced, dense, may_stay or not priced, self.time)


FitTarget = tuple[Target, float]
"""What the fit of one output split of a layer aims at, and what it costs to leave it out."""


def options_of(
    entry: LayerPlan,
    sites: Sequence[Site],
    aims: Sequence[FitTarget],
    specs: Sequence[Spec],
    fractions: Sequence[float],
    *,
    residual_rank: int,
    rows: int,
    sharing: int,
    calibrated: bool,
) -> list[Option]:
    """Lists what a layer may become with one method, with parameters and predicted losses.

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
            cost = sum(term_cost(layout, readers, 1) for own in terms for layout in own)
            parts = tuple(
                PartLayout(name=site.role, terms=own)
                for site, own in zip(sites, terms, strict=True)
            )
            if parts != before and cost < entry.dense_parameters:
                offered.append((parts, round(cost)))
            before = parts
        if offered:
            losses = [
                split_losses(aim, [parts[index].terms for parts, _ in offered])
                for index, aim in enumerate(aims)
            ]
            return [
                Option(cost, max(0.0, sum(own[place] for own in losses)) * rows, parts)
                for place, (parts, cost) in enumerate(offered)
            ]
    return []


def fine_fractions(entry: LayerPlan) -> tuple[float, ...]:
    """Kept fractions close enough that no rank is passed over."""
    widest = max(part.dense_features for part in entry.parts)
    least = min(part.dense_features for part in entry.parts)
    step = (entry.in_features + least) / (2.0 * entry.in_features * widest)
    return tuple(step * n for n in range(1, int(1 / step) + 1))


def split_losses(aim: FitTarget, offered: Sequence[tuple[Layout, ...]]) -> list[float]:
    """Predicts the loss of every way to store one weight.

    A low-rank summand beside another one is judged by what the other leaves over, once for all
    ranks. Where the other one differs, one pair is, and the rest by what the others lose alone.
    """
    alone = [index for index, terms in enumerate(offered) if len(terms) == 1]
    pairs = [index for index, terms in enumerate(offered) if len(terms) > 1]
    mains = {offered[index][0] for index in pairs}
    found = _losses(aim, [offered[index][0] for index in alone])
    if len(mains) > 1:
        own = _losses(aim, [offered[index][0] for index in pairs])
        middle = len(pairs) // 2
        main, residual = offered[pairs[middle]]
        both = _losses(_remainder(aim, main), [residual])[0]
        ratio = both / own[middle] if own[middle] > 0 else 0.0
        found += [ratio * loss for loss in own]
    elif mains:
        rest = _remainder(aim, mains.pop())
        found += _losses(rest, [offered[index][1] for index in pairs])
    losses = dict(zip([*alone, *pairs], found, strict=True))
    return [losses[index] for index in range(len(offered))]


def _losses(aim: FitTarget, layouts: Sequence[Layout]) -> list[float]:
    if not layouts:
        return []
    return [*structure(layouts[0].structure).losses(*aim, layouts)]


def _remainder(aim: FitTarget, main: Layout) -> FitTarget:
    """What the first summand leaves to the second."""
    target, constant = aim
    dense = structure(main.structure).quick_fit(target, main)
    left = replace(target, product=target.product - dense @ target.full_gram())
    return left, predicted_loss(dense, target, constant)


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


# Without data no model can be run with a candidate in it (see `substitution.py`). Quick predictions
# leave out what takes long: fitted transforms, terms of a sum that make room for each other. This
# depends on the method and on the role of a layer far more than on its depth; so the layers of one
# or two blocks are fitted as the conversion will. The ratio of both losses corrects the predictions
# for all layers of a role.


MARGIN = 1.15
"""A method stays in question for a role while it is at most so much worse than the best one."""

AROUND = 4.0
"""Kept fractions that count for that: up to so many times less or more than the budget's."""

LEAST, MOST = 0.02, 5.0  # bounds of a ratio that is believed


def blocks_to_fit(blocks: Sequence[Block]) -> frozenset[str]:
    """Names the blocks to fit: of those alike the last and, of four or more, one in the middle."""
    kinds: dict[frozenset[str], list[str]] = defaultdict(list)
    for block in blocks:
        kinds[frozenset(layer.role for layer in block.layers)].append(block.name)
    found = []
    for names in kinds.values():
        found += [names[-1], *([names[len(names) // 2]] if len(names) > 3 else [])]
    return frozenset(found)


@dataclass
class WeightFits:
    """What real fits gain over predictions, by method and role."""

    fraction: float  # kept fraction that the budget comes to
    _ratios: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _dropped: set[tuple[str, str]] = field(default_factory=set)

    def fit(
        self,
        method: str,
        group: Sequence[LayerPlan],
        layers: Mapping[str, LayerCandidates],
        statistics: Mapping[str, LayerStatistics],
        damping: float,
    ) -> None:
        """Fits layers in the sizes that `closest` picks, and compares losses with predictions."""
        known = {entry.name: statistics[entry.name].whole for entry in group}
        moments = []
        for of in known.values():
            zero = torch.zeros_like(of.gram[0])
            moments.append([LayerMoments(Moments(of.gram, of.gram, of.gram, zero, zero, 1))])
        fitted = fit_layers(
            group,
            [statistics[entry.name].weight for entry in group],
            moments,
            dtype=torch.float32,
            damping=damping,
            evaluation_moments=known,
        )
        for entry, layer in zip(group, fitted, strict=True):
            own = layers[entry.key]
            option = own.closest(method, self.fraction)
            if option is not None and option.loss > 0 and layer.loss is not None:
                ratio = layer.loss * own.left_out / option.loss
                self._ratios[method, own.role].append(min(MOST, max(LEAST, ratio)))

    def drop(self, layers: Iterable[LayerCandidates], spared: Collection[str] = ()) -> None:
        """Drops methods that lose clearly more than others for a role, at all sizes that count."""
        for item in layers:
            curves = {name: self.corrected(item, name) for name in item.offers}
            for name in curves.keys() - set(spared):
                others = [o for other, options in curves.items() if other != name for o in options]
                if others and not self._competes(item, curves[name], others):
                    self._dropped.add((name, item.role))

    def keeps(self, method: str, role: str) -> bool:
        return (method, role) not in self._dropped

    def corrected(self, layer: LayerCandidates, method: str) -> list[Option]:
        """Returns the options of one method with losses as real fits would have them."""
        ratio, most = self.ratio(method, layer.role), layer.left_out
        options = layer.offers.get(method, ())
        return [replace(o, loss=min(o.loss * ratio, max(o.loss, most))) for o in options]

    def ratio(self, method: str, role: str) -> float:
        """Returns the factor for predicted losses: of the role, of all roles, or one."""
        everywhere = (own for (name, _), own in self._ratios.items() if name == method)
        found = self._ratios.get((method, role)) or [*chain.from_iterable(everywhere)]
        return exp(fsum(map(log, found)) / len(found)) if found else 1.0

    def _competes(
        self, item: LayerCandidates, own: Sequence[Option], others: Sequence[Option]
    ) -> bool:
        low, high = (self.fraction * item.dense * by for by in (1 / AROUND, AROUND))
        for option in own:
            rivals = (other.loss for other in others if other.cost <= option.cost)
            if low <= option.cost <= high and option.loss <= MARGIN * min(rivals, default=inf):
                return True
        return False
