"""Tables in files: CSV with all numbers, LaTeX for papers, and drawings as SVG beside them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tcompress.artifact.averages import Mean
from tcompress.artifact.manifest import Interval, Metric, Speed
from tcompress.files import check_drawings, check_latex, check_sheet, unwritable, write_named
from tcompress.options.commands import Tables
from tcompress.reporting import formatting as fmt
from tcompress.reporting.charts import alone
from tcompress.reporting.console import short_name
from tcompress.reporting.headline import file_of
from tcompress.reporting.overview_charts import all_pictures, shown_models
from tcompress.reporting.pareto import FrontReport
from tcompress.reporting.shipped import file_metric, int8_speed
from tcompress.reporting.table_rows import Cell, Printed, parts_of
from tcompress.reporting.tree import (
    Amount,
    ModelReport,
    beside_dense,
    main_metrics,
    main_speeds,
    numbers_of,
)

Value = str | float | int | None


class Sheet(NamedTuple):
    """Numbers as they are, with a name for each column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


def csv_text(sheet: Sheet) -> str:
    """Writes a sheet as CSV: floats in full, nothing where there is no number."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(sheet.columns)
    writer.writerows(sheet.rows)
    return file.getvalue()


_PLAIN = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "×": r"$\times$",
    "−": "$-$",
    "±": r"$\pm$",
    "→": r"$\to$",
    "…": r"\ldots{}",
    "–": "--",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def escaped(text: str) -> str:
    """Writes text so that LaTeX prints it as it is; line ends become blanks."""
    return "".join(_PLAIN.get(character, character) for character in " ".join(text.split()))


def latex_text(table: Printed) -> str:
    """Writes a table in the style of `booktabs`; notes, such as intervals, are small."""

    def line(cells: Iterable[str]) -> str:
        return "  " + " & ".join(cells) + r" \\"

    def cell(item: Cell) -> str:
        note = rf" {{\small {escaped(item.note)}}}" if item.note else ""
        return escaped(item.value) + note

    aligned = "l" + "r" * (len(table.columns) - 1)
    lines = [
        "% needs \\usepackage{booktabs}",
        rf"\begin{{tabular}}{{{aligned}}}",
        r"  \toprule",
        line(map(escaped, table.columns)),
        r"  \midrule",
        *(line(map(cell, row)) for row in table.rows),
        r"  \bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def write_tables(tables: Tables, sheet: Sheet, printed: Printed) -> dict[str, str]:
    """Writes the files that are asked for, each whole or not at all; gives paths by kind."""
    written = {}
    for kind, path, check, text in (
        ("csv", tables.csv, check_sheet, csv_text(sheet)),
        ("latex", tables.latex, check_latex, latex_text(printed)),
    ):
        if path is not None:
            target = Path(path).expanduser()
            check(target)
            write_named(target, text)
            written[kind] = str(target)
    return written


def write_figures(reports: Sequence[ModelReport], folder: Path | str) -> list[Path]:
    """Writes each picture of a page as a file of its own, which needs no page and no font."""
    target = Path(folder).expanduser()
    check_drawings(target)
    written = []
    for picture in all_pictures(shown_models(reports)):
        path = target / f"{picture.name}.svg"
        try:
            target.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(target, error) from error
        write_named(path, alone(picture.svg))
        written.append(path)
    return written


_LONG = (
    "model", "method", "quantity", "of", "value", "low", "high", "dense", "dense_low",
    "dense_high", "difference", "difference_low", "difference_high", "ratio", "noisy",
)  # fmt: skip


def report_sheet(reports: Sequence[ModelReport]) -> Sheet:
    """Lists every number of every model in a row of its own.

    `ratio` is the part that is left of sizes and errors, the multiple of the dense model's quality,
    and, of times, how many times as fast as the dense model.
    """
    rows: list[tuple[Value, ...]] = []
    for report, metrics in zip(reports, numbers_of(reports), strict=True):
        name = short_name(report, reports)
        amounts = {
            "parameters": report.parameters.total,
            **{f"parameters, {part}": own for part, own in parts_of(report).items()},
            "bytes on disk": report.bytes_on_disk,
            "multiply-adds per token": report.macs_per_token,
        }
        length = f"T={report.macs_per_token.length}"
        found: list[dict[str, Value]] = [
            {"quantity": label, "of": length if "multiply" in label else "", **_amount(own)}
            for label, own in amounts.items()
        ]
        for file in report.exports:
            dense = file_of(report.dense_exports, file.bits)
            before = None if dense is None else dense.bytes
            facts = {"value": file.bytes, "dense": before}
            ratio = file.bytes / before if before else None
            found.append({"quantity": "bytes", "of": file.file, "ratio": ratio, **facts})
            found.append({"quantity": "cosine", "of": file.file, "value": file.agreement})
            for metric in file.metrics:
                row = _metric(metric.label, beside_dense(report, metric))
                found.append({**row, "of": f"{file.file}, {row['of']}"})
        for kind, error in report.errors.items():
            found.append({"quantity": f"mean {fmt.error_name(kind)}", "value": error})
        for label, own in zip(fmt.metric_labels(metrics), metrics, strict=True):
            found.append(_metric(label, beside_dense(report, own)))
        found += [row for speed in report.speed for row in _times(speed)]
        for row in found:
            rows.append((name, report.method, *(row.get(column) for column in _LONG[2:])))
    return Sheet(_LONG, tuple(rows))


def _amount(amount: Amount) -> dict[str, Value]:
    return {"value": amount.now, "dense": amount.dense, "ratio": amount.kept}


def _metric(label: str, metric: Metric) -> dict[str, Value]:
    gap, data = metric.difference, metric.protocol.get("data")
    names = data if isinstance(data, list) else [data]
    of = "; ".join(str(name) for name in names if name)
    row: dict[str, Value] = {"quantity": label, "of": of, "ratio": metric.ratio}
    row |= _ends("", metric.value, metric.interval)
    if gap is not None:
        row |= _ends("dense", gap.baseline_value, gap.baseline_interval)
        row |= _ends("difference", gap.value, gap.interval)
    return row


def _ends(name: str, value: float, interval: Interval | None) -> dict[str, Value]:
    """A number and its interval under the names of columns."""
    prefix = f"{name}_" if name else ""
    row: dict[str, Value] = {name or "value": value}
    if interval is not None:
        row |= {f"{prefix}low": interval.low, f"{prefix}high": interval.high}
    return row


def _times(speed: Speed) -> list[dict[str, Value]]:
    facts = {"value": speed.milliseconds, "dense": speed.baseline_milliseconds}
    noisy, of = int(speed.is_noisy), fmt.pass_text(speed)
    rows: list[dict[str, Value]] = [
        {"quantity": "milliseconds", "of": of, "ratio": speed.ratio, "noisy": noisy, **facts}
    ]
    if (time := speed.same_runtime_milliseconds) is not None:
        there = {"value": speed.milliseconds, "dense": time, "ratio": time / speed.milliseconds}
        name = "milliseconds, dense in the same runtime"
        rows.append({"quantity": name, "of": of, "noisy": noisy, **there})
    return rows


def report_table(reports: Sequence[ModelReport]) -> Printed:
    """A row for each model: bytes, quality, time, as a paper shows them.

    The dense model comes first where it is none of them, and what it is with eight bits.
    """
    metrics, speeds = main_metrics(reports), main_speeds(reports)
    metrics = [own and beside_dense(r, own) for r, own in zip(reports, metrics, strict=True)]
    main = next((metric for metric in metrics if metric is not None), None)
    timed = next((speed for speed in speeds if speed is not None), None)
    label = "quality" if main is None else main.label
    columns = ("model", "bytes", "of dense", label, "of dense", "time", "speed")
    rows = [*_dense_row(reports, metrics, timed), *_dense_int8_row(reports, timed)]
    for report, metric, speed in zip(reports, metrics, speeds, strict=True):
        name, size = short_name(report, reports), report.bytes_on_disk
        share = size.kept if report.is_smaller else None
        rows.append(_row(name, size.now, share, *_quality(metric), *_time(speed)))
        rows += _int8_row(name, report, timed, main)
    return _used(columns, rows, 1)


def _row(
    name: str,
    size: int | None,
    share: float | None = None,
    quality: Cell | None = None,
    kept: float | None = None,
    time: float | None = None,
    speed: str = "",
) -> tuple[Cell, ...]:
    """Cells of a model in `report_table`; empty ones for what is not known."""
    return (
        Cell(name),
        Cell("" if size is None else fmt.bytes_text(size)),
        Cell(fmt.share_text(share)),
        quality or Cell(),
        Cell(fmt.ratio_text(kept)),
        Cell("" if time is None else fmt.milliseconds_text(time)),
        Cell(speed),
    )


def _quality(metric: Metric | None) -> tuple[Cell | None, float | None]:
    """A number, and what it is of the dense model's."""
    if metric is None:
        return None, None
    return _with_interval(metric.value, metric.interval), metric.ratio


def _time(speed: Speed | None) -> tuple[float | None, str]:
    """Milliseconds, and how many times as fast as the dense model that is."""
    return (None, "") if speed is None else (speed.milliseconds, fmt.speed_text(speed))


def _dense_row(
    reports: Sequence[ModelReport], metrics: Sequence[Metric | None], timed: Speed | None
) -> list[tuple[Cell, ...]]:
    """The dense model of models that share one, where it is not itself among them."""
    sources = {report.source for report in reports}
    if len(sources) > 1 or not all(report.is_smaller for report in reports):
        return []
    gap = next((metric.difference for metric in metrics if metric and metric.difference), None)
    quality = None if gap is None else _with_interval(gap.baseline_value, gap.baseline_interval)
    time = None if timed is None else timed.baseline_milliseconds
    return [_row("dense", reports[0].bytes_on_disk.dense, quality=quality, time=time)]


def _dense_int8_row(reports: Sequence[ModelReport], timed: Speed | None) -> list[tuple[Cell, ...]]:
    """Row of the dense model with eight bits, where its file or its time is known."""
    size = next((file.bytes for r in reports if (file := file_of(r.dense_exports))), None)
    speeds = (timed and int8_speed(report, timed) for report in reports)
    there = next((s for s in speeds if s and s.same_runtime_milliseconds), None)
    if there is None or there.same_runtime_milliseconds is None:
        return [] if size is None else [_row("dense, int8", size)]
    time = there.same_runtime_milliseconds
    faster = fmt.ratio_text(there.baseline_milliseconds / time, 2)
    return [_row("dense, int8", size, time=time, speed=faster)]


def _int8_row(
    name: str, report: ModelReport, timed: Speed | None, main: Metric | None
) -> list[tuple[Cell, ...]]:
    """Row of a model with eight bits, where its file or its time is known."""
    file, speed = file_of(report.exports), timed and int8_speed(report, timed)
    if (file is None and speed is None) or not report.is_smaller:
        return []
    size = None if file is None else file.bytes
    share = None if size is None else size / max(1, report.bytes_on_disk.dense)
    number = file_metric(report, main)
    quality = _quality(number and beside_dense(report, number))
    return [_row(f"{name}, int8", size, share, *quality, *_time(speed))]


def _used(columns: Sequence[str], rows: Sequence[tuple[Cell, ...]], first: int) -> Printed:
    """Leaves out columns that nothing is in, but for the first ones."""
    used = [i for i in range(len(columns)) if i < first or any(row[i].value for row in rows)]
    kept = tuple(tuple(row[i] for i in used) for row in rows)
    return Printed(tuple(columns[i] for i in used), kept)


def _with_interval(value: float, interval: Interval | None, signed: bool = False) -> Cell:
    write = fmt.signed_text if signed else fmt.value_text
    ends = "" if interval is None else f"[{write(interval.low)}, {write(interval.high)}]"
    return Cell(write(value), ends)


def metrics_sheet(scores: Sequence[tuple[str, Sequence[Metric]]]) -> Sheet:
    """Lists the numbers of each model in a row of its own; `scores` are names and numbers."""
    named = ("model", "quantity", "of", *_LONG[4:-1])
    rows = []
    for name, metrics in scores:
        for metric in metrics:
            row = _metric(metric.label, metric) | {"model": name}
            rows.append(tuple(row.get(column) for column in named))
    return Sheet(named, tuple(rows))


def metrics_table(scores: Sequence[tuple[str, Sequence[Metric]]]) -> Printed:
    """A row for each number of each model, with its difference to the baseline."""
    rows = []
    for name, metrics in scores:
        ordered = sorted(metrics, key=lambda metric: isinstance(metric, Mean))
        for label, metric in zip(fmt.metric_labels(ordered), ordered, strict=True):
            gap, ratio = metric.difference, Cell(fmt.ratio_text(metric.ratio))
            change = Cell() if gap is None else _with_interval(gap.value, gap.interval, signed=True)
            value = _with_interval(metric.value, metric.interval)
            rows.append((Cell(name), Cell(label), value, change, ratio))
    return _used(("model", "metric", "value", "difference", "ratio"), rows, 3)


def front_sheet(front: FrontReport) -> Sheet:
    """Lists every number of the models of a sweep, a row for each."""
    fields = [name for name in type(front.rows[0]).model_fields if name != "interval"]
    index = fields.index("quality") + 1
    columns = (*fields[:index], "quality_low", "quality_high", *fields[index:])
    rows = []
    for row in front.rows:
        ends = (None, None) if row.interval is None else (row.interval.low, row.interval.high)
        facts = {**row.model_dump(), "quality_low": ends[0], "quality_high": ends[1]}
        facts["front"] = " ".join(row.front)
        facts["values"] = " ".join(map(repr, row.values))
        rows.append(tuple(facts[column] for column in columns))
    return Sheet(columns, tuple(rows))
