"""Conversions that were cut short go on where they stopped, with the same result."""

import dataclasses
import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tcompress
from tcompress.artifact import format as shards
from tcompress.artifact.reader import verify_files
from tcompress.artifact.workplace import Workplace
from tcompress.conversion.converter import Converted, convert
from tcompress.errors import DiskError, FitError, InputError, SourceError, WriteError
from tcompress.fitting import block_rewrite
from tcompress.fitting.layer_fits import BlockResult
from tcompress.fitting.workdir import Distance, FitWorkplace
from tcompress.hf.opening import unloadable
from tcompress.planning.entries import Plan
from tcompress.progress import Silent
from tests.support.conversions import calibration, recipe, threads
from tests.support.interrupted import (
    Interrupt,
    assert_nothing_left,
    assert_nothing_loads,
    contents,
    convert_until_killed,
    partial_folder,
    run,
    several_files,
)
from tests.support.tiny import TINY, build

pytestmark = pytest.mark.usefixtures("one_thread")
Whole = Callable[[bool], Converted]  # conversions that nothing interrupted, without and with data
Moment = tuple[str, int] | str  # a stage and a number of steps in it, or a function


@pytest.fixture(scope="module")
def source(tiny: Callable[[str], Path]) -> Path:
    return tiny("bert")


# Where to kill, without and with data, and whether a line of the journal was written by then.
MOMENTS: list[tuple[bool, Moment, bool]] = [
    (False, ("writing", 1), True),  # the first tensor of the first file
    (False, ("writing", 40), True),  # inside a later file
    (False, "tcompress.conversion.converter.write_index", True),
    (False, "tcompress.conversion.outputs.write_manifest", True),
    (False, "tcompress.conversion.outputs.config_text", True),
    (True, ("fitting blocks", 2), False),  # inside the first block
    (True, ("fitting blocks", 6), True),  # inside the second block, the first one is kept
    (True, "tcompress.artifact.workplace.Workplace.note", False),
    (True, ("writing", 40), True),
    (True, "tcompress.conversion.outputs.write_manifest", True),
]


@pytest.mark.often("False-tcompress.conversion.outputs.config_text-True")
@pytest.mark.parametrize(("aware", "moment", "begun"), MOMENTS)
def test_killed_and_run_again(
    aware: bool, moment: Moment, begun: bool, source: Path, uninterrupted: Whole, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    family = "bert" if aware else None
    convert_until_killed(source, several_files(aware), output, family, moment)
    assert_nothing_loads(output)
    again = run(source, output, aware)
    assert again.resumed is begun
    assert contents(output) == contents(uninterrupted(aware).folder)
    assert not partial_folder(output).exists()


@pytest.mark.parametrize("moment", ["publish", "discard"])
def test_killed_around_the_last_rename(
    moment: str, source: Path, uninterrupted: Whole, tmp_path: Path
) -> None:
    """What is in the working folder before it is whole."""
    output, before = tmp_path / "out", moment == "publish"
    name = f"tcompress.artifact.workplace.Workplace.{moment}"
    convert_until_killed(source, several_files(), output, None, name)
    assert output.exists() is not before
    verify_files(partial_folder(output) / "model" if before else output)
    if not before:
        assert contents(output) == contents(uninterrupted(False).folder)
    assert run(source, output, force=not before).resumed or not before
    assert contents(output) == contents(uninterrupted(False).folder)
    assert not partial_folder(output).exists()


def test_finished_work_is_not_done_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and files that an interrupted run finished are taken as they are."""
    output = tmp_path / "out"
    convert_until_killed(source, several_files(True), output, "bert", ("writing", 40))
    model = partial_folder(output) / "model"
    kept = {path.name: path.stat().st_mtime_ns for path in model.glob("*.safetensors")}
    assert len(kept) >= 2

    monkeypatch.setattr(block_rewrite, "fit_layers", Mock(side_effect=AssertionError))
    run(source, output, True)
    assert all((output / name).stat().st_mtime_ns == time for name, time in kept.items())


@pytest.mark.often("False-40")
@pytest.mark.parametrize(("aware", "after"), [(False, 40), (True, 14), (True, 40)])
def test_an_interrupt_keeps_the_work(
    aware: bool, after: int, source: Path, uninterrupted: Whole, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    before = threads()
    with pytest.raises(KeyboardInterrupt):
        run(source, output, aware, progress=Interrupt(after))
    assert threads() == before
    assert_nothing_loads(output)
    again = run(source, output, aware)
    assert again.resumed
    assert contents(output) == contents(uninterrupted(aware).folder)
    # Nothing follows the order of a set, which differs between processes.
    assert {tuple(errors) for errors in again.manifest.fit.values()} == {
        ("calibration", "held_out") if aware else ("weight",)
    }


@pytest.mark.often("data")
@pytest.mark.parametrize(
    "change", ["recipe", "weights", "config", "data", "tool", "query.weight", "LayerNorm.bias"]
)
def test_changed_input_starts_afresh(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output, other = (tmp_path / name for name in ("dense", "out", "other"))
    options = {**TINY["bert"].options, "vocab_size": 20_000}  # most of the file is not a layer
    tiny = dataclasses.replace(TINY["bert"], options=options) if "." in change else TINY["bert"]
    tiny.build().save_pretrained(source)
    with pytest.raises(KeyboardInterrupt):
        run(source, output, True, progress=Interrupt(60))
    recipe, data = several_files(True), calibration("bert")
    if change == "recipe":
        recipe = several_files(True, keep=["down"])
    elif change == "weights":
        tiny.build(seed=1).save_pretrained(source)
    elif change == "config":
        config = source / "config.json"
        config.write_text(config.read_text().replace('"gelu"', '"relu"'))
    elif change == "tool":  # another version may fit in another way
        monkeypatch.setattr(tcompress, "__version__", "99.0")
    elif change == "data":
        batches = calibration("bert", 2).batches
        data = dataclasses.replace(data, batches=batches, holdout=[1], fingerprint="another")
    else:  # one tensor, such as a repaired one: names, shapes and sizes stay what they were
        weights = source / "model.safetensors"
        tensors = {key: tensor.clone() for key, tensor in load_file(weights).items()}
        tensors[next(key for key in tensors if "layer.0" in key and key.endswith(change))] += 0.5
        weights.unlink()
        save_file(tensors, weights, {"format": "pt"})
    again = convert(str(source), recipe, output, data=data)
    assert not again.resumed
    assert contents(output) == contents(convert(str(source), recipe, other, data=data).folder)


def test_two_runs_at_once(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    failures: list[InputError] = []

    class Second(Silent):
        def stage(self, name: str, total: int, unit: str) -> None:
            with pytest.raises(InputError) as failed:
                run(source, output)
            failures.append(failed.value)

    run(source, output, progress=Second())
    assert "another run is writing" in failures[0].message
    verify_files(output)


def test_damaged_results_count_as_none(tmp_path: Path) -> None:
    """Whatever a conversion keeps is written whole; what is damaged all the same is done again."""
    place = FitWorkplace(tmp_path / "out", "x", torch.device("cpu"))
    place.keep_distance(Distance(0.5, 0.1))
    place.keep_factors({("a", "b"): {"c": torch.ones(2)}})
    place.keep_answers({"svd": Plan(layers=(), source="m", method="svd")})
    place.keep_moments("curvature", "block", {"q": torch.ones(2, 2)})
    place.keep_moments("inputs", "block", {"q": torch.ones(2, 2)})
    place.keep_block(BlockResult("block", attention={"attn.tc_attn.factor_q": torch.ones(2)}))
    assert place.block("block").attention["attn.tc_attn.factor_q"].tolist() == [1.0, 1.0]
    assert place.distance() == (0.5, 0.1)
    assert place.answers() is not None
    assert place.factors() is not None
    (place.folder / "curvature" / "block.safetensors").write_bytes(b"cut off")
    assert place.answers() is None  # it rests on them
    for path in place.folder.rglob("*"):
        if path.is_file() and path.name != "lock":
            path.write_bytes(b"\xff{")
    assert (place.distance(), place.answers(), place.factors()) == (None,) * 3
    assert (place.depth(), place.block("block")) == (None, None)
    assert place.moments("curvature", "block") == place.moments("inputs", "block") == {}


def test_an_adoption_that_was_cut_short(tmp_path: Path) -> None:
    place = FitWorkplace(tmp_path / "out", "x", torch.device("cpu"))
    trial = place.trial("svd")
    trial.keep_answers({"svd": Plan(layers=(), source="m", method="svd")})
    trial.keep_moments("inputs", "block", {"q": torch.ones(2, 2)})
    trial.close()
    (trial.folder / "inputs").rename(place.folder / "inputs")  # so far it came
    place.adopt("svd")
    place.adopt("svd")
    assert place.answers() is not None
    assert place.moments("inputs", "block")
    assert not (place.folder / "trials").exists()


@pytest.mark.slow
def test_a_damaged_working_folder_is_no_obstacle(
    source: Path, uninterrupted: Whole, tmp_path: Path
) -> None:
    """A kill may cut off anything that was being written."""
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(source, output, True, progress=Interrupt(60))
    folder = partial_folder(output)
    block = next((folder / "blocks").glob("*.safetensors"))
    block.write_bytes(block.read_bytes()[:50])
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"kind": "shard", "file": "model-0')
    for shard in (folder / "model").glob("*.safetensors"):
        shard.write_bytes(bytes(shard.stat().st_size))
    run(source, output, True)
    assert contents(output) == contents(uninterrupted(True).folder)
    assert Workplace(output, "x", force=True).notes("shard") == []


# Conversions that cannot be finished leave nothing that loads, and touch nothing else


def test_outputs_that_are_empty_or_in_folders_that_do_not_exist(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    for output in (tmp_path / "out", tmp_path / "a" / "b" / "out"):
        verify_files(run(source, output).folder)


def test_force_replaces_everything_once_the_new_output_is_whole(
    source: Path, tmp_path: Path
) -> None:
    output = run(source, tmp_path / "out", changes={"seed": 1}).folder
    (output / "old.safetensors").write_text("old")
    before = contents(output)
    broken = _with_tensor(source, tmp_path / "broken", REWRITTEN, float("nan"))
    with pytest.raises(FitError):
        run(broken, output, force=True)
    assert contents(output) == before
    run(source, output, force=True)
    assert contents(output) == contents(run(source, tmp_path / "other").folder)
    assert not partial_folder(output).exists()


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


NAN, INFINITY = float("nan"), float("inf")
BAD, NO_FIT = "holds NaN or infinity", r"does not fit into torch\.float16"
LAYER = "bert.encoder.layer.0.output.dense"


@pytest.mark.parametrize(
    ("name", "value", "aware", "dtype", "words"),
    [
        (REWRITTEN, NAN, True, None, BAD),
        (REWRITTEN, INFINITY, False, None, BAD),
        (COPIED, NAN, False, None, BAD),
        (BIAS, NAN, True, None, rf"key\.bias.*{BAD}"),
        ("bert.embeddings.position_embeddings.weight", INFINITY, False, "float16", BAD),
        ("bert.embeddings.LayerNorm.weight", 1e5, False, "float16", NO_FIT),
        (f"{LAYER}.bias", -1e5, False, "float16", NO_FIT),
        ("bert.embeddings.LayerNorm.bias", -1e5, False, "float16", NO_FIT),
        (f"{LAYER}.weight", 3e38, False, "float16", NO_FIT),
    ],
)
def test_bad_numbers_are_named(
    name: str,
    value: float,
    aware: bool,
    dtype: str | None,
    words: str,
    source: Path,
    tmp_path: Path,
) -> None:
    broken = _with_tensor(source, tmp_path / "broken", name, value)
    with pytest.raises(FitError, match=words) as failed:
        run(broken, tmp_path / "out", aware, changes={"dtype": dtype})
    assert name.rpartition(".")[0] in failed.value.message
    assert failed.value.hint
    assert_nothing_left(tmp_path / "out")


def test_a_shard_that_is_truncated_while_it_is_read(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    victim = sorted((tmp_path / "dense").glob("*.safetensors"))[1]

    class Cut(Silent):
        def stage(self, name: str, total: int, unit: str) -> None:
            victim.write_bytes(victim.read_bytes()[:200])

    with pytest.raises(SourceError, match=victim.name):
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


@pytest.mark.often("False")
@pytest.mark.parametrize("aware", [False, True])
def test_a_full_disk(
    aware: bool, source: Path, uninterrupted: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.often("another shape", "another type", "a mechanism", "weights that are drawn")
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
