"""Reports on several models, in which a dense model shows what others were compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tcompress.artifact.manifest import Metric
from tcompress.reporting.choice import metric_key
from tcompress.reporting.model import report_of
from tcompress.reporting.tree import ModelReport


def reports_of(
    names: Sequence[str | Path], length: int = 128, *, trust_remote_code: bool = False
) -> list[ModelReport]:
    """Reports on models that are shown side by side.

    Args:
        names: Local folders, short names or hub ids.
        length: Tokens in the sequence for the multiply-adds.
        trust_remote_code: Whether Python code that comes with a model may run.

    Raises:
        SourceError: There is no such model, or it cannot be read.
        ArtifactError: It is a converted model that is damaged.
    """
    trust = trust_remote_code
    return with_baselines([report_of(name, length, trust_remote_code=trust) for name in names])


def with_baselines(reports: Sequence[ModelReport]) -> list[ModelReport]:
    """Gives dense models the numbers that other models were compared with.

    The folder of a dense model is not changed by measuring it, so that its numbers are known to
    the models beside it alone.
    """
    return [report if report.is_smaller else _filled(report, reports) for report in reports]


def _filled(dense: ModelReport, reports: Sequence[ModelReport]) -> ModelReport:
    found = {metric_key(metric): metric for metric in dense.metrics}
    for metric in _baselines(dense, reports):
        found.setdefault(metric_key(metric), metric)
    return dense.model_copy(update={"metrics": tuple(found.values())})


def _baselines(dense: ModelReport, reports: Sequence[ModelReport]) -> Iterator[Metric]:
    """Numbers of a dense model in the comparisons of others; their intervals were not kept."""
    for report in reports:
        for metric in report.metrics:
            found = metric.difference
            if found is not None and _same(found.baseline, dense):
                lent = {"value": found.baseline_value, "interval": None, "difference": None}
                yield metric.model_copy(update=lent)


def _same(name: str, dense: ModelReport) -> bool:
    return name == dense.name or Path(name).absolute() == Path(dense.name).absolute()
