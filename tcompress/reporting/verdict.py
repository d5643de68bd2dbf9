"""The one sentence above a report."""

from __future__ import annotations

from collections.abc import Sequence

from tcompress.artifact.manifest import Metric
from tcompress.reporting.choice import main_metrics, other_baseline
from tcompress.reporting.tree import ModelReport
from tcompress.reporting.words import (
    error_name,
    error_text,
    interval_text,
    metric_ratio,
    ratio_text,
    signed_text,
    speed_words,
    value_text,
)

_MUCH = 0.2  # of a model


def verdict(reports: Sequence[ModelReport], names: Sequence[str]) -> str:
    """Says what a reader should take home.

    Args:
        reports: The models.
        names: Their names for people.
    """
    metrics = main_metrics(reports)
    if len(reports) == 1:
        return _alone(reports[0], metrics[0])
    small = [index for index, report in enumerate(reports) if report.is_smaller]
    measured = [index for index in small if metrics[index] is not None]
    if not measured:
        if not small:
            return f"{len(reports)} dense models."
        least = min(small, key=lambda index: reports[index].parameters.total.now)
        return f"The smallest, {names[least]}, {_alone(reports[least], None)}"
    best = max(measured, key=lambda index: _goodness(metrics[index]))
    if len(measured) == 1:  # nothing to compare with
        only = "" if len(small) == 1 else f", of {len(small)} conversions the only one measured,"
        return f"{names[best]}{only} {_alone(reports[best], metrics[best])}"
    return f"Of {len(reports)} models, {names[best]} comes closest to the dense quality: it " + (
        _alone(reports[best], metrics[best])
    )


def _alone(report: ModelReport, metric: Metric | None) -> str:
    """What one model keeps: weights, quality, time."""
    if not report.is_smaller:
        known = "" if metric is None else f": {metric.name} {value_text(metric.value)}"
        return f"is dense{known}."
    parts = report.parameters
    kept = f"keeps {parts.total.kept:.1%} of the parameters"
    if parts.rewritten.dense and parts.rewritten.kept != parts.total.kept:
        kept += f" ({parts.rewritten.kept:.1%} of those rewritten{_untouched(report)})"
    words = [kept, *_quality(report, metric)]
    if report.speed:
        words.append(speed_words(report.speed))
    return f"{', '.join(words[:-1])} and {words[-1]}."


def _untouched(report: ModelReport) -> str:
    """Says what makes the two shares so different, where it is the embeddings."""
    parts = report.parameters
    share = parts.embeddings.dense / max(1, parts.total.dense)
    if share < _MUCH or parts.embeddings.kept != 1:
        return ""
    return f"; embeddings, {share:.0%} of the dense model, stay as they are"


def _quality(report: ModelReport, metric: Metric | None) -> list[str]:
    if metric is None:
        kind = next(iter(report.errors), None)
        shown = [] if kind is None else [f"has a mean {error_name(kind)} of"]
        if kind is not None:
            shown = [f"{shown[0]} {error_text(report.errors[kind])}"]
        return [*shown, "its quality on a task was not measured"]
    text = f"has {metric.name} {value_text(metric.value)}"
    found, ratio = metric.difference, metric_ratio(metric)
    if found is not None:
        share = f", {ratio_text(ratio)}" if ratio is not None else ""
        who = other_baseline(report, metric) or "dense"
        text += f" ({who} {value_text(found.baseline_value)}{share}"
        if found.interval is None:
            text += ")"
        elif found.interval.low <= 0 <= found.interval.high:
            ends = interval_text(found.interval, signed=True)
            text += f"; the interval of the difference, {ends}, holds 0)"
        else:
            text += f"; difference {signed_text(found.value)}, "
            text += f"{found.interval.level:.0%} interval {interval_text(found.interval, True)})"
    return [text]


def _goodness(metric: Metric | None) -> float:
    assert metric is not None
    return metric.value if metric.higher_is_better else -metric.value
