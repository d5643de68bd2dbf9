"""Conversions that cannot be finished leave nothing that loads, and touch nothing else."""

from __future__ import annotations

import errno
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcompress.artifact import format as shards
from tcompress.artifact.reader import Artifact
from tcompress.conversion.converter import Converted, convert
from tcompress.errors import DiskError, FitError, SourceError, WriteError
from tcompress.hf.opening import unloadable
from tcompress.progress import Silent
from tests.support.conversions import recipe
from tests.support.interrupted import (
    assert_nothing_left,
    assert_nothing_loads,
    contents,
    partial_folder,
    run,
)
from tests.support.tiny import build

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def source(tiny: Callable[[str], Path]) -> Path:
    return tiny("bert")


def test_outputs_that_are_empty_or_in_folders_that_do_not_exist(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    for output in (tmp_path / "out", tmp_path / "a" / "b" / "out"):
        Artifact.open(run(source, output).folder).verify_checksums()


def test_force_replaces_everything(source: Path, tmp_path: Path) -> None:
    output = run(source, tmp_path / "out", changes={"seed": 1}).folder
    (output / "old.safetensors").write_text("old")
    run(source, output, force=True)
    assert contents(output) == contents(run(source, tmp_path / "other").folder)
    assert not partial_folder(output).exists()


def test_force_keeps_the_old_output_until_the_new_one_is_whole(
    source: Path, tmp_path: Path
) -> None:
    output = run(source, tmp_path / "out").folder
    before = contents(output)
    broken = _with_tensor(source, tmp_path / "broken", REWRITTEN, float("nan"))
    with pytest.raises(FitError):
        run(broken, output, force=True)
    assert contents(output) == before


REWRITTEN = "bert.encoder.layer.1.attention.self.key.weight"
COPIED = "bert.embeddings.word_embeddings.weight"
BIAS = "bert.encoder.layer.1.attention.self.key.bias"


def _with_tensor(source: Path, folder: Path, name: str, value: float) -> Path:
    """A copy of a model with one bad number in it."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[5] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "value", "aware"),
    [
        (REWRITTEN, float("nan"), True),
        (REWRITTEN, float("inf"), False),
        (COPIED, float("nan"), False),
        (BIAS, float("nan"), True),
    ],
)
def test_bad_numbers_are_named(
    name: str, value: float, aware: bool, source: Path, tmp_path: Path
) -> None:
    broken = _with_tensor(source, tmp_path / "broken", name, value)
    with pytest.raises(FitError, match=name.removesuffix(".weight").replace(".", r"\.")):
        run(broken, tmp_path / "out", aware)
    assert_nothing_left(tmp_path / "out")


def test_a_truncated_shard(source: Path, tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    victim = sorted((tmp_path / "dense").glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(SourceError, match=victim.name):
        run(tmp_path / "dense", tmp_path / "out")
    assert_nothing_left(tmp_path / "out")


def test_a_shard_that_is_cut_off_while_it_is_read(source: Path, tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    victim = sorted((tmp_path / "dense").glob("*.safetensors"))[1]

    class Cut(Silent):
        def stage(self, name: str, total: int, unit: str) -> None:
            victim.write_bytes(victim.read_bytes()[:200])

    with pytest.raises(SourceError):
        run(tmp_path / "dense", tmp_path / "out", progress=Cut())
    assert_nothing_left(tmp_path / "out")


class _FullDisk(io.FileIO):
    """A file on a disk with little room left."""

    room = 30_000

    def write(self, data: Any) -> int:
        _FullDisk.room -= memoryview(data).nbytes
        if _FullDisk.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data) or 0


@pytest.mark.parametrize("aware", [False, True])
def test_a_full_disk(
    aware: bool,
    source: Path,
    uninterrupted: Callable[[bool], Converted],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out"
    own = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if path.suffix == ".tmp" and mode == "xb":
            return _FullDisk(path, "x")
        return own(path, mode, *args, **options)

    monkeypatch.setattr(_FullDisk, "room", 30_000)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(DiskError, match=r"there is no space for .*/out`: .* are free on its"):
            run(source, output, aware)
    assert_nothing_loads(output)
    run(source, output, aware)
    assert contents(output) == contents(uninterrupted(aware).folder)


@pytest.mark.parametrize("aware", [False, True])
def test_two_runs_give_the_same_files(
    aware: bool, source: Path, uninterrupted: Callable[[bool], Converted], tmp_path: Path
) -> None:
    again = run(source, tmp_path / "out", aware)
    assert not again.resumed
    assert contents(again.folder) == contents(uninterrupted(aware).folder)
    # Nothing follows the order of a set, which differs between processes.
    assert {tuple(errors) for errors in again.manifest.fit.values()} == {
        ("calibration", "held_out") if aware else ("weight",)
    }


def _swap(weights: dict[str, Tensor], end: str) -> None:
    first, second = sorted(name for name in weights if name.endswith(end))[:2]
    weights[first], weights[second] = weights[second], weights[first]


def _first(weights: dict[str, Tensor], end: str) -> str:
    return min(name for name in weights if name.endswith(end))


LPROD = {"name": "lprod", "p": 4, "transform": "fitted"}
Q0 = "encoder.layer.0.attention.self.query"
BROKEN: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], object], str]] = {
    "a dense tensor dropped": (
        "bert", {}, lambda w: w.pop(_first(w, "LayerNorm.weight")), "LayerNorm.weight`"
    ),
    "a factor dropped": ("bert", {}, lambda w: w.pop(_first(w, "tc_a")), "dense.tc_a` is missing"),
    "a wrong name": (
        "bert", {}, lambda w: w.update({"bert.odd": w.pop(_first(w, "key.bias"))}), "key.bias`"
    ),
    "another shape": (
        "bert", {}, lambda w: w.update({(n := _first(w, "key.bias")): w[n][:-1]}), "does not load"
    ),
    "another type": (
        "bert", {}, lambda w: w.update({(n := _first(w, "key.bias")): w[n].half()}), "key.bias"
    ),
    "a swapped transform": (
        "bert", {"method": LPROD}, lambda w: _swap(w, "0.generators"), "layer.0"
    ),
    "a zeroed factor": ("bert", {}, lambda w: w[_first(w, "query.tc_b")].zero_(), "off by 100.0%"),
    "a bias of another layer": ("bert", {}, lambda w: _swap(w, "bias"), "layer.0"),
    "a dense layer of a block": ("bert", {}, lambda w: _swap(w, "LayerNorm.weight"), "layer.0"),
    "an expert": ("mixtral", {}, lambda w: w[_first(w, "tc_gate_a")][1].zero_(), "experts"),
    "a table of words": (
        "bert",
        {"embeddings": {"method": {"name": "svd"}, "target": 0.5}},
        lambda w: w[_first(w, "word_embeddings.tc_a")].zero_(),
        "word_embeddings",
    ),
    "a mechanism": (
        "bert",
        {"method": None, "target": None, "attention": {"name": "tam"}},
        lambda w: [w[name].add_(1) for name in w if ".tc_attn." in name],
        "tc_attn",
    ),
    "a block that stays": (
        "bert",
        {"method": None, "target": None, "drop_layers": 1},
        lambda w: w[_first(w, "query.weight")].zero_(),
        Q0,
    ),
    "weights that are drawn": (
        "bert", {"init": "random"}, lambda w: w[_first(w, "query.tc_b")].zero_(), Q0
    ),
}  # fmt: skip


def test_what_a_disk_does_is_no_defect_of_what_was_written() -> None:
    with pytest.raises(OSError, match="Input/output"), unloadable():
        raise OSError(5, "Input/output error")
    with pytest.raises(WriteError, match="no file named"), unloadable():
        raise OSError("there is no file named config.json")  # as Transformers puts it


@pytest.mark.parametrize("case", BROKEN)
def test_a_writer_that_errs_publishes_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes, change, said = BROKEN[case]
    build(family).save_pretrained(tmp_path / "dense")
    asked = recipe("svd", **changes)

    def erring(folder: Path, shard: Any, *more: Any) -> str:
        digest = shards.write_shard(folder, shard, *more)
        weights = load_file(folder / shard.file)
        change(weights)
        save_file(weights, folder / shard.file, {"format": "pt"})
        return digest

    with monkeypatch.context() as patch:
        patch.setattr("tcompress.conversion.converter.write_shard", erring)
        with pytest.raises(WriteError) as refused:
            convert(str(tmp_path / "dense"), asked, tmp_path / "out")
    assert said in refused.value.message, refused.value.message
    assert refused.value.exit_code == 1
    assert "nothing was published" in (refused.value.hint or "")
    assert_nothing_loads(tmp_path / "out")
    # Once the writer is whole, the same command ends well: what it wrote passes the proof.
    assert convert(str(tmp_path / "dense"), asked, tmp_path / "out").resumed
    assert (tmp_path / "out" / "config.json").is_file()
    assert not partial_folder(tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("embeddings.position_embeddings.weight", float("inf"), "holds NaN or infinity"),
        ("embeddings.LayerNorm.weight", 1e5, r"does not fit into torch\.float16"),
        ("encoder.layer.0.output.dense.bias", -1e5, r"does not fit into torch\.float16"),
        ("encoder.layer.0.output.dense.weight", 3e38, r"does not fit into torch\.float16"),
    ],
)
def test_numbers_that_the_dtype_does_not_hold(
    name: str, value: float, words: str, source: Path, tmp_path: Path
) -> None:
    tensors = load_file(source / "model.safetensors")
    key = next(key for key in tensors if key == name or key.endswith(name))
    tensors[key].view(-1)[3] = value
    folder = tmp_path / "changed"
    shutil.copytree(source, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(FitError, match=words) as failed:
        run(folder, tmp_path / "out", changes={"dtype": "float16"})
    assert key.rpartition(".")[0] in failed.value.message
    assert failed.value.hint
    assert_nothing_left(tmp_path / "out")
