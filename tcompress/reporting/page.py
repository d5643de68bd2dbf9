"""What the page of a report shows, worked out so that its template only has to place it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from markupsafe import Markup

from tcompress.artifact.manifest import Metric, Speed
from tcompress.reporting.charts import Dot, trade_off, training_charts
from tcompress.reporting.choice import main_metrics, main_speeds, other_baseline
from tcompress.reporting.console import short_name
from tcompress.reporting.heat import Heat, heat_of
from tcompress.reporting.published import Published, published
from tcompress.reporting.rows import calibration_text, healed_text
from tcompress.reporting.summary import Line, parts_of, shows_dense, summary_of
from tcompress.reporting.tree import Amount, LayerReport, ModelReport, mean_errors
from tcompress.reporting.verdict import verdict
from tcompress.reporting.words import (
    count_text,
    errors_note,
    machine_text,
    metric_labels,
    tick_text,
)

COLOURS = 8


@dataclass(frozen=True)
class RoleRow:
    """The rewritten layers of one role."""

    role: str
    layers: int
    structures: tuple[str, ...]
    parameters: Amount
    bytes: Amount | None
    macs: Amount
    error: float | None


@dataclass(frozen=True)
class Section:
    """One model on the page."""

    mark: str
    colour: int
    name: str
    report: ModelReport
    roles: tuple[RoleRow, ...]
    counts_macs: bool
    parts: dict[str, Amount]
    errors: str
    heat: Heat | None
    metrics: tuple[tuple[str, Metric], ...]
    curves: tuple[tuple[Markup, ...], ...]
    timings: dict[str, dict[str, Any]]
    calibration: str
    healed: str
    recipe: str


@dataclass(frozen=True)
class Page:
    """All that the template needs."""

    title: str
    verdict: str
    sections: tuple[Section, ...]
    summary: tuple[Line, ...]
    dense: bool = False
    pictures: tuple[Markup, ...] = field(default=())
    published: tuple[Published, ...] = field(default=())


def page_of(reports: Sequence[ModelReport]) -> Page:
    """Works out a page."""
    names = [short_name(report, reports) for report in reports]
    marks = [_mark(index) for index in range(len(reports))]
    sections = [
        _section(report, name, mark, index % COLOURS)
        for index, (report, name, mark) in enumerate(zip(reports, names, marks, strict=True))
    ]
    return Page(
        title=names[0] if len(names) == 1 else f"{len(names)} models side by side",
        verdict=_sentence(verdict(reports, names)),
        sections=tuple(sections),
        summary=summary_of(reports),
        dense=shows_dense(reports),
        pictures=tuple(_pictures(sections)),
        published=tuple(published(reports)),
    )


def plain(value: Any) -> str:
    """Writes a value of a protocol."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _mark(index: int) -> str:
    """Letters, then numbers: A, B, ..., Z, 27, ..."""
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _named(report: ModelReport) -> Iterator[tuple[str, Metric]]:
    for label, metric in zip(metric_labels(report.metrics), report.metrics, strict=True):
        other = other_baseline(report, metric)
        yield label if other is None else f"{label}, against {other}", metric


def _section(report: ModelReport, name: str, mark: str, colour: int) -> Section:
    recipe = report.recipe
    roles = tuple(_roles(report.layers))
    return Section(
        mark=mark,
        colour=colour,
        name=name,
        report=report,
        roles=roles,
        # Of plain layers they are the parameters once more.
        counts_macs=any(
            (row.macs.dense, row.macs.now) != (row.parameters.dense, row.parameters.now)
            for row in roles
        ),
        parts=parts_of(report),
        errors=_sentence(errors_note(list(report.errors)[:1])),
        heat=heat_of(report.layers),
        metrics=tuple(_named(report)),
        curves=tuple(tuple(training_charts(run)) for run in report.training),
        timings={machine_text(speed): speed.protocol for speed in report.speed},
        calibration=calibration_text(report),
        healed=healed_text(report),
        recipe="" if not recipe else yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True),
    )


def _roles(layers: Sequence[LayerReport]) -> list[RoleRow]:
    rows = []
    for role in dict.fromkeys(layer.role for layer in layers):
        group = [layer for layer in layers if layer.role == role]
        sizes = [layer.bytes for layer in group if layer.bytes is not None]
        rows.append(
            RoleRow(
                role=role,
                layers=len(group),
                structures=tuple(dict.fromkeys(layer.structure for layer in group)),
                parameters=_sum([layer.parameters for layer in group]),
                bytes=_sum(sizes) if len(sizes) == len(group) else None,
                macs=_sum([layer.macs for layer in group]),
                error=next(iter(mean_errors(group).values()), None),
            )
        )
    return rows


def _sum(amounts: Sequence[Amount]) -> Amount:
    dense, now = sum(item.dense for item in amounts), sum(item.now for item in amounts)
    amount: Amount = Amount.of(dense, now)
    return amount


def _pictures(sections: Sequence[Section]) -> list[Markup]:
    """Draws quality against size and against time, where there is anything to compare."""
    reports = [section.report for section in sections]
    metrics, speeds = main_metrics(reports), main_speeds(reports)
    one = len({report.parameters.total.dense for report in reports}) == 1
    sizes: list[Dot] = []
    times: list[Dot] = []
    for section, metric, speed in zip(sections, metrics, speeds, strict=True):
        if metric is None:
            continue
        total = section.report.parameters.total
        dense = float(total.kept if one else total.now), 1.0 if one else float(total.dense)
        sizes += _dots(section, metric, dense[0], dense[1])
        if speed is not None:
            times += _dots(section, metric, speed.milliseconds, speed.baseline_milliseconds)
    metric = next((metric for metric in metrics if metric is not None), None)
    if metric is None:
        return []
    words = "parameters kept, whole model" if one else "parameters"
    write = (lambda share: f"{share:.0%}") if one else count_text
    pictures = [_picture(sizes, words, metric, write)]
    speed = next((speed for speed in speeds if speed is not None), None)
    if speed is not None and times:
        pictures.append(_picture(times, _time_words(speed), metric, _milliseconds))
    return [picture for picture in pictures if picture is not None]


def _picture(dots: list[Dot], costs: str, metric: Metric, write: Any) -> Markup | None:
    shown = _without_copies(dots)
    if len(shown) < 2:
        return None
    return trade_off(shown, costs, metric.name, write, metric.higher_is_better)


def _dots(section: Section, metric: Metric, cost: float, dense_cost: float) -> list[Dot]:
    ends, found = metric.interval, metric.difference
    low, high = (None, None) if ends is None else (ends.low, ends.high)
    dots = [Dot(section.mark, section.name, cost, metric.value, low, high, section.colour)]
    if found is not None:
        dots.append(Dot("", f"dense ({found.baseline})", dense_cost, found.baseline_value))
    return dots


def _without_copies(dots: Sequence[Dot]) -> list[Dot]:
    """Keeps one dot of each baseline, and none of one that is itself a model here."""
    kept: list[Dot] = []
    for dot in sorted(dots, key=lambda dot: not dot.mark):
        same = [
            other
            for other in kept
            if other.name == dot.name
            or (not dot.mark and (other.cost, other.quality) == (dot.cost, dot.quality))
        ]
        if dot.mark or not same:
            kept.append(dot)
    return kept


def _milliseconds(value: float) -> str:
    return f"{tick_text(value)} ms"


def _time_words(speed: Speed) -> str:
    size = f"batch {speed.batch}, length {speed.length}"
    mode = "" if speed.mode == "eager" else f"{speed.mode}, "
    return f"time of a pass ({size}, {mode}{machine_text(speed)})"
