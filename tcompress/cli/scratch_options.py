"""Options of `tcompress convert` for models that begin at random."""

from __future__ import annotations

from typing import Annotated

import typer

from tcompress.cli import complete
from tcompress.cli.options import METHOD

Init = Annotated[
    str | None,
    typer.Option(
        "--init",
        metavar="pretrained|random",
        help="`random`: read no weights, draw all of them (`--seed`), to train from scratch; a "
        "`config.json` is enough. Without a method the dense model. Default `pretrained`.",
        rich_help_panel=METHOD,
        autocompletion=complete.inits,
    ),
]
Positions = Annotated[
    str | None,
    typer.Option(
        "--positions",
        metavar="NAME",
        help="lprod, `--init random`: sinusoids scaled by slice in place of the host's positions: "
        "`standard`, `linear`, `exponential`, `harmonic`; or `learned`.",
        rich_help_panel=METHOD,
        autocompletion=complete.positions,
    ),
]
Norm = Annotated[
    str | None,
    typer.Option(
        "--norm",
        metavar="host|tensor",
        help="lprod, `--init random`: `tensor` normalises each slice by itself.",
        rich_help_panel=METHOD,
        autocompletion=complete.norms,
    ),
]
