"""Recipes with some of their values changed, by hand or by one of their variants."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from tcompress.errors import RecipeError
from tcompress.options.document import Unreadable, read_document
from tcompress.options.load import COMPARE, dump_recipe, failure, judged, parse_recipe
from tcompress.options.recipe import Recipe
from tcompress.options.words import did_you_mean, quoted


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
