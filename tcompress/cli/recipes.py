"""`tcompress recipes`: list, show, copy, validate, reference."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from tcompress import options
from tcompress.cli.flags import command, examples
from tcompress.cli.terminal import print_json, results, table, tell, typed
from tcompress.errors import RecipeError
from tcompress.options.commands import Checked, Copied, Json, RecipeName
from tcompress.options.document import read_document

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples(
        "tcompress recipes list",
        "tcompress recipes copy encoder/minilm-lprod recipe.yaml",
        "tcompress recipes validate recipe.yaml",
        "tcompress run recipe.yaml",
    ),
)


@command(app, "list", "tcompress recipes list", "tcompress recipes list --json")
def list_recipes(manner: Json) -> None:
    """List the recipes that ship."""
    rows = [
        (name, read_document(options.recipe_text(name)).data) for name in options.recipe_names()
    ]
    fields = ("description", "model")
    if manner.as_json:
        facts = [{"name": name, **{key: data.get(key) for key in fields}} for name, data in rows]
        print_json({"recipes": facts})
        return
    texts = [(name, *(str(data.get(key) or "") for key in fields)) for name, data in rows]
    listed = table("recipe", "what it makes", "model", rows=texts)
    listed.columns[0].no_wrap = True  # names are to be copied
    results().print(listed)


@command(app, "show", "tcompress recipes show encoder/minilm-lprod")
def show(call: RecipeName) -> None:
    """Print a recipe, with its comments."""
    sys.stdout.write(options.recipe_text(call.name))


@command(app, "copy", "tcompress recipes copy encoder/minilm-lprod my.yaml")
def copy(call: Copied, manner: Json) -> None:
    """Copy a recipe to a file, to change it."""
    file = options.copy_recipe(call.name, Path(call.target), force=call.force)
    if manner.as_json:
        print_json({"file": str(file)})
    else:
        tell(f"Wrote `{file}`. Next: `tcompress run {typed(file)}`")


@command(app, "reference", "tcompress recipes reference > recipes.md")
def reference(manner: Json) -> None:
    """Print all keys of a recipe with types, defaults and meanings; as JSON, their schema."""
    from tcompress.reporting.reference import reference_markdown

    if manner.as_json:
        print_json({"recipe": options.json_schema()})
    else:
        sys.stdout.write(reference_markdown())


@command(
    app,
    "validate",
    "tcompress recipes validate recipe.yaml",
    "tcompress recipes validate *.yaml --json",
)
def validate(call: Checked, manner: Json) -> None:
    """Check recipes; all problems of a recipe and its variants are shown, with their lines."""
    names: dict[str, str | None] = {}
    wrong: list[RecipeError] = []
    for file in call.files:
        try:
            names[file] = options.check_recipe(*options.find_recipe(file))
        except RecipeError as error:
            wrong.append(error)
    if wrong:
        raise RecipeError("\n\n".join(error.message for error in wrong), wrong[0].hint)
    if manner.as_json:
        print_json({"recipes": [{"file": file, "name": name} for file, name in names.items()]})
        return
    for file in call.files:
        tell(f"`{file}` is valid")
