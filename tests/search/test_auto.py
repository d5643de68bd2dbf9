"""Method `auto`: every layer gets what its budget does most with."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tcompress.conversion.converter import Converted, convert
from tcompress.errors import PlanError
from tcompress.options import Convert
from tcompress.options.method_options import AutoSpec
from tcompress.planning.entries import BudgetPlan, Plan
from tcompress.planning.sites import offered_by
from tcompress.reporting.model_report import report_of
from tcompress.reporting.page import write_html
from tcompress.search import budgets
from tcompress.search.budgets import BudgetProblem
from tcompress.search.candidates import PARAMETERS, Candidate, Site
from tcompress.search.corrections import WeightFits, blocks_to_fit
from tcompress.search.knapsack import Allocation
from tcompress.search.predictions import Predictions
from tests.support.cli import run
from tests.support.conversions import assert_wired, calibration, make
from tests.support.numerics import quick

pytestmark = pytest.mark.usefixtures("one_thread")
AUTO: dict[str, Any] = {"method": {"name": "auto"}, "target": 0.4}
PREDICTED = {**AUTO, "method": {"name": "auto", "trials": False}}
ALL = {**AUTO, "method": {"name": "auto", "offer": ["lowrank", "tt", "lprod"], "trials": False}}


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("bert")


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Converted]:
    """What predictions alone decide, made once."""
    return cache(lambda: _convert(folder, tmp_path_factory.mktemp("made") / "out", PREDICTED))


def _convert(folder: Path, output: Path, changes: dict[str, Any], **options: Any) -> Converted:
    recipe = Convert.model_validate(changes)
    return convert(str(folder), recipe, output, data=calibration("bert"), **options)


# ---------------------------------------------------------------- never worse than one method
class _Paper(BaseModel):
    """A plan that is nothing but its cost."""

    cost: int
    budget: Any = None


class _PaperProblem(BudgetProblem):
    def _plan(self, found: Allocation, *_: Any) -> Any:
        return _Paper(cost=found.cost)

    def _measured(self, plan: Any) -> int:
        return int(plan.cost)

    def _refused(self, *_: Any) -> set[tuple[str, str]]:
        return set()

    def limits(self) -> tuple[int, int]:
        layers = self.predictions.layers
        limit = int(self.budget.limit * sum(site.dense[PARAMETERS] for site in layers))
        return limit, limit


@pytest.fixture(autouse=True)
def paper_has_no_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    own = budgets.covered

    def covered(plan: Any, source: Any) -> Any:
        return plan if isinstance(plan, _Paper) else own(plan, source)

    monkeypatch.setattr(budgets, "covered", covered)


ladders = st.lists(st.tuples(st.integers(1, 99), st.integers(0, 400)), max_size=6)
layers = st.lists(st.tuples(ladders, ladders), min_size=1, max_size=4)


def _sized(
    key: str, role: str, left_out: float = 100.0, **offers: Sequence[tuple[int, float]]
) -> Site:
    candidates = [
        Candidate(name, ((key, None),), loss, {PARAMETERS: cost})
        for name, options in offers.items()
        for cost, loss in options
    ]
    return Site((key,), role, {PARAMETERS: 100}, tuple(candidates), left_out)


def _solved(found: Sequence[Any], limit: float, kind: type[_PaperProblem] = _PaperProblem) -> Any:
    sites = [
        _sized(
            f"w{index}",
            "q",
            50.0,
            **{
                name: [(cost, loss / 8) for cost, loss in options]
                for name, options in zip("ab", pair, strict=True)
            },
        )
        for index, pair in enumerate(found)
    ]
    recipe = Convert.model_validate({**AUTO, "target": limit})
    facts = BudgetPlan(kind="target", limit=limit, chosen="later", fraction=limit)
    plan = Plan(layers=(), budget=facts)
    source: Any = SimpleNamespace()
    predictions = Predictions(layers=tuple(sites), complete=("a", "b"))
    return kind(recipe, source, plan, predictions, ["a", "b"]).best()


@quick
@given(found=layers, limit=st.floats(0.05, 0.95))
def test_never_predicted_worse_than_the_best_single_method(found: Any, limit: float) -> None:
    try:
        made = _solved(found, limit)
    except PlanError:
        return
    assert made.cost <= int(limit * 100 * len(found))
    for error in made.budget.single_errors.values():
        assert made.budget.error <= error


@pytest.mark.parametrize(
    ("near", "far", "error", "alone"), [(100, 108, 0.26, 0.26), (8, 80, 0.02, 0.11)]
)
def test_a_mixture_is_taken_where_it_is_clearly_better(
    near: int, far: int, error: float, alone: float
) -> None:
    """One layer suits the first method, the other one the second: 4 % better are too few."""
    made = _solved([([(40, near)], [(40, far)]), ([(40, far)], [(40, near)])], 0.4)
    assert made.budget.error == pytest.approx(error)
    assert min(made.budget.single_errors.values()) == pytest.approx(alone)
    assert made.budget.uniform_error == pytest.approx(alone)


class _SharingProblem(_PaperProblem):
    """Layers of more than 54 no longer share what is counted once: they cost 10 more each."""

    def _plan(self, found: Allocation, *_: Any) -> Any:
        return _Paper(
            cost=found.cost + 10 * sum(choice.costs[PARAMETERS] > 54 for choice in found.choices)
        )


def test_what_is_given_back_is_spent_again() -> None:
    """Without the 40 that were spent too much, 200 of 240 are spent."""
    ladder = [(cost, (100 - cost) ** 2 // 25) for cost in range(10, 61, 2)]
    made = _solved([(ladder, [])] * 4, 0.6, _SharingProblem)
    assert 210 < made.cost <= 240


# ---------------------------------------------------------------- trials
def test_ratios_are_means_by_role_and_of_all_roles_elsewhere() -> None:
    trials = WeightFits(0.25)
    trials._ratios["b", "q"] += [0.5, 0.125]
    trials._ratios["b", "k"] += [0.25]
    assert trials.ratio("b", "q") == pytest.approx(0.25)
    assert trials.ratio("b", "v") == pytest.approx(0.25)
    assert trials.ratio("a", "q") == 1.0
    item = _sized("w", "q", b=[(20, 8.0), (40, 4.0)])
    losses = [candidate.loss for candidate in trials.corrected(item).candidates]
    assert losses == pytest.approx([2.0, 1.0])


def test_the_size_closest_to_the_budget_is_tried() -> None:
    item = _sized("w", "q", b=[(10, 9.0), (22, 5.0), (60, 1.0)])
    candidate = item.closest("b", 0.25)
    assert candidate is not None
    assert candidate.costs[PARAMETERS] == 22
    assert item.closest("a", 0.25) is None


def test_methods_that_are_clearly_worse_at_all_sizes_are_dropped() -> None:
    trials = WeightFits(0.25)
    trials.drop(
        [
            _sized("w", "q", a=[(20, 5.0), (40, 2.0)], b=[(25, 7.0), (45, 4.0)]),
            _sized("v", "k", a=[(20, 5.0), (40, 2.0)], b=[(25, 5.5), (45, 4.0)]),
        ]
    )
    assert trials.dropped == {("b", "q")}  # for the other role it is close at one size


def test_the_last_block_and_one_in_the_middle_of_each_kind_are_tried() -> None:
    def block(name: str, *roles: str) -> Any:
        return SimpleNamespace(name=name, layers=[SimpleNamespace(role=role) for role in roles])

    blocks = [
        *(block(f"e.{n}", "q") for n in range(6)),
        *(block(f"d.{n}", "q", "o") for n in (0, 1)),
    ]
    assert blocks_to_fit(blocks) == {"e.5", "e.3", "d.1"}


def test_what_is_offered() -> None:
    assert list(offered_by(AutoSpec(), 0.25)) == ["svd", "lprod", "width"]
    found = offered_by(AutoSpec(offer=("tt", "lprod", "tt")), 0.25)
    assert list(found) == ["tt", "lprod"]
    assert [spec.p for spec in found["lprod"]] == [16, 8, 4, 2]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- conversions
@pytest.mark.often("all")
@pytest.mark.parametrize("default", [True, False], ids=["default", "all"])
def test_a_budget_is_kept_by_a_mixture(
    default: bool, made: Callable[[], Converted], folder: Path, tmp_path: Path
) -> None:
    plan = (made() if default else _convert(folder, tmp_path / "out", ALL)).manifest.plan
    facts = plan.budget
    stays = sum(item.parameters for item in plan.left)
    dense = plan.dense_rewritten + stays
    assert 0.9 * 0.4 < (plan.structured_rewritten + stays) / dense <= 0.4
    assert facts.chosen == "loss"
    assert facts.single_errors
    assert all(facts.error <= error for error in facts.single_errors.values())
    assert facts.error < facts.uniform_error
    structures = {term.structure for entry in plan.layers for term in entry.parts[0].terms}
    assert structures & {"lowrank", "width"}


def test_without_data_weights_decide(folder: Path, tmp_path: Path) -> None:
    method = {"name": "auto", "offer": ["lowrank", "lprod"]}
    said = {**AUTO, "method": method, "calibration": {"source": "none"}}
    done = convert(str(folder), Convert.model_validate(said), tmp_path / "out")
    plan = done.manifest.plan
    facts = plan.budget
    # The prediction is the error of the weights, layer by layer, which the fit measures.
    total = sum(errors["weight"] for errors in done.manifest.fit.values())
    assert total / (len(plan.layers) + len(plan.left)) == pytest.approx(facts.error, rel=0.25)


@pytest.mark.slow
def test_the_same_share_for_all_layers(folder: Path, tmp_path: Path) -> None:
    plan = _convert(folder, tmp_path / "o", {**PREDICTED, "allocation": "uniform"}).manifest.plan
    assert plan.budget.chosen == "uniform"
    assert len(plan.layers) == 12
    for half in product((0, 1), (True, False)):  # of blocks: attention may go as a whole
        own = [e for e in plan.layers if (int(e.block[-1]), ".attention." in e.name) == half]
        share = sum(e.parameters for e in own) / sum(e.dense_parameters for e in own)
        assert 0.3 < share <= 0.45  # sides are counted with their owners


@pytest.mark.parametrize(("family", "trials"), [("gpt2", False), ("mixtral", True)])
def test_families(family: str, trials: bool, tmp_path: Path) -> None:
    """Slices and low rank alone: every structure on offer is tried on other models."""
    method = {"name": "auto", "offer": ["lowrank", "lprod"], "trials": trials}
    made = make(family, tmp_path, "svd", aware=True, target=0.4, method=method)
    assert_wired(made)
    assert made.plan.budget.error is not None


def test_with_fewer_blocks_and_within_bytes(folder: Path, tmp_path: Path) -> None:
    changes = {"method": PREDICTED["method"], "target_bytes": 60_000, "drop_layers": 1}
    plan = _convert(folder, tmp_path / "out", changes).manifest.plan
    assert plan.depth.kept == 1
    size = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert 0.85 * 60_000 < size < 1.1 * 60_000  # with headers


def test_layers_with_rules_keep_their_method(folder: Path, tmp_path: Path) -> None:
    rules = {"layers": [{"match": "value", "method": {"name": "tt"}, "target": 0.3}]}
    plan = _convert(folder, tmp_path / "out", {**PREDICTED, **rules}).manifest.plan
    values = [entry for entry in plan.layers if "value" in entry.name]
    assert [entry.parts[0].terms[0].structure for entry in values] == ["tt"] * 2


def test_dimensions_that_nothing_divides_get_what_fits_them(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 15, "intermediate_size": 35, "num_attention_heads": 3}
    model = BertForMaskedLM(BertConfig(vocab_size=100, num_hidden_layers=2, **sizes))
    model.save_pretrained(tmp_path / "odd")
    tried = _convert(tmp_path / "odd", tmp_path / "out", AUTO).manifest.plan.budget.tried
    assert "auto" in tried
    assert "lprod" not in tried  # there are no slices
    assert min(tried.values()) > 0
    plan = _convert(tmp_path / "odd", tmp_path / "predicted", PREDICTED).manifest.plan
    assert {entry.parts[0].terms[0].structure for entry in plan.layers} <= {"lowrank", "width"}


# ---------------------------------------------------------------- what is shown
@pytest.mark.slow
def test_reports_compare_with_equal_shares_and_single_methods(
    made: Callable[[], Converted], tmp_path: Path
) -> None:
    done = run("report", made().folder, "--layers")
    for text in ("budget", "--target 0.4", "predicted error", "shared out alike", " alone"):
        assert text in done.out
    found = run("report", made().folder, "--json").document["reports"][0]
    assert found["budget"]["error"] <= min(found["budget"]["single_errors"].values())
    page = write_html([report_of(made().folder)], tmp_path / "page.html").read_text("utf-8")
    assert "shared out alike" in page
    assert f"All {len(found['layers'])} rewritten weights" in page
    assert found["layers"][0]["structure"] in page
