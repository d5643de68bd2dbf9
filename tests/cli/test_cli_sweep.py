"""`tcompress sweep`: from options to a table, and one clear line for everything that is wrong."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tcompress.cli import terminal
from tcompress.errors import FitError
from tcompress.options import Finetune, Recipe
from tcompress.structures.lprod import LprodSpec
from tests.support.cli import completed, error, run, worked
from tests.support.sweeps import sweep_folder, sweep_models  # noqa: F401 - fixtures
from tests.support.typed import recipe_of

pytestmark = pytest.mark.usefixtures("sweep_folder")
FREE = ("--calib", "none", "--device", "cpu", "-o", "out")
STS = ("--task", "sts", "--data", "pairs.jsonl")


def settings(**given: Any) -> Recipe:
    return recipe_of(given)


def test_defaults() -> None:
    said = settings()
    assert {"svd", "lprod", "tt"} <= {*said.sweep.methods}
    assert said.sweep.targets == (0.5, 0.25)
    assert said.sweep.keep_models
    assert (said.finetune, said.evaluate, said.bench) == (None, (), None)


def test_every_option_reaches_the_recipe() -> None:
    said = settings(
        methods="svd, lprod:p=8:transform=dct", targets="0.4, 0.1", finetune_steps=7,
        train_data=["a.txt", "b.txt"], task="sts", data="a.csv", split="test",
        columns=["score=s"], limit=9, bench=True, allocation="uniform", keep=["down"],
        calib="c.txt", calib_samples=3, calib_columns=["x"], keep_models=False, dtype="float16",
        device="cpu", changes=["finetune.batch_size=5", "bench.batch=[2]"],
    )  # fmt: skip
    assert said.sweep.methods == ("svd", LprodSpec(p=8, transform="dct"))
    assert said.sweep.targets == (0.4, 0.1)
    assert not said.sweep.keep_models
    data = {"source": ("a.txt", "b.txt")}
    assert said.finetune == Finetune(steps=7, batch_size=5, device="cpu", data=data)
    assert said.evaluate[0].model_dump(exclude_defaults=True) == {
        "task": "sts", "data": ("a.csv",), "split": "test", "columns": {"score": "s"}, "limit": 9,
        "device": "cpu",
    }  # fmt: skip
    assert (said.bench.batch, said.bench.device) == ((2,), "cpu")
    assert said.convert.model_dump(exclude_defaults=True) == {
        "method": {},
        "allocation": "uniform",
        "keep": ("down",),
        "calibration": {"source": ("c.txt",), "samples": 3, "columns": ("x",)},
        "dtype": "float16",
        "device": "cpu",
    }


def test_options_change_a_recipe() -> None:
    said = settings(recipe="encoder/minilm-sweep", targets="0.3", limit=None)
    base = settings(recipe="encoder/minilm-sweep")
    assert said.sweep.targets == (0.3,)
    assert said.sweep.methods == base.sweep.methods
    assert said.evaluate == base.evaluate
    assert settings(recipe="encoder/minilm-tt-25").sweep.methods == ()  # its own


def test_speeds_take_the_place_of_sizes() -> None:
    done = completed("sweep", "bert", "--methods", "svd", "--speedups", "2,4", "--dry-run")
    names = [line.split()[0] for line in done.out.splitlines() if line.startswith(" svd-")]
    assert names == ["svd-2x", "svd-4x"]


def test_what_options_make_of_a_recipe_is_checked() -> None:
    Path("own.yaml").write_text(
        "recipe_version: 1\nconvert: {method: {name: svd, rank: 8}, calibration: {source: none}}\n"
    )
    done = run("sweep", "bert", "--recipe", "own.yaml", *FREE)
    assert done.code == 2
    assert "rank" in done.err


def test_table_and_exit_code_with_a_refused_cell() -> None:
    done = completed("sweep", "bert", "--methods", "svd,lprod:p=3", "--targets", "0.5", *STS, *FREE)
    assert done.lines[0].split() == [
        "model", "kept", "params", "bytes", "spearman", "ratio", "seconds"
    ]  # fmt: skip
    rows = [line.replace("*", " ").split() for line in done.lines[2:4]]
    assert [row[:3] for row in rows] == [
        ["dense", "100.0%", "14,976"],
        ["svd-50", "48.4%", "10,752"],
    ]
    assert "lprod-p3-50  none of 6 layers can be rewritten:" in done.out
    assert done.lines[-2:] == ["Wrote `out`.", "Report: `out/sweep.html`."]
    assert "svd-50: 1 of 1\n" in done.err


def test_json_is_what_the_folder_holds() -> None:
    options = ("--methods", "svd", "--targets", "0.5", *STS, *FREE)
    done = worked("sweep", "bert", *options, "--json", "--quiet")
    assert done.document == json.loads(Path("out/sweep.json").read_text())
    again = run("sweep", "bert", *options, "--json")
    assert again.document == done.document
    assert again.err == "`svd-50` is already done\n"


def test_dry_run_reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcompress.models.store.Shard.read", Mock(side_effect=AssertionError))
    options = ("--methods", "svd,lprod,lprod:p=3", "--dry-run", *FREE)
    done = worked("sweep", "bert", *options)
    names = ["svd-50", "svd-25", "lprod-p8-50", "lprod-p8-25"]
    assert [line.split()[0] for line in done.lines[2:6]] == names
    assert done.lines[-1] == "Nothing was written. Without `--dry-run`, this writes `out`."
    cells = run("sweep", "bert", *options, "--json").document["cells"]
    assert [cell["name"] for cell in cells] == [*names, "lprod-p3-50", "lprod-p3-25"]
    assert [cell["refused"] is None for cell in cells] == [True] * 4 + [False] * 2
    assert cells[0]["parameters"] == 10_752
    assert not Path("out").exists()


def test_recipe_with_a_sweep_runs() -> None:
    Path("my.yaml").write_text(
        "recipe_version: 1\nmodel: ./bert\noutput: out\n"
        "convert: {method: {name: svd}, calibration: {source: none}, device: cpu}\n"
        "sweep: {targets: [0.5]}\n"
    )
    done = run("run", "my.yaml", "--dry-run")
    assert "svd-50" in done.out
    done = worked("run", "my.yaml", "--quiet")
    assert "mean weight error" in done.out
    assert Path("out/svd-50/config.json").is_file()


def test_failed_cell_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tcompress.pipeline.convert", Mock(side_effect=FitError("layer `q` is not finite"))
    )
    done = run("sweep", "bert", "--methods", "svd", "--targets", "0.5", *STS, *FREE)
    assert done.code == 2
    assert "svd-50    layer `q` is not finite" in done.out


def test_missed_threshold_is_an_exit_code() -> None:
    bound = ("--set", "evaluate.0.threshold='0.999'")
    options = ("--methods", "svd", "--targets", "0.5", *STS, *bound, *FREE)
    done = run("sweep", "bert", *options)
    assert done.code == 3
    assert "Missed by `svd-50`: sts spearman " in done.out


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcompress.pipeline.convert", Mock(side_effect=KeyboardInterrupt))
    done = run("sweep", "bert", "--methods", "svd", *FREE, "--quiet")
    assert (done.code, done.out) == (130, "")
    assert done.err == error(
        "interrupted; what was finished is kept in `out`",
        "run the same command again: it goes on where it stopped",
    )


def test_bars_of_cells() -> None:
    bars = terminal._Bars()
    with bars.bars as shown:
        bars.part("svd-50", 1, 2)
        bars.stage("fitting blocks", 2, "groups")
        bars.stage("writing", 2, "bytes")
        assert [task.description for task in shown.tasks] == [
            "cells", "fitting blocks", "writing"
        ]  # fmt: skip
        bars.part("svd-25", 2, 2)
        assert [task.description for task in shown.tasks] == ["cells"]
        assert (shown.tasks[0].completed, shown.tasks[0].fields["note"]) == (1, "svd-25")
