"""Training, reporting and timing models that began at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tcompress.artifact.manifest import read_manifest
from tcompress.errors import InputError
from tcompress.latency.benchmark import bench
from tcompress.models.store import WeightStore
from tcompress.options import Bench, Finetune, parse_recipe
from tcompress.own_models.architecture import open_architecture
from tcompress.pipeline import run_recipe
from tcompress.reporting.model_report import report_of
from tcompress.training.finetuning import finetune
from tcompress.training.setup import SCRATCH_RATE, TASK_RATE, highest_rate
from tests.support.cli import run
from tests.support.evaluation import labelled_file
from tests.support.scratch import BERT, LPROD, architecture, scratch
from tests.support.typed import settings_of

WORDS = {"words": "builtin", "size": 100}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained model and labelled texts."""
    folder = tmp_path_factory.mktemp("scratch")
    labelled_file(folder / "rows.jsonl")
    source = open_architecture(architecture(tokenizer=WORDS), 0)
    scratch(folder / "made", source, method=LPROD, positions="linear", norm="tensor")
    return folder


def _short(place: Path, **changes: Any) -> Finetune:
    data = {"source": [str(place / "rows.jsonl")], "max_length": 16, "holdout": 0.2}
    short = {"task": "classification", "steps": 3, "batch_size": 4, "device": "cpu", "data": data}
    return Finetune.model_validate({**short, **changes})


def test_training_begins_from_scratch(place: Path, tmp_path: Path) -> None:
    done = finetune(str(place / "made"), _short(place), tmp_path / "trained")
    assert done.facts.teacher is None
    assert done.facts.objectives == {"task": 1.0}
    assert max(point.learning_rate or 0 for point in done.facts.curve) > TASK_RATE
    before, after = WeightStore.open(place / "made"), WeightStore.open(tmp_path / "trained")
    table = "bert.embeddings.position_embeddings.weight"
    assert torch.equal(before.tensor(table), after.tensor(table))  # fixed, and still there
    for key in ("bert.embeddings.word_embeddings.weight", "classifier.weight"):
        assert not torch.equal(before.tensor(key), after.tensor(key))
    manifest = read_manifest(tmp_path / "trained")
    assert manifest.source.init == "random"
    assert not manifest.is_untrained
    assert "Fine-tuned for classification" in (tmp_path / "trained" / "README.md").read_text()
    again = finetune(str(tmp_path / "trained"), _short(place, steps=2), tmp_path / "again")
    assert again.facts.teacher is None
    assert max(point.learning_rate or 0 for point in again.facts.curve) <= TASK_RATE


def test_without_a_task_there_is_nothing_to_learn(place: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        finetune(str(place / "made"), _short(place, task=None), tmp_path / "never")
    assert caught.value.message.endswith(
        "began at random, so that there is no dense model to imitate: it needs a task"
    )
    assert not (tmp_path / "never").exists()


def test_a_teacher_can_be_named_and_all_is_trained(place: Path, tmp_path: Path) -> None:
    source = open_architecture(architecture(tokenizer=WORDS), 1)
    dense = scratch(tmp_path / "dense", source, seed=1).folder
    options = _short(place, task=None, teacher=str(dense))
    done = finetune(str(place / "made"), options, tmp_path / "taught")
    assert done.facts.teacher == str(dense)
    before, after = WeightStore.open(place / "made"), WeightStore.open(tmp_path / "taught")
    key = "bert.embeddings.word_embeddings.weight"  # which healing would leave as it is
    assert not torch.equal(before.tensor(key), after.tensor(key))


def test_the_learning_rate_depends_on_the_start() -> None:
    options = settings_of({"task": "classification"})
    assert highest_rate(options) == TASK_RATE
    assert highest_rate(options, untrained=True) == SCRATCH_RATE
    given = options.model_copy(update={"learning_rate": 0.5})
    assert highest_rate(given, untrained=True) == 0.5


def test_times_are_compared_with_the_dense_model_of_the_same_sizes(place: Path) -> None:
    settings = Bench(batch=(1,), length=(8,), repeats=1, device="cpu")
    found = bench([str(place / "made")], settings=settings, save=False)[0]
    assert found.baseline == "dense, at random"
    assert found.speed[0].baseline_milliseconds > 0


def test_the_report_says_how_it_began(place: Path) -> None:
    report = report_of(place / "made")
    assert (report.init, report.seed, report.errors) == ("random", 0, {})
    assert report.parameters.rewritten.kept == 0.25
    shown = run("report", place / "made").out
    assert "weights at random, seed 0 · no teacher" in shown
    assert "calibration" not in shown
    assert "error" not in shown


def test_the_command_says_what_comes_next(tmp_path: Path) -> None:
    folder = open_architecture(architecture(), 0)
    path = folder.folder / "config.json"
    done = run("convert", path, "--init", "random", "--seed", "3", "-o", tmp_path / "plain", "-q")
    assert done.code == 0, done.err
    assert done.lines[-2] == "Not trained yet: all weights are as they were drawn at random."
    assert done.lines[-1].startswith("Next: `tcompress finetune ")
    assert done.lines[-1].endswith(" --task ... --data ...`")
    assert "bert · dense · weights at random, seed 3 · no teacher" in done.out
    planned = run("convert", path, "--init", "random", "--method", "lprod", "--dry-run")
    assert planned.code == 0, planned.err
    assert "Weights will be drawn at random, with seed 0; none are read." in planned.lines
    wrong = run("convert", path, "--init", "random", "--method", "auto", "--target", "0.5")
    assert wrong.code == 2
    assert "with `init: random` name one" in wrong.err


def test_a_recipe_runs_from_nothing_to_a_comparison(place: Path, tmp_path: Path) -> None:
    rows = str(place / "rows.jsonl")
    said = {
        "recipe_version": 1,
        "architecture": {**BERT, "vocab_size": 100, "tokenizer": WORDS},
        "convert": {"init": "random", "method": LPROD},
        "finetune": _short(place).model_dump(mode="json", exclude_defaults=True),
        "evaluate": [{"task": "classification", "data": rows, "bootstrap": 0}],
        "paper": [
            {"row": "Std", "metric": "accuracy", "value": 91.4, "source": "Table 8", "why": "x"}
        ],
    }
    recipe = parse_recipe(yaml.safe_dump(said), "a")
    assert recipe.architecture is not None
    source = open_architecture(recipe.architecture, recipe.convert.seed)
    done = run_recipe(recipe, source, tmp_path / "out")
    assert [Path(report.name).name for report in done.reports] == ["out"]
    assert len(done.scores[0]) == 1
    assert [row.value for row in done.reports[0].paper] == [91.4]
    lines = run("report", tmp_path / "out").lines
    row = next(line for line in lines if line.startswith("Std "))
    ours = 100 * done.scores[0][0].metrics[0].value
    assert "Table 8" in row
    assert "no: x" in row
    assert float(row.split()[-1]) == pytest.approx(ours, abs=0.05)
    again = run_recipe(recipe, open_architecture(recipe.architecture, 0), tmp_path / "out")
    assert again.skipped == ["convert", "finetune"]
