"""Recipes from YAML or JSON and back, with values or seeds changed; all problems told at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tcompress.errors import RecipeError
from tcompress.fields import Options
from tcompress.options.document import Document, Problem, RecipeDumper, Unreadable, read_document
from tcompress.options.read import M, as_plain, dotted, schema_of
from tcompress.options.schema import RECIPE_VERSION, Recipe
from tcompress.options.words import did_you_mean, explain, found, quoted
from tcompress.project import UPDATE

COMPARE = "compare with a recipe that works: `tcompress recipes show encoder/minilm-lprod`"
_START = "start from a recipe that works: `tcompress recipes copy encoder/minilm-lprod recipe.yaml`"
_UPDATE = f"update tcompress: `{UPDATE}`"
_SEEDS = 2**32
SEED_SUFFIX = "-seed-"
"""What stands between the name of a model and the seed that it was made with."""


def parse_recipe(text: str, origin: str, changes: Sequence[str] = ()) -> Recipe:
    """Reads a recipe from YAML or JSON; `RecipeError` lists all problems, with their lines.

    `origin` names the file in messages, `changes` options that changed it.
    """
    recipe, _, problems = _judged(text, origin)
    if recipe is None or problems:
        raise _failure(origin, problems, COMPARE, changes)
    return recipe


def _judged(text: str, origin: str) -> tuple[Recipe | None, dict[str, Any], list[Problem]]:
    """Reads a recipe from text: None where it cannot be built; as plain data; and all problems."""
    try:
        document = read_document(text)
    except Unreadable as error:
        raise _failure(origin, [error.problem], error.hint or _START) from error
    if not isinstance(document.data, dict):
        what = found(document.nodes[()])
        text = f"found {what}; a recipe is a mapping that starts with `recipe_version: 1`"
        raise _failure(origin, [Problem(document.line(()), text)], _START)
    problems = [*document.problems, *_version_problems(document, origin)]
    # The version has had its say; the rest is checked as if it were right.
    data = {**as_plain(document.data), "recipe_version": RECIPE_VERSION}
    try:
        return Recipe.model_validate_json(json.dumps(data), strict=True), data, problems
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        return None, data, problems + explain(errors, document, schema_of(Recipe))


def _version_problems(document: Document, origin: str) -> list[Problem]:
    """Checks the version by hand: of a newer recipe nothing else can be judged."""
    key = ("recipe_version",)
    line, understood = document.line(key), f"versions understood are `{RECIPE_VERSION}`"
    if key not in document.nodes:
        return [Problem(line, f"missing; {understood}", key)]
    version, what = document.data["recipe_version"], found(document.nodes[key])
    if type(version) is not int or version < 1:
        return [Problem(line, f"found {what}; {understood}", key)]
    if version > RECIPE_VERSION:
        text = f"{what} is newer than this tcompress; {understood}"
        raise _failure(origin, [Problem(line, text, key)], _UPDATE)
    return []


def dump_recipe(recipe: Recipe) -> str:
    """Writes a recipe as YAML, without values that are defaults, for `parse_recipe` to read."""
    data = sparse(recipe)
    return yaml.dump(data, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=100)


def sparse(value: Any) -> Any:
    """A recipe, or what is in it, as plain data to be read again, without what is by default."""
    if isinstance(value, tuple):
        return [sparse(item) for item in value]
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
            result[name] = sparse(item)
    return {**result, **(value.model_extra or {})}


def _failure(
    origin: str, problems: Sequence[Problem], hint: str, changes: Sequence[str] = ()
) -> RecipeError:
    """Lists problems in one error; lines are not those of a file that options changed."""
    lines = ""
    for problem in sorted(problems, key=lambda problem: problem.line):
        column = "" if problem.column is None else f":{problem.column}"
        place = "" if changes else f"{origin}:{problem.line}{column}: "
        name = f"`{dotted(problem.key)}`: " if problem.key else ""
        lines += f"\n  {place}{name}{problem.text}"
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    changed = f" with {quoted(changes)}" if changes else ""
    return RecipeError(f"{count} in `{origin}`{changed}:{lines}", hint)


def change_recipe(recipe: Recipe, changes: Sequence[str], origin: str = "recipe") -> Recipe:
    """Changes values of a recipe by pairs such as `finetune.steps=200`; values are YAML."""
    pairs = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not (key.strip() and equals):
            example = "write, for example, `--set finetune.steps=200`"
            raise RecipeError(f"`--set {change}` is no pair", example)
        try:
            pairs[key.strip()] = read_document(value).data if value.strip() else None
        except Unreadable as error:
            raise RecipeError(
                f"`--set {change}`: {error.problem.text}",
                "write the value as in a recipe, with quotes around it where the shell needs them",
            ) from error
    if not pairs:
        return recipe
    text = _changed(sparse(recipe), pairs, "--set")
    return parse_recipe(text, origin, [f"--set {change}" for change in changes])


def choose_variants(recipe: Recipe, names: Sequence[str], origin: str = "recipe") -> Recipe:
    """Makes the changes of variants, in their order; what is written is named after them."""
    for name in names:
        if name not in recipe.variants:
            has = f"it has {quoted(recipe.variants)}" if recipe.variants else "it has none"
            text = f"the recipe has no variant `{name}`; {has}{did_you_mean(name, recipe.variants)}"
            raise RecipeError(text, "see what there is: `tcompress recipes show RECIPE`")
    for name in names:
        # Names and files that another variant would overwrite.
        places: dict[str, Any] = {
            key: f"{value}-{name}" for key in ("name", "output") if (value := getattr(recipe, key))
        }
        if recipe.report is not None:
            page = Path(recipe.report)
            places["report"] = str(page.with_stem(f"{page.stem}-{name}"))
        by = f"--variant {name}"
        text = _changed(sparse(recipe), {**places, **recipe.variants[name]}, by)
        recipe = parse_recipe(text, origin, [by])
    return recipe


def check_recipe(text: str, origin: str) -> str | None:
    """Checks a recipe and each of its variants, even if it is wrong itself; returns its name."""
    _, data, problems = _judged(text, origin)
    wrong = [_failure(origin, problems, COMPARE).message] if problems else []
    known = {(problem.key, problem.text) for problem in problems}
    variants = data.get("variants")
    lost = []
    for name, changes in (variants if isinstance(variants, dict) else {}).items():
        by = f"--variant {name}"
        try:
            made = _changed(data, changes if isinstance(changes, dict) else {}, by)
        except RecipeError as error:
            lost.append(error.message)
            continue
        found = [item for item in _judged(made, origin)[2] if (item.key, item.text) not in known]
        lost += [_failure(origin, found, COMPARE, [by]).message] if found else []
    if lost:
        wrong.append("\n\n".join([f"`{origin}` has variants that do not fit it", *lost]))
    if wrong:
        raise RecipeError("\n\n".join(wrong), COMPARE)
    return data.get("name")


def _changed(data: Mapping[str, Any], changes: Mapping[str, Any], by: str) -> str:
    """A recipe with some of its values changed, as text."""
    made = json.loads(json.dumps(data))
    for key, value in changes.items():
        *parents, last = key.split(".")
        place: Any = made
        for name in parents:
            place = _entry(place, name, key, by)
        if isinstance(place, dict):
            place[last] = value
        else:
            _entry(place, last, key, by)  # says if there is none
            place[int(last)] = value
    return json.dumps(made)


def _entry(place: Any, name: str, key: str, by: str) -> Any:
    """Steps into a mapping, which is made where there is none, or into a list."""
    if isinstance(place, dict):
        return place.setdefault(name, {})
    if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
        return place[int(name)]
    raise RecipeError(f"`{by}`, `{key}`: there is no `{name}` in the recipe", COMPARE)


def repetitions(recipe: Recipe, count: int) -> list[tuple[int, Recipe]]:
    """Make a recipe, and the number that names it, for each of so many seeds from its own on.

    First weights, random transforms and features, calibration data and training have seeds.
    Measurements keep theirs, so that all are of the same examples. What is written is named after
    the seed: `output` and `name` are made longer. A `RecipeError` says that nothing in it depends
    on a seed, or that the count is none.
    """
    if count < 1:
        raise RecipeError(f"`seeds` is {count}, allowed is 1 or more")
    seeds = _seeds_of(recipe)
    if not seeds:
        raise RecipeError(
            f"`--seeds {count}` repeats what depends on chance, and nothing of this does: no first "
            "weights or transforms at random, no calibration data, no training",
            "leave `--seeds` out",
        )
    repeated = []
    for index in range(count):
        numbers = {key: (seed + index) % _SEEDS for key, seed in seeds.items()}
        changed, first = recipe, next(iter(numbers.values()))
        for key, number in numbers.items():
            changed = _with_value(changed, key, number)
        for name in ("name", "output"):
            if (value := getattr(recipe, name)) is not None:
                changed = _with_value(changed, name, f"{value}{SEED_SUFFIX}{first}")
        repeated.append((first, changed))
    return repeated


def _seeds_of(recipe: Recipe) -> dict[str, int]:
    """Seeds that a recipe's result depends on, by key; the first one names it."""
    convert, seeds = recipe.convert, dict[str, int]()
    if convert.init == "random":
        seeds["convert.seed"] = convert.seed
    for name in ("pretrain", "finetune"):
        if (training := getattr(recipe, name)) is not None:
            seeds[f"{name}.seed"] = training.seed
    if not convert.calibration.is_none:
        seeds["convert.calibration.seed"] = convert.calibration.seed
    method: Any = convert.method
    attention: Any = convert.attention
    if getattr(method, "transform", None) == "random":
        seeds["convert.method.seed"] = method.seed
    if getattr(attention, "kernel", "softmax") != "softmax":
        seeds["convert.attention.seed"] = attention.seed
    return seeds


def _with_value(section: M, key: str, value: Any) -> M:
    """The same section with another value of a key such as `convert.seed`."""
    name, _, rest = key.partition(".")
    if rest:
        value = _with_value(getattr(section, name), rest, value)
    return section.model_copy(update={name: value})
