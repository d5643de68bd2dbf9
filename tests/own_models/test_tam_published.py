"""TAM as published: padding, attention maps, its recipe, and mistakes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

import tcompress
from tcompress.artifact.manifest import read_manifest
from tcompress.errors import DataError, InputError
from tcompress.own_models.configs import TCompressTamConfig
from tcompress.own_models.tam import (
    TCompressTamForPreTraining,
    TCompressTamForSequenceClassification,
)
from tests.support.cli import run
from tests.support.evaluation import rows_file
from tests.support.model_folders import sentences

SIZES: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 12, "attention_size": 5, "num_hidden_layers": 2, "cores": 2,
    "intermediate_size": 16, "max_position_embeddings": 24, "memory_length": 12,
    "semantics_length": 6, "initializer_range": 0.4,
}  # fmt: skip
LENGTHS = ((6, 3, 4), (4, 2, 3))  # of the three texts: the first query is longer than D


def _model(kind: Any = TCompressTamForSequenceClassification, **options: Any) -> Any:
    torch.manual_seed(0)
    model = kind(TCompressTamConfig(**SIZES, **options)).double().eval()
    with torch.no_grad():  # biases, and cores that differ
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def _batch(lengths: Sequence[tuple[int, int, int]] = LENGTHS) -> dict[str, Tensor]:
    longest = max(map(sum, lengths))
    rows = [[text for text, count in enumerate(row) for _ in range(count)] for row in lengths]
    types = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    ids = torch.randint(5, 30, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": types}


@pytest.mark.parametrize("without", ["nothing", "semantic-fusing", "query-alignment"])
def test_a_padded_batch_equals_single_examples(without: str) -> None:
    """That single ones are the paper's, `tests/reference` says."""
    model, batch = _model(without=without), _batch()
    with torch.no_grad():
        together = model.model(**batch).last_hidden_state
        for row, lengths in enumerate(LENGTHS):
            alone = {name: x[row : row + 1, : sum(lengths)] for name, x in batch.items()}
            single = model.model(**alone).last_hidden_state[0, : lengths[0]]
            torch.testing.assert_close(together[row, : lengths[0]], single)


def test_attention_maps_are_returned_on_request() -> None:
    model, batch = _model(), _batch()
    with torch.no_grad():
        assert model(**batch).attentions is None
        maps = model(**batch, output_attentions=True).attentions
    assert [item.shape for item in maps] == [(2, 1, 13, 13)] * 2
    for row, (first, second, _) in enumerate(LENGTHS):
        shown = maps[0][row, 0, :first]
        assert (shown[:, first + second :] == 0).all()
        seen = min(first, SIZES["attention_size"])  # later queries see nothing
        assert (shown[:seen, : first + second] != 0).all()
        assert (shown[seen:] == 0).all()


@pytest.mark.parametrize("without", ["nothing", "semantic-fusing"])
def test_its_layers_take_structures(without: str, tmp_path: Path) -> None:
    """Where weights have the rank that is asked for, it computes what it did."""
    model, batch = _model(without=without).float(), _batch()
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            left, values, right = torch.linalg.svd(module.weight.data, full_matrices=False)
            module.weight.data = left[:, :2] * values[:2] @ right[:2]
    model.save_pretrained(tmp_path / "dense")
    done = tcompress.convert(
        tmp_path / "dense", method="svd", rank=2, calibration="none", output=tmp_path / "small"
    )
    assert len(done.manifest.plan.layers) >= 2 * 4
    small = AutoModelForSequenceClassification.from_pretrained(done.folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(small(**batch).logits, model(**batch).logits)


def test_masked_words_alone_are_predicted_on_request() -> None:
    model, batch = _model(TCompressTamForPreTraining), _batch()
    hidden = torch.zeros_like(batch["input_ids"])
    hidden[0, 2] = hidden[1, 1] = 1
    with torch.no_grad():
        all_words = model(**batch)
        some = model(**batch, masked_positions=hidden)
    assert all_words.seq_relationship_logits.shape == (2, 2)
    torch.testing.assert_close(some.prediction_logits, all_words.prediction_logits[hidden.bool()])


# ---------------------------------------------------------------- mistakes
def test_a_missing_third_input_is_named() -> None:
    model, batch = _model(), _batch()
    two = batch["token_type_ids"].clamp(max=1)
    with pytest.raises(DataError, match="third input is missing: 2 of 2 examples have no"):
        model(**{**batch, "token_type_ids": two})
    del batch["token_type_ids"]
    with pytest.raises(DataError, match="was not told them apart"):
        model(**batch)


def test_an_unknown_ablation_is_named() -> None:
    with pytest.raises(InputError, match="`without: softmax` is not known; allowed are `nothing`"):
        TCompressTamConfig(without="softmax")


def _sets(folder: Path, **more: str) -> list[str]:
    texts = sentences(36)
    rows = {"Tweet": texts[:12], "Question": texts[12:24], "Answer": texts[24:]}
    file = rows_file(folder / "rows.jsonl", **rows)
    places = ("pretrain.data.source", "finetune.data.source")
    said = {
        "architecture.tokenizer": f"{{words: {file}, size: 60}}",
        **dict.fromkeys(places, f"[{file}]"),
        "evaluate.0.data": str(file),
        "evaluate.0.limit": "11",
        "pretrain.steps": "2",
        "finetune.steps": "2",
        "architecture.hidden_size": "12",
        "architecture.num_hidden_layers": "1",
        "architecture.intermediate_size": "16",
        "report": str(folder / "page.html"),
        **more,
    }
    return [part for key, value in said.items() for part in ("--set", f"{key}={value}")]


def test_the_recipe_pretrains_trains_measures_and_draws(tmp_path: Path) -> None:
    said = _sets(tmp_path, **{"architecture.attention_size": "8"})
    done = run("run", "scratch/tweetqa-tam", "--variant", "smoke", "-o", tmp_path / "out", *said)
    assert done.code == 0, done.err
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert [item.task for item in manifest.training] == ["pretraining", "response-selection"]
    assert {"recall@1", "recall@5"} <= {metric.name for metric in manifest.metrics}
    shown = manifest.attention_map
    assert shown is not None
    assert shown.rows[0] == "[CLS]"
    assert len(shown.rows) < len(shown.columns)
    page = (tmp_path / "page.html").read_text()
    assert "What attention looks at" in page
    assert "weights of queries (rows) and keys (columns)" in page
    before = json.loads((tmp_path / "out-pretrained" / "config.json").read_text())
    assert before["architectures"] == ["TCompressTamForPreTraining"]
    again = run("run", "scratch/tweetqa-tam", "--variant", "smoke", "-o", tmp_path / "out", *said)
    assert again.code == 0, again.err
    assert "is already trained" in again.err + again.out


@pytest.mark.slow
def test_a_bert_is_pretrained_likewise(tmp_path: Path) -> None:
    said = _sets(tmp_path)
    done = run("run", "scratch/tweetqa-tam", "--variant", "softmax", "-o", tmp_path / "out", *said)
    assert done.code == 0, done.err
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert [item.task for item in manifest.training] == ["pretraining", "response-selection"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("{text: Tweet, pair: Answer}", "reads three texts (query, response, semantics), and"),
        ("{text: Tweet, pair: Answer, semantics: Topic}", "has no column `Topic`"),
    ],
)
def test_data_without_the_third_text_is_refused_before_any_work(
    columns: str, words: str, tmp_path: Path
) -> None:
    said = _sets(tmp_path, **{"pretrain.data.columns": columns})
    done = run("run", "scratch/tweetqa-tam", "-o", tmp_path / "out", *said)
    assert done.code == 2
    assert words in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]
