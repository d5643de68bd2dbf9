"""The file of eight bits that a model ships as, with its speed and quality in its own runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from tcompress.artifact.manifest import ExportedFile, Metric, Speed, one_file
from tcompress.fields import RuntimeName
from tcompress.reporting.tree import ModelReport, metric_key, numbers_of

RUNTIME: RuntimeName = "onnx-int8"
"""Runtime whose file a model ships as, where its folder has one."""


class Shipped(NamedTuple):
    """A file that a user deploys, and what was measured of it beside the dense model."""

    file: ExportedFile
    speed: Speed | None  # None where it was not timed
    metric: Metric | None  # None where its quality was not measured

    @property
    def name(self) -> str:
        """Name of the file, without its folder."""
        return PurePath(self.file.file).name


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
    return Shipped(file, _speed_there(report, speed), file_metric(report, metric))


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


def int8_speed(report: ModelReport, speed: Speed) -> Speed | None:
    """Find the time of the same pass with weights of eight bits in ONNX Runtime."""
    size = (speed.batch, speed.length, speed.phase)
    times = (item for item in report.speed if item.mode == RUNTIME)
    return next((item for item in times if (item.batch, item.length, item.phase) == size), None)


def _speed_there(report: ModelReport, speed: Speed | None) -> Speed | None:
    """Find the time of the same pass; without one to compare with, the one of most tokens."""
    if speed is not None:
        return int8_speed(report, speed)
    times = (item for item in report.speed if item.mode == RUNTIME)
    return max(times, key=lambda item: item.batch * item.length, default=None)
