"""The file of eight bits that a model ships as, with its speed and quality in its own runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tcompress.artifact.manifest import ExportedFile, Metric, Speed, one_file
from tcompress.fields import RuntimeName
from tcompress.reporting import formatting as fmt
from tcompress.reporting.tree import ModelReport, metric_key, numbers_of

RUNTIME: RuntimeName = "onnx-int8"
"""Runtime whose file a model ships as, where its folder has one."""


class Shipped(NamedTuple):
    """A file that a user deploys, and what was measured of it beside the dense model."""

    file: ExportedFile
    speed: Speed | None  # None where it was not timed
    metric: Metric | None  # None where its quality was not measured


def shipped_of(
    report: ModelReport, metric: Metric | None = None, speed: Speed | None = None
) -> Shipped | None:
    """Find the file that a model ships as; None for a model that has only weights for PyTorch.

    Args:
        report: The model.
        metric: A number of its weights in PyTorch; that of the file is the same measurement.
        speed: A time of its weights in PyTorch; that of the file is of the same pass.
    """
    if (file := one_file(report.exports, RUNTIME)) is None:
        return None
    return Shipped(file, int8_speed(report, speed), file_metric(report, metric))


def file_numbers(report: ModelReport) -> tuple[Metric, ...]:
    """List the numbers of a model's file: means over sets first, then those of each set."""
    file = one_file(report.exports, RUNTIME)
    metrics: Sequence[Metric] = () if file is None else file.metrics
    return numbers_of([report.model_copy(update={"metrics": tuple(metrics)})])[0]


def file_metric(report: ModelReport, metric: Metric | None) -> Metric | None:
    """Find the number of a model's file that corresponds to one of its weights, or its first."""
    numbers = file_numbers(report)
    if metric is None:
        return next(iter(numbers), None)
    return next((item for item in numbers if metric_key(item) == metric_key(metric)), None)


def dense_there(speed: Speed) -> str:
    """Write how fast the dense model is in the same runtime; nothing where it was not timed."""
    if not (time := speed.same_runtime_milliseconds):
        return ""
    return f"dense at int8 {fmt.ratio_text(speed.baseline_milliseconds / time, 2)}"


def int8_speed(report: ModelReport, speed: Speed | None) -> Speed | None:
    """Find the time of the same pass with weights of eight bits in ONNX Runtime.

    Without a pass to compare with, it is the one of most tokens.
    """
    times = (item for item in report.speed if item.mode == RUNTIME)
    if speed is None:
        return max(times, key=lambda item: item.batch * item.length, default=None)
    size = (speed.batch, speed.length, speed.phase)
    return next((item for item in times if (item.batch, item.length, item.phase) == size), None)
