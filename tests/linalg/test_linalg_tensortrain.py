"""Tensor-train matrices: shapes, costs, decomposition and application, against dense algebra."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from tcompress.errors import FitError
from tcompress.linalg import tensortrain
from tcompress.linalg.tensortrain import (
    balance_cores,
    balanced_modes,
    clip_ranks,
    contract_macs,
    contract_moves,
    full_ranks,
    matrix_modes,
    parameter_count,
    quantized_matrix_modes,
    quantized_modes,
    rank_for_budget,
    rebuild_macs,
    tt_apply,
    tt_shape,
    tt_svd,
    tt_to_matrix,
)
from tests.support.numerics import near, quick, randn

# Input modes, output modes and inner ranks, from one core to five.
SHAPES = [
    ((6,), (4,), ()),
    ((4, 3), (2, 5), (3,)),
    ((5, 2), (3, 4), (7,)),
    ((2, 3, 4), (3, 2, 2), (4, 5)),
    ((4, 3, 2), (2, 2, 5), (2, 6)),
    ((1, 2, 2, 2), (2, 2, 2, 3), (2, 4, 3)),
    ((2, 2, 3, 2, 2), (1, 2, 2, 2, 2), (2, 3, 3, 2)),
]
shapes = pytest.mark.parametrize("shape", SHAPES)
modes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)


def random_cores(shape: tuple[tuple[int, ...], ...], *batch: int) -> list[Tensor]:
    in_modes, out_modes, ranks = shape
    bonds = list(pairwise((1, *ranks, 1)))
    return [
        randn(*batch, a, i, j, b, seed=n)
        for n, ((a, b), i, j) in enumerate(zip(bonds, out_modes, in_modes, strict=True))
    ]


def literal(cores: list[Tensor]) -> Tensor:
    """The definition, entry by entry: a product of one matrix per core."""
    in_modes, out_modes, _ = tt_shape(cores)
    entries = [
        torch.linalg.multi_dot([torch.eye(1).double(), torch.eye(1).double(), *chain])
        for row in torch.cartesian_prod(*map(torch.arange, out_modes)).view(-1, len(cores))
        for column in torch.cartesian_prod(*map(torch.arange, in_modes)).view(-1, len(cores))
        for chain in [[c[:, i, j] for c, i, j in zip(cores, row, column, strict=True)]]
    ]
    return torch.stack(entries).view(math.prod(out_modes), math.prod(in_modes))


# ---------------------------------------------------------------- modes
@pytest.mark.parametrize(
    ("size", "order", "wanted"),
    [
        (384, 2, (16, 24)),
        (384, 3, (6, 8, 8)),
        (768, 2, (24, 32)),
        (768, 3, (8, 8, 12)),
        (1536, 3, (8, 12, 16)),
        (3072, 3, (12, 16, 16)),
        (4096, 3, (16, 16, 16)),
        (4096, 1, (4096,)),
        (97, 2, (7, 14)),
        (1009, 2, (23, 44)),
        (1009, 3, (6, 13, 13)),
        (2 * 97, 2, (13, 15)),
        (2 * 1009, 3, (7, 17, 17)),
        (2, 3, (1, 1, 2)),
        (1, 2, (1, 1)),
    ],
)
def test_modes_of_common_and_of_prime_sizes(size: int, order: int, wanted: tuple[int, ...]) -> None:
    assert balanced_modes(size, order) == wanted


@quick
@given(st.integers(1, 5000), st.integers(1, 5))
def test_modes_are_balanced_and_hardly_padded(size: int, order: int) -> None:
    found = balanced_modes(size, order)
    product = math.prod(found)
    assert list(found) == sorted(found)
    assert len(found) == order
    assert size <= product <= max(1.1 * size, size + 3 * order)
    assert found[-1] <= 2 * product ** (1 / order) + 1e-9
    if size >= 4 and order >= 2:
        assert found[-2] > 1


def test_quantized_modes_fill_the_next_power_of_two() -> None:
    assert quantized_modes(1) == (1,)
    assert quantized_modes(8) == (2, 2, 2)
    assert quantized_modes(9) == (2, 2, 2, 2)
    assert [math.prod(quantized_modes(size)) for size in (384, 512, 768)] == [512, 512, 1024]


def test_modes_of_both_sides_agree_in_number() -> None:
    assert matrix_modes(384, 1536, 2) == ((24, 16), (32, 48))
    assert matrix_modes(768, 768, 3) == ((12, 8, 8), (8, 8, 12))
    assert quantized_matrix_modes(8, 2) == ((2, 2, 2), (1, 1, 2))
    assert quantized_matrix_modes(3, 16) == ((1, 1, 2, 2), (2, 2, 2, 2))
    assert quantized_matrix_modes(1, 1) == ((1,), (1,))


# ---------------------------------------------------------------- ranks
def test_ranks_are_clipped_to_what_the_shape_admits() -> None:
    in_modes, out_modes = (2, 3, 2), (3, 2, 1)  # cores of 6, 6 and 2
    assert clip_ranks([99, 99], in_modes, out_modes) == (6, 2)
    assert clip_ranks([5, 1], in_modes, out_modes) == (5, 1)
    assert clip_ranks([99, 1], in_modes, out_modes) == (6, 1)
    assert clip_ranks([1, 99], (2, 3, 9), (1, 1, 9)) == (1, 3)
    assert clip_ranks([99, 1], (9, 3, 2), (9, 1, 1)) == (3, 1)
    assert clip_ranks([], (2,), (3,)) == ()
    assert full_ranks((2, 2, 2, 2), (2, 2, 2, 2)) == (4, 16, 4)


@quick
@given(modes, st.integers(0, 3000))
def test_rank_for_a_budget_is_the_largest_that_fits(
    sizes: list[tuple[int, int]], budget: int
) -> None:
    in_modes, out_modes = zip(*sizes, strict=True)
    inner = len(sizes) - 1

    def count(rank: int) -> int:
        return parameter_count(in_modes, out_modes, clip_ranks([rank] * inner, in_modes, out_modes))

    rank, most = (
        rank_for_budget(in_modes, out_modes, budget),
        max(full_ranks(in_modes, out_modes), default=1),
    )
    assert 0 <= rank <= most
    assert not rank or count(rank) <= budget
    assert rank == most or count(rank + 1) > budget


@shapes
def test_parameters_are_those_of_the_cores(shape: tuple[tuple[int, ...], ...]) -> None:
    cores = random_cores(shape)
    assert tt_shape(cores) == shape
    assert parameter_count(*shape) == sum(core.numel() for core in cores)


# ---------------------------------------------------------------- apply and rebuild
@shapes
def test_rebuilt_matrix_is_the_definition(shape: tuple[tuple[int, ...], ...]) -> None:
    cores = random_cores(shape)
    near(tt_to_matrix(cores), literal(cores))


@shapes
@pytest.mark.parametrize(("batch", "rows"), [((), (2, 4)), ((3,), (5,)), ((2, 3), (0,))])
def test_contraction_equals_the_rebuilt_product(
    shape: tuple[tuple[int, ...], ...], batch: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    cores = random_cores(shape, *batch)
    x = randn(*batch, *rows, math.prod(shape[0]), seed=9)
    weight = tt_to_matrix(cores)
    assert weight.shape == (*batch, math.prod(shape[1]), math.prod(shape[0]))
    flat = x.reshape(*batch, math.prod(rows), x.shape[-1])
    near(tt_apply(x, cores), (flat @ weight.mT).reshape(*batch, *rows, weight.shape[-2]))


@shapes
@pytest.mark.parametrize("wide", [2, 100])
def test_contraction_without_gradients(
    shape: tuple[tuple[int, ...], ...], wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensortrain, "NARROW", wide)
    monkeypatch.setattr(tensortrain, "WIDE", wide)
    cores = random_cores(shape)
    x = randn(5, math.prod(shape[0]))
    with torch.no_grad():
        near(tt_apply(x, cores), x @ tt_to_matrix(cores).T)


def test_narrow_rows_are_padded() -> None:
    cores, x = random_cores(SHAPES[1]), randn(5, 11, seed=9)
    near(tt_apply(x, cores), x @ tt_to_matrix(cores)[:, :11].T)


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[4]])
def test_gradients_reach_rows_and_cores(shape: tuple[tuple[int, ...], ...]) -> None:
    cores = [core.requires_grad_() for core in random_cores(shape, 2)]
    x = randn(2, 3, math.prod(shape[0]), seed=9).requires_grad_()
    torch.autograd.gradcheck(lambda *c: tt_to_matrix(c), cores, fast_mode=True)
    torch.autograd.gradcheck(lambda rows, *c: tt_apply(rows, c), (x, *cores), fast_mode=True)


@shapes
@pytest.mark.parametrize("turned", [False, True])
def test_costs_are_the_multiply_adds_that_run(
    shape: tuple[tuple[int, ...], ...], turned: bool
) -> None:
    if turned:
        shape = tuple(part[::-1] for part in shape)
    cores, x = random_cores(shape), randn(10, math.prod(shape[0]))
    with FlopCounterMode(display=False) as apply:
        tt_apply(x, cores)
    with FlopCounterMode(display=False) as rebuild:
        tt_to_matrix(cores)
    assert apply.get_total_flops() == 2 * 10 * contract_macs(*shape)
    assert rebuild.get_total_flops() == 2 * rebuild_macs(*shape)


def test_numbers_are_moved_only_where_states_are_narrow() -> None:
    assert contract_moves((32, 24), (24, 32), (96,)) == 0
    # From the first core: 4 inputs become 5 outputs at 3 ranks, for the other 4 inputs.
    assert contract_moves((4, 4), (5, 6), (3,)) == (4 + 5 * 3) * 4
    # From the last core: 4 inputs at 3 ranks become 6 outputs, for the other 5 outputs.
    assert contract_moves((4, 4), (6, 5), (3,)) == (4 * 3 + 6) * 5


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        (((4, 3, 2), (2, 3, 4), (3, 5)), "first"),
        (((2, 2, 3, 4), (2, 4, 3, 2), (2, 5, 3)), "last"),
        (((3, 2, 2, 5), (2, 2, 3, 2), (2, 3, 2)), "last"),
        (((6, 2, 3, 1), (2, 2, 3, 3), (2, 3, 2)), "first"),
    ],
)
def test_numbers_moved_are_those_of_products_that_gather(
    shape: tuple[tuple[int, ...], ...], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later cores see a state for every output, or input, so far."""
    tokens, moved, rows = 10, 0, list[int]()
    product = torch.einsum

    def counted(rule: str, state: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        nonlocal moved
        result = product(rule, state, matrix)
        moved += state.numel() + result.numel()
        rows.append(len(state) // tokens)
        return result

    monkeypatch.setattr(torch, "einsum", counted)
    with torch.no_grad():
        tt_apply(randn(tokens, math.prod(shape[0])), random_cores(shape))
    # From the last core on the first product has nothing behind it, and gathers nothing.
    assert rows[0] == (1 if order == "first" else math.prod(shape[0][:-2]))
    assert max(rows) > 1
    assert moved == tokens * contract_moves(*shape)


def test_contraction_starts_at_the_cheaper_end() -> None:
    assert contract_macs((100, 2), (2, 100), (3,)) == 100 * 2 * 2 * 3 + 2 * 2 * 100 * 3
    assert contract_macs((2, 100), (100, 2), (3,)) == 2 * 100 * 2 * 3 + 2 * 100 * 2 * 3
    # Both ends first, as far as the bond of rank 1.
    assert rebuild_macs((2, 2, 2, 2), (2, 2, 2, 2), (4, 1, 4)) == 64 + 64 + 256


# ---------------------------------------------------------------- decomposition
@pytest.mark.parametrize("rank", [1, 4, 9])
def test_two_cores_miss_the_tail_of_the_rearranged_matrix(rank: int) -> None:
    in_modes, out_modes = (4, 5), (3, 4)
    weight = randn(12, 20)
    rearranged = weight.view(3, 4, 4, 5).permute(0, 2, 1, 3).reshape(12, 20)
    tail = torch.linalg.svdvals(rearranged)[rank:].norm()
    cores = tt_svd(weight, in_modes, out_modes, [rank])
    assert [tuple(core.shape) for core in cores] == [(1, 3, 4, rank), (rank, 4, 5, 1)]
    near((weight - tt_to_matrix(cores)).norm(), tail)


@shapes
def test_full_rank_reproduces_the_matrix(shape: tuple[tuple[int, ...], ...]) -> None:
    in_modes, out_modes, _ = shape
    weight = randn(math.prod(out_modes), math.prod(in_modes))
    full = full_ranks(in_modes, out_modes)
    cores = tt_svd(weight.float().requires_grad_(), in_modes, out_modes, full)
    assert tt_shape(cores) == (in_modes, out_modes, full)
    assert not any(core.requires_grad for core in cores)
    near(tt_to_matrix(cores), weight.float().double())


def test_padding_is_zero_and_cut_off() -> None:
    weight = randn(7, 11)
    whole = tt_to_matrix(tt_svd(weight, (3, 4), (2, 4), [99]))
    near(whole, torch.nn.functional.pad(weight, (0, 1, 0, 1)))


def test_what_cannot_be_decomposed() -> None:
    with pytest.raises(FitError, match="NaN or infinity"):
        tt_svd(torch.full((12, 20), math.nan), (4, 5), (3, 4), [2])


@shapes
def test_balancing_keeps_the_matrix(shape: tuple[tuple[int, ...], ...]) -> None:
    cores = random_cores(shape)
    cores[0] = 1e6 * cores[0]
    cores[0][..., 0] = 1e-3 * cores[0][..., 0]
    balanced = balance_cores(cores)
    assert_close(tt_to_matrix(balanced), tt_to_matrix(cores))
    for left, right in pairwise(balanced):
        inner, outer = left.flatten(0, 2).norm(dim=0), right.flatten(1).norm(dim=1)
        assert_close(inner, outer, rtol=1e-9 if len(cores) == 2 else 1.0, atol=0)


def test_zero_cores_stay_finite() -> None:
    cores = tt_svd(torch.zeros(6, 6), (2, 3), (2, 3), [2])
    near(tt_to_matrix(cores), torch.zeros(6, 6).double())
