"""The models of a page side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tcompress.artifact.manifest import Metric
from tcompress.reporting.budget import budget_rows, budget_text, error_note
from tcompress.reporting.choice import best_speed, main_metrics, other_baseline
from tcompress.reporting.rows import calibration_text, healed_text, start_text
from tcompress.reporting.tree import Amount, ModelReport
from tcompress.reporting.words import (
    bytes_text,
    error_name,
    error_text,
    interval_text,
    machine_text,
    metric_ratio,
    ratio_text,
    signed_text,
    value_text,
)


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
        Line(name, tuple(map(_metric, metrics))),
        Line("difference to dense", tuple(map(_difference, reports, metrics))),
        Line("best speed", _cells(reports, _speed)),
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


def _metric(metric: Metric | None) -> Cell:
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


def _speed(report: ModelReport) -> Cell:
    speed = best_speed(report)
    if speed is None:
        return Cell()
    mode = "" if speed.mode == "eager" else f", {speed.mode}"
    note = f"B={speed.batch} T={speed.length}{mode}, {machine_text(speed)}"
    return Cell(ratio_text(speed.ratio, 2), note)
