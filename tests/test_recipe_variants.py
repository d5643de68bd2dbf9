"""Variants of recipes: named changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tcompress.options import choose_variants, parse_recipe, recipe_names, recipe_text
from tests.support.cli import run
from tests.support.tiny import build

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


@pytest.mark.parametrize("name", recipe_names())
def test_every_variant_that_ships_is_a_recipe(name: str) -> None:
    recipe = parse_recipe(recipe_text(name), name)
    assert ("smoke" in recipe.variants) == name.startswith("scratch/")
    for variant in recipe.variants:
        made = choose_variants(recipe, [variant])
        assert made.output == f"{recipe.output}-{variant}"
        own = [row for row in made.paper if row.ours]
        assert len({row.row for row in own}) <= 1  # a recipe makes one model


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


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    build("bert").save_pretrained(model)
    monkeypatch.chdir(tmp_path)
    said = "recipe_version: 1\noutput: made\nconvert: {method: svd, target: 0.5, calibration: "
    said += "{source: none}}\nvariants:\n  tiny: {convert.target: 0.25}\n"
    (tmp_path / "r.yaml").write_text(said)
    done = run("run", "r.yaml", "--model", model, "--variant", "tiny")
    assert done.code == 0, done.err
    assert "Wrote `made-tiny`" in done.out
    assert not (tmp_path / "made").exists()
