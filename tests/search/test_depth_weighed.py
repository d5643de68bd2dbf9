"""The number of dropped blocks chosen under a budget."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import tcompress
from tcompress.conversion.converter import Converted, convert
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.depth import plan_depth, within
from tests.support.depth import change_of, deep, drawn, idle_llama
from tests.support.tiny import TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")
IDLE = deep("llama", 5)


def _recipe(**changes: Any) -> Convert:
    base = {"method": {"name": "svd"}, "drop_layers": "auto", "calibration": {"source": "builtin"}}
    return Convert.model_validate({**base, "target": 0.5, **changes})


# Real conversions
def _converted(tiny: TinyModel, folder: Path, batches: int = 3, **changes: Any) -> Converted:
    """Convert `<folder>/dense`, which is written unless it is there, to `<folder>/out`."""
    if not (folder / "dense").exists():
        tiny.build().save_pretrained(folder / "dense")
    data = drawn(tiny, batches)
    return convert(str(folder / "dense"), _recipe(**changes), folder / "out", data=data)


@pytest.fixture
def idle(tmp_path: Path) -> Path:
    """The folder of a language model whose first and third blocks do nothing."""
    idle_llama(tmp_path / "dense")
    return tmp_path


@pytest.mark.slow
def test_idle_blocks_become_nothing_where_that_is_on_offer(idle: Path) -> None:
    done = _converted(IDLE, idle, 16, method={"name": "auto"}, target=0.35, drop_layers=None)
    sizes = dict.fromkeys(range(5), 0)
    for entry in done.manifest.plan.layers:
        sizes[int(entry.block[-1])] += entry.parameters
    assert [sizes[index] > 0 for index in range(5)] == [True, False, True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("method", [{"name": "svd"}, {"name": "auto", "offer": ["svd", "lprod"]}])
def test_idle_blocks_pay_for_the_others(idle: Path, method: dict[str, Any]) -> None:
    done = _converted(IDLE, idle, 16, method=method, target=0.35)
    plan = done.manifest.plan
    kept = plan.depth.stacks[0].kept
    numbers = {f"model.layers.{place}": number for place, number in enumerate(kept)}
    idle_ones = [e for e in plan.layers if numbers[e.block] in (1, 3)]
    assert sum(e.parameters for e in idle_ones) < 0.2 * plan.structured_rewritten
    whole = tcompress.plan(str(idle / "dense"), method="svd", target=0.5).dense_rewritten
    left = sum(item.parameters for item in plan.left)
    assert 0.3 < (plan.structured_rewritten + left) / whole <= 0.35
    loaded = AutoModelForCausalLM.from_pretrained(done.folder)
    assert loaded.config.num_hidden_layers == len(kept)
    assert not list(idle.glob(".*"))


def test_dropping_alone_may_meet_the_budget(idle: Path) -> None:
    plan = _converted(IDLE, idle, target=0.6).manifest.plan
    assert plan.depth.stacks[0].kept == (0, 2, 4)
    assert plan.depth.weighed[2] == pytest.approx(0, abs=1e-6)
    assert not plan.changes_model


@pytest.mark.slow
def test_change_is_that_of_the_model_written(tmp_path: Path) -> None:
    """The change measured block by block is the one of whole passes of the saved model."""
    tiny = deep("llama", 4)
    done = _converted(tiny, tmp_path)
    depth = done.manifest.plan.depth
    change = change_of(tmp_path / "dense", done.folder, drawn(tiny))
    assert depth.weighed[depth.blocks - depth.kept] == pytest.approx(change, rel=1e-3)


def test_a_first_block_that_has_to_stay(tmp_path: Path) -> None:
    done = _converted(deep("modernbert", 3), tmp_path, target=0.7)
    depth = done.manifest.plan.depth
    assert depth.chosen == "measured"
    assert depth.stacks[0].kept[0] == 0
    AutoModelForMaskedLM.from_pretrained(done.folder)  # it loads


@pytest.mark.parametrize(
    ("budget", "share"), [({"target": 0.3}, 0.45), ({"target": 0.5}, 0.75), ({"target": 0.7}, None)]
)
def test_a_fraction_of_all_blocks(budget: Any, share: float | None, tmp_path: Path) -> None:
    deep("bert", 3).build().save_pretrained(tmp_path)  # type: ignore[attr-defined]
    source = SourceModel.open(str(tmp_path))
    recipe = _recipe(**budget)
    depth = plan_depth(recipe, source)
    two = depth.model_copy(
        update={"stacks": (depth.stacks[0].model_copy(update={"kept": (0, 2)}),)}
    )
    inner = within(recipe, two, source)
    assert inner.target == (None if share is None else pytest.approx(share))
    assert (inner.method is None) is (share is None)
    assert within(recipe, depth, source) == recipe.within_blocks


def test_whole_model_budgets_are_met(tmp_path: Path) -> None:
    tiny = deep("bert", 4)
    limit = int(0.8 * sum(item.numel() for item in tiny.build().parameters()))
    plan = _converted(tiny, tmp_path, target=None, target_params=limit).manifest.plan
    assert plan.parameters - plan.saved <= limit
