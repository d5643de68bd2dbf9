"""What a run of training writes: healed, complete, and recorded."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.artifact.manifest import AttentionMap, read_manifest, write_manifest
from tcompress.artifact.reader import verify_files
from tcompress.errors import DataError, TrainingError, WriteError
from tcompress.reporting.model_report import report_of
from tcompress.training.losses import Losses
from tests.support.conversions import load_whole, outputs
from tests.support.evaluation import encoder, headed, labelled_file, pairs_file, rows_file
from tests.support.model_folders import sentences
from tests.support.records import metric, speed
from tests.support.tiny import TINY
from tests.support.training import (
    curve,
    small,
    small_classifier,
    small_encoder,
    taught,
    texts,
    train,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def _validations(done: Any) -> list[float]:
    return [point.validation for point in done.facts.curve]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _rows(folder: Path, classes: Sequence[Any] = (0, 1)) -> dict[str, Any]:
    """Settings of a run that learns to tell classes of sentences apart."""
    rows = labelled_file(folder / "rows.jsonl", classes=classes)
    return {"task": "classification", "data": {"source": [str(rows)]}}


@pytest.mark.often("bert")
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_healing_lowers_the_loss(family: str, tmp_path: Path) -> None:
    folder = small(family, tmp_path)
    done = train(
        folder, tmp_path / "out", data=texts(tmp_path), steps=30, learning_rate=3e-3,
        evaluate_every=10,
    )  # fmt: skip
    found = _validations(done)
    assert found[-1] < 0.8 * found[0]
    assert found[-1] == min(found) == done.facts.best
    # What is written is what was trained: its outputs are nearer to the dense model's.
    tokens = AutoTokenizer.from_pretrained(folder)
    read = tokens(sentences(20), padding=True, return_tensors="pt")
    inputs = {name: read[name] for name in ("input_ids", "attention_mask")}
    wanted, before, after = (
        outputs(AutoModel.from_pretrained(path), inputs)[0][inputs["attention_mask"].bool()]
        for path in (tmp_path / family, folder, done.folder)
    )
    assert (after - wanted).norm() < 0.9 * (before - wanted).norm()


def test_everything_that_is_written(tmp_path: Path) -> None:
    folder = small_encoder(tmp_path, pooling={"pooling_mode": "cls"})
    (folder / "notes.json").write_text("{}")
    manifest = read_manifest(folder)
    looks = AttentionMap(data="a", layer=0, rows=["b"], columns=["b"], weights=[[1.0]])
    stored = {"metrics": [metric()], "speed": [speed()], "attention_map": looks}
    measured = manifest.model_copy(update=stored)
    write_manifest(folder, measured)
    done = train(folder, tmp_path / "out", data=texts(tmp_path), seed=3, learning_rate=3e-2)
    verify_files(done.folder)
    assert AutoTokenizer.from_pretrained(done.folder)("fox")["input_ids"]
    companions = (
        "tokenizer.json",
        "tokenizer_config.json",
        "modules.json",
        "1_Pooling/config.json",
    )
    for path in companions:
        assert (done.folder / path).read_bytes() == (folder / path).read_bytes()
    written = read_manifest(done.folder)
    assert written.training == [done.facts]
    # Numbers of other weights are gone; times do not depend on weights.
    assert (written.metrics, written.speed) == ([], measured.speed)
    assert written.attention_map is None
    for name in ("source", "plan", "recipe", "fit", "calibration"):
        assert getattr(written, name) == getattr(manifest, name)
    facts = done.facts
    assert (facts.task, facts.steps, facts.samples) == (None, 4, 32)
    assert facts.teacher == str(tmp_path / "bert")
    assert facts.objectives == {"hidden": 1.0, "embedding": 1.0}
    assert facts.settings["steps"] == 4
    assert facts.settings["seed"] == 3
    assert 32 * 3 <= facts.tokens <= 32 * 16
    assert [point.step for point in facts.curve] == [0, 2, 4]
    assert [point.loss is None for point in facts.curve] == [True, False, False]
    assert facts.environment["device"] == "cpu"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert "Not healed: " in (folder / "README.md").read_text()
    card = (done.folder / "README.md").read_text()
    assert "Not healed: " not in card
    assert "Healed for 4 steps on texts.txt:text (32 examples seen), taught by bert; " in card
    assert f"validation loss on held-out data {facts.best:.4g}, " in card
    assert str(tmp_path) not in card


@pytest.mark.often("bert-float32")
@pytest.mark.parametrize(
    ("family", "dtype"), [("bert", "float32"), ("llama", "float16"), ("bert", "bfloat16")]
)
def test_what_is_stored_stays_as_it_was(family: str, dtype: str, tmp_path: Path) -> None:
    """Names, shapes and dtypes; ties are stored once."""
    options = {**TINY[family].options, "tie_word_embeddings": True}
    dense = dataclasses.replace(TINY[family], options=options).build()
    dense.save_pretrained(tmp_path / family)
    folder = small(family, tmp_path, dtype=dtype)
    done = train(folder, tmp_path / "out", data=texts(tmp_path), steps=2)
    stored, wanted = (
        {name: (item.dtype, item.shape) for name, item in _tensors(path).items()}
        for path in (done.folder, folder)
    )
    assert stored == wanted
    before, after = (json.loads((p / "config.json").read_text()) for p in (folder, done.folder))
    assert {name: after.get(name) for name in before} == before
    assert weights(done.folder) != weights(folder)


@pytest.mark.slow
def test_only_what_should_be_is_trained(tmp_path: Path) -> None:
    folder, data = small("bert", tmp_path), texts(tmp_path)
    changed = {}
    for how in ("rewritten", "blocks", "all"):
        done = train(folder, tmp_path / how, data=data, train=how, steps=2, learning_rate=0.01)
        before, after = (_tensors(path) for path in (folder, done.folder))
        changed[how] = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed["rewritten"] < changed["blocks"] < changed["all"]
    rewritten = read_manifest(folder).plan.layers  # type: ignore[union-attr]
    assert all(any(name.startswith(entry.name.rpartition(".")[0]) for entry in rewritten)
               for name in changed["rewritten"])  # fmt: skip
    assert all(".layer." in name for name in changed["blocks"])
    assert any("embeddings" in name for name in changed["all"])


@pytest.mark.often("regression")
@pytest.mark.parametrize("task", ["sts", "classification", "regression"])
def test_dense_models_are_trained(task: str, tmp_path: Path) -> None:
    folder = encoder(tmp_path / "bert", pooling={"pooling_mode": "cls"})
    options = {"task": task, "data": {"source": [str(pairs_file(tmp_path / "rows.jsonl"))]}}
    if task == "classification":
        options = _rows(tmp_path, ("no", "yes"))
    options["learning_rate"] = 3e-3
    done = train(folder, tmp_path / "out", **options)
    manifest = read_manifest(done.folder)
    assert (manifest.plan.method, manifest.plan.layers) == ("dense", ())
    assert manifest.training == [done.facts]
    assert done.facts.objectives == {"task": 1.0}
    assert done.facts.validation == ("accuracy" if task == "classification" else "spearman")
    report = report_of(done.folder)
    assert (report.method, report.source) == ("dense", str(folder))
    card = (done.folder / "README.md").read_text()
    assert "# bert, trained with tcompress" in card
    learnt = f"Fine-tuned for {task} for 4 steps on rows.jsonl"
    assert (learnt if done.facts.best_step else f"Not fine-tuned for {task}:") in card
    assert "import tcompress" not in card
    if task == "classification":
        model = AutoModelForSequenceClassification.from_pretrained(done.folder)
        assert model.config.id2label == {0: "no", 1: "yes"}
    # It can be trained again, and the record goes on.
    again = train(done.folder, tmp_path / "again", **options)
    facts = read_manifest(again.folder)
    assert facts.training == [done.facts, again.facts]
    assert facts.source == manifest.source


def test_a_task_is_learnt(tmp_path: Path) -> None:
    """Sentences whose label is said by a word."""
    words = ["fox", "tree"] * 30
    lines = [f"w{20 + index} {word} w{30 + index // 2}" for index, word in enumerate(words)]
    path = rows_file(tmp_path / "rows.jsonl", text=lines, label=words)
    how = {"steps": 40, "learning_rate": 5e-3, "evaluate_every": 10, "dropout": False}
    done = taught(encoder(tmp_path / "bert"), "classification", {"source": [str(path)]}, **how)
    assert done.facts.best == 1.0
    model = AutoModelForSequenceClassification.from_pretrained(done.folder)
    tokens = AutoTokenizer.from_pretrained(done.folder)("w50 tree w35", return_tensors="pt")
    tokens = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    assert model.config.id2label[int(model(**tokens).logits.argmax())] == "tree"


@pytest.mark.slow
def test_a_head_is_added_to_a_converted_model(tmp_path: Path) -> None:
    """The names of its layers get a prefix."""
    folder = small_encoder(tmp_path)
    done = train(folder, tmp_path / "out", **_rows(tmp_path, "abc"))
    assert done.facts.objectives == {"task": 1.0, "hidden": 1.0}
    verify_files(done.folder)
    model = load_whole(AutoModelForSequenceClassification, done.folder)
    assert model.config.num_labels == 3
    report, before = report_of(done.folder), report_of(folder)
    assert len(report.layers) == len(before.layers) == 12
    # The result heals further, against the same teacher.
    again = train(done.folder, tmp_path / "again", data=texts(tmp_path))
    verify_files(again.folder)
    assert again.facts.teacher == str(tmp_path / "bert")


@pytest.mark.slow
def test_a_classifier_is_healed_with_its_logits(tmp_path: Path) -> None:
    folder = small_classifier(tmp_path, ("a", "b", "c"))
    options = {"steps": 12, "learning_rate": 3e-3, "evaluate_every": 6}
    healed = train(folder, tmp_path / "out", data=texts(tmp_path), **options)
    assert healed.facts.objectives == {"hidden": 1.0, "logits": 1.0}
    assert _validations(healed)[-1] < _validations(healed)[0]
    taught = train(folder, tmp_path / "taught", **_rows(tmp_path, "cba"), **options)
    assert taught.facts.objectives == {"task": 1.0, "hidden": 1.0, "logits": 1.0}
    assert AutoModel.from_pretrained(taught.folder)


def test_a_task_of_another_kind_than_the_teacher(tmp_path: Path) -> None:
    """A masked language model gives a classifier no logits to imitate."""
    folder = small("bert", tmp_path)
    done = train(folder, tmp_path / "out", **_rows(tmp_path))
    assert done.facts.objectives == {"task": 1.0, "hidden": 1.0}


@pytest.mark.often("one1-same1-other1")
@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ({}, {"teacher_blocks": (1, 3)}, {"teacher_blocks": (0, 3)}),  # of the teacher's four
        # Blocks are trained alone for a quarter of the steps.
        ({"stage": "blocks"}, {"block_steps": 1}, {"stage": "blocks", "block_steps": 2}),
    ],
)
def test_what_options_mean_by_default(
    one: dict[str, Any], same: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    student = encoder(tmp_path / "bert")
    teacher = headed("bert", tmp_path / "deep", "BertModel", num_hidden_layers=4)
    options = {"teacher": str(teacher), "objectives": {"hidden": 1}, "data": texts(tmp_path)}
    first, again, third = (
        curve(train(student, tmp_path / f"out{index}", **options, **more))
        for index, more in enumerate((one, same, other))
    )
    assert first == again != third


@pytest.mark.slow
def test_blocks_first_then_all_together(tmp_path: Path) -> None:
    folder, data = small_encoder(tmp_path), texts(tmp_path)
    options = {"data": data, "steps": 20, "learning_rate": 3e-3, "evaluate_every": 20}
    done = train(folder, tmp_path / "out", block_steps=10, **options)
    assert done.facts.stage == "blocks, then end-to-end"
    assert done.facts.best < _validations(done)[0]
    assert curve(done) != curve(train(folder, tmp_path / "plain", **options))


def test_a_decoder_without_padding_token_learns_a_task(tmp_path: Path) -> None:
    folder = headed("gpt2", tmp_path / "gpt2", "GPT2Model", pad_token_id=None)
    done = train(folder, tmp_path / "out", **_rows(tmp_path), steps=2)
    model = AutoModelForSequenceClassification.from_pretrained(done.folder)
    tokens = AutoTokenizer.from_pretrained(folder)
    assert model.config.pad_token_id is not None
    assert model(**tokens(["a fox", "a red fox"], padding=True, return_tensors="pt")).logits.ndim


def test_one_class_is_nothing_to_learn(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has one class, `good`: there is nothing to tell apart"):
        train(encoder(tmp_path / "bert"), tmp_path / "out", **_rows(tmp_path, ["good"]))


@pytest.mark.slow
def test_a_head_with_one_output_is_imitated(tmp_path: Path) -> None:
    folder = small_classifier(tmp_path, labels=1)
    options = {"objectives": {"logits": 1}, "learning_rate": 3e-3, "steps": 20}
    found = _validations(train(folder, tmp_path / "out", data=texts(tmp_path), **options))
    assert 0 < found[-1] < found[0]


@pytest.mark.slow
def test_one_run_after_another_with_another_precision(tmp_path: Path) -> None:
    folder, data = small_encoder(tmp_path), texts(tmp_path)
    found = [
        train(
            folder,
            tmp_path / precision,
            data=data,
            mixed_precision=precision,
            gradient_checkpointing=precision == "bf16",
        )
        for precision in ("no", "bf16")
    ]
    assert [done.facts.environment["precision"] for done in found] == ["no", "bf16"]
    assert_close(_validations(found[0]), _validations(found[1]), rtol=0.05, atol=0.01)
    assert {item.dtype for item in _tensors(found[1].folder).values()} == {torch.float32}


@pytest.mark.often("objectives0")
@pytest.mark.parametrize("objectives", [{"logits": 1.0}, {"hidden": 1.0}])
def test_a_task_without_its_own_loss_is_validated_by_the_others(
    objectives: dict[str, float], tmp_path: Path
) -> None:
    """Else every step would be as good as the first."""
    done = train(
        small("llama", tmp_path), tmp_path / "out", task="causal-lm", objectives=objectives,
        data=texts(tmp_path), steps=8, learning_rate=3e-3,
    )  # fmt: skip
    assert done.facts.best_step > 0
    assert 0 < done.facts.best < _validations(done)[0]


@pytest.mark.slow
def test_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerate's loggers are told."""
    told: list[tuple[int, dict[str, float]]] = []
    monkeypatch.setattr(Accelerator, "log", lambda self, values, step: told.append((step, values)))
    train(small_encoder(tmp_path), tmp_path / "out", data=texts(tmp_path))
    assert [step for step, _ in told] == [0, 2, 4]
    assert set(told[1][1]) == {"step", "loss", "validation", "learning_rate", "seconds"}


def test_a_folder_that_was_moved_trains_without_its_teacher(tmp_path: Path) -> None:
    folder = small_classifier(tmp_path)
    shutil.rmtree(tmp_path / "bert")
    done = train(folder, tmp_path / "out", teacher="none", **_rows(tmp_path))
    assert done.facts.teacher is None
    assert done.facts.objectives == {"task": 1.0}


@pytest.mark.often("<lambda>-its values are others")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kept: kept.pop(next(name for name in kept if ".tc_" in name)), "missing"),
        (lambda kept: [item.zero_() for item in kept.values()], "its values are others"),
    ],
)
def test_a_writer_that_errs_publishes_nothing(
    change: Callable[[dict[str, torch.Tensor]], object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = small_encoder(tmp_path)
    save = transformers.PreTrainedModel.save_pretrained

    def erring(model: Any, folder: Path, state_dict: dict[str, torch.Tensor], **more: Any) -> None:
        kept = {name: item.clone() for name, item in state_dict.items()}
        change(kept)
        save(model, folder, state_dict=kept, **more)

    data = texts(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "save_pretrained", erring)
        with pytest.raises(WriteError, match=said):
            train(folder, tmp_path / "out", data=data, checkpoint_every=3)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out.partial/model/*"))
    assert train(folder, tmp_path / "out", data=data, checkpoint_every=3).resumed


# Which weights of a run are kept, and when it ends early


def _with_validations(values: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(values)
    monkeypatch.setattr(Losses, "validate", lambda self, size: next(left))


def test_the_best_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = small_encoder(tmp_path), texts(tmp_path)
    # Constant rates, so that a shorter run does the same steps; a single pass over the data keeps
    # nothing of what the teacher computes, and rounds nothing.
    monkeypatch.setattr("tcompress.training.teacher_cache.MOST_BYTES", 0)
    options = {"data": data, "schedule": "constant", "warmup": 0, "evaluate_every": 2}
    two = train(folder, tmp_path / "two", steps=2, **options)
    with monkeypatch.context() as patch:
        _with_validations([3.0, 1.0, 2.0, 5.0], patch)
        done = train(folder, tmp_path / "out", steps=6, **options)
    assert (done.facts.best_step, done.facts.best, done.facts.steps) == (2, 1.0, 6)
    assert weights(done.folder) == weights(two.folder)
    _with_validations([1.0, 1.0, 2.0, 5.0], monkeypatch)
    none = train(folder, tmp_path / "none", steps=6, **options)
    assert none.facts.best_step == 0
    before, after = _tensors(folder), _tensors(none.folder)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_metric_is_best_where_it_is_highest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pairs_file(tmp_path / "rows.jsonl")
    _with_validations([0.1, 0.5, 0.3], monkeypatch)
    done = taught(encoder(tmp_path / "bert"), "sts", {"source": [str(path)]})
    assert (done.facts.best_step, done.facts.best) == (2, 0.5)


def test_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_validations([4.0, 3.0, 3.5, 2.0, 2.5, 2.4, 1.0], monkeypatch)
    done = train(
        small_encoder(tmp_path), tmp_path / "out", data=texts(tmp_path), steps=12, patience=2
    )
    assert (done.facts.steps, done.facts.best_step, done.facts.best) == (10, 6, 2.0)


@pytest.mark.often("validation-the validation loss is inf at step 2")
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("loss", "the loss is nan at step 3"),
        ("gradient", "the gradient's norm is (nan|inf) at step 3"),
        ("validation", "the validation loss is inf at step 2"),
    ],
)
def test_numbers_that_are_not_finite_stop_the_run(
    what: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = small_encoder(tmp_path), tmp_path / "out"
    steps, inner = iter(range(99)), Losses.gradients

    def spoilt(self: Losses, *args: Any, **options: Any) -> torch.Tensor:
        value = inner(self, *args, **options)
        if next(steps) == 2:
            if what == "loss":
                return torch.full_like(value, float("nan"))
            next(p.grad for p in self.model.parameters() if p.grad is not None).mul_(float("inf"))
        return value

    if what == "validation":
        _with_validations([1.0, float("inf")], monkeypatch)
    else:
        monkeypatch.setattr(Losses, "gradients", spoilt)
    with pytest.raises(TrainingError) as failed:
        train(folder, output, data=texts(tmp_path), checkpoint_every=1, learning_rate=1e-3)
    assert re.fullmatch(message, failed.value.message)
    assert failed.value.exit_code == 2
    assert "lower the learning rate, such as `--lr 0.00025`" in (failed.value.hint or "")
    assert not output.exists()
    kept = tmp_path / ".out.partial" / "checkpoints"
    assert (kept / ("step-00000001" if what == "validation" else "step-00000002")).is_dir()
    assert not list((tmp_path / ".out.partial").rglob("config.json"))
