"""`tcompress compress`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tcompress.artifact.workplace import check_output
from tcompress.cli import terminal
from tcompress.cli.first_look import first_look, reach
from tcompress.models.names import default_output_name
from tcompress.options.commands import Hub, Manner, OneModel, Written
from tcompress.options.compress_options import Compress
from tcompress.runtimes.installed import require_onnx

if TYPE_CHECKING:
    from tcompress.compression import Compressed

EXAMPLES = (
    "tcompress compress minilm --data train.csv --size 10MB",
    "tcompress compress minilm --data a.txt --data b.csv --speedup 6 --minutes 30",
    "tcompress compress minilm --smoke --speedup 4",
    "tcompress compress bert-sst2 --data a.csv --speedup 4 --task classification --test-data b.csv",
)


def compress(one: OneModel, goal: Compress, written: Written, hub: Hub, manner: Manner) -> None:
    """Does what `tcompress compress` says."""
    folder = Path(written.output or default_output_name(one.model, "small"))
    with first_look() as look:
        if goal.runtime != "torch":
            look.check(require_onnx)
        look.check(check_output, folder.expanduser().absolute(), force=written.force)
        look.models(one.model)
        look.data([*goal.data, *goal.test_data])
    reach(one.model, token=hub.token)
    from tcompress.compression import compress as run

    what = partial(terminal.unwritten, folder)
    with terminal.resumable(what, quiet=manner.quiet, output=folder) as heard:
        done = run(
            one.model,
            folder,
            goal,
            force=written.force,
            token=hub.token,
            trust_remote_code=hub.allow_remote_code,
            **heard,
        )
    if manner.as_json:
        terminal.print_json(done.to_json())
    else:
        _show(done, folder)
    if done.missed:
        raise typer.Exit(terminal.THRESHOLD)


def _show(done: Compressed, folder: Path) -> None:
    """Prints the table, and how the folder is used."""
    columns = ["MB", "speed", "cosine of the file", *([done.quality] if done.quality else [])]
    table = terminal.table("model", *columns, right=columns)
    first = done.rows[0].quality
    for row in done.rows:
        cells = [f"{row.bytes / 1e6:.1f}", f"{row.speedup:.2f} x"]
        cells.append("" if row.cosine is None else f"{row.cosine:.4f}")
        if done.quality and row.quality is not None and first:
            cells.append(f"{row.quality:.4f} ({row.quality / first:.3f} x)")
        table.add_row(row.name, *cells)
    terminal.results().print(table)
    terminal.tell(f"Healed: {done.healed}. Wrote `{folder}`; the runtime reads `{done.file}`.")
    for text in done.missed:
        terminal.tell(f"Missed: {text}.")
    for note in done.notes:
        terminal.tell(f"note: {note}")
    terminal.tell(f"Report: `tcompress report {terminal.typed(str(folder))} --html report.html`")
