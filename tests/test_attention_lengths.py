"""Mechanisms of one length, and the texts that everything after a conversion reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tcompress.api import evaluate
from tcompress.conversion.converter import convert
from tcompress.errors import DataError, PlanError
from tcompress.models import SourceModel
from tcompress.models.store import WeightStore
from tcompress.options import Convert
from tcompress.planning.planner import make_plan
from tests.support.evaluation import one_thread, pairs_file
from tests.support.hosts import HOSTS
from tests.support.tiny import TinyModel
from tests.support.training import small_encoder

LENGTH = 8
RECIPE = {
    "attention": {"name": "multilinear", "length": LENGTH},
    "method": {"name": "svd"},
    "target": 0.5,
}


def test_texts_are_cut_to_the_length_from_calibration_to_evaluation(tmp_path: Path) -> None:
    dense = small_encoder(tmp_path).with_name("bert")
    (dense / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    words = tmp_path / "words.txt"
    words.write_text("\n".join(f"w{n} " * 30 for n in range(40)))
    recipe = RECIPE | {"calibration": {"source": str(words), "samples": 40}}
    with one_thread():
        made = convert(str(dense), Convert.model_validate(recipe), tmp_path / "made").folder
        pairs = pairs_file(tmp_path / "pairs.jsonl", 6)
        rows = [json.loads(line) for line in pairs.read_text().splitlines()]
        for row in rows:
            row.update({key: value * 30 for key, value in row.items() if isinstance(value, str)})
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert evaluate([made], "sts", pairs, bootstrap=0)[0].metrics
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert tokenizer.model_max_length == LENGTH
    assert json.loads((made / "sentence_bert_config.json").read_text()) == {"max_seq_length": 8}
    model = AutoModel.from_pretrained(made)
    ids = torch.arange(5, 5 + LENGTH + 1)[None]
    model(ids[:, :LENGTH])
    with pytest.raises(DataError, match=r"layer\.0\.attention\.self`: .* over 8 tokens met 9"):
        model(ids)


@pytest.mark.parametrize(
    ("family", "attention", "said"),
    [
        ("bert", {"name": "multilinear"}, "give `length`"),
        ("bert", {"name": "multilinear", "length": 4000}, "the model takes"),
        ("roberta", {"name": "multilinear", "length": 64}, "the model takes 63 at most"),
        ("vit", {"name": "multilinear", "length": 3}, "`length` is 3, and inputs have"),
        ("vit", {"name": "hot", "grid": [3, 3]}, "a grid of 3 x 3 with 1 special tokens holds 10"),
        ("bert", {"name": "hot", "grid": [3, 3]}, "inputs differ in length"),
        ("gpt2", {"name": "hot", "fold": 4}, "would look ahead"),
        ("masked", {"name": "hot"}, "a mask leaves patches out"),
        ("masked", {"name": "tga"}, "a mask leaves patches out"),
    ],
)
def test_what_cannot_work_is_refused_by_layer_before_weights_are_read(
    family: str,
    attention: dict[str, object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    video = HOSTS["videomae"]
    masked = TinyModel(video.config, "VideoMAEForPreTraining", video.options)
    (masked if family == "masked" else HOSTS[family]).build().save_pretrained(tmp_path / "dense")
    source = SourceModel.open(str(tmp_path / "dense"))
    monkeypatch.setattr(WeightStore, "tensor", lambda *_: pytest.fail("a weight was read"))
    recipe = {"attention": attention, "calibration": {"source": "none"}}
    with pytest.raises(PlanError) as caught:
        make_plan(Convert.model_validate(recipe), source)
    assert said in caught.value.message
    layers = caught.value.message.splitlines()[1:]
    assert layers
    assert all(line.strip().startswith(("-", "`")) for line in layers)
