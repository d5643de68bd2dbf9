"""What every recipe that ships plans, on tiny models in the place of those it names."""

from collections.abc import Iterator
from contextlib import chdir
from typing import Any

import pytest

from tcompress.options import parse_recipe, recipe_names, recipe_text
from tests.support.cli import worked
from tests.support.golden import Golden
from tests.support.model_folders import model_folder

MODELS = {"encoder": "bert", "decoder": "llama", "vision": "vit"}
# Sizes that tiny models have, and words that need no download.
CHANGES = {"encoder/bert-tucker-model": ["convert.method.cores=6", "convert.method.rank=[16, 16]"]}
EVERYWHERE = ["convert.device=cpu"]
WORDS = ["architecture.tokenizer.words=builtin"]
LISTS = ("layers", "attention", "embeddings", "forms", "left")


@pytest.fixture(scope="module", autouse=True)
def _models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("models")
    for family in MODELS.values():
        model_folder(family, folder / family)
    with chdir(folder):
        yield


def _file(name: str) -> str:
    return f"{name.replace('/', '-')}.json"


def _plan(name: str, *more: str) -> dict[str, Any]:
    recipe = parse_recipe(recipe_text(name), name)
    changes = [*EVERYWHERE, *CHANGES.get(name, [])]
    if recipe.architecture is None:
        more += ("--model", f"./{MODELS[name.partition('/')[0]]}")
    elif recipe.architecture.tokenizer is not None:
        changes += WORDS
    more += tuple(f"--set={change}" for change in changes)
    return worked("run", name, "--dry-run", "--json", *more).document


@pytest.mark.parametrize("name", recipe_names())
def test_plan(name: str, golden: Golden) -> None:
    found = _plan(name)
    recipe = parse_recipe(recipe_text(name), name)
    compares = recipe.sweep is not None and recipe.sweep.variants  # its plan has them all
    for variant in () if compares else recipe.variants:
        other = _plan(name, "--variant", variant)
        if "plan" in other:  # a sweep has cells
            other["plan"] = {k: value for k, value in other["plan"].items() if k not in LISTS}
        found.setdefault("variants", {})[variant] = other
    golden.document(f"plans/{_file(name)}", found)


def test_every_file_is_of_a_recipe(golden: Golden) -> None:
    golden.only("plans", map(_file, recipe_names()))
