"""Measuring models by function and by command: comparisons, protocols, what manifests keep."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from tcompress.api import evaluate
from tcompress.artifact.manifest import Metric, read_manifest
from tcompress.errors import DataError, InputError
from tcompress.evaluation.scores import Threshold
from tcompress.evaluation.task_base import EvaluationTask
from tests.support import records
from tests.support.cli import completed, run
from tests.support.converted import converted
from tests.support.evaluation import (
    classifier,
    encoder,
    headed,
    labelled_file,
    pairs_file,
    rows_file,
)
from tests.support.model_folders import model_folder, save_tokenizer, sentences


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data."""
    folder = tmp_path_factory.mktemp("models")
    encoder(folder / "bert")
    converted("bert", folder)
    pairs_file(folder / "pairs.jsonl", 30)
    classifier(folder / "classifier")
    labelled_file(folder / "labelled.jsonl")
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(place: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.chdir(place)


def sts(*models: str, **options: Any) -> Any:
    given = {"device": "cpu", "bootstrap": 100, "save": False, **options}
    return evaluate(models, "sts", "pairs.jsonl", **given)


def test_differences_are_paired() -> None:
    dense, small = sts("bert", "bert-small")
    assert all(metric.difference is None for metric in dense.metrics)
    assert [metric.name for metric in small.metrics] == ["spearman", "pearson", "agreement"]
    for one, two in zip(dense.metrics, small.metrics, strict=False):
        found = two.difference
        assert (found.baseline, found.baseline_value) == ("bert", one.value)
        assert found.value == pytest.approx(two.value - one.value)
        assert two.ratio == (two.value / one.value if one.value > 0 else None)
        assert found.interval.low <= found.value <= found.interval.high


def test_a_model_does_not_differ_from_itself(place: Path) -> None:
    shutil.copytree("bert", "copy", dirs_exist_ok=True)
    for first, second in (("bert", "copy"), ("bert", "bert")):
        _, again = sts(first, second)
        *metrics, same = again.metrics
        assert (same.name, same.value, same.difference) == ("agreement", pytest.approx(1), None)
        for metric in metrics:
            interval = metric.difference.interval
            assert (metric.difference.value, interval.low, interval.high) == (0.0, 0.0, 0.0)


def test_the_baseline_may_stand_anywhere() -> None:
    small, dense = sts("bert-small", "bert", baseline="bert")
    assert (small.name, dense.name) == ("bert-small", "bert")
    assert small.metrics[0].difference is not None
    assert dense.metrics[0].difference is None
    names = [item.name for item in sts("bert-small", baseline="bert")]
    assert names == ["bert", "bert-small"]


def test_the_protocol_tells_how_it_was_measured() -> None:
    (found,) = sts("bert", limit=20, seed=3, batch_size=4)
    protocol = dict(found.metrics[0].protocol)
    assert len(protocol.pop("data_fingerprint")) == 64
    assert set(protocol.pop("versions")) == {
        "tcompress", "python", "torch", "transformers", "machine"
    }  # fmt: skip
    assert protocol == {
        "task": "sts", "data": "pairs.jsonl:sentence1,sentence2,score", "split": None,
        "examples": 20, "max_length": 64, "batch_size": 4, "dtype": "float32", "device": "cpu",
        "seed": 3, "bootstrap": 100, "scoring": "cosine of embeddings", "pooling": "mean (default)",
        "truncated": 0,
    }  # fmt: skip


def test_numbers_are_kept_in_the_manifest_of_a_converted_model() -> None:
    def kept() -> list[Metric]:
        return read_manifest(Path("bert-small")).metrics

    assert kept() == []
    sts("bert-small")
    run("evaluate", "bert-small", *STS, "--no-save")
    assert kept() == []
    done = run("evaluate", "bert", "bert-small", *STS, "--verbose")
    assert [metric.name for metric in kept()] == ["spearman", "pearson", "agreement"]
    assert "bert: its numbers were not stored\n" in done.err
    assert "bert-small: its numbers" not in done.err
    dense, small = sts("bert", "bert-small", save=True)
    assert (dense.stored, small.stored) == (False, True)
    assert kept() == list(small.metrics)
    # Newer numbers on the same data replace older ones; those on other data stay.
    (again,) = sts("bert-small", save=True, batch_size=3)
    agreement = small.metrics[-1]  # which needs another model beside it
    assert sorted(kept(), key=str) == sorted([*again.metrics, agreement], key=str)
    (other,) = sts("bert-small", save=True, limit=10)
    found = [*again.metrics, agreement, *other.metrics]
    assert sorted(kept(), key=str) == sorted(found, key=str)
    assert not list(Path("bert-small").glob("*.tmp"))


def test_the_shortest_model_decides_the_length(place: Path) -> None:
    headed("bert", place / "short", "BertModel", max_position_embeddings=16)
    scores = sts("bert", "short")
    assert [item.metrics[0].protocol["max_length"] for item in scores] == [16, 16]


def test_dtypes(place: Path) -> None:
    (found,) = sts("bert", dtype="bfloat16")
    (exact,) = sts("bert")
    assert found.metrics[0].protocol["dtype"] == "bfloat16"
    assert found.metrics[0].value == pytest.approx(exact.metrics[0].value, abs=0.1)
    with pytest.raises(InputError, match="`dtype` is `int8`, allowed is one of `float32`"):
        sts("bert", dtype="int8")


def test_models_with_other_tokens(place: Path) -> None:
    model_folder("llama", place / "one", processor=False)
    model_folder("gpt2", place / "two", processor=False)
    save_tokenizer(place / "two", start=False)
    rows_file(place / "texts.jsonl", text=sentences(30))
    given: dict[str, Any] = {"device": "cpu", "max_length": 12, "bootstrap": 50}
    _, other = evaluate(["one", "two"], "perplexity", "texts.jsonl", save=False, **given)
    assert other.notes[-1:] == ("its tokens are not those of `one`: each reads its own",)
    perplexity, per_byte, nats = other.metrics
    assert perplexity.difference is nats.difference is None
    assert per_byte.difference is not None
    assert Threshold.parse("9x").missed(perplexity)
    assert not Threshold.parse("9x").missed(per_byte)


def test_a_number_that_is_not_defined(place: Path) -> None:
    rows_file(place / "same.jsonl", sentence1=["a", "fox"], sentence2=["b", "c"], score=[1.0, 1.0])
    with pytest.raises(InputError, match=r"`spearman` of `bert` is not defined on `same\.jsonl:"):
        evaluate(["bert"], "sts", "same.jsonl", save=False)


def test_a_ruined_model_is_called_so(place: Path) -> None:
    headed("gpt2", place / "ruined", "GPT2LMHeadModel")
    weights = load_file("ruined/model.safetensors")
    weights["transformer.ln_f.weight"] *= 1e6
    save_file(weights, "ruined/model.safetensors", metadata={"format": "pt"})
    rows_file(place / "lines.jsonl", text=sentences(4))
    with pytest.raises(InputError, match=r"`perplexity` of `ruined` .* \(inf\)") as failure:
        evaluate(["ruined"], "perplexity", "lines.jsonl", save=False)
    assert "its predictions are ruined" in failure.value.hint


def test_no_models() -> None:
    with pytest.raises(InputError, match="no models to measure"):
        evaluate([], "sts", "pairs.jsonl")


def test_a_single_example_has_no_interval() -> None:
    (found,) = evaluate(["classifier"], "classification", "labelled.jsonl", limit=1, save=False)
    assert found.metrics[0].interval is None


def test_the_model_is_named_in_errors(place: Path) -> None:
    labelled_file(place / "three.jsonl", classes=("a", "b", "c"))
    with pytest.raises(DataError) as failure:
        evaluate(["classifier"], "classification", "three.jsonl")
    assert failure.value.message == (
        "`classifier`: the model's head has 2 labels, but `three.jsonl:text,label` has 3 classes "
        "(`a`, `b`, `c`)"
    )
    shutil.copytree("classifier", "broken")
    weights = load_file("broken/model.safetensors")
    weights["classifier.bias"] += torch.nan
    save_file(weights, "broken/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"^`broken`: the model gives values that are not finite"):
        evaluate(["broken"], "classification", "labelled.jsonl")


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvaluationTask, "measure", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(InputError) as failure:
        sts("bert", batch_size=8)
    assert failure.value.message == "`bert`: memory of cpu is too small for batches of 8"


@pytest.mark.parametrize(
    ("text", "higher", "missed"),
    [("0.8", True, False), ("0.9", True, True), ("0.9x", True, False), ("1.1x", True, True),
     ("0.8", False, True), ("0.9", False, False), ("1.1x", False, False), ("0.9x", False, True)],
)  # fmt: skip
def test_thresholds(text: str, higher: bool, missed: bool) -> None:
    found = records.metric(0.85, 0.85, higher_is_better=higher)
    assert Threshold.parse(text).missed(found) is missed


# `tcompress evaluate` and `tcompress lm-eval`


STS = ("--task", "sts", "--data", "pairs.jsonl", "--bootstrap", "50", "--device", "cpu")


def test_table() -> None:
    done = completed("evaluate", "./bert", "./bert-small", *STS, "--no-save")
    assert done.lines[0] == (
        "sts on pairs.jsonl:sentence1,sentence2,score: 30 examples (columns guessed: `--columns` "
        "names others), at most 64 tokens, float32 on cpu; in brackets 95 % intervals of 50 "
        "bootstrap resamples"
    )
    assert done.lines[1].split() == [
        "model", "metric", "value", "difference", "ratio", "examples/s",
    ]  # fmt: skip
    rows = [line.split() for line in done.lines[3:]]
    assert [row[0] for row in rows] == ["bert", "pearson", "bert-small", "pearson", "agreement"]
    assert "bert: 60 of 60 inputs in " in done.err
    assert run("evaluate", "bert", *STS, "--quiet").err == ""


def test_json() -> None:
    document = run("evaluate", "bert", "bert-small", *STS, "--no-save", "--json").document
    assert list(document) == [
        "schema", "task", "data", "protocol", "models", "threshold", "missed"
    ]  # fmt: skip
    dense, small = document["models"]
    assert list(small) == [
        "name", "metrics", "examples_per_second", "stored", "notes", "protocol"
    ]  # fmt: skip
    assert list(small["metrics"][0]) == [
        "name", "value", "higher_is_better", "interval", "difference", "ratio"
    ]  # fmt: skip
    assert list(small["metrics"][0]["difference"]) == [
        "baseline", "baseline_value", "baseline_interval", "value", "interval"
    ]  # fmt: skip
    assert dense["metrics"][0]["difference"] is None
    # What all share is said once, and every number is one of JSON.
    assert (document["protocol"]["bootstrap"], document["protocol"]["examples"]) == (50, 30)
    assert [model["protocol"] for model in document["models"]] == [{}, {}]
    json.dumps(document, allow_nan=False)


def test_few_examples_are_warned_of() -> None:
    named = ("--columns", "text=sentence1,pair=sentence2,score=score")
    done = completed("evaluate", "bert", *STS, *named, "--limit", "4", "--no-save")
    data = "pairs.jsonl:sentence1,sentence2,score"
    assert f"{data}: 4 examples, at most" in done.lines[0]
    assert done.lines[-1] == (
        f"warning: {data} has 4 examples: with fewer than 30 neither numbers nor intervals say much"
    )


def test_threshold() -> None:
    assert run("evaluate", "bert", *STS, "--threshold", "-1").code == 0
    done = run("evaluate", "bert", *STS, "--threshold", "0.999", "--quiet")
    assert done.code == 3
    assert done.err == "bert: misses the threshold 0.999 on `spearman`\n"
    document = run("evaluate", "bert", *STS, "--threshold", "0.999", "--json").document
    assert (document["threshold"], document["missed"]) == ("0.999", ["bert"])


@pytest.mark.parametrize(("runtime", "code"), [("onnx", 2), ("torch,onnx", 130)])
def test_a_model_in_several_runtimes_is_its_own_baseline(runtime: str, code: int) -> None:
    with patch("tcompress.evaluation.measuring.evaluate", side_effect=KeyboardInterrupt):
        done = run("evaluate", "bert", *STS, "--runtime", runtime, "--threshold", "0.9x")
    assert done.code == code


def test_lm_eval_is_passed_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    package, module = ModuleType("lm_eval"), ModuleType("lm_eval.__main__")
    package.__path__ = []
    package.__spec__ = module.__spec__ = sys.__spec__
    module.__dict__["cli_evaluate"] = lambda: calls.append(list(sys.argv))
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", module)
    for arguments in (
        ["run", "--model", "hf", "--model_args", "pretrained=x,dtype=float32", "-h"],
        ["--model", "hf", "--tasks=a,b", "--limit", "3"],
        [],
    ):
        before = list(sys.argv)
        assert run("lm-eval", *arguments).code == 0
        assert calls.pop() == ["lm-eval", *arguments]
        assert sys.argv == before
    for more in ([], ["--tasks", "a,b"]):
        done = run("lm-eval", "run", "--model_args", "dtype=auto,pretrained=./nowhere", *more)
        assert (done.code, calls) == (2, [])
        assert "there is no folder `./nowhere`" in done.err
