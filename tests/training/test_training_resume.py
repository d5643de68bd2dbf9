"""Runs of training that were cut short go on where they stopped, with the same result."""

import errno
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors import SafetensorError

from tcompress.artifact.checksums import seal
from tcompress.artifact.manifest import read_manifest, write_manifest
from tcompress.artifact.reader import verify_files
from tcompress.errors import DiskError, InputError, TrainingError
from tcompress.training.checkpoints import Checkpoints, RunState
from tcompress.training.finetuning import Finetuned
from tests.support.evaluation import encoder, labelled_file
from tests.support.interrupted import assert_nothing_loads, partial_folder
from tests.support.training import (
    AtStep,
    curve,
    interrupt,
    small,
    small_encoder,
    texts,
    train,
    train_until_killed,
    weights,
)

# Epochs of 4 steps; a validation and a checkpoint at different steps.
OPTIONS: dict[str, Any] = {
    "steps": 11, "evaluate_every": 3, "checkpoint_every": 2, "learning_rate": 3e-3
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    small_encoder(folder)
    texts(folder)
    labelled_file(folder / "rows.jsonl", 40)
    encoder(folder / "dense")
    (folder / "tied").mkdir()
    small("gpt2", folder / "tied")
    return folder


def _run(kind: str, place: Path) -> tuple[Path, dict[str, Any]]:
    """A model and how to train it."""
    if kind == "dropout":  # draws from torch's generator in every step
        rows = {"source": [str(place / "rows.jsonl")]}
        return place / "dense", {**OPTIONS, "task": "classification", "data": rows}
    more = {"tied": {"train": "all"}, "muon": {"optimizer": "muon"}, "blocks": {"block_steps": 5}}
    data = {"source": [str(place / "texts.txt")]}
    model = place / ("tied/gpt2-small" if kind == "tied" else "bert-small")
    return model, {**OPTIONS, "data": data, **more.get(kind, {})}


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finetuned]:
    """Uninterrupted runs to compare with."""

    @cache
    def of(kind: str) -> Finetuned:
        model, options = _run(kind, place)
        return train(model, tmp_path_factory.mktemp("whole") / "out", **options)

    return of


def _assert_same(done: Finetuned, wanted: Finetuned) -> None:
    """To the last bit."""
    assert curve(done) == curve(wanted)
    assert weights(done.folder) == weights(wanted.folder)
    for name in ("steps", "samples", "tokens", "best", "best_step"):
        assert getattr(done.facts, name) == getattr(wanted.facts, name)


MOMENTS: list[tuple[str, int | str, bool]] = [
    ("heal", 1, False),  # before the first checkpoint
    ("heal", 10, True),  # in a later epoch
    ("dropout", 7, True),
    ("tied", 5, True),
    ("blocks", 9, True),
    ("muon", 7, True),
    ("heal", "tcompress.artifact.workplace.Workplace.publish", True),
]


@pytest.mark.often("dropout-7-True")
@pytest.mark.parametrize(("kind", "moment", "begun"), MOMENTS)
def test_killed_and_run_again(
    kind: str,
    moment: int | str,
    begun: bool,
    place: Path,
    whole: Callable[[str], Finetuned],
    tmp_path: Path,
) -> None:
    model, options = _run(kind, place)
    output = tmp_path / "out"
    train_until_killed(model, output, moment, **options)
    assert not output.exists()
    if isinstance(moment, int):
        assert_nothing_loads(output)
    again = train(model, output, **options)
    assert again.resumed is begun
    _assert_same(again, whole(kind))
    assert not partial_folder(output).exists()


def test_interrupted_twice(place: Path, whole: Callable[[str], Finetuned], tmp_path: Path) -> None:
    model, options = _run("dropout", place)
    for step in (3, 6):
        with pytest.raises(KeyboardInterrupt):
            train(model, tmp_path / "out", progress=AtStep(step, interrupt), **options)
        assert_nothing_loads(tmp_path / "out")
    _assert_same(train(model, tmp_path / "out", **options), whole("dropout"))


@pytest.mark.often("change1")
@pytest.mark.parametrize(
    "change", [{"learning_rate": 1e-3}, {"seed": 1}, {"objectives": {"hidden": 1}}, {"data": None}]
)
def test_changed_options_start_afresh(change: dict[str, Any], place: Path, tmp_path: Path) -> None:
    model, options = _run("heal", place)
    if change == {"data": None}:  # the same file with another content
        change = {"data": texts(tmp_path, 41)}
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path / "out", progress=AtStep(5, interrupt), **options)
    again = train(model, tmp_path / "out", **{**options, **change})
    assert not again.resumed
    _assert_same(again, train(model, tmp_path / "other", **{**options, **change}))


@pytest.mark.slow
def test_a_changed_model_starts_afresh(tmp_path: Path) -> None:
    model, data = small_encoder(tmp_path), texts(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path / "out", progress=AtStep(5, interrupt), data=data, **OPTIONS)
    other = train(model, tmp_path / "other", data=data, steps=2)
    for path in other.folder.glob("*.safetensors"):
        (model / path.name).write_bytes(path.read_bytes())
    manifest = read_manifest(model)
    write_manifest(model, manifest.model_copy(update=seal(model)))
    assert not train(model, tmp_path / "out", data=data, **OPTIONS).resumed


@pytest.mark.slow
def test_a_finished_output_is_not_replaced(place: Path, tmp_path: Path) -> None:
    model, options = _run("heal", place)
    options["steps"] = 2
    done = train(model, tmp_path / "out", **options)
    before = weights(done.folder)
    with pytest.raises(InputError, match="is not empty"):
        train(model, tmp_path / "out", **options)
    assert weights(done.folder) == before
    other = train(model, tmp_path / "out", force=True, seed=1, **options)
    assert weights(other.folder) != before
    verify_files(other.folder)


@pytest.mark.slow
def test_an_output_that_appears_meanwhile(place: Path, tmp_path: Path) -> None:
    """It is not replaced, and the training is not lost."""
    model, options = _run("heal", place)
    output = tmp_path / "out"

    def appear() -> None:
        output.mkdir()
        (output / "mine.txt").touch()

    with pytest.raises(InputError, match="is not empty"):
        train(model, output, progress=AtStep(5, appear), **options)
    assert [path.name for path in output.iterdir()] == ["mine.txt"]
    (output / "mine.txt").unlink()
    assert train(model, output, **options).resumed


FULL = OSError(errno.ENOSPC, "No space left on device")
CHECKPOINT = "the checkpoint of step 4 cannot be written ("


@pytest.mark.often(
    "accelerate.Accelerator.save_state-1-error0-the checkpoint of step 4 cannot be written (-2",
    "tcompress.training.checkpoints.save_file-2-error2-the best weights cannot be written (-4",
)
@pytest.mark.parametrize(
    ("function", "call", "error", "said", "kept"),
    [
        ("accelerate.Accelerator.save_state", 1, FULL, CHECKPOINT, 2),
        (
            "accelerate.Accelerator.save_state",
            1,
            RuntimeError("[enforce fail at inline_container.cc] PytorchStreamWriter failed"),
            CHECKPOINT,
            2,
        ),
        (
            "tcompress.training.checkpoints.save_file",
            2,
            SafetensorError("Error while serializing: I/O error: No space left on device"),
            "the best weights cannot be written (",
            4,
        ),
        ("tcompress.training.finetuning.write_manifest", 0, FULL, "there is no space for", 10),
    ],
)
def test_full_disk(
    function: str,
    call: int,
    error: Exception,
    said: str,
    kept: int,
    place: Path,
    whole: Callable[[str], Finetuned],
    tmp_path: Path,
) -> None:
    """The checkpoint before is still there, and the run goes on from it."""
    model, options = _run("heal", place)
    inner, calls = resolve_name(function), count()

    def full(*args: object, **options: object) -> None:
        inner(*args, **options)
        if next(calls) == call:
            raise error

    with patch(function, full), pytest.raises((TrainingError, DiskError)) as failed:
        train(model, tmp_path / "out", **options)
    assert failed.value.message.startswith(said)
    for words in ("free some disk space", "run the same command again"):
        assert words in (failed.value.hint or "")
    assert not (tmp_path / "out").exists()
    work = partial_folder(tmp_path / "out")
    assert not list(work.rglob("*.tmp"))
    assert [path.name for path in work.glob("checkpoints/step-*")] == [f"step-{kept:08}"]
    again = train(model, tmp_path / "out", **options)
    assert again.resumed
    _assert_same(again, whole("heal"))


def test_best_weights_that_a_checkpoint_needs_are_kept(tmp_path: Path) -> None:
    """A resumed run may find other ones, as on devices that round differently each time."""
    kept = Checkpoints(tmp_path)
    kept.keep_best({"a": torch.zeros(1)}, 0)
    kept.keep_best({"a": torch.ones(1)}, 3)
    names = sorted(path.name for path in tmp_path.glob("best-*"))
    assert names == ["best-00000000.safetensors", "best-00000003.safetensors"]
    kept.save(RunState(step=4, best_step=3), Mock(is_main_process=True))
    kept.keep_best({"a": torch.full((1,), 6.0)}, 6)
    kept.keep_best({"a": torch.full((1,), 9.0)}, 9)
    again = Checkpoints(tmp_path)
    last = again.last()
    state = again.read_state(last)
    assert float(again.best(state.best_step)["a"]) == 1.0
    assert len(list(tmp_path.glob("best-*"))) == 3
    kept.save(RunState(step=10, best_step=9), Mock(is_main_process=True))
    names = sorted(path.name for path in tmp_path.glob("best-*"))
    assert names == ["best-00000000.safetensors", "best-00000009.safetensors"]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000010"]
