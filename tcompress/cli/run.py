"""`tcompress run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tcompress.cli import complete
from tcompress.cli import options as opt
from tcompress.cli.job import Access, Job, Manner, perform, show_plan
from tcompress.errors import RecipeError

EPILOG = opt.examples(
    "tcompress run encoder/minilm-lprod",
    "tcompress run recipe.yaml --model ./my-model -o small --dry-run",
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


def run(
    recipe: RecipeName,
    model: ModelOption = None,
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
    """Do what a recipe says."""
    from tcompress.cli.settings import default_output
    from tcompress.recipe import find_recipe, parse_recipe

    text, origin = find_recipe(recipe)
    said = parse_recipe(text, origin)
    name = model or said.model
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
    )
    show_plan(job) if dry_run else perform(job)
