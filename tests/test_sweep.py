"""Sweeps of tiny models: what is done, what is not done again, and what does not stop others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch.nn.functional import normalize

import tcompress
from tcompress import pipeline
from tcompress.artifact.manifest import Difference, Metric
from tcompress.conversion.run import convert
from tcompress.errors import DataError, FitError, InputError, PlanError, RecipeError
from tcompress.evaluation.compare import Baseline
from tcompress.evaluation.run import evaluate
from tcompress.evaluation.scores import ModelScores
from tcompress.progress import Silent
from tcompress.recipe.schema import Recipe
from tcompress.source import SourceModel
from tcompress.sweeping.cells import Cell, cells_of, default_methods
from tcompress.sweeping.outcome import Swept, fallback_metric
from tcompress.sweeping.run import sweep
from tests.support.conversions import few_steps
from tests.support.depth import deep
from tests.support.evaluation import headed, loaded, one_thread, rows_file
from tests.support.model_folders import sentences, text_file
from tests.support.tiers import tiered

STS: dict[str, Any] = {"task": "sts", "data": "pairs.jsonl", "bootstrap": 50}
HEAL: dict[str, Any] = {
    "steps": 2,
    "batch_size": 4,
    "data": {"source": ["texts.txt"], "max_length": 16, "holdout": 0.2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    headed("bert", folder / "bert", "BertModel", num_hidden_layers=1)
    text_file(folder / "texts.txt", sentences(24))
    agreeable_pairs(folder / "pairs.jsonl", folder / "bert", 30)
    return folder


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    with one_thread():
        yield


def agreeable_pairs(path: Path, model: Path, count: int) -> None:
    """Pairs of sentences with the score that the model itself gives them."""
    network, tokenizer = loaded(model, "BertModel")
    texts = sentences(2 * count)
    inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        states = network(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    means = normalize((states * mask).sum(1) / mask.sum(1))
    scores = (means[:count] * means[count:]).sum(1).tolist()
    rows_file(path, sentence1=texts[:count], sentence2=texts[count:], score=scores)


def recipe(methods: Any = ("svd",), targets: Any = (0.5, 0.25), **sections: Any) -> Recipe:
    """A recipe without calibration data, unless it is given."""
    data = {"method": {"name": "lprod"}, "calibration": {"source": "none"}, "device": "cpu"}
    cells = {"methods": methods, "targets": targets, **sections.pop("sweep", {})}
    made = {"convert": {**data, **sections.pop("convert", {})}, "evaluate": [STS], **sections}
    return Recipe.model_validate({"recipe_version": 1, "sweep": cells, **made})


def run(said: Recipe, **options: Any) -> Swept:
    return sweep(said, SourceModel.open("bert"), Path("out"), **options)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes no time to measure quality, where only the order of work matters."""
    monkeypatch.setattr(pipeline, "evaluate", quick_evaluate)


def quick_evaluate(
    models: Any, task: str, data: str, *, limit: int | None = None, **options: Any
) -> list[ModelScores]:
    """Scores models by the bytes of their weights, without running them."""
    size = Path(models[0], "model.safetensors").stat().st_size
    examples = limit or len(Path(data).read_text().splitlines())
    known = options.get("baseline")
    value = size / Path("bert/model.safetensors").stat().st_size
    value += 0.1 * Path(models[0]).name.endswith("-healed")
    options["progress"].stage(Path(models[0]).name, 1, "inputs")
    found = Metric(
        name="spearman",
        value=value,
        difference=known
        and Difference(baseline=known.name, baseline_value=known.values[0], value=value - 1),
        protocol={"task": task, "data": data, "examples": examples},
    )
    baseline = Baseline("bert", [value], [np.zeros(2)], [examples], "tokens")
    return [ModelScores(str(models[0]), (found,), "examples", 1.0, baseline=baseline)]


class Counting:
    """Counts calls of what a pipeline does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("convert", "finetune", "evaluate", "bench"):
            monkeypatch.setattr(pipeline, name, self._counted(name, getattr(pipeline, name)))

    def _counted(self, name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            return function(*args, **options)

        return call

    def since(self) -> list[str]:
        """What was called since this was asked last."""
        calls, self.calls = self.calls, []
        return calls


def named(said: Recipe) -> list[Cell]:
    return cells_of(said, SourceModel.open("bert"))


# Cells


def test_cells_are_every_method_with_every_target() -> None:
    cells = named(recipe(["svd", {"name": "lprod", "p": 16}, "lprod"], [0.25, 0.5]))
    assert [cell.name for cell in cells] == [
        "svd-50", "svd-25", "lprod-p16-50", "lprod-p16-25", "lprod-p8-50", "lprod-p8-25"
    ]  # fmt: skip
    first = cells[0].recipe
    assert (first.convert.target, first.convert.calibration.source) == (0.5, "none")
    assert first.evaluate == recipe().evaluate
    assert first.sweep is None


def test_without_methods_the_recipe_s_own_is_swept() -> None:
    own = {"method": {"name": "svd"}}
    assert [cell.name for cell in named(recipe([], convert=own))] == ["svd-50", "svd-25"]


def test_default_is_a_method_of_each_structure() -> None:
    assert set(default_methods()) >= {"svd", "lprod", "tt"}
    assert "lowrank" not in default_methods()


def test_slices_are_so_many_that_no_width_is_left_out(tmp_path: Path) -> None:
    deep("llama", 2, intermediate_size=28).build().save_pretrained(tmp_path)  # type: ignore[attr-defined]
    cells = cells_of(recipe(["lprod"], [0.5]), SourceModel.open(str(tmp_path)))
    assert [cell.name for cell in cells] == ["lprod-p4-50"]
    assert cells[0].to_json()["left"] == 0


def test_names_differ_where_conversions_do() -> None:
    methods = [{"name": "lprod", "p": 4, "stages": count} for count in (1, 2, 1)]
    cells = named(recipe(methods, [0.5]))
    assert [cell.name for cell in cells] == ["lprod-p4-50", "lprod-p4-50-2"]


def test_refused_cells_say_why() -> None:
    cells = named(recipe([{"name": "lprod", "p": 3}, "svd"], [0.5]))
    assert cells[0].plan is None
    assert "p=3 does not divide the input 32" in (cells[0].refusal or "")
    assert cells[1].plan is not None
    with pytest.raises(PlanError, match=r"no cell of the sweep can be done:\n  - lprod-p3-50"):
        named(recipe([{"name": "lprod", "p": 3}], [0.5]))


# Results


def test_numbers_are_those_of_models_measured_side_by_side() -> None:
    found = run(recipe())
    side_by_side = evaluate(
        ["bert", "out/svd-50", "out/svd-25"], bootstrap=50, task="sts", data="pairs.jsonl"
    )
    reports = [found.dense, *(done.reports[-1] for done in found.cells)]
    for report, scores in zip(reports, side_by_side, strict=True):
        for metric, expected in zip(report.metrics, scores.metrics, strict=True):
            assert metric.value == expected.value
            assert metric.interval == expected.interval
            assert metric.difference == expected.difference
    convert("bert", named(recipe())[0].recipe.convert, "alone")
    weights = [Path(folder, "model.safetensors").read_bytes() for folder in ("alone", "out/svd-50")]
    assert weights[0] == weights[1]
    rows = {row.name: row for row in found.front.rows}
    assert next(iter(rows)) == "dense"
    assert rows["svd-50"].ratio == pytest.approx(rows["svd-50"].quality / rows["dense"].quality)
    assert rows["svd-25"].parameters < rows["svd-50"].parameters < rows["dense"].parameters
    assert "size" in rows["dense"].front
    assert "size" in rows["svd-25"].front  # nothing is smaller


@pytest.mark.usefixtures("quick")
def test_folder_holds_all_numbers() -> None:
    found = run(recipe(["svd", {"name": "lprod", "p": 3}], [0.5]))
    document = json.loads(Path("out/sweep.json").read_text())
    assert document == {"schema": 1, **json.loads(json.dumps(found.to_json()))}
    assert [row["name"] for row in document["rows"]] == ["dense", "svd-50"]
    assert [(item["name"], item["status"]) for item in document["stopped"]] == [
        ("lprod-p3-50", "refused")
    ]
    assert document["cells"][0]["recipe"]["convert"]["method"]["name"] == "svd"
    page = Path("out/sweep.html").read_text()
    assert "svd-50" in page
    assert "spearman against parameters kept" in page
    assert not found.failed


def test_without_a_task_the_last_layer_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    few_steps(monkeypatch)
    data = {"calibration": {"source": "texts.txt", "samples": 24}, "allocation": "uniform"}
    found = run(recipe(targets=[0.5], convert=data, evaluate=[]))
    report = found.cells[0].reports[0]
    assert found.front.metric == "held-out error of the last layer"
    assert found.front.rows[1].quality == report.layers[-1].errors["held_out"] > 0
    assert found.front.rows[0].quality == 0
    assert not found.front.higher_is_better
    assert fallback_metric(report).protocol["layer"] == report.layers[-1].name


@pytest.mark.grid
def test_without_task_and_data_weights_tell() -> None:
    found = run(recipe(evaluate=[]))
    assert found.front.metric == "mean weight error"
    errors = [row.quality for row in found.front.rows]
    assert errors == sorted(errors)  # from the dense model down
    assert [row.front for row in found.front.rows] == [("size",)] * 3


def test_healed_models_need_a_task() -> None:
    with pytest.raises(RecipeError, match="trained models cannot be compared without a task"):
        run(recipe(evaluate=[], finetune=HEAL))


# What is not done again


@pytest.mark.usefixtures("quick")
def test_nothing_is_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    counting, told = Counting(monkeypatch), []
    first = run(recipe())
    assert counting.since() == ["evaluate", "convert", "evaluate", "convert", "evaluate"]
    second = run(recipe(), say=told.append)
    assert counting.since() == []
    assert told == ["`svd-50` is already done", "`svd-25` is already done"]
    assert second.to_json() == first.to_json()


@pytest.mark.usefixtures("quick")
@pytest.mark.grid
def test_new_cells_alone_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    run(recipe(targets=[0.5]))
    counting = Counting(monkeypatch)
    found = run(recipe(targets=[0.5, 0.25]))
    assert counting.since() == ["convert", "evaluate"]
    assert [row.name for row in found.front.rows] == ["dense", "svd-50", "svd-25"]


@pytest.mark.usefixtures("quick")
def test_changed_measurement_keeps_models(monkeypatch: pytest.MonkeyPatch) -> None:
    run(recipe(targets=[0.5]))
    counting = Counting(monkeypatch)
    less = recipe(targets=[0.5], evaluate=[{**STS, "limit": 20}])
    assert run(less).dense.metrics[0].protocol["examples"] == 20
    assert counting.since() == ["evaluate", "evaluate"]
    assert run(recipe(targets=[0.5])).dense.metrics[0].protocol["examples"] == 30
    assert counting.since() == []  # both are known
    judged = recipe(targets=[0.5], evaluate=[{**STS, "threshold": "0.1x"}])
    run(judged)
    assert counting.since() == []


@pytest.mark.usefixtures("quick")
@pytest.mark.grid
def test_changed_data_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run(recipe(targets=[0.5]))
    agreeable_pairs(Path("pairs.jsonl"), Path("bert"), 40)
    counting = Counting(monkeypatch)
    assert run(recipe(targets=[0.5])).dense.metrics[0].protocol["examples"] == 40
    assert counting.since() == ["evaluate", "evaluate"]


@pytest.mark.usefixtures("quick")
def test_changed_conversion_does_all_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run(recipe(targets=[0.5]))
    counting = Counting(monkeypatch)
    found = run(recipe(targets=[0.5], convert={"keep": ["down"]}))
    assert counting.since() == ["convert", "evaluate"]
    assert found.front.rows[1].left == 1
    assert found.cells[0].reports[0].left


@pytest.mark.usefixtures("quick")
def test_healing_keeps_the_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    run(recipe(targets=[0.5]))
    counting = Counting(monkeypatch)
    found = run(recipe(targets=[0.5], finetune=HEAL))
    assert counting.since() == ["finetune", "evaluate"]
    row = found.front.rows[1]
    assert row.quality == pytest.approx(row.converted + 0.1)
    assert row.converted == found.cells[0].reports[0].metrics[0].value
    assert found.cells[0].reports[1].training
    run(recipe(targets=[0.5], finetune={**HEAL, "steps": 3}))
    assert counting.since() == ["finetune", "evaluate"]
    run(recipe(targets=[0.5]))
    assert counting.since() == []
    assert sorted(path.name for path in Path("out").glob("svd*")) == ["svd-50", "svd-50-healed"]


@pytest.mark.usefixtures("quick")
def test_times_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = {"batch": [1], "length": [8], "repeats": 1}
    run(recipe(targets=[0.5]))
    counting = Counting(monkeypatch)
    found = run(recipe(targets=[0.5], bench=bench))
    assert counting.since() == ["bench"]
    dense, small = found.front.rows
    speed = found.cells[0].reports[0].speed[0]
    assert (small.milliseconds, small.speed) == (speed.milliseconds, speed.ratio)
    assert dense.milliseconds == speed.baseline_milliseconds
    assert found.front.timed == "batch 1, length 8, cpu, 1 thread, float32"
    run(recipe(targets=[0.5], bench=bench))
    assert counting.since() == []


@pytest.mark.usefixtures("quick")
def test_models_need_not_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"sweep": {"keep_models": False}}
    first = run(recipe(targets=[0.5], **numbers))
    assert not Path("out/svd-50").exists()
    counting = Counting(monkeypatch)
    assert run(recipe(targets=[0.5], **numbers)).front == first.front
    assert counting.since() == []
    bench = {"batch": [1], "length": [8], "repeats": 1}
    run(recipe(targets=[0.5], bench=bench, **numbers))
    assert counting.since() == ["convert", "bench"]  # quality is known
    run(recipe(targets=[0.5]))
    assert counting.since() == ["convert"]  # to keep it now
    assert Path("out/svd-50/config.json").is_file()


@pytest.mark.usefixtures("quick")
@pytest.mark.grid
def test_force_does_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run(recipe(targets=[0.5]))
    counting = Counting(monkeypatch)
    run(recipe(targets=[0.5]), force=True)
    assert counting.since() == ["evaluate", "convert", "evaluate"]


class Stopping(Silent):
    """Presses Ctrl-C when the second cell has come so far."""

    def __init__(self, stage: str) -> None:
        self.at, self.cell = stage, 0

    def part(self, name: str, number: int, total: int) -> None:
        self.cell = number

    def stage(self, name: str, total: int, unit: str) -> None:
        if self.cell == 2 and name == self.at:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("stage", "left"),
    tiered(
        [("writing", ["convert", "evaluate"]), ("svd-25", ["evaluate"])],
        lambda row: row[0] == "writing",
    ),
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

    monkeypatch.setattr(pipeline, "evaluate", fail)
    found = run(recipe())
    assert [(item.name, item.status) for item in found.stopped] == [("svd-50", "failed")]
    assert [row.name for row in found.front.rows] == ["dense", "svd-25"]


def test_data_that_cannot_be_read_stop_before_any_conversion() -> None:
    with pytest.raises(InputError, match=r"nowhere\.jsonl"):
        run(recipe(evaluate=[{**STS, "data": "nowhere.jsonl"}]))
    assert not list(Path("out").glob("svd*"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("threshold", "missed"), tiered([("0.0x", False), ("2x", True)], lambda row: row[1])
)
def test_threshold_is_missed_if_no_cell_reaches_it(threshold: str, missed: bool) -> None:
    found = run(recipe(targets=[0.5], evaluate=[{**STS, "threshold": threshold}]))
    assert found.missed is missed
    assert bool(found.cells[0].missed) is missed


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
def test_two_sweeps_do_not_share_an_output() -> None:
    Path("out/.sweep").mkdir(parents=True)
    with (
        FileLock("out/.sweep/lock"),
        pytest.raises(InputError, match="another sweep is writing"),
    ):
        run(recipe(targets=[0.5]))


# From Python


@pytest.mark.usefixtures("quick")
def test_from_python() -> None:
    found = tcompress.sweep(
        "bert",
        methods=["svd", {"name": "lprod", "p": 8}],
        targets=[0.5],
        task="sts",
        data="pairs.jsonl",
        calibration="none",
        keep=["down"],
        output="out",
    )
    assert [row.name for row in found.front.rows] == ["dense", "lprod-p8-50", "svd-50"]
    assert {row.left for row in found.front.rows} == {0, 1}
    with pytest.raises(RecipeError, match="`task` and `data` belong together"):
        tcompress.sweep("bert", task="sts")


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
