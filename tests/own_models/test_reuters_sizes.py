"""The classifier of TSA and TGA: chains of each head, baselines, and sizes against accuracy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tcompress.attention import BaseAttention, replacement_named
from tcompress.attention.additive import AdditiveSpec, additive_scores
from tcompress.attention.graph import GraphSpec
from tcompress.attention.visibility import Visible
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
from tests.support.numerics import randn


def test_additive_scores_are_those_of_the_network() -> None:
    q, k, w = randn(1, 2, 5, 3), randn(1, 2, 4, 3, seed=1), randn(2, 3, seed=2)
    scores = additive_scores(q, k, w)
    for head in range(2):
        for one in range(5):
            for other in range(4):
                inner = (q[0, head, one] + k[0, head, other]).tanh()
                torch.testing.assert_close(scores[0, head, one, other], w[head] @ inner)


def test_two_heads_with_chains_are_those_of_the_reference() -> None:
    """Algorithm 1 of both papers for each head, side by side, and the additive baseline."""
    reference = pytest.importorskip("tests.reference.tsa")
    tt, spec = TensorTrain(), TTSpec(name="qtt", chains="heads")
    layout = tt.layout(spec, Site(8, 16, "in", role="k", head=8))
    shapes = tt.tensors(layout)
    both = [{key: randn(*shape, seed=s) for key, shape in shapes.items()} for s in (1, 2)]
    x = randn(5, 8)
    k, v = (tt.apply(x, own, layout).unflatten(-1, (2, 8)).transpose(0, 1)[None] for own in both)
    graph = replacement_named("graph")
    mixing = graph.layout(GraphSpec(), BaseAttention(2, 2, 8))
    decay = {"decay": torch.full((2,), 0.7, dtype=torch.float64).logit()}
    mixed = graph.apply(k, k, v, decay, mixing, Visible())[0].transpose(0, 1).flatten(1)
    chains = [
        tuple([core[head].transpose(1, 2).numpy() for core in own.values()] for own in both)
        for head in range(2)
    ]
    expected = reference.attention(x.numpy(), chains, 0.7, order="big")
    torch.testing.assert_close(mixed, torch.from_numpy(expected), atol=1e-10, rtol=1e-10)
    additive = replacement_named("additive")
    weights = {name: randn(8, 4, seed=n) for n, name in enumerate("qkv")}
    q, k, v = ((x @ weights[name])[None, None] for name in "qkv")
    scale = randn(1, 4, seed=9)
    own = additive.layout(AdditiveSpec(), BaseAttention(1, 1, 4))
    found = additive.apply(q, k, v, {"score_weight": scale}, own, Visible())
    arrays = {name: weight.numpy() for name, weight in weights.items()}
    right = reference.additive(x.numpy(), {**arrays, "scale": scale[0].numpy()})
    torch.testing.assert_close(found[0, 0], torch.from_numpy(right), atol=1e-10, rtol=1e-10)


def test_heads_have_chains_of_their_own(tmp_path: Path) -> None:
    """Of keys and values 16 (N - 1) numbers for each head, the papers' count."""
    config = TCompressTextConfig(vocab_size=50, hidden_size=64)
    TCompressTextForSequenceClassification(config).save_pretrained(tmp_path)
    chosen = recipe(attention={"name": "tga"}, method={"name": "qtt", "chains": "heads"})
    plan = make_plan(chosen, SourceModel.open(str(tmp_path)))
    assert [layer.role for layer in plan.layers] == ["k", "v", "o"]
    assert plan.structured_rewritten == 3 * 2 * 16 * 5


def test_chains_of_heads_need_the_width_of_a_head() -> None:
    spec, kind = TTSpec(rank=2, chains="heads"), TensorTrain()
    with pytest.raises(Refusal, match="the width of a head is not known"):
        kind.layout(spec, Site(16, 24, "in", role="k"))
    with pytest.raises(Refusal, match="the width of a head is 5, which does not divide 24"):
        kind.layout(spec, Site(16, 24, "in", role="k", head=5))
    assert kind.layout(spec, Site(16, 24, "in", role="up", head=5)).chains == 1


def _sets(folder: Path) -> list[str]:
    file = labelled_file(folder / "rows.jsonl", classes=range(8))
    said: dict[str, Any] = {
        "architecture.tokenizer": f"{{words: {file}, size: 40}}",
        "architecture.num_labels": 7,
        "finetune.data.source": f"[{file}]",
        "finetune.data.holdout": "0.2",
        "finetune.steps": "2",
        "evaluate.0.data": file,
        "evaluate.1.data": file,
        "evaluate.0.limit": "5",
        "evaluate.1.limit": "6",
    }
    return [part for key, value in said.items() for part in ("--set", f"{key}={value}")]


def test_sizes_and_accuracies_of_variants_stand_side_by_side(tmp_path: Path) -> None:
    said = [*_sets(tmp_path), "--set", "sweep.variants=[tsa+d8, add+d4]"]
    done = run("run", "scratch/r8-sizes", "-o", tmp_path / "out", *said, columns=160)
    assert done.code == 0, done.err
    assert "tsa-d8" in done.out
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    sizes = {model["name"]: model["blocks"] for model in found["models"]}
    # Decays and coefficients are 2 + 4; the additive baseline has q, k, v, o and a vector per head.
    assert sizes == {"tsa-d8": 3 * 2 * 16 * 2 + 6, "add-d4": 4 * 2 * 4 * 4 + 2 * 4}
    assert all(len(model["metrics"]) >= 2 for model in found["models"])
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
    with pytest.raises(RecipeError) as caught:
        parse_recipe(SWEEP + sweep + "\n", "a")
    assert words in caught.value.message
