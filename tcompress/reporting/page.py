"""One HTML file with everything in it: what it shows, worked out, and the file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from markupsafe import Markup, escape

import tcompress
from tcompress.artifact.averages import Mean
from tcompress.files import check_page, write_named
from tcompress.reporting import formatting as fmt
from tcompress.reporting import table_rows
from tcompress.reporting.charts import LIGHT, attention_picture, style_sheet, training_charts
from tcompress.reporting.headline import headline_of
from tcompress.reporting.over_seeds import seed_groups
from tcompress.reporting.overview_charts import Shown, map_of, shown_models, trade_offs
from tcompress.reporting.shipped import file_numbers
from tcompress.reporting.tree import (
    Amount,
    LayerReport,
    ModelReport,
    mean_errors,
    numbers_of,
)

if TYPE_CHECKING:
    from jinja2 import Template

_LIGHTEST, _DARKEST = 4, 62  # per cent; darker shades would take the contrast from the numbers


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
    alike: bool  # whether all are the same as far as they are written


def heat_of(layers: Sequence[LayerReport]) -> Heat | None:
    """Makes the table of the most telling kind of error, if there are errors."""
    kind = next(iter(mean_errors(layers)), None)
    if kind is None:
        return None
    groups = fmt.grouped(layers, lambda layer: (layer.role, layer.block))
    errors = {cell: mean_errors(group).get(kind) for cell, group in groups.items()}
    means = {cell: error for cell, error in errors.items() if error is not None}
    worst = max(means, key=lambda cell: means[cell])
    low, top = min(means.values()), means[worst]
    alike = fmt.error_text(low) == fmt.error_text(top)

    def shade(cell: tuple[str, str]) -> Shade | None:
        """Shades span what errors there are: differences show, though all are small or large."""
        if cell not in means:
            return None
        share = 0.5 if alike else (means[cell] - low) / (top - low)
        return Shade(means[cell], round(_LIGHTEST + share * (_DARKEST - _LIGHTEST)))

    short = fmt.short_names(layer.block for layer in layers)
    roles = dict.fromkeys(layer.role for layer in layers)
    columns = fmt.block_numbers(list(short.values()))
    rows = [(role, [shade((role, block)) for block in short]) for role in roles]
    return Heat(fmt.error_name(kind), columns, rows, (short[worst[1]], worst[0], top), low, alike)


def render_html(reports: Sequence[ModelReport]) -> str:
    """Renders models as a page; the same reports always give the same text.

    What the page shows is worked out here, so that its template only has to place it.
    """
    models = shown_models(reports)
    names = [model.name for model in models]
    sections, headline = list(map(_section, models)), headline_of(reports, names)
    page = {
        "title": names[0] if len(names) == 1 else f"{len(names)} models side by side",
        "sentence": headline.sentence,
        "figures": headline.figures,
        "featured": sections[headline.model],
        "sections": sections,
        "summary": table_rows.summary_of(reports),
        "dense": table_rows.shows_dense(reports),
        "sets_note": table_rows.sets_note(reports),
        "pictures": trade_offs(models),
        "seeds": seed_groups(reports),
        "published": table_rows.published(reports),
    }
    colours = {"light": LIGHT, "styles": style_sheet()}
    return _template().render(page=page, version=tcompress.__version__, **colours)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _section(model: Shown) -> dict[str, Any]:
    report = model.report
    recipe, roles, metrics = report.recipe, _roles(report.layers), []
    numbers = sorted(numbers_of([report])[0], key=lambda metric: isinstance(metric, Mean))
    for label, metric in zip(fmt.metric_labels(numbers), numbers, strict=True):
        metrics.append((table_rows.against(label, report, metric), metric))
        bare: dict[str, Any] = {"interval": None, "difference": None, "protocol": {}}
        metrics += [
            (f"{label} of {name} (no model)", metric.model_copy(update={**bare, "value": value}))
            for name, value in table_rows.naive_values(metric).items()
        ]
    dense = next((item.value or 0.0 for item in report.alternatives), 0.0)
    files = sorted(file_numbers(report), key=lambda metric: isinstance(metric, Mean))
    for label, own in zip(fmt.metric_labels(files), files, strict=True):
        metrics.append((table_rows.against(f"{label}, int8 file", report, own), own))
    return {
        **model._asdict(),
        "map": map_of(report),
        "looks": None if report.attention_map is None else attention_picture(report.attention_map),
        "alternatives": [
            dict(item) | {"kept": item.value / dense if item.value and dense > 0 else None}
            for item in report.alternatives
        ],
        "roles": roles,
        # Of plain layers they are the parameters once more.
        "counts_macs": any(row["macs"] != row["parameters"] for row in roles),
        "parts": table_rows.parts_of(report),
        "errors": _sentence(fmt.errors_note(list(report.errors)[:1])),
        "heat": heat_of(report.layers),
        "metrics": metrics,
        "curves": [list(training_charts(run).values()) for run in report.training],
        "timings": {fmt.machine_text(speed): speed.protocol for speed in report.speed},
        "calibration": table_rows.calibration_text(report),
        "healed": table_rows.healed_text(report),
        "recipe": "" if not recipe else yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True),
    }


def _roles(layers: Sequence[LayerReport]) -> list[dict[str, Any]]:
    rows = []
    for role, group in fmt.grouped(layers, lambda layer: layer.role).items():
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


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def code(text: str) -> Markup:
    """Marks what stands between backticks as code."""
    if text.count("`") % 2:  # one of them is alone
        return escape(text)
    # As plain text: of `Markup` the tags that come in would be escaped too.
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


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
        "code": code,
        "plain": _plain,
        "position": lambda items, item: items.index(item),
    }
    source = files("tcompress").joinpath("assets", "report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)


def write_html(reports: Sequence[ModelReport], path: Path | str) -> Path:
    """Writes models as a page; an older one is replaced."""
    target = Path(path).expanduser()
    check_page(target)
    write_named(target, render_html(reports))
    return target
