"""Averages over several sets: the mean of a number, which misleads less than one set does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import hypot
from statistics import fmean

from tcompress.artifact.manifest import Difference, Interval, Metric

AGREEMENT = "agreement"
"""Name of the number that compares a model with its baseline, labels unread."""


class Mean(Metric):
    """The mean of one number over several sets, however large each is; it is never stored."""

    sets: int
    mean_ratio: float | None  # mean of the sets' ratios

    @property
    def ratio(self) -> float | None:
        return None if self.difference is None else self.mean_ratio

    @property
    def label(self) -> str:
        return f"mean {self.name} of {self.sets} sets"

    @classmethod
    def of(cls, parts: Sequence[Metric]) -> Mean:
        """Average numbers of one name; facts that differ are listed by set."""
        against = [part.difference for part in parts if part.difference is not None]
        baselines, ratios = {item.baseline for item in against}, [part.ratio for part in parts]
        difference = None
        if len(against) == len(parts) and len(baselines) == 1:
            difference = Difference(
                baseline=baselines.pop(),
                baseline_value=fmean(item.baseline_value for item in against),
                baseline_interval=_mean_interval(
                    [(item.baseline_value, item.baseline_interval) for item in against]
                ),
                value=fmean(item.value for item in against),
                interval=_mean_interval([(item.value, item.interval) for item in against]),
            )
        facts = {key: [part.protocol.get(key) for part in parts] for key in parts[0].protocol}
        defined = [ratio for ratio in ratios if ratio is not None]
        return cls(
            name=parts[0].name,
            value=fmean(part.value for part in parts),
            higher_is_better=parts[0].higher_is_better,
            interval=_mean_interval([(part.value, part.interval) for part in parts]),
            difference=difference,
            protocol={k: v if any(x != v[0] for x in v) else v[0] for k, v in facts.items()},
            sets=len(parts),
            mean_ratio=fmean(defined) if difference and len(defined) == len(parts) else None,
        )


def _mean_interval(parts: Sequence[tuple[float, Interval | None]]) -> Interval | None:
    """Combine intervals of independent numbers to that of their mean (Zou and Donner, 2008)."""
    pairs = [(value, interval) for value, interval in parts if interval is not None]
    if len(pairs) < len(parts):
        return None
    middle = fmean(value for value, _ in pairs)
    below = hypot(*(value - interval.low for value, interval in pairs)) / len(pairs)
    above = hypot(*(interval.high - value for value, interval in pairs)) / len(pairs)
    return Interval(low=middle - below, high=middle + above, level=pairs[0][1].level)


def set_of(metric: Metric) -> tuple[object, ...]:
    """Equal for numbers of one task on one set."""
    return tuple(metric.protocol.get(key) for key in ("task", "data_fingerprint", "split"))


def means_of(metrics: Iterable[Metric]) -> list[Mean]:
    """Means over the sets of each task: of the first number that all have, and of agreement."""
    tasks: dict[object, dict[object, dict[str, Metric]]] = {}
    for metric in metrics:
        sets = tasks.setdefault(metric.protocol.get("task"), {})
        sets.setdefault(set_of(metric), {})[metric.name] = metric
    means = []
    for first, *others in (list(sets.values()) for sets in tasks.values()):
        shared = [name for name in first if all(name in metrics_of for metrics_of in others)]
        names = [name for name in shared if others and name in (shared[0], AGREEMENT)]
        means += [Mean.of([part[name] for part in (first, *others)]) for name in names]
    return means


def main_of(metrics: Sequence[Metric], *, several: bool) -> Metric | None:
    """The number that a measurement comes to: the first one, or its mean over several sets."""
    return next(iter(means_of(metrics) if several else metrics), None)
