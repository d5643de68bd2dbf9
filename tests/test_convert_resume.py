"""Conversions that were cut short go on where they stopped, with the same result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tcompress
from tcompress.artifact.reader import Artifact
from tcompress.artifact.workplace import Workplace
from tcompress.conversion import blocks
from tcompress.conversion.blocks import BlockResult
from tcompress.conversion.converter import Converted, convert
from tcompress.conversion.state import FitWorkplace
from tcompress.errors import InputError
from tcompress.planning.entries import Plan
from tcompress.progress import Silent
from tests.support.conversions import calibration, threads
from tests.support.interrupted import (
    Interrupt,
    assert_nothing_loads,
    contents,
    convert_until_killed,
    partial_folder,
    run,
    several_files,
)
from tests.support.tiers import tiered
from tests.support.tiny import TINY, build

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def source(tiny: Callable[[str], Path]) -> Path:
    return tiny("bert")


# Where to kill, without and with data, and whether a line of the journal was written by then.
MOMENTS: list[tuple[bool, tuple[str, int] | str, bool]] = [
    (False, ("writing", 1), False),  # the first tensor of the first file
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


RARER = (("writing", 1), ("fitting blocks", 2), "tcompress.conversion.converter.write_index")


@pytest.mark.parametrize(
    ("aware", "moment", "begun"), tiered(MOMENTS, lambda row: row[1] not in RARER)
)
def test_killed_and_run_again(
    aware: bool,
    moment: tuple[str, int] | str,
    begun: bool,
    source: Path,
    uninterrupted: Callable[[bool], Converted],
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    family = "bert" if aware else None
    convert_until_killed(source, several_files(aware), output, family, moment)
    assert_nothing_loads(output)
    again = run(source, output, aware)
    assert again.resumed is begun
    assert contents(output) == contents(uninterrupted(aware).folder)
    assert not partial_folder(output).exists()


def test_killed_before_the_last_rename(
    source: Path, uninterrupted: Callable[[bool], Converted], tmp_path: Path
) -> None:
    """What is then in the working folder is whole."""
    output = tmp_path / "out"
    moment = "tcompress.artifact.workplace.Workplace.publish"
    convert_until_killed(source, several_files(), output, None, moment)
    assert not output.exists()
    Artifact.open(partial_folder(output) / "model").verify_checksums()
    assert run(source, output).resumed
    assert contents(output) == contents(uninterrupted(False).folder)


def test_killed_between_the_last_rename_and_the_end(
    source: Path, uninterrupted: Callable[[bool], Converted], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    moment = "tcompress.artifact.workplace.Workplace.discard"
    convert_until_killed(source, several_files(), output, None, moment)
    assert contents(output) == contents(uninterrupted(False).folder)
    run(source, output, force=True)
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

    def fit(*args: object, **options: object) -> None:
        raise AssertionError("a block was fitted again")

    monkeypatch.setattr(blocks, "fit_layers", fit)
    run(source, output, True)
    assert all((output / name).stat().st_mtime_ns == time for name, time in kept.items())


@pytest.mark.parametrize(("aware", "after"), [(False, 40), (True, 10), (True, 40)])
def test_an_interrupt_keeps_the_work(
    aware: bool,
    after: int,
    source: Path,
    uninterrupted: Callable[[bool], Converted],
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    before = threads()
    with pytest.raises(KeyboardInterrupt):
        run(source, output, aware, progress=Interrupt(KeyboardInterrupt(), after))
    assert threads() == before
    assert_nothing_loads(output)
    assert run(source, output, aware).resumed
    assert contents(output) == contents(uninterrupted(aware).folder)


@pytest.mark.parametrize("change", ["recipe", "weights", "config", "data", "tool"])
def test_changed_input_starts_afresh(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output, other = (tmp_path / name for name in ("dense", "out", "other"))
    build("bert").save_pretrained(source)
    with pytest.raises(KeyboardInterrupt):
        run(source, output, True, progress=Interrupt(KeyboardInterrupt(), 60))
    recipe, data = several_files(True), calibration("bert")
    if change == "recipe":
        recipe = several_files(True, keep=["down"])
    elif change == "weights":
        build("bert", seed=1).save_pretrained(source)
    elif change == "config":
        config = source / "config.json"
        config.write_text(config.read_text().replace('"gelu"', '"relu"'))
    elif change == "tool":  # another version may fit in another way
        monkeypatch.setattr(tcompress, "__version__", "99.0")
    else:
        batches = calibration("bert", 2).batches
        data = dataclasses.replace(data, batches=batches, holdout=[1], fingerprint="another")
    again = convert(str(source), recipe, output, data=data)
    assert not again.resumed
    assert contents(output) == contents(convert(str(source), recipe, other, data=data).folder)


@pytest.mark.parametrize("name", ["query.weight", "LayerNorm.bias"])
def test_one_changed_tensor_starts_afresh(name: str, tmp_path: Path) -> None:
    """Such as a repaired one: names, shapes and sizes stay what they were."""
    source, output, other = (tmp_path / name for name in ("dense", "out", "other"))
    options = {**TINY["bert"].options, "vocab_size": 20_000}  # most of the file is not a layer
    dataclasses.replace(TINY["bert"], options=options).build().save_pretrained(source)
    with pytest.raises(KeyboardInterrupt):
        run(source, output, progress=Interrupt(KeyboardInterrupt(), 60))
    weights = source / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(weights).items()}
    key = next(key for key in tensors if "layer.0" in key and key.endswith(name))
    tensors[key] += 0.5
    weights.unlink()
    save_file(tensors, weights, {"format": "pt"})
    run(source, output)
    assert contents(output) == contents(run(source, other).folder)


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
    Artifact.open(output).verify_checksums()


def test_damaged_results_count_as_none(tmp_path: Path) -> None:
    """Whatever a conversion keeps is written whole; what is damaged all the same is done again."""
    place = FitWorkplace(tmp_path / "out", "x")
    place.keep_change(0.5)
    place.keep_banks({("a", "b"): {"c": torch.ones(2)}})
    place.keep_answers({"svd": Plan(layers=(), source="m", method="svd")})
    place.keep_curvature("block", {"q": torch.ones(2, 2)})
    place.keep_inputs("block", {"q": torch.ones(2, 2)})
    assert place.change() == 0.5
    assert place.answers() is not None
    assert place.banks() is not None
    (place.folder / "curvature" / "block.safetensors").write_bytes(b"cut off")
    assert place.answers() is None  # it rests on them
    for path in place.folder.rglob("*"):
        if path.is_file() and path.name != "lock":
            path.write_bytes(b"\xff{")
    assert (place.change(), place.answers(), place.banks()) == (None,) * 3
    assert (place.depth(), place.block("block")) == (None, None)
    assert place.curvature("block") == place.inputs("block") == {}


def test_an_adoption_that_was_cut_short(tmp_path: Path) -> None:
    place = FitWorkplace(tmp_path / "out", "x")
    trial = place.trial("svd")
    trial.keep_answers({"svd": Plan(layers=(), source="m", method="svd")})
    trial.keep_inputs("block", {"q": torch.ones(2, 2)})
    trial.close()
    (trial.folder / "inputs").rename(place.folder / "inputs")  # so far it came
    place.adopt("svd")
    place.adopt("svd")
    assert place.answers() is not None
    assert place.inputs("block")
    assert not (place.folder / "trials").exists()


def test_a_damaged_working_folder_is_no_obstacle(
    source: Path, uninterrupted: Callable[[bool], Converted], tmp_path: Path
) -> None:
    """A kill may cut off anything that was being written."""
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(source, output, True, progress=Interrupt(KeyboardInterrupt(), 60))
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


def test_what_attention_began_with_is_kept(tmp_path: Path) -> None:
    place = FitWorkplace(tmp_path / "out", "same")
    place.keep_block(BlockResult("block", {}, {}, {"attn.tc_attn.factor_q": torch.ones(2)}))
    found = place.block("block")
    place.discard()
    assert found.attention["attn.tc_attn.factor_q"].tolist() == [1.0, 1.0]
