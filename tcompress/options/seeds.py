"""A recipe repeated with several seeds: how far its numbers depend on chance."""

from __future__ import annotations

from typing import Any, NamedTuple

from tcompress.errors import RecipeError
from tcompress.options.schema import Recipe

_SEEDS = 2**32
SUFFIX = "-seed-"
"""What stands between the name of a model and the seed that it was made with."""


class Repetition(NamedTuple):
    """A recipe with other seeds, and the number that names it."""

    seed: int
    recipe: Recipe


def repetitions(recipe: Recipe, count: int) -> list[Repetition]:
    """Make a recipe for each of so many seeds: its own, and those that follow.

    First weights, calibration data and training have seeds. Measurements keep theirs, so that
    all are of the same examples. What is written is named after the seed: `output` and `name` are
    made longer. A `RecipeError` says that nothing in it depends on a seed.
    """
    original = _seeds_of(recipe)
    if not original:
        raise RecipeError(
            f"`--seeds {count}` repeats what depends on chance, and nothing of this does: no first "
            "weights at random, no calibration data, no training",
            "leave `--seeds` out",
        )
    return [
        _repetition(recipe, {name: (seed + index) % _SEEDS for name, seed in original.items()})
        for index in range(count)
    ]


def _seeds_of(recipe: Recipe) -> dict[str, int]:
    """Seeds that a recipe's result depends on, by section; the first one names it."""
    convert, seeds = recipe.convert, dict[str, int]()
    if convert.init == "random":
        seeds["convert"] = convert.seed
    for name in ("pretrain", "finetune"):
        if (training := getattr(recipe, name)) is not None:
            seeds[name] = training.seed
    if not convert.calibration.is_none:
        seeds["calibration"] = convert.calibration.seed
    return seeds


def _repetition(recipe: Recipe, seeds: dict[str, int]) -> Repetition:
    changed: dict[str, Any] = {
        name: getattr(recipe, name).model_copy(update={"seed": seeds[name]})
        for name in seeds.keys() - {"calibration"}
    }
    if "calibration" in seeds:
        calibration = recipe.convert.calibration.model_copy(update={"seed": seeds["calibration"]})
        convert = changed.get("convert", recipe.convert)
        changed["convert"] = convert.model_copy(update={"calibration": calibration})
    first = next(iter(seeds.values()))
    for name in ("name", "output"):
        if (value := getattr(recipe, name)) is not None:
            changed[name] = f"{value}{SUFFIX}{first}"
    return Repetition(first, recipe.model_copy(update=changed))
