"""Options of commands: names, help, panels, completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tcompress.cli import complete

METHOD, CALIBRATION, SOURCE, OUTPUT, REPORT = (
    "Method",
    "Calibration",
    "Model",
    "Output",
    "What is printed",
)


def examples(*lines: str) -> str:
    """Writes the end of a command's help."""
    return "\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])


# Model

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="Folder, short name (`bert-base`) or hub id.",
        autocompletion=complete.models,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit on the hub.", rich_help_panel=SOURCE),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="HF_TOKEN",
        show_default=False,
        help="Access token for the hub.",
        rich_help_panel=SOURCE,
    ),
]
AllowRemoteCode = Annotated[
    bool,
    typer.Option(
        "--allow-remote-code",
        help="Run Python code that comes with the model. Read it before.",
        rich_help_panel=SOURCE,
    ),
]

# Method

RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="FILE|NAME",
        help="Start from a recipe; options override it.",
        rich_help_panel=METHOD,
        autocompletion=complete.recipes,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value of the recipe, such as `finetune.steps=200`. Repeatable.",
        rich_help_panel=METHOD,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="A structure of weights (`lprod`, `svd`, `tt`, ...), `auto`, which chooses the best "
        "of several for each layer, or a mechanism of attention (`hot`, `tga`, ...); see "
        "`tcompress methods`. Default `lprod`; `none`, which rewrites no layer, where only blocks "
        "are dropped, with `--embeddings` alone and with `--init random`.",
        rich_help_panel=METHOD,
        autocompletion=complete.methods,
    ),
]
Slices = Annotated[
    int | None,
    typer.Option(
        "--p", help="lprod: number of slices; 1/p of the weights is kept.", rich_help_panel=METHOD
    ),
]
Transform = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="lprod: `fitted`, `dct`, ... Default `fitted` with calibration, else `dct`.",
        rich_help_panel=METHOD,
        autocompletion=complete.transforms,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block", help="lprod: block size of the fitted transform.", rich_help_panel=METHOD
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(help="lprod: stages of the fitted transform.", rich_help_panel=METHOD),
]
TubalRank = Annotated[
    int | None,
    typer.Option(help="lprod: singular tubes kept of the slices.", rich_help_panel=METHOD),
]
Rank = Annotated[
    str | None,
    typer.Option(
        metavar="N|N,N,...",
        help="svd, tt, qtt, tucker: rank of every rewritten weight; tt and qtt take a list, tucker "
        "with `--share` two numbers.",
        rich_help_panel=METHOD,
    ),
]
Order = Annotated[
    int | None,
    typer.Option(help="tt: number of cores. Default 2.", rich_help_panel=METHOD),
]
Modes = Annotated[
    str | None,
    typer.Option(
        metavar="WIDTH=MODES",
        help="tt: factors of widths, such as `64=8x8,172=4x43`. Default: as even as they come.",
        rich_help_panel=METHOD,
    ),
]
Apply = Annotated[
    str | None,
    typer.Option(
        metavar="auto|contract|rebuild",
        help="tt: contract the cores with the input, rebuild the weight in each pass, or what "
        "costs less.",
        rich_help_panel=METHOD,
        autocompletion=complete.ways,
    ),
]
Share = Annotated[
    str | None,
    typer.Option(
        metavar="none|heads|layers|model",
        help="tucker: what shares factors and cores: nothing (then it is `svd` with more "
        "parameters), the heads of an attention, all layers of a role, or the whole model. "
        "Default `none`.",
        rich_help_panel=METHOD,
        autocompletion=complete.shares,
    ),
]
Cores = Annotated[
    int | None,
    typer.Option(help="tucker: number of shared cores.", rich_help_panel=METHOD),
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="FRACTION",
        help="Kept fraction of the rewritten layers' parameters: `0.25` or `25%`.",
        rich_help_panel=METHOD,
    ),
]
TargetParams = Annotated[
    str | None,
    typer.Option(
        "--target-params",
        metavar="N|30M",
        help="In place of `--target`: most parameters of the whole model; K, M and B count.",
        rich_help_panel=METHOD,
    ),
]
TargetBytes = Annotated[
    str | None,
    typer.Option(
        "--target-bytes",
        metavar="60MB",
        help="In place of `--target`: most bytes of all weights, in the output's dtype; headers of "
        "files, some kilobytes, come on top.",
        rich_help_panel=METHOD,
    ),
]
MaxError = Annotated[
    str | None,
    typer.Option(
        metavar="FRACTION",
        help="In place of `--target`: largest predicted error of the rewritten layers' outputs, "
        "squared, weighed by what they are worth to the model and summed over layers, relative to "
        "that of leaving all of them out. The smallest sizes within it are chosen.",
        rich_help_panel=METHOD,
    ),
]
Tol = Annotated[
    str | None,
    typer.Option(
        metavar="FRACTION",
        help="svd, tt, qtt, tucker: the smallest rank of each weight whose predicted error, "
        "squared and relative to leaving the weight out, is at most this.",
        rich_help_panel=METHOD,
    ),
]
Trials = Annotated[
    bool | None,
    typer.Option(
        "--trials/--no-trials",
        help="auto: convert with each structure too, and keep what changes the output least.",
        rich_help_panel=METHOD,
    ),
]
Offer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME,...",
        help="auto: structures to choose among. Default `lowrank,lprod`, and all on their own.",
        rich_help_panel=METHOD,
        autocompletion=complete.structure_lists,
    ),
]
Allocation = Annotated[
    str | None,
    typer.Option(
        metavar="loss|uniform",
        help="Share a budget out by the loss that parameters save, or alike. Default `loss`.",
        rich_help_panel=METHOD,
        autocompletion=complete.allocations,
    ),
]
ResidualRank = Annotated[
    int | None,
    typer.Option(help="Rank of a low-rank term added to the structure.", rich_help_panel=METHOD),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Leave these layers dense: a name, `*` wildcards, a role such as `down`, or `re:` "
        "and an expression. Repeatable; added to the recipe's.",
        rich_help_panel=METHOD,
    ),
]
Embeddings = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="Rewrite the word embedding too, and an output head tied to it: `svd`, `tt`, `qtt` "
        "or `tucker`. Alone, or with a method for the layers.",
        rich_help_panel=METHOD,
        autocompletion=complete.table_methods,
    ),
]
EmbeddingTarget = Annotated[
    str | None,
    typer.Option(
        metavar="FRACTION",
        help="Kept fraction of the word embedding. Default that of `--target`, or 0.25.",
        rich_help_panel=METHOD,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        help="Rewrite only these layers: a name, the end of one, a role, or with `*`. Repeatable.",
        rich_help_panel=METHOD,
    ),
]

# Calibration

Calib = Annotated[
    str | None,
    typer.Option(
        "--calib",
        metavar="builtin|none|FILE|DATASET",
        help="Data that the fit may look at: what ships, nothing, a txt, csv, jsonl or parquet "
        "file, a folder of images, or a hub id.",
        rich_help_panel=CALIBRATION,
        autocompletion=complete.calibrations,
    ),
]
CalibSamples = Annotated[
    int | None, typer.Option(help="Number of texts or images.", rich_help_panel=CALIBRATION)
]
CalibColumns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Text or image columns; repeatable, or with commas between.",
        rich_help_panel=CALIBRATION,
    ),
]
MaxLength = Annotated[
    int | None, typer.Option(help="Longest text, in tokens.", rich_help_panel=CALIBRATION)
]
OutputMoments = Annotated[
    bool | None,
    typer.Option(
        "--output-moments/--input-moments",
        help="Weigh errors by what they cost the model (a backward pass, no labels), or not. "
        "Default: where sizes follow loss.",
        show_default=False,
        rich_help_panel=CALIBRATION,
    ),
]
Damping = Annotated[
    float | None,
    typer.Option(
        help="Strength of the ridge added to the moments; more data needs less.",
        rich_help_panel=CALIBRATION,
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of all random choices.", rich_help_panel=CALIBRATION)
]

# Output

Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FOLDER",
        help="Folder to write. Default: a name made of the model and the method.",
        rich_help_panel=OUTPUT,
        autocompletion=complete.folders,
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace the output if it is not empty.", rich_help_panel=OUTPUT),
]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="`float32`, `float16` or `bfloat16`. Default: as the source.",
        rich_help_panel=OUTPUT,
        autocompletion=complete.dtypes,
    ),
]
MaxShardSize = Annotated[
    str | None,
    typer.Option(help="Largest weight file, such as `2GB`.", rich_help_panel=OUTPUT),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="`auto`, `cpu`, `cuda`, `cuda:1` or `mps`. Default `auto`.",
        rich_help_panel=OUTPUT,
        autocompletion=complete.devices,
    ),
]

# What is printed

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the plan and what it will cost; no weight is read, nothing is written.",
        rich_help_panel=REPORT,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON document to stdout, on failure too.",
        rich_help_panel=REPORT,
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress.", rich_help_panel=REPORT)
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help="Show what other libraries log.", rich_help_panel=REPORT),
]
