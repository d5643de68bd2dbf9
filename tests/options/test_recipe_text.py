"""Recipes from text and back."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tcompress.options import (
    Calibration,
    Convert,
    Recipe,
    dump_recipe,
    find_recipe,
    method_names,
    parse_recipe,
)
from tcompress.options.convert_options import LayerRule
from tcompress.planning.sites import structure_of
from tcompress.structures.lowrank import LowRankSpec
from tcompress.structures.lprod import LprodSpec

TRICKY = [
    "yes",
    "~",
    "",
    "1e-3",
    "12e4",
    "010",
    "0x1f",
    "1:30",
    "2024-01-01",
    "a: b",
    "# c",
    "<<",
    "\x85\u2028",
]
texts = st.text(max_size=20) | st.sampled_from(TRICKY)
lists = st.lists(texts, max_size=3).map(tuple)
positive = st.integers(1, 10**6)
shares = st.floats(0, 1, exclude_min=True, exclude_max=True)


def maybe(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | strategy


def low_rank(rank: st.SearchStrategy[int | None]) -> st.SearchStrategy[LowRankSpec]:
    return st.builds(LowRankSpec, name=st.sampled_from(["svd", "lowrank"]), rank=rank)


ranked = low_rank(positive)  # which a target would contradict
sized = low_rank(st.none()) | st.builds(
    LprodSpec,
    name=st.just("lprod"),
    p=positive,
    transform=maybe(st.sampled_from(["dct", "fitted", "learned"])),
    block=maybe(st.integers(2, 64)),
    stages=st.integers(1, 8),
    placement=maybe(st.sampled_from(["in", "out", "both"])),
    pad=st.booleans(),
)
calibrations = st.builds(
    Calibration,
    source=texts,
    columns=lists,
    samples=positive,
    holdout=st.floats(0, 0.9, exclude_min=True, exclude_max=True),
    damping=st.floats(0, 1e300),
)


def conversions(
    methods: st.SearchStrategy[object], targets: st.SearchStrategy[object]
) -> st.SearchStrategy[Convert]:
    rules = st.builds(
        LayerRule,
        match=texts,
        keep=st.booleans(),
        method=maybe(methods),
        residual_rank=maybe(st.integers(0, 100)),
        target=targets,
    )
    return st.builds(
        Convert,
        method=methods,
        target=targets,
        residual_rank=st.integers(0, 100),
        keep=lists,
        layers=st.lists(rules, max_size=3).map(tuple),
        calibration=calibrations,
        dtype=maybe(st.sampled_from(["float32", "float16", "bfloat16"])),
        device=st.sampled_from(["auto", "cpu", "cuda", "cuda:1", "mps"]),
    )


recipes = st.builds(
    Recipe,
    recipe_version=st.just(1),
    name=maybe(texts),
    description=maybe(texts),
    model=maybe(texts),
    convert=conversions(sized, maybe(shares)) | conversions(ranked, st.none()),
)
thorough = settings(deadline=None, derandomize=True, max_examples=30)


@thorough
@given(recipe=recipes)
def test_yaml_round_trip(recipe: Recipe) -> None:
    assert parse_recipe(dump_recipe(recipe), "a") == recipe


@thorough
@given(recipe=recipes, indent=st.sampled_from([None, 2, "\t"]), ascii_only=st.booleans())
def test_json_round_trip(recipe: Recipe, indent: int | str | None, ascii_only: bool) -> None:
    content = recipe.model_dump(mode="json")
    text = json.dumps(content, indent=indent, ensure_ascii=ascii_only)
    assert parse_recipe(text, "a") == recipe


def test_dump_leaves_defaults_out() -> None:
    recipe = Recipe(
        recipe_version=1,
        convert=Convert(
            method=LprodSpec(),
            layers=(LayerRule(match="*.q", method=LowRankSpec(rank=3)),),
            calibration=Calibration(samples=5),
        ),
    )
    assert dump_recipe(recipe) == (
        "recipe_version: 1\n"
        "convert:\n"
        "  method:\n"
        "    name: lprod\n"
        "  layers:\n"
        "  - match: '*.q'\n"
        "    method:\n"
        "      name: svd\n"
        "      rank: 3\n"
        "  calibration:\n"
        "    samples: 5\n"
    )


@pytest.mark.parametrize("text", TRICKY)
def test_dump_is_read_alike_by_plain_yaml(text: str) -> None:
    recipe = Recipe(recipe_version=1, name=text, convert=Convert(method=LprodSpec()))
    assert yaml.safe_load(dump_recipe(recipe))["name"] == text


@pytest.mark.parametrize("name", method_names())
def test_every_method_by_name(name: str) -> None:
    recipe = parse_recipe(f"recipe_version: 1\nconvert: {{method: {{name: {name}}}}}", "a")
    assert recipe.convert.method.name == name
    if name != "auto":
        assert isinstance(recipe.convert.method, structure_of(recipe.convert.method).spec)
    assert parse_recipe(dump_recipe(recipe), "a") == recipe
    bare = parse_recipe(f"recipe_version: 1\nconvert: {{method: {name}}}", "a")
    assert bare == recipe


def test_a_models_own_keys_are_no_names() -> None:
    text = (
        "recipe_version: 1\narchitecture: {model_type: bert, attention: x}\nconvert: {init: random}"
    )
    assert parse_recipe(text, "a").architecture.sizes == {"attention": "x"}


def test_attention_by_name() -> None:
    bare = parse_recipe("recipe_version: 1\nconvert: {attention: hot}", "a")
    assert bare == parse_recipe("recipe_version: 1\nconvert: {attention: {name: hot}}", "a")


def test_plain_values_follow_yaml_1_2() -> None:
    text = """\
recipe_version: 1
name: no
revision: 2024-01-01
convert:
  method: {name: lprod, p: 04, pad: True}
  target: 5e-1
  keep: [on, 1:30]
  calibration: {damping: 1}
"""
    recipe = parse_recipe(text, "a")
    assert (recipe.name, recipe.revision) == ("no", "2024-01-01")
    assert recipe.convert.method == LprodSpec(p=4, pad=True)
    assert (recipe.convert.target, recipe.convert.keep) == (0.5, ("on", "1:30"))
    assert recipe.convert.calibration.damping == 1.0


def test_aliases_are_followed() -> None:
    text = """\
recipe_version: 1
convert:
  method: &small {name: svd, rank: 3}
  layers: [{match: q, method: *small}]
"""
    convert = parse_recipe(text, "a").convert
    assert convert.layers[0].method == convert.method == LowRankSpec(rank=3)


def test_load_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"recipe_version": 1, "convert": {"method": {"name": "svd"}}}', "utf-8-sig")
    expected = Recipe(recipe_version=1, convert=Convert(method=LowRankSpec()))
    assert parse_recipe(*find_recipe(str(path))) == expected


def test_methods_of_a_sweep() -> None:
    text = "recipe_version: 1\nconvert: {method: svd}\nsweep: {methods: [svd, {name: lprod, p: 8}]}"
    recipe = parse_recipe(text, "my.yaml")
    assert recipe.sweep is not None
    assert recipe.sweep.methods == ("svd", LprodSpec(p=8))
    assert parse_recipe(dump_recipe(recipe), "again") == recipe
