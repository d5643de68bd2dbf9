"""Options as they are typed, without running a command."""

from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import typer

from tcompress.cli.convert import convert
from tcompress.cli.finetune import finetune
from tcompress.cli.finetune import settings_of as finetune_settings
from tcompress.cli.flags import flagged
from tcompress.cli.sweep import recipe_of as sweep_recipe
from tcompress.cli.sweep import sweep
from tcompress.options import Convert, Finetune, Recipe, choose, parse_recipe

_ON = ("trials", "keep_models")  # by default
_FLAGS = {"changes": "--set", "learning_rate": "--lr"}


def arguments_of(given: Mapping[str, Any]) -> list[str]:
    """Writes options as flags."""
    found = []
    for name, value in given.items():
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        if isinstance(value, bool):
            off = [f"--no-{flag[2:]}"] if name in _ON else []
            found += [flag] if value else off
        elif value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            found += [word for item in values for word in (flag, str(item))]
    return found


def bound(function: Callable[..., None], *arguments: str) -> dict[str, Any]:
    """The models that a command makes of what is typed."""
    found: dict[str, Any] = {}

    def keep(**given: Any) -> None:
        found.update(given)

    keep.__annotations__ = get_type_hints(function, include_extras=True)
    app = typer.Typer()
    app.command()(flagged(keep, function.__name__))
    typer.main.get_command(app).main(args=list(arguments), standalone_mode=False)
    return found


def conversion(options: Mapping[str, Any], recipe: Recipe | None = None) -> Convert:
    """What `convert` makes of options."""
    made = bound(convert, "m", *arguments_of(options))
    said, structure = made["said"], made["call"].structure
    return choose.conversion(said.values(), recipe, structure=structure, typed=said)


def conversion_changes(text: str | None = None, **options: Any) -> dict[str, Any]:
    """What options of `convert` make of the text of a recipe, less what are defaults."""
    recipe = None if text is None else parse_recipe(text, "test.yaml")
    found = conversion(options, recipe).model_dump(exclude_defaults=True)
    return {name: value for name, value in found.items() if (name, value) != ("calibration", {})}


def settings_of(options: Mapping[str, Any]) -> Finetune:
    """What `finetune` makes of options."""
    made = bound(finetune, "m", *arguments_of(options))
    return finetune_settings(made["said"], made["call"].recipe)


def recipe_of(options: Mapping[str, Any]) -> Recipe:
    """What `sweep` makes of options."""
    made = bound(sweep, "m", *arguments_of(options))
    return sweep_recipe(made["call"], made["cells"], made["measured"], made["said"])
