"""What every resource that a budget may limit does; a new one gets a row here."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tcompress.errors import PlanError
from tcompress.fitting.workdir import FitWorkplace
from tcompress.options import Convert
from tcompress.options.convert_options import RESOURCES as OPTIONS
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.progress import Silent
from tcompress.search.candidates import SearchInputs
from tcompress.search.resources import CLOSE, RESOURCES
from tcompress.search.search import Measurements
from tests.support.conversions import calibration, make
from tests.support.counted_clock import counted_clock

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH: dict[str, Any] = {"method": {"name": "width"}}
# By option: what is in reach of the tiny encoder, and what is not.
ROWS: dict[str, tuple[Any, Any]] = {"speedup": (1.3, 60), "latency": ("28ms", "0.001ms")}
ROW = pytest.mark.parametrize("name", ROWS)
FIRST = pytest.mark.often("speedup")  # of time the other way to say it is in the slow tier


@pytest.fixture(autouse=True)
def counted() -> Any:
    with counted_clock():
        yield


def test_every_option_has_a_row() -> None:
    assert set(ROWS) == set(OPTIONS)


@FIRST
@ROW
def test_candidates_and_what_is_beside_them_add_up_to_the_model(
    sources: Any, name: str, tmp_path: Path
) -> None:
    source = sources("bert")
    recipe = Convert.model_validate({"method": {"name": "auto"}, name: ROWS[name][0]})
    plan = make_plan(recipe, source)
    device, data = torch.device("cpu"), calibration("bert")
    with FitWorkplace(tmp_path / "out", "", device).working() as workdir:
        budget = recipe.resource_budget
        assert budget is not None
        inputs = SearchInputs(source, recipe, plan, data, workdir, device, Silent())
        resource, predictions = Measurements(inputs).priced(budget.unit)
        workdir.discard()
    assert RESOURCES[budget.unit] is type(resource)
    taken = sum(site.dense[resource.unit] for site in predictions.layers)
    assert resource.rest(predictions.layers) + taken == pytest.approx(resource.dense, rel=1e-6)
    for site in (*predictions.layers, *predictions.widths):
        assert site.candidates
        assert all(item.costs[resource.unit] >= 0 for item in site.candidates)
    assert resource.ratio(Plan(layers=())) == pytest.approx(1)


@FIRST
@ROW
def test_a_plan_takes_no_more_than_is_allowed(sources: Any, name: str, tmp_path: Path) -> None:
    source, recipe = sources("bert"), Convert.model_validate({**WIDTH, name: ROWS[name][0]})
    plan = make("bert", tmp_path, aware=True, **WIDTH, **{name: ROWS[name][0]}).plan
    budget = recipe.resource_budget
    assert budget is not None
    whole = make_plan(recipe, source)
    resource = RESOURCES[budget.unit].of(source, recipe, whole, torch.device("cpu"))
    least = (1 - CLOSE) * resource.reduction(budget)
    assert resource.ratio(Plan(layers=())) < least <= resource.ratio(plan)
    assert plan.budget is not None
    assert plan.budget.kind == name
    assert plan.budget.chosen == "loss"
    assert 0 < plan.kept < 1


@FIRST
@ROW
def test_out_of_reach_says_how_far_it_is(name: str, tmp_path: Path) -> None:
    for changes in (WIDTH, {"method": {"name": "svd"}, "allocation": "uniform"}):
        with pytest.raises(PlanError, match="out of reach"):
            make("bert", tmp_path, aware=True, **changes, **{name: ROWS[name][1]})
    assert not (tmp_path / "small").exists()
