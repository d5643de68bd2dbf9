"""The classifier of TSA and TGA: chains of each head, baselines, and sizes against accuracy."""

import json
from pathlib import Path

import pytest

from tcompress.errors import RecipeError
from tcompress.models import SourceModel
from tcompress.options import parse_recipe
from tcompress.own_models.configs import TCompressTextConfig
from tcompress.own_models.text import TCompressTextForSequenceClassification
from tcompress.planning.planner import make_plan
from tcompress.structures.base import Refusal, Site
from tcompress.structures.tt import TensorTrain, TTSpec
from tests.support.cli import run
from tests.support.converted import recipe
from tests.support.evaluation import labelled_file


@pytest.mark.parametrize(
    ("chains", "parameters"), [({}, 276), ({"chains": "heads"}, 3 * 2 * 16 * 5)]
)
def test_tensor_trains_at_the_papers_size(
    chains: dict[str, str], parameters: int, tmp_path: Path
) -> None:
    """Of K, V and the output; of heads with chains of their own 16 (N - 1) numbers for each."""
    config = TCompressTextConfig(vocab_size=50, hidden_size=64)
    TCompressTextForSequenceClassification(config).save_pretrained(tmp_path)
    chosen = recipe(attention={"name": "tga"}, method={"name": "qtt", **chains})
    plan = make_plan(chosen, SourceModel.open(str(tmp_path)))
    assert [layer.role for layer in plan.layers] == ["k", "v", "o"]
    assert plan.structured_rewritten == parameters


def test_chains_of_heads_need_the_width_of_a_head() -> None:
    spec, kind = TTSpec(rank=2, chains="heads"), TensorTrain()
    with pytest.raises(Refusal, match="the width of a head is not known"):
        kind.layout(spec, Site(16, 24, "in", role="k"))
    with pytest.raises(Refusal, match="the width of a head is 5, which does not divide 24"):
        kind.layout(spec, Site(16, 24, "in", role="k", head=5))
    assert kind.layout(spec, Site(16, 24, "in", role="up", head=5)).chains == 1


def test_sizes_and_accuracies_of_variants_stand_side_by_side(tmp_path: Path) -> None:
    file = labelled_file(tmp_path / "rows.jsonl", classes=range(8))
    said = {
        "architecture.tokenizer": f"{{words: {file}, size: 40}}",
        "architecture.num_labels": 7,
        "finetune.data.source": f"[{file}]",
        "finetune.data.holdout": "0.2",
        "finetune.steps": "2",
        "evaluate.0.data": file,
        "evaluate.1.data": file,
        "evaluate.0.limit": "5",
        "evaluate.1.limit": "6",
        "sweep.variants": "[tsa+d8, add+d4]",
        "evaluate.0.threshold": "'1.1'",
    }
    sets = (f"--set={key}={value}" for key, value in said.items())
    done = run("run", "scratch/r8-sizes", "-o", tmp_path / "out", *sets, columns=160)
    assert done.code == 3, done.err  # all miss it
    assert "Missed: tsa-d8: " in done.out
    assert "Missed: add-d4: " in done.out
    assert "tsa-d8" in done.out
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    sizes = {model["name"]: model["blocks"] for model in found["models"]}
    # A decay for each head; the additive baseline has q, k, v, o and a vector per head.
    assert sizes == {"tsa-d8": 3 * 2 * 16 * 2 + 2, "add-d4": 4 * 2 * 4 * 4 + 2 * 4}
    assert all(len(model["metrics"]) >= 2 and model["missed"] for model in found["models"])
    assert (tmp_path / "out" / "sweep.html").is_file()


SWEEP = "recipe_version: 1\nconvert: {init: random}\nvariants: {a: {convert.seed: 1}}\nsweep: "


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("{variants: [a+b]}", "`sweep.variants` names `b`, which the recipe has not; it has `a`"),
        ("{methods: [svd]}", "name those in `sweep.variants`"),
    ],
)
def test_what_a_sweep_of_variants_needs(sweep: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        parse_recipe(SWEEP + sweep + "\n", "a")
