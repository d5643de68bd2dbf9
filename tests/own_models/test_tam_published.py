"""TAM as published: against a reference that was written from the paper alone, and its mistakes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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


def _array(x: Tensor) -> Any:
    return x.detach().numpy()


def _by_reference(model: Any, batch: dict[str, Tensor], row: int) -> Any:
    """States of one example's query."""
    reference = pytest.importorskip("tests.reference.tam")
    body, config = model.model, model.config
    first, second, third = LENGTHS[row]
    ids, types = (batch[name][row] for name in ("input_ids", "token_type_ids"))
    embedded = body.embed_tokens(ids) + body.embed_positions.weight[: len(ids)]
    embedded = _array(body.norm(embedded + body.embed_types(types)))
    pair = first + second
    streams, query = (embedded[:first], embedded[first:pair]), embedded[:first]
    semantics = embedded[pair : pair + third]
    wr, wz, wn = (_array(part) for part in body.gru.inputs.weight.chunk(3))
    br, bz, bn = (_array(part) for part in body.gru.inputs.bias.chunk(3))
    ur, uz = (_array(part) for part in body.gru.gates.weight.chunk(2))
    gru = {"wr": wr, "wz": wz, "wn": wn, "br": br, "bz": bz, "bn": bn}
    gru |= {"ur": ur, "uz": uz, "un": _array(body.gru.candidate.weight)}
    memory = reference.gru_memory(streams, gru)
    aligned = config.without != "query-alignment"
    fused = config.without != "semantic-fusing"
    for layer in body.layers:
        own = layer.attention
        weights = {}
        for name in ("q", "k", "s", *("v" * fused)):
            projection = getattr(own, f"{name}_proj")
            weights |= {name: _array(projection.weight).T, f"b{name}": _array(projection.bias)}
        output = own.o_proj if fused else own.split_proj
        if not fused:
            weights |= {"v": weights["k"]}  # not used
            columns = _array(output.weight).T.reshape(
                config.semantics_length, -1, output.out_features
            )
            weights["o"] = columns[:third, :pair].reshape(-1, output.out_features)
        size = config.attention_size
        places = first if aligned else size
        cores = [reference.diagonal_core(_array(g[0]), places, size) for g in own.core]
        norms = {
            name: {"gamma": _array(norm.weight), "beta": _array(norm.bias)}
            for name, norm in (("norm1", layer.attention_norm), ("norm2", layer.mlp_norm))
        }
        all_weights = {
            "attention": weights, "bias": _array(output.bias), **norms,
            "w1": _array(layer.mlp.fc1.weight).T, "b1": _array(layer.mlp.fc1.bias),
            "w2": _array(layer.mlp.fc2.weight).T, "b2": _array(layer.mlp.fc2.bias),
        }  # fmt: skip
        if fused:
            all_weights["dense"] = _array(output.weight).T
        how = {"aligned": aligned, "fused": fused}
        query = reference.encoder_layer(query, memory, semantics, all_weights, cores, **how)
    return torch.from_numpy(query)


@pytest.mark.parametrize("without", ["nothing", "semantic-fusing", "query-alignment"])
def test_a_padded_batch_is_the_reference_example_by_example(without: str) -> None:
    model, batch = _model(without=without), _batch()
    with torch.no_grad():
        states = model.model(**batch).last_hidden_state
        for row, (first, *_) in enumerate(LENGTHS):
            right = _by_reference(model, batch, row)
            torch.testing.assert_close(states[row, :first], right, atol=1e-10, rtol=1e-10)


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
