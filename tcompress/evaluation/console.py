"""The table of a measurement."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from tcompress.artifact.manifest import Interval, Metric
from tcompress.evaluation.scores import ModelScores, ratio_of


def headline(scores: Sequence[ModelScores]) -> str:
    """Says in a line what was measured."""
    facts = scores[0].metrics[0].protocol
    length = f", at most {facts['max_length']} tokens" if facts["max_length"] else ""
    dtypes = sorted({item.metrics[0].protocol["dtype"] for item in scores})
    text = (
        f"{facts['task']} on {facts['data']}: {facts['examples']:,} examples{length}, "
        f"{'/'.join(dtypes)} on {facts['device']}"
    )
    if facts["bootstrap"]:
        text += f"; in brackets 95 % intervals of {facts['bootstrap']:,} bootstrap resamples"
    return text


def score_table(scores: Sequence[ModelScores]) -> Table:
    """Makes a table with a row for each number of each model, and of forecasts without one."""
    unit = f"{scores[0].unit}/s"
    compared = len(scores) > 1
    names = ["model", "metric", "value", *(["difference", "ratio"] if compared else []), unit]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in names:
        right = name not in ("model", "metric")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    labels = _labels([item.name for item in scores])
    for label, item in zip(labels, scores, strict=True):
        for index, metric in enumerate(item.metrics):
            cells = [metric.name, f"{_number(metric.value)}{_range(metric.interval)}"]
            cells += _comparison(metric) if compared else []
            cells.append("" if index else f"{item.per_second:,.1f}")
            table.add_row("" if index else label, *cells)
    for label, numbers in scores[0].metrics[0].protocol.get("naive", {}).items():
        for index, (name, value) in enumerate(numbers.items()):
            table.add_row("" if index else f"{label} (no model)", name, _number(value))
    return table


def _labels(names: Sequence[str]) -> list[str]:
    """The ends of names, if they tell the models apart."""
    ends = [name.rstrip("/").rpartition("/")[2] for name in names]
    return ends if len({*ends}) == len(ends) else list(names)


def _comparison(metric: Metric) -> list[str]:
    difference, ratio = metric.difference, ratio_of(metric)
    if difference is None:
        return ["", ""]
    text = f"{_number(difference.value, '+')}{_range(difference.interval, '+')}"
    return [text, "" if ratio is None else f"{ratio:.3f} x"]


def _range(found: Interval | None, sign: str = "") -> str:
    if found is None:
        return ""
    low, high = (_number(value, sign, fewer=1) for value in (found.low, found.high))
    return f" [{low}, {high}]"


def _number(value: float, sign: str = "", fewer: int = 0) -> str:
    if abs(value) >= 1000:
        digits = 0
    elif abs(value) >= 10:
        digits = 2 - fewer
    else:
        digits = 4 - fewer
    return f"{value:{sign},.{digits}f}"
