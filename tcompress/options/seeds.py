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
    all are of the same examples. What is written is named after the seed.

    Args:
        recipe: How it begins; its `output` and `name` are made longer.
        count: Number of seeds.

    Raises:
        RecipeError: Nothing that it does depends on a seed.
    """
    original = _seeds_of(recipe)
    if not original:
        raise RecipeError(
            f"`--seeds {count}` repeats what depends on chance, and nothing of this does: no first "
            "weights at random, no calibration data, no training",
            "leave `--seeds` out",
        )
    first = next(iter(original.values()))
    return [
        Repetition((first + index) % _SEEDS, _seeded(recipe, original, index, first))
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


def _seeded(recipe: Recipe, original: dict[str, int], index: int, first: int) -> Recipe:
    changed: dict[str, Any] = {}
    seeds = {section: (seed + index) % _SEEDS for section, seed in original.items()}
    convert: Any = {"seed": seeds["convert"]} if "convert" in seeds else {}
    if "calibration" in seeds:
        said = {"seed": seeds["calibration"]}
        convert["calibration"] = recipe.convert.calibration.model_copy(update=said)
    changed["convert"] = recipe.convert.model_copy(update=convert)
    for name in seeds.keys() & {"pretrain", "finetune"}:
        changed[name] = getattr(recipe, name).model_copy(update={"seed": seeds[name]})
    for name in ("name", "output"):
        if (value := getattr(recipe, name)) is not None:
            changed[name] = f"{value}{SUFFIX}{(first + index) % _SEEDS}"
    return recipe.model_copy(update=changed)
