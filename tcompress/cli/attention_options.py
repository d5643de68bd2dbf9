"""Options of `convert` about attention."""

from __future__ import annotations

from typing import Annotated

import typer

from tcompress.cli import complete
from tcompress.cli.options import METHOD

Structure = Annotated[
    str | None,
    typer.Option(
        "--structure",
        metavar="NAME",
        help="With a mechanism: also store weights in this structure. Default that of its paper "
        "where a size is given (`--target`, `--rank`, `--p`, ...), else `none`.",
        rich_help_panel=METHOD,
        autocompletion=complete.structures,
    ),
]
AttentionLayers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="N,N,...",
        help="With a mechanism: blocks whose attention is exchanged, from 0: `4,5` or `0-3`. "
        "Default all. In recipes `attention_layers`.",
        rich_help_panel=METHOD,
    ),
]
FilterOrder = Annotated[
    int | None,
    typer.Option(
        "--filter-order",
        help="tsa: terms of the graph filter. Default 2.",
        rich_help_panel=METHOD,
    ),
]
Grid = Annotated[
    str | None,
    typer.Option(
        "--grid",
        metavar="N,N,...",
        help="hot: sizes of the grid of tokens; default by the config of image and video models.",
        rich_help_panel=METHOD,
    ),
]
Fold = Annotated[
    int | None,
    typer.Option(
        "--fold", help="hot: for text, tokens in a row of the grid.", rich_help_panel=METHOD
    ),
]
Kernel = Annotated[
    str | None,
    typer.Option(
        "--kernel",
        metavar="softmax|favor|smreg",
        help="hot: `favor` and `smreg` (the paper's) are random features, and need time linear in "
        "each axis. Default `softmax`.",
        rich_help_panel=METHOD,
        autocompletion=complete.kernels,
    ),
]
CoreForm = Annotated[
    str | None,
    typer.Option(
        "--core",
        metavar="cp|aligned|tucker",
        help="tam: form of the core; `aligned` is the paper's, `cp` the paper's without query "
        "alignment. Default `cp`.",
        rich_help_panel=METHOD,
        autocompletion=complete.core_forms,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="states|gru",
        help="tam: keys and values from the model's states, or also from a gated GRU over the "
        "keys of each layer. Default `states`.",
        rich_help_panel=METHOD,
        autocompletion=complete.memories,
    ),
]
Length = Annotated[
    int | None,
    typer.Option("--length", help="multilinear: most tokens of an input.", rich_help_panel=METHOD),
]
