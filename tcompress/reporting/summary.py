"""The models of a page side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def summary_of(reports: Sequence[ModelReport]) -> tuple[Line, ...]:
    """Lists the quantities that at least one model has."""
    length = reports[0].macs_per_token.length
    kinds = dict.fromkeys(kind for report in reports for kind in list(report.errors)[:1])
    metrics = main_metrics(reports)
    name = next((metric.name for metric in metrics if metric is not None), "")
    when = ", before training" if any(report.training for report in reports) else ""
    lines = [
        Line("method", _cells(reports, _method)),
        Line("parameters", _cells(reports, lambda r: _amount(r.parameters.total))),
        Line("of them rewritten", _cells(reports, _rewritten)),
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
    return tuple(line for line in lines if any(cell.value for cell in line.cells))


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


def _rewritten(report: ModelReport) -> Cell:
    return _amount(report.parameters.rewritten) if report.parameters.rewritten.dense else Cell()


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
