"""The table of a sweep, as it looks 100 columns wide without colour, and its Pareto fronts."""

from typing import Any

import pytest

from tcompress.conversion.estimate import Estimate
from tcompress.models import SourceModel
from tcompress.planning.planner import make_plan
from tcompress.reporting.model_report import report_of
from tcompress.reporting.pareto import Candidate, FrontReport, front_of, front_table, plan_table
from tcompress.reporting.tree import ModelReport, unbeaten
from tests.support.cli import shown
from tests.support.converted import converted, recipe
from tests.support.golden import Golden
from tests.support.records import metric, speed


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelReport]:
    """A dense model and conversions of three sizes."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for target in (0.5, 0.4, 0.25):
        made = converted("gpt2", folder, method={"name": "svd"}, target=target)
        found[f"svd-{100 * target:g}"] = report_of(made.folder)
    found["svd-40"] = found["svd-40"].model_copy(update={"left": found["svd-50"].left})
    return {"dense": report_of(folder / "gpt2"), **found}


def measured(report: ModelReport, quality: float, **fields: Any) -> ModelReport:
    numbers = {name: fields.pop(name) for name in ("higher_is_better",) if name in fields}
    found = metric(quality, None if fields.pop("alone", False) else 0.9, **numbers)
    return report.model_copy(update={"metrics": (found,), **fields})


def front(reports: dict[str, ModelReport]) -> FrontReport:
    """The models with made-up numbers: one is beaten by a smaller one, one is slow."""
    speeds = {"svd-50": 6.0, "svd-40": 12.0, "svd-25": 4.0}
    values = {"svd-50": 0.85, "svd-40": 0.8, "svd-25": 0.82}
    rows = [Candidate("dense", measured(reports["dense"], 0.9, alone=True))]
    for name, value in values.items():
        times = (speed(milliseconds=speeds[name], ratio=10 / speeds[name]),)
        report = measured(reports[name], value, speed=times)
        rows.append(Candidate(name, report, metric(value - 0.1), 1234.56))
    return front_of(rows)


def test_table(reports: dict[str, ModelReport], golden: Golden) -> None:
    stopped = [("lprod-p3-50", "p=3 does not divide 32")]
    golden.text("console/front.txt", shown(front_table(front(reports), stopped)))


def test_table_of_plans(reports: dict[str, ModelReport], golden: Golden) -> None:
    source = SourceModel.open(reports["dense"].name)
    plan = make_plan(recipe(method={"name": "svd"}, target=0.5, keep=["down"]), source)
    costs = Estimate(memory_bytes=3_000_000, disk_bytes=70_000, seconds=200)
    long = "none of 8 layers can be rewritten:\n  - one: 4 layers\n  - two: 2 layers\n  - three"
    table = plan_table([("svd-50", plan, costs)], [("svd-1", long)])
    golden.text("console/front-of-plans.txt", shown(table))


def test_beaten_models_are_not_on_the_front(reports: dict[str, ModelReport]) -> None:
    found = {row.name: row.front for row in front(reports).rows}
    assert found == {
        "dense": ("size", "time"),
        "svd-50": ("size", "time"),
        "svd-40": (),  # larger than `svd-25`, slower, and worse
        "svd-25": ("size", "time"),
    }


def test_front_of_a_number_that_should_be_low(reports: dict[str, ModelReport]) -> None:
    values = {"dense": 5.0, "svd-50": 9.0, "svd-25": 8.0}
    models = [
        Candidate(name, measured(reports[name], value, alone=True, higher_is_better=False))
        for name, value in values.items()
    ]
    found = front_of(models)
    assert not found.higher_is_better
    assert [row.name for row in found.rows if row.front] == ["dense", "svd-25"]


def test_models_that_were_not_measured(reports: dict[str, ModelReport]) -> None:
    found = front_of([Candidate(name, reports[name]) for name in ("dense", "svd-25")])
    assert found.metric is None
    assert [row.front for row in found.rows] == [(), ()]
    assert "accuracy" not in shown(front_table(found))


def test_a_few_parameters_less_are_no_place_on_the_front() -> None:
    places = [(100_000.0, 0.9), (99_960.0, 0.8), (99_000.0, 0.7), (50_000.0, 0.6)]
    assert unbeaten(places, lambda place: place) == [places[0], places[2], places[3]]


def test_unbeaten_keeps_what_is_alike() -> None:
    places = [(1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (2.0, 3.0), (3.0, 2.0)]
    assert unbeaten(places, lambda place: place) == [(1.0, 1.0), (1.0, 1.0), (2.0, 3.0)]
    assert unbeaten(places, lambda place: place, higher=False) == [(1.0, 1.0), (1.0, 1.0)]
