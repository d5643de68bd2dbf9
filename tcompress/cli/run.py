"""`tcompress run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tcompress.artifact.workplace import check_place
from tcompress.cli import terminal
from tcompress.cli.convert import default_output, perform, show_plan
from tcompress.cli.first_look import Job, first_look
from tcompress.cli.sweep import perform_sweep
from tcompress.errors import RecipeError, listed
from tcompress.options.commands import Access, Manner, Planned, Run, Written
from tcompress.options.load import SEED_SUFFIX, repetitions

if TYPE_CHECKING:
    from tcompress.models import SourceModel
    from tcompress.options import Recipe

EXAMPLES = (
    "tcompress run encoder/minilm-lprod",
    "tcompress run recipe.yaml --model ./my-model -o small --dry-run",
    "tcompress run encoder/minilm-healed --set finetune.steps=200",
    "tcompress run scratch/ag-news-lprod --variant smoke",
    "tcompress run scratch/imdb-lprod --seeds 3",
)


def run(call: Run, written: Written, access: Access, planned: Planned, manner: Manner) -> None:
    """Does what `tcompress run` says."""
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
    output = Path(written.output or said.output or default_output(name, said.convert)).expanduser()
    job = Job(name, said.convert, output, written.force, access, manner, architecture)
    if not planned.dry_run:
        check_place(output)
    if call.seeds is not None:
        repetitions(said, call.seeds)  # refuses what no seed changes
    if said.sweep is not None and said.sweep.variants:
        if call.seeds is not None:
            raise RecipeError(
                f"`{name}` compares variants, each with its own seed, and `--seeds` was given",
                "repeat one of them: `tcompress run NAME --set sweep=null --variant VARIANT "
                "--seeds 3`",
            )
        _compare_variants(said, job, origin, planned)
        return
    if said.sweep is not None:
        perform_sweep(said, job, dry_run=planned.dry_run, seeds=call.seeds)
    elif planned.dry_run:
        show_plan(job)
    elif call.seeds or said.finetune or said.evaluate or said.bench or said.report or said.paper:
        _run_all(said, job, call.seeds)
    else:
        perform(job, again=False)


def _compare_variants(said: Recipe, job: Job, origin: str, planned: Planned) -> None:
    """Train the variants that a recipe compares, and print their table."""
    from tcompress import variant_sweep

    chosen = variant_sweep.variants_of(said, origin)
    named = job.architecture is None  # the model: by `--model`, or by the recipe
    changing = [name for name, item in chosen.items() if item.architecture != said.architecture]
    if named and changing:
        raise RecipeError(
            f"`--model {job.model}` takes the place of the architecture in `{origin}`, and "
            f"variants change it: {listed(changing)}",
            "leave `--model` out, or train one variant: `--set sweep=null --variant VARIANT`",
        )

    def opened(variant: Recipe) -> SourceModel:
        architecture = None if named else variant.architecture
        return replace(job, convert=variant.convert, architecture=architecture).open()

    with first_look() as look:
        for name, variant in {} if planned.dry_run else chosen.items():
            look.recipe(variant, job.output.absolute() / name, force=job.force)
        job.look_at_model(look)
    if planned.dry_run:
        sizes = variant_sweep.sizes_of(chosen, opened)
        if job.manner.as_json:
            cells = [{"name": name, "parameters": size} for name, size in sizes.items()]
            output = str(job.output.absolute())
            terminal.print_json({"dry_run": True, "output": output, "cells": cells})
            return
        terminal.results().print(variant_sweep.sizes_table(sizes))
        terminal.tell(f"Nothing was written. Without `--dry-run`, this writes `{job.output}`.")
        return
    what = f"what was finished is kept in `{job.output}`"
    with terminal.resumable(lambda: what, quiet=job.manner.quiet) as heard:
        heard |= {"origin": origin, "force": job.force, "token": job.access.token}
        done = variant_sweep.sweep_variants(said, opened, job.output, **heard)
    if job.manner.as_json:
        terminal.print_json(done.to_json())
    else:
        terminal.results().print(variant_sweep.variants_table(done))
        terminal.tell(f"Wrote `{terminal.relative(done.folder)}`.")
    missed = [f"{name}: {text}" for name, texts in done.missed.items() for text in texts]
    _end(done.page, missed, job, fails=all(done.missed.values()))


def _run_all(said: Recipe, job: Job, seeds: int | None = None) -> None:
    """Do all that a recipe says, and print it; with so many seeds, as often."""
    output = job.output.absolute()
    runs = {output: said}
    if seeds is not None:
        repeated = repetitions(said, seeds)
        runs = {
            output.with_name(f"{output.name}{SEED_SUFFIX}{seed}"): recipe
            for seed, recipe in repeated
        }
    with first_look() as look:
        for folder, recipe in runs.items():
            look.recipe(recipe, folder, force=job.force)
        job.look_at_model(look)
    source = job.open()
    from tcompress.pipeline import Outcome, Repeated, run_recipe, run_seeds

    done: Outcome | Repeated
    what, quiet = partial(terminal.unwritten, job.output), job.manner.quiet
    with terminal.resumable(what, quiet=quiet, output=job.output) as options:
        options |= {"force": job.force, "again": job.force, "token": job.access.token}
        if seeds is None:
            done = run_recipe(said, source, job.output, **options)
        else:
            done = run_seeds(said, source, job.output, seeds, **options)
    if job.manner.as_json:
        terminal.print_json(done.to_json())
    else:
        from tcompress.reporting.console import render

        bare = {"layers": (), "left": ()}
        terminal.results().print(render([item.model_copy(update=bare) for item in done.reports]))
        for item in done.outcomes if isinstance(done, Repeated) else (done,):
            kept = "Kept" if item.kept else "Wrote"
            terminal.tell(f"{kept} `{terminal.relative(item.folder)}`.")
    _end(done.page, done.missed, job)


def _end(page: Path | None, missed: Sequence[str], job: Job, *, fails: bool = True) -> None:
    """Say what else was written, and end with the exit code."""
    if not job.manner.as_json:
        if page is not None:
            terminal.tell(f"Report: `{terminal.relative(page.absolute())}`.")
        for text in missed:
            terminal.tell(f"Missed: {text}.")
    if missed and fails:
        raise typer.Exit(terminal.THRESHOLD)
