"""Sweeps that are interrupted or refused, and cells that fail and do not stop others."""

import json
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tcompress import pipeline, sweeps
from tcompress.conversion.converter import convert
from tcompress.errors import DataError, FitError, InputError
from tcompress.models import SourceModel
from tcompress.progress import Silent
from tcompress.sweeps import sweep
from tests.support.sweeps import (  # noqa: F401 - fixtures
    STS,
    Counting,
    quick,
    quick_evaluate,
    recipe,
    run,
    sweep_folder,
    sweep_models,
)

pytestmark = pytest.mark.usefixtures("sweep_folder")


class Stopping(Silent):
    """Presses Ctrl-C when the second cell has come so far."""

    def __init__(self, stage: str) -> None:
        self.at, self.cell = stage, 0

    def part(self, name: str, number: int, total: int) -> None:
        self.cell = number

    def stage(self, name: str, total: int, unit: str) -> None:
        if self.cell == 2 and name.endswith(self.at):
            raise KeyboardInterrupt


@pytest.mark.usefixtures("quick")
@pytest.mark.often("writing-left0")
@pytest.mark.parametrize(
    ("stage", "left"), [("writing", ["convert", "evaluate"]), ("svd-25", ["evaluate"])]
)
def test_interrupt_loses_the_cell_in_work_at_most(
    stage: str, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(recipe(), progress=Stopping(stage))
    rows = json.loads(Path("out/sweep.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["dense", "svd-50"]
    counting = Counting(monkeypatch)
    assert [row.name for row in run(recipe()).front.rows] == ["dense", "svd-50", "svd-25"]
    assert counting.since() == left


# What does not stop the others
@pytest.mark.usefixtures("quick")
def test_failed_cells_do_not_stop_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: SourceModel, said: Any, *args: Any, **options: Any) -> Any:
        if said.target == 0.5:
            raise FitError("layer `q` is not finite")
        return convert(source, said, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "convert", fail)
        found = run(recipe())
    assert found.failed
    assert [row.name for row in found.front.rows] == ["dense", "svd-25"]
    assert (found.stopped[0].status, found.stopped[0].reason) == (
        "failed", "layer `q` is not finite"
    )  # fmt: skip
    counting = Counting(monkeypatch)
    assert not run(recipe()).failed
    assert counting.since() == ["convert", "evaluate"]


@pytest.mark.usefixtures("quick")
@pytest.mark.grid
def test_model_that_cannot_be_measured_does_not_stop_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(models: Any, *args: Any, **options: Any) -> Any:
        if Path(models[0]).name == "svd-50":
            raise InputError("`spearman` is not defined")
        return quick_evaluate(models, *args, **options)

    monkeypatch.setattr(sweeps, "evaluate", fail)
    found = run(recipe())
    assert [(item.name, item.status) for item in found.stopped] == [("svd-50", "failed")]
    assert [row.name for row in found.front.rows] == ["dense", "svd-25"]


@pytest.mark.usefixtures("quick")
@pytest.mark.grid
def test_output_that_is_no_sweep_is_left_alone() -> None:
    Path("out").mkdir()
    Path("out/mine.txt").touch()
    with pytest.raises(InputError, match="is not empty"):
        run(recipe(targets=[0.5]))
    run(recipe(targets=[0.5]), force=True)
    assert Path("out/mine.txt").exists()


@pytest.mark.usefixtures("quick")
def test_what_a_killed_sweep_has_left_is_removed() -> None:
    Path("out/.sweep/tmp4ever").mkdir(parents=True)
    run(recipe(targets=[0.5]))
    assert not Path("out/.sweep/tmp4ever").exists()


@pytest.mark.usefixtures("quick")
def test_two_sweeps_do_not_share_an_output() -> None:
    Path("out/.sweep").mkdir(parents=True)
    with FileLock("out/.sweep/lock"), pytest.raises(InputError, match="another sweep is writing"):
        run(recipe(targets=[0.5]))


def test_a_sweep_that_cannot_begin_leaves_nothing() -> None:
    said = recipe(
        evaluate=[{**STS, "data": "nothere.jsonl"}], finetune={"data": {"source": ["no.txt"]}}
    )
    with pytest.raises(DataError) as caught:
        sweep(said, SourceModel.open("bert"), Path("new/out"))
    assert "`nothere.jsonl`" in caught.value.message
    assert "`no.txt`" in caught.value.message
    assert not Path("new").exists()
    Path("out").mkdir()
    with pytest.raises(DataError):
        run(said)
    assert list(Path("out").iterdir()) == []
