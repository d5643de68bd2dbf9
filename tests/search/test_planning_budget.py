"""The allocator, against exhaustive search, and estimates before a conversion."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from math import fsum, inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcompress.conversion.estimate import Estimate, _walk, _Work, estimate
from tcompress.errors import PlanError
from tcompress.models import SourceModel, WeightStore
from tcompress.planning.planner import make_plan
from tcompress.search import knapsack
from tcompress.search.candidates import PARAMETERS, Candidate, Site
from tcompress.search.knapsack import Allocation
from tcompress.search.predictions import fractions_for
from tests.support.converted import LPROD, converted, recipe
from tests.support.numerics import quick

allocate, allocate_for_loss, uniform = (
    partial(solve, resource=PARAMETERS)
    for solve in (knapsack.allocate, knapsack.allocate_for_loss, knapsack.uniform)
)
DENSE = "dense"


class _Point(NamedTuple):
    """What a candidate, or a combination of them, costs and loses."""

    cost: int
    loss: float


def _site(name: str, *options: tuple[int, float], dense: int = 100, stay: bool = True) -> Site:
    candidates = [
        Candidate(str(i), ((name, None),), loss, {PARAMETERS: cost})
        for i, (cost, loss) in enumerate(options)
    ]
    return Site((name,), "", {PARAMETERS: dense}, tuple(candidates), may_stay=stay)


def test_where_nothing_is_within_a_share_the_cheapest_stays() -> None:
    site = _site("a", (60, 1.0), (80, 0.5), stay=False)
    for share, costs in ((0.5, [60]), (0.7, [60]), (0.9, [60, 80])):
        (cheap,) = knapsack.within_share([site], share, PARAMETERS)
        assert sorted(item.costs[PARAMETERS] for item in cheap.candidates) == costs


def _chosen(found: Allocation) -> list[int | str]:
    """Places of the candidates that were chosen."""
    return [int(choice.method) if choice.method else DENSE for choice in found.choices]


def _costs(found: Allocation) -> list[int]:
    return [choice.costs[PARAMETERS] for choice in found.choices]


def _points(site: Site) -> list[_Point]:
    return [_Point(item.costs[PARAMETERS], item.loss) for item in site.every]


def _everything(sites: list[Site]) -> list[_Point]:
    """Total cost and loss of every combination."""
    return [
        _Point(sum(point.cost for point in chosen), fsum(point.loss for point in chosen))
        for chosen in product(*map(_points, sites))
    ]


def _hull(site: Site) -> list[_Point]:
    """Options that no mixture of two others, at the same mean cost, beats."""
    options = sorted(_points(site))
    best = [o for i, o in enumerate(options) if all(o.loss < p.loss for p in options[:i])]
    kept = []
    for middle in best:
        below = [o for o in best if o.cost < middle.cost]
        above = [o for o in best if o.cost > middle.cost]
        if all(
            (a.loss - middle.loss) * (b.cost - middle.cost)
            >= (middle.loss - b.loss) * (middle.cost - a.cost)
            for a in below
            for b in above
        ):
            kept.append(middle)
    return kept


def _check(found: Allocation, sites: list[Site]) -> None:
    assert len(found.choices) == len(sites)
    for choice, site in zip(found.choices, sites, strict=True):
        assert choice in site.every
    assert found.cost == sum(_costs(found))
    assert found.loss == fsum(choice.loss for choice in found.choices)


losses = st.integers(0, 400).map(lambda n: n / 8)
options = st.lists(st.tuples(st.integers(0, 40), losses), min_size=1, max_size=6)
some_sites = st.lists(
    st.builds(
        lambda given, dense, stay: _site("w", *given, dense=dense, stay=stay),
        options,
        st.integers(10, 60),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize(
    ("solve", "bounded", "least"),
    [(allocate, "cost", "loss"), (allocate_for_loss, "loss", "cost")],
)
@quick
@given(sites=some_sites, share=st.floats(0, 1))
def test_allocation_is_within_one_step_of_the_optimum(
    solve: Callable[..., Allocation],
    bounded: str,
    least: str,
    sites: list[Site],
    share: float,
) -> None:
    """The sum that is bounded keeps to its bound; the other one is nearly as small as can be."""
    combinations = _everything(sites)
    sums = [getattr(each, bounded) for each in combinations]
    bound = min(sums) + share * (max(sums) - min(sums))
    if bounded == "cost":
        bound = int(bound)
    found = solve(sites, bound)
    _check(found, sites)
    slack = bound * (1 + 1e-9)  # sums of the same losses in another order
    assert getattr(found, bounded) <= slack
    optimum = min(getattr(each, least) for each in combinations if getattr(each, bounded) <= slack)
    hulls = [_hull(site) for site in sites]
    steps = [getattr(b, least) - getattr(a, least) for hull in hulls for a, b in pairwise(hull)]
    assert optimum <= getattr(found, least) <= optimum + max(map(abs, steps), default=0)
    if len(sites) == 1:
        assert getattr(found, least) == optimum


def _vertices(sites: list[Site]) -> list[tuple[int, float]]:
    """Total cost and loss where the best combination of hull steps ends exactly."""
    hulls = [_hull(site) for site in sites]
    steps = sorted(
        ((a.loss - b.loss) / (b.cost - a.cost), b.cost - a.cost, a.loss - b.loss)
        for hull in hulls
        for a, b in pairwise(hull)
    )
    cost, loss = sum(h[0].cost for h in hulls), fsum(h[0].loss for h in hulls)
    ends = [(cost, loss)]
    while steps:
        slope = steps[-1][0]
        while steps and steps[-1][0] > slope * (1 - 1e-9):  # equal slopes in one go
            _, more, less = steps.pop()
            cost, loss = cost + more, loss - less
        ends.append((cost, loss))
    return ends


@quick
@given(sites=some_sites)
def test_allocation_is_optimal_at_the_vertices(sites: list[Site]) -> None:
    combinations = _everything(sites)
    for cost, loss in _vertices(sites):
        optimum = min(each.loss for each in combinations if each.cost <= cost)
        assert loss == pytest.approx(optimum)
        assert allocate(sites, cost).loss == pytest.approx(optimum)
        assert allocate_for_loss(sites, loss).cost == min(
            each.cost for each in combinations if each.loss <= loss + 1e-9
        )


def test_options_off_the_hull_take_what_is_left() -> None:
    # The hull of `a` is 10 -> 50; 20 lies above it and is worth taking only with a remainder.
    a = _site("a", (10, 8.0), (20, 7.5), (50, 1.0), stay=False)
    b = _site("b", (10, 9.0), (30, 2.0), stay=False)
    assert _chosen(allocate([a, b], 40)) == [0, 1]
    assert _chosen(allocate([a, b], 50)) == [1, 1]
    assert _chosen(allocate([a, b], 80)) == [2, 1]
    assert _chosen(allocate_for_loss([a, b], 9.5)) == [1, 1]


def test_steps_go_on_past_one_that_does_not_fit() -> None:
    big = _site("big", (10, 100.0), (90, 20.0), (95, 19.0), stay=False)
    coarse = _site("coarse", (10, 9.0), (30, 4.0), stay=False)
    fine = [_site(name, (10, 9.0), (20, 5.0), stay=False) for name in "ab"]
    # The step of `coarse` saves more than one of the fine ones, but less than both.
    assert _costs(allocate([big, coarse, *fine], 60)) == [10, 10, 20, 20]
    assert _costs(allocate([big, coarse, *fine], 65)) == [10, 10, 20, 20]
    assert _costs(allocate([big, coarse, *fine], 80)) == [10, 30, 20, 20]


def test_the_remainder_is_weighed_anew_after_every_move() -> None:
    a = _site("a", (0, 1000.0), (20, 990.0), (100, 0.0), stay=False)
    b = _site("b", (0, 1000.0), (10, 999.0), (30, 991.0), (100, 0.0), stay=False)
    c = _site("c", (0, 1000.0), (10, 995.0), (100, 0.0), stay=False)
    # After `a`, the remaining 10 buy 1 for `b`, whose 9 would have cost 30, but 5 for `c`.
    assert _costs(allocate([a, b, c], 30)) == [20, 0, 10]


def test_useless_options_are_never_chosen() -> None:
    site = _site("a", (30, 9.0), (20, 5.0), (20, 4.0), (20, 4.0), (60, 4.0), (50, 1.0), dense=55)
    seen = {_chosen(allocate([site], budget=budget))[0] for budget in range(20, 200)}
    assert seen == {2, 5, DENSE}  # of equal ones the first
    assert {_chosen(uniform([site], fraction=k / 100))[0] for k in range(37, 120)} == seen


def test_ties_go_to_the_first_site() -> None:
    sites = [_site(name, (10, 4.0), (20, 2.0), stay=False) for name in "abc"]
    for _ in range(3):
        assert _costs(allocate(sites, 50)) == [20, 20, 10]
        assert _costs(allocate_for_loss(sites, 8.0)) == [20, 20, 10]


def test_staying_dense_is_an_option_of_its_own() -> None:
    sites = [_site("a", (10, 4.0)), _site("b", (10, 4.0), stay=False)]
    found = allocate(sites, 1000)
    assert _chosen(found) == [DENSE, 0]
    assert (found.cost, found.loss) == (110, 4.0)
    with pytest.raises(PlanError, match=r"lose 4 together, more than the 3.5 allowed"):
        allocate_for_loss(sites, 3.5)


def test_uniform_takes_the_largest_within_the_fraction() -> None:
    sites = [
        _site("a", (10, 9.0), (25, 3.0), (26, 2.0)),
        _site("b", (10, 9.0), (100, 3.0), (101, 2.0), dense=400),
    ]
    assert _costs(uniform(sites, 0.25)) == [25, 100]
    assert _costs(uniform(sites, 1.0)) == [100, 400]
    assert uniform([_site("a", (29, 1.0))], 0.29).cost == 29  # 0.29 * 100 < 29 in binary
    with pytest.raises(PlanError, match=r"smallest option of `a` costs 10, more than 0.05 of its"):
        uniform(sites, 0.05)


def test_a_small_budget_is_offered_smaller_sizes() -> None:
    usual, small = fractions_for(0.04), fractions_for(0.006)
    assert usual[0] == 0.01
    assert small[0] <= 0.0015
    assert small[-len(usual) :] == usual == fractions_for(0.9)


def test_a_budget_too_small_names_the_smallest() -> None:
    sites = [_site("a", (1000, 1.0), dense=5000), _site("b", (2500, 1.0), dense=4000)]
    with pytest.raises(PlanError) as caught:
        allocate(sites, 3499)
    assert "cost 3,500 together, more than the budget of 3,499" in caught.value.message
    assert "allow at least 3,500" in (caught.value.hint or "")
    assert allocate(sites, 3500).cost == 3500


@pytest.mark.parametrize("option", [(-1, 1.0), (1, -1.0), (1, nan), (1, inf)])
def test_bad_options_name_their_site(option: tuple[int, float]) -> None:
    with pytest.raises(PlanError, match=r"an option of `q` \(`1`\) has cost"):
        allocate([_site("p", (1, 1.0)), _site("q", (1, 1.0), option)], 100)


def test_a_site_without_options_is_refused() -> None:
    with pytest.raises(PlanError, match="`q` has no options and may not stay dense"):
        allocate([_site("q", stay=False)], 100)
    assert allocate([_site("q")], 100).cost == 100
    assert allocate([], 0) == Allocation((), 0, 0.0)
    assert allocate_for_loss([], 0.0) == Allocation((), 0, 0.0)


# Estimates before a conversion


DATA = {"source": "builtin"}


@pytest.fixture
def estimated(sources: Callable[[str], SourceModel]) -> Callable[..., Estimate]:
    """Estimates a conversion of a tiny model."""

    def of(family: str, **options: Any) -> Estimate:
        wanted = recipe(**options)
        return estimate(make_plan(wanted, sources(family)), sources(family), wanted)

    return of


@pytest.mark.often("svd-gpt2")
@pytest.mark.parametrize("family", ["bert", "gpt2", "mixtral", "t5"])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"method": {"name": "svd"}, "target": 0.3}],
    ids=["lprod", "bfloat16", "svd"],
)
def test_the_size_of_the_output_is_exact(
    tmp_path: Path, family: str, options: dict[str, Any], estimated: Callable[..., Estimate]
) -> None:
    folder = converted(family, tmp_path, **options).folder
    assert estimated(family, **options).disk_bytes == WeightStore.open(folder).total_bytes


def test_the_memory_of_a_fit_without_data(estimated: Callable[..., Estimate]) -> None:
    # Gate and up, float32, share a transform: (4 + 8 + 8) bytes of each, and temporaries of one.
    assert estimated("llama").memory_bytes == 20 * 2 * 32 * 64 + 24 * 32 * 64
    # All experts of a layer are in memory.
    assert estimated("mixtral").memory_bytes == 20 * 4 * 32 * 128 + 24 * 32 * 128


def test_data_and_gradients_cost_memory(estimated: Callable[..., Estimate]) -> None:
    plain = estimated("llama").memory_bytes
    fitted = estimated("llama", method=LPROD | {"transform": "fitted"}).memory_bytes
    aware = estimated("llama", calibration=DATA).memory_bytes
    more = estimated("llama", calibration=DATA | {"samples": 2048}).memory_bytes
    assert plain < fitted < aware < more
    assert more - aware == 1024 * 20 * _bytes_of_token("llama")


@pytest.mark.parametrize("family", ["bert", "vit", "mixtral"])  # the others rename weights
def test_moments_of_all_inputs_are_counted(
    family: str, sources: Callable[[str], SourceModel]
) -> None:
    source, wanted = sources(family), recipe(calibration=DATA)
    work = _Work.of(make_plan(wanted, source), source, wanted)
    walk, _ = _walk(work)
    widths = [group[0].in_features for block in work.blocks for group in block.groups]
    passes = sum(4.0 * size * work.tokens for size in work.block_sizes.values())
    assert widths
    assert walk.flops == passes + sum(4.0 * work.tokens * width**2 for width in widths)


READ = {"vit": 32 + 32 + 32 + 64, "llama": 32 + 32 + 32 + 64, "whisper": 6 * 32 + 64}
"""Numbers that the layers of the largest block read of a token, those alike once."""


def _bytes_of_token(family: str) -> int:
    """Two streams of 32 numbers, what their models began with, and what layers read."""
    return 4 * (4 * 32 + READ[family])


def test_pictures_and_sounds_have_their_own_lengths(estimated: Callable[..., Estimate]) -> None:
    def difference(family: str, **options: Any) -> int:
        few, many = ({**options, "samples": count, "batch_size": 4} for count in (10, 20))
        sizes = [estimated(family, calibration=chosen).memory_bytes for chosen in (few, many)]
        return (sizes[1] - sizes[0]) // (10 * _bytes_of_token(family))

    assert difference("vit", source="builtin") == 17
    assert difference("whisper", source="builtin") == 20 + 16
    assert difference("llama", source="texts.txt", max_length=100) == 25


def test_ranks_transforms_and_data_cost_time(
    estimated: Callable[..., Estimate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tcompress.conversion.estimate.product_speed", lambda: 1e10)

    def seconds(**options: Any) -> float:
        return estimated("llama", **options).seconds

    assert seconds() < 1
    assert seconds(calibration=DATA) > seconds()
    assert (slow := seconds(calibration=DATA | {"samples": 10**6})) > 20
    monkeypatch.setattr("tcompress.conversion.estimate.product_speed", lambda: 2e10)
    fast = seconds(calibration=DATA | {"samples": 10**6})
    assert fast == pytest.approx(slow / 2, abs=0.1)


def test_tiles_of_bfloat16_shorten_sums_where_passes_are_in_it(
    estimated: Callable[..., Estimate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tcompress.conversion.estimate.product_speed", lambda: 1e8)
    many = DATA | {"samples": 10**6}

    def seconds(tiles: bool, precision: str) -> float:
        monkeypatch.setattr("tcompress.conversion.estimate.has_bfloat16_tiles", lambda: tiles)
        asked = {**many, "mixed_precision": precision}
        return estimated("llama", calibration=asked, device="cpu").seconds

    assert seconds(True, "bf16") < seconds(False, "bf16")
    assert seconds(True, "no") == seconds(False, "no")
