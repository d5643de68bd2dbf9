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
    table = Table(
        caption=", ".join(machines) if len(machines) == 1 else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    several = len(machines) > 1
    for name in ("batch", "length", "mode", *(("machine",) if several else ())):
        table.add_column(name, justify="right" if name in ("batch", "length") else "left")
    for name in ("time", "dense", "ratio", "tokens/s", "peak memory", "dense"):
        table.add_column(name, justify="right", no_wrap=True)
    for speed in speeds:
        table.add_row(
            str(speed.batch),
            str(speed.length),
            speed.mode,
            *([machine_text(speed)] if several else []),
            milliseconds_text(speed.milliseconds),
            milliseconds_text(speed.baseline_milliseconds),
            ratio_text(speed.ratio, 2),
            f"{speed.tokens_per_second:,.0f}",
            *(memory_text(size) for size in (speed.peak_bytes, speed.baseline_peak_bytes)),
        )
    return table


def memory_text(size: int | None) -> str:
    """Writes peak memory, which may be unknown."""
    return "unknown" if size is None else bytes_text(size)
