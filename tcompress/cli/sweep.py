"""`tcompress sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tcompress.cli import complete
from tcompress.cli import options as opt
from tcompress.cli.errors import THRESHOLD, USAGE, Interrupted
from tcompress.cli.job import Access, Manner, open_source, relative

if TYPE_CHECKING:
    from tcompress.recipe import Recipe
    from tcompress.source import SourceModel
    from tcompress.sweeping.outcome import Swept

EPILOG = opt.examples(
    "tcompress sweep minilm --dry-run",
    "tcompress sweep minilm --task sts --data pairs.csv --bench -o sweep",
    "tcompress sweep gpt2 --methods svd,lprod:p=8 --targets 0.5,0.25,0.1",
    "tcompress sweep minilm --task sts --data a.csv --finetune-steps 200",
    "tcompress sweep minilm --recipe encoder/minilm-sweep -o sweep",
)

CELLS, QUALITY = "Cells", "What is measured"

Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        metavar="NAME[:OPTION=VALUE]...,...",
        show_default=False,
        help="Methods, such as `svd,lprod:p=8,tt:order=3`; a name alone takes options that suit "
        "the target. Default: one method of each structure.",
        rich_help_panel=CELLS,
        autocompletion=complete.method_lists,
    ),
]
Targets = Annotated[
    str | None,
    typer.Option(
        "--targets",
        metavar="N,N,...",
        show_default=False,
        help="Kept fractions of the rewritten layers' parameters. Default 0.5,0.25.",
        rich_help_panel=CELLS,
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default=False,
        help="As `tcompress evaluate` takes it. Without it, models are compared by the held-out "
        "error of the last layer.",
        rich_help_panel=QUALITY,
        autocompletion=complete.tasks,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|FOLDER|DATASET",
        show_default=False,
        help="Data to measure on.",
        rich_help_panel=QUALITY,
        autocompletion=complete.data,
    ),
]
Split = Annotated[
    str | None,
    typer.Option(help="Split of a folder or hub data set.", rich_help_panel=QUALITY),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=NAME",
        help="Columns by role: `text`, `pair`, `image`, `volume`, `shape`, `label`, `score`.",
        rich_help_panel=QUALITY,
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Most examples.", rich_help_panel=QUALITY)]
BenchFlag = Annotated[
    bool,
    typer.Option(
        "--bench", help="Time every model beside the dense one too.", rich_help_panel=QUALITY
    ),
]
FinetuneSteps = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default=False,
        help="Heal every model for so many steps, and measure it before and after.",
        rich_help_panel=CELLS,
    ),
]
TrainData = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE|FOLDER|DATASET",
        help="Unlabelled data to heal on; repeatable. Default: text that ships.",
        rich_help_panel=CELLS,
        autocompletion=complete.data,
    ),
]
KeepModels = Annotated[
    bool | None,
    typer.Option(
        "--keep-models/--no-keep-models",
        show_default=False,
        help="Keep the models once they are measured (default), or their numbers only.",
        rich_help_panel=opt.OUTPUT,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FOLDER",
        help="Folder to write, or to go on with. Default: the model's name and `-sweep`.",
        rich_help_panel=opt.OUTPUT,
        autocompletion=complete.folders,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Do all cells again, also in a folder that holds something else.",
        rich_help_panel=opt.OUTPUT,
    ),
]


def sweep(
    context: typer.Context,
    model: opt.Model,
    recipe: opt.RecipeOption = None,
    methods: Methods = None,
    targets: Targets = None,
    finetune_steps: FinetuneSteps = None,
    train_data: TrainData = None,
    task: Task = None,
    data: Data = None,
    split: Split = None,
    columns: Columns = None,
    limit: Limit = None,
    bench: BenchFlag = False,
    allocation: opt.Allocation = None,
    keep: opt.Keep = None,
    changes: opt.Changes = None,
    calib: opt.Calib = None,
    calib_samples: opt.CalibSamples = None,
    calib_columns: opt.CalibColumns = None,
    output: Folder = None,
    keep_models: KeepModels = None,
    force: Force = False,
    dtype: opt.DType = None,
    device: opt.Device = None,
    revision: opt.Revision = None,
    token: opt.Token = None,
    allow_remote_code: opt.AllowRemoteCode = False,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Compare methods and sizes: convert, heal, measure and time each, in one table.

    Started again with the same output, only what depends on changed settings is done again. A cell
    that a model refuses is named with the reason and changes nothing else, the exit code neither;
    it is 2 if no cell can be done or one fails, 3 if none reaches a threshold that a recipe sets.
    """
    from tcompress.cli.sweep_settings import recipe_of
    from tcompress.source import default_output_name

    said = recipe_of(context.params)
    folder = Path(output or said.output or default_output_name(model, "sweep"))
    access, manner = Access(revision, token, allow_remote_code), Manner(json, quiet, verbose)
    source = open_source(model, access, manner)
    if dry_run:
        show_cells(said, source, folder, manner)
    else:
        perform_sweep(said, source, folder, manner, force=force, token=token)


def show_cells(recipe: Recipe, source: SourceModel, folder: Path, manner: Manner) -> None:
    """Prints what a sweep would do, and what it would cost."""
    from tcompress.cli.output import print_json, results
    from tcompress.reporting.front import plan_table
    from tcompress.sweeping.cells import cells_of
    from tcompress.sweeping.run import check_recipe

    check_recipe(recipe)
    cells = cells_of(recipe, source)
    if manner.as_json:
        listed = [cell.to_json() for cell in cells]
        print_json({"dry_run": True, "output": str(folder.absolute()), "cells": listed})
        return
    planned = [(cell.name, cell.plan, cell.costs) for cell in cells if cell.plan and cell.costs]
    refused = [(cell.name, cell.refusal) for cell in cells if cell.refusal is not None]
    results().print(plan_table(planned, refused))
    results().print(
        f"Nothing was written. Without `--dry-run`, this writes `{folder}`.", soft_wrap=True
    )


def perform_sweep(
    recipe: Recipe,
    source: SourceModel,
    folder: Path,
    manner: Manner,
    *,
    force: bool = False,
    token: str | None = None,
) -> None:
    """Runs a sweep, prints its table, and ends with its exit code."""
    from transformers.utils import logging

    from tcompress.cli.output import say
    from tcompress.cli.progress import shown_progress
    from tcompress.sweeping.run import sweep as run

    if not manner.verbose:
        logging.disable_progress_bar()
    try:
        with shown_progress(quiet=manner.quiet) as progress:
            done = run(
                recipe,
                source,
                folder,
                force=force,
                token=token,
                progress=progress,
                say=lambda text: say(text, quiet=manner.quiet),
            )
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted; what was finished is kept in `{folder}`",
            "run the same command again: it goes on where it stopped",
        ) from error
    _show(done, manner)
    if done.failed or done.missed:
        raise typer.Exit(USAGE if done.failed else THRESHOLD)


def _show(done: Swept, manner: Manner) -> None:
    from tcompress.cli.output import print_json, results
    from tcompress.reporting.front import front_table

    if manner.as_json:
        print_json(done.to_json())
        return
    screen = results()
    screen.print(front_table(done.front, [(item.name, item.reason) for item in done.stopped]))
    for cell in done.cells:
        for text in cell.missed:
            screen.print(f"Missed by `{cell.cell.name}`: {text}.", soft_wrap=True)
    screen.print(f"Wrote `{relative(done.folder)}`.", soft_wrap=True)
    screen.print(f"Report: `{relative(done.page.absolute())}`.", soft_wrap=True)
