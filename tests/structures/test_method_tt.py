"""What the methods `tt` and `qtt` promise: sizes, errors, plans, costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tcompress.conversion.estimate import estimate
from tcompress.linalg.ttfit import fit_bytes, fit_macs
from tcompress.models import SourceModel
from tcompress.planning.planner import make_plan
from tcompress.reporting.formatting import describe_layout
from tcompress.reporting.model_report import layer_report
from tcompress.structures import Layout, Site, Target, structure
from tcompress.structures.flops import macs_of
from tcompress.structures.tt import TTLayout, TTSpec
from tests.support.converted import recipe
from tests.support.structures import make_moments, randn, target_of

KIND = structure("tt")
ORDERS: dict[str, dict[str, Any]] = {
    "2": {"rank": 3},
    "3": {"order": 3, "rank": 4},
    "qtt": {"name": "qtt"},
}


def layout_of(inputs: int, outputs: int, budget: int | None = None, **options: Any) -> TTLayout:
    made: TTLayout = KIND.layout(TTSpec(**options), Site(inputs, outputs, "in"), budget)
    return made


def parameters(layout: Layout) -> int:
    return sum(torch.Size(shape).numel() for shape in KIND.tensors(layout).values())


@pytest.mark.parametrize("bits", [2, 5, 10, 12])
def test_qtt_of_a_square_weight_has_sixteen_parameters_per_bond(bits: int) -> None:
    layout = layout_of(2**bits, 2**bits, name="qtt")
    assert parameters(layout) == 16 * (bits - 1)
    assert layout.ranks == (2,) * (bits - 1)


@pytest.mark.parametrize("order", ORDERS)
@settings(deadline=None, derandomize=True, max_examples=2)
@given(
    seed=st.integers(0, 10**6), curved=st.booleans(), widths=st.sampled_from([(16, 24), (11, 13)])
)
def test_a_fit_to_data_is_never_worse_on_its_moments(
    order: str, seed: int, curved: bool, widths: tuple[int, int]
) -> None:
    inputs, outputs = widths
    layout, weight = layout_of(inputs, outputs, **ORDERS[order]), randn(outputs, inputs, seed=seed)
    moments = make_moments(inputs, 40, seed=seed + 1)
    plain = target_of(weight, moments)
    half = randn(outputs, outputs, seed=seed + 2)
    target = Target(plain.product, plain.gram, curvature=half @ half.T if curved else None)
    losses = []
    for chosen in (target, target_of(weight, None)):
        found = KIND.dense(KIND.fit(chosen, layout), layout)
        seen = found if target.curvature is None else target.curvature @ found
        losses.append(float((seen * (found @ target.full_gram() - 2 * target.product)).sum()))
    assert losses[0] <= losses[1] + 1e-9 * abs(losses[1])


def test_widths_are_factored_evenly_or_as_given() -> None:
    plain = layout_of(768, 3072, rank=8)
    assert (plain.in_modes, plain.out_modes, plain.ranks) == ((32, 24), (48, 64), (8,))
    given = layout_of(768, 3072, rank=8, modes={768: [8, 8, 12]})
    assert (given.in_modes, given.out_modes) == ((8, 8, 12), (12, 16, 16))


def test_a_budget_is_spent_and_not_exceeded() -> None:
    for options in ({}, {"order": 3}, {"name": "qtt"}):
        layout = layout_of(64, 96, 1500, **options)
        assert 1000 < parameters(layout) <= 1500


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (layout_of(768, 768, rank=96), "tt 32x24 to 24x32 r=96"),
        (layout_of(768, 3072, order=3, rank=[4, 8], apply="rebuild"),
         "tt 12x8x8 to 12x16x16 r=4,8 rebuild"),
        (layout_of(1024, 256, name="qtt"), "tt 2^10 to 1x1x2^8 r=2"),
    ],
)  # fmt: skip
def test_layouts_are_described(layout: TTLayout, text: str) -> None:
    assert describe_layout(layout) == text


# ---------------------------------------------------------------- work
def test_auto_is_one_of_the_two_ways_at_every_count() -> None:
    auto, contract, rebuild = (
        layout_of(768, 768, rank=96, apply=way) for way in ("auto", "contract", "rebuild")
    )
    chosen = [macs_of(auto, tokens) for tokens in (1, 4096)]
    assert chosen == [macs_of(contract, 1), macs_of(rebuild, 4096)]


def test_a_tiny_rank_is_contracted_for_any_number_of_tokens() -> None:
    layout = layout_of(1024, 1024, name="qtt", rank=1)
    assert macs_of(layout, 10**6).apply == 10**6 * macs_of(layout, 1).apply
    assert macs_of(layout, 1).apply < 1024 * 1024 / 10


def test_gradients_make_contracting_dearer() -> None:
    layout = layout_of(768, 768, rank=96)
    tensors = {name: randn(*shape) for name, shape in KIND.tensors(layout).items()}
    products = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as counter:
            KIND.apply(randn(12, 768), tensors, layout)
        products.append(counter.get_total_flops())
    ways = [layout_of(768, 768, rank=96, apply=way) for way in ("contract", "rebuild")]
    assert products == [2 * macs_of(way, 12).apply for way in ways]


def test_reports_count_a_pass_of_the_stated_length(planned: Callable[..., Any]) -> None:
    plan = planned("bert", method={"name": "tt", "rank": 2, "apply": "rebuild"})
    entry = plan.layers[0]
    for length in (1, 7, 100):
        once, each = 2 * 32 * 32, 32 * 32
        assert layer_report(entry, length=length).macs.now == -(-(once + each * length) // length)
    assert all("tt 8x4 to 4x8" in layer_report(item).structure for item in plan.layers[:4])


def test_a_rank_leaves_the_rest_of_a_target_to_a_low_rank_term(planned: Callable[..., Any]) -> None:
    alone = planned("bert", method={"name": "tt"}, target=0.5)
    assert {len(entry.parts[0].terms) for entry in alone.layers} == {1}
    beside = planned("bert", method={"name": "tt", "rank": 2}, target=0.5)
    assert {entry.parts[0].terms[1].structure for entry in beside.layers} == {"lowrank"}
    assert 0.4 < beside.kept <= 0.5


# ---------------------------------------------------------------- estimates
def test_a_fit_costs_what_its_normal_equations_do() -> None:
    shape = ((32, 24), (24, 32), (96,))
    # The first core's normal matrix, its factor, and what it is made from.
    assert fit_bytes(*shape) == 8 * (2 * (32 * 96) ** 2 + (32 * 24) ** 2)
    assert fit_macs(*shape) < fit_macs(*shape, separates=False)
    assert fit_macs((32, 24), (24, 32), (48,)) < fit_macs(*shape) / 2


def test_estimates_know_the_fit(sources: Callable[[str], SourceModel]) -> None:
    bert = sources("bert")

    def found(calibration: str, **method: Any) -> Any:
        wanted = recipe(method={"name": "tt", **method}, calibration={"source": calibration})
        return estimate(make_plan(wanted, bert), bert, wanted)

    plain, aware = found("none", rank=2), found("builtin", rank=2)
    assert plain.memory_bytes == found("none", rank=4).memory_bytes  # one SVD
    grown = found("builtin", rank=4).memory_bytes - aware.memory_bytes
    # The normal matrix, its factor and what it is made from, of inputs j and ranks.
    assert grown == 8 * 3 * ((8 * 4) ** 2 - (8 * 2) ** 2)
    three = found("none", order=3, rank=2)
    assert three.memory_bytes > plain.memory_bytes  # no longer settled by one SVD
