"""Budgets: parameters, bytes and errors in place of a kept fraction."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

import tcompress
from tcompress.conversion.converter import Converted, convert
from tcompress.conversion.estimate import estimate
from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.limits import (
    bytes_of,
    parameters_of,
)
from tcompress.planning.costs import disk_bytes
from tcompress.planning.planner import make_plan
from tests.support.cli import completed, run
from tests.support.conversions import calibration, dense_weight, structured
from tests.support.numerics import quick

pytestmark = pytest.mark.usefixtures("one_thread")
METHODS: dict[str, dict[str, Any]] = {
    "svd": {"name": "svd"},
    "tt": {"name": "tt"},
    "tt-4": {"name": "tt", "order": 4},
    "lprod": {"name": "lprod", "p": 16, "transform": "dct"},
    "tucker": {"name": "tucker", "share": "none"},
    "bank": {"name": "tucker", "share": "layers"},
    "auto": {"name": "auto"},
}


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("bert")


@pytest.fixture(scope="module")
def source(folder: Path) -> SourceModel:
    return SourceModel.open(str(folder))


def _recipe(**changes: Any) -> Convert:
    return Convert.model_validate(changes)


def _convert(folder: Path, output: Path, *, data: bool = True, **changes: Any) -> Converted:
    given = {} if data else {"calibration": {"source": "none"}}
    batches = calibration("bert") if data else None
    return convert(str(folder), _recipe(**changes, **given), output, data=batches)


def _stored(folder: Path) -> int:
    """Bytes of all tensors in the weight files."""
    files = map(load_file, folder.glob("*.safetensors"))
    return sum(tensor.nbytes for tensors in files for tensor in tensors.values())


def _weight_errors(dense: nn.Module, converted: nn.Module) -> list[float]:
    """Squared errors of all rewritten weights, relative to their squares."""
    errors = []
    for name, layer in structured(converted).items():
        weight = dense_weight(dense, name)
        miss = (layer.dense_weight().detach() - weight).square().sum()
        errors.append(float(miss / weight.square().sum()))
    return errors


# ---------------------------------------------------------------- amounts
def test_amounts_are_read() -> None:
    assert [parameters_of(text) for text in (7, "7", "1.5K", "30M", "2B")] == [
        7, 7, 1500, 30_000_000, 2_000_000_000,
    ]  # fmt: skip
    assert [bytes_of(text) for text in (7, "7B", "60MB", "1.5kB", "2MiB")] == [
        7,
        7,
        60_000_000,
        1500,
        2 * 2**20,
    ]
    assert _recipe(method={"name": "svd"}, target_bytes="598.5 kB")  # as tables print it


@quick
@given(count=st.integers(1, 10**12))
def test_whole_numbers_are_themselves(count: int) -> None:
    assert parameters_of(count) == parameters_of(str(count)) == count
    assert bytes_of(count) == bytes_of(f"{count}B") == count


# ---------------------------------------------------------------- from shapes alone
@pytest.mark.often("lprod-whole")
@pytest.mark.parametrize("depth", [{}, {"keep_layers": [1]}], ids=["whole", "cut"])
@pytest.mark.parametrize("name", METHODS)
def test_plans_keep_within_parameters_and_bytes(
    name: str, depth: dict[str, Any], source: SourceModel
) -> None:
    """The same fraction for all layers, as large as fits: one more step would not."""
    dense = make_plan(_recipe(method={"name": "svd"}, target=0.5, **depth), source)
    parameters = dense.parameters - dense.dropped_parameters
    limit = parameters - dense.dense_rewritten // 2
    plan = make_plan(_recipe(method=METHODS[name], target_params=limit, **depth), source)
    assert 0.93 * limit < plan.parameters - plan.saved <= limit
    recipe = _recipe(method=METHODS[name], target_bytes=2 * limit, dtype="float16", **depth)
    plan = make_plan(recipe, source)
    assert 0.93 * 2 * limit < estimate(plan, source, recipe).disk_bytes <= 2 * limit
    assert plan.budget.kind == "target_bytes"
    assert plan.budget.chosen == ("uniform" if name == "bank" else "later")


@pytest.mark.parametrize("name", [name for name in METHODS if name != "auto"])
def test_a_residual_of_fixed_rank_is_paid_from_the_target(name: str, source: SourceModel) -> None:
    """Up to the next rank, which the small shapes here make a large step."""
    plan = make_plan(_recipe(method=METHODS[name], target=0.6, residual_rank=2), source)
    assert {part.terms[1].rank for entry in plan.layers for part in entry.parts} == {2}
    assert len(plan.layers) == 12
    low = 0.15 if name == "lprod" else 0.5  # slices have their own size
    assert low < plan.structured_rewritten / plan.dense_rewritten <= 0.6


@pytest.mark.parametrize(
    ("name", "rank", "text"),
    [
        ("tt", 20, "a residual of rank 20 alone keeps 125.0%, no less than the target of 60.0%"),
        ("lprod", 9, "lprod beside a residual of rank 9 keeps 62.5%, more than the target of 60.0"),
    ],
)
def test_a_residual_that_the_target_does_not_pay_for_is_refused(
    name: str, rank: int, text: str, source: SourceModel
) -> None:
    recipe = _recipe(method=METHODS[name], target=0.6, residual_rank=rank, only=["q"])
    with pytest.raises(PlanError, match=text):
        make_plan(recipe, source)


def test_what_a_rank_leaves_of_a_target_is_filled(source: SourceModel) -> None:
    for method in (
        {"name": "tt", "rank": 3},
        {"name": "lprod", "p": 8},
        {"name": "tucker", "share": "layers", "rank": 4, "cores": 2},
    ):
        plan = make_plan(_recipe(method=method, target=0.5), source)
        assert all(len(part.terms) == 2 for entry in plan.layers for part in entry.parts)
        assert 0.42 < plan.structured_rewritten / plan.dense_rewritten <= 0.5


def test_budgets_out_of_reach_name_the_smallest(source: SourceModel) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(_recipe(method={"name": "svd"}, target_params=10), source)
    assert caught.value.message.startswith("`--target-params 10` is out of reach: the smallest")
    smallest = int(caught.value.message.split()[-2].replace(",", ""))
    plan = make_plan(_recipe(method={"name": "svd"}, target_params=smallest), source)
    assert plan.parameters - plan.saved <= smallest
    with pytest.raises(PlanError, match="asks for nothing: the dense model has"):
        make_plan(_recipe(method={"name": "svd"}, target_bytes="1GB"), source)


def test_dry_runs_show_the_budget(folder: Path) -> None:
    asked = ("convert", str(folder), "--dry-run", "--method", "svd")
    for option in ("--target-params=20K", "--target-bytes=80KB", "--max-error=0.1", "--tol=0.1"):
        done = completed(*asked, option)
        name = option.partition("=")[0]
        assert name in done.out
        assert "by loss, measured when converting; the plan is provisional" in done.out
    done = run(*asked, "--target-params=20K", "--calib=none")
    assert "alike for all layers" in done.out


def test_options_override_the_budget_of_a_recipe(folder: Path, tmp_path: Path) -> None:
    def plan_of(size: str, *options: str) -> Any:
        recipe = tmp_path / "r.yaml"
        method = f"{{name: svd, {size}}}"
        recipe.write_text(f"recipe_version: 1\nconvert: {{method: {method}}}\n", encoding="utf-8")
        return run("convert", folder, "--dry-run", "--json", "--recipe", recipe, *options)

    assert plan_of("tol: 0.1").document["plan"]["budget"]["kind"] == "tol"
    found = plan_of("tol: 0.1", "--target-bytes", "80KB").document["plan"]["budget"]
    assert (found["kind"], found["limit"]) == ("target_bytes", 80_000)
    # A target takes the place of a rank.
    plan = plan_of("rank: 2", "--target", "0.5", "--calib", "none").document["plan"]
    ranks = {part["terms"][0]["rank"] for entry in plan["layers"] for part in entry["parts"]}
    assert ranks == {8, 10}


def test_python_takes_budgets(folder: Path) -> None:
    plan = tcompress.plan(str(folder), method="auto", target_params="20K", calibration="none")
    assert plan.parameters - plan.saved <= 20_000
    plan = tcompress.plan(str(folder), method="svd", tol=0.1)
    assert plan.budget.kind == "tol"


# ---------------------------------------------------------------- on data
@pytest.mark.often("tucker")
@pytest.mark.parametrize("name", ["lprod", "tucker"])
def test_parameters_are_shared_out_by_loss(name: str, folder: Path, tmp_path: Path) -> None:
    limit = 20_000
    plan = _convert(
        folder, tmp_path / "out", method=METHODS[name], target_params=limit
    ).manifest.plan
    assert 0.97 * limit < plan.parameters - plan.saved <= limit
    budget = plan.budget
    assert budget.chosen == "loss"
    assert budget.error is not None
    assert budget.uniform_error is None or budget.error <= budget.uniform_error


@pytest.mark.often("svd")
@pytest.mark.parametrize("name", ["svd", "tt", "lprod"])
def test_a_residual_of_fixed_rank_stays_where_loss_sizes(
    name: str, folder: Path, tmp_path: Path
) -> None:
    method = METHODS[name]
    plan = _convert(
        folder, tmp_path / "out", method=method, target=0.6, residual_rank=2
    ).manifest.plan
    assert plan.budget.chosen == "loss"
    assert {part.terms[1].rank for entry in plan.layers for part in entry.parts} == {2}
    kept = plan.structured_rewritten / plan.dense_rewritten
    assert kept <= 0.6
    if name != "lprod":  # its slices have their own size
        assert kept > 0.55
        assert len({entry.parts[0].terms[0].model_dump_json() for entry in plan.layers}) > 3


@pytest.mark.parametrize("data", [True, False], ids=["data", "none"])
def test_bytes_are_those_on_disk(data: bool, folder: Path, tmp_path: Path) -> None:
    limit = 38_000
    done = _convert(
        folder,
        tmp_path / "o",
        data=data,
        method=METHODS["svd"],
        target_bytes=limit,
        dtype="float16",
    )
    assert 0.97 * limit < _stored(done.folder) <= limit
    source = SourceModel.open(str(folder))
    assert disk_bytes(source, done.manifest.plan, "float16") == _stored(done.folder)


@pytest.mark.often("svd-False")
@pytest.mark.parametrize(
    ("name", "data"), [("svd", True), ("svd", False), ("tt", False), ("auto", True)]
)
def test_the_largest_error_is_met_by_the_smallest_sizes(
    name: str, data: bool, folder: Path, tmp_path: Path
) -> None:
    sizes = []
    for limit in (0.05, 0.3):
        plan = _convert(
            folder, tmp_path / f"{limit}", data=data, method=METHODS[name], max_error=limit
        ).manifest.plan
        assert 0.5 * limit < plan.budget.error <= limit * (1 + 1e-9)
        sizes.append(plan.parameters - plan.saved)
    assert sizes[1] < sizes[0]


def test_an_error_that_nothing_smaller_meets_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="leaves every layer dense"):
        _convert(folder, tmp_path / "out", method=METHODS["svd"], max_error=1e-9)
    assert not (tmp_path / "out").exists()


@pytest.mark.often("tt")
@pytest.mark.parametrize("name", ["svd", "tt", "tt-4", "tucker"])
def test_a_tolerance_holds_for_every_weight(name: str, folder: Path, tmp_path: Path) -> None:
    """Without data it is the error of the weight."""
    done = _convert(
        folder, tmp_path / "out", data=False, method={**METHODS[name], "tol": 0.2}, dtype="float32"
    )
    errors = _weight_errors(
        AutoModel.from_pretrained(folder), AutoModel.from_pretrained(done.folder)
    )
    assert max(errors) < 0.2 * 1.01
    assert max(errors) > 0.15
    wider = _convert(folder, tmp_path / "w", data=False, method={**METHODS[name], "tol": 0.4})
    assert wider.manifest.plan.structured_rewritten < done.manifest.plan.structured_rewritten
