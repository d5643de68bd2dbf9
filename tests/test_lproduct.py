"""The L-product algebra: definitions 1 to 7 and equation (2), the t-product, rules and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tcompress.errors import InputError
from tcompress.linalg import (
    FIXED_TRANSFORMS,
    complex_dft,
    facewise,
    fixed_transform,
    is_l_orthogonal,
    l_identity,
    l_inverse,
    l_product,
    l_transpose,
    mat_p,
    mode3,
    t_product,
    ten_p,
)
from tests.support.lproduct import TRANSFORMS, near, per_slice, quick, randn, transform

kinds = pytest.mark.parametrize("kind", TRANSFORMS)
sizes = st.integers(1, 5)


# Equation (2): folding.


def test_ten_p_is_equation_2_literally() -> None:
    x, p, d_s = randn(3, 12), 4, 3
    folded = ten_p(x, p)
    assert folded.shape == (3, d_s, p)
    for t in range(1, 4):
        for j in range(1, d_s + 1):
            for k in range(1, p + 1):
                assert folded[t - 1, j - 1, k - 1] == x[t - 1, (k - 1) * d_s + j - 1]


@quick
@given(tokens=sizes, width=sizes, p=sizes)
def test_mat_p_inverts_ten_p(tokens: int, width: int, p: int) -> None:
    x, a = randn(tokens, width * p), randn(tokens, width, p)
    assert torch.equal(mat_p(ten_p(x, p)), x)
    assert torch.equal(ten_p(mat_p(a), p), a)


def test_mat_p_concatenates_slices() -> None:
    a = randn(2, 3, 4)
    assert torch.equal(mat_p(a), torch.cat([a[:, :, k] for k in range(4)], dim=1))


# Definitions 1 to 4: transform and products.


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_mode3_is_definition_1(rows: int) -> None:
    a, z = randn(2, 3, 4), randn(rows, 4)
    expected = torch.stack(
        [sum((a[:, :, j] * z[k, j] for j in range(4)), torch.zeros(2, 3)) for k in range(rows)], 2
    )
    near(mode3(a, z), expected)
    near(mode3(a, z).movedim(2, 0).flatten(1), z @ a.movedim(2, 0).flatten(1))


@kinds
def test_mode3_with_the_inverse_matrix_undoes_it(kind: str) -> None:
    a, z = randn(2, 3, 4), transform(kind, 4)
    back = mode3(mode3(a, z), torch.linalg.inv(z))
    near(back.real if back.is_complex() else back, a)


def test_facewise_is_definition_3() -> None:
    a, b = randn(2, 3, 4), randn(3, 5, 4)
    near(facewise(a, b), torch.stack([a[:, :, k] @ b[:, :, k] for k in range(4)], dim=2))


@kinds
def test_l_product_is_definition_4_slice_by_slice(kind: str) -> None:
    a, b, z = randn(2, 3, 4), randn(3, 5, 4, seed=1), transform(kind, 4)
    near(l_product(a, b, z), per_slice(lambda x, y: x @ y, z, a, b))


@quick
@given(st.sampled_from(TRANSFORMS), sizes, sizes, sizes, sizes, st.sampled_from([1, 2, 4, 8]))
def test_ring_axioms(kind: str, m: int, q: int, r: int, n: int, p: int) -> None:
    z = transform(kind, p)
    a, b, c = randn(m, q, p), randn(q, r, p, seed=1), randn(r, n, p, seed=2)
    near(l_product(l_product(a, b, z), c, z), l_product(a, l_product(b, c, z), z))
    other = randn(q, r, p, seed=3)
    near(l_product(a, b + other, z), l_product(a, b, z) + l_product(a, other, z))


# Definitions 5 to 7: identity, transpose, orthogonality, inverse.


@quick
@given(st.sampled_from(TRANSFORMS), sizes, sizes, st.sampled_from([1, 2, 4, 8]))
def test_identity_is_neutral_on_both_sides(kind: str, m: int, n: int, p: int) -> None:
    a, z = randn(m, n, p), transform(kind, p)
    near(l_product(a, l_identity(n, z), z), a)
    near(l_product(l_identity(m, z), a, z), a)


@kinds
def test_identity_slices_are_identity_matrices(kind: str) -> None:
    z = transform(kind, 4)
    slices = mode3(l_identity(3, z), z).movedim(2, 0)
    near(slices, torch.eye(3, dtype=slices.dtype).expand(4, 3, 3))


@quick
@given(st.sampled_from(TRANSFORMS), sizes, sizes, sizes, st.sampled_from([1, 2, 4, 8]))
def test_transpose_of_a_product(kind: str, m: int, q: int, n: int, p: int) -> None:
    a, b, z = randn(m, q, p), randn(q, n, p, seed=1), transform(kind, p)
    swapped = l_product(l_transpose(b, z), l_transpose(a, z), z)
    near(l_transpose(l_product(a, b, z), z), swapped)
    near(l_transpose(l_transpose(a, z), z), a)


@kinds
def test_transpose_is_definition_6(kind: str) -> None:
    a, z = randn(2, 3, 4), transform(kind, 4)
    near(l_transpose(a, z), per_slice(lambda x: x.mH, z, a))


@pytest.mark.parametrize("kind", FIXED_TRANSFORMS)
def test_transpose_under_a_real_z_transposes_the_frontal_slices(kind: str) -> None:
    a = randn(2, 3, 4)
    near(l_transpose(a, fixed_transform(kind, 4)), a.transpose(0, 1))


def test_transpose_under_the_dft_also_reverses_slices_2_to_p() -> None:
    a = randn(2, 3, 5)
    expected = a.transpose(0, 1)[:, :, [0, 4, 3, 2, 1]]
    near(l_transpose(a, complex_dft(5, unitary=False)), expected)


@quick
@given(st.sampled_from(TRANSFORMS), sizes, st.sampled_from([1, 2, 4, 8]))
def test_inverse_on_both_sides(kind: str, m: int, p: int) -> None:
    z = transform(kind, p)
    # A multiple of the identity keeps every slice well conditioned.
    a = randn(m, m, p) / (8 * m * p) + l_identity(m, z)
    near(l_product(a, l_inverse(a, z), z), l_identity(m, z))
    near(l_product(l_inverse(a, z), a, z), l_identity(m, z))


def orthogonal_tensor(m: int, z: Tensor) -> Tensor:
    """Exponential of an antisymmetric tensor: orthogonal, made without any factorisation."""
    a = randn(m, m, len(z)) / 4
    return per_slice(torch.linalg.matrix_exp, z, a - l_transpose(a, z))


@kinds
def test_orthogonal_iff_every_slice_is(kind: str) -> None:
    z = transform(kind, 4)
    q = orthogonal_tensor(3, z)
    eye = l_identity(3, z)
    near(l_product(l_transpose(q, z), q, z), eye)
    near(l_product(q, l_transpose(q, z), z), eye)
    slices = mode3(q, z).movedim(2, 0)
    near(slices.mH @ slices, torch.eye(3, dtype=slices.dtype).expand(4, 3, 3))
    assert is_l_orthogonal(q, z)
    near(l_inverse(q, z), l_transpose(q, z))


@pytest.mark.parametrize("spoiled", range(4))
def test_one_slice_that_is_not_orthogonal_is_enough(spoiled: int) -> None:
    z = fixed_transform("dct", 4)
    slices = mode3(orthogonal_tensor(3, z), z)
    slices[:, :, spoiled] *= 1 + 1e-6
    a = mode3(slices, z.T)
    assert not is_l_orthogonal(a, z)
    assert is_l_orthogonal(a, z, tol=1e-5)
    near_identity = (l_product(l_transpose(a, z), a, z) - l_identity(3, z)).abs().max()
    assert near_identity > 1e-7


def test_orthogonality_is_for_square_tensors() -> None:
    a, z = torch.zeros(3, 2, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    a[:2, :2] = torch.eye(2)[:, :, None]
    near(l_product(l_transpose(a, z), a, z), l_identity(2, z))
    assert not is_l_orthogonal(a, z)


# Section 4.5: the t-product.


def block_circulant_product(a: Tensor, b: Tensor) -> Tensor:
    """fold(bcirc(a) unfold(b)), as Kilmer and Martin define the t-product."""
    p = a.shape[2]
    circulant = torch.cat(
        [torch.cat([a[:, :, (i - j) % p] for j in range(p)], dim=1) for i in range(p)]
    )
    stacked = circulant @ torch.cat([b[:, :, k] for k in range(p)])
    return torch.stack(torch.split(stacked, a.shape[0]), dim=2)


@quick
@given(m=sizes, q=sizes, n=sizes, p=st.integers(1, 9))
def test_t_product_is_the_block_circulant_product(m: int, q: int, n: int, p: int) -> None:
    a, b = randn(m, q, p), randn(q, n, p, seed=1)
    expected = block_circulant_product(a, b)
    assert t_product(a, b).dtype == torch.float64
    near(t_product(a, b), expected)
    near(l_product(a, b, complex_dft(p, unitary=False)), expected)
    near(l_product(a, b, complex_dft(p, unitary=True)), expected / math.sqrt(p))


def test_t_product_of_complex_tensors() -> None:
    a = torch.complex(randn(2, 3, 5), randn(2, 3, 5, seed=1))
    b = randn(3, 2, 5, seed=2)
    near(t_product(a, b), block_circulant_product(a, b.to(a.dtype)))
    near(l_product(a, b, complex_dft(5, unitary=False)), t_product(a, b))


def test_real_fourier_basis_is_another_product() -> None:
    a, b = randn(2, 3, 5), randn(3, 2, 5, seed=1)
    product = l_product(a, b, fixed_transform("dft", 5))
    assert not torch.allclose(product, t_product(a, b) / math.sqrt(5))


# Real in, real out; precision.


def test_complex_z_of_no_symmetry_gives_complex_results() -> None:
    z = torch.complex(randn(4, 4), randn(4, 4, seed=1))
    a, b = randn(2, 3, 4), randn(3, 2, 4, seed=2)
    product = l_product(a, b, z)
    assert product.is_complex()
    assert product.imag.abs().max() > 0.1
    near(product, per_slice(lambda x, y: x @ y, z, a.to(z.dtype), b.to(z.dtype)))
    near(l_product(a, l_identity(3, z), z), a.to(z.dtype))


def test_conjugate_rows_may_stand_in_any_order() -> None:
    z = complex_dft(6, unitary=False)[[3, 1, 0, 2, 5, 4]] * -0.5
    a, b = randn(2, 3, 6), randn(3, 2, 6, seed=1)
    assert l_product(a, b, z).dtype == torch.float64
    # Reordering does nothing and Z -> c Z divides the product by 1 / c.
    near(l_product(a, b, z), t_product(a, b) * -0.5)


def test_complex_tensors_keep_complex_results() -> None:
    a = torch.complex(randn(2, 2, 4), randn(2, 2, 4, seed=1))
    for kind in TRANSFORMS:
        z = transform(kind, 4)
        assert l_product(a, a, z).is_complex()
        near(l_product(a, l_inverse(a, z), z), l_identity(2, z).to(a.dtype))


@kinds
def test_single_precision_stays_single(kind: str) -> None:
    a, b, z = randn(2, 3, 4), randn(3, 2, 4, seed=1), transform(kind, 4)
    product = l_product(a.float(), b.float(), z)
    assert product.dtype == torch.float32
    assert_close(product.double(), l_product(a, b, z), rtol=1e-5, atol=1e-4)
    assert l_product(a.float(), b, z).dtype == torch.float64


# Gradients of the building blocks (Proposition 22 is in test_lproduct_theorems.py).


@kinds
def test_gradients(kind: str) -> None:
    z = transform(kind, 4)
    a, b = randn(2, 3, 4).requires_grad_(), randn(3, 2, 4, seed=1).requires_grad_()
    square = (randn(2, 2, 4, seed=2) / 8 + l_identity(2, z)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: l_product(x, y, z), (a, b))
    assert torch.autograd.gradcheck(lambda x: l_transpose(x, z), (a,))
    assert torch.autograd.gradcheck(lambda x: l_inverse(x, z), (square,))
    assert torch.autograd.gradcheck(t_product, (a, b))


def test_gradient_reaches_a_learned_transform() -> None:
    a, b = randn(2, 3, 4), randn(3, 2, 4, seed=1)
    z = fixed_transform("dct", 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: l_product(a, b, w), (z,))


# Refusals.

Z4 = fixed_transform("dct", 4)
WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: ten_p(randn(2, 3, 4), 2), r"`ten_p` needs a matrix .* found shape \(2, 3, 4\)"),
    (lambda: ten_p(randn(3, 10), 4), r"shape \(3, 10\) into 4 column blocks"),
    (lambda: ten_p(randn(3, 10), 0), r"shape \(3, 10\) into 0 column blocks"),
    (lambda: mat_p(randn(2, 3)), r"`mat_p` needs a tensor .* found shape \(2, 3\)"),
    (lambda: mode3(randn(2, 3), Z4), r"`mode3` needs `a` .* order 3 .* found shape \(2, 3\)"),
    (lambda: mode3(randn(2, 3, 5), Z4), r"5 columns .* \(2, 3, 5\), found shape \(4, 4\)"),
    (lambda: mode3(randn(2, 3, 4), Z4.long()), r"`mode3` needs `z` of dtype .* `torch.int64`"),
    (lambda: facewise(randn(2, 3, 4), randn(2, 3, 4)), r"\(2, 3, 4\) by `b` of shape \(2, 3, 4\)"),
    (lambda: facewise(randn(2, 3, 4), randn(3, 2, 5)), r"\(2, 3, 4\) by `b` of shape \(3, 2, 5\)"),
    (lambda: t_product(randn(2, 3, 4), randn(2, 3, 4)), r"`t_product` cannot multiply"),
    (lambda: l_product(randn(2, 3, 4), randn(2, 3, 4), Z4), r"`l_product` cannot multiply"),
    (lambda: l_product(randn(2, 2, 5), randn(2, 2, 5), Z4), r"\(5, 5\) .*\(2, 2, 5\).* \(4, 4\)"),
    (lambda: l_product(randn(2, 2, 4).long(), randn(2, 2, 4), Z4), r"found `torch.int64`"),
    (lambda: l_product(randn(2, 2, 4).half(), randn(2, 2, 4), Z4), r"found `torch.float16`"),
    (lambda: l_transpose(randn(0, 2, 4), Z4), r"without empty modes, found shape \(0, 2, 4\)"),
    (lambda: l_transpose(randn(2, 2, 4), randn(3, 4)), r"square matrix `z`, found shape \(3, 4\)"),
    (lambda: l_transpose(randn(2, 2, 4), torch.ones(4, 4)), r"invertible `z`.* \(4, 4\)"),
    (lambda: l_transpose(randn(2, 2, 4), Z4 * math.nan), r"finite matrix `z`"),
    (lambda: l_identity(0, Z4), r"`l_identity` needs a size of at least 1, found 0"),
    (lambda: l_identity(2, randn(3, 4)), r"`l_identity` needs a square matrix"),
    (lambda: l_inverse(randn(2, 3, 4), Z4), r"square tensor \(m, m, p\), found \(2, 3, 4\)"),
    (lambda: l_inverse(randn(2, 2, 4) * math.inf, Z4), r"`l_inverse` needs a finite `a`"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_input_is_refused_with_its_shapes(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_inverse_names_the_singular_slices() -> None:
    slices = randn(3, 3, 4)
    slices[:, 0, [1, 3]] = slices[:, 1, [1, 3]]
    with pytest.raises(InputError, match=r"\(3, 3, 4\) does not exist: slices \[1, 3\]"):
        l_inverse(mode3(slices, Z4.T), Z4)
