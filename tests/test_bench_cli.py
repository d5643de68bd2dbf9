"""`tcompress bench` as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tcompress.artifact.manifest import read_manifest
from tests.support.cli import error, run
from tests.support.converted import converted

FEW = ("--batch", "1,2", "--length", "4", "--repeats", "1", "--quiet")


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted("gpt2", tmp_path)
    monkeypatch.chdir(tmp_path)


def test_a_table() -> None:
    done = run("bench", "gpt2-small", "--against", "gpt2", *FEW, "--threads", "1")
    assert done.code == 0
    assert done.lines[0] == "gpt2-small against gpt2"
    names = "batch length mode time dense ratio tokens/s memory dense"
    assert done.lines[1].split() == names.split()
    assert [line.split()[:3] for line in done.lines[3:5]] == [
        ["1", "4", "eager"],
        ["2", "4", "eager"],
    ]
    assert done.lines[5] == "cpu, 1 thread, float32"
    assert done.lines[-1] == "Kept in `gpt2-small/tcompress.json`."
    manifest = read_manifest(Path("gpt2-small"))
    assert manifest is not None
    assert [speed.baseline for speed in manifest.speed] == ["gpt2", "gpt2"]
    for speed in manifest.speed:  # the smaller model takes less memory
        assert (speed.weight_bytes or 0) < (speed.baseline_weight_bytes or 0)


def test_one_document() -> None:
    done = run("bench", "gpt2-small", "gpt2", "--against", "gpt2", *FEW, "--no-save", "--json")
    assert done.code == 0
    first, second = done.document["benches"]
    assert (first["model"], first["baseline"], first["saved"]) == ("gpt2-small", "gpt2", False)
    assert second["model"] == "gpt2"
    assert {"ratio", "milliseconds", "peak_bytes", "protocol"} <= set(first["speed"][0])
    manifest = read_manifest(Path("gpt2-small"))
    assert manifest is not None
    assert manifest.speed == []


def test_kept_weights() -> None:
    arguments = ("bench", "gpt2-small", "--against", "gpt2", *FEW, "--keep-weights")
    done = run(*arguments, "--threads", "1")
    assert done.code == 0
    assert done.lines[5] == "cpu, 1 thread, float32, weights kept"
    size = 4 * 2 * (32 * 96 + 32 * 32 + 2 * 32 * 64)  # two blocks: qkv, o, up and down, float32
    assert f"note: kept weights take {size:,} bytes of memory beside " in done.out
    run(*arguments[:-1], "--threads", "1")  # times without are other times
    manifest = read_manifest(Path("gpt2-small"))
    assert manifest is not None
    kept = [speed.protocol.get("kept_weights_bytes") for speed in manifest.speed]
    assert kept == [size, size, None, None]
    done = run(*arguments, "--mode", "compiled")
    assert (done.code, done.err) == (
        2, error("compiled passes use no kept weights", "leave one of the two options out"),
    )  # fmt: skip


def test_a_dense_model_keeps_nothing() -> None:
    done = run("bench", "gpt2", "--against", "gpt2", *FEW)
    assert done.lines[-1] == "Not kept: `gpt2` is no folder with a `tcompress.json`."


def test_errors() -> None:
    done = run("bench", "gpt2", *FEW)
    assert done.code == 2
    assert done.err == error(
        "nothing says which dense model `gpt2` is to be compared with", "name it with `--against`"
    )
    done = run("bench", "gpt2-small", "--batch", "0", "--json")
    assert (done.code, done.document["error"]["type"]) == (2, "RecipeError")
    assert run("bench", "gpt2-small", "--mode", "quick").code == 2
    assert run("bench", "gpt2-small", "--repeats", "0").code == 2
    assert "have 64 positions" in run("bench", "gpt2-small", "--length", "65").err
