"""`tcompress export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tcompress.cli import complete
from tcompress.cli import options as opt

EPILOG = opt.examples(
    "tcompress export bert-base-lprod-p4 --to dense -o bert-base-plain",
)


def export(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            show_default=False,
            help="Folder of a converted model.",
            autocompletion=complete.folders,
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="`dense`: a plain model that computes the same, with dense weights.",
            autocompletion=complete.formats,
        ),
    ] = "dense",
    output: opt.Output = None,
    force: opt.Force = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Write a converted model in another format."""
    from tcompress.cli.output import print_json, results, silence_libraries
    from tcompress.cli.progress import shown_progress

    _check_format(to)
    silence_libraries(verbose=verbose)
    from json import loads as json_of

    from tcompress.exporting.dense import export_dense, stands_alone

    folder = output or Path(f"{model.name or model.resolve().name}-{to}")
    with shown_progress(quiet=quiet) as progress:
        written = export_dense(model, folder, force=force, progress=progress)
    if json:
        print_json({"output": str(written), "format": to})
    else:
        config = json_of((written / "config.json").read_text(encoding="utf-8"))
        needs = "without tcompress" if stands_alone(config) else "with `import tcompress`"
        results().print(f"Wrote `{folder}`, which loads {needs}.", soft_wrap=True)


def _check_format(name: str) -> None:
    from tcompress.cli.errors import suggestion
    from tcompress.errors import InputError

    if name not in complete.FORMATS:
        listed = ", ".join(f"`{known}`" for known in complete.FORMATS)
        raise InputError(
            f"unknown format `{name}`; formats are {listed}",
            suggestion(name, complete.FORMATS) or "see `tcompress export --help`",
        )
