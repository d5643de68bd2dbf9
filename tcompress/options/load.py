"""Recipes from YAML or JSON and back, with values changed, and their reference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tcompress.errors import RecipeError
from tcompress.options.document import (
    Document,
    Key,
    Problem,
    RecipeDumper,
    Unreadable,
    read_document,
)
from tcompress.options.explain import explain
from tcompress.options.fields import Options
from tcompress.options.library import read_text
from tcompress.options.read import dotted, schema_of
from tcompress.options.schema import RECIPE_VERSION, Recipe
from tcompress.options.words import did_you_mean, found, quoted

# Recipes from YAML or JSON and back; all problems of a recipe are reported at once.


COMPARE = "compare with a recipe that works: `tcompress recipes show encoder/minilm-lprod`"
_NAMED = ("method", "attention")
_START = "start from a recipe that works: `tcompress recipes copy encoder/minilm-lprod recipe.yaml`"
_UPDATE = "update tcompress: `pip install --upgrade tcompress`"


def load_recipe(path: str | Path) -> Recipe:
    """Reads a recipe file.

    Args:
        path: YAML or JSON file.

    Raises:
        RecipeError: The file cannot be read, or the recipe is wrong; lists all problems.
    """
    return parse_recipe(read_text(path), str(path))


def parse_recipe(text: str, origin: str, changes: Sequence[str] = ()) -> Recipe:
    """Reads a recipe from text.

    Args:
        text: YAML or JSON.
        origin: Name of the file, for messages.
        changes: Options that the file was changed by; messages name them, and no lines of the file.

    Raises:
        RecipeError: The recipe is wrong; lists all problems with their lines.
    """
    recipe, _, problems = judged(text, origin)
    if recipe is None or problems:
        raise failure(origin, problems, COMPARE, changes)
    return recipe


def judged(text: str, origin: str) -> tuple[Recipe | None, dict[str, Any], list[Problem]]:
    """Reads a recipe from text, and says all that is wrong with it.

    Args:
        text: YAML or JSON.
        origin: Name of the file, for messages.

    Returns:
        The recipe, None where it cannot be built; it as plain data; and all problems.

    Raises:
        RecipeError: The text is no mapping, or one of a newer version.
    """
    try:
        document = read_document(text)
    except Unreadable as error:
        raise failure(origin, [error.problem], error.hint or _START) from error
    if not isinstance(document.data, dict):
        what = found(document.nodes[()])
        text = f"found {what}; a recipe is a mapping that starts with `recipe_version: 1`"
        raise failure(origin, [Problem(document.line(()), text)], _START)
    version = _version_problem(document, origin)
    problems = document.problems + ([version] if version else [])
    # The version has had its say; the rest is checked as if it were right.
    data = {**_named(document.data), "recipe_version": RECIPE_VERSION}
    try:
        return Recipe.model_validate_json(json.dumps(data), strict=True), data, problems
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        return None, data, problems + explain(errors, document, schema_of(Recipe))


def _named(data: Any) -> Any:
    """Writes bare names, as in `method: svd`, as methods and mechanisms without options."""
    if isinstance(data, list):
        return [_named(item) for item in data]
    if not isinstance(data, dict):
        return data
    return {
        key: {"name": value}
        if key in _NAMED and isinstance(value, str)
        else value
        if key == "architecture"  # its keys are those of a model's configuration
        else _named(value)
        for key, value in data.items()
    }


def dump_recipe(recipe: Recipe) -> str:
    """Writes a recipe as YAML, without values that are defaults.

    Returns:
        Text that `parse_recipe` reads back to an equal recipe.
    """
    text: str = yaml.dump(
        _sparse(recipe), Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=100
    )
    return text


def _sparse(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_sparse(item) for item in value]
    if not isinstance(value, BaseModel):
        return value
    result = {}
    for field, info in type(value).model_fields.items():
        item, name = getattr(value, field), info.alias or field
        # A method is told by its name, so that is written even where it is the default.
        tag = isinstance(value, Options) and name == "name"
        said = {"init": getattr(value, "init", None)}  # which decides on some defaults
        usual = info.get_default(call_default_factory=True, validated_data=said)
        if tag or info.is_required() or item != usual:
            result[name] = _sparse(item)
    return {**result, **(value.model_extra or {})}


def _version_problem(document: Document, origin: str) -> Problem | None:
    """Checks the version by hand: of a newer recipe nothing else can be judged."""
    key: Key = ("recipe_version",)
    understood = quoted(range(1, RECIPE_VERSION + 1))
    version = document.data.get("recipe_version")
    if key not in document.nodes:
        return Problem(document.line(()), f"missing; versions understood are {understood}", key)
    what = found(document.nodes[key])
    if type(version) is not int or version < 1:
        text = f"found {what}; versions understood are {understood}"
        return Problem(document.line(key), text, key)
    if version > RECIPE_VERSION:
        text = f"{what} is newer than this tcompress; versions understood are {understood}"
        raise failure(origin, [Problem(document.line(key), text, key)], _UPDATE)
    return None


def failure(
    origin: str, problems: Sequence[Problem], hint: str, changes: Sequence[str] = ()
) -> RecipeError:
    """Lists problems in one error.

    Args:
        origin: Name of the file.
        problems: What is wrong with it.
        hint: What to do.
        changes: Options that the file was changed by.
    """
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    ordered = sorted(problems, key=lambda problem: problem.line)
    lines = "".join(f"\n  {_line(None if changes else origin, problem)}" for problem in ordered)
    changed = f" with {quoted(changes)}" if changes else ""
    return RecipeError(f"{count} in `{origin}`{changed}:{lines}", hint)


def _line(origin: str | None, problem: Problem) -> str:
    column = "" if problem.column is None else f":{problem.column}"
    place = "" if origin is None else f"{origin}:{problem.line}{column}: "
    name = f"`{dotted(problem.key)}`: " if problem.key else ""
    return f"{place}{name}{problem.text}"


# Recipes with some of their values changed, by hand or by one of their variants.


def change_recipe(recipe: Recipe, changes: Sequence[str], origin: str = "recipe") -> Recipe:
    """Changes values of a recipe.

    Args:
        recipe: The recipe.
        changes: Pairs such as `finetune.steps=200`; values are YAML.
        origin: Name of its file, for messages.

    Raises:
        RecipeError: There is no such key, or the value is not allowed.
    """
    pairs = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not (key.strip() and equals):
            raise RecipeError(
                f"`--set {change}` is no pair", "write, for example, `--set finetune.steps=200`"
            )
        pairs[key.strip()] = _read(value, change)
    given = [f"--set {change}" for change in changes]
    return _changed(recipe, pairs, "--set", origin, given) if pairs else recipe


def _read(value: str, change: str) -> Any:
    """A value as recipes write it."""
    if not value.strip():
        return None
    try:
        return read_document(value).data
    except Unreadable as error:
        raise RecipeError(
            f"`--set {change}`: {error.problem.text}",
            "write the value as in a recipe, with quotes around it where the shell needs them",
        ) from error


def choose_variants(recipe: Recipe, names: Sequence[str], origin: str = "recipe") -> Recipe:
    """Makes the changes of variants, in the order given; what is written is named after them.

    Args:
        recipe: The recipe.
        names: Names under its key `variants`.
        origin: Name of its file, for messages.

    Raises:
        RecipeError: There is no such variant, or what it changes is not there or not allowed.
    """
    for name in names:
        if name not in recipe.variants:
            has = f"it has {quoted(recipe.variants)}" if recipe.variants else "it has none"
            raise RecipeError(
                f"the recipe has no variant `{name}`; {has}{did_you_mean(name, recipe.variants)}",
                "see what there is: `tcompress recipes show RECIPE`",
            )
    for name in names:
        changes = {**_places(recipe, name), **recipe.variants[name]}
        by = f"--variant {name}"
        recipe = _changed(recipe, changes, by, origin, [by])
    return recipe


def check_recipe(text: str, origin: str) -> str | None:
    """Reads a recipe and makes the changes of every variant, also of one that is wrong itself.

    Args:
        text: YAML or JSON.
        origin: Name of its file, for messages.

    Returns:
        Its name.

    Raises:
        RecipeError: It is wrong, or what a variant changes is; lists all problems, those of the
            recipe itself once.
    """
    _, data, problems = judged(text, origin)
    wrong = [failure(origin, problems, COMPARE).message] if problems else []
    known = {(problem.key, problem.text) for problem in problems}
    variants = data.get("variants")
    lost = []
    for name, changes in (variants if isinstance(variants, dict) else {}).items():
        by = f"--variant {name}"
        try:
            made = _with(data, changes if isinstance(changes, dict) else {}, by)
        except RecipeError as error:
            lost.append(error.message)
            continue
        found = [item for item in judged(made, origin)[2] if (item.key, item.text) not in known]
        lost += [failure(origin, found, COMPARE, [by]).message] if found else []
    if lost:
        wrong.append("\n\n".join([f"`{origin}` has variants that do not fit it", *lost]))
    if wrong:
        raise RecipeError("\n\n".join(wrong), COMPARE)
    return data.get("name")


def _places(recipe: Recipe, name: str) -> dict[str, Any]:
    """Names and files that another variant would overwrite."""
    found = {}
    for key in ("name", "output"):
        if value := getattr(recipe, key):
            found[key] = f"{value}-{name}"
    if recipe.report is not None:
        page = Path(recipe.report)
        found["report"] = str(page.with_stem(f"{page.stem}-{name}"))
    return found


def _changed(
    recipe: Recipe, changes: Mapping[str, Any], by: str, origin: str, given: Sequence[str]
) -> Recipe:
    data = yaml.safe_load(dump_recipe(recipe))
    return parse_recipe(_with(data, changes, by), origin, given)


def _with(data: Mapping[str, Any], changes: Mapping[str, Any], by: str) -> str:
    """A recipe with some of its values changed, as text."""
    made = deepcopy(dict(data))
    for key, value in changes.items():
        place: Any = made
        *parents, last = key.split(".")
        for name in parents:
            place = _inside(place, name, key, by)
        if isinstance(place, list):
            place[_index(place, last, key, by)] = value
        elif isinstance(place, dict):
            place[last] = value
        else:
            raise _missing(last, key, by)
    return json.dumps(made)


def _inside(place: Any, name: str, key: str, by: str) -> Any:
    if isinstance(place, list):
        return place[_index(place, name, key, by)]
    if isinstance(place, dict):
        return place.setdefault(name, {})
    raise _missing(name, key, by)


def _index(place: Sequence[Any], name: str, key: str, by: str) -> int:
    if not (name.isdecimal() and int(name) < len(place)):
        raise _missing(name, key, by)
    return int(name)


def _missing(name: str, key: str, by: str) -> RecipeError:
    return RecipeError(f"`{by}`, `{key}`: there is no `{name}` in the recipe", COMPARE)
