"""`tcompress demo`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tcompress.artifact.workplace import check_empty
from tcompress.cli.terminal import print_json, results, shown_progress, table
from tcompress.options.commands import Manner, Shown

if TYPE_CHECKING:
    from rich.table import Table

    from tcompress.demonstration import DemoReport

EXAMPLES = ("tcompress demo", "tcompress demo --keep-dir demo-models")


def demo(call: Shown, manner: Manner) -> None:
    """Does what `tcompress demo` says."""
    kept = Path(call.keep_dir).expanduser() if call.keep_dir else None
    if kept:
        check_empty(kept)
    from tcompress.demonstration import run_demo, shipped_data

    place = nullcontext(kept) if kept else TemporaryDirectory(prefix="tcompress-demo-")
    with shipped_data() as data, place as folder, shown_progress(quiet=manner.quiet) as progress:
        report = run_demo(data, Path(folder), progress=progress)
    if manner.as_json:
        print_json(report.model_dump(mode="json"))
        return
    screen = results()
    screen.print(_table(report))
    screen.print(_headline(report) + "\n")
    for row in report.rows:
        screen.print(row.label, style="bold")
        screen.print(" ".join(f"{report.prompt}{row.text}".split()) + "\n")


def _table(report: DemoReport) -> Table:
    numbers = ("kept", "parameters", "bytes", "times faster", "perplexity")
    rows = table("model", *numbers, right=numbers)
    for row, following in zip(report.rows, (*report.rows[1:], None), strict=True):
        rows.add_row(
            row.label,
            f"{row.kept:.1%}",
            f"{row.parameters:,}",
            f"{row.bytes:,}",
            f"{row.speed:.2f}",
            f"{row.perplexity:,.2f}" if row.perplexity < 1000 else f"{row.perplexity:,.0f}",
            end_section=row.healed and following is not None and not following.healed,
        )
    return rows


def _headline(report: DemoReport) -> str:
    """Says what the first row came to, and how all were measured."""
    dense, first = report.rows[:2]
    gained = (
        f"{first.label}: {dense.bytes / first.bytes:.1f} times smaller on disk, "
        f"{first.speed:.1f} times as fast, perplexity {first.perplexity:.2f} against "
        f"{dense.perplexity:.2f}."
    )
    measured = (
        "Kept: of the blocks. Times faster: 8 x 256 tokens on one thread. Perplexity: per token, "
        f"on {report.measured_stories} stories that neither the training nor the "
        f"{report.fitting_stories} stories of the fit contain."
    )
    healing = (
        f" Healed: {report.healing_steps} steps on those {report.fitting_stories} and on "
        f"{report.written_stories} stories that the dense model wrote."
    )
    if first.label.startswith("compress"):
        healing += " `compress` chooses sizes, converts and heals by itself, in its own minutes."
    return f"{gained}\n\n{measured}" + (healing if report.written_stories else "")
