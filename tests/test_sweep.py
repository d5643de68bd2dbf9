"""Sweeps of tiny models: what is done, and what is not done again."""

import json
from pathlib import Path
from typing import Any

import pytest

import tcompress
from tcompress.api import evaluate
from tcompress.conversion.converter import convert
from tcompress.errors import PlanError, RecipeError
from tcompress.models import SourceModel
from tcompress.options import Recipe, dump_recipe, parse_recipe
from tcompress.options.schema import default_methods
from tcompress.sweeps import Cell, bench_of, cells_of, fallback_metric
from tests.support import cli
from tests.support.depth import deep
from tests.support.evaluation import rows_file
from tests.support.model_folders import sentences
from tests.support.sweeps import (  # noqa: F401 - fixtures
    HEAL,
    STS,
    Counting,
    agreeable_pairs,
    quick,
    recipe,
    run,
    sweep_folder,
    sweep_models,
)

pytestmark = pytest.mark.usefixtures("sweep_folder")


def named(said: Recipe) -> list[Cell]:
    return cells_of(said, SourceModel.open("bert"))


# Cells
def test_cells_are_every_method_with_every_target() -> None:
    cells = named(recipe(["svd", {"name": "lprod", "p": 16}, "lprod"], [0.25, 0.5]))
    assert [cell.name for cell in cells] == [
        "svd-50", "svd-25", "lprod-p16-50", "lprod-p16-25", "lprod-p8-50", "lprod-p8-25"
    ]  # fmt: skip
    first = cells[0].recipe
    assert (first.convert.target, first.convert.calibration.is_none) == (0.5, True)
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
    assert [cell.name for cell in cells] == ["lprod-p4-stages1-50", "lprod-p4-50"]
    chains = [{"name": "tt", **more} for more in ({"apply": "rebuild"}, {"modes": {64: [8, 8]}})]
    cells = named(recipe([*chains, {"name": "lprod", "pad": True}], [0.5]))
    assert [cell.name for cell in cells] == [
        "tt-rebuild-50", "tt-modes64x8x8-50", "lprod-p4-pad-50",
    ]  # fmt: skip
    close = named(recipe(["svd"], [0.5, 0.5 + 1e-9]))
    assert [cell.name for cell in close] == ["svd-50", "svd-50-2"]


def test_refused_cells_say_why() -> None:
    cells = named(recipe([{"name": "lprod", "p": 3}, "svd"], [0.5]))
    assert cells[0].plan is None
    assert "p=3 does not divide the input 32" in (cells[0].refusal or "")
    assert cells[1].plan is not None
    with pytest.raises(PlanError, match=r"no cell of the sweep can be done:\n  - lprod-p3-50"):
        named(recipe([{"name": "lprod", "p": 3}], [0.5]))


def test_speeds_are_refused_where_a_conversion_refuses_them() -> None:
    data = {"calibration": {"source": "texts.txt"}}
    svd, tucker = named(recipe(["svd", "tucker"], convert=data, sweep={"speedups": [2]}))
    assert (svd.name, svd.refusal, svd.recipe.convert.speedup) == ("svd-2x", None, 2)
    assert tucker.name == "tucker-2x"
    assert "`speedup` sizes layers one by one: give a target instead" in (tucker.refusal or "")


def test_cells_of_a_speed_are_recipes_and_timed_on_the_device(tmp_path: Path) -> None:
    deep("llama", 2).build().save_pretrained(tmp_path)  # type: ignore[attr-defined]
    timed = {"method": {"name": "svd"}, "speedup": 2, "at": "1x16", "threads": 1}
    said = recipe(
        convert={**timed, "calibration": {"source": "texts.txt"}}, sweep={"speedups": [2]}
    )
    cells = cells_of(said, SourceModel.open(str(tmp_path)))
    assert [cell.recipe.convert.drop_layers for cell in cells] == [None, 1]
    for cell in cells:
        assert parse_recipe(dump_recipe(cell.recipe), "cell") == cell.recipe
    assert bench_of(said.convert.model_copy(update={"device": "cuda:1"})).device == "cuda:1"


def test_recipes_that_begin_at_random_are_run() -> None:
    text = "recipe_version: 1\nconvert: {init: random, method: svd, target: 0.5}\n"
    Path("random.yaml").write_text(text)
    done = cli.run("sweep", "bert", "--recipe", "random.yaml", "--dry-run")
    assert done.code == 2
    assert "compare its variants: `tcompress run RECIPE`" in done.err


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


def test_the_mean_of_several_sets_counts(tmp_path: Path) -> None:
    agreeable_pairs(tmp_path / "more.jsonl", tmp_path / "bert", 20)
    both = {**STS, "data": ["pairs.jsonl", "more.jsonl"], "threshold": "2x"}
    found = run(recipe(targets=[0.5], evaluate=[both]))
    assert found.front.metric == "mean spearman of 2 sets"
    dense, small = found.front.rows
    values = [m.value for m in found.cells[0].reports[0].metrics if m.name == "spearman"]
    assert small.quality == pytest.approx(sum(values) / 2)
    assert (dense.quality, found.missed) == (pytest.approx(1), True)
    assert found.cells[0].missed[0].startswith("sts mean spearman of 2 sets 0.")


def test_agreement_counts_where_there_are_no_labels(tmp_path: Path) -> None:
    texts = sentences(40)
    rows_file(tmp_path / "bare.jsonl", sentence1=texts[:20], sentence2=texts[20:])
    found = run(recipe(targets=[0.5], evaluate=[{**STS, "data": "bare.jsonl"}]))
    dense, small = found.front.rows
    assert (found.front.metric, dense.quality) == ("agreement", 1)
    assert 0 < small.quality < 1


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
    assert "spearman against bytes on disk" in page
    assert not found.failed


def test_without_a_task_the_last_layer_tells() -> None:
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


# What is not done again
@pytest.fixture
def counting(quick: None, monkeypatch: pytest.MonkeyPatch) -> Counting:  # noqa: F811
    """What is done after a sweep of one cell, `svd-50`."""
    run(recipe(targets=[0.5]))
    return Counting(monkeypatch)


@pytest.mark.usefixtures("quick")
def test_nothing_is_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    counting, told = Counting(monkeypatch), []
    first = run(recipe())
    assert counting.since() == ["evaluate", "convert", "evaluate", "convert", "evaluate"]
    second = run(recipe(), say=told.append)
    assert counting.since() == []
    assert told == ["`svd-50` is already done", "`svd-25` is already done"]
    assert second.to_json() == first.to_json()


@pytest.mark.grid
def test_new_cells_alone_are_done(counting: Counting) -> None:
    found = run(recipe(targets=[0.5, 0.25]))
    assert counting.since() == ["convert", "evaluate"]
    assert [row.name for row in found.front.rows] == ["dense", "svd-50", "svd-25"]


def test_changed_measurement_keeps_models(counting: Counting) -> None:
    less = recipe(targets=[0.5], evaluate=[{**STS, "limit": 20}])
    assert run(less).dense.metrics[0].protocol["examples"] == 20
    assert counting.since() == ["evaluate", "evaluate"]
    assert run(recipe(targets=[0.5])).dense.metrics[0].protocol["examples"] == 30
    assert counting.since() == []  # both are known
    judged = recipe(targets=[0.5], evaluate=[{**STS, "threshold": "0.1x"}])
    assert not run(judged).missed
    assert counting.since() == []


@pytest.mark.grid
def test_changed_data_are_noticed(counting: Counting) -> None:
    agreeable_pairs(Path("pairs.jsonl"), Path("bert"), 40)
    assert run(recipe(targets=[0.5])).dense.metrics[0].protocol["examples"] == 40
    assert counting.since() == ["evaluate", "evaluate"]


def test_changed_conversion_does_all_of_it_again(counting: Counting) -> None:
    found = run(recipe(targets=[0.5], convert={"keep": ["down"]}))
    assert counting.since() == ["convert", "evaluate"]
    assert found.front.rows[1].left == 1
    assert found.cells[0].reports[0].left


def test_healing_keeps_the_conversion(counting: Counting) -> None:
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


def test_times_are_taken_once(counting: Counting) -> None:
    bench = {"batch": [1], "length": [8], "repeats": 1}
    found = run(recipe(targets=[0.5], bench=bench))
    assert counting.since() == ["bench"]
    dense, small = found.front.rows
    speed = found.cells[0].reports[0].speed[0]
    assert (small.milliseconds, small.speed) == (speed.milliseconds, speed.ratio)
    assert dense.milliseconds == speed.baseline_milliseconds
    assert found.front.timed.startswith("batch 1, length 8, cpu, 1 thread, float32")
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


@pytest.mark.grid
def test_force_does_everything_again(counting: Counting) -> None:
    run(recipe(targets=[0.5]), force=True)
    assert counting.since() == ["evaluate", "convert", "evaluate"]


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


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"p": 2}, "`p` cannot be given to all cells of a sweep"),
        ({"target": 0.3, "method": "svd"}, "`target`, `method` cannot be given to all cells"),
        ({"init": "random"}, "a sweep cuts trained ones"),
        ({"seeds": 0}, "`seeds` is 0, allowed is 1 or more"),
        ({"targets": 0.5}, "`targets` is `0.5`, allowed is a list"),
    ],
)
def test_what_cells_would_forget_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        tcompress.sweep("bert", calibration="texts.txt", **said)
