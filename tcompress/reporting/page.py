"""One HTML file with everything in it: what it shows, worked out, and the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from markupsafe import Markup

import tcompress
from tcompress.artifact.manifest import Metric
from tcompress.artifact.means import Mean
from tcompress.files import check_page, unwritable, write_text
from tcompress.reporting import formatting as fmt
from tcompress.reporting.charts import Dot, trade_off, training_charts
from tcompress.reporting.console import short_name
from tcompress.reporting.table_rows import (
    calibration_text,
    healed_text,
    parts_of,
    published,
    sets_note,
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
    numbers_of,
    other_baseline,
)

if TYPE_CHECKING:
    from jinja2 import Template

_MUCH = 0.2  # of a model
COLOURS = 8
_LIGHTEST, _DARKEST = 4, 62  # per cent; darker shades would take the contrast from the numbers


def verdict(reports: Sequence[ModelReport], names: Sequence[str]) -> str:
    """Says what a reader should take home, with the models' names for people."""
    metrics = main_metrics(reports)
    if len(reports) == 1:
        return _alone(reports[0], metrics[0])
    small = [index for index, report in enumerate(reports) if report.is_smaller]
    measured = {i: metric for i in small if (metric := metrics[i]) is not None}
    if not small:
        return f"{len(reports)} dense models."
    if not measured:
        least = min(small, key=lambda index: reports[index].parameters.total.now)
        return f"The smallest, {names[least]}, {_alone(reports[least], None)}"
    signed = {i: m.value * (1 if m.higher_is_better else -1) for i, m in measured.items()}
    best = max(signed, key=lambda index: signed[index])
    found = _alone(reports[best], measured[best])
    if len(measured) > 1:
        models = f"Of {len(reports)} models"
        return f"{models}, {names[best]} comes closest to the dense quality: it {found}"
    only = "" if len(small) == 1 else f", of {len(small)} conversions the only one measured,"
    return f"{names[best]}{only} {found}"


def _alone(report: ModelReport, metric: Metric | None) -> str:
    """What one model keeps: weights, quality, time."""
    if not report.is_smaller:
        known = "" if metric is None else f": {metric.label} {fmt.value_text(metric.value)}"
        return f"is dense{known}."
    parts = report.parameters
    kept = f"keeps {parts.total.kept:.1%} of the parameters"
    if parts.rewritten.dense and parts.rewritten.kept != parts.total.kept:
        share = parts.embeddings.dense / max(1, parts.total.dense)
        why = f"; embeddings, {share:.0%} of the dense model, stay as they are"
        untouched = why if share >= _MUCH and parts.embeddings.kept == 1 else ""
        kept += f" ({parts.rewritten.kept:.1%} of those rewritten{untouched})"
    words = [kept]
    if metric is not None:
        words.append(_quality(report, metric))
    else:
        for kind, error in list(report.errors.items())[:1]:
            words.append(f"has a mean {fmt.error_name(kind)} of {fmt.error_text(error)}")
        words.append("its quality on a task was not measured")
    if report.speed:
        words.append(fmt.speed_words(report.speed))
    return f"{', '.join(words[:-1])} and {words[-1]}."


def _quality(report: ModelReport, metric: Metric) -> str:
    text = f"has {metric.label} {fmt.value_text(metric.value)}"
    found, ratio = metric.difference, metric.ratio
    if found is None:
        return text
    share = f", {fmt.ratio_text(ratio)}" if ratio is not None else ""
    who = other_baseline(report, metric) or "dense"
    text += f" ({who} {fmt.value_text(found.baseline_value)}{share}"
    if found.interval is None:
        return f"{text})"
    ends = fmt.interval_text(found.interval, signed=True)
    if found.interval.low <= 0 <= found.interval.high:
        return f"{text}; the interval of the difference, {ends}, holds 0)"
    level = f"{found.interval.level:.0%} interval"
    return f"{text}; difference {fmt.signed_text(found.value)}, {level} {ends})"


class Shade(NamedTuple):
    """An error, the mean where a block has several layers of a role, and how dark it is."""

    value: float
    shade: int  # per cent


class Heat(NamedTuple):
    """The table of errors."""

    kind: str
    blocks: list[str]
    rows: list[tuple[str, list[Shade | None]]]  # by role; None where a block has no such layer
    worst: tuple[str, str, float]  # block, role and the greatest error
    least: float


def heat_of(layers: Sequence[LayerReport]) -> Heat | None:
    """Makes the table of the most telling kind of error, if there are errors."""
    kind = next(iter(mean_errors(layers)), None)
    if kind is None:
        return None
    found: dict[tuple[str, str], list[float]] = {}
    for layer in layers:
        if kind in layer.errors:
            found.setdefault((layer.role, layer.block), []).append(layer.errors[kind])
    means = {place: sum(errors) / len(errors) for place, errors in found.items()}
    worst = max(means, key=lambda place: means[place])
    low, top = min(means.values()), means[worst]

    def shade(place: tuple[str, str]) -> Shade | None:
        """Shades span what errors there are: differences show, though all are small or large."""
        if place not in means:
            return None
        share = (means[place] - low) / (top - low) if top > low else 0.5
        return Shade(means[place], round(_LIGHTEST + share * (_DARKEST - _LIGHTEST)))

    short = fmt.short_blocks(layers)
    roles = dict.fromkeys(layer.role for layer in layers)
    columns = list(short.values())
    if len({name.rpartition(".")[0] for name in columns}) == 1:  # such as `layer.`
        columns = [name.rpartition(".")[2] for name in columns]
    rows = [(role, [shade((role, block)) for block in short]) for role in roles]
    return Heat(fmt.error_name(kind), columns, rows, (short[worst[1]], worst[0], top), low)


def render_html(reports: Sequence[ModelReport]) -> str:
    """Renders models as a page; the same reports always give the same text.

    What the page shows is worked out here, so that its template only has to place it.
    """
    names = [short_name(report, reports) for report in reports]
    sections = list(map(_section, reports, names, range(len(reports))))
    page = {
        "title": names[0] if len(names) == 1 else f"{len(names)} models side by side",
        "verdict": _sentence(verdict(reports, names)),
        "sections": sections,
        "summary": summary_of(reports),
        "dense": shows_dense(reports),
        "sets_note": sets_note(reports),
        "pictures": _pictures(sections),
        "published": published(reports),
    }
    return _template().render(page=page, version=tcompress.__version__)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _section(report: ModelReport, name: str, index: int) -> dict[str, Any]:
    """One model on the page."""
    recipe, roles, metrics = report.recipe, _roles(report.layers), []
    numbers = sorted(numbers_of([report])[0], key=lambda metric: isinstance(metric, Mean))
    for label, metric in zip(fmt.metric_labels(numbers), numbers, strict=True):
        other = other_baseline(report, metric)
        metrics.append((label if other is None else f"{label}, against {other}", metric))
    return {
        "mark": chr(ord("A") + index) if index < 26 else str(index + 1),  # A, B, ..., Z, 27, ...
        "colour": index % COLOURS,
        "name": name,
        "report": report,
        "roles": roles,
        # Of plain layers they are the parameters once more.
        "counts_macs": any(row["macs"] != row["parameters"] for row in roles),
        "parts": parts_of(report),
        "errors": _sentence(fmt.errors_note(list(report.errors)[:1])),
        "heat": heat_of(report.layers),
        "metrics": metrics,
        "curves": [training_charts(run) for run in report.training],
        "timings": {fmt.machine_text(speed): speed.protocol for speed in report.speed},
        "calibration": calibration_text(report),
        "healed": healed_text(report),
        "recipe": "" if not recipe else yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True),
    }


def _roles(layers: Sequence[LayerReport]) -> list[dict[str, Any]]:
    """The rewritten layers by role."""
    rows = []
    for role in dict.fromkeys(layer.role for layer in layers):
        group = [layer for layer in layers if layer.role == role]
        sizes = [layer.bytes for layer in group if layer.bytes is not None]
        rows.append(
            {
                "role": role,
                "layers": len(group),
                "structures": list(dict.fromkeys(layer.structure for layer in group)),
                "parameters": Amount.sum_of(layer.parameters for layer in group),
                "bytes": Amount.sum_of(sizes) if len(sizes) == len(group) else None,
                "macs": Amount.sum_of(layer.macs for layer in group),
            }
        )
    return rows


def _pictures(sections: Sequence[dict[str, Any]]) -> list[Markup]:
    """Draws quality against size and against time, where there is anything to compare."""
    reports: list[ModelReport] = [section["report"] for section in sections]
    metrics, speeds = main_metrics(reports), main_speeds(reports)
    one = len({report.parameters.total.dense for report in reports}) == 1
    sizes: list[Dot] = []
    times: list[Dot] = []
    for section, metric, speed in zip(sections, metrics, speeds, strict=True):
        if metric is None:
            continue
        total = section["report"].parameters.total
        costs = (total.kept, 1.0) if one else (total.now, total.dense)
        sizes += _dots(section, metric, *costs)
        if speed is not None:
            times += _dots(section, metric, speed.milliseconds, speed.baseline_milliseconds)
    words = "parameters kept, whole model" if one else "parameters"
    write = (lambda share: f"{share:.0%}") if one else fmt.count_text
    main = next((metric for metric in metrics if metric is not None), None)
    speed = next((speed for speed in speeds if speed is not None), None)
    pictures = _picture(sizes, words, main, write)
    if speed is not None:
        words = f"time of a pass ({fmt.pass_text(speed)})"
        pictures += _picture(times, words, main, lambda value: f"{fmt.tick_text(value)} ms")
    return pictures


def _dots(section: dict[str, Any], metric: Metric, cost: float, dense_cost: float) -> list[Dot]:
    """A model and its baseline."""
    name, mark, colour = section["name"], section["mark"], section["colour"]
    dots = [Dot(mark, name, cost, metric.value, metric.interval, colour)]
    if (found := metric.difference) is not None:
        dots.append(Dot("", f"dense ({found.baseline})", dense_cost, found.baseline_value))
    return dots


def _picture(
    dots: list[Dot], costs: str, metric: Metric | None, write: Callable[[float], str]
) -> list[Markup]:
    """Draws models with one dot of each baseline, and none of one that is itself a model here."""
    shown = [dot for dot in dots if dot.mark]
    for dot in (dot for dot in dots if not dot.mark):
        same = (dot.cost, dot.quality)
        if not any(dot.name == item.name or same == (item.cost, item.quality) for item in shown):
            shown.append(dot)
    if len(shown) < 2 or metric is None:
        return []
    return [trade_off(shown, costs, metric.label, write, metric.higher_is_better)]


def _plain(value: Any) -> str:
    """Writes a value of a protocol."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    layout: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(autoescape=True, undefined=StrictUndefined, **layout)
    # Whatever writes a value, such as `bytes_text`, is a filter of that name: `bytes`.
    texts = {name: write for name, write in vars(fmt).items() if name.endswith("_text")}
    environment.filters |= {name.removesuffix("_text"): write for name, write in texts.items()}
    environment.filters |= {
        "notes": fmt.speed_notes,
        "plain": _plain,
        "position": lambda items, item: items.index(item),
    }
    source = files("tcompress").joinpath("assets", "report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)


def write_html(reports: Sequence[ModelReport], path: Path | str) -> Path:
    """Writes models as a page; an older one is replaced."""
    target = Path(path).expanduser()
    check_page(target)
    text = render_html(reports)
    try:
        write_text(target, text)
    except OSError as error:
        raise unwritable(target, error) from error
    return target
