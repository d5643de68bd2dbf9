"""Plans of layers that read one input, and of budgets."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tcompress.models import SourceModel
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.planning.planner import make_plan
from tests.support.conversions import assert_wired, by_role, few_steps, make, recipe, short_name
from tests.support.tiers import tiered
from tests.support.tiny import TINY, TinyModel

Planned = Callable[..., Plan]
FITTED = {"name": "lprod", "p": 4, "transform": "fitted", "block": 4}
SVD = {"name": "svd", "rank": 4}


SIZES = {
    "hidden_size", "intermediate_size", "d_model", "d_kv", "d_ff", "dim", "hidden_dim", "n_embd",
    "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
}  # fmt: skip


def _wide(tiny: TinyModel, factor: int) -> TinyModel:
    def scaled(options: Any) -> dict[str, Any]:
        return {
            key: scaled(value)
            if isinstance(value, dict)
            else value * factor
            if key in SIZES
            else value
            for key, value in options.items()
        }

    return dataclasses.replace(tiny, options=scaled(tiny.options))


BUDGETS = [
    ({"name": "svd"}, 0.25),
    ({"name": "svd"}, 0.6),
    ({"name": "lprod", "p": 4, "transform": "dct"}, 0.4),
    ({"name": "lprod", "p": 8, "transform": "fitted"}, 0.3),
    ({"name": "lprod", "p": 4, "transform": "dft", "tubal_rank": None}, 0.5),
]


@pytest.mark.parametrize("family", TINY)
def test_targets_are_kept_and_filled(family: str, tmp_path: Path) -> None:
    _wide(TINY[family], 4).build().save_pretrained(tmp_path)
    source = SourceModel.open(str(tmp_path))
    for method, target in BUDGETS:
        plan = make_plan(recipe(method=method, target=target), source)
        assert {item.reason for item in plan.left if item.role} == set()
        assert 0.9 * target <= plan.kept <= target, (method, target)


@pytest.mark.parametrize("method", [FITTED, {"name": "lprod", "p": 4}, {"name": "svd"}])
@pytest.mark.parametrize(
    "changes",
    [
        {"keep": ["k", "v"]},
        {"layers": [{"match": "q", "method": SVD}]},
        {"layers": [{"match": "q", "target": 0.5}]},
        {"layers": [{"match": "v", "keep": True}]},
    ],
)
def test_targets_are_kept_where_not_all_layers_share_an_input(
    changes: dict[str, Any], method: dict[str, Any], tmp_path: Path
) -> None:
    """Those that do pay for its transform alone."""
    _wide(TINY["bert"], 2).build().save_pretrained(tmp_path)
    plan = make_plan(recipe(method=method, target=0.4, **changes), SourceModel.open(str(tmp_path)))
    ruled = {"q"} if "layers" in changes else set()
    for block in {layer.block for layer in plan.layers}:
        group = [e for e in plan.layers if e.block == block and e.role in {"q", "k", "v"} - ruled]
        kept = sum(e.parameters for e in group) / sum(e.dense_parameters for e in group)
        assert kept <= 0.4


def _shares(plan: Plan) -> dict[str, tuple[int, str | None]]:
    """Readers and owner of every layer's input in the first block."""
    return {
        role: (layer.readers, layer.input_of and short_name(layer.input_of))
        for role, layer in by_role(plan).items()
    }


@pytest.mark.parametrize("option", ["dct", "fitted"])
def test_layers_that_read_one_input_share_its_transform(option: str, planned: Planned) -> None:
    assert _shares(planned("llama", option)) == {
        "q": (3, None),
        "k": (1, "0 q_proj"),
        "v": (1, "0 q_proj"),
        "o": (1, None),
        "gate": (2, None),
        "up": (1, "0 gate_proj"),
        "down": (1, None),
    }


def test_factors_without_a_transform_share_nothing(planned: Planned) -> None:
    assert set(_shares(planned("llama", "svd")).values()) == {(1, None)}


def test_cross_attention_shares_the_encoders_states(planned: Planned) -> None:
    plan = planned("bart")
    shares = {
        layer.role: (layer.readers, layer.input_of and short_name(layer.input_of))
        for layer in plan.layers
        if layer.block == "model.decoder.layers.0"
    }
    assert shares["q"] == (3, None)
    assert shares["cross_q"] == (1, None)
    assert {shares["cross_k"], shares["cross_v"]} in (
        {(2, None), (1, "0 k_proj")},
        {(2, None), (1, "0 v_proj")},
    )


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("option", ["dct", "fitted", "residual"])
def test_owners_of_inputs_come_first_and_count_their_readers(
    family: str, option: str, planned: Planned
) -> None:
    seen: dict[str, LayerPlan] = {}
    readers: Counter[str] = Counter()
    for layer in planned(family, option).layers:
        if layer.input_of is not None:
            owner = seen[layer.input_of]
            assert owner.input_of is None
            assert (owner.block, owner.in_features) == (layer.block, layer.in_features)
            readers[layer.input_of] += 1
        if layer.parameter == "weight":
            seen[layer.name] = layer
    assert all(layer.readers == 1 + readers[name] for name, layer in seen.items())


MIXED = [
    ({"layers": [{"match": "q", "method": SVD}]}, {"q": (1, None), "k": (2, None), "v": "k"}),
    ({"layers": [{"match": "k", "method": SVD}]}, {"q": (2, None), "k": (1, None), "v": "q"}),
    ({"layers": [{"match": "q", "keep": True}]}, {"k": (2, None), "v": "k"}),
    (
        {"layers": [{"match": "v", "method": {**FITTED, "block": 8}}]},
        {"q": (2, None), "k": "q", "v": (1, None)},
    ),
    ({"layers": [{"match": "k", "residual_rank": 2}]}, {"q": (3, None), "k": "q", "v": "q"}),
    ({"layers": [{"match": "q", "residual_rank": 2}]}, {"q": (3, None), "k": "q", "v": "q"}),
    (
        {"layers": [{"match": "k", "method": {**FITTED, "placement": "out"}}]},
        {"q": (2, None), "k": (1, None), "v": "q"},
    ),
]


@pytest.mark.parametrize(("changes", "wanted"), MIXED)
def test_plans_share_inputs_among_equals_only(
    changes: dict[str, Any], wanted: dict[str, Any], planned: Planned
) -> None:
    plan = planned("llama", method=FITTED, **changes)
    owners = {role: (1, f"0 {x}_proj") for role, x in wanted.items() if isinstance(x, str)}
    found = {role: share for role, share in _shares(plan).items() if role in ("q", "k", "v")}
    assert found == {**wanted, **owners}


@pytest.mark.parametrize(
    "changes",
    tiered([case for case, _ in MIXED], lambda row: row in [MIXED[n][0] for n in (0, 3, 4, 5)]),
)
def test_inputs_are_shared_as_planned(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_steps(monkeypatch)
    made = make("llama", tmp_path, aware=True, method=FITTED, **changes)
    assert_wired(made)
