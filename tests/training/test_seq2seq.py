"""Texts made of others: labels, padding, measuring, and an L-product decoder from scratch."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM

from tcompress.api import evaluate
from tcompress.data.encoding import encode_seq2seq
from tcompress.data.inputs import IGNORED, collate, inputs_of
from tcompress.data.sentences import PLAIN
from tcompress.data.synthetic import COPY, copy_rows
from tcompress.errors import DataError
from tcompress.models import SourceModel
from tcompress.own_models.architecture import open_architecture
from tcompress.training.losses import _counts
from tcompress.training.objectives import OBJECTIVES, Observed, Setting
from tcompress.training.setup import set_up
from tcompress.training.tasks import TASKS
from tests.support.cli import error, run
from tests.support.evaluation import loaded, rows_file
from tests.support.model_folders import model_folder, sentences
from tests.support.scratch import architecture
from tests.support.training import settings, train

FAMILIES = ("t5", "bart")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two encoders with decoders, a decoder alone, and pairs whose targets are shorter."""
    folder = tmp_path_factory.mktemp("seq2seq")
    for family in (*FAMILIES, "gpt2"):
        model_folder(family, folder / family)
    texts = sentences(24)
    targets = [" ".join(text.split()[: 1 + index % 5]) for index, text in enumerate(texts)]
    rows_file(folder / "pairs.jsonl", input=texts, summary=targets)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_the_model_s_own_class(place: Path, family: str) -> None:
    """Which shifts labels by itself, and counts no padding."""
    model, _ = loaded(place / family, "AutoModelForSeq2SeqLM")
    source = SourceModel.open(str(place / family))
    encoder = PLAIN.reader(source, inputs_of(source), 16)
    texts = sentences(5)
    targets = [" ".join(text.split()[: 1 + index]) for index, text in enumerate(texts)]
    rows = encode_seq2seq(source, encoder, texts, targets, "texts")
    assert len({len(row["labels"]) for row in rows}) > 1
    batch = collate(rows, 0)
    labels = batch.pop("labels")
    assert (labels == IGNORED).any()
    with torch.no_grad():
        outputs = Observed(model(**batch))
        theirs = model(**{k: v for k, v in batch.items() if "decoder" not in k}, labels=labels)
    ours = TASKS["seq2seq"]().loss(outputs, {"labels": labels})
    assert_close(ours / (labels != IGNORED).sum(), theirs.loss)


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_each_pair_alone(place: Path, family: str) -> None:
    scores = evaluate([place / family], "seq2seq", place / "pairs.jsonl", save=False, bootstrap=0)
    found = {metric.name: metric.value for metric in scores[0].metrics}
    assert [*found] == ["token_accuracy", "cross_entropy", "exact_match"]
    model, tokenizer = loaded(place / family, "AutoModelForSeq2SeqLM")
    hits = losses = count = same = 0.0
    for line in (place / "pairs.jsonl").read_text().splitlines():
        text, target = (tokenizer(part)["input_ids"] for part in json.loads(line).values())
        with torch.no_grad():
            output = model(torch.tensor([text]), labels=torch.tensor([target]))
            written = model.generate(torch.tensor([text]), max_new_tokens=20, do_sample=False)
        hits += int((output.logits[0].argmax(-1) == torch.tensor(target)).sum())
        losses += float(output.loss) * len(target)
        same += [t for t in written[0].tolist() if t > 2] == [t for t in target if t > 2]
        count += len(target)
    assert found["token_accuracy"] == pytest.approx(hits / count)
    assert found["cross_entropy"] == pytest.approx(losses / count, rel=1e-5)
    assert found["exact_match"] == pytest.approx(same / 24)


def test_two_models_agree_at_the_targets_tokens(place: Path, tmp_path: Path) -> None:
    model_folder("bart", tmp_path / "again")
    models = [place / "bart", tmp_path / "again"]
    scores = evaluate(models, "seq2seq", place / "pairs.jsonl", save=False, exact_match=False)
    found = {metric.name: metric.value for metric in scores[1].metrics}
    assert (found["agreement"], "exact_match" in found) == (1.0, False)
    assert found["kl"] == pytest.approx(0, abs=1e-9)


def test_mistakes_are_one_line_before_any_work(place: Path) -> None:
    what = "is a `GPT2LMHeadModel`, and the task `seq2seq` needs an encoder with a decoder"
    hint = "give a model such as T5 or BART, or choose another task (`causal-lm`: text alone)"
    measured = ("--task", "seq2seq", "--data", place / "pairs.jsonl")
    done = run("evaluate", place / "gpt2", *measured, "-q")
    assert (done.code, done.err) == (2, error(f"`{place / 'gpt2'}` {what}", hint))
    done = run("evaluate", place / "t5", *measured, "--runtime", "onnx", "-q")
    assert "the task `seq2seq` is measured in PyTorch alone" in done.err


# ------------------------------------------------------------- training
def _options(place: Path, family: str) -> dict[str, Any]:
    """Settings of a run whose teacher is the model itself."""
    data = {"source": [str(place / "pairs.jsonl")]}
    return {"task": "seq2seq", "steps": 3, "teacher": str(place / family), "data": data}


@pytest.mark.parametrize("family", ["bart", pytest.param("t5", marks=pytest.mark.grid)])
def test_it_is_trained_with_a_teacher_of_one_vocabulary_too(
    place: Path, tmp_path: Path, family: str
) -> None:
    how = {**_options(place, family), "learning_rate": 1e-2, "evaluate_every": 3}
    done = train(place / family, tmp_path / "out", **how)
    assert done.facts.objectives == {"task": 1.0, "hidden": 1.0, "logits": 1.0}
    first, *_, last = (point.validation for point in done.facts.curve)
    assert last < first
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == type(loaded(place / family, "AutoModelForSeq2SeqLM")[0]).__name__


def test_a_student_imitates_itself_perfectly_however_texts_are_padded(place: Path) -> None:
    """States of encoder and decoder have masks of their own, of one length or of two."""
    source = SourceModel.open(str(place / "bart"))
    setup = set_up(source, [source], settings(**_options(place, "bart")), None)
    assert setup.observer.decodes == [False, False, True, True]
    assert not setup.data.train.is_fixed
    assert setup.objectives[-1][0].unit == "targets"
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = {"attention_mask": mask, "decoder_attention_mask": mask.flip(0)}
    student = Observed(states=[torch.ones(2, 3, 4)] * 2, decodes=[False, True])
    teacher = Observed(
        states=[2 * torch.ones(2, 3, 4) * part[..., None] for part in batch.values()]
    )
    found = OBJECTIVES["hidden"](Setting()).loss(batch, student, teacher)
    assert float(found) == pytest.approx(5 * 0.25)  # nothing is counted where a teacher has zeros
    logits = [Observed(SimpleNamespace(logits=torch.zeros(2, 3, 5))) for _ in range(2)]
    logits[0].output.logits[0, 2, 0] = 9.0  # beyond the source's end, and not beyond the target's
    setting = Setting(per_token=True, per_target=True)
    assert float(OBJECTIVES["logits"](setting).loss(batch, *logits)) > 1


def test_states_of_a_decoder_are_a_mean_over_its_own_tokens() -> None:
    masks = [torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.tensor([[1, 0], [1, 1]])]
    batch = dict(zip(("attention_mask", "decoder_attention_mask"), masks, strict=True))
    states = [torch.ones(*mask.shape, 4) for mask in masks]
    student = Observed(states=[states[0], 0.5 * states[1]], decodes=[False, True])
    teacher = Observed(states=[2 * states[0], states[1]])
    sums = OBJECTIVES["hidden"](Setting()).sums(batch, student, teacher)
    assert sum(float(total) / _counts(batch)[unit] for unit, total in sums.items()) == 0.25


# ------------------------------------------------------------- from scratch
def test_words_begin_and_end_as_the_tokenizer_writes_them() -> None:
    words = {"words": "builtin", "size": 50}
    sizes: dict[str, Any] = {"class": None, "vocab_size": None, "tokenizer": words}
    sizes |= dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"))
    sizes |= dict.fromkeys(("intermediate_size", "max_position_embeddings", "num_labels"))
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    bart = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    config = open_architecture(architecture(**{**sizes, **bart, "model_type": "bart"}), 0).config
    assert [getattr(config, name) for name in names] == [0, 2, 3, 3]
    assert config.forced_eos_token_id == 3
    t5 = {"d_model": 16, "num_layers": 1, "model_type": "t5"}
    config = open_architecture(architecture(**{**sizes, **t5}), 0).config
    assert [getattr(config, name) for name in names[2:]] == [3, 0]


def test_the_copy_task_has_no_text_twice() -> None:
    parts = {split: copy_rows(split) for split in ("train", "validation", "test")}
    assert {name: len(rows) for name, rows in parts.items()} == {
        "train": 40_000, "validation": 1000, "test": 1000
    }  # fmt: skip
    assert len({text for rows in parts.values() for text in rows["source"]}) == 42_000
    assert parts["test"]["source"] == parts["test"]["target"]
    with pytest.raises(DataError, match=f"`{COPY}` has no split `dev`"):
        copy_rows("dev")


@pytest.mark.parametrize("variant", ["smoke", pytest.param("dense", marks=pytest.mark.grid)])
def test_the_recipe_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("architecture.d_model=16", "architecture.encoder_layers=1", "finetune.steps=2",
             "architecture.decoder_layers=1", "finetune.data.samples=40", "evaluate.0.limit=8",
             "architecture.encoder_ffn_dim=32", "architecture.decoder_ffn_dim=32")  # fmt: skip
    changes = [word for change in small for word in ("--set", change)]
    done = run("run", "scratch/copy-lprod", "--variant", variant, *changes, "--json", "-q")
    assert done.code == 0, done.err
    report = done.document["reports"][0]
    assert [metric["name"] for metric in report["metrics"]] == [
        "token_accuracy", "cross_entropy", "exact_match"
    ]  # fmt: skip
    layers = [layer["name"] for layer in report["layers"]]
    sliced = [name for name in layers if "decoder.layers.0.encoder_attn." in name]
    assert len(sliced) == (4 if variant == "smoke" else 0)  # cross-attention too
