"""Numbers and names as people read them, the same in tables and on the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tcompress.artifact.manifest import Interval, Metric, Speed
    from tcompress.planning.entries import Coverage
    from tcompress.reporting.tree import LayerReport

_ERROR_NAMES = {
    "held_out": "held-out error",
    "calibration": "calibration error",
    "weight": "weight error",
}

_MOST_DENSE = 6  # kinds of dense weights that one line names


def error_name(kind: str) -> str:
    """Names a kind of error."""
    return _ERROR_NAMES.get(kind, kind)


_OF = {
    "held_out": "of what layers put out for data that the fit did not see",
    "calibration": "of what layers put out for the data that they were fitted to",
    "weight": "of the weights themselves, whatever data does with them",
}


def errors_note(kinds: Iterable[str]) -> str:
    """Says what errors are a fraction of, what the ends of the scale are, and what they tell."""
    named = [
        f"{error_name(kind)}: squared, as a fraction {_OF[kind]}" for kind in kinds if kind in _OF
    ]
    if not named:
        return ""
    return (
        f"{'; '.join(named)}. 0 is exact, 1 as bad as zeros. The smaller of two conversions is the "
        "better one, if both are of one kind; what a task loses, `tcompress evaluate` measures."
    )


def error_text(value: float) -> str:
    """Writes an error."""
    return f"{value:.4f}"


def bytes_text(size: int) -> str:
    """Writes a number of bytes, such as `70.5 kB`."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < (1000 if unit == "B" else 999.95):  # which would be written as 1000.0
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def count_text(number: float) -> str:
    """Writes a large number in short, such as `22.7 M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:  # a little less would be written as 1e+03
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def coverage_text(coverage: Coverage) -> str:
    """Says in a line how much of a whole model is rewritten, and what the rest of it is."""
    whole = max(1, coverage.total)
    share = f"{coverage.rewritten / whole:.0%}".replace("%", " %")
    parts = [
        f"{name} {count_text(number)}"
        for name, number in (
            ("dropped with blocks", coverage.dropped),
            ("replaced by another attention", coverage.replaced),
            ("embeddings", coverage.embeddings),
            ("norms and biases", coverage.norms),
        )
        if number
    ]
    sizes: dict[str, int] = {}
    for item in coverage.left:
        sizes[item.name] = sizes.get(item.name, 0) + item.parameters
    dense = [f"{name} {count_text(size)}" for name, size in list(sizes.items())[:_MOST_DENSE]]
    if rest := sum(list(sizes.values())[_MOST_DENSE:]):
        dense.append(f"others {count_text(rest)}")
    parts += [f"left dense: {', '.join(dense)}"] if dense else []
    return (
        f"rewritten: {count_text(coverage.rewritten)} of {count_text(whole)} parameters ({share})"
        + (f"; {', '.join(parts)}" if parts else "")
    )


def time_text(seconds: float) -> str:
    """Writes a duration roughly, such as `14 min`."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 6000:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def milliseconds_text(value: float) -> str:
    """Writes a time with three digits."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} ms"


def value_text(value: float) -> str:
    """Writes a measured number with four digits."""
    if abs(value) < 1:
        return f"{value:.4f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def tick_text(value: float) -> str:
    """Writes a number beside an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def signed_text(value: float) -> str:
    """Writes a difference with its sign."""
    text = f"{value:+.4f}" if abs(value) < 10 else f"{value:+,.1f}"
    return text.replace("-", "−")


def interval_text(interval: Interval, signed: bool = False) -> str:
    """Writes both ends of an interval."""
    write = signed_text if signed else value_text
    return f"{write(interval.low)} … {write(interval.high)}"


def metric_labels(metrics: Iterable[Metric]) -> list[str]:
    """Names metrics; the task tells those of one name apart, then the data, then a number."""
    listed = list(metrics)
    labels = [metric.name for metric in listed]
    for key in ("task", "data", "split"):
        labels = [
            f"{label}, {metric.protocol[key]}"
            if labels.count(label) > 1 and metric.protocol.get(key)
            else label
            for label, metric in zip(labels, listed, strict=True)
        ]
    return [
        f"{label}, {labels[:index].count(label) + 1}" if label in labels[:index] else label
        for index, label in enumerate(labels)
    ]


def metric_ratio(metric: Metric) -> float | None:
    """The metric as a multiple of the baseline's."""
    if metric.difference is None or not metric.difference.baseline_value:
        return None
    return metric.value / metric.difference.baseline_value


def speed_words(speeds: Sequence[Speed]) -> str:
    """Says how fast a model is beside the dense one: the slowest and the fastest size."""
    slow = min(speeds, key=lambda speed: speed.ratio)
    fast = max(speeds, key=lambda speed: speed.ratio)
    found = [slow, fast] if ratio_text(slow.ratio, 2) != ratio_text(fast.ratio, 2) else [fast]
    ends = " to ".join(ratio_text(speed.ratio, 2) for speed in found)
    sizes = " and ".join(f"batch {item.batch}, length {item.length}" for item in found)
    slower = "is slower than the dense model: it " if fast.ratio < 1 else ""
    return f"{slower}runs at {ends} the dense speed ({sizes})"


def ratio_text(ratio: float | None, digits: int = 3) -> str:
    """Writes a multiple, such as `0.962×`; nothing where there is none."""
    return "" if ratio is None else f"{ratio:.{digits}f}×"


def machine_text(speed: Speed) -> str:
    """Says what a time was measured on, such as `cpu, 2 threads, float32`."""
    found = speed.protocol
    device, threads = found.get("device"), found.get("threads")
    words = [device] if device else []
    if threads and device == "cpu":
        words.append(f"{threads} thread" + ("s" if threads != 1 else ""))
    words += [found["dtype"]] if found.get("dtype") else []
    words += ["weights kept"] if "kept_weights_bytes" in found else []
    return ", ".join(map(str, words))


def short_blocks(layers: Iterable[LayerReport]) -> dict[str, str]:
    """Shortens names of blocks to their last parts: two, or more where those are ambiguous."""
    blocks = list(dict.fromkeys(layer.block for layer in layers))
    most = max((block.count(".") + 1 for block in blocks), default=0)
    for count in range(2, most + 1):
        short = {block: ".".join(block.split(".")[-count:]) for block in blocks}
        if len(set(short.values())) == len(blocks):
            return short
    return {block: block for block in blocks}
