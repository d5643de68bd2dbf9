"""Numbers, names and layers as people read them, the same in tables and on the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from tcompress.errors import counted
from tcompress.progress import COMPUTING, Seconds, by_stage

if TYPE_CHECKING:
    from rich.table import Table

    from tcompress.artifact.manifest import Interval, Metric, Speed
    from tcompress.planning.entries import AttentionPlan, Coverage, LayerPlan
    from tcompress.structures.base import Layout
    from tcompress.structures.modules.linear import PartLayout

ERRORS = ("held_out", "calibration", "weight")
"""Kinds of error, the most telling one first."""
_ERRORS_PAGE = "docs/evaluation.md#errors-of-layers"

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")

_MOST_DENSE = 6  # kinds of dense weights that one line names


def table(
    *names: str,
    right: Collection[str] = (),
    title: str = "",
    rows: Iterable[Iterable[str | None]] = (),
) -> Table:
    """Makes a table with such headings; columns of those in `right` are aligned so."""
    from rich import box
    from rich.table import Table

    result = Table(title=title or None, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    result.title_justify = result.caption_justify = "left"
    result.title_style = result.header_style = "bold"
    for name in names:
        result.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Groups items by a key, in the order in which keys come first."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def reason_table(title: str, items: Iterable[Any]) -> Table:
    """Says of how many layers, each with a name and a reason, the same reason holds."""
    groups = grouped(items, lambda item: item.reason).items()
    rows = [(str(len(alike)), alike[0].name, reason) for reason, alike in groups]
    return table(title, "such as", "because", right=[title], rows=rows)


def error_name(kind: str) -> str:
    """Names a kind of error."""
    return f"{kind.replace('_', '-')} error" if kind in ERRORS else kind


def errors_note(kinds: Iterable[str]) -> str:
    """Says what the ends of the scale of errors are, and where all else about it stands."""
    known = [error_name(kind) for kind in kinds if kind in ERRORS]
    named = "errors" if len(known) > 1 else "".join(known)
    return named and f"{named}: 0 is exact, 1 as bad as zeros; see {_ERRORS_PAGE}"


def error_text(value: float) -> str:
    """Writes an error."""
    return f"{value:.4f}"


def share_text(kept: float | None) -> str:
    """Writes a part of the dense model; nothing where that had none of it."""
    return "" if kept is None else f"{kept:.1%}"


def bytes_text(size: int) -> str:
    """Writes a number of bytes, such as `70.5 kB`."""
    if size < 1000:
        return f"{size} B"
    value = size / 1000
    for unit in ("kB", "MB", "GB"):
        if value < 999.95:  # which would be written as 1000.0
            return f"{value:.1f} {unit}"
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
    gone = {
        "dropped with blocks": coverage.dropped,
        "dropped with tokens": coverage.vocabulary,
        "replaced by another attention": coverage.replaced,
    }
    stayed = {"embeddings": coverage.embeddings, "norms and biases": coverage.norms}
    sizes: dict[str, int] = {}
    for item in coverage.left:
        sizes[item.name] = sizes.get(item.name, 0) + item.parameters
    stayed |= {f"`{name}`": size for name, size in list(sizes.items())[:_MOST_DENSE]}
    stayed["others"] = sum(list(sizes.values())[_MOST_DENSE:])
    rewritten = count_text(coverage.rewritten) if coverage.rewritten else "none"
    parts = [f"rewritten: {rewritten} of {count_text(whole)} parameters ({share})"]
    for title, counts in (("", gone), ("unchanged: ", stayed)):
        named = [f"{name} {count_text(number)}" for name, number in counts.items() if number]
        parts += [title + ", ".join(named)] if named else []
    return "; ".join(parts)


_LEAST_SECONDS = 60.0  # of a conversion; of a shorter one nobody asks where they went


def stages_text(seconds: Seconds) -> str:
    """Say what a conversion took, and which stages took most; empty where it was short."""
    stages = by_stage(seconds)
    if (total := sum(stages.values())) < _LEAST_SECONDS:
        return ""
    shares = [f"{name} {time_text(time)}" for name, time in stages.items() if time > 0.05 * total]
    parts = dict[str, float]()
    for name, time in (item for stage in seconds.values() for item in stage.items()):
        parts[name] = parts.get(name, 0.0) + time
    large = {name: time for name, time in parts.items() if time > 0.05 * total}
    within = [f"{name} {time_text(time)}" for name, time in large.items() if name != COMPUTING]
    text = f"{time_text(total)}: {', '.join(shares)}"
    return f"{text} (of which {', '.join(within)})" if within else text


def time_text(seconds: float) -> str:
    """Writes a duration roughly, such as `14 min`."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def milliseconds_text(value: float) -> str:
    """Writes a time with three digits."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} ms"


def value_text(value: float, digits: int = 4) -> str:
    """Writes a measured number with so many digits."""
    if abs(value) < 1:
        return f"{value:.{digits}f}"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"


def deviation_text(mean: float, deviation: float) -> str:
    """Write a mean and how far it deviates, with as many digits behind the point."""
    text = value_text(mean)
    digits = len(text.partition(".")[2])
    return f"{text} ± {deviation:.{digits}f}"


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


def around_text(value: float, interval: Interval | None) -> str:
    """Writes a number, and in brackets the ends of its interval, with a digit less."""
    if interval is None:
        return value_text(value)
    return f"{value_text(value)} [{value_text(interval.low, 3)}, {value_text(interval.high, 3)}]"


def set_names(data: Sequence[str]) -> list[str]:
    """Names sets such as `stsb/test.parquet:a,score` shortly: `stsb/test`, of one folder `test`."""
    paths = [PurePath(name.rpartition(":")[0] or name) for name in data]
    together = len({path.parent for path in paths}) == 1
    names = [path.stem if together else str(path.parent / path.stem) for path in paths]
    return names if len({*names}) == len({*data}) else list(data)


def metric_labels(metrics: Iterable[Metric]) -> list[str]:
    """Names metrics; the task tells those of one name apart, then the data, then a number."""
    listed = list(metrics)
    labels = [metric.label for metric in listed]
    for key in ("task", "data", "split"):
        found = [metric.protocol.get(key) for metric in listed]
        facts = [value if isinstance(value, str) else "" for value in found]  # means have several
        names = set_names(facts) if key == "data" else facts
        kinds = Counter(label for label, _ in {*zip(labels, names, strict=True)})
        labels = [
            f"{label}, {name}" if fact and kinds[label] > 1 else label
            for label, name, fact in zip(labels, names, facts, strict=True)
        ]
    earlier = [labels[:index].count(label) for index, label in enumerate(labels)]
    return [f"{text}, {n + 1}" if n else text for text, n in zip(labels, earlier, strict=True)]


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
    # Files say by their name what their weights are.
    words += [found["dtype"]] if found.get("dtype") and not speed.mode.startswith("onnx") else []
    words += ["weights kept"] if "kept_weights_bytes" in found else []
    words += [found["instructions"]] if found.get("instructions") else []
    return ", ".join(map(str, words))


def speed_text(speed: Speed) -> str:
    """Writes how many times as fast a model is; with a `?` if the machine was busy."""
    return ratio_text(speed.ratio, 2) + (" ?" if speed.is_noisy else "")


def pass_text(speed: Speed) -> str:
    """Says which pass was timed and on what, as `batch 8, length 32, cpu, 2 threads, float32`."""
    how = "" if speed.how == "eager" else f", {speed.how}"
    return f"batch {speed.batch}, length {speed.length}{how}, {machine_text(speed)}"


def speed_notes(speeds: Sequence[Speed]) -> list[str]:
    """Says how times and memory are to be read."""
    counted = [speed.weight_bytes is not None for speed in speeds]
    spread, noisy = [s.spread is not None for s in speeds], [s.is_noisy for s in speeds]
    counts = (s.protocol.get("new_tokens") for s in speeds if s.phase == "decode")
    steps = [*dict.fromkeys(map(str, counts))]
    cached = ", with its cache" if steps else ""
    notes = {
        f"decode is one token after the prompt, the mean of {' or '.join(steps)}": any(steps),
        "times are medians; ± is half the distance of the quartiles": any(spread),
        "dense is PyTorch, `dense there` is the dense model in the runtime of the row": any(
            s.same_runtime_milliseconds for s in speeds
        ),
        "? the machine was busy: give more --repeats when it is not": any(noisy),
        f"memory is that of the weights and the peak of the pass on top{cached}": any(counted),
        "(pass) memory is the peak of the pass alone, without weights": not all(counted),
    }
    return [note for note, holds in notes.items() if holds]


def median_text(milliseconds: float, spread: float | None) -> str:
    """Writes a time with its spread, such as `5.00 ms ±2%`."""
    return milliseconds_text(milliseconds) + ("" if spread is None else f" ±{spread / 2:.0%}")


def memory_text(peak: int | None, weights: int | None = None) -> str:
    """Writes the memory of weights and pass; that of either may be unknown."""
    if weights is None:
        return "unknown" if peak is None else f"{bytes_text(peak)} (pass)"
    suffix = " (weights)" if peak is None else ""
    return bytes_text(weights + (peak or 0)) + suffix


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Shortens names of blocks to their last parts: two, or more where those are ambiguous."""
    blocks = list(dict.fromkeys(names))
    for count in range(2, max((block.count(".") for block in blocks), default=0) + 2):
        short = {block: ".".join(block.split(".")[-count:]) for block in blocks}
        if len(set(short.values())) == len(blocks):
            return short
    return {block: block for block in blocks}


def block_numbers(names: list[str]) -> list[str]:
    """Leaves out what all names of blocks begin with, such as `layer.`."""
    alike = len({name.rpartition(".")[0] for name in names}) == 1
    return [name.rpartition(".")[2] for name in names] if alike else names


Stored = Mapping[str, Any]  # an entry, part or layout as in `config.json`: without defaults


def _stored(item: Any) -> Stored:
    return item if isinstance(item, Mapping) else item.model_dump(exclude_defaults=True)


def describe_entry(entry: LayerPlan | Stored, method: str) -> str:
    """Describes a layer of a plan with a method such as `svd + depth`.

    `svd` and `lowrank` are one structure, named as asked for.
    """
    stored, words = _stored(entry), method.split(" + ")
    own = stored["kind"] == "embedding" and not {"lowrank", "auto"} & {*words}
    text = describe_parts(stored["parts"])
    return text.replace("lowrank", "svd") if own or "svd" in words else text


def describe_parts(parts: Sequence[PartLayout] | Sequence[Stored]) -> str:
    """Describes a layer, such as `lprod p=16 dct + lowrank r=77`.

    Output splits of a fused projection are told apart where their layouts differ.
    """
    names: dict[str, list[str]] = {}
    for part in map(_stored, parts):
        text = " + ".join(map(describe_layout, part["terms"]))
        names.setdefault(text, []).append(part["name"])
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{', '.join(group)}: {text}" for text, group in names.items())


def describe_layout(layout: Layout | Stored) -> str:
    """Describes one summand, such as `lprod p=4 fitted b=32x2`: block size, number of stages."""
    options = _stored(layout)
    name = options["structure"]
    if name == "lprod":
        words = ["lprod", f"p={options['p']}", options["transform"]]
        if options["transform"] == "fitted":
            block = options.get("block_in") or options.get("block_out", 0)
            words.append(f"b={block}x{options.get('stages', 0)}")
        rank = options.get("tubal_rank")
        return " ".join([*words, *([] if rank is None else [f"r={rank}"])])
    if name == "lowrank":
        return f"lowrank r={options['rank']}"
    if name == "tt":  # modes and inner ranks
        ranks = [str(rank) for rank in options["ranks"]]
        inner = ranks[0] if len(set(ranks)) == 1 else ",".join(ranks)
        apply = options.get("apply", "auto")
        way = "" if apply == "auto" else f" {apply}"
        heads = f"{count} x " if (count := options.get("chains", 1)) > 1 else ""
        modes = f"{_modes(options['in_modes'])} to {_modes(options['out_modes'])}"
        return f"tt {heads}{modes} r={inner}{way}"
    if name == "tucker":  # such as `tucker r=45` or `tucker model 72 of 768x768 r=384`
        left, right = options["ranks"]
        shown = f"r={left}" if left == right else f"r={left},{right}"
        if options.get("bank") is None:
            return f"tucker {shown}"
        if options["share"] == "inputs":  # such as `tucker inputs r=72`
            return f"tucker inputs {shown}"
        rows, columns = options.get("block", (1, 1))
        return f"tucker {options['share']} {options.get('cores', 1)} of {rows}x{columns} {shown}"
    left_out = ("structure", "in_features", "out_features")
    return " ".join([name, *(f"{k}={value}" for k, value in options.items() if k not in left_out)])


_SIZES = {
    "fold": "rows of ",
    "kernel": "",
    "axes": "along axes ",
    "masks": "masks ",
    "filter_order": "order ",
    "core": "",
    "length": "up to ",
}


def describe_attention(entries: Sequence[AttentionPlan] | Sequence[Stored]) -> str:
    """Describes the replaced attentions of a model, such as `kronecker 8x8 in 4 blocks`."""
    counts = Counter[str]()
    for entry in map(_stored, entries):
        options = entry["layout"]
        parts = [options["mechanism"]]
        parts += [_modes(options["grid"])] if options.get("grid") else []
        parts += [f"{word}{_words(options[key])}" for key, word in _SIZES.items() if key in options]
        counts[" ".join(parts)] += 1
    return "; ".join(f"{text} in {counted(n, 'block')}" for text, n in counts.items())


def _words(value: Any) -> str:
    """Writes a value, a list with commas."""
    return ",".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _modes(modes: Sequence[int]) -> str:
    """Writes `24x32`, and `2^10` for what repeats often."""
    runs = [(mode, len(list(same))) for mode, same in groupby(modes)]
    words = [[f"{mode}^{count}"] if count > 2 else [str(mode)] * count for mode, count in runs]
    return "x".join(word for run in words for word in run)
