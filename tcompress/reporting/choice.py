"""Which numbers stand for a set of models, and which models no other one beats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from tcompress.artifact.manifest import Metric, Speed
from tcompress.reporting.tree import ModelReport
from tcompress.source.names import ALIASES

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


_SAME = ("task", "data", "split", "data_fingerprint", "max_length", "layer")

ALIKE = 0.005
"""Part of a cost that is no difference."""


def metric_key(metric: Metric) -> tuple[str, ...]:
    """Equal for numbers that can be compared: of the same task on the same examples."""
    return (metric.name, *(str(metric.protocol.get(key)) for key in _SAME))


def other_baseline(report: ModelReport, metric: Metric) -> str | None:
    """Name of what a number was compared with, where that is not the model's own dense source."""
    if metric.difference is None or report.source is None:
        return None
    name = metric.difference.baseline
    known = {_place(report.source), _place(report.name)}
    return None if _place(name) in known else Path(name).name


def _place(name: str) -> str:
    """A model by its last folder: names differ by where one stands, or by the owner."""
    return Path(ALIASES.get(name, name)).name


def speed_key(speed: Speed) -> tuple[int, int, str, tuple[str, ...]]:
    """Equal for times that can be compared."""
    found = (speed.protocol.get(key) for key in ("device", "device_name", "dtype", "threads"))
    return (speed.batch * speed.length, speed.batch, speed.mode, tuple(map(str, found)))


def main_metrics(reports: Sequence[ModelReport]) -> list[Metric | None]:
    """Picks the metric that most of the models have, the first of those, for each model."""
    key = _commonest((metric_key(metric) for metric in report.metrics) for report in reports)
    return [
        next((metric for metric in report.metrics if metric_key(metric) == key), None)
        for report in reports
    ]


def main_speeds(reports: Sequence[ModelReport]) -> list[Speed | None]:
    """Picks the size that most models were timed at: eager and large where there are more."""
    counts = Counter(key for report in reports for key in set(map(speed_key, report.speed)))
    key = max(counts, key=lambda key: (counts[key], key[2] == "eager", *key[:2]), default=None)
    return [
        next((speed for speed in report.speed if speed_key(speed) == key), None)
        for report in reports
    ]


def best_speed(report: ModelReport) -> Speed | None:
    """Picks the time with the greatest ratio."""
    return max(report.speed, key=lambda speed: speed.ratio, default=None)


def unbeaten(
    items: Sequence[_Item], place: Callable[[_Item], tuple[float, float]], higher: bool = True
) -> list[_Item]:
    """Picks the Pareto front: the items that no other one beats in both cost and quality.

    Costs that differ by no more than `ALIKE` are one: budgets are spent almost to the last
    parameter, and an item is not on the front for leaving a few more of them.

    Args:
        items: What is compared.
        place: Gives cost and quality of an item.
        higher: Whether more quality is a greater number.
    """
    sign = 1 if higher else -1

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        better = sign * (one[1] - other[1])
        return one[0] < other[0] if better == 0 else better > 0 and one[0] <= other[0] * (1 + ALIKE)

    places = [place(item) for item in items]
    return [
        item
        for item, own in zip(items, places, strict=True)
        if not any(beats(other, own) for other in places)
    ]


def _commonest(groups: Iterable[Iterable[_Key]]) -> _Key | None:
    counts = Counter(key for group in groups for key in dict.fromkeys(group))
    return counts.most_common(1)[0][0] if counts else None
