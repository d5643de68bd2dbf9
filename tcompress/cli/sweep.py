"""`tcompress sweep`, and what its options say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcompress.cli import terminal
from tcompress.cli.first_look import Job, first_look
from tcompress.cli.flags import only
from tcompress.errors import RecipeError
from tcompress.models.names import default_output_name
from tcompress.options.commands import Access, Manner, OneModel, Planned, Swept, Tables, Written
from tcompress.options.convert_options import Convert
from tcompress.options.read import Given
from tcompress.options.schema import Recipe, Sweep, default_methods
from tcompress.options.steps import MEASURED, Bench, Evaluate, Finetune

if TYPE_CHECKING:
    from tcompress.models import SourceModel

EXAMPLES = (
    "tcompress sweep minilm --dry-run",
    "tcompress sweep minilm --task sts --data pairs.csv --bench -o sweep",
    "tcompress sweep gpt2 --methods svd,lprod:p=8 --targets 0.5,0.25,0.1",
    "tcompress sweep minilm --task sts --data a.csv --finetune-steps 200",
    "tcompress sweep minilm --recipe encoder/minilm-sweep -o sweep",
)
DETAIL = (
    "Started again with the same output, only what depends on changed settings is done again. A "
    "cell that a model refuses is named with the reason and changes nothing else, the exit code "
    "neither; it is 2 if no cell can be done or one fails, 3 if none reaches a threshold that a "
    "recipe sets.",
)

Measured = Annotated[
    Given[Evaluate], only("--task", "--data", "--split", "--columns", "--limit", panel=MEASURED)
]
_DATA = ("--calib", "--calib-samples", "--calib-columns")
OfAll = Annotated[Given[Convert], only("--allocation", "--keep", *_DATA, "--dtype", "--device")]


def sweep(
    one: OneModel,
    cells: Given[Sweep],
    call: Swept,
    measured: Measured,
    said: OfAll,
    written: Written,
    tables: Tables,
    planned: Planned,
    access: Access,
    manner: Manner,
) -> None:
    """Does what `tcompress sweep` says."""
    recipe = recipe_of(call, cells, measured, said)
    folder = written.output or recipe.output or default_output_name(one.model, "sweep")
    job = Job(one.model, recipe.convert, Path(folder).expanduser(), written.force, access, manner)
    perform_sweep(recipe, job, dry_run=planned.dry_run, seeds=call.seeds, tables=tables)


def recipe_of(
    call: Swept, cells: Given[Sweep], measured: Given[Evaluate], said: Given[Convert]
) -> Recipe:
    """Makes a recipe of the options: that which is named, if any, with changes."""
    from tcompress.options import change_recipe, dump_recipe, find_recipe, parse_recipe
    from tcompress.options.choose import conversion

    text, origin = find_recipe(call.recipe) if call.recipe is not None else (None, "sweep")
    base = None if text is None else parse_recipe(text, origin)
    settings = conversion(said.values(), base, typed=said)
    made = base or Recipe(recipe_version=1, convert=settings)
    if settings.init == "random":
        text = f"`{origin}` begins with weights at random, and `sweep` cuts trained ones"
        raise RecipeError(text, "compare its variants: `tcompress run RECIPE`")
    swept = cells.over(made.sweep or Sweep(methods=() if base else default_methods()))
    if ("targets",) in cells.texts:
        if ("speedups",) in cells.texts:
            text = "`--targets` and `--speedups` are given together; allowed is one of them"
            raise RecipeError(text, cells.hint)
        swept = swept.model_copy(update={"speedups": ()})  # a recipe's
    changed: dict[str, Any] = {
        "convert": settings,
        "sweep": swept,
        "finetune": _finetune(call, made),
        "evaluate": _evaluate(measured, made),
        "bench": made.bench or (Bench() if call.bench else None),
    }
    if ("device",) in said.texts:  # all that the recipe does
        device = {"device": settings.device}
        for name in ("finetune", "bench"):
            changed[name] = changed[name] and changed[name].model_copy(update=device)
        changed["evaluate"] = tuple(item.model_copy(update=device) for item in changed["evaluate"])
    made = made.model_copy(update=changed)
    if base is not None:  # what options say has to go with what it says
        made = parse_recipe(dump_recipe(made), origin, ["tcompress sweep"])
    return change_recipe(made, call.changes, origin)


def _finetune(call: Swept, base: Recipe) -> Finetune | None:
    steps, data = call.finetune_steps, call.train_data
    if steps is None and data and base.finetune is None:
        text = "`--train-data` is what models are healed on, and nothing says for how long"
        raise RecipeError(text, "add `--finetune-steps 200`")
    if steps is None and not data:
        return base.finetune
    said = base.finetune or Finetune()
    source = said.data.model_copy(update={"source": data}) if data else said.data
    return said.model_copy(update={"steps": steps or said.steps, "data": source})


def _evaluate(measured: Given[Evaluate], base: Recipe) -> tuple[Evaluate, ...]:
    given = {place[-1] for place in measured.texts}
    if not given:
        return base.evaluate
    if not given & {"task", "data"}:
        name = measured.fields[next(iter(measured.texts))].name
        text = f"`{name}` belongs to a measurement, and none is asked for"
        raise RecipeError(text, "add `--task` and `--data`")
    if not {"task", "data"} <= given:
        there, lacking = ("--data", "--task") if "data" in given else ("--task", "--data")
        raise RecipeError(f"`{there}` needs `{lacking}` too", "see `tcompress evaluate --help`")
    return (measured.read(),)


def _show_cells(recipe: Recipe, source: SourceModel, job: Job, seeds: int | None) -> None:
    """Prints what a sweep would do, and what it would cost."""
    from tcompress.reporting.pareto import plan_table
    from tcompress.sweeps import cells_of, check_recipe

    check_recipe(recipe)
    cells = cells_of(recipe, source, seeds)
    if job.manner.as_json:
        facts = {"output": str(job.output.absolute()), "cells": [cell.to_json() for cell in cells]}
        terminal.print_json({"dry_run": True, **facts})
        return
    planned = [(cell.name, cell.plan, cell.costs) for cell in cells if cell.plan and cell.costs]
    refused = [(cell.name, cell.refusal) for cell in cells if cell.refusal is not None]
    terminal.results().print(plan_table(planned, refused))
    terminal.tell(f"Nothing was written. Without `--dry-run`, this writes `{job.output}`.")


def perform_sweep(
    recipe: Recipe,
    job: Job,
    *,
    dry_run: bool,
    seeds: int | None = None,
    tables: Tables | None = None,
    timed: bool = False,
) -> None:
    """Runs a sweep, or shows what it would do: prints its table, and ends with its exit code.

    With `timed`, passes of all models are timed as those that its speeds are about.
    """
    tables = tables or Tables()
    with first_look() as look:
        if not dry_run:
            look.sweep(recipe, job.output, force=job.force)
            look.tables(tables)
        job.look_at_model(look)
    source = job.open()
    if dry_run:
        _show_cells(recipe, source, job, seeds)
        return
    from tcompress.reporting.pareto import front_printed, front_table
    from tcompress.reporting.table_files import front_sheet, write_tables
    from tcompress.sweeps import bench_of
    from tcompress.sweeps import sweep as run

    if timed:
        recipe = recipe.model_copy(update={"bench": bench_of(recipe.convert)})
    what = f"what was finished is kept in `{job.output}`"
    with terminal.resumable(lambda: what, quiet=job.manner.quiet) as heard:
        options: Any = {"force": job.force, "token": job.access.token, "seeds": seeds}
        done = run(recipe, source, job.output, **options, **heard)
    files = write_tables(tables, front_sheet(done.front), front_printed(done.front))
    if job.manner.as_json:
        terminal.print_json({**done.to_json(), **files})
    else:
        stopped = [(item.name, item.reason) for item in done.stopped]
        terminal.results().print(front_table(done.front, stopped))
        for cell in done.cells:
            for text in cell.missed:
                terminal.tell(f"Missed by `{cell.cell.name}`: {text}.")
        terminal.tell(f"Wrote `{terminal.relative(done.folder)}`.")
        terminal.tell(f"Report: `{terminal.relative(done.page.absolute())}`.")
        terminal.tell_written(files.values())
    if done.failed or done.missed:
        raise typer.Exit(terminal.USAGE if done.failed else terminal.THRESHOLD)
