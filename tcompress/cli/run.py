"""`tcompress run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tcompress.cli.convert import Job, default_output, open_job, perform, relative, show_plan
from tcompress.cli.finetune import resumable
from tcompress.cli.terminal import THRESHOLD
from tcompress.errors import RecipeError
from tcompress.options.commands import Access, Manner, Planned, Run, Written

if TYPE_CHECKING:
    from tcompress.options import Recipe

EXAMPLES = (
    "tcompress run encoder/minilm-lprod",
    "tcompress run recipe.yaml --model ./my-model -o small --dry-run",
    "tcompress run encoder/minilm-healed --set finetune.steps=200",
    "tcompress run scratch/ag-news-lprod --variant smoke",
)


def run(call: Run, written: Written, access: Access, planned: Planned, manner: Manner) -> None:
    """Does what `tcompress run` says."""
    from tcompress.artifact.workplace import check_place
    from tcompress.options import change_recipe, choose_variants, find_recipe, parse_recipe

    text, origin = find_recipe(call.recipe)
    said = choose_variants(parse_recipe(text, origin), call.variants, origin)
    said = change_recipe(said, call.changes, origin)
    name = call.model or said.model
    architecture = None if call.model else said.architecture
    if architecture is not None:
        name = said.name or architecture.model_type
    if name is None:
        raise RecipeError(f"recipe `{origin}` names no model", "add `--model MODEL`")
    if access.revision is None and call.model is None:  # it belongs to the model it is written for
        access = access.model_copy(update={"revision": said.revision})
    job = Job(
        model=name,
        convert=said.convert,
        output=Path(written.output or said.output or default_output(name, said.convert)),
        force=written.force,
        access=access,
        manner=manner,
        architecture=architecture,
    )
    if not planned.dry_run:
        check_place(job.output)  # before a long download
    if said.sweep is not None:
        _sweep(said, job, dry_run=planned.dry_run)
    elif planned.dry_run:
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
    from tcompress.cli.terminal import print_json, results, say, shown_progress

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
