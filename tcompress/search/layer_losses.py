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
from tcompress.planning.entries import LayerPlan
from tcompress.roles import Block
from tcompress.search.candidates import PARAMETERS, Candidate, Site
from tcompress.structures import Layout, Refusal, Spec, Target, structure
from tcompress.structures import Site as StructureSite
from tcompress.structures.base import predicted_loss
from tcompress.structures.modules.linear import PartLayout

# One label-free backward pass gives the moments of every layer's inputs and output gradients. With
# them the loss of every way to store a layer is known before anything is converted, in one unit for
# all layers (methods: Which error matters, and where to spend parameters).


Parts = tuple[PartLayout, ...]

SMALLEST, STEP = 0.01, 1.06
FRACTIONS = tuple(SMALLEST * STEP**n for n in range(78))
"""Kept fractions that a layer is offered, up to nine tenths."""


FitTarget = tuple[Target, float]
"""What the fit of one output split of a layer aims at, and what it costs to leave it out."""


def options_of(
    entry: LayerPlan,
    sites: Sequence[StructureSite],
    aims: Sequence[FitTarget],
    specs: Sequence[Spec],
    fractions: Sequence[float],
    *,
    residual_rank: int,
    rows: int,
    sharing: int,
    calibrated: bool,
) -> list[tuple[Parts, int, float]]:
    """List what a layer may become with one method: layouts, parameters and predicted losses.

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
                split_losses(aim, [parts[index].terms for parts, _ in offered])
                for index, aim in enumerate(aims)
            ]
            return [
                (parts, cost, max(0.0, sum(split[index] for split in losses)) * rows)
                for index, (parts, cost) in enumerate(offered)
            ]
    return []


def fine_fractions(entry: LayerPlan) -> tuple[float, ...]:
    """Kept fractions close enough that no rank is passed over."""
    widest = max(part.dense_features for part in entry.parts)
    narrowest = min(part.dense_features for part in entry.parts)
    step = (entry.in_features + narrowest) / (2.0 * entry.in_features * widest)
    return tuple(step * n for n in range(1, int(1 / step) + 1))


def split_losses(aim: FitTarget, offered: Sequence[tuple[Layout, ...]]) -> list[float]:
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
    chosen = []
    for names in kinds.values():
        chosen += [names[-1], *([names[len(names) // 2]] if len(names) > 3 else [])]
    return frozenset(chosen)


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
        sites: Mapping[str, Site],
        statistics: Mapping[str, LayerStatistics],
    ) -> None:
        """Fit layers in the sizes that `closest` picks, and compare losses with predictions."""
        evaluation = {entry.name: statistics[entry.name].whole for entry in group}
        moments = []
        for of in evaluation.values():
            zero = torch.zeros_like(of.gram[0])
            moments.append([LayerMoments(Moments(of.gram, of.gram, of.gram, zero, zero, 1))])
        fitted = fit_layers(
            group,
            [statistics[entry.name].weight for entry in group],
            moments,
            dtype=torch.float32,
            damping=0.0,
            evaluation_moments=evaluation,
        )
        for entry, layer in zip(group, fitted, strict=True):
            site = sites[entry.key]
            candidate = site.closest(method, self.fraction)
            if candidate is not None and candidate.loss > 0 and layer.loss is not None:
                ratio = layer.loss * site.left_out / candidate.loss
                self._ratios[method, site.role].append(min(MOST, max(LEAST, ratio)))

    def drop(self, sites: Iterable[Site], spared: Collection[str] = ()) -> None:
        """Drop methods that lose clearly more than others for a role, at all sizes that count."""
        for site in sites:
            corrected = self.corrected(site)
            for name in {*site.methods} - set(spared):
                rivals = [item for item in corrected.candidates if item.method != name]
                if rivals and not self._competes(corrected, name, rivals):
                    self._dropped.add((name, site.role))

    def keeps(self, method: str, role: str) -> bool:
        """Tell whether a method is still offered to layers of a role."""
        return (method, role) not in self._dropped

    def corrected(self, site: Site) -> Site:
        """Return a layer with losses as real fits would have them."""
        ratios = {name: self.ratio(name, site.role) for name in site.methods}

        def loss(item: Candidate) -> float:
            return min(item.loss * ratios[item.method], max(item.loss, site.left_out))

        candidates = (replace(item, loss=loss(item)) for item in site.candidates)
        return replace(site, candidates=tuple(candidates))

    def ratio(self, method: str, role: str) -> float:
        """Return the factor for predicted losses: of the role, of all roles, or one."""
        everywhere = (ratios for (name, _), ratios in self._ratios.items() if name == method)
        ratios = self._ratios.get((method, role)) or [*chain.from_iterable(everywhere)]
        return exp(fsum(map(log, ratios)) / len(ratios)) if ratios else 1.0

    def _competes(self, site: Site, method: str, rivals: Sequence[Candidate]) -> bool:
        dense = site.dense[PARAMETERS]
        low, high = (self.fraction * dense * by for by in (1 / AROUND, AROUND))
        for item in site.of(method):
            size = item.costs[PARAMETERS]
            losses = (rival.loss for rival in rivals if rival.costs[PARAMETERS] <= size)
            if low <= size <= high and item.loss <= MARGIN * min(losses, default=inf):
                return True
        return False
