"""Tables for the terminal; their rows are those of the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tcompress.artifact.manifest import Speed
from tcompress.conversion.estimate import Estimate
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.reporting import formatting as fmt
from tcompress.reporting.model_report import layer_report
from tcompress.reporting.over_seeds import SeedGroup, seed_groups
from tcompress.reporting.table_rows import (
    Row,
    amount,
    budget_rows,
    calibration_text,
    form_rows,
    is_open_ended,
    published,
    rows_of,
    sets_note,
    size,
    start_text,
)
from tcompress.reporting.tree import Amount, LayerReport, ModelReport, mean_errors

MOST_LAYERS = 40
"""Above this many layers a table shows them by role, unless all are asked for."""

_COLUMN = 26  # width that one model takes in a comparison
_LABELS = 20


def speed_table(speeds: Sequence[Speed]) -> Table:
    """Lists times; a ratio above 1 means that the model is faster than the dense one."""
    machines = list(dict.fromkeys(map(fmt.machine_text, speeds)))
    several = len(machines) > 1
    table = fmt.table()
    same = any(speed.same_runtime_milliseconds for speed in speeds)
    table.caption = "\n".join([*([] if several else machines), *fmt.speed_notes(speeds)]) or None
    for name in ("batch", "length", "mode", *(("machine",) if several else ())):
        table.add_column(name, justify="right" if name in ("batch", "length") else "left")
    middle = "dense there" if same else "tokens/s"  # a screen has no room for both
    for name in ("time", "dense", "ratio", middle, "memory", "dense"):
        table.add_column(name, justify="right", no_wrap=True)
    for speed in speeds:
        table.add_row(
            str(speed.batch),
            str(speed.length),
            speed.how,
            *([fmt.machine_text(speed)] if several else []),
            fmt.median_text(speed.milliseconds, speed.spread),
            fmt.median_text(speed.baseline_milliseconds, speed.baseline_spread),
            fmt.speed_text(speed),
            _same_runtime(speed) if same else f"{speed.tokens_per_second:,.0f}",
            fmt.memory_text(speed.peak_bytes, speed.weight_bytes),
            fmt.memory_text(speed.baseline_peak_bytes, speed.baseline_weight_bytes),
        )
    return table


def _same_runtime(speed: Speed) -> str:
    time = speed.same_runtime_milliseconds
    if time is None:
        return ""
    return f"{fmt.milliseconds_text(time)} {fmt.ratio_text(time / speed.milliseconds, 2)}"


def render(reports: Sequence[ModelReport], per_layer: bool = False) -> RenderableType:
    """Renders models: one with its layers, several side by side; `per_layer` shows all layers."""
    alone = len(reports) == 1
    kinds = dict.fromkeys(kind for report in reports for kind in report.errors)
    notes = [note for note in (fmt.errors_note(kinds), sets_note(reports)) if note]
    parts: list[RenderableType] = _single(reports[0]) if alone else [Comparison(reports)]
    parts += [Text(note, style="dim") for note in notes]
    for report in reports:
        if report.layers and (per_layer or alone):
            title = "" if alone else short_name(report, reports)
            parts.append(layer_table(report.layers, per_layer, title))
        if report.left and alone:
            parts.append(fmt.reason_table("left dense", report.left))
    parts += [seeds_table(group) for group in seed_groups(reports)]
    for report in reports:
        name = "" if alone else f" of {short_name(report, reports)}"
        parts += [Text(f"warning{name}: {text}", style="yellow") for text in report.warnings]
    if rows := published(reports):
        names = ("row", "metric", "where", "comparable", "paper", "ours")
        parts.append(fmt.table(*names, right=names[4:], title="published", rows=rows))
    return Group(*parts)


def seeds_table(group: SeedGroup) -> RenderableType:
    """Render the numbers of models that differ in their seeds alone."""
    seeds = [f"seed {seed}" for seed in group.seeds]
    names = ("number", "mean ± deviation", *seeds)
    rows = [(item.name, item.text, *map(fmt.value_text, item.values)) for item in group.numbers]
    title = f"{group.name}, {len(seeds)} seeds"
    return fmt.table(*names, right=names[1:], title=title, rows=rows)


def render_plan(
    plan: Plan, estimate: Estimate | None = None, source_bytes: int | None = None
) -> RenderableType:
    """Renders what a conversion would do, and what that would cost where it is estimated."""
    amounts = [
        ("rewritten layers", plan.dense_rewritten, plan.structured_rewritten),
        ("all blocks", plan.block_parameters, plan.block_parameters - plan.saved_in_blocks),
        *(("word embedding", plan.whole_table(item), item.parameters) for item in plan.embeddings),
        ("whole model", plan.parameters, plan.parameters - plan.saved),
    ]
    rows = form_rows(plan)
    open_ended = is_open_ended(plan.budget)
    if open_ended:
        rows += [Row(name, "", f"{dense:,}") for name, dense, _ in amounts if dense]
    else:
        rows += [amount(name, Amount.of(dense, now)) for name, dense, now in amounts if dense]
    if estimate is not None:
        if not open_ended:
            rows.append(size("bytes on disk", source_bytes, estimate.disk_bytes))
        rows.append(Row("peak memory", f"about {fmt.bytes_text(estimate.memory_bytes)}"))
        if estimate.scratch_bytes:
            text = f"about {fmt.bytes_text(estimate.scratch_bytes)}"
            rows.append(Row("on disk meanwhile", text))
        if estimate.read_bytes:
            rows.append(Row("weights read", fmt.bytes_text(estimate.read_bytes)))
        if estimate.candidates:
            told = f"{estimate.candidates:,}, each alone in the dense model"
            rows.append(Row("candidates tried", told))
        rows.append(Row("time", f"roughly {fmt.time_text(estimate.seconds)}"))
    rows += budget_rows(plan.budget)
    title = Text.assemble((plan.source, "bold"), f" · {plan.family} · {plan.method}")
    parts: list[RenderableType] = [title, _amount_table(rows, "now", "after")]
    if plan.coverage is not None:
        parts.append(Text(fmt.coverage_text(plan.coverage)))
    if open_ended:
        parts += [Text(LATER), shape_table(plan.layers)]
    elif plan.layers:
        layers = [layer_report(entry, method=plan.method) for entry in plan.layers]
        parts.append(layer_table(layers))
    if plan.left:
        parts.append(fmt.reason_table("left dense", plan.left))
    parts += [Text(f"warning: {text}", style="yellow") for text in plan.warnings]
    return Group(*parts)


LATER = (
    "The sizes of layers are not known yet: converting measures what each candidate costs and "
    "takes, and says what is out of reach before anything is fitted. These layers may change:"
)


def shape_table(layers: Sequence[LayerPlan]) -> Table:
    """Lists layers whose sizes are still to be chosen, those alike in one row."""
    table = fmt.table("layers", "role")
    for name in ("in → out", "params now"):
        table.add_column(name, justify="right", no_wrap=True)
    groups = fmt.grouped(layers, lambda entry: (entry.role, entry.in_features, entry.out_features))
    for group in groups.values():
        first, count = group[0], sum(entry.dense_parameters for entry in group)
        widths = f"{first.in_features} → {first.out_features}"
        table.add_row(str(len(group)), first.role, widths, f"{count:,}")
    return table


@dataclass(frozen=True)
class Comparison:
    """Models side by side, as many in one table as the terminal is wide."""

    reports: Sequence[ModelReport]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = max(1, (options.max_width - _LABELS) // _COLUMN)
        for start in range(0, len(self.reports), count):
            yield self._table(self.reports[start : start + count])

    def _table(self, reports: Sequence[ModelReport]) -> Table:
        table = fmt.table("")
        rows: list[dict[str, Row]] = []
        for report in reports:
            name = Text(short_name(report, self.reports), overflow="fold")
            table.add_column(name, justify="right", overflow="fold")
            own = [*rows_of(report, self.reports), *budget_rows(report.budget)]
            rows.append({row.label: row for row in own if row.label})
        for label in dict.fromkeys(label for row in rows for label in row):
            cells = [row.get(label, Row(label)) for row in rows]
            table.add_row(label, *(f"{cell.value}  {cell.kept:>6}".rstrip() for cell in cells))
        return table


def short_name(report: ModelReport, others: Iterable[ModelReport] = ()) -> str:
    """Shorten a model's name to its last part, unless others have the same."""
    short = Path(report.name).name or report.name
    alike = [other for other in others if Path(other.name).name == short]
    return short if len(alike) < 2 else report.name


def layer_table(layers: Sequence[LayerReport], per_layer: bool = False, title: str = "") -> Table:
    """Lists layers with their most telling error; of many, those alike are one row."""
    one_by_one = per_layer or len(layers) <= MOST_LAYERS
    kind = next(iter(mean_errors(layers)), None)
    first = "block" if one_by_one else "layers"
    table = fmt.table(first, "role", "structure", title=title)
    right = ["in → out", "params", "kept"]
    right += [] if kind is None else [fmt.error_name(kind).replace(" ", "\n")]
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    alike = attrgetter("role", "structure", "in_features", "out_features")
    groups = [[item] for item in layers] if one_by_one else fmt.grouped(layers, alike).values()
    names = fmt.short_names(layer.block for layer in layers)
    before = ""
    for group in groups:
        layer, parameters = group[0], Amount.sum_of(item.parameters for item in group)
        block = names[layer.block] if one_by_one else str(len(group))
        widths = f"{layer.in_features} → {layer.out_features}"
        error = mean_errors(group).get(kind or "")
        table.add_row(
            "" if one_by_one and block == before else block,
            layer.role,
            layer.structure,
            widths if layer.experts is None else f"{layer.experts} x ({widths})",
            f"{parameters.now:,}",
            fmt.share_text(parameters.kept),
            *([] if error is None else [fmt.error_text(error)]),
        )
        before = block
    return table


def _single(report: ModelReport) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(short_name(report), style="bold")]
    facts = [report.family, report.method]
    if report.init == "random":
        facts += [f"weights {start_text(report)}", "no teacher"]
    elif report.calibration is not None:
        facts.append(f"calibration {calibration_text(report)}")
    parts.append(Text(" · ".join(facts), style="dim"))
    if report.source is not None and report.method != "dense" and report.init == "pretrained":
        parts.append(Text(f"from {report.source}", style="dim"))
    parts.append(_amount_table([*rows_of(report), *budget_rows(report.budget)], "dense", "now"))
    if report.coverage is not None:
        parts.append(Text(fmt.coverage_text(report.coverage)))
    return parts


def _amount_table(rows: Sequence[Row], dense: str, now: str) -> Table:
    cells = [(row.label, row.dense, row.value, row.kept) for row in rows]
    return fmt.table("parameters", dense, now, "kept", right=(dense, now, "kept"), rows=cells)
