"""The table of times."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from tcompress.artifact.manifest import Speed
from tcompress.reporting.words import bytes_text, machine_text, milliseconds_text, ratio_text


def speed_table(speeds: Sequence[Speed]) -> Table:
    """Lists times; a ratio above 1 means that the model is faster than the dense one."""
    machines = list(dict.fromkeys(machine_text(speed) for speed in speeds))
    notes = [", ".join(machines)] if len(machines) == 1 else []
    table = Table(
        caption="\n".join([*notes, *speed_notes(speeds)]) or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    several = len(machines) > 1
    for name in ("batch", "length", "mode", *(("machine",) if several else ())):
        table.add_column(name, justify="right" if name in ("batch", "length") else "left")
    for name in ("time", "dense", "ratio", "tokens/s", "memory", "dense"):
        table.add_column(name, justify="right", no_wrap=True)
    for speed in speeds:
        table.add_row(
            str(speed.batch),
            str(speed.length),
            speed.mode,
            *([machine_text(speed)] if several else []),
            median_text(speed.milliseconds, speed.spread),
            median_text(speed.baseline_milliseconds, speed.baseline_spread),
            ratio_text(speed.ratio, 2) + (" ?" if speed.is_noisy else ""),
            f"{speed.tokens_per_second:,.0f}",
            memory_text(speed.peak_bytes, speed.weight_bytes),
            memory_text(speed.baseline_peak_bytes, speed.baseline_weight_bytes),
        )
    return table


def speed_notes(speeds: Sequence[Speed]) -> list[str]:
    """Says how times and memory are to be read."""
    notes = []
    if any(speed.spread is not None for speed in speeds):
        notes.append("times are medians; ± is half the distance of the quartiles")
    if any(speed.is_noisy for speed in speeds):
        notes.append("? the machine was busy: give more --repeats when it is not")
    counted = [speed.weight_bytes is not None for speed in speeds]
    if any(counted):
        notes.append("memory is that of the weights and the peak of the pass on top")
    if not all(counted):
        notes.append("(pass) memory is the peak of the pass alone, without weights")
    return notes


def median_text(milliseconds: float, spread: float | None) -> str:
    """Writes a time with its spread, such as `5.00 ms ±2%`."""
    return milliseconds_text(milliseconds) + ("" if spread is None else f" ±{spread / 2:.0%}")


def memory_text(peak: int | None, weights: int | None = None) -> str:
    """Writes the memory of weights and pass; that of either may be unknown."""
    if weights is None:
        return "unknown" if peak is None else f"{bytes_text(peak)} (pass)"
    return f"{bytes_text(weights)} (weights)" if peak is None else bytes_text(weights + peak)
