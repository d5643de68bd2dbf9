"""One command from a dense model to a folder that ships."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import AutoModel

from tcompress.artifact.manifest import read_manifest
from tcompress.artifact.workplace import partial_folder
from tcompress.compression import cutting, stages
from tcompress.errors import InputError
from tcompress.options.compress_options import Compress
from tcompress.options.read import read
from tests.support.cli import completed, run
from tests.support.evaluation import encoder, pairs_file
from tests.support.model_folders import sentences, text_file


@pytest.fixture
def place(tmp_path: Path, own_folder: None) -> Path:
    encoder(tmp_path / "bert")
    text_file(tmp_path / "texts.txt", sentences(60))
    pairs_file(tmp_path / "pairs.jsonl", 40)
    return tmp_path


TYPED = ("compress", "bert", "--data", "texts.txt", "--smoke", "--minutes", "0.2", "-o", "small")


def test_a_size_is_reached_in_pytorch_and_nothing_is_done_twice(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = (place / "bert" / "model.safetensors").stat().st_size
    size = f"{int(0.8 * dense)}B"
    measured = ("--task", "sts", "--test-data", "pairs.jsonl")
    typed = (*TYPED, "--runtime", "torch", "--size", size, *measured)
    with monkeypatch.context() as stopped:  # before it is clear that one conversion is enough
        stopped.setattr(cutting, "next_ask", Mock(side_effect=KeyboardInterrupt))
        done = run(*typed)
    assert done.code == 130
    assert "Converting" in done.err
    with monkeypatch.context() as stopped:  # before the folder gets its name
        stopped.setattr(stages, "write_records", Mock(side_effect=KeyboardInterrupt))
        done = run(*typed)
    assert done.code == 130
    assert "Converting" not in done.err
    assert "Healing" in done.err
    assert "stages that were finished are kept" in done.err
    assert not (place / "small").exists()
    done = run(*typed, "--json")
    assert "Converting" not in done.err
    assert "Healing" not in done.err
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in done.document["rows"]}
    assert rows["this model"]["bytes"] <= 0.8 * dense < rows["dense"]["bytes"]
    assert done.document["missed"] == []
    assert done.document["quality"] == "spearman"
    assert rows["this model"]["quality"] is not None
    assert 0 < rows["this model"]["agreement"] <= 1
    assert read_manifest(place / "small").plan.budget is not None
    assert AutoModel.from_pretrained(place / "small").config.hidden_size
    assert not partial_folder(place / "small").exists()


@pytest.mark.slow
def test_a_dense_file_of_eight_bits_may_be_all_that_is_needed(place: Path) -> None:
    pytest.importorskip("onnxruntime")
    dense = (place / "bert" / "model.safetensors").stat().st_size
    measured = ("--task", "sts", "--test-data", "pairs.jsonl")
    done = completed(*TYPED, "--size", f"{2 * dense}B", *measured)
    assert "nothing is cut" in done.err
    (file,) = (item for item in read_manifest(place / "small").exports if item.bits == 8)
    assert [item.name for item in file.metrics] == ["spearman", "pearson", "agreement"]
    words = "small in its int8 file is "
    assert words in (place / "small" / "report.html").read_text()
    assert words in (place / "small" / "README.md").read_text()
    assert (place / "small" / "onnx" / "model_int8.onnx").is_file()
    assert json.loads((place / "small" / "config.json").read_text())["model_type"] == "bert"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_loss": 0.01, "speedup": 2.0}, "one or the other"),
        ({"task": "sts"}, "go together"),
        ({"speedup": 0.5}, "speedup"),
    ],
)
def test_goals_that_contradict(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(Compress, options)


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_size_out_of_reach_is_refused_before_any_work(more: tuple[str, ...], place: Path) -> None:
    done = run(*TYPED, "--runtime", "torch", "--size", "10", *more)
    assert done.code == 2
    assert "`--size 10`, in bytes, is out of reach: the smallest possible is " in done.err
    assert "allow more bytes" in done.err
    assert "`--vocab data`" in done.err
    assert "Measuring" not in done.err
    assert not partial_folder(place / "small").exists()


def test_paths_are_looked_at_first(place: Path) -> None:
    goal = ("--size", "3MB", "--runtime", "torch")
    done = run("compress", "./nowhere", "--data", "absent.txt", *goal)
    assert done.code == 2
    assert "nowhere" in done.err
    assert "absent.txt" in done.err
