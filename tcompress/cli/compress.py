"""`tcompress compress`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tcompress import processes
from tcompress.cli import terminal
from tcompress.cli.first_look import first_look, reach
from tcompress.models.names import PAGE, default_output_name
from tcompress.options.commands import Hub, Manner, OneModel, Planned, Written
from tcompress.options.compress_options import Compress
from tcompress.runtimes.installed import require

if TYPE_CHECKING:
    from tcompress.compression import Compressed

EXAMPLES = (
    "tcompress compress minilm --data train.csv --size 10MB",
    "tcompress compress minilm --data a.txt --data b.csv --speedup 6 --minutes 30",
    "tcompress compress minilm --speedup 4 --dry-run",
    "torchrun --nproc_per_node 2 -m tcompress compress minilm --data train.csv --size 10MB",
    "tcompress compress bert-sst2 --data a.csv --speedup 4 --task classification --test-data b.csv",
)


def compress(
    one: OneModel,
    goal: Compress,
    written: Written,
    planned: Planned,
    hub: Hub,
    manner: Manner,
) -> None:
    """Does what `tcompress compress` says."""
    folder = Path(written.output or default_output_name(one.model, "small")).expanduser()
    with first_look() as look:
        look.output(folder.absolute(), one.model, force=written.force)
        if goal.runtime != "torch":
            look.check(require, "onnx")
        look.models(one.model)
        look.data([*goal.data, *goal.test_data])
    reach(one.model, token=hub.token)
    if planned.dry_run:
        _show_forecast(one.model, goal, folder, hub, manner)
        return
    from tcompress.compression import compress as run
    from tcompress.compression import follow
    from tcompress.hf.opening import pick_device

    what = partial(terminal.unwritten, folder, "stages that were finished are kept")
    quiet, device = manner.quiet, pick_device("auto")
    access: dict[str, Any] = {"token": hub.token, "trust_remote_code": hub.allow_remote_code}
    terminals = terminal.resumable(what, quiet=quiet, output=folder, overview=True)
    with terminals as heard, processes.joined(device):
        if not processes.leads():
            follow(one.model, **access)
            return
        done = run(one.model, folder, goal, force=written.force, **access, **heard)
    if manner.as_json:
        terminal.print_json(done.to_json())
    else:
        _show(done, folder)
    if done.missed:
        raise typer.Exit(terminal.THRESHOLD)


def _show_forecast(model: str, goal: Compress, folder: Path, hub: Hub, manner: Manner) -> None:
    from tcompress.artifact.reader import open_checked
    from tcompress.compression.forecast import forecast

    source = open_checked(model, hub.token, hub.allow_remote_code, converted=False)
    expected = forecast(source, goal)
    if manner.as_json:
        terminal.print_json({"dry_run": True, "output": str(folder.absolute()), **asdict(expected)})
        return
    for number, stage in enumerate(expected.stages, 1):
        terminal.tell(f"{number}. {stage}")
    if expected.too_short is not None:
        terminal.tell(f"{expected.too_short}.")
    terminal.tell(f"Not known yet: {expected.unknown}.")
    terminal.tell(f"Nothing was written. Without `--dry-run`, this writes `{folder}`.")


def _show(done: Compressed, folder: Path) -> None:
    from tcompress.compression.table import columns

    names = columns(done.rows, done.quality)
    table = terminal.table("model", *names, right=names[1:])
    first = done.rows[0].quality or 0.0
    for row in done.rows:
        cells = [row.runtime, f"{row.bytes / 1e6:.1f}", f"{row.speedup:.2f} x"]
        if row.quality is not None:
            around = "" if row.interval is None else " [{:.3f}, {:.3f}]".format(*row.interval)
            share = f" ({row.quality / first:.3f} x)" if first > 0 else ""
            cells.append(f"{row.quality:.4f}{around}{share}")
        elif done.quality is not None:
            cells.append("")
        if "agreement" in names:
            cells.append("" if row.agreement is None else f"{row.agreement:.4f}")
        table.add_row(row.name, *cells)
    terminal.results().print(table)
    healed = f"Healed: {done.healed}"
    if done.agreement is not None:
        healed += f"; agreement with the dense model on texts held back {done.agreement:.4f}"
    terminal.tell(f"{healed}.")
    terminal.tell(
        f"Wrote `{folder}`. What the runtime reads is `{done.file}`, with `config.json` and the "
        "tokenizer; the rest is for PyTorch. To use it:"
    )
    for line in done.usage.splitlines():
        terminal.tell(f"    {line}")
    for text in done.missed:
        terminal.tell(f"Missed: {text}.")
    for note in done.notes:
        terminal.tell(f"note: {note}")
    if (folder / PAGE).is_file():
        again = f"tcompress report {terminal.typed(folder)} --html {terminal.typed(folder / PAGE)}"
        terminal.tell(f"Page: `{folder / PAGE}`, which `{again}` writes anew.")
