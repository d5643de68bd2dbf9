"""Real fits of layers of one or two blocks, which correct what sizes are predicted to lose.

Without data no model can be run with a candidate in it (see `substitution.py`). Quick predictions
leave out what takes long: fitted transforms, terms of a sum that make room for each other. This
depends on the method and on the role of a layer far more than on its depth; so the layers of one
or two blocks are fitted as the conversion will. The ratio of both losses corrects the predictions
for all layers of a role.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import exp, fsum, inf, log

import torch

from tcompress.fitting.layer_fits import LayerMoments, LayerStatistics, fit_layers
from tcompress.linalg.moments import Moments
from tcompress.planning.entries import LayerPlan
from tcompress.roles import Block
from tcompress.search.candidates import PARAMETERS, Candidate, Site

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
        evaluation = {entry.name: statistics[entry.name] for entry in group}
        moments = []
        for gram in (item.gram for item in evaluation.values()):
            zero = torch.zeros_like(gram[0])
            moments.append([LayerMoments(Moments(gram, gram, gram, zero, zero, 1))])
        fitted = fit_layers(
            group,
            [item.weight for item in evaluation.values()],
            moments,
            dtype=torch.float32,
            damping=0.0,
            evaluation=evaluation,
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
