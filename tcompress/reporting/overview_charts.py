"""The pictures of a report, each with a name: what quality costs, what became of each layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from string import ascii_uppercase
from typing import NamedTuple

from markupsafe import Markup

from tcompress.artifact.manifest import Alternative, Metric
from tcompress.models.names import ALIASES
from tcompress.reporting import formatting as fmt
from tcompress.reporting.charts import (
    COLOURS,
    GREY,
    Dot,
    Mark,
    Tile,
    attention_picture,
    layer_map,
    trade_off,
    training_charts,
)
from tcompress.reporting.console import short_name
from tcompress.reporting.headline import file_of
from tcompress.reporting.shipped import file_metric, int8_speed, shipped_of
from tcompress.reporting.tree import (
    Amount,
    ModelReport,
    main_metrics,
    main_speeds,
    other_baseline,
)

_DENSE = "dense int8"
_MOST_LINES = 4  # of costs without a quality, in one picture


class Picture(NamedTuple):
    """A drawing, and the stem of the file that it may become."""

    name: str
    svg: Markup


class Shown(NamedTuple):
    """A model as pictures and tables name it."""

    mark: str  # A, B, ..., Z, 27, ...
    colour: int
    name: str
    report: ModelReport


def shown_models(reports: Sequence[ModelReport]) -> list[Shown]:
    """Assign each model its letter, colour and name."""
    marks = [*ascii_uppercase, *map(str, range(27, len(reports) + 1))]
    return [
        Shown(marks[i], i % COLOURS, short_name(report, reports), report)
        for i, report in enumerate(reports)
    ]


def all_pictures(models: Sequence[Shown]) -> list[Picture]:
    """Draws everything that a page shows, under names that differ."""
    pictures = trade_offs(models)
    for model in models:
        own = map_of(model.report)
        name = re.sub(r"[^\w.-]+", "-", model.name).strip("-.") or "model"
        end = f"{model.mark.lower()}-{name}"
        pictures += [] if own is None else [Picture(f"layers-{end}", own)]
        looks = model.report.attention_map
        pictures += [] if looks is None else [Picture(f"attention-{end}", attention_picture(looks))]
        for number, run in enumerate(model.report.training, 1):
            for kind, chart in training_charts(run).items():
                pictures.append(Picture(f"training-{number}-{kind}-{end}", chart))
    return pictures


def trade_offs(models: Sequence[Shown]) -> list[Picture]:
    """Draws quality against time and against bytes, where there is anything to compare.

    Where no quality was measured in PyTorch, all numbers are those of files.
    """
    reports = [model.report for model in models]
    metrics, speeds = main_metrics(reports), main_speeds(reports)
    sizes: list[int | None] = [report.bytes_on_disk.now for report in reports]
    dense_sizes = [float(report.bytes_on_disk.dense) for report in reports]
    files = [file_of(report.exports) for report in reports]
    dense_files = [file for report in reports if (file := file_of(report.dense_exports))]
    there = [speed and int8_speed(r, speed) for r, speed in zip(reports, speeds, strict=True)]
    words = "bytes on disk"
    if not any(metrics):
        shipped = list(map(shipped_of, reports))
        metrics = [item and item.metric for item in shipped]
        speeds = [item and item.speed for item in shipped]
        sizes = [item and item.file.bytes for item in shipped]
        files, there, dense_files = [None for _ in models], [None for _ in models], []
        words = "bytes of the file"
    pictures = []
    if (timed := next((speed for speed in speeds if speed is not None), None)) is not None:
        dense_time = timed.baseline_milliseconds
        times = [None if s is None else (s.milliseconds, s.baseline_milliseconds) for s in speeds]
        dense_times = (speed.same_runtime_milliseconds for speed in there if speed)
        pictures += _picture(
            "quality-time",
            f"time of a pass ({fmt.pass_text(timed)})",
            lambda value: f"{fmt.tick_text(value)} ms",
            models,
            metrics,
            costs=times,
            file_costs=[None if speed is None else speed.milliseconds for speed in there],
            dense_file_cost=next(filter(None, dense_times), None),
            ring_cost=lambda item: dense_time / item.ratio,
        )
    pairs = zip(sizes, dense_sizes, strict=True)
    return pictures + _picture(
        "quality-bytes",
        words,
        lambda value: fmt.bytes_text(round(value)),
        models,
        metrics,
        costs=[None if size is None else (float(size), dense) for size, dense in pairs],
        file_costs=[None if file is None else float(file.bytes) for file in files],
        dense_file_cost=float(dense_files[0].bytes) if dense_files else None,
        ring_cost=lambda item: float(item.bytes),
    )


def _picture(
    name: str,
    words: str,
    write: Callable[[float], str],
    models: Sequence[Shown],
    metrics: Sequence[Metric | None],
    *,
    costs: Sequence[tuple[float, float] | None],
    file_costs: Sequence[float | None],
    dense_file_cost: float | None,
    ring_cost: Callable[[Alternative], float],
) -> list[Picture]:
    """Draws quality against a cost of each model and its dense one, of files and alternatives."""
    main = next((metric for metric in metrics if metric is not None), None)
    dots, rings = _dots(models, metrics, costs), _rings(models, metrics, ring_cost)
    # What has a ring needs no line, its quality being known.
    is_ringed = any(ring.label == _DENSE for ring in rings)
    marks = [] if dense_file_cost is None or is_ringed else [Mark(_DENSE, dense_file_cost)]
    for model, metric, cost in zip(models, metrics, file_costs, strict=True):
        number, mark = metric and file_metric(model.report, metric), f"{model.mark} int8"
        if cost is not None and number is not None:
            facts = (cost, number.value, number.interval, model.colour)
            dots.append(Dot(mark, f"{model.name} int8", *facts))
        elif cost is not None and model.report.is_smaller:  # the cost alone is known
            marks.append(Mark(mark, cost))
    dots += rings
    if len(dots) < 2 or main is None:
        return []
    lines = marks if len(marks) <= _MOST_LINES else marks[:1]
    drawn = trade_off(dots, words, main.label, write, main.higher_is_better, lines)
    return [Picture(name, drawn)]


def _rings(
    models: Sequence[Shown], metrics: Sequence[Metric | None], cost: Callable[[Alternative], float]
) -> list[Dot]:
    """A ring for each alternative to the only model, if it was measured by the number shown."""
    if len(models) != 1 or (metric := metrics[0]) is None or metric.difference is None:
        return []
    dense, rings = metric.difference.baseline_value, []
    for item in models[0].report.alternatives:
        if (item.name, item.runtime) == ("dense", "torch"):
            if item.value is None or not math.isclose(item.value, dense):
                return []  # measured on other examples since
        elif item.value is not None:
            bits = "" if item.runtime == "torch" else f" {item.runtime.removeprefix('onnx-')}"
            name, label = f"{item.name}{bits}", f"{item.name.partition(',')[0]}{bits}"
            rings.append(Dot("", name, cost(item), item.value, item.interval, GREY, label))
    return rings


def _dots(
    models: Sequence[Shown],
    metrics: Sequence[Metric | None],
    costs: Sequence[tuple[float, float] | None],
) -> list[Dot]:
    """A dot for each model, and one for each baseline that is not itself a model here."""
    dots: dict[object, Dot] = {}
    for index, (model, metric, cost) in enumerate(zip(models, metrics, costs, strict=True)):
        if metric is not None and cost is not None:
            dots[index] = _dot(model, cost[0], metric)
    for model, metric, cost in zip(models, metrics, costs, strict=True):
        if metric is None or cost is None or (gap := metric.difference) is None:
            continue
        value, interval = gap.baseline_value, gap.baseline_interval
        own = next((i for i, m in enumerate(models) if _is_baseline(m, gap.baseline)), None)
        if own is None and other_baseline(model.report, metric) is not None:
            continue  # its cost is not that of the dense model
        if own is None:
            name = f"dense ({gap.baseline})"
            dots.setdefault(name, Dot("", name, cost[1], value, interval))
        elif own not in dots:  # a dense model is timed beside others, not by itself
            found = metric.model_copy(update={"value": value, "interval": interval})
            dots[own] = _dot(models[own], cost[1], found)
    return [dots[key] for key in sorted(dots, key=lambda key: (isinstance(key, str), str(key)))]


def _dot(model: Shown, cost: float, metric: Metric) -> Dot:
    return Dot(model.mark, model.name, cost, metric.value, metric.interval, model.colour)


def _is_baseline(model: Shown, name: str) -> bool:
    """Return whether a dense model is the one that another was compared with, under any name."""
    ends = (Path(ALIASES.get(item, item)).name for item in (model.report.name, name))
    return not model.report.is_smaller and len(set(ends)) == 1


def map_of(report: ModelReport) -> Markup | None:
    """Draws what is kept of every layer, by block and role; None where nothing was rewritten."""
    columns = _columns(report)
    if not report.is_smaller or not columns:
        return None
    entries: list[tuple[tuple[str, str], Amount, str]] = []
    for layer in report.layers:
        words = layer.structure
        for kind, error in list(layer.errors.items())[:1]:
            words += f", {fmt.error_name(kind)} {fmt.error_text(error)}"
        entries.append(((layer.role, layer.block), layer.parameters, words))
    for item in report.left:
        if item.role and item.parameters:
            amount = Amount.of(item.parameters, item.parameters)
            entries.append(((item.role, item.block), amount, f"dense: {item.reason}"))
    layers = fmt.grouped(entries, itemgetter(0))
    roles = list(dict.fromkeys(role for role, _ in layers)) or ["block"]
    rows = []
    for role in roles:
        cells: list[Tile | None] = []
        for label, block in columns:
            place = (role, block or "")
            if block is None:
                cells.append(Tile(None, f"block {label}: dropped"))
            elif place in layers:
                share = Amount.sum_of(amount for _, amount, _ in layers[place]).kept
                text = "; ".join(dict.fromkeys(words for *_, words in layers[place]))
                where = f"{role}, block {label}" if block else role
                cells.append(Tile(share, f"{where}: {fmt.share_text(share)} kept, {text}"))
            else:
                kept = not layers and block
                cells.append(Tile(1.0, f"block {label}: kept as it is") if kept else None)
        rows.append((role, cells))
    return layer_map([label for label, _ in columns], rows)


def _columns(report: ModelReport) -> list[tuple[str, str | None]]:
    """Labels of blocks, by the dense model's numbers, with their names now; None of dropped ones.

    What is outside the stacks of blocks, such as a word embedding, comes first.
    """
    left = (item.block for item in report.left if item.role and item.parameters)
    every = {*(layer.block for layer in report.layers), *left}
    blocks = sorted((block for block in every if re.search(r"\d", block)), key=_natural)
    outside: list[tuple[str, str | None]] = [
        (block.rpartition(".")[2], block) for block in sorted(every.difference(blocks))
    ]
    depth = report.depth
    if depth is None or depth.deeper or depth.chosen == "later":
        names = [fmt.short_names(blocks)[block] for block in blocks]
        return outside + list(zip(fmt.block_numbers(names), blocks, strict=True))
    found: list[tuple[str, str | None]] = []
    for stack in depth.stacks:
        new = {old: f"{stack.path}.{index}" for index, old in enumerate(stack.kept)}
        for old in range(stack.blocks):
            label = f"{old}" if len(depth.stacks) == 1 else f"{stack.name} {old}"
            own = new.get(old)
            # Of checkpoints names are shorter, or longer, than paths in the model.
            name = next((b for b in blocks if own and _same_end(b, own)), own)
            found.append((label, name))
    return outside + found


def _same_end(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return f".{long}".endswith(f".{short}")


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(step), "") if step.isdecimal() else (-1, step) for step in name.split(".")]
