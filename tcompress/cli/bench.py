"""`tcompress bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tcompress.options.commands import Manner, Timed, Trust
from tcompress.options.steps import Bench as BenchOptions

if TYPE_CHECKING:
    from tcompress.latency.benchmark import Bench

EXAMPLES = (
    "tcompress bench bert-base-lprod-p4",
    "tcompress bench bert-base-lprod-p4 --against bert-base --batch 1,8",
    "tcompress bench bert-base-lprod-p4 --mode eager,compiled --threads 2",
    "tcompress bench bert-base-tt-25 --keep-weights",
)


def bench(call: Timed, wanted: BenchOptions, trust: Trust, manner: Manner) -> None:
    """Does what `tcompress bench` says."""
    from tcompress.cli.terminal import print_json, shown_progress, silence_libraries

    silence_libraries(verbose=manner.verbose)
    from tcompress.latency.benchmark import bench as measure

    with shown_progress(quiet=manner.quiet) as progress:
        done = measure(
            call.models,
            call.against,
            wanted,
            save=call.save,
            progress=progress,
            trust_remote_code=trust.allow_remote_code,
        )
    if manner.as_json:
        print_json({"benches": [item.model_dump(mode="json") for item in done]})
    else:
        _show(done, wanted=call.save)


def _show(done: Sequence[Bench], *, wanted: bool) -> None:
    from tcompress.cli.terminal import results
    from tcompress.reporting.console import speed_table

    screen = results()
    for item in done:
        screen.print(f"{item.model} against {item.baseline}", soft_wrap=True, style="bold")
        screen.print(speed_table(item.speed))
        for note in item.notes:
            screen.print(f"note: {note}", soft_wrap=True)
        if item.saved:
            screen.print(f"Kept in `{item.model}/tcompress.json`.", soft_wrap=True)
        elif wanted:
            words = f"Not kept: `{item.model}` is no folder with a `tcompress.json`."
            screen.print(words, soft_wrap=True)
