"""`tcompress run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tcompress.cli import complete
from tcompress.cli import options as opt
from tcompress.cli.errors import THRESHOLD
from tcompress.cli.finetune import resumable
from tcompress.cli.job import Access, Job, Manner, open_job, perform, relative, show_plan
from tcompress.errors import RecipeError

if TYPE_CHECKING:
    from tcompress.recipe import Recipe

EPILOG = opt.examples(
    "tcompress run encoder/minilm-lprod",
    "tcompress run recipe.yaml --model ./my-model -o small --dry-run",
    "tcompress run encoder/minilm-healed --set finetune.steps=200",
    "tcompress run scratch/ag-news-lprod --variant smoke",
)

RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        show_default=False,
        help="File, or a name out of `tcompress recipes list`.",
        autocompletion=complete.recipes,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Another model than the recipe's.",
        rich_help_panel=opt.SOURCE,
        autocompletion=complete.models,
    ),
]

Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        metavar="NAME",
        help="Run a variant of the recipe, such as `smoke`; what is written is named after it. "
        "Repeatable.",
        rich_help_panel=opt.METHOD,
    ),
]


def run(
    recipe: RecipeName,
    model: ModelOption = None,
    variants: Variants = None,
    changes: opt.Changes = None,
    output: opt.Output = None,
    force: opt.Force = False,
    revision: opt.Revision = None,
    token: opt.Token = None,
    allow_remote_code: opt.AllowRemoteCode = False,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Do what a recipe says: convert, fine-tune, evaluate, bench, report; or a sweep."""
    from tcompress.artifact.workplace import check_place
    from tcompress.cli.settings import default_output
    from tcompress.recipe import change_recipe, choose_variants, find_recipe, parse_recipe

    text, origin = find_recipe(recipe)
    said = choose_variants(parse_recipe(text, origin), variants or [], origin)
    said = change_recipe(said, changes or [], origin)
    name = model or said.model
    architecture = None if model else said.architecture
    if architecture is not None:
        name = said.name or architecture.model_type
    if name is None:
        raise RecipeError(f"recipe `{origin}` names no model", "add `--model MODEL`")
    # A revision belongs to the model that it was written for.
    revision = revision or (said.revision if model is None else None)
    job = Job(
        model=name,
        convert=said.convert,
        output=Path(output or said.output or default_output(name, said.convert)),
        force=force,
        access=Access(revision, token, allow_remote_code),
        manner=Manner(json, quiet, verbose),
        architecture=architecture,
    )
    if not dry_run:
        check_place(job.output)  # before a long download
    if said.sweep is not None:
        _sweep(said, job, dry_run=dry_run)
    elif dry_run:
        show_plan(job)
    elif said.finetune or said.evaluate or said.bench or said.report:
        _run_all(said, job)
    else:
        perform(job)


def _sweep(said: Recipe, job: Job, *, dry_run: bool) -> None:
    from tcompress.cli.sweep import perform_sweep, show_cells

    source = open_job(job)
    if dry_run:
        show_cells(said, source, job.output, job.manner)
    else:
        perform_sweep(said, source, job.output, job.manner, force=job.force, token=job.access.token)


def _run_all(said: Recipe, job: Job) -> None:
    from tcompress.cli.output import print_json, results, say
    from tcompress.cli.progress import shown_progress

    source = open_job(job)
    from transformers.utils import logging

    from tcompress.pipeline import run_recipe
    from tcompress.reporting.console import render

    if not job.manner.verbose:
        logging.disable_progress_bar()
    with resumable(job.output), shown_progress(quiet=job.manner.quiet) as progress:
        done = run_recipe(
            said,
            source,
            job.output,
            force=job.force,
            again=job.force,
            token=job.access.token,
            progress=progress,
            say=lambda text: say(text, quiet=job.manner.quiet),
        )
    if job.manner.as_json:
        print_json(done.to_json())
    else:
        screen = results()
        screen.print(
            render([item.model_copy(update={"layers": (), "left": ()}) for item in done.reports])
        )
        verb = "Kept" if done.kept else "Wrote"
        screen.print(f"{verb} `{relative(done.folder)}`.", soft_wrap=True)
        if done.page is not None:
            screen.print(f"Report: `{relative(done.page.absolute())}`.", soft_wrap=True)
        for text in done.missed:
            screen.print(f"Missed: {text}.", soft_wrap=True)
    if done.missed:
        raise typer.Exit(THRESHOLD)
