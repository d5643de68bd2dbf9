"""`tcompress report`."""

from __future__ import annotations

from typing import Annotated

import typer

from tcompress.cli import complete
from tcompress.cli import options as opt

EPILOG = opt.examples(
    "tcompress report bert-base-lprod-p4",
    "tcompress report bert-base bert-base-lprod-p4 bert-base-svd-25 --length 256",
    "tcompress report bert-base-lprod-p4 --json > report.json",
)

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        show_default=False,
        help="Converted or dense models: folders, short names or hub ids.",
        autocompletion=complete.models,
    ),
]


def report(
    models: Models,
    length: Annotated[
        int, typer.Option(min=1, help="Length in tokens at which multiply-adds are counted.")
    ] = 128,
    layers: Annotated[bool, typer.Option("--layers", help="Add a row for each layer.")] = False,
    json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Show parameters, bytes, multiply-adds and errors, side by side."""
    from tcompress.cli.output import print_json, results, silence_libraries

    silence_libraries(verbose=verbose)
    from tcompress.reporting.console import render
    from tcompress.reporting.model import report_of

    reports = [report_of(name, length=length) for name in models]
    if json:
        print_json({"reports": [item.to_json() for item in reports]})
    else:
        results().print(render(reports, per_layer=layers))
