"""Method `auto` tries out what it predicts beside every method on its own."""

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest

from tcompress.conversion import converter
from tcompress.conversion.converter import CLEAR, Converted, convert, simplest, try_out
from tcompress.conversion.model_fits import Conversion, fit_on_data
from tcompress.data.calibration import CalibrationData
from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.search import search
from tcompress.search.predictions import alone_on
from tcompress.structures.lprod import LprodSpec
from tests.support.cli import run
from tests.support.depth import change_of, deep, drawn
from tests.support.interrupted import Interrupt, contents


@pytest.fixture(autouse=True)
def all_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions for weights drawn at random are far apart."""
    monkeypatch.setattr(search, "FAR", inf)


pytestmark = pytest.mark.usefixtures("one_thread")
LLAMA = deep("llama", 3)


def _recipe(**changes: Any) -> Convert:
    auto = {"name": "auto", **changes.pop("options", {})}
    return Convert.model_validate({"method": auto, "target": 0.4, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    LLAMA.build().save_pretrained(folder)
    return folder


def _convert(folder: Path, output: Path, recipe: Convert, **options: Any) -> Converted:
    return convert(str(folder), recipe, output, data=drawn(LLAMA), **options)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Converted]:
    """A search that nothing interrupts, made once."""
    return cache(lambda: _convert(folder, tmp_path_factory.mktemp("whole") / "out", _recipe()))


# ---------------------------------------------------------------- the choice alone
FEWER: dict[str, Any] = {"shrinking": True}
"""As for fewer and fewer blocks, of which the fewest are the fastest."""


def _tried(changes: Sequence[float | None], **options: Any) -> tuple[str, dict[str, float | None]]:
    """Choose by made-up changes; None is a budget out of reach."""

    def change(name: str) -> float:
        found = changes[int(name)]
        if found is None:
            raise PlanError(f"too small for {name}")
        return found

    return try_out([str(index) for index in range(len(changes))], change, **options)


@pytest.mark.parametrize(
    ("options", "changes", "taken", "tried"),
    [
        ({}, (1.0, 0.5, 0.7, 9.0), 1, 4),
        ({}, (1.0, 1.1, 0.99, 9.0), 0, 4),  # of equals the first
        ({}, (None, 2.0, 1.0, 9.0), 2, 4),
        ({}, (1.0, None, None, 9.0), 0, 4),
        ({}, (0.0, 0.0, 1e-300, 9.0), 0, 1),  # nothing is better than no change
        ({}, (1e-9, -1e-9, 0.0, 9.0), 1, 4),  # what older versions measured
        (FEWER, (1.0, 0.5, 2.0, 9.0), 1, 3),  # a clearly worse one ends the search
        (FEWER, (1.0, 1.2, 9.0), 0, 2),
        (FEWER, (1.0, 1.05, 0.9, 2.0, 9.0), 2, 4),  # a little worse does not
        (FEWER, (1.0, 1.01, 2.0, 9.0), 1, 3),  # of equals the last
        (FEWER, (3.0, 2.0, 1.0, 0.5, 0.4, 0.3), 5, 6),
        (FEWER, (0.0, 0.0, 1e-9, 9.0), 1, 3),
        (FEWER, (1e-9, -1e-9, 1e-8, 9.0), 1, 3),  # what older versions measured
        (FEWER, (None, None, 1.0, 2.0, 9.0), 2, 4),
    ],
)
def test_choice(
    options: dict[str, Any], changes: tuple[float | None, ...], taken: int, tried: int
) -> None:
    found, measured = _tried(changes, **options)
    assert found == str(taken)
    assert measured == {str(index): changes[index] for index in range(tried)}


@pytest.mark.parametrize(
    ("best", "changes", "taken"),
    [
        ("auto", {"auto": 1.0, "svd": 1.2, "width": 1.14}, "width"),
        ("auto", {"auto": 1.0, "svd": 1.2, "width": 1.16}, "auto"),
        ("auto", {"auto": 1.0}, "auto"),  # the others were out of reach
        ("svd", {"auto": 1.0, "svd": 0.99, "width": 0.98}, "svd"),
    ],
)
def test_a_mixture_is_clearly_better(best: str, changes: dict[str, float], taken: str) -> None:
    assert simplest(best, "auto", changes) == taken


def test_no_choice() -> None:
    with pytest.raises(PlanError, match="too small for 0"):
        _tried([None] * 5)


def test_methods_that_leave_layers_dense_are_not_tried(tmp_path: Path) -> None:
    """At a half slices with p=8 would rewrite attention only, and change little: p=4 is tried."""
    deep("llama", 2, intermediate_size=28).build().save_pretrained(tmp_path / "even")  # type: ignore[attr-defined]
    source, recipe = SourceModel.open(str(tmp_path / "even")), _recipe(target=0.5)
    assert alone_on(recipe, make_plan(recipe, source), source)["lprod"] == LprodSpec(p=4)
    deep("llama", 2, intermediate_size=27).build().save_pretrained(tmp_path / "odd")  # type: ignore[attr-defined]
    source = SourceModel.open(str(tmp_path / "odd"))
    assert "lprod" not in alone_on(recipe, make_plan(recipe, source), source)


# ---------------------------------------------------------------- conversions
@pytest.mark.slow
def test_what_is_taken_changes_the_output_least(
    folder: Path, whole: Callable[[], Converted]
) -> None:
    """The change that is told is the one of whole passes of the saved model."""
    done = whole()
    facts = done.manifest.plan.budget
    assert set(facts.tried) >= {"auto", "lprod", "svd"}
    assert facts.tried[facts.taken] <= (1 + CLEAR) * min(facts.tried.values())
    change = change_of(folder, done.folder, drawn(LLAMA))
    assert facts.tried[facts.taken] == pytest.approx(change, rel=1e-3)
    assert not list(done.folder.parent.glob(".*"))
    report = run("report", done.folder)
    for text in ("change of output, as predicted", "change of output, lprod alone", "taken"):
        assert text in report.out


@pytest.mark.slow
def test_the_winner_is_what_its_method_alone_would_be(folder: Path, tmp_path: Path) -> None:
    done = _convert(folder, tmp_path / "out", _recipe(options={"offer": ["lprod"]}))
    facts = done.manifest.plan.budget
    assert facts.tried.keys() == {"auto", "lprod"}
    alone = Convert.model_validate({"method": {"name": "lprod", "p": 8}, "target": 0.4})
    same = _convert(folder, tmp_path / "alone", alone).manifest.plan
    alike = _layouts(done.manifest.plan) == _layouts(same)
    assert alike is (facts.taken == "lprod")


def _layouts(plan: Plan) -> set[tuple[str, int]]:
    """Structures with their slices; sizes follow what other candidates change too."""
    terms = (term for e in plan.layers for part in e.parts for term in part.terms)
    return {(term.structure, getattr(term, "p", 0)) for term in terms}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"method": {"name": "svd"}, "drop_layers": "auto"}])
def test_one_sample_compares_and_says_so(changes: Any, folder: Path, tmp_path: Path) -> None:
    """Nothing is held out then; a change of nought for all would take the first, or few blocks."""
    batch = {name: tensor[:1] for name, tensor in LLAMA.inputs(4, 8, 0).items()}
    data = CalibrationData([batch], [], "one text", 1, 8, "one")
    done = convert(str(folder), _recipe(**changes), tmp_path / "out", data=data)
    plan = done.manifest.plan
    found = plan.depth.weighed if plan.depth is not None else plan.budget.tried.values()
    assert len(found) > 1
    assert all(change is None or change > 0 for change in found)
    assert plan.warnings[-1] == (
        "the calibration data has no sample to hold out (1 in all): candidates were compared on "
        "what they were fitted to, which favours those that adapt most; give more data"
    )
    alone = Convert.model_validate({"method": {"name": "svd"}, "target": 0.4})
    assert not convert(str(folder), alone, tmp_path / "svd", data=data).manifest.plan.warnings


@pytest.mark.often("a largest error")
@pytest.mark.parametrize(
    "changes",
    [{"options": {"trials": False}}, {"target": None, "max_error": 0.2}],
    ids=["not asked for", "a largest error"],
)
def test_where_predictions_decide(changes: Any, folder: Path, tmp_path: Path) -> None:
    facts = _convert(folder, tmp_path / "out", _recipe(**changes)).manifest.plan.budget
    assert facts.tried == {}
    assert facts.taken is None
    assert facts.error is not None


@pytest.mark.slow
def test_in_fewer_blocks(folder: Path, tmp_path: Path) -> None:
    """Which are no first blocks; what was tried is as far from the whole dense model as told."""
    done = _convert(folder, tmp_path / "out", _recipe(keep_layers=[1, 2]))
    assert done.manifest.plan.depth.kept == 2
    facts = done.manifest.plan.budget
    assert len(facts.tried) > 1
    change = change_of(folder, done.folder, drawn(LLAMA))
    assert facts.tried[facts.taken] == pytest.approx(change, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("after", [10, 38])
def test_an_interrupted_search_goes_on(
    after: int, folder: Path, whole: Callable[[], Converted], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        _convert(folder, output, _recipe(), progress=Interrupt(after))
    again = _convert(folder, output, _recipe())
    assert again.resumed
    assert contents(output) == contents(whole().folder)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"drop_layers": 1}])
def test_an_interrupted_trial_alone_is_made_again(
    changes: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[str] = []

    def counted(conversion: Conversion, *rest: Any) -> Any:
        trials.append(conversion.workdir.folder.name)
        if len(trials) == 3:
            raise KeyboardInterrupt
        return fit_on_data(conversion, *rest)

    monkeypatch.setattr(converter, "fit_on_data", counted)
    with pytest.raises(KeyboardInterrupt):
        _convert(folder, tmp_path / "out", _recipe(**changes))
    _convert(folder, tmp_path / "out", _recipe(**changes))
    assert trials[3] == trials[2]
    assert not {*trials[:2]} & {*trials[3:]}


def test_a_dry_run_allows_for_the_trials(folder: Path) -> None:
    options = ("--method", "auto", "--target", "0.4", "--calib", "builtin", "--dry-run", "--json")
    seconds = [
        run("convert", folder, *options, flag).document["estimate"]["seconds"]
        for flag in ("--trials", "--no-trials")
    ]
    assert seconds[0] >= seconds[1]
