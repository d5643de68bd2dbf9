"""Commands that are killed and run again: the same bytes, and no model is lost."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tcompress.artifact.reader import verify_files
from tcompress.conversion.converter import convert
from tcompress.errors import InputError
from tcompress.exports.onnx_folder import export_onnx
from tcompress.exports.onnx_graph import write_graph
from tcompress.files import _exchange
from tcompress.options.commands import OnnxFiles
from tests.support.cli import completed
from tests.support.interrupted import contents, killed, run, several_files
from tests.support.model_folders import sentences, text_file
from tests.support.tiny import build
from tests.support.training import settings, small_encoder, train

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Row:
    """One way of working.

    Attributes:
        work: What is killed and done again, with the folder of models and its own folder.
        force: Whether it replaces an older model.
        step: Kills at every so many operations; one works for seconds between two of them.
    """

    work: Callable[[Path, Path], object]
    force: bool = False
    step: int = 1


def _convert(
    models: Path, folder: Path, *, aware: bool = False, force: bool = False, swaps: bool = True
) -> None:
    """On a system that can exchange two folders in one step, or cannot."""
    with patch("tcompress.files._exchange", _exchange if swaps else lambda *_: False):
        run(models / "dense", folder / "out", aware, force=force)


def _searched(models: Path, folder: Path) -> None:
    """With trials of several methods."""
    recipe = several_files(method={"name": "auto"}, target=0.5, calibration=_sentences(models))
    convert(str(models / "bert"), recipe, folder / "out")


def _finetuned(models: Path, folder: Path) -> None:
    data = {"source": [str(models / "texts.txt")]}
    train(models / "bert-small", folder / "out", data=data, steps=5, checkpoint_every=2)


def _recipe(models: Path, folder: Path) -> None:
    completed("run", models / "recipe.yaml", "-o", folder / "out", "--quiet")


def _sentences(models: Path) -> dict[str, Any]:
    data = {"source": str(models / "texts.txt"), "samples": 12, "max_length": 16, "batch_size": 4}
    return data | {"holdout": 0.25}


ROWS = {
    "convert": Row(_convert),
    "convert, fitted": Row(partial(_convert, aware=True)),
    "convert, auto": Row(_searched, step=3),
    "convert --force": Row(partial(_convert, force=True), force=True),
    "convert --force, two steps": Row(partial(_convert, force=True, swaps=False), force=True),
    "finetune": Row(_finetuned),
    "run": Row(_recipe),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    build("bert").save_pretrained(folder / "dense")
    build("bert", seed=1).save_pretrained(folder / "other")
    small_encoder(folder)
    text_file(folder / "texts.txt", sentences(40))
    run(folder / "other", folder / "old")
    recipe = {
        "recipe_version": 1,
        "model": str(folder / "bert"),
        "convert": {"method": {"name": "svd"}, "target": 0.5, "calibration": _sentences(folder)},
        "finetune": settings(
            data={"source": [str(folder / "texts.txt")]}, steps=3, checkpoint_every=2
        ).model_dump(mode="json", exclude_defaults=True),
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


@dataclass
class Trial:
    """A row with a folder for each kill."""

    row: Row
    models: Path
    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        whole = self._fresh("whole")
        start = time.monotonic()
        self.row.work(self.models, whole)
        self.seconds = time.monotonic() - start
        self.wanted = _results(whole)
        self.old = contents(self.models / "old")

    def _fresh(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        if self.row.force:
            shutil.copytree(self.models / "old", folder / "out")
        return folder

    def kill(self, *, operation: int = 0, seconds: float | None = None) -> bool:
        """Kills the work once and does it again; whether it was still at work then."""
        folder = self._fresh("killed")
        moment: dict[str, Any] = {"operation": operation, "seconds": seconds}
        was = killed(self.row.work, self.models, folder, folder=folder, **moment)
        if was:
            self._check_between(folder)
            try:
                self.row.work(self.models, folder)
            except InputError as error:  # it had come to its very end
                if "is not empty" not in error.message:
                    raise
        assert _results(folder) == self.wanted, moment
        assert not list(folder.glob(".*")), moment
        shutil.rmtree(folder)
        return was

    def _check_between(self, folder: Path) -> None:
        """What stands under the output's name is whole, and the old model is somewhere."""
        found = _results(folder)
        if "out" in found:
            assert found["out"] in (self.old, self.wanted["out"])
        elif self.row.force:
            assert contents(folder / ".out.partial" / "replaced") == self.old


def _exported(models: Path, folder: Path) -> None:
    """Add ONNX files to a model; what PyTorch's exporter writes was written before."""
    export = models / "export"
    export.mkdir(exist_ok=True)
    kept = export / "model.onnx"

    def write(part: Any, path: Path) -> None:
        if not kept.is_file():
            write_graph(part, kept)
        shutil.copyfile(kept, path)

    source = folder / "out" if (folder / "out").is_dir() else models / "old"
    with patch("tcompress.exports.onnx_folder.write_graph", write):
        export_onnx(source, folder / "out", OnnxFiles(int8=True))


@pytest.mark.fuzz
@pytest.mark.parametrize("inside", [False, True])
def test_an_export_is_there_whole_or_not_at_all(inside: bool, models: Path, tmp_path: Path) -> None:
    """In a folder of its own, and in that of the model, which is whole at every moment."""
    (tmp_path / "whole").mkdir()
    _exported(models, tmp_path / "whole")
    names = contents(tmp_path / "whole" / "out").keys()
    old, kills, operation = contents(models / "old"), 0, 1
    while True:
        folder = tmp_path / f"killed-{operation}"
        folder.mkdir()
        if inside:
            shutil.copytree(models / "old", folder / "out")
        if not killed(_exported, models, folder, folder=folder, operation=operation):
            break
        kills += 1
        if (folder / "out").is_dir():
            found = contents(folder / "out")
            assert (inside and found == old) or found.keys() == names
            verify_files(folder / "out")
        else:
            assert not inside
        _exported(models, folder)  # the same command completes it
        assert contents(folder / "out").keys() == names
        assert not list(folder.glob(".*"))
        verify_files(folder / "out")
        shutil.rmtree(folder)
        operation += 1
    assert kills >= 20


def _results(folder: Path) -> dict[str, dict[str, str]]:
    """Checksums of all finished folders."""
    return {path.name: contents(path) for path in sorted(folder.glob("[!.]*"))}


def test_killed_where_models_take_places(models: Path, tmp_path: Path) -> None:
    """On a system that exchanges no names; all operations of all rows are tried below."""
    trial = Trial(ROWS["convert --force, two steps"], models, tmp_path / "trial")
    for operation in (52, 53, 54):
        assert trial.kill(operation=operation)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ROWS)
def test_killed_at_every_operation(name: str, models: Path, tmp_path: Path) -> None:
    trial = Trial(ROWS[name], models, tmp_path / "trial")
    operation = 1
    while trial.kill(operation=operation):
        operation += trial.row.step
    assert operation > 40


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["convert", "convert --force", "finetune", "run"])
def test_killed_at_any_moment(name: str, models: Path, tmp_path: Path) -> None:
    trial, moments = Trial(ROWS[name], models, tmp_path / "trial"), random.Random(0)
    for _ in range(60):
        trial.kill(seconds=moments.random() * trial.seconds)
