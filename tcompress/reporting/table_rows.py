"""Rows of tables: lines about a model, its budget, published numbers, models side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from statistics import fmean

from tcompress.artifact.manifest import Metric, Speed
from tcompress.options.method_options import Budget
from tcompress.options.steps import PaperRow
from tcompress.planning.entries import AttentionPlan, BudgetPlan, DepthPlan
from tcompress.reporting.formatting import (
    bytes_text,
    describe_attention,
    error_name,
    error_text,
    interval_text,
    machine_text,
    metric_labels,
    metric_ratio,
    milliseconds_text,
    ratio_text,
    signed_text,
    time_text,
    value_text,
)
from tcompress.reporting.tree import (
    Amount,
    ModelReport,
    best_speed,
    main_metrics,
    metric_key,
    other_baseline,
)

# Lines about a model: a label with what was before, what is now, and their ratio.


@dataclass(frozen=True)
class Row:
    """One line about a model: a quantity before and after, or a single value."""

    label: str
    value: str = ""
    dense: str = ""
    kept: str = ""


def rows_of(
    report: ModelReport, others: Sequence[ModelReport] = (), facts: bool = False
) -> list[Row]:
    """Lists the lines about one model.

    Args:
        report: The model.
        others: Models shown beside it.
        facts: Say too what a title says otherwise.
    """
    rows = []
    if facts:
        rows += [Row("family", report.family), Row("method", report.method)]
        if any(item.init == "random" for item in (report, *others)):
            rows.append(Row("start", start_text(report)))
        rows.append(Row("calibration", calibration_text(report)))
    parts = report.parameters
    if report.depth is not None:
        rows += depth_rows(report.depth)
    elif facts and any(other.depth is not None for other in others):
        rows.append(Row("blocks"))  # keeps its place beside models that lack some
    if report.attention:
        rows.append(attention_row(report.attention))
    elif facts and any(other.attention for other in others):
        rows.append(Row("attention"))
    if parts.rewritten.dense:
        rows.append(amount("rewritten layers", parts.rewritten))
    elif facts:  # keeps its place beside models that have some
        rows.append(Row("rewritten layers"))
    rows += [
        amount("all blocks", parts.blocks),
        amount("embeddings", parts.embeddings),
        amount("other", parts.other),
        amount("whole model", parts.total),
    ]
    disk, macs = report.bytes_on_disk, report.macs_per_token
    rows.append(size("bytes on disk", disk.dense, disk.now))
    rows.append(amount(f"MACs/token, T={macs.length}", macs))
    # Errors are those of the fit: training changes layers without measuring them again.
    when = ", before training" if report.training else ""
    for kind, error in report.errors.items():
        rows.append(Row(error_name(kind) + when, error_text(error)))
    return rows + _records(report, (report, *others))


def depth_rows(depth: DepthPlan) -> list[Row]:
    """Lines about the blocks that stay, and about other numbers of blocks that were tried."""
    kept = f"{depth.kept / depth.blocks:.1%}"
    rows = [Row("blocks", f"{depth.kept}: {depth.which}", str(depth.blocks), kept)]
    whole = next((change for change in depth.weighed if change is not None), None)
    for gone, change in enumerate(depth.weighed):
        label = f"  change of output, {depth.blocks - gone} blocks"
        ratio = ratio_text(change / whole) if change is not None and whole else ""
        rows.append(Row(label, "out of reach" if change is None else value_text(change), "", ratio))
    return rows


def attention_row(entries: Sequence[AttentionPlan]) -> Row:
    """A line about attentions with another mechanism."""
    return Row("attention", describe_attention(entries))


def calibration_text(report: ModelReport) -> str:
    """Says what the fit looked at."""
    facts = report.calibration
    if facts is None or report.init == "random":
        return ""
    if facts.name == "none":
        return "none"
    return f"{facts.name}, {facts.samples:,} samples"


def start_text(report: ModelReport) -> str:
    """Says what a model began with, where it was not pretrained."""
    return f"at random, seed {report.seed}" if report.init == "random" else ""


def healed_text(report: ModelReport) -> str:
    """Says whether a model was trained after its conversion, and for how long."""
    healed = report.is_smaller and report.init == "pretrained"
    if not report.training:
        return "no" if healed or report.init == "random" else ""
    steps = sum(run.steps for run in report.training)
    minutes = time_text(sum(run.seconds for run in report.training))
    return f"{'yes, ' if healed else ''}{steps:,} steps, {minutes}"


def amount(label: str, amount: Amount) -> Row:
    """A line about a count before and after."""
    return Row(label, f"{amount.now:,}", f"{amount.dense:,}", f"{amount.kept:.1%}")


def size(label: str, dense: int | None, now: int) -> Row:
    """A line about bytes before and after."""
    if dense is None:
        return Row(label, bytes_text(now))
    return Row(label, bytes_text(now), bytes_text(dense), f"{now / max(1, dense):.1%}")


def _records(report: ModelReport, shown: Sequence[ModelReport]) -> list[Row]:
    """What was done and measured after the conversion."""
    rows = []
    if any(item.training or item.speed for item in shown) and healed_text(report):
        healed = any(item.is_smaller and item.init == "pretrained" for item in shown)
        label = "healed" if healed else "trained"
        rows.append(Row(label, healed_text(report)))
    labels = _labels(shown)
    for metric in report.metrics:
        rows += _metric(labels[metric_key(metric)], metric, other_baseline(report, metric))
    machines = {machine_text(speed) for item in shown for speed in item.speed}
    return rows + [_speed(speed, several=len(machines) > 1) for speed in report.speed]


def _labels(shown: Sequence[ModelReport]) -> dict[tuple[str, ...], str]:
    """Names of metrics; those that cannot be compared do not share one."""
    found = {metric_key(metric): metric for item in shown for metric in item.metrics}
    keys = sorted(found)  # the same names whichever model is asked about
    return dict(zip(keys, metric_labels(found[key] for key in keys), strict=True))


def _metric(label: str, metric: Metric, against: str | None) -> list[Row]:
    label = label if against is None else f"{label}, against {against}"
    found, ratio = metric.difference, ratio_text(metric_ratio(metric))
    dense = "" if found is None else value_text(found.baseline_value)
    rows = [Row(label, value_text(metric.value), dense, ratio)]
    if metric.interval is not None:
        level = f"{metric.interval.level:.0%} interval"
        rows.append(Row(f"  {level} of {label}", interval_text(metric.interval)))
    return rows


def _speed(speed: Speed, several: bool) -> Row:
    words = ["time" if speed.mode == "eager" else speed.mode]
    words.append(f"B={speed.batch} T={speed.length}")
    label = " ".join(words) + (f", {machine_text(speed)}" if several else "")
    now, dense = map(milliseconds_text, (speed.milliseconds, speed.baseline_milliseconds))
    return Row(label, now, dense, ratio_text(speed.ratio, 2) + (" ?" if speed.is_noisy else ""))


# What a budget was, how it was shared out, and what that is predicted to cost.


_SHARED = {
    "uniform": "alike for all layers",
    "loss": "by predicted loss",
    "later": "shared out when converting: what is shown stands in",
}


def budget_text(budget: BudgetPlan) -> str:
    """Says what may be kept, such as `--target 0.25, by predicted loss`."""
    return f"{Budget(budget.kind, budget.limit)}, {_SHARED[budget.chosen]}"


def budget_rows(budget: BudgetPlan | None) -> list[Row]:
    """Lines about a budget; none where there is none, or where other lines say it all."""
    if budget is None or (budget.kind == "target" and budget.chosen == "uniform"):
        return []
    rows = [Row("budget", str(Budget(budget.kind, budget.limit))), Row("", _SHARED[budget.chosen])]
    if budget.error is not None:
        rows.append(Row("predicted error", error_text(budget.error)))
    if budget.uniform_error is not None and budget.chosen == "loss":
        rows.append(Row("  shared out alike", error_text(budget.uniform_error)))
    for name, error in budget.single_errors.items():
        rows.append(Row(f"  {name} alone", error_text(error)))
    least = budget.tried.get(budget.taken or "")
    for name, change in budget.tried.items():
        label = "  change of output, " + ("as predicted" if name == "auto" else f"{name} alone")
        ratio = "taken" if name == budget.taken else ratio_text(change / least) if least else ""
        rows.append(Row(label, value_text(change), "", ratio))
    return rows


def error_note(budget: BudgetPlan) -> str:
    """Says in a few words what else the same budget would have come to."""
    others = dict(budget.single_errors)
    words = [f"{name} alone {error_text(error)}" for name, error in others.items()]
    if budget.uniform_error is not None and budget.chosen == "loss":
        words.insert(0, f"shared out alike {error_text(budget.uniform_error)}")
    return "; ".join(words)


# Published numbers with ours beside them.


@dataclass(frozen=True)
class Published:
    """A published number.

    Attributes:
        row: The model that it is of.
        metric: What was measured.
        source: Where it stands.
        comparable: Whether ours is measured alike, or why it is not.
        paper: The number.
        ours: That of our model of this kind, where one was measured; of several each with its
            name, or their mean where the published number is one.
    """

    row: str
    metric: str
    source: str
    comparable: str
    paper: str
    ours: str


def published(reports: Sequence[ModelReport]) -> list[Published]:
    """Lists what the recipes of models cite, each number once.

    A recipe cites rows of its own model and of those that its paper compares it with. The latter
    get a number where another of the models was made by a recipe that has the row as its own.
    """
    own: dict[tuple[str, str, str], list[tuple[PaperRow, ModelReport]]] = {}
    for report in reports:
        for row in report.paper:
            own.setdefault((row.row, row.metric, row.source), []).append((row, report))
    return [_beside(cited) for cited in own.values()]


def _beside(cited: Sequence[tuple[PaperRow, ModelReport]]) -> Published:
    """A published number beside those of the models that it is about."""
    row = next((row for row, _ in cited if row.ours), cited[0][0])
    values = [(report.name, _ours(row, report)) for other, report in cited if other.ours]
    known = [(PurePath(name).name, value) for name, value in values if value is not None]
    ours = "; ".join(f"{name} {value_text(value)}" for name, value in known)
    if len(known) == 1:
        ours = value_text(known[0][1])
    elif known and row.mean:
        ours = f"{value_text(fmean(value for _, value in known))}, mean of {len(known)}"
    why = "yes" if row.comparable else f"no: {row.why}" if row.why else "no"
    return Published(row.row, row.metric, row.source, why, f"{row.value:g}", ours)


def _ours(row: PaperRow, report: ModelReport) -> float | None:
    metrics = [metric for metric in report.metrics if metric.name == row.metric]
    if not metrics:
        return None
    own = metrics[-1]
    # Papers that count in percent get ours in percent; errors are no shares of anything.
    percent = own.higher_is_better and row.value > 1 and 0 <= own.value <= 1
    return own.value * (100 if percent else 1)


# The models of a page side by side.


@dataclass(frozen=True)
class Cell:
    """A number, and in small letters what belongs to it."""

    value: str = ""
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A quantity of every model."""

    label: str
    cells: tuple[Cell, ...]


def shows_dense(reports: Sequence[ModelReport]) -> bool:
    """Tells whether a column stands for the dense model: beside one model made of it."""
    return len(reports) == 1 and reports[0].is_smaller and reports[0].init == "pretrained"


def summary_of(reports: Sequence[ModelReport]) -> tuple[Line, ...]:
    """Lists the quantities that at least one model has; see `shows_dense`."""
    length = reports[0].macs_per_token.length
    kinds = dict.fromkeys(kind for report in reports for kind in list(report.errors)[:1])
    metrics = main_metrics(reports)
    name = next((metric.name for metric in metrics if metric is not None), "")
    when = ", before training" if any(report.training for report in reports) else ""
    lines = [
        Line("method", _cells(reports, _method)),
        Line("parameters", _cells(reports, lambda r: _amount(r.parameters.total))),
        *(Line(f"  {name}", _cells(reports, _part(name))) for name in parts_of(reports[0])),
        Line("blocks", _cells(reports, _blocks)),
        Line("bytes on disk", _cells(reports, _bytes)),
        Line(f"multiply-adds per token, T={length}", _cells(reports, _macs)),
        Line("budget", _cells(reports, _budget)),
        Line("predicted error", _cells(reports, _predicted)),
        *(Line(f"mean {error_name(kind)}{when}", _errors(reports, kind)) for kind in kinds),
        Line("trained", _cells(reports, lambda r: Cell(healed_text(r)))),
        Line(name, tuple(map(_metric_cell, metrics))),
        Line("difference to dense", tuple(map(_difference, reports, metrics))),
        Line("best speed", _cells(reports, _speed_cell)),
    ]
    lines = [line for line in lines if any(cell.value for cell in line.cells)]
    if not shows_dense(reports):
        return tuple(lines)
    dense = _dense(reports[0], metrics[0])
    return tuple(
        replace(line, cells=(dense.get(line.label, Cell()), *line.cells)) for line in lines
    )


def _dense(report: ModelReport, metric: Metric | None) -> dict[str, Cell]:
    """What is known of the dense model, by label."""
    found = {"method": Cell("dense", report.source or "")}
    total = report.parameters.total.dense
    for name, part in parts_of(report).items():
        note = f"{part.dense / max(1, total):.1%} of the model" if part.dense else ""
        found[f"  {name}"] = Cell(f"{part.dense:,}", note)
    found["parameters"] = Cell(f"{total:,}")
    found["bytes on disk"] = Cell(bytes_text(report.bytes_on_disk.dense))
    macs = report.macs_per_token
    found[f"multiply-adds per token, T={macs.length}"] = Cell(f"{macs.dense:,}")
    if report.depth is not None:
        found["blocks"] = Cell(str(report.depth.blocks))
    if metric is not None and metric.difference is not None and not other_baseline(report, metric):
        found[metric.name] = Cell(value_text(metric.difference.baseline_value))
    return found


def parts_of(report: ModelReport) -> dict[str, Amount]:
    """Splits the parameters of a model into parts that add up to all of them."""
    parts = report.parameters
    rest = {"dense": parts.blocks.dense, "now": parts.blocks.now}
    for name in rest:
        rest[name] -= getattr(parts.rewritten, name)
    return {
        "rewritten layers": parts.rewritten,
        "rest of the blocks": Amount.of(**rest),
        "embeddings": parts.embeddings,
        "elsewhere": parts.other,
    }


def _part(name: str) -> Callable[[ModelReport], Cell]:
    def cell(report: ModelReport) -> Cell:
        part = parts_of(report)[name]
        return _amount(part) if part.dense or part.now else Cell()

    return cell


def _cells(reports: Sequence[ModelReport], cell: object) -> tuple[Cell, ...]:
    assert callable(cell)
    return tuple(cell(report) for report in reports)


def _method(report: ModelReport) -> Cell:
    start = start_text(report)
    start = f"; {start}" if start else ""
    return Cell(report.method, f"{report.family}{start}" + _after(calibration_text(report)))


def _after(text: str) -> str:
    return f"; calibration {text}" if text else ""


def _amount(amount: Amount) -> Cell:
    return Cell(f"{amount.now:,}", f"{amount.kept:.1%}" if amount.kept != 1 else "")


def _blocks(report: ModelReport) -> Cell:
    depth = report.depth
    return Cell() if depth is None else Cell(f"{depth.kept} of {depth.blocks}", depth.which)


def _budget(report: ModelReport) -> Cell:
    budget = report.budget
    return Cell(budget_text(budget)) if budget and budget_rows(budget) else Cell()


def _predicted(report: ModelReport) -> Cell:
    budget = report.budget
    if budget is None or budget.error is None:
        return Cell()
    return Cell(error_text(budget.error), error_note(budget))


def _bytes(report: ModelReport) -> Cell:
    size = report.bytes_on_disk
    return Cell(bytes_text(size.now), f"{size.kept:.1%}" if size.kept != 1 else "")


def _macs(report: ModelReport) -> Cell:
    return _amount(report.macs_per_token)


def _errors(reports: Sequence[ModelReport], kind: str) -> tuple[Cell, ...]:
    return tuple(
        Cell(error_text(report.errors[kind])) if next(iter(report.errors), None) == kind else Cell()
        for report in reports
    )


def _metric_cell(metric: Metric | None) -> Cell:
    if metric is None:
        return Cell()
    note = "" if metric.interval is None else interval_text(metric.interval)
    return Cell(value_text(metric.value), note)


def _difference(report: ModelReport, metric: Metric | None) -> Cell:
    if metric is None or metric.difference is None:
        return Cell()
    found = metric.difference
    notes = [] if found.interval is None else [interval_text(found.interval, signed=True)]
    ratio, other = ratio_text(metric_ratio(metric)), other_baseline(report, metric)
    notes += [f"against {other}, not dense"] if other else []
    return Cell(signed_text(found.value), "; ".join([*notes, *([ratio] if ratio else [])]))


def _speed_cell(report: ModelReport) -> Cell:
    speed = best_speed(report)
    if speed is None:
        return Cell()
    mode = "" if speed.mode == "eager" else f", {speed.mode}"
    note = f"B={speed.batch} T={speed.length}{mode}, {machine_text(speed)}"
    return Cell(ratio_text(speed.ratio, 2), note)
