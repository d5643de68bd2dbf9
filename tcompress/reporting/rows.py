"""Lines about a model: a label with what was before, what is now, and their ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tcompress.artifact.manifest import Metric, Speed
from tcompress.planning.entries import AttentionPlan, DepthPlan
from tcompress.reporting.choice import metric_key, other_baseline
from tcompress.reporting.describe import describe_attention
from tcompress.reporting.tree import Amount, ModelReport
from tcompress.reporting.words import (
    bytes_text,
    error_name,
    error_text,
    interval_text,
    machine_text,
    metric_labels,
    metric_ratio,
    milliseconds_text,
    ratio_text,
    time_text,
    value_text,
)


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
