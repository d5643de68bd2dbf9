"""What the method `tucker` promises: sizes, plans, and banks fitted to all that use them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tcompress.linalg.moments import fit_lowrank
from tcompress.options import find_recipe, parse_recipe
from tcompress.options.steps import Architecture
from tcompress.own_models.architecture import open_architecture
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.reporting.formatting import describe_parts
from tcompress.reporting.model_report import layer_report
from tcompress.structures import Site, Target, structure
from tcompress.structures.tucker import TuckerLayout, TuckerSpec
from tests.support.structures import make_moments, randn

KIND = structure("tucker")


def layout_of(
    inputs: int, outputs: int, sharing_sites: int = 0, budget: int | None = None, **options: Any
) -> TuckerLayout:
    side = options.pop("side", "in")
    site = Site(inputs, outputs, side, role="q", block="layers.0", head=4)
    site = replace(site, sharing_sites=(site,) * sharing_sites)
    made: TuckerLayout = KIND.layout(TuckerSpec(**options), site, budget)
    return made


def parameters(layout: TuckerLayout) -> int:
    return sum(torch.Size(shape).numel() for shape in KIND.tensors(layout).values())


# ---------------------------------------------------------------- one weight
def test_one_weight_is_low_rank_in_the_norm_of_both_moments() -> None:
    layout = layout_of(16, 24, share="none", rank=5)
    weight, half = randn(24, 16), randn(24, 24, seed=1)
    gram, curvature = make_moments(16, 40).gram, half @ half.T
    target = Target(weight @ gram, gram, curvature=curvature)
    found = KIND.fit(target, layout)
    a, b = fit_lowrank(target.product, gram, 5, curvature)
    assert_close(KIND.dense(found, layout), a @ b)
    for name in ("u", "v"):
        assert_close(found[name].T @ found[name], torch.eye(5).double())


@pytest.mark.parametrize("budget", [400, 1000, 1499])
def test_a_budget_is_spent_and_not_exceeded(budget: int) -> None:
    layout = layout_of(64, 96, budget=budget, share="none")
    rank = layout.ranks[0]
    assert parameters(layout) <= budget < (rank + 1) * (64 + 96 + rank + 1)


# ---------------------------------------------------------------- sizes of banks
@pytest.mark.parametrize("share", ["heads", "layers", "model"])
@pytest.mark.parametrize("target", [0.1, 0.25, 0.6])
def test_a_bank_and_what_uses_it_fill_a_budget(share: str, target: float) -> None:
    sharing_sites, dense = 6, 64 * 192
    layout = layout_of(64, 192, sharing_sites, int(target * dense), share=share)
    bank = sum(torch.Size(shape).numel() for shape in KIND.shared(layout).shapes.values())
    total = bank + sharing_sites * parameters(layout)
    assert 0.75 * target * dense * sharing_sites < total <= target * dense * sharing_sites
    assert KIND.shared(layout).share == pytest.approx(1 / sharing_sites)


def test_cores_fill_what_given_ranks_leave() -> None:
    layout = layout_of(64, 64, 6, 1000, share="layers", rank=(20, 30))
    assert (layout.ranks, layout.cores) == ((20, 30), (6000 - 64 * 50) // (20 * 30 + 6))
    assert layout_of(64, 64, 6, share="layers", rank=20).cores == 6


def test_ranks_beyond_what_the_shape_admits_are_clipped() -> None:
    layout = layout_of(16, 16, 4, share="layers", rank=99, cores=9)
    assert (layout.ranks, layout.cores, layout.blocks) == ((16, 16), 4, 4)


def test_two_weights_at_least_share_a_bank() -> None:
    assert layout_of(16, 16, 1, 200, share="layers").bank is None
    assert layout_of(16, 64, 1, 400, share="model").bank == "model"  # four blocks


# ---------------------------------------------------------------- fits of banks
LAYOUTS = {
    "layers": [layout_of(8, 12, 3, share="layers", rank=(4, 5), cores=2)] * 3,
    "grid": [layout_of(8, 24, 2, share="model", rank=(3, 5), cores=3)] * 2,
    "both ways": [
        replaced := layout_of(8, 12, 4, share="heads", rank=(3, 5), cores=4),
        layout_of(12, 8, 4, share="heads", rank=(3, 5), cores=4, side="out").model_copy(
            update={"blocks": replaced.blocks}
        ),
    ],
}


def targets_of(
    layouts: list[TuckerLayout], seed: int, *, aware: bool, curved: bool
) -> list[Target]:
    made = []
    for place, layout in enumerate(layouts):
        weight = randn(layout.out_features, layout.in_features, seed=seed + place)
        gram = make_moments(layout.in_features, 40, seed=seed + 10 * place).gram
        half = randn(layout.out_features, layout.out_features, seed=seed + 100 + place)
        product, moment = (weight @ gram, gram) if aware else (weight, None)
        curvature = half @ half.T if curved else None
        made.append(Target(product, moment, float(product.mul(weight).sum()), curvature, weight))
    return made


def missed(targets: list[Target], fitted: list[Target], layouts: list[TuckerLayout]) -> float:
    """The loss on some moments of what was fitted to others."""
    bank = KIND.fit_shared(fitted, layouts)
    total = 0.0
    for evaluation, target, layout in zip(targets, fitted, layouts, strict=True):
        own = KIND.fit(replace(target, factors=bank), layout)
        gap = evaluation.weight - KIND.dense({**own, **bank}, layout)
        seen = gap if evaluation.curvature is None else evaluation.curvature @ gap
        scale = evaluation.scale if evaluation.curvature is None else 1.0
        total += float((seen @ evaluation.full_gram()).mul(gap).sum()) / scale
    return total


@pytest.mark.parametrize("name", LAYOUTS)
@settings(deadline=None, derandomize=True, max_examples=3)
@given(seed=st.integers(0, 10**6), curved=st.booleans())
def test_a_bank_fitted_to_data_is_never_worse_on_its_moments(
    name: str, seed: int, curved: bool
) -> None:
    layouts = LAYOUTS[name]
    aware = targets_of(layouts, seed, aware=True, curved=curved)
    free = targets_of(layouts, seed, aware=False, curved=False)
    assert missed(aware, aware, layouts) <= missed(aware, free, layouts) * (1 + 1e-9)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("aware", [False, True])
def test_full_ranks_give_all_weights_back(name: str, aware: bool) -> None:
    layouts = [
        layout.model_copy(update={"ranks": layout.block, "cores": layout.blocks})
        for layout in LAYOUTS[name]
    ]
    targets = targets_of(layouts, 0, aware=aware, curved=aware)
    assert missed(targets, targets, layouts) < 1e-9


@pytest.mark.parametrize("unit", ["weight", "inputs"])
@pytest.mark.parametrize("aware", [False, True])
def test_units_of_a_weight_and_of_its_inputs_do_not_count(aware: bool, unit: str) -> None:
    """A bank serves all alike: one whose outputs are ten times larger has no more say."""
    layouts = LAYOUTS["layers"]
    before = targets_of(layouts, 0, aware=aware, curved=False)
    first = before[0]
    assert first.weight is not None
    larger = replace(first, cross_product=10 * first.product, weight=10 * first.weight)
    if unit == "inputs" and first.gram is not None:
        larger = replace(first, cross_product=100 * first.product, gram=100 * first.gram)
    after = [replace(larger, scale=100 * first.scale), *before[1:]]
    assert missed(after, after, layouts) == pytest.approx(missed(before, before, layouts))


def test_data_matter_to_a_bank() -> None:
    layouts = LAYOUTS["layers"]
    aware = targets_of(layouts, 0, aware=True, curved=True)
    free = targets_of(layouts, 0, aware=False, curved=False)
    assert missed(aware, aware, layouts) < 0.7 * missed(aware, free, layouts)


# ---------------------------------------------------------------- layers of one input
@pytest.mark.parametrize("curved", [False, True])
@pytest.mark.parametrize("aware", [False, True])
def test_layers_of_one_input_are_low_rank_one_above_the_other(aware: bool, curved: bool) -> None:
    layouts = [layout_of(8, 12, 3, rank=4)] * 3
    gram = make_moments(8, 40).gram if aware else None
    targets = [
        replace(
            target, cross_product=target.weight if gram is None else target.weight @ gram, gram=gram
        )
        for target in targets_of(layouts, 0, aware=False, curved=curved)
        if target.weight is not None
    ]
    targets = [replace(target, scale=1.0) for target in targets]
    bank = KIND.fit_shared(targets, layouts)
    found = [
        KIND.dense({**KIND.fit(replace(target, factors=bank), layout), **bank}, layout)
        for target, layout in zip(targets, layouts, strict=True)
    ]
    stacked = torch.cat([target.product for target in targets])
    curvatures = [target.curvature for target in targets if target.curvature is not None]
    a, b = fit_lowrank(stacked, gram, 4, torch.block_diag(*curvatures) if curvatures else None)
    assert_close(torch.cat(found), a @ b)


def test_a_layer_that_reads_alone_is_low_rank() -> None:
    layout, weight, gram = layout_of(16, 24, rank=5), randn(24, 16), make_moments(16, 40).gram
    a, b = fit_lowrank(weight @ gram, gram, 5)
    assert_close(KIND.dense(KIND.fit(Target(weight @ gram, gram), layout), layout), a @ b)
    assert parameters(layout_of(16, 24, budget=239)) == 5 * (16 + 24)


def test_layers_of_one_input_share_a_budget_by_their_sizes() -> None:
    sites = tuple(Site(64, outputs, "in", reads="attn_in") for outputs in (64, 16, 16))
    layouts = [
        KIND.layout(TuckerSpec(), replace(site, sharing_sites=sites), site.out_features * 16)
        for site in sites
    ]
    assert {layout.ranks for layout in layouts} == {(9, 9)}  # (64 + 96) r within a quarter of all
    assert sum(KIND.shared(layout).share for layout in layouts) == pytest.approx(1)


# ---------------------------------------------------------------- plans
HEADS, LAYERS = ({"name": "tucker", "share": share} for share in ("heads", "layers"))


def users(plan: Plan) -> dict[str, list[str]]:
    """Short names of the layers by the owner of the bank that they use."""
    found: dict[str, list[str]] = {}
    for entry in plan.layers:
        if entry.own_factors or entry.bank_of:
            (owner,) = entry.bank_of.values() or (entry.name,)
            found.setdefault(owner, []).append(entry.role)
    return found


def test_banks_of_heads_of_layers_and_of_the_model(planned: Callable[..., Any]) -> None:
    heads, layers = (users(planned("bert", "tucker", method=own)) for own in (HEADS, LAYERS))
    model = users(planned("bert", "tucker-model"))
    assert list(heads.values()) == [["q", "k", "v", "o"]] * 2
    assert list(layers.values()) == [[role] * 2 for role in ("q", "k", "v", "o", "up", "down")]
    assert [len(roles) for roles in model.values()] == [12]


def test_by_default_layers_share_the_factor_of_their_input(planned: Callable[..., Any]) -> None:
    plan = planned("bert", "tucker", method={"name": "tucker"})
    assert list(users(plan).values()) == [["q", "k", "v"]] * 2
    texts = {entry.role: describe_parts(entry.parts) for entry in plan.layers}
    assert texts["q"] == texts["v"] == "tucker inputs r=9"
    assert texts["o"] == "tucker r=6"
    assert 0.35 < plan.kept <= 0.4
    gated = users(planned("llama", "tucker", method={"name": "tucker"}))
    assert list(gated.values()) == [["q", "k", "v"], ["gate", "up"]] * 2


def test_feed_forward_weights_of_shared_heads_stand_alone(planned: Callable[..., Any]) -> None:
    plan = planned("bert", "tucker", method=HEADS)
    texts = {entry.role: describe_parts(entry.parts) for entry in plan.layers}
    assert texts["q"] == texts["o"] == "tucker heads 16 of 8x32 r=4,14"
    assert texts["up"] == texts["down"] == "tucker r=7"
    alone = planned("bert", "tucker", method={**HEADS, "rank": [4, 16]}, target=None)
    assert {item.role for item in alone.left} == {"up", "down"}
    assert "no factors for it, and no `target`" in alone.left[0].reason


def test_a_bank_is_counted_once(planned: Callable[..., Any]) -> None:
    plan = planned("bert", "tucker-model")
    (bank,) = [layout for entry in plan.layers for layout in entry.own_factors.values()]
    left, right = bank.ranks
    size = bank.cores * (left * right) + 32 * (left + right) + bank.blocks * bank.cores
    assert plan.structured_rewritten == size
    assert 0.35 < plan.kept <= 0.4
    assert [note.partition(",")[0] for note in plan.warnings] == [
        "12 layers share the tensors of one set of factors"
    ]
    rows = [layer_report(entry).structure for entry in plan.layers]
    assert [row.endswith("with shared factors") for row in rows] == [True] + [False] * 11
    assert not planned("bert", "tucker").warnings


def test_layers_that_are_kept_pay_for_no_bank(planned: Callable[..., Any]) -> None:
    plan = planned("bert", "tucker", method=LAYERS, keep=["re:layer.0.*query"])
    assert [entry.role for entry in plan.layers if not entry.own_factors and not entry.bank_of] == [
        "q"  # the only one left of its role
    ]
    rows = planned("bert", "tucker", method=LAYERS, layers=[{"match": "q", "target": 0.2}])
    sizes = {entry.role: entry.parts[0].terms[0].ranks for entry in rows.layers}
    assert sizes["q"] < sizes["k"]


def test_banks_end_with_a_stack_of_blocks(planned: Callable[..., Any]) -> None:
    plan = planned("t5", "tucker-model")
    owners = {owner.partition(".")[0] for owner in users(plan)}
    assert owners == {"encoder", "decoder"}
    for entry in plan.layers:
        assert all(owner.startswith(entry.name.split(".")[0]) for owner in entry.bank_of.values())


def test_what_does_not_fit_a_block_stands_alone(planned: Callable[..., Any]) -> None:
    """Keys and values that heads share are narrower than the model."""
    plan = planned("llama", "tucker-model")
    alone = {entry.role for entry in plan.layers if not entry.own_factors and not entry.bank_of}
    assert {"k", "v"} <= alone
    assert "q" not in alone


# ---------------------------------------------------------------- the published arrangement
def test_the_arrangement_of_bert_base() -> None:
    """144 blocks of 768 x 768 over 72 cores: 11,217,024 weights, known from the config alone."""
    text, name = find_recipe("encoder/bert-tucker-model")
    convert = parse_recipe(text, name).convert
    assert convert is not None
    bert = Architecture.model_validate({"model_type": "bert", "class": "BertForMaskedLM"})
    plan = make_plan(convert, open_architecture(bert, 0))
    assert len(plan.layers) == 72
    layouts = [entry.parts[0].terms[0] for entry in plan.layers]
    assert {(item.cores, item.ranks, item.block, item.blocks) for item in layouts} == {
        (72, (384, 384), (768, 768), 144)
    }
    assert plan.structured_rewritten == 11_217_024
    assert plan.structured_rewritten == 72 * 384 * 384 + 2 * 768 * 384 + 144 * 72
    assert plan.dense_rewritten == 144 * 768 * 768
    assert sum(len(entry.own_factors) for entry in plan.layers) == 1
