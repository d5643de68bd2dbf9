"""Options that choose whole blocks."""

from __future__ import annotations

from typing import Annotated

import typer

from tcompress.cli.options import METHOD

KeepLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-layers",
        metavar="[STACK:]N,N,...",
        help="Drop whole blocks, all but these, counted from 0: `1,3,5` or `0-5,11`. With a "
        "method, or alone. Where a model has several stacks: `decoder:0,2`, repeatable.",
        rich_help_panel=METHOD,
    ),
]
DropLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--drop-layers",
        metavar="[STACK:]N|auto",
        help="Drop N whole blocks: those that change the model's output least on calibration "
        "data; without data, at equal distances. `auto`: as many as serve the budget best, tried "
        "one after another; the budget then is one of all blocks.",
        rich_help_panel=METHOD,
    ),
]
AppendLayers = Annotated[
    int | None,
    typer.Option(
        "--append-layers",
        metavar="N",
        min=1,
        help="Put N copies of the last block on top; with a mechanism, that is where it stands.",
        rich_help_panel=METHOD,
    ),
]
