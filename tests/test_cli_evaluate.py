"""`tcompress evaluate` and `tcompress lm-eval`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tcompress.artifact.manifest import read_manifest
from tests.support.cli import run
from tests.support.converted import converted
from tests.support.evaluation import classifier, encoder, one_thread, pairs_file, rows_file

SEE = "see `tcompress evaluate --help`"
STS = ("--task", "sts", "--data", "pairs.jsonl", "--bootstrap", "50", "--device", "cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data."""
    folder = tmp_path_factory.mktemp("models")
    encoder(folder / "bert")
    converted("bert", folder)
    pairs_file(folder / "pairs.jsonl", 30)
    classifier(folder / "classifier")
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(place)
    with one_thread():
        yield


def test_table() -> None:
    done = run("evaluate", "./bert", "./bert-small", *STS, "--no-save")
    assert done.code == 0
    assert done.lines[0] == (
        "sts on pairs.jsonl:sentence1,sentence2,score: 30 examples, at most 64 tokens, "
        "float32 on cpu; in brackets 95 % intervals of 50 bootstrap resamples"
    )
    assert done.lines[1].split() == [
        "model", "metric", "value", "difference", "ratio", "examples/s",
    ]  # fmt: skip
    rows = [line.split() for line in done.lines[3:]]
    assert [row[0] for row in rows] == ["bert", "pearson", "bert-small", "pearson"]
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
    assert [metric["name"] for metric in small["metrics"]] == ["spearman", "pearson"]
    assert list(small["metrics"][0]["difference"]) == [
        "baseline", "baseline_value", "value", "interval"
    ]  # fmt: skip
    assert dense["metrics"][0]["difference"] is None
    assert document["protocol"]["bootstrap"] == 50


def test_numbers_are_stored_unless_refused() -> None:
    def names() -> list[str]:
        manifest = read_manifest(Path("bert-small"))
        assert manifest is not None
        return [metric.name for metric in manifest.metrics]

    run("evaluate", "bert-small", *STS, "--no-save")
    assert names() == []
    done = run("evaluate", "bert", "bert-small", *STS, "--verbose")
    assert names() == ["spearman", "pearson"]
    assert "bert: its numbers were not stored\n" in done.err
    assert "bert-small: its numbers" not in done.err


def test_threshold() -> None:
    assert run("evaluate", "bert", *STS, "--threshold", "-1").code == 0
    done = run("evaluate", "bert", *STS, "--threshold", "0.999", "--quiet")
    assert done.code == 3
    assert done.err == "bert: misses the threshold 0.999 on `spearman`\n"
    document = run("evaluate", "bert", *STS, "--threshold", "0.999", "--json").document
    assert (document["threshold"], document["missed"]) == ("0.999", ["bert"])


def test_columns() -> None:
    rows_file(Path("odd.jsonl"), one=["a fox", "w30"], stars=[0, 1], two=["w31", "w32"])
    options = ("--task", "classification", "--data", "odd.jsonl", "--quiet", "--json")
    document = run("evaluate", "classifier", *options, "--columns", "text=two,label=stars").document
    assert document["data"] == "odd.jsonl:two,stars"


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
