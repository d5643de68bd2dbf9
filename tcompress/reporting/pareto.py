"""Models of several sizes beside the dense one: what each costs, and which no other one beats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from statistics import fmean, median, stdev
from typing import Literal, NamedTuple

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.text import Text

from tcompress.artifact.manifest import Interval, Metric, Speed
from tcompress.conversion.estimate import Estimate
from tcompress.planning.entries import Plan
from tcompress.reporting import formatting as fmt
from tcompress.reporting.table_rows import Cell, Printed
from tcompress.reporting.tree import (
    ModelReport,
    main_metrics,
    main_speeds,
    metric_key,
    numbers_of,
    unbeaten,
)

DENSE = "dense"
Front = Literal["size", "time"]
_MARKS: dict[Front, str] = {"size": "*", "time": "t"}


class Candidate(NamedTuple):
    """A finished model: its quality before it was trained, and how long it took, if known."""

    name: str
    report: ModelReport
    converted: Metric | None = None
    seconds: float | None = None
    repeats: tuple[ModelReport, ...] = ()  # the same with other seeds


class FrontRow(BaseModel, extra="forbid", frozen=True):
    """One model beside the others."""

    name: str  # `dense` for the model that all were made from
    kept: float  # fraction of the rewritten layers' parameters
    left: int = 0  # layers of the blocks that stay dense
    parameters: int  # of the whole model
    bytes: int  # of the weight files
    quality: float | None = None
    interval: Interval | None = None
    deviation: float | None = None  # of several seeds, of which quality is the mean
    values: tuple[float, ...] = ()  # of each seed
    ratio: float | None = None  # multiple of the dense model's
    converted: float | None = None  # before training, if the model was trained
    milliseconds: float | None = None
    speed: float | None = None  # above 1 the model is faster
    predicted: float | None = None  # the same before it was written, where time was a budget
    seconds: float | None = None  # conversion and training
    front: tuple[Front, ...] = ()  # costs at which no other model beats this one


class FrontReport(BaseModel, extra="forbid", frozen=True):
    """All models, the largest one first."""

    metric: str | None
    higher_is_better: bool = True
    timed: str | None = None  # the pass whose time is shown, such as `batch 32, length 128, cpu`
    rows: tuple[FrontRow, ...]


def front_of(candidates: Sequence[Candidate]) -> FrontReport:
    """Compares models; the first one is the dense one."""
    reports = [item.report for item in candidates]
    metrics, speeds = main_metrics(reports), main_speeds(reports)
    metric = next((metric for metric in metrics if metric is not None), None)
    timed = next((speed for speed in speeds if speed is not None), None)
    if timed is not None and speeds[0] is None:  # the dense model ran beside all others
        middle = median(speed.baseline_milliseconds for speed in speeds if speed is not None)
        speeds[0] = timed.model_copy(update={"milliseconds": middle, "ratio": 1.0})
    numbers = []  # the main one of each candidate, with all of its seeds
    for item, own in zip(candidates, metrics, strict=True):
        alike = [] if own is None else [own]
        for report in item.repeats if alike else ():
            same = (m for m in numbers_of([report])[0] if metric_key(m) == metric_key(alike[0]))
            alike += islice(same, 1)
        numbers.append(alike)
    rows = list(map(_row, candidates, numbers, speeds))
    higher = metric is None or metric.higher_is_better
    best: dict[Front, set[str]] = {
        "size": _best(rows, lambda row: row.parameters, higher),
        "time": _best(rows, lambda row: row.milliseconds, higher),
    }
    marked = [
        row.model_copy(update={"front": tuple(cost for cost in best if row.name in best[cost])})
        for row in rows
    ]
    sign = -1 if higher else 1
    return FrontReport(
        metric=None if metric is None else metric.label,
        higher_is_better=higher,
        timed=None if timed is None else fmt.pass_text(timed),
        rows=tuple(sorted(marked, key=lambda row: (-row.parameters, sign * (row.quality or 0)))),
    )


def mean_of(metrics: Sequence[Metric | None]) -> Metric | None:
    """A number with the mean over runs as its value and, of several, without an interval."""
    known = [metric for metric in metrics if metric is not None]
    if len(known) < 2:
        return next(iter(known), None)
    value = fmean(metric.value for metric in known)
    return known[0].model_copy(update={"value": value, "interval": None})


def _row(item: Candidate, metrics: Sequence[Metric], speed: Speed | None) -> FrontRow:
    parameters, metric = item.report.parameters, mean_of(metrics)
    values = tuple(number.value for number in metrics) if len(metrics) > 1 else ()
    ratios = [ratio for number in metrics if (ratio := number.ratio) is not None]
    return FrontRow(
        name=item.name,
        kept=1.0 if (kept := parameters.rewritten.kept) is None else kept,
        left=len(item.report.left),
        parameters=parameters.total.now,
        bytes=item.report.bytes_on_disk.now,
        quality=None if metric is None else metric.value,
        interval=None if metric is None else metric.interval,
        deviation=stdev(values) if values else None,
        values=values,
        ratio=fmean(ratios) if ratios and len(ratios) == len(metrics) else None,
        converted=None if item.converted is None else item.converted.value,
        milliseconds=None if speed is None else speed.milliseconds,
        speed=None if speed is None else speed.ratio,
        predicted=budget.speedup if (budget := item.report.budget) else None,
        seconds=item.seconds,
    )


def _best(
    rows: Sequence[FrontRow], cost: Callable[[FrontRow], float | None], higher: bool
) -> set[str]:
    places = {
        row.name: (value, row.quality)
        for row in rows
        if (value := cost(row)) is not None and row.quality is not None
    }
    return set(unbeaten(list(places), lambda name: places[name], higher))


def front_table(found: FrontReport, stopped: Sequence[tuple[str, str]] = ()) -> RenderableType:
    """Renders models, and names and reasons of those that are missing."""
    shown = _shown(found)
    table = fmt.table("model", *shown, right=tuple(shown))
    costs = [cost for cost in _MARKS if cost == "size" or found.timed]
    for row in found.rows:
        marks = "".join(_MARKS[cost] if cost in row.front else " " for cost in costs)
        table.add_row(f"{marks} {row.name}", *(write(row) for write in shown.values()))
    return Group(table, *_legend(found), *_stopped(stopped))


def front_printed(found: FrontReport) -> Printed:
    """The same table for a file; what follows a number in brackets is a note."""
    shown = _shown(found)
    rows = []
    for row in found.rows:
        texts = (write(row).partition(" [") for write in shown.values())
        cells = (Cell(value, f"[{rest}" if rest else "") for value, _, rest in texts)
        rows.append((Cell(row.name), *cells))
    return Printed(("model", *shown), tuple(rows))


def _shown(found: FrontReport) -> dict[str, Callable[[FrontRow], str]]:
    """Columns that at least one model has something in."""
    columns: dict[str, Callable[[FrontRow], str]] = {
        "kept": lambda row: f"{row.kept:.1%}",
        "params": lambda row: f"{row.parameters:,}",
        "bytes": lambda row: fmt.bytes_text(row.bytes),
        found.metric or "quality": _quality,
        "ratio": lambda row: fmt.ratio_text(row.ratio),
        "before": lambda row: _optional(row.converted, fmt.value_text),
        "time": lambda row: _optional(row.milliseconds, fmt.milliseconds_text),
        "speed": lambda row: fmt.ratio_text(row.speed, 2) if row.name != DENSE else "",
        "predicted": lambda row: fmt.ratio_text(row.predicted, 2),
        "seconds": lambda row: _optional(row.seconds, "{:,.1f}".format),
    }
    return {name: write for name, write in columns.items() if any(map(write, found.rows))}


def plan_table(
    planned: Sequence[tuple[str, Plan, Estimate]], stopped: Sequence[tuple[str, str]] = ()
) -> RenderableType:
    """Renders what conversions would do, and names and reasons of those that cannot be planned."""
    names = ("kept", "parameters", "bytes", "left dense", "peak memory", "conversion")
    table = fmt.table("model", *names, right=names)
    for name, plan, costs in planned:
        table.add_row(
            name,
            f"{plan.kept:.1%}",
            f"{plan.parameters - plan.saved:,}",
            fmt.bytes_text(costs.disk_bytes),
            f"{len(plan.left)} of {len(plan.left) + len(plan.layers)}",
            fmt.bytes_text(costs.memory_bytes),
            f"roughly {fmt.time_text(costs.seconds)}",
        )
    return Group(*([table] if planned else []), *_stopped(stopped))


def _quality(row: FrontRow) -> str:
    if row.quality is None:
        return ""
    if row.deviation is not None:
        return fmt.deviation_text(row.quality, row.deviation)
    return fmt.around_text(row.quality, row.interval)


def _optional(value: float | None, write: Callable[[float], str]) -> str:
    return "" if value is None else write(value)


def _legend(found: FrontReport) -> list[RenderableType]:
    lines = ["kept: of the rewritten layers; params and bytes: of the whole model"]
    if any(row.converted is not None for row in found.rows):
        lines[0] += "; before: before healing"
    if any("size" in row.front for row in found.rows):
        lines.append("*: on the Pareto front, none as small is as good")
    seeds = sorted({len(row.values) for row in found.rows if row.values})
    if seeds:
        lines.append(f"±: standard deviation over {' or '.join(map(str, seeds))} seeds")
    if found.timed is not None:
        lines.append(f"t: none as fast is as good; time of {found.timed}")
    left = [f"{row.left} in {row.name}" for row in found.rows if row.left]
    if left:
        lines.append(f"layers left dense: {', '.join(left)}")
    return [Text(line, style="dim") for line in lines]


def _stopped(stopped: Sequence[tuple[str, str]]) -> list[RenderableType]:
    """Says why models are missing: the first of several reasons; the JSON has all of them."""
    table = fmt.table("not done", "because")
    for name, reason in stopped:
        lines = reason.splitlines()
        more = [f"  and {len(lines) - 2} more"] if len(lines) > 2 else []
        table.add_row(name, "\n".join([*lines[:2], *more]))
    return [table] if stopped else []
