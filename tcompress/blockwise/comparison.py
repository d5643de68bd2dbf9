"""Distance of a model's output from the dense model's, on samples held out and without labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import exp, fsum, log
from statistics import fmean
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import normalize

from tcompress import processes
from tcompress.blockwise.output_sampler import OutputSampler


@dataclass(frozen=True)
class _Difference:
    """Differences of both models' outputs for one batch."""

    index: int  # of the batch
    source: str
    samples: int
    change: float
    same: int  # scores whose best class or token stays the best
    scored: int
    vectors: tuple[tuple[Tensor, Tensor], ...]


class OutputComparison:
    """Differences of both models' outputs, by source of the samples."""

    def __init__(self, sampler: OutputSampler, differences: Iterable[_Difference] = ()) -> None:
        self._sampler = sampler
        self._differences = [*differences]

    def add(
        self, source: str, dense: Any, new: Any, batch: Mapping[str, Tensor], index: int = 0
    ) -> float:
        """Add what both models put out for a batch, and return its change per sample."""
        change, samples = self._sampler.change(dense, new, batch), len(next(iter(batch.values())))
        scored, pairs = self._sampler.pairs(dense, new, batch)
        unchanged = counted = 0
        vectors: list[tuple[Tensor, Tensor]] = []
        for exact, changed, mask in pairs:
            if scored and exact.shape[-1] > 1:
                same = exact.argmax(-1) == changed.argmax(-1)
                counts = torch.ones_like(same) if mask is None else mask.bool()
                unchanged += int((same & counts).sum())
                counted += int(counts.sum())
            elif not scored:
                vectors.append((_mean(exact, mask), _mean(changed, mask)))
        facts = (index, source, samples, change, unchanged, counted, tuple(vectors))
        self._differences.append(_Difference(*facts))
        return change / samples

    def merged(self) -> OutputComparison:
        """Return the comparison of all batches, of which every process has seen its own."""
        differences = chain.from_iterable(processes.gathered(self._differences))
        return OutputComparison(self._sampler, sorted(differences, key=lambda item: item.index))

    @property
    def _by_source(self) -> dict[str, list[_Difference]]:
        sources: dict[str, list[_Difference]] = {}
        for item in self._differences:
            sources.setdefault(item.source, []).append(item)
        return sources

    @property
    def change(self) -> float:
        """Change of the output per sample, in the unit of predicted losses.

        Of several sources it is the geometric mean: none counts more because its samples change
        more, whatever the model.
        """
        changes = self.changes
        if len(changes) == 1 or not all(changes.values()):
            whole = fsum(item.change for item in self._differences)
            return whole / sum(item.samples for item in self._differences)
        return exp(fmean(map(log, changes.values())))

    @property
    def changes(self) -> dict[str, float]:
        """The same by source."""
        return {
            source: fsum(item.change for item in items) / sum(item.samples for item in items)
            for source, items in self._by_source.items()
        }

    @property
    def agreement(self) -> dict[str, float]:
        """Agreement of both models by source; 1 is in everything.

        Of scores it is the share whose best class or token is the same, of embeddings and states
        the rank correlation of the similarities of all samples.
        """
        agreements: dict[str, float] = {}
        for source, items in self._by_source.items():
            if counted := sum(item.scored for item in items):
                agreements[source] = sum(item.same for item in items) / counted
            if not (pairs := [pair for item in items for pair in item.vectors]):
                continue
            exact, changed = (
                _similarities(torch.cat(vectors)) for vectors in zip(*pairs, strict=True)
            )
            ranked = spearmanr(exact, changed).statistic if len(exact) > 2 else np.nan
            if not np.isnan(ranked):
                agreements[source] = float(ranked)
        return agreements

    @property
    def lost(self) -> float | None:
        """Disagreement: what is missing to full agreement, as the mean of all sources."""
        agreements = self.agreement
        return 1 - fmean(agreements.values()) if agreements else None


def _mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """One vector for each sample, float32 on the CPU."""
    flat = states.float().reshape(len(states), -1, states.shape[-1])
    if mask is None:
        return flat.mean(1).cpu()
    counts = mask.reshape(len(states), -1, 1).to(flat)
    return ((flat * counts).sum(1) / counts.sum(1).clamp_min(1)).cpu()


def _similarities(vectors: Tensor) -> Any:
    """Cosines of all pairs of vectors.  # (n, d) -> (n (n - 1) / 2,)."""
    unit = normalize(vectors.double(), dim=-1)
    rows, columns = np.triu_indices(len(unit), 1)
    return (unit @ unit.T).numpy()[rows, columns]
