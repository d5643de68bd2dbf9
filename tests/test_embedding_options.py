"""Rewritten word embeddings: refusals, options, reports, the command line, healing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn

from tcompress.cli.convert import default_output
from tcompress.conversion.converter import convert
from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.method_options import lookup_methods
from tcompress.planning.planner import make_plan
from tcompress.reporting.model_report import report_of
from tests.support.cli import run
from tests.support.conversions import make
from tests.support.embeddings import ALONE, METHODS, made
from tests.support.model_folders import save_tokenizer
from tests.support.tiny import build
from tests.support.training import texts, train
from tests.support.typed import conversion


@pytest.mark.parametrize(
    ("family", "embeddings", "message"),
    [
        ("vit", METHODS["svd"], "no word embedding can be rewritten: the model has none"),
        ("bert", {"method": {"name": "svd", "rank": 32}}, "it would not shrink"),
        ("bert", {"method": {"name": "svd"}, "target": 0.001}, "does not pay for rank 1"),
    ],
)
def test_refusals(family: str, embeddings: Any, message: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    chosen = Convert.model_validate({"method": None, "embeddings": embeddings})
    with pytest.raises(PlanError) as failed:
        make_plan(chosen, SourceModel.open(str(tmp_path)))
    assert message in failed.value.message
    assert "leave `embeddings` out" in (failed.value.hint or "")


def test_an_embedding_that_computes_more_is_refused(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)
    source = SourceModel.open(str(tmp_path))

    class Normed(nn.Embedding):
        pass

    source.keymap.model.get_submodule("bert.embeddings.word_embeddings").__class__ = Normed
    chosen = Convert.model_validate({"method": None, "embeddings": METHODS["svd"]})
    with pytest.raises(PlanError, match="`Normed` computes more than a table does"):
        make_plan(chosen, source)


def test_methods_that_look_up() -> None:
    assert lookup_methods() == ("svd", "lowrank", "tt", "qtt", "tucker")
    with pytest.raises(ValidationError, match="'svd', 'lowrank', 'tt', 'qtt', 'tucker'"):
        Convert.model_validate({"embeddings": {"method": {"name": "lprod"}}})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"embeddings": "svd"}, ("svd", 0.25, None)),
        ({"embeddings": "svd", "target": 0.4}, ("svd", 0.4, "lprod")),
        ({"embeddings": "tt", "embedding_target": 0.3, "method": "svd", "target": 0.5},
         ("tt", 0.3, "svd")),
    ],
)  # fmt: skip
def test_options(given: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    made = conversion(given)
    assert made.embeddings is not None
    method = None if made.method is None else made.method.name
    assert (made.embeddings.method.name, made.embeddings.target, method) == wanted


def test_names_and_labels() -> None:
    made = conversion({"embeddings": "svd", "target": 0.4, "method": "svd"})
    assert made.label == "svd + embeddings"
    assert default_output("models/tiny", made) == "tiny-svd-40-words40"


def test_none_takes_a_recipe_back() -> None:
    recipe: Any = type("R", (), {"convert": Convert(embeddings=METHODS["svd"])})()
    assert (
        conversion({"embeddings": "none", "method": "svd", "target": 0.5}, recipe).embeddings
        is None
    )


def test_a_target_takes_the_place_of_a_recipes_rank() -> None:
    table = {"method": {"name": "svd", "rank": 4}}
    recipe: Any = type("R", (), {"convert": Convert(embeddings=table)})()
    found = conversion({"embedding_target": 0.3}, recipe).embeddings
    assert found is not None
    assert (found.target, found.method.rank) == (0.3, None)


def test_the_report_counts_the_table_apart(tmp_path: Path) -> None:
    found = made("opt", tmp_path, method={"name": "svd"}, target=0.5)
    parts = report_of(str(found.folder)).parameters
    (entry,) = found.plan.embeddings
    assert (
        parts.embeddings.dense - parts.embeddings.now == entry.dense_parameters - entry.parameters
    )
    assert parts.rewritten.now == found.plan.structured_rewritten
    assert parts.total.now == sum(p.numel() for p in found.load().parameters())
    macs = report_of(str(found.folder), length=8).macs_per_token
    other = make("opt", tmp_path / "other", "svd", target=0.5)
    plain = report_of(str(other.folder), length=8).macs_per_token
    assert macs.dense == plain.dense
    head = entry.dense_parameters - entry.macs(8) // 8
    assert plain.now - macs.now == head - entry.row_macs  # the tied head, and a lookup


def test_from_the_command_line(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense")
    command = ["convert", tmp_path / "dense", "--embeddings", "svd", "--calib", "none"]
    planned = run(*command, "--dry-run")
    assert planned.code == 0
    assert "word embedding" in planned.out
    done = run(*command, "-o", tmp_path / "out")
    assert done.code == 0
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "word embedding" in card
    assert "import tcompress" in card
    wrong = run("convert", tmp_path / "dense", "--embeddings", "lprod", "-o", tmp_path / "not")
    assert wrong.code == 2
    assert not (tmp_path / "not").exists()


def test_healing_trains_the_table(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense")
    chosen = Convert.model_validate(
        {**ALONE, "embeddings": METHODS["svd"], "calibration": {"source": "none"}}
    )
    folder = convert(str(tmp_path / "dense"), chosen, tmp_path / "small").folder
    done = train(folder, tmp_path / "healed", data=texts(tmp_path), steps=12, learning_rate=3e-3)
    curve = [point.validation for point in done.facts.curve]
    assert min(curve[1:]) < curve[0]
    one, two = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "healed"))
    assert any("word_embeddings.tc_" in key and not torch.equal(one[key], two[key]) for key in one)
