"""`tcompress report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tcompress.cli import complete
from tcompress.cli import options as opt

EPILOG = opt.examples(
    "tcompress report bert-base-lprod-p4",
    "tcompress report bert-base bert-base-lprod-p4 bert-base-svd-25 --length 256",
    "tcompress report bert-base-lprod-p4 --json > report.json",
    "tcompress report bert-base-lprod-p4 bert-base-svd-25 --html report.html",
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
        int,
        typer.Option(
            min=1, max=10**9, help="Tokens to count multiply-adds for; images have their own."
        ),
    ] = 128,
    layers: Annotated[bool, typer.Option("--layers", help="Add a row for each layer.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Write a page too: one file with tables and charts that needs no network.",
            rich_help_panel=opt.OUTPUT,
        ),
    ] = None,
    allow_remote_code: opt.AllowRemoteCode = False,
    json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Show parameters, bytes, errors, quality and speed, side by side."""
    from tcompress.cli.output import print_json, results, silence_libraries

    silence_libraries(verbose=verbose)
    from tcompress.reporting.console import render
    from tcompress.reporting.html import check_target, write_html
    from tcompress.reporting.together import reports_of

    if html is not None:
        check_target(html)  # before the models are read
    reports = reports_of(models, length, trust_remote_code=allow_remote_code)
    written = {} if html is None else {"html": str(write_html(reports, html))}
    if json:
        print_json({"reports": [item.to_json() for item in reports], **written})
        return
    results().print(render(reports, per_layer=layers))
    if html is not None:
        results().print(f"Wrote `{html}`.", soft_wrap=True)
