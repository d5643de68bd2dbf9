"""Percentile bootstrap over examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tcompress.artifact.manifest import Interval
from tcompress.evaluation.statistics import Array, Statistic

_CELLS = 2**20  # of counts that are held at a time
_LEVEL = 0.95


def resampled(statistics: Sequence[Statistic], times: int, seed: int) -> list[Array]:
    """Computes numbers on resamples of their examples.

    The resamples depend on the seed and the number of examples alone, so that the numbers of two
    models are paired.

    Args:
        statistics: Numbers on the same examples.
        times: How many resamples.
        seed: Seed of the draw.

    Returns:
        Values of each number.  # (times,) each
    """
    parts: list[list[Array]] = [[] for _ in statistics]
    for counts in _draws(statistics[0].units, times, seed):
        for part, statistic in zip(parts, statistics, strict=True):
            part.append(statistic.resampled(counts))
    return [np.concatenate([np.empty(0), *part]) for part in parts]


def interval(values: Array) -> Interval | None:
    """Gives the middle 95 % of resampled values; None if there are none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = np.percentile(finite, [50 * (1 - _LEVEL), 50 * (1 + _LEVEL)])
    return Interval(low=float(low), high=float(high), level=_LEVEL)


def _draws(units: int, times: int, seed: int) -> Iterator[Array]:
    """Yields how often examples are drawn, for some resamples at a time.  # (some, units)."""
    generator = np.random.default_rng(seed)
    most = max(_CELLS // units, 1)
    for first in range(0, times, most):
        some = min(most, times - first)
        drawn = generator.integers(units, size=(some, units))
        drawn += units * np.arange(some)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=some * units)
        yield counts.reshape(some, units).astype(float)
