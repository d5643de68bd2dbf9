"""Method `auto` tries out what it predicts beside every method on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tcompress.conversion.kept import FitWorkplace
from tcompress.conversion.methods import candidates_of, choose_method
from tcompress.conversion.probe import probe_of
from tcompress.conversion.run import Converted, convert
from tcompress.errors import PlanError
from tcompress.options import Convert
from tcompress.planning.entries import BudgetPlan
from tcompress.planning.planner import make_plan
from tcompress.source import SourceModel
from tcompress.structures.lprod import LprodSpec
from tests.support.cli import run
from tests.support.depth import change_of, deep, drawn
from tests.support.interrupted import Interrupt, contents

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = deep("llama", 3)


def _recipe(**changes: Any) -> Convert:
    auto = {"name": "auto", **changes.pop("options", {})}
    return Convert.model_validate({"method": auto, "target": 0.4, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    model: Any = LLAMA.build()
    model.save_pretrained(folder)
    return folder


def _convert(folder: Path, output: Path, recipe: Convert, **options: Any) -> Converted:
    return convert(str(folder), recipe, output, data=drawn(LLAMA), **options)


def _facts(done: Converted) -> BudgetPlan:
    assert done.manifest.plan.budget is not None
    return done.manifest.plan.budget


# ---------------------------------------------------------------- the choice alone


def _chosen(folder: Path, place: FitWorkplace, **changes: float | None) -> str:
    """Chooses by made-up changes; None is a budget out of reach."""
    recipe = _recipe()
    source = SourceModel.open(str(folder))
    candidates = candidates_of(recipe, make_plan(recipe, source), source)
    assert list(candidates) == ["auto", "svd", "lprod", "tt", "tucker"]

    def change(_: Convert, name: str) -> float:
        found = changes.get(name, 9.0)
        if found is None:
            raise PlanError("too small")
        return found

    return choose_method(candidates, place, change)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({"auto": 1.0, "svd": 0.5, "lprod": 0.7}, "svd"),
        ({"auto": 1.0, "svd": 1.1, "lprod": 0.99}, "auto"),  # of equals the first
        ({"auto": None, "svd": 2.0, "lprod": 1.0}, "lprod"),
        ({"auto": 1.0, "svd": None, "lprod": None}, "auto"),
        ({"auto": 0.0, "svd": 0.0, "lprod": 1e-300}, "auto"),
        ({"auto": 1e-9, "svd": -1e-9, "lprod": 0.0}, "svd"),  # what older versions measured
    ],
)
def test_choice(changes: dict[str, float | None], taken: str, folder: Path, tmp_path: Path) -> None:
    place = FitWorkplace(tmp_path / "out", "")
    assert _chosen(folder, place, **changes) == taken
    assert place.method() == taken
    assert not (place.folder / "trials").exists()
    place.discard()


def test_no_choice(folder: Path, tmp_path: Path) -> None:
    place = FitWorkplace(tmp_path / "out", "")
    with pytest.raises(PlanError, match="too small"):
        _chosen(folder, place, **dict.fromkeys(("auto", "svd", "lprod", "tt", "tucker")))
    place.discard()


def test_methods_that_leave_layers_dense_are_not_tried(tmp_path: Path) -> None:
    """At a half slices with p=8 would rewrite attention only, and change little: p=4 is tried."""
    deep("llama", 2, intermediate_size=28).build().save_pretrained(tmp_path / "even")  # type: ignore[attr-defined]
    source, recipe = SourceModel.open(str(tmp_path / "even")), _recipe(target=0.5)
    found = candidates_of(recipe, make_plan(recipe, source), source)["lprod"].method
    assert found == LprodSpec(p=4)
    deep("llama", 2, intermediate_size=27).build().save_pretrained(tmp_path / "odd")  # type: ignore[attr-defined]
    source = SourceModel.open(str(tmp_path / "odd"))
    assert "lprod" not in candidates_of(recipe, make_plan(recipe, source), source)


# ---------------------------------------------------------------- conversions


def test_what_is_taken_changes_the_output_least(folder: Path, tmp_path: Path) -> None:
    """The change that is told is the one of whole passes of the saved model."""
    done = _convert(folder, tmp_path / "out", _recipe())
    facts = _facts(done)
    assert facts.taken is not None
    assert set(facts.tried) >= {"auto", "lprod", "tt", "tucker"}
    assert facts.tried[facts.taken] <= 1.02 * min(facts.tried.values())
    dense, model = (AutoModelForCausalLM.from_pretrained(name) for name in (folder, done.folder))
    probe = probe_of(SourceModel.open(str(folder)))
    told = facts.tried[facts.taken]
    assert told == pytest.approx(change_of(dense, model, drawn(LLAMA), probe), rel=1e-3)
    assert not list(tmp_path.glob(".*"))


def test_the_winner_is_what_its_method_alone_would_be(folder: Path, tmp_path: Path) -> None:
    done = _convert(folder, tmp_path / "out", _recipe(options={"offer": ["lprod"]}))
    facts = _facts(done)
    assert facts.tried.keys() == {"auto", "lprod"}
    alone = Convert.model_validate({"method": {"name": "lprod", "p": 8}, "target": 0.4})
    same = _convert(folder, tmp_path / "alone", alone).manifest.plan
    assert (done.manifest.plan.layers == same.layers) is (facts.taken == "lprod")


@pytest.mark.parametrize(
    "changes",
    [{"options": {"trials": False}}, {"target": None, "max_error": 0.2}],
    ids=["not asked for", "a largest error"],
)
def test_where_predictions_decide(changes: Any, folder: Path, tmp_path: Path) -> None:
    facts = _facts(_convert(folder, tmp_path / "out", _recipe(**changes)))
    assert facts.tried == {}
    assert facts.taken is None
    assert facts.error is not None


def test_in_fewer_blocks(folder: Path, tmp_path: Path) -> None:
    done = _convert(folder, tmp_path / "out", _recipe(drop_layers=1))
    assert done.manifest.plan.depth is not None
    assert done.manifest.plan.depth.kept == 2
    assert len(_facts(done).tried) > 1


@pytest.mark.parametrize("after", [10, 24, 38, 52])
def test_an_interrupted_search_goes_on(after: int, folder: Path, tmp_path: Path) -> None:
    whole = _convert(folder, tmp_path / "whole", _recipe())
    output = tmp_path / "out"
    progress = Interrupt(KeyboardInterrupt(), after)
    with pytest.raises(KeyboardInterrupt):
        _convert(folder, output, _recipe(), progress=progress)
    again = _convert(folder, output, _recipe())
    assert again.resumed
    assert contents(output) == contents(whole.folder)


def test_the_report_tells_what_was_tried(folder: Path, tmp_path: Path) -> None:
    _convert(folder, tmp_path / "out", _recipe())
    done = run("report", tmp_path / "out")
    for text in ("change of output, as predicted", "change of output, lprod alone", "taken"):
        assert text in done.out


def test_a_dry_run_allows_for_the_trials(folder: Path) -> None:
    options = ("--method", "auto", "--target", "0.4", "--calib", "builtin", "--dry-run", "--json")
    seconds = [
        run("convert", folder, *options, flag).document["estimate"]["seconds"]
        for flag in ("--trials", "--no-trials")
    ]
    assert seconds[0] >= seconds[1]
