"""One HTML file with everything in it: what it shows, worked out, and the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from markupsafe import Markup

import tcompress
from tcompress.artifact.manifest import Metric, Speed
from tcompress.errors import InputError
from tcompress.files import check_file, unwritable, write_text
from tcompress.reporting import formatting
from tcompress.reporting.charts import Dot, trade_off, training_charts
from tcompress.reporting.console import median_text, memory_text, short_name, speed_notes
from tcompress.reporting.formatting import (
    count_text,
    error_name,
    error_text,
    errors_note,
    interval_text,
    machine_text,
    metric_labels,
    metric_ratio,
    ratio_text,
    short_blocks,
    signed_text,
    speed_words,
    tick_text,
    value_text,
)
from tcompress.reporting.table_rows import (
    Line,
    Published,
    calibration_text,
    healed_text,
    parts_of,
    published,
    shows_dense,
    summary_of,
)
from tcompress.reporting.tree import (
    Amount,
    LayerReport,
    ModelReport,
    main_metrics,
    main_speeds,
    mean_errors,
    other_baseline,
)

if TYPE_CHECKING:
    from jinja2 import Template

# The one sentence above a report.


_MUCH = 0.2  # of a model


def verdict(reports: Sequence[ModelReport], names: Sequence[str]) -> str:
    """Says what a reader should take home.

    Args:
        reports: The models.
        names: Their names for people.
    """
    metrics = main_metrics(reports)
    if len(reports) == 1:
        return _alone(reports[0], metrics[0])
    small = [index for index, report in enumerate(reports) if report.is_smaller]
    measured = [index for index in small if metrics[index] is not None]
    if not measured:
        if not small:
            return f"{len(reports)} dense models."
        least = min(small, key=lambda index: reports[index].parameters.total.now)
        return f"The smallest, {names[least]}, {_alone(reports[least], None)}"
    best = max(measured, key=lambda index: _goodness(metrics[index]))
    if len(measured) == 1:  # nothing to compare with
        only = "" if len(small) == 1 else f", of {len(small)} conversions the only one measured,"
        return f"{names[best]}{only} {_alone(reports[best], metrics[best])}"
    return f"Of {len(reports)} models, {names[best]} comes closest to the dense quality: it " + (
        _alone(reports[best], metrics[best])
    )


def _alone(report: ModelReport, metric: Metric | None) -> str:
    """What one model keeps: weights, quality, time."""
    if not report.is_smaller:
        known = "" if metric is None else f": {metric.name} {value_text(metric.value)}"
        return f"is dense{known}."
    parts = report.parameters
    kept = f"keeps {parts.total.kept:.1%} of the parameters"
    if parts.rewritten.dense and parts.rewritten.kept != parts.total.kept:
        kept += f" ({parts.rewritten.kept:.1%} of those rewritten{_untouched(report)})"
    words = [kept, *_quality(report, metric)]
    if report.speed:
        words.append(speed_words(report.speed))
    return f"{', '.join(words[:-1])} and {words[-1]}."


def _untouched(report: ModelReport) -> str:
    """Says what makes the two shares so different, where it is the embeddings."""
    parts = report.parameters
    share = parts.embeddings.dense / max(1, parts.total.dense)
    if share < _MUCH or parts.embeddings.kept != 1:
        return ""
    return f"; embeddings, {share:.0%} of the dense model, stay as they are"


def _quality(report: ModelReport, metric: Metric | None) -> list[str]:
    if metric is None:
        kind = next(iter(report.errors), None)
        shown = [] if kind is None else [f"has a mean {error_name(kind)} of"]
        if kind is not None:
            shown = [f"{shown[0]} {error_text(report.errors[kind])}"]
        return [*shown, "its quality on a task was not measured"]
    text = f"has {metric.name} {value_text(metric.value)}"
    found, ratio = metric.difference, metric_ratio(metric)
    if found is not None:
        share = f", {ratio_text(ratio)}" if ratio is not None else ""
        who = other_baseline(report, metric) or "dense"
        text += f" ({who} {value_text(found.baseline_value)}{share}"
        if found.interval is None:
            text += ")"
        elif found.interval.low <= 0 <= found.interval.high:
            ends = interval_text(found.interval, signed=True)
            text += f"; the interval of the difference, {ends}, holds 0)"
        else:
            text += f"; difference {signed_text(found.value)}, "
            text += f"{found.interval.level:.0%} interval {interval_text(found.interval, True)})"
    return [text]


def _goodness(metric: Metric | None) -> float:
    assert metric is not None
    return metric.value if metric.higher_is_better else -metric.value


# Errors of layers by block and role, as a table of shades.


_LIGHTEST, _DARKEST = 4, 62  # per cent; darker shades would take the contrast from the numbers


@dataclass(frozen=True)
class Shade:
    """One cell.

    Attributes:
        value: The error; the mean where a block has several layers of a role.
        shade: How dark the cell is, in per cent.
    """

    value: float
    shade: int


@dataclass(frozen=True)
class Heat:
    """The table.

    Attributes:
        kind: What the errors are.
        blocks: Blocks, one for each column.
        rows: A role and its cells; None where a block has no such layer.
        worst: Where the error is greatest: block, role and error.
        least: The smallest error, which has the lightest shade.
    """

    kind: str
    blocks: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Shade | None, ...]], ...]
    worst: tuple[str, str, float]
    least: float


def heat_of(layers: Sequence[LayerReport]) -> Heat | None:
    """Makes the table of the most telling kind of error, if there are errors."""
    kind = next(iter(mean_errors(layers)), None)
    if kind is None:
        return None
    short = short_blocks(layers)
    blocks = list(short)
    roles = list(dict.fromkeys(layer.role for layer in layers))
    found: dict[tuple[str, str], list[float]] = {}
    for layer in layers:
        if kind in layer.errors:
            found.setdefault((layer.role, layer.block), []).append(layer.errors[kind])
    means = {place: sum(errors) / len(errors) for place, errors in found.items()}
    place = max(means, key=lambda place: means[place])
    low, top = min(means.values()), means[place]
    rows = tuple(
        (role, tuple(_shade(means.get((role, block)), low, top) for block in blocks))
        for role in roles
    )
    worst = (short[place[1]], place[0], means[place])
    return Heat(error_name(kind), _columns(list(short.values())), rows, worst, low)


def _shade(value: float | None, low: float, top: float) -> Shade | None:
    """Shades span what errors there are: differences show, though all are small or all large."""
    if value is None:
        return None
    share = (value - low) / (top - low) if top > low else 0.5
    return Shade(value, round(_LIGHTEST + share * (_DARKEST - _LIGHTEST)))


def _columns(names: Sequence[str]) -> tuple[str, ...]:
    """Drops what all names begin with, such as `layer.`, where only numbers are left."""
    numbers = [name.rpartition(".")[2] for name in names]
    alone = len({name.rpartition(".")[0] for name in names}) == 1
    return tuple(numbers if alone else names)


# What the page of a report shows, worked out so that its template only has to place it.


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


# One HTML file with everything in it: no script, no font, no request to anywhere.


_ENDINGS = (".html", ".htm")


def render_html(reports: Sequence[ModelReport]) -> str:
    """Renders models as a page; the same reports always give the same text."""
    return _template().render(page=page_of(reports), version=tcompress.__version__)


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": formatting.bytes_text,
        "count": formatting.count_text,
        "coverage": formatting.coverage_text,
        "duration": formatting.time_text,
        "error": formatting.error_text,
        "interval": formatting.interval_text,
        "machine": formatting.machine_text,
        "memory": memory_text,
        "median": median_text,
        "milliseconds": formatting.milliseconds_text,
        "notes": speed_notes,
        "plain": plain,
        "position": lambda items, item: items.index(item),
        "ratio": formatting.ratio_text,
        "ratio_of": formatting.metric_ratio,
        "signed": formatting.signed_text,
        "value": formatting.value_text,
    }
    source = files("tcompress").joinpath("assets", "report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)


def check_target(path: Path) -> None:
    """Refuses a file that cannot or should not be written.

    Raises:
        InputError: It is a folder, its folder is missing, or it is a file of another kind.
    """
    check_file(path)
    if path.exists() and path.suffix.lower() not in _ENDINGS:
        raise InputError(
            f"`{path}` exists and does not look like a page", "give a name that ends in `.html`"
        )


def write_html(reports: Sequence[ModelReport], path: Path | str) -> Path:
    """Writes models as a page: beside an older one first, then in its place.

    Args:
        reports: The models.
        path: File to write.

    Raises:
        InputError: The file cannot be written there.
    """
    target = Path(path).expanduser()
    check_target(target)
    text = render_html(reports)
    try:
        write_text(target, text)
    except OSError as error:
        raise unwritable(target, error) from error
    return target
