"""`tcompress run` with a whole recipe: convert, train, measure, report."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tcompress.artifact.manifest import read_manifest, write_manifest
from tcompress.models import SourceModel
from tcompress.pipeline import dense_folder
from tests.support.cli import Ran, error, run
from tests.support.evaluation import classifier, labelled_file
from tests.support.model_folders import edited
from tests.support.scratch import BERT


@pytest.fixture(autouse=True)
def _models(own_folder: None, one_thread: None) -> None:
    classifier(Path("bert"))
    labelled_file(Path("rows.jsonl"))


def _recipe(**changes: Any) -> Path:
    data = {"source": ["rows.jsonl"], "max_length": 16, "holdout": 0.2}
    recipe = {
        "recipe_version": 1,
        "name": "made",
        "model": "bert",
        "output": "made",
        "convert": {"method": {"name": "lprod", "p": 2}, "calibration": {"source": "none"}},
        "finetune": {"task": "classification", "data": data, "steps": 3, "batch_size": 4},
        "evaluate": [{"task": "classification", "data": "rows.jsonl", "threshold": "0.1x"}],
        "report": "made.html",
    }
    path = Path("recipe.yaml")
    path.write_text(yaml.safe_dump(recipe | changes))
    return path


def _run(*more: object) -> Ran:
    return run("run", "recipe.yaml", "--quiet", *more)


def test_a_whole_recipe_and_the_same_again() -> None:
    _recipe()
    done = _run()
    assert (done.code, done.err) == (0, "")
    assert done.lines[-2:] == ["Wrote `made`.", "Report: `made.html`."]
    assert "made-converted" in done.out
    again = run("run", "recipe.yaml")
    assert again.lines[-2:] == ["Kept `made`.", "Report: `made.html`."]
    assert "`made` is already trained; `--force` does it again" in again.err
    before = Path("made/model.safetensors").stat().st_mtime_ns
    forced = _run("--force")
    assert forced.lines[-2:] == ["Wrote `made`.", "Report: `made.html`."]
    assert Path("made/model.safetensors").stat().st_mtime_ns > before
    manifest = read_manifest(Path("made"))
    manifest.training *= 2  # as where a recipe had `pretrain`
    write_manifest(Path("made"), manifest)
    assert "made` is not empty" in _run().err


def _add_a_row() -> None:
    path = Path("rows.jsonl")
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")


def test_training_data_that_has_changed() -> None:
    _recipe(evaluate=[], report=None)
    assert _run().code == 0
    _add_a_row()
    done = _run()
    assert (done.code, done.out) == (2, "")
    assert done.err == error(
        f"`rows.jsonl` changed after `{Path('made').absolute()}` was made of it",
        "do all of it again with `--force`, remove `made` to make that alone, or choose another "
        "folder with `-o`",
    )
    shutil.rmtree("made")
    again = _run()
    assert "made-converted" not in again.err
    assert again.lines[-1] == "Wrote `made`."
    manifest = read_manifest(Path("made"))
    manifest.training[0].files = {}  # as in older ones
    write_manifest(Path("made"), manifest)
    _add_a_row()
    assert _run().lines[-1] == "Kept `made`."


def test_calibration_data_that_has_changed() -> None:
    data = {"source": "rows.jsonl", "samples": 8}
    _recipe(
        convert={"method": "svd", "target": 0.5, "calibration": data},
        finetune=None,
        evaluate=[],
        report=None,
    )
    assert _run().code == 0
    assert "Kept `made`." in _run().lines
    _add_a_row()
    assert "`rows.jsonl` changed after" in _run().err
    assert _run("--force").code == 0


def test_results_name_the_folder_that_was_given() -> None:
    with edited(Path("bert/config.json")) as config:
        config["torch_dtype"] = "torch.float32"
    source = SourceModel.open("bert")
    assert source.folder != source.origin
    assert dense_folder(source) == Path("bert")


@pytest.mark.slow
def test_a_trained_model_is_not_taken_for_the_conversion() -> None:
    _recipe()
    assert _run().code == 0
    done = _run("--set", "finetune=null")
    assert done.code == 2
    assert "made` is not empty" in done.err
    manifest = read_manifest(Path("made"))
    assert manifest.training


def test_how_to_measure_and_to_time() -> None:
    measured = {"task": "classification", "data": "rows.jsonl", "dtype": "float16", "seed": 3}
    timed = {"batch": [1], "length": [4], "repeats": 1, "threads": 1, "dtype": "bfloat16"}
    _recipe(
        evaluate=[measured | {"batch_size": 2, "device": "cpu"}],
        bench=timed | {"keep_weights": True, "device": "cpu"},
        finetune=None,
    )
    assert _run().code == 0
    manifest = read_manifest(Path("made"))
    facts = manifest.metrics[0].protocol
    assert (facts["dtype"], facts["device"], facts["seed"]) == ("float16", "cpu", 3)
    assert len(manifest.speed) == 1
    times = manifest.speed[0].protocol
    assert (times["dtype"], times["threads"]) == ("bfloat16", 1)
    assert times["kept_weights_bytes"] > 0


def test_data_that_is_not_there_is_missed_before_any_work() -> None:
    data = {"source": ["rows.jsonl", "a.txt"], "validation": "./b"}
    _recipe(
        convert={"method": "svd", "target": 0.5, "calibration": {"source": "c.csv"}},
        finetune={"task": "classification", "data": data, "steps": 3},
        evaluate=[{"task": "classification", "data": "d/"}, {"task": "sts", "data": "glue:stsb"}],
    )
    done = _run()
    assert done.code == 2
    assert "4 names of data lead nowhere:" in done.err
    for name in ("a.txt", "./b", "c.csv", "d/"):
        assert f"  - there is no file or folder `{name}`; `{Path.cwd()}` holds `bert/`" in done.err
    assert "glue" not in done.err
    assert sorted(path.name for path in Path().iterdir()) == ["bert", "recipe.yaml", "rows.jsonl"]


def test_all_that_shows_early_is_said_before_any_work() -> None:
    _recipe(
        finetune={"task": "classification", "teacher": "./nobody", "steps": 3},
        evaluate=[{"task": "classification", "data": "nothing.jsonl"}],
        report="nowhere/made.html",
    )
    done = _run()
    assert (done.code, done.out) == (2, "")
    assert "3 problems:" in done.err
    for text in ("nowhere", "`nothing.jsonl`", "there is no folder `./nobody`"):
        assert text in done.err
    _recipe(
        finetune={"task": "sts", "data": {"source": ["rows.jsonl"]}, "steps": 3},
        evaluate=[
            {"task": "sts", "data": "rows.jsonl"},
            {"task": "perplexity", "data": "rows.jsonl"},
        ],
    )
    done = _run()
    assert (done.code, done.out) == (2, "")
    assert "2 problems:" in done.err  # one of training and measuring alike
    assert done.err.count("the task needs a column for `pair`") == 1
    assert "the task `perplexity` needs" in done.err
    assert not Path("made-converted").exists()


@pytest.mark.slow
def test_data_of_finished_stages_may_be_gone() -> None:
    _recipe(convert={"method": "svd", "target": 0.5, "calibration": {"source": "rows.jsonl"}})
    assert _run().code == 0
    Path("rows.jsonl").rename("more.jsonl")
    _recipe(
        convert={"method": "svd", "target": 0.5, "calibration": {"source": "rows.jsonl"}},
        evaluate=[{"task": "classification", "data": "more.jsonl"}],
    )
    done = _run()
    assert (done.code, done.lines[-2]) == (0, "Kept `made`.")
    Path("more.jsonl").unlink()
    done = _run()
    assert done.code == 2
    assert "there is no file or folder `more.jsonl`" in done.err


def test_a_share_of_a_dense_model_that_there_is_not() -> None:
    sizes = {**BERT, "tokenizer": {"words": "builtin", "size": 100}}
    _recipe(model=None, architecture=sizes, convert={"init": "random"})
    done = _run()
    assert done.err == error(
        "`threshold: 0.1x` compares with the dense model, but a model that begins at random has "
        "none",
        "give a plain number, such as `threshold: 0.8`",
    )
    assert (done.code, Path("made").exists()) == (2, False)


@pytest.mark.parametrize(
    "change",
    ["finetune.learning_rate=3e-4", "finetune.mixed_precision=no", "name=2020-01-01", "report="],
)
def test_values_are_read_as_in_recipes(change: str) -> None:
    _recipe()
    assert _run("--dry-run", "--set", change).code == 0
    assert "there is no `x` in the recipe" in _run("--dry-run", "--set", "model.x=1").err
