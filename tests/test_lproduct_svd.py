"""The L-SVD, its truncation and the two ranks: theorem 8, section 4.4, definitions 9 and 10."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tcompress.errors import InputError
from tcompress.linalg import (
    average_rank,
    complex_dft,
    fixed_transform,
    is_l_orthogonal,
    l_product,
    l_svd,
    l_transpose,
    mode3,
    singular_tubes,
    truncated_l_svd,
    tubal_rank,
)
from tests.support.lproduct import TRANSFORMS, near, per_slice, quick, randn, transform

kinds = pytest.mark.parametrize("kind", TRANSFORMS)
unitary = pytest.mark.parametrize("kind", ["dct", "identity", "hadamard", "random", "unitary-dft"])
shapes = pytest.mark.parametrize("shape", [(4, 3, 4), (3, 5, 4), (3, 3, 8), (1, 4, 2), (4, 1, 1)])


def rebuild(u: Tensor, s: Tensor, v: Tensor, z: Tensor) -> Tensor:
    return l_product(l_product(u, s, z), l_transpose(v, z), z)


def of_slice_ranks(m: int, n: int, ranks: list[int], z: Tensor) -> Tensor:
    """Real tensor whose transformed slices have these ranks (conjugate slices equal ones)."""
    slices = [randn(m, r, seed=k) @ randn(r, n, seed=k + 100) for k, r in enumerate(ranks)]
    return mode3(torch.stack(slices, dim=2), torch.linalg.inv(z))


# Theorem 8.


@kinds
@shapes
def test_theorem_8(kind: str, shape: tuple[int, int, int]) -> None:
    m, n, p = shape
    a, z = randn(m, n, p), transform(kind, p)
    u, s, v = l_svd(a, z)
    assert (u.shape, s.shape, v.shape) == ((m, m, p), (m, n, p), (n, n, p))
    near(rebuild(u, s, v, z), a)
    assert is_l_orthogonal(u, z, tol=1e-12)
    assert is_l_orthogonal(v, z, tol=1e-12)
    off_diagonal = ~torch.eye(m, n, dtype=torch.bool)
    near(s[off_diagonal], torch.zeros_like(s[off_diagonal]))


@kinds
def test_slices_of_s_hold_the_singular_values_of_slices(kind: str) -> None:
    a, z = randn(4, 3, 4), transform(kind, 4)
    slices = mode3(l_svd(a, z)[1], z)
    for k in range(4):
        expected = torch.linalg.svdvals(mode3(a, z)[:, :, k])
        near(slices[:, :, k].diagonal(), expected.to(slices.dtype))


@quick
@given(m=st.integers(1, 5), n=st.integers(1, 5), p=st.integers(1, 7))
def test_factors_of_a_real_tensor_are_real_under_the_dft(m: int, n: int, p: int) -> None:
    a = randn(m, n, p)
    for z in (complex_dft(p, unitary=False), complex_dft(p, unitary=True)):
        factors = l_svd(a, z)
        assert all(factor.dtype == torch.float64 for factor in factors)
        near(rebuild(*factors, z), a)


@pytest.mark.parametrize("p", [4, 7])
@pytest.mark.parametrize("rank", [1, 4])
def test_real_factors_where_singular_vectors_are_not_unique(p: int, rank: int) -> None:
    # Repeated singular values, and a null space for the full U and V to fill: any basis would do in
    # each slice, so rounding (in the entries of this Z) decides which one a plain SVD returns.
    index = torch.arange(p, dtype=torch.float64)
    z = torch.exp(-2j * torch.pi * torch.outer(index, index) / p)
    skew = randn(4, 4, p) - l_transpose(randn(4, 4, p), z)
    q = per_slice(torch.linalg.matrix_exp, z, skew)  # orthogonal: every singular value is 1
    a = l_product(q[:, :rank], randn(rank, 4, p), z) if rank < 4 else q
    u, s, v = l_svd(a, z)
    near(rebuild(u, s, v, z), a)
    assert is_l_orthogonal(u, z, tol=1e-11)
    assert is_l_orthogonal(v, z, tol=1e-11)


def test_no_slice_is_its_own_conjugate() -> None:
    z = torch.tensor([[1, 1j], [1, -1j]], dtype=torch.complex128)
    a = randn(3, 2, 2)
    u, s, v = l_svd(a, z)
    assert not u.is_complex()
    near(rebuild(u, s, v, z), a)


def test_complex_tensors_and_asymmetric_transforms() -> None:
    asymmetric = torch.complex(randn(4, 4), randn(4, 4, seed=1))
    complex_tensor = torch.complex(randn(3, 2, 4), randn(3, 2, 4, seed=1))
    for a, z in [(randn(3, 2, 4), asymmetric), (complex_tensor, complex_dft(4, unitary=True))]:
        u, s, v = l_svd(a, z)
        near(rebuild(u, s, v, z), a.to(u.dtype))
        assert is_l_orthogonal(u, z)
        assert is_l_orthogonal(v, z)


# Truncation: Eckart-Young under a (scaled) unitary Z.


@unitary
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_truncation_error_is_what_was_discarded(kind: str, k: int) -> None:
    a, z = randn(4, 5, 4), transform(kind, 4)
    u, s, v = truncated_l_svd(a, z, k)
    assert (u.shape, s.shape, v.shape) == ((4, k, 4), (k, k, 4), (5, k, 4))
    error = (a - rebuild(u, s, v, z)).square().sum()
    near(error, singular_tubes(a, z)[k:].square().sum())
    discarded = [torch.linalg.svdvals(mode3(a, z)[:, :, i])[k:] for i in range(4)]
    near(error, torch.cat(discarded).square().sum())


def test_truncation_error_under_the_unnormalised_dft() -> None:
    a, z = randn(4, 5, 6), transform("t-product", 6)
    error = (a - rebuild(*truncated_l_svd(a, z, 2), z)).square().sum()
    near(error, singular_tubes(a, z)[2:].square().sum())


@unitary
def test_no_competitor_of_the_same_tubal_rank_is_better(kind: str) -> None:
    a, z, k = randn(4, 5, 4), transform(kind, 4), 2
    u, s, v = truncated_l_svd(a, z, k)
    best = (a - rebuild(u, s, v, z)).norm()
    left, right = l_product(u, s, z), l_transpose(v, z)
    for seed in range(30):
        step = 10.0 ** -(seed % 4)  # from strangers to close neighbours of the optimum
        x = left + step * randn(4, k, 4, seed=2 * seed)
        y = right + step * randn(k, 5, 4, seed=2 * seed + 1)
        rival = l_product(x, y, z)
        assert tubal_rank(rival, z, tol=1e-9) == k
        assert (a - rival).norm() > best


@kinds
def test_kept_tubes_are_the_largest_first(kind: str) -> None:
    a, z = randn(4, 5, 4), transform(kind, 4)
    norms = singular_tubes(a, z).norm(dim=1)
    _, s, _ = truncated_l_svd(a, z, 3)
    kept = torch.stack([s[i, i].norm() for i in range(3)])
    near(kept, norms.sort(descending=True).values[:3])


def test_largest_tubes_need_not_be_the_first_ones() -> None:
    # Columns of Z^-1 that nearly cancel: the tube of (5, 5) becomes short, that of (4, 0) does not.
    inverse = torch.tensor([[1.0, -0.99], [0.0, 0.1]], dtype=torch.float64)
    z = torch.linalg.inv(inverse)
    slices = torch.stack([torch.tensor([5.0, 4.0]).diag(), torch.tensor([5.0, 0.0]).diag()], dim=2)
    a = mode3(slices.double(), inverse)
    norms = singular_tubes(a, z).norm(dim=1)
    assert norms[1] > norms[0]
    _, s, _ = truncated_l_svd(a, z, 1)
    near(s[0, 0], singular_tubes(a, z)[1])


@kinds
def test_nothing_is_lost_at_full_or_true_rank(kind: str) -> None:
    z = transform(kind, 4)
    full, low = randn(3, 4, 4), l_product(randn(4, 2, 4), randn(2, 5, 4, seed=1), z)
    near(rebuild(*truncated_l_svd(full, z, 3), z), full)
    near(rebuild(*truncated_l_svd(low, z, 2), z), low)


# Definitions 9 and 10.


@pytest.mark.parametrize("kind", ["dct", "hadamard", "invertible"])
@pytest.mark.parametrize(
    ("ranks", "tubal", "average"),
    [
        ([3, 1, 0, 2], 3, 1.5),
        ([2, 2, 2, 2], 2, 2.0),
        ([0, 0, 0, 0], 0, 0.0),
        ([0, 0, 0, 1], 1, 0.25),
    ],
)
def test_ranks(kind: str, ranks: list[int], tubal: int, average: float) -> None:
    z = transform(kind, 4)
    a = of_slice_ranks(4, 5, ranks, z)
    assert tubal_rank(a, z, tol=1e-9) == tubal
    assert average_rank(a, z, tol=1e-9) == average
    assert tubal_rank(a, z) == tubal
    assert average_rank(a, z) == average


@quick
@given(
    st.sampled_from(TRANSFORMS), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 4])
)
def test_ranks_are_those_of_the_slices(kind: str, m: int, n: int, p: int) -> None:
    a, z = randn(m, n, p), transform(kind, p)
    hat = mode3(a, z)
    expected = [int(torch.linalg.matrix_rank(hat[:, :, k])) for k in range(p)]
    assert tubal_rank(a, z) == max(expected)
    assert average_rank(a, z) == sum(expected) / p


def test_tolerance_is_absolute() -> None:
    z = torch.eye(2, dtype=torch.float64)
    a = torch.tensor([3.0, 0.4]).double().diag()[:, :, None] * torch.tensor([1.0, 0.5]).double()
    assert [tubal_rank(a, z, tol) for tol in (0.0, 0.4, 0.45, 4.0)] == [2, 2, 1, 0]
    assert [average_rank(a, z, tol) for tol in (0.0, 0.3, 0.45, 4.0)] == [2.0, 1.5, 1.0, 0.0]


# Gradients and refusals.


@kinds
def test_gradient_of_a_truncation(kind: str) -> None:
    a, z = randn(3, 4, 4).requires_grad_(), transform(kind, 4)
    assert torch.autograd.gradcheck(lambda x: rebuild(*truncated_l_svd(x, z, 2), z), (a,))
    assert torch.autograd.gradcheck(lambda x: singular_tubes(x, z).square(), (a,))


A = randn(3, 4, 4)
Z = fixed_transform("dct", 4)
WRONG: list[tuple[Callable[[], object], str]] = [
    (
        lambda: truncated_l_svd(A, Z, 0),
        r"\(3, 4, 4\) can keep 1 to 3 singular tubes, found `k` = 0",
    ),
    (
        lambda: truncated_l_svd(A, Z, 4),
        r"\(3, 4, 4\) can keep 1 to 3 singular tubes, found `k` = 4",
    ),
    (lambda: truncated_l_svd(A[0], Z, 1), r"`truncated_l_svd` .* order 3 .* shape \(4, 4\)"),
    (lambda: l_svd(A[0], Z), r"`l_svd` needs `a` as a tensor of order 3 .* shape \(4, 4\)"),
    (lambda: l_svd(A, Z[:3]), r"`l_svd` needs a square matrix `z`, found shape \(3, 4\)"),
    (
        lambda: l_svd(A, Z[:3, :3]),
        r"shape \(4, 4\) for a tensor of shape \(3, 4, 4\), found \(3, 3\)",
    ),
    (lambda: l_svd(A * math.nan, Z), r"`l_svd` needs a finite `a`, found nan"),
    (lambda: singular_tubes(A * math.inf, Z), r"`singular_tubes` needs a finite `a`"),
    (lambda: average_rank(A * math.inf, Z), r"`average_rank` needs a finite `a`"),
    (lambda: tubal_rank(A[0], Z), r"order 3"),
    (lambda: is_l_orthogonal(A[0], Z), r"`is_l_orthogonal` needs `a` as a tensor of order 3"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
