"""`tcompress recipes`: list, show, copy, validate, reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tcompress.cli import complete
from tcompress.cli import options as opt
from tcompress.cli.output import print_json, results, table, typed

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=opt.examples(
        "tcompress recipes list",
        "tcompress recipes copy encoder/minilm-lprod recipe.yaml",
        "tcompress recipes validate recipe.yaml",
        "tcompress run recipe.yaml",
    ),
)

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        show_default=False,
        help="A name out of `tcompress recipes list`.",
        autocompletion=complete.shipped_recipes,
    ),
]


@app.command("list", epilog=opt.examples("tcompress recipes list", "tcompress recipes list --json"))
def list_recipes(json: opt.Json = False) -> None:
    """List the recipes that ship."""
    from tcompress.recipe import recipe_names, recipe_text
    from tcompress.recipe.document import read_document

    # Their descriptions without their validation, which would import torch.
    rows = [(name, read_document(recipe_text(name)).data) for name in recipe_names()]
    fields = ("description", "model")
    if json:
        facts = [{"name": name, **{key: data.get(key) for key in fields}} for name, data in rows]
        print_json({"recipes": facts})
        return
    listed = table("recipe", "what it makes", "model")
    listed.columns[0].no_wrap = True  # names are to be copied
    for name, data in rows:
        listed.add_row(name, *(str(data.get(key) or "") for key in fields))
    results().print(listed)


@app.command("show", epilog=opt.examples("tcompress recipes show encoder/minilm-lprod"))
def show(name: Name) -> None:
    """Print a recipe, with its comments."""
    from tcompress.recipe import recipe_text

    sys.stdout.write(recipe_text(name))


@app.command("copy", epilog=opt.examples("tcompress recipes copy encoder/minilm-lprod my.yaml"))
def copy(
    name: Name,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="File or folder to write.")] = (
        Path()
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file.")] = False,
    json: opt.Json = False,
) -> None:
    """Copy a recipe to a file, to change it."""
    from tcompress.recipe import copy_recipe

    file = copy_recipe(name, target, force=force)
    if json:
        print_json({"file": str(file)})
    else:
        results().print(f"Wrote `{file}`. Next: `tcompress run {typed(file)}`", soft_wrap=True)


@app.command("reference", epilog=opt.examples("tcompress recipes reference > recipes.md"))
def reference(json: opt.Json = False) -> None:
    """Print all keys of a recipe with types, defaults and meanings; as JSON, their schema."""
    from tcompress.recipe.docs import json_schema, reference_markdown

    if json:
        print_json({"recipe": json_schema()})
    else:
        sys.stdout.write(reference_markdown())


@app.command(
    "validate",
    epilog=opt.examples(
        "tcompress recipes validate recipe.yaml", "tcompress recipes validate *.yaml --json"
    ),
)
def validate(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            show_default=False,
            help="Recipes.",
            autocompletion=complete.recipes,
        ),
    ],
    json: opt.Json = False,
) -> None:
    """Check recipes; all problems of a recipe and its variants are shown, with their lines."""
    from tcompress.errors import RecipeError
    from tcompress.recipe import check_recipe, find_recipe

    names: dict[str, str | None] = {}
    wrong: list[RecipeError] = []
    for file in files:
        try:
            names[file] = check_recipe(*find_recipe(file))
        except RecipeError as error:
            wrong.append(error)
    if wrong:
        raise RecipeError("\n\n".join(error.message for error in wrong), wrong[0].hint)
    if json:
        print_json({"recipes": [{"file": file, "name": name} for file, name in names.items()]})
        return
    for file in files:
        results().print(f"`{file}` is valid", soft_wrap=True)
