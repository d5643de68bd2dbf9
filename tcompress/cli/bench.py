"""`tcompress bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tcompress.cli import complete
from tcompress.cli import options as opt

if TYPE_CHECKING:
    from tcompress.benching.run import Bench

EPILOG = opt.examples(
    "tcompress bench bert-base-lprod-p4",
    "tcompress bench bert-base-lprod-p4 --against bert-base --batch 1,8",
    "tcompress bench bert-base-lprod-p4 --mode eager,compiled --threads 2",
    "tcompress bench bert-base-tt-25 --keep-weights",
)
_MEASURED = "What is measured"

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        show_default=False,
        help="Models: folders, short names or hub ids.",
        autocompletion=complete.models,
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Dense model to compare with. Default: the one that the model was made from.",
        rich_help_panel=opt.SOURCE,
        autocompletion=complete.models,
    ),
]
Batch = Annotated[
    str,
    typer.Option(metavar="N,N,...", help="Sizes of batches.", rich_help_panel=_MEASURED),
]
Length = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Tokens in a sequence. Default 32,128, as far as the models go; pictures have a "
        "length of their own.",
        rich_help_panel=_MEASURED,
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        metavar="eager|compiled|eager,compiled",
        help="As the model is, through `torch.compile`, or both.",
        rich_help_panel=_MEASURED,
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        min=1,
        max=10**6,
        help="Timed passes of each model; medians count.",
        rich_help_panel=_MEASURED,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,
        help="Threads on a CPU. Default as PyTorch chooses.",
        rich_help_panel=_MEASURED,
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="`float32`, `float16` or `bfloat16`. Default: as the dense model.",
        rich_help_panel=_MEASURED,
        autocompletion=complete.dtypes,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        help="`auto`, `cpu`, `cuda`, `cuda:1` or `mps`.",
        rich_help_panel=_MEASURED,
        autocompletion=complete.devices,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        min=0, max=2**32 - 1, help="Seed of the random inputs.", rich_help_panel=_MEASURED
    ),
]
KeepWeights = Annotated[
    bool,
    typer.Option(
        "--keep-weights",
        help="Let converted layers keep a dense weight each, and say what memory that takes.",
        rich_help_panel=_MEASURED,
    ),
]
NoSave = Annotated[
    bool,
    typer.Option(
        "--no-save",
        help="Do not keep the times in the models' `tcompress.json`.",
        rich_help_panel=opt.OUTPUT,
    ),
]


def bench(
    models: Models,
    against: Against = None,
    batch: Batch = "1,8,32",
    length: Length = None,
    mode: Mode = "eager",
    repeats: Repeats = 7,
    threads: Threads = None,
    dtype: DType = None,
    device: Device = "auto",
    seed: Seed = 0,
    keep_weights: KeepWeights = False,
    no_save: NoSave = False,
    allow_remote_code: opt.AllowRemoteCode = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Time a forward pass beside the dense model's, and record it."""
    from tcompress.cli.output import print_json, silence_libraries
    from tcompress.cli.progress import shown_progress

    silence_libraries(verbose=verbose)
    from tcompress.benching.grid import modes, numbers
    from tcompress.benching.run import Settings
    from tcompress.benching.run import bench as measure

    settings = Settings(
        batches=numbers(batch, "--batch"),
        lengths=None if length is None else numbers(length, "--length"),
        modes=modes(mode),
        repeats=repeats,
        threads=threads,
        dtype=dtype,
        device=device,
        seed=seed,
        keep_weights=keep_weights,
    )
    with shown_progress(quiet=quiet) as progress:
        options = {"save": not no_save, "trust_remote_code": allow_remote_code}
        done = measure(models, against, settings, progress=progress, **options)
    if json:
        print_json({"benches": [item.model_dump(mode="json") for item in done]})
    else:
        _show(done, wanted=not no_save)


def _show(done: Sequence[Bench], *, wanted: bool) -> None:
    from tcompress.cli.output import results
    from tcompress.reporting.speed import speed_table

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
