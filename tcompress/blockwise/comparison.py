"""Distance of a model's output from the dense model's, on samples held out and without labels."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from math import exp, fsum, log
from statistics import fmean
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import normalize

from tcompress.blockwise.output_sampler import OutputSampler


class OutputComparison:
    """Sums of the differences of both models' outputs, by source of the samples."""

    def __init__(self, sampler: OutputSampler) -> None:
        self._sampler = sampler
        self._distance: dict[str, float] = defaultdict(float)
        self._samples: Counter[str] = Counter()
        self._same: Counter[str] = Counter()  # scores whose best class or token stays the best
        self._scored: Counter[str] = Counter()
        self._vectors: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def add(self, source: str, dense: Any, new: Any, batch: Mapping[str, Tensor]) -> float:
        """Add what both models put out for a batch, and return its change per sample."""
        change, samples = self._sampler.change(dense, new, batch), len(next(iter(batch.values())))
        self._distance[source] += change
        self._samples[source] += samples
        scored, pairs = self._sampler.pairs(dense, new, batch)
        for exact, changed, mask in pairs:
            if scored and exact.shape[-1] > 1:
                same = exact.argmax(-1) == changed.argmax(-1)
                counts = torch.ones_like(same) if mask is None else mask.bool()
                self._same[source] += int((same & counts).sum())
                self._scored[source] += int(counts.sum())
            elif not scored:
                self._vectors[source].append((_mean(exact, mask), _mean(changed, mask)))
        return change / samples

    @property
    def change(self) -> float:
        """Change of the output per sample, in the unit of predicted losses.

        Of several sources it is the geometric mean: none counts more because its samples change
        more, whatever the model.
        """
        if len(self._samples) == 1 or not all(self._distance.values()):
            return fsum(self._distance.values()) / self._samples.total()
        return exp(fmean(map(log, self.changes.values())))

    @property
    def changes(self) -> dict[str, float]:
        """The same by source."""
        return {name: self._distance[name] / count for name, count in self._samples.items()}

    @property
    def agreement(self) -> dict[str, float]:
        """Agreement of both models by source; 1 is in everything.

        Of scores it is the share whose best class or token is the same, of embeddings and states
        the rank correlation of the similarities of all samples.
        """
        agreements = {name: self._same[name] / count for name, count in self._scored.items()}
        for name, pairs in self._vectors.items():
            exact, changed = (
                _similarities(torch.cat(vectors)) for vectors in zip(*pairs, strict=True)
            )
            ranked = spearmanr(exact, changed).statistic if len(exact) > 2 else np.nan
            if not np.isnan(ranked):
                agreements[name] = float(ranked)
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
