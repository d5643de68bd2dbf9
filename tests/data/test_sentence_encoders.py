"""Sentence encoders read texts, and make embeddings, as their folder says."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file
from torch import Tensor

import tcompress
from tcompress.artifact.manifest import read_manifest
from tcompress.blockwise.output_sampler import sampler_of
from tcompress.data.calibration import load_batches
from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import DataError
from tcompress.latency.sizes import RandomInputs
from tcompress.models import SourceModel
from tcompress.models.names import auxiliary_files, carry_files
from tcompress.options.convert_options import Calibration
from tcompress.training.losses import Losses
from tests.support.evaluation import loaded
from tests.support.sentence_folders import (
    FOLDERS,
    HOSTS,
    NARROW,
    OTHERS,
    PROMPTS,
    WIDTH,
    base,
    similar_pairs,
    with_dense,
    with_text_settings,
    write_json,
)
from tests.support.training import losses_of, text_file

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return similar_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl", 16)


def rows_of(pairs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in pairs.read_text().splitlines()]


def states(folder: Path, text: str, limit: int = 64) -> Tensor:
    """States of a text alone, as Transformers gives them.  # (tokens, d)."""
    model, tokenizer = loaded(folder, "AutoModel")
    inputs = tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
    with torch.no_grad():
        found: Tensor = model(**inputs).last_hidden_state[0]
    return found


def _dense(folder: Path, text: str) -> Tensor:
    stored = load_file(folder / "2_Dense" / "model.safetensors")
    pooled = states(folder, text).mean(0)
    return torch.tanh(stored["linear.weight"] @ pooled + stored["linear.bias"])


def _joined(folder: Path, text: str) -> Tensor:
    rows = states(folder, text)
    steps = torch.arange(1.0, len(rows) + 1)
    weighted = (steps @ rows) / steps.sum()
    stored = load_file(folder / "2_Dense" / "model.safetensors")
    return stored["linear.weight"] @ torch.cat([weighted, rows[-1], rows.sum(0) / len(rows) ** 0.5])


def _prompt_left_out(folder: Path, text: str) -> Tensor:
    rows = states(folder, PROMPTS["sts"] + text)[4:]  # the start, and three words
    steps = torch.arange(5.0, 5 + len(rows))
    return torch.cat([rows[0], rows.mean(0), (steps @ rows) / steps.sum()])


def _layer_norm(folder: Path, text: str) -> Tensor:
    stored = torch.load(folder / "2_LayerNorm" / "pytorch_model.bin")
    pooled = states(folder, text).mean(0)
    centred = (pooled - pooled.mean()) / (pooled.var(unbiased=False) + 1e-5).sqrt()
    return centred * stored["norm.weight"] + stored["norm.bias"]


def _shortened(folder: Path, text: str) -> Tensor:
    pooled = states(folder, text).mean(0)
    return (pooled / pooled.norm())[:5]


EXPECTED: dict[str, Callable[[Path, str], Tensor]] = {
    "prompts": lambda at, text: states(at, PROMPTS["sts"] + text).mean(0),
    "lengths": lambda at, text: states(at, text, 6).mean(0),
    "lowercase": lambda at, text: states(at, text.lower()).mean(0),
    "old layout": lambda at, text: states(at / "0_Transformer", text, 7)[0],
    "dense": _dense,
    "joined": _joined,
    "prompt left out": _prompt_left_out,
    "layer norm": _layer_norm,
    "shortened": _shortened,
    **dict.fromkeys(("dot", "euclidean", "manhattan"), lambda at, text: states(at, text).mean(0)),
}


def _alike(case: str, one: Tensor, two: Tensor) -> float:
    gap = one - two
    if case in ("dot", "shortened"):
        return float(one @ two)
    if case == "euclidean":
        return -float(gap.square().sum().sqrt())
    if case == "manhattan":
        return -float(gap.abs().sum())
    return float(torch.cosine_similarity(one, two, 0))


def measured(folder: Path, pairs: Path, **options: Any) -> tuple[dict[str, float], Any]:
    options = {"task": "sts", "data": pairs, "bootstrap": 0, **options}
    scores = tcompress.evaluate([folder], save=False, **options)[0].sets[0]
    return {metric.name: metric.value for metric in scores.metrics}, scores.protocol


@pytest.mark.parametrize("case", EXPECTED)
def test_similarity(case: str, pairs: Path, tmp_path: Path) -> None:
    folder = (FOLDERS | OTHERS)[case](tmp_path / "model")
    rows, embed = rows_of(pairs), partial(EXPECTED[case], folder)
    alike = [_alike(case, embed(row["sentence1"]), embed(row["sentence2"])) for row in rows]
    ours, protocol = measured(folder, pairs)
    scores = [row["score"] for row in rows]
    assert ours["pearson"] == pytest.approx(scipy.stats.pearsonr(alike, scores).statistic, abs=1e-5)
    assert ours["spearman"] == pytest.approx(scipy.stats.spearmanr(alike, scores).statistic)
    assert protocol["max_length"] == {"lengths": 6, "old layout": 7}.get(case, 64)
    assert protocol.get("prompt", "") == (PROMPTS["sts"] if case.startswith("prompt") else "")


def test_queries_and_documents_have_prompts_of_their_own(pairs: Path, tmp_path: Path) -> None:
    folder = FOLDERS["prompts"](tmp_path / "model")
    columns = {"query": "sentence1", "document": "sentence2"}
    one, two = (
        torch.stack([states(folder, PROMPTS[name] + row[key]).mean(0) for row in rows_of(pairs)])
        for name, key in columns.items()
    )
    alike = torch.cosine_similarity(one[:, None], two[None], dim=-1)
    ranks = (alike >= alike.diag()[:, None]).sum(1).numpy()
    ours, protocol = measured(folder, pairs, task="retrieval")
    assert ours["mrr@10"] == pytest.approx(np.where(ranks <= 10, 1 / ranks, 0).mean())
    assert (protocol["prompt"], protocol["prompt_of_second"]) == (
        PROMPTS["query"],
        PROMPTS["document"],
    )


def test_encoders_read_their_own_lengths_or_shorter_ones(pairs: Path, tmp_path: Path) -> None:
    short, long = FOLDERS["lengths"](tmp_path / "short"), FOLDERS["mean"](tmp_path / "long")
    assert measured(short, pairs, max_length=4)[1]["max_length"] == 4
    assert measured(short, pairs, max_length=40)[1]["max_length"] == 6
    options: dict[str, Any] = {"task": "sts", "data": pairs, "bootstrap": 0, "save": False}
    found = [item.sets[0] for item in tcompress.evaluate([short, long], **options)]
    assert [item.protocol["max_length"] for item in found] == [6, 64]
    alone = measured(long, pairs)[0]
    assert {name: alone[name] for name in ("spearman", "pearson")} == {
        metric.name: metric.value for metric in found[1].metrics if metric.name in alone
    }


def _starts(folder: Path) -> list[int]:
    tokenizer = loaded(folder, "AutoModel")[1]
    return tokenizer(PROMPTS["sts"])["input_ids"][:-1]


def test_calibration_and_times_are_of_what_the_encoder_reads(tmp_path: Path) -> None:
    folder = with_text_settings(
        base(tmp_path / "model", prompts=PROMPTS, default_prompt_name="sts"), max_seq_length=8
    )
    source = SourceModel.open(str(folder))
    inputs = RandomInputs.of(source, source)
    assert (inputs.longest, inputs.fitting((32, 128))) == (8, (8,))
    file = text_file(tmp_path / "texts.txt", ["fox " * 30, "a red fox", "stone"] * 4)
    data = load_batches(source, Calibration(source=file, samples=12))
    for batch in data.batches:
        assert batch["input_ids"].shape[1] <= 8
        assert all(row[:4] == _starts(folder) for row in batch["input_ids"].tolist())


def test_healing_reads_and_compares_what_the_encoder_does(tmp_path: Path) -> None:
    """Through pooling and Dense."""
    folder = with_text_settings(
        with_dense(
            base(tmp_path / "model", _LEFT_OUT, "Dense", prompts=PROMPTS, default_prompt_name="sts")
        ),
        max_seq_length=8,
    )
    file = text_file(tmp_path / "texts.txt", ["fox " * 30, "a red fox", "stone"] * 8)
    losses: Losses = losses_of(
        folder, data={"source": [file]}, objectives={"embedding": 1.0}, teacher=str(folder)
    )
    setup = losses.setup
    rows = [setup.data.train[index][0]["input_ids"] for index in range(len(setup.data.train))]
    assert {row[:4].tolist() == _starts(folder) and len(row) <= 8 for row in rows} == {True}
    hidden, mask = torch.randn(1, 6, WIDTH), torch.ones(1, 6)
    sentences = setup.objectives[0][0].setting.sentences
    stored = load_file(folder / "2_Dense" / "model.safetensors")
    vector = torch.tanh(stored["linear.weight"] @ hidden[0, 4:].mean(0) + stored["linear.bias"])
    torch.testing.assert_close(sentences(hidden, mask)[0], vector / vector.norm())


_LEFT_OUT = {"embedding_dimension": WIDTH, "pooling_mode": "mean", "include_prompt": False}


def test_agreement_and_gradients_see_what_is_left_after_dense(tmp_path: Path) -> None:
    folder = FOLDERS["dense"](tmp_path / "model")
    sampler = sampler_of(SourceModel.open(str(folder)))
    weight = load_file(folder / "2_Dense" / "model.safetensors")["linear.weight"]
    unseen = torch.linalg.svd(weight)[2][NARROW:]  # directions
    hidden = torch.randn(6, 5, WIDTH, requires_grad=True)
    batch = {"attention_mask": torch.ones(6, 5)}
    ((vectors, gradient),) = sampler(SimpleNamespace(last_hidden_state=hidden), batch)
    (moved,) = torch.autograd.grad(vectors, hidden, gradient)
    assert float(moved.norm()) > 0.1
    torch.testing.assert_close(moved @ unseen.T, torch.zeros(6, 5, len(unseen)))
    dense, other = (
        SimpleNamespace(last_hidden_state=states)
        for states in (hidden.detach(), hidden.detach() + 3 * unseen[0])
    )
    batch = dict(sampler.with_variants(batch))
    for output in (dense, other):
        output.last_hidden_state = output.last_hidden_state.repeat(3, 1, 1)
    assert sampler.change(dense, other, batch) == pytest.approx(0, abs=1e-8)


def test_the_old_layout_is_written_as_today(tmp_path: Path) -> None:
    folder = FOLDERS["old layout"](tmp_path / "model")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {}})
    inner = SourceModel.open(str(folder)).folder
    assert inner == folder / "0_Transformer"
    carry_files(inner, auxiliary_files(inner), tmp_path / "made")
    files = {
        str(path.relative_to(tmp_path / "made")) for path in (tmp_path / "made").rglob("*.json")
    }
    assert files == {
        *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
        *("1_Pooling/config.json", "tokenizer.json", "tokenizer_config.json"),
    }
    modules = json.loads((tmp_path / "made" / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", {"a": 1}, "is no list of sentence-transformers modules"),
        ("1_Pooling/config.json", None, "1_Pooling/config.json` is missing or no object"),
        ("sentence_bert_config.json", {"max_seq_length": "8"}, "has `8` as `max_seq_length`"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, "expected texts by name"),
        ("config_sentence_transformers.json", {"default_prompt_name": "a"}, "`query`, `document`"),
        ("2_Dense/model.safetensors", None, "no `model.safetensors` or `pytorch_model.bin` with"),
        ("2_Dense/config.json", {"activation_function": "own.Act"}, "has the activation `own.Act`"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "`module_input_name`"),
        ("3_Normalize/config.json", {"module_input_name": "token_embeddings"}, "`module_input"),
        (
            "sentence_bert_config.json",
            {"max_seq_length": 9, "processing_kwargs": {"text": {"max_length": 5}}},
            "says how texts are read by `processing_kwargs`, not known here",
        ),
        ("sentence_bert_config.json", {"config_args": {"hidden_act": "relu"}}, "`config_args`"),
    ],
)
def test_files_that_cannot_be_right(file: str, content: Any, message: str, tmp_path: Path) -> None:
    folder = with_dense(base(tmp_path / "model", {"pooling_mode": "mean"}, "Dense", "Normalize"))
    if content is None:
        (folder / file).unlink()
    else:
        write_json(folder / file, content)
    source = SourceModel.open(str(folder))
    with pytest.raises(DataError, match=message):
        SentenceEncoder.of(source)


def test_a_dense_of_another_width(tmp_path: Path) -> None:
    folder = with_dense(base(tmp_path / "model", {"pooling_mode": ["mean", "max"]}, "Dense"))
    sentences = SentenceEncoder.of(SourceModel.open(str(folder)))
    with pytest.raises(DataError, match="takes vectors of width 32, and pooling gives 64"):
        sentences(torch.zeros(1, 3, WIDTH), torch.ones(1, 3))


BODIES = {
    "qwen3": "Qwen3Model",
    "qwen3 with a head": "Qwen3Model",
    "gpt2": "GPT2Model",
    "t5": "T5EncoderModel",
    "t5 with a decoder": "T5EncoderModel",
    "bert with a head": "BertModel",
}


@pytest.mark.often("qwen3", "t5 with a decoder")
@pytest.mark.parametrize("host", BODIES)
def test_hosts_are_encoders_in_every_step(host: str, tmp_path: Path) -> None:
    """Measured are changes of embeddings, and texts are read one by one, through prompts."""
    folder = HOSTS[host](tmp_path / "model")
    source = SourceModel.open(str(folder))
    assert source.model_class.__name__ == BODIES[host]
    assert not RandomInputs.of(source, source).inputs.decoder
    file = text_file(tmp_path / "texts.txt", [f"w{20 + index} a red fox" for index in range(24)])
    (batch, *_) = load_batches(source, Calibration(source=file, samples=12)).batches
    output = source.model_class.from_pretrained(folder, dtype=torch.float32)(**batch)
    ((vectors, _),) = sampler_of(source)(output, batch)
    assert vectors.shape == (len(batch["input_ids"]), NARROW if host[:2] == "t5" else WIDTH)
    losses: Losses = losses_of(folder, data={"source": [file]}, teacher=str(folder))
    setup = losses.setup
    assert [objective.name for objective, _ in setup.objectives] == ["hidden", "embedding"]
    assert len(setup.data.train) + len(setup.data.validation) == 24
    row = setup.data.train[0][0]["input_ids"].tolist()
    assert row[:4] == _starts(folder) if SentenceEncoder.of(source).default.text else len(row) == 6


@pytest.mark.parametrize("host", ["qwen3 with a head", "t5 with a decoder"])
def test_heads_and_decoders_that_no_encoder_runs_stay_behind(host: str, tmp_path: Path) -> None:
    folder, made = HOSTS[host](tmp_path / "model"), tmp_path / "made"
    tcompress.convert(folder, method="svd", target=0.25, output=made, calibration="none")
    stored = " ".join(load_file(made / "model.safetensors"))
    assert "tc_" in stored
    assert "lm_head" not in stored
    assert "decoder" not in stored
    warnings = read_manifest(made).plan.warnings
    assert any("as sentence-transformers runs it" in text for text in warnings)
    assert json.loads((made / "config.json").read_text())["architectures"] == [BODIES[host]]
    assert SourceModel.open(str(made), converted=True).model_class.__name__ == BODIES[host]


def test_a_head_for_tokens_is_still_measured(tmp_path: Path) -> None:
    folder = HOSTS["qwen3 with a head"](tmp_path / "model")
    file = text_file(tmp_path / "texts.txt", ["a red fox runs", "over the old stone bridge"] * 4)
    (scores,) = tcompress.evaluate([folder], task="perplexity", data=file, save=False)
    assert scores.sets[0].metrics


def test_classifiers_keep_their_head(tmp_path: Path) -> None:
    folder = base(tmp_path / "model", kind="BertForSequenceClassification")
    assert SourceModel.open(str(folder)).model_class.__name__ == "BertForSequenceClassification"
    # That score pairs, or predict tokens of sparse embeddings, by the word of today's layout.
    folder = base(tmp_path / "sparse", kind="BertForMaskedLM")
    with_text_settings(folder, transformer_task="fill-mask")
    assert SourceModel.open(str(folder)).model_class.__name__ == "BertForMaskedLM"
