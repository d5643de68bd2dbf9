"""Recipes that ship with the package."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tcompress.errors import InputError
from tcompress.models import ALIASES
from tcompress.options import (
    change_recipe,
    choose_variants,
    copy_recipe,
    dump_recipe,
    find_recipe,
    json_schema,
    library,
    parse_recipe,
    recipe_names,
    recipe_text,
)
from tcompress.options.words import describe
from tests.support.cli import run

FOLDER = Path(__file__).parents[2] / "recipes"
FILES = sorted(FOLDER.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_recipe(path: Path) -> None:
    """With its variants, and the changes that its comments show."""
    text = path.read_text("utf-8")
    recipe = parse_recipe(text, str(path))
    assert parse_recipe(dump_recipe(recipe), "a") == recipe
    assert recipe.name == path.stem
    known = recipe.model in ALIASES or str(recipe.model).count("/") == 1  # a hub id
    assert known is (recipe.architecture is None)
    assert recipe.description is not None
    assert ("smoke" in recipe.variants) is (path.parent.name == "scratch")
    for variant in recipe.variants:
        made = choose_variants(recipe, [variant])
        assert made.output == f"{recipe.output}-{variant}"
        assert len({row.row for row in made.paper if row.ours}) <= 1  # a recipe makes one model
    comments = " ".join(line.strip("# ") for line in text.splitlines() if line.startswith("#"))
    assert change_recipe(recipe, re.findall(r"--set (\S+=\S+)", comments))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_of_a_shipped_recipe_has_a_comment(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert [line for line in lines if line and "# " not in line] == []
    assert max(map(len, lines)) <= 100


def test_names_are_the_files_at_any_depth() -> None:
    names = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FILES]
    assert recipe_names() == tuple(sorted(names))
    assert "encoder/minilm-lprod" in names  # hints speak of it


def test_installed_recipes_lie_inside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "files", lambda name: tmp_path / name)
    assert recipe_names() == ()
    deep = tmp_path / "tcompress" / "assets" / "recipes" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "c.yaml").write_text("text")
    (deep / "README.md").write_text("no recipe")
    assert recipe_names() == ("a/b/c",)
    assert recipe_text("a/b/c") == "text"


def test_find_by_name_with_or_without_suffix() -> None:
    text = (FOLDER / "encoder" / "minilm-lprod.yaml").read_text("utf-8")
    found = (text, "encoder/minilm-lprod.yaml")
    assert find_recipe("encoder/minilm-lprod") == find_recipe("encoder/minilm-lprod.yaml") == found


def test_file_wins_over_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "encoder").mkdir()
    mine = tmp_path / "encoder" / "minilm-lprod"
    mine.write_text("mine")
    assert find_recipe("encoder/minilm-lprod") == ("mine", "encoder/minilm-lprod")
    assert find_recipe(str(mine)) == ("mine", str(mine))


def test_copy_into_a_folder(tmp_path: Path) -> None:
    assert copy_recipe("vision/vit-lprod", tmp_path) == tmp_path / "vit-lprod.yaml"


def test_copy_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is a named pipe, not an ordinary file"):
        copy_recipe("vision/vit-lprod", tmp_path / "pipe", force=True)


# The generated reference and JSON schema of recipes


def test_objects_of_the_schema_are_closed_and_every_key_is_described() -> None:
    schema = json_schema()
    for item in (schema, *schema["$defs"].values()):
        # Configurations of models have whatever keys their family has.
        assert item["additionalProperties"] is (item["title"] == "Architecture")
        assert set(item.get("required", ())) <= set(item["properties"])
        assert item["description"]
        assert [name for name, key in item["properties"].items() if not key["description"]] == []


@pytest.mark.parametrize(
    ("fragment", "words"),
    [
        ({"type": "string", "pattern": "^[0-9]+GB$"}, "text"),
        ({"type": "array"}, "a list"),
        ({"type": "object"}, "a mapping"),
        ({}, "anything"),
        (
            {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
            "a whole number or text",
        ),
        (
            {"type": "integer", "exclusiveMaximum": 5, "minimum": 2},
            "a whole number, at least 2 and at most 4",
        ),
        ({"type": "number", "maximum": 2.5}, "a number, at most 2.5"),
    ],
)
def test_words_for_types_that_future_keys_may_have(fragment: dict[str, Any], words: str) -> None:
    assert describe(fragment, {}) == words


# Variants of recipes: named changes


TEXT = """
recipe_version: 1
name: small
output: made
convert: {method: svd, target: 0.5}
evaluate:
  - {task: classification, data: test.csv}
report: pages/small.html
variants:
  smoke: {evaluate.0.limit: 10, convert.target: 0.25}
  sliced: {convert.method: {name: lprod, p: 2}, convert.target: null, output: elsewhere}
  wrong: {evaluate.1.limit: 10}
  senseless: {convert.target: high}
"""


def test_a_variant_changes_values_and_names() -> None:
    made = choose_variants(parse_recipe(TEXT, "a"), ["smoke"])
    assert (made.convert.target, made.evaluate[0].limit) == (0.25, 10)
    assert (made.name, made.output, made.report) == (
        "small-smoke", "made-smoke", "pages/small-smoke.html",
    )  # fmt: skip


def test_variants_add_up_and_may_name_their_own_output() -> None:
    recipe = parse_recipe(TEXT, "a")
    made = choose_variants(recipe, ["sliced", "smoke"])
    assert (made.convert.method.name, made.convert.target) == ("lprod", 0.25)
    assert (made.name, made.output) == ("small-sliced-smoke", "elsewhere-smoke")
    assert choose_variants(recipe, []) is recipe


def test_variants_of_a_wrong_recipe_are_tried_too(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(TEXT.replace("target: 0.5}", "target: 5, max_erorr: 1}"))
    done = run("recipes", "validate", file)
    assert done.code == 2
    assert f"2 problems in `{file}`:\n  {file}:5: `convert." in done.err
    assert f"  {file}:5: `convert.target`: found `5`" in done.err
    assert done.err.count("`convert.max_erorr`: unknown key") == 1
    assert "`--variant wrong`, `evaluate.1.limit`: there is no `1`" in done.err
    assert f"1 problem in `{file}` with `--variant senseless`:\n" in done.err
    assert "--variant smoke" not in done.err  # which is wrong only where the recipe is
