"""What a reader takes home of a report: size, speed and quality, and one sentence.

Where a model ships as a file for another runtime, all three are those of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from statistics import fmean
from typing import NamedTuple

from tcompress.artifact.averages import AGREEMENT
from tcompress.artifact.manifest import ExportedFile, Interval, Metric, Speed
from tcompress.reporting import formatting as fmt
from tcompress.reporting.shipped import RUNTIME, Shipped, dense_there, int8_speed, shipped_of
from tcompress.reporting.tree import ModelReport, main_metrics, main_speeds, other_baseline

_NONE = "–"


class Figure(NamedTuple):
    """One number, what it is, and in small letters what belongs to it."""

    label: str
    value: str
    words: str
    notes: tuple[str, ...] = ()


class Headline(NamedTuple):
    """Sentences and figures at the top of a page."""

    model: int  # number of the one that the figures are about
    sentence: str
    figures: tuple[Figure, Figure, Figure]  # size, speed, quality


def headline_of(reports: Sequence[ModelReport], names: Sequence[str]) -> Headline:
    """Picks the model that comes closest to the dense quality, and says what it is worth.

    Where none was measured it is the smallest.
    """
    metrics, speeds = main_metrics(reports), main_speeds(reports)
    # Files too are compared by one number: any other may be of other examples.
    main = next(filter(None, metrics), None)
    files = list(map(shipped_of, reports, [metric or main for metric in metrics], speeds))
    small = [index for index, report in enumerate(reports) if report.is_smaller]
    deployed = [(file and file.metric) or own for file, own in zip(files, metrics, strict=True)]
    measured = {i: metric for i in small if (metric := deployed[i]) is not None}
    signed = {i: m.value * (1 if m.higher_is_better else -1) for i, m in measured.items()}
    if signed:
        best = max(signed, key=lambda index: signed[index])
    else:
        best = min(small or range(len(reports)), key=lambda i: reports[i].bytes_on_disk.now)
    report, metric, speed, file = reports[best], metrics[best], speeds[best], files[best]
    if file is None:
        figures = (size_figure(report), speed_figure(report, speed), quality_figure(report, metric))
    else:
        figures = _file_figures(report, file, metric, speed)
    sentence = _sentence(report, file, metric, speed)
    if len(reports) == 1:
        text = f"{names[best]} {sentence}"
    elif not small:
        text = f"{len(reports)} dense models."
    elif not measured:
        text = f"The smallest, {names[best]}, {sentence}"
    elif len(measured) > 1:
        models = f"Of {len(reports)} models"
        text = f"{models}, {names[best]} comes closest to the dense quality: it {sentence}"
    else:
        only = "" if len(small) == 1 else f", of {len(small)} conversions the only one measured,"
        text = f"{names[best]}{only} {sentence}"
    return Headline(best, text, figures)


def _sentence(
    report: ModelReport, file: Shipped | None, metric: Metric | None, speed: Speed | None
) -> str:
    """Say what a model keeps: bytes, time, quality; of a file, in PyTorch what was not measured."""
    if file is None and not report.is_smaller:
        value = "" if metric is None else f": {metric.label} {fmt.value_text(metric.value)}"
        return f"is dense{value}."
    timed, number = (file and file.speed) or speed, (file and file.metric) or metric
    size = report.bytes_on_disk.now if file is None else file.file.bytes
    words = [f"{'in its int8 file ' if file else ''}is {_times_smaller(report, size)}"]
    if timed is not None:
        where = " in PyTorch" if file and not file.speed else ""
        words.append(f"runs at {fmt.speed_text(timed)} the dense speed{where}")
    if number is None and _calibrated(report) is None:
        return f"{' and '.join(words)}; its quality was not measured."
    where = "in PyTorch " if file and not file.metric else ""
    words.append(where + _quality_words(report, number))
    return f"{', '.join(words[:-1])} and {words[-1]}."


def _times_smaller(report: ModelReport, now: int) -> str:
    dense = report.bytes_on_disk.dense
    if now < dense:
        return f"{dense / now:.1f}× smaller"
    return f"{now / max(1, dense):.1f}× as large"


def _quality_words(report: ModelReport, metric: Metric | None) -> str:
    if metric is None:
        return f"agrees with the dense model by {fmt.value_text(_calibrated(report) or 0.0)}"
    if (ratio := metric.ratio) is None or metric.name == AGREEMENT:
        return f"has {metric.label} {fmt.value_text(metric.value)}"
    part = f"keeps {ratio:.1%} of" if metric.higher_is_better else f"has {fmt.ratio_text(ratio)}"
    chance = ", within chance" if _holds_zero(metric) else ""
    return f"{part} {_baseline(report, metric)}'s {metric.label}{chance}"


def _baseline(report: ModelReport, metric: Metric) -> str:
    """Name what a number is compared with: the dense model, or another one."""
    other = other_baseline(report, metric) or "dense"
    return "the dense model" if other == "dense" else other


def _holds_zero(metric: Metric) -> bool:
    gap = metric.difference
    return bool(gap and gap.interval and gap.interval.low <= 0 <= gap.interval.high)


def _calibrated(report: ModelReport) -> float | None:
    """Agreement with the dense model on samples held out of the calibration, or of the healing."""
    agreement = report.calibration.agreement if report.calibration else {}
    values = [*agreement.values()]
    if report.training:
        last = report.training[-1]
        # Another teacher than the dense model says nothing of how far the two are apart.
        dense = PurePath(last.teacher or "").name == PurePath(report.source or "").name
        sources = last.sources if dense and last.task is None else []
        values = [item.kept for item in sources if item.kept is not None]
    return fmean(values) if values else None


def file_of(files: Sequence[ExportedFile], bits: int = 8) -> ExportedFile | None:
    """Picks the file with weights of so many bits, if there is one."""
    return next((item for item in files if item.bits == bits), None)


def _file_figures(
    report: ModelReport, file: Shipped, metric: Metric | None, speed: Speed | None
) -> tuple[Figure, Figure, Figure]:
    """The figures of a file; those of the weights in PyTorch stand in small letters below."""
    size, dense = report.bytes_on_disk, _dense_bytes_there(report)
    there = f"{size.dense / max(1, file.file.bytes):.1f}× smaller than the dense"
    notes = [f"`{PurePath(file.file.file).name}`, all that ONNX Runtime reads of weights"]
    notes += [f"dense at int8 {fmt.bytes_text(dense)}"] if dense and report.is_smaller else []
    notes += [f"in PyTorch {fmt.bytes_text(size.now)}"] if report.is_smaller else []
    bytes_there = fmt.bytes_text(file.file.bytes)
    first = Figure("Size", bytes_there, f"{there} {fmt.bytes_text(size.dense)}", tuple(notes))
    second, third = _file_speed(file, speed), quality_figure(report, file.metric)
    if file.metric is None:
        third = quality_figure(report, metric)
        hint = "in PyTorch; `tcompress evaluate --runtime onnx-int8` measures the file"
        third = third._replace(notes=(*third.notes[:1], hint))
    elif metric is not None and (weights := quality_figure(report, metric)).value:
        third = third._replace(notes=(*third.notes, f"in PyTorch {weights.value}"))
    return first, second, third


def _dense_bytes_there(report: ModelReport) -> int | None:
    """Bytes of the dense model's file with eight bits, where one was written or measured."""
    if (file := file_of(report.dense_exports)) is not None:
        return file.bytes
    rows = (item for item in report.alternatives if item.name == "dense")
    return next((item.bytes for item in rows if item.runtime == RUNTIME), None)


def _file_speed(file: Shipped, speed: Speed | None) -> Figure:
    if file.speed is None:
        figure = speed_figure_of(speed)
        hint = "in PyTorch; `tcompress bench --runtime onnx-int8` times the file"
        return figure._replace(notes=(*figure.notes[:1], hint))
    notes = [dense_there(file.speed)]
    if speed is not None and speed is not file.speed:
        notes.append(f"in PyTorch {fmt.speed_text(speed)}")
    figure = speed_figure_of(file.speed, *notes)
    words = figure.words.replace("; dense", " in ONNX Runtime; dense in PyTorch")
    return figure._replace(words=words)


def size_figure(report: ModelReport) -> Figure:
    """Bytes of the weight files, and of the dense model with eight bits where it is known."""
    size, dense = report.bytes_on_disk, file_of(report.dense_exports)
    if not report.is_smaller:
        return Figure("Size", fmt.bytes_text(size.now), "on disk")
    words = f"{fmt.share_text(size.kept)} of the dense {fmt.bytes_text(size.dense)}"
    notes = () if dense is None else (f"dense at int8 {fmt.bytes_text(dense.bytes)}",)
    return Figure("Size", fmt.bytes_text(size.now), words, notes)


def speed_figure(report: ModelReport, speed: Speed | None) -> Figure:
    """Speed of a pass beside the dense model's, and of both with eight bits where timed."""
    if speed is None:
        return speed_figure_of(None, "`tcompress bench` times it" if report.is_smaller else "")
    if (other := int8_speed(report, speed)) is None:
        return speed_figure_of(speed)
    words = [] if other is speed else [f"int8 in ONNX Runtime {fmt.speed_text(other)}"]
    return speed_figure_of(speed, ", ".join(filter(None, [*words, dense_there(other)])))


def speed_figure_of(speed: Speed | None, *more: str) -> Figure:
    """Speed of a pass beside the dense model's, with more notes, if these say anything."""
    if speed is None:
        return Figure("Speed", _NONE, "not timed", tuple(filter(None, more)))
    own, dense = map(fmt.milliseconds_text, (speed.milliseconds, speed.baseline_milliseconds))
    busy = "?: the machine was busy, the time is in doubt" if speed.is_noisy else ""
    notes = tuple(filter(None, (fmt.pass_text(speed), busy, *more)))
    return Figure("Speed", fmt.speed_text(speed), f"{own}; dense {dense}", notes)


def _interval_text(interval: Interval, signed: bool = False) -> str:
    return f"{interval.level:.0%} interval {fmt.interval_text(interval, signed)}"


def quality_figure(report: ModelReport, metric: Metric | None) -> Figure:
    """The share of the dense model's quality, or the agreement with it."""
    if metric is None:
        if (agreement := _calibrated(report)) is not None:
            words = "agreement with the dense model"
            note = f"on samples held out of the {'healing' if report.training else 'calibration'}"
            return Figure("Quality", fmt.value_text(agreement), words, (note,))
        errors = list(report.errors.items())[:1]
        hints = [f"mean {fmt.error_name(kind)} {fmt.error_text(error)}" for kind, error in errors]
        hints += ["`tcompress evaluate` measures it"] if report.is_smaller else []
        return Figure("Quality", _NONE, "not measured", tuple(hints))
    value, gap, ratio = fmt.value_text(metric.value), metric.difference, metric.ratio
    who = _baseline(report, metric)
    own = [] if metric.interval is None else [_interval_text(metric.interval)]
    if metric.name == AGREEMENT:
        return Figure("Quality", value, f"agreement with {who}", tuple(own))
    if gap is None or ratio is None:
        return Figure("Quality", value, metric.label, tuple(own))
    baseline = fmt.value_text(gap.baseline_value)
    notes: list[str] = []
    if gap.interval is not None:
        interval = _interval_text(gap.interval, signed=True)
        notes.append(f"difference {fmt.signed_text(gap.value)}, {interval}")
    if _holds_zero(metric):
        notes.append("the interval holds 0: no difference was found")
    share = f"{ratio:.1%}" if metric.higher_is_better else fmt.ratio_text(ratio)
    lower = "" if metric.higher_is_better else ", lower is better"
    words = f"of {who}'s {metric.label}: {value} of {baseline}{lower}"
    return Figure("Quality", share, words, tuple(notes))
