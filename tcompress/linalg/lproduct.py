"""The L-product algebra of third-order tensors.

An invertible matrix Z (p x p) defines the transform L(A) = A x_3 Z of tensors of shape (n, m, p);
products, transposes, inverses and (in `lsvd`) SVDs are those of the p frontal slices of L(A),
mapped back by L^-1. All functions are batched over the slices and differentiable.

Rules that hold for every function here and in `lsvd`:

* **Real results.** If all inputs are real, the result is real when Z is real or *conjugate
  symmetric* (the rows of conj(Z) are the rows of Z in another order, as for the DFT). That is
  exactly when products of real tensors are real for all real tensors; what is dropped is an
  imaginary part of rounding errors. In every other case the result is complex.
* **Precision.** float32, float64 and their complex forms, mixed as torch mixes them. Z is used in
  the precision and on the device of the tensors; its inverse is computed in Z's own precision.
* **Errors.** A wrong order, size or dtype and a singular Z raise `InputError`; so do nan and
  infinite entries where slices are factored.

Reference: arXiv:2603.05727, sections 3 to 5; Kernfeld, Kilmer and Aeron (2015).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcompress.errors import InputError
from tcompress.linalg.ldomain import (
    along_tubes,
    check_dtype,
    check_factors,
    check_square,
    check_tensor,
    domain_of,
    is_singular,
    like,
)


def ten_p(x: Tensor, p: int) -> Tensor:  # (T, d) -> (T, d/p, p)
    """Fold a matrix into p contiguous column blocks: X(t, (k-1) d/p + j) becomes entry (t, j, k).

    Args:
        x: Matrix of shape (T, d).
        p: The number of slices; divides d.

    Returns:
        Tensor of shape (T, d/p, p).

    Raises:
        InputError: `x` is not a matrix, or p does not divide d.

    Reference: arXiv:2603.05727, equation (2).
    """
    if x.ndim != 2:
        raise InputError(f"`ten_p` needs a matrix (T, d), found shape {tuple(x.shape)}")
    if p < 1 or x.shape[1] % p:
        raise InputError(
            f"`ten_p` cannot cut shape {tuple(x.shape)} into {p} column blocks of equal width",
            hint=f"choose a divisor of {x.shape[1]}, or pad the columns",
        )
    return x.reshape(len(x), p, x.shape[1] // p).transpose(1, 2)


def mat_p(a: Tensor) -> Tensor:  # (T, d/p, p) -> (T, d)
    """Concatenate the frontal slices along mode 2: the inverse of `ten_p`.

    Args:
        a: Tensor of shape (T, d/p, p).

    Returns:
        Matrix of shape (T, d).

    Raises:
        InputError: `a` is not of order 3.

    Reference: arXiv:2603.05727, section 5.1.
    """
    if a.ndim != 3:
        raise InputError(f"`mat_p` needs a tensor (T, d/p, p), found shape {tuple(a.shape)}")
    return a.transpose(1, 2).flatten(1)


def mode3(a: Tensor, z: Tensor) -> Tensor:  # (n, m, p), (q, p) -> (n, m, q)
    """Multiply mode 3 by a matrix: entry (i, j, k) is the sum over l of a(i, j, l) z(k, l).

    The plain n-mode product: complex if either argument is. With Z it is L, with Z^-1 it is L^-1.

    Args:
        a: Tensor of shape (n, m, p).
        z: Matrix of shape (q, p); need not be square.

    Returns:
        Tensor of shape (n, m, q).

    Raises:
        InputError: A wrong order, dtype or size.

    Reference: arXiv:2603.05727, definitions 1 and 2.
    """
    check_tensor("mode3", "a", a)
    if z.ndim != 2 or z.shape[1] != a.shape[2]:
        raise InputError(
            f"`mode3` needs a matrix `z` with {a.shape[2]} columns for `a` of shape "
            f"{tuple(a.shape)}, found shape {tuple(z.shape)}"
        )
    check_dtype("mode3", "z", z)
    return along_tubes(a, like(z, a))


def facewise(a: Tensor, b: Tensor) -> Tensor:  # (m, l, p), (l, n, p) -> (m, n, p)
    """Multiply the frontal slices pairwise: C^(k) = A^(k) B^(k).

    Args:
        a: Tensor of shape (m, l, p).
        b: Tensor of shape (l, n, p).

    Returns:
        Tensor of shape (m, n, p).

    Raises:
        InputError: A wrong order or dtype, or sizes that do not match.

    Reference: arXiv:2603.05727, definition 3.
    """
    a, b = check_factors("facewise", a, b)
    return (a.movedim(2, 0) @ b.movedim(2, 0)).movedim(0, 2)


def l_product(a: Tensor, b: Tensor, z: Tensor) -> Tensor:  # (m, l, p), (l, n, p) -> (m, n, p)
    """Multiply two tensors: L^-1 of the facewise product of L(a) and L(b).

    Args:
        a: Tensor of shape (m, l, p).
        b: Tensor of shape (l, n, p).
        z: Invertible matrix of shape (p, p).

    Returns:
        Tensor of shape (m, n, p).

    Raises:
        InputError: A wrong order, dtype or size, or a singular `z`.

    Reference: arXiv:2603.05727, definition 4.
    """
    a, b = check_factors("l_product", a, b)
    domain = domain_of("l_product", z, a)
    return domain.back(domain.slices(a) @ domain.slices(b))


def l_identity(m: int, z: Tensor) -> Tensor:  # (m, m, p)
    """Build the identity of the L-product: every slice of its transform is I_m.

    Args:
        m: Size, at least 1.
        z: Invertible matrix of shape (p, p).

    Returns:
        Tensor of shape (m, m, p) in the precision of `z`; real for a real or conjugate symmetric z.

    Raises:
        InputError: m < 1, or `z` is not a square invertible matrix.

    Reference: arXiv:2603.05727, definition 5.
    """
    if m < 1:
        raise InputError(f"`l_identity` needs a size of at least 1, found {m}")
    check_square("l_identity", z)
    eye = torch.eye(m, dtype=z.dtype.to_real(), device=z.device)
    domain = domain_of("l_identity", z, eye[:, :, None].expand(m, m, len(z)))
    return domain.back(eye.expand(len(z), m, m))


def l_transpose(a: Tensor, z: Tensor) -> Tensor:  # (m, n, p) -> (n, m, p)
    """Transpose a tensor: conjugate transposes of the slices of its transform.

    Args:
        a: Tensor of shape (m, n, p).
        z: Invertible matrix of shape (p, p).

    Returns:
        Tensor of shape (n, m, p).

    Raises:
        InputError: A wrong order, dtype or size, or a singular `z`.

    Reference: arXiv:2603.05727, definition 6.
    """
    check_tensor("l_transpose", "a", a)
    domain = domain_of("l_transpose", z, a)
    return domain.back(domain.slices(a).mH)


def l_inverse(a: Tensor, z: Tensor) -> Tensor:  # (m, m, p)
    """Invert a square tensor: inverses of the slices of its transform.

    Args:
        a: Tensor of shape (m, m, p).
        z: Invertible matrix of shape (p, p).

    Returns:
        Tensor of shape (m, m, p).

    Raises:
        InputError: A wrong order, dtype or size, a singular `z`, or slices that are singular to
            working precision (they are named, counted from 0).

    Reference: arXiv:2603.05727, definition 7.
    """
    check_tensor("l_inverse", "a", a, finite=True)
    if a.shape[0] != a.shape[1]:
        raise InputError(f"`l_inverse` needs a square tensor (m, m, p), found {tuple(a.shape)}")
    domain = domain_of("l_inverse", z, a)
    slices = domain.slices(a)
    singular = is_singular(slices).nonzero().flatten().tolist()
    if singular:
        raise InputError(
            f"`l_inverse` of a tensor of shape {tuple(a.shape)} does not exist: "
            f"slices {singular} of its transform are singular to working precision"
        )
    return domain.back(torch.linalg.inv(slices))


def is_l_orthogonal(a: Tensor, z: Tensor, tol: float | None = None) -> bool:
    """Tell whether a^T * a = a * a^T = identity.

    Args:
        a: Tensor of shape (m, n, p); without m = n the answer is False.
        z: Invertible matrix of shape (p, p).
        tol: Largest entry of Q^H Q - I accepted in any slice Q of the transform; by default the
            square root of the machine epsilon.

    Returns:
        Whether every slice of the transform is orthogonal (unitary).

    Raises:
        InputError: A wrong order, dtype or size, or a singular `z`.

    Reference: arXiv:2603.05727, definition 7.
    """
    check_tensor("is_l_orthogonal", "a", a)
    domain = domain_of("is_l_orthogonal", z, a)
    if a.shape[0] != a.shape[1]:
        return False
    slices = domain.slices(a)
    eye = torch.eye(a.shape[0], dtype=slices.dtype, device=slices.device)
    limit = torch.finfo(slices.dtype).eps ** 0.5 if tol is None else tol
    return bool((slices.mH @ slices - eye).abs().max() <= limit)


def t_product(a: Tensor, b: Tensor) -> Tensor:  # (m, l, p), (l, n, p) -> (m, n, p)
    """Multiply by the t-product: circular convolution of tubes, through the FFT.

    Equals `l_product` with `complex_dft(p, unitary=False)`, and sqrt(p) times `l_product` with the
    unitary DFT. Real if both factors are.

    Args:
        a: Tensor of shape (m, l, p).
        b: Tensor of shape (l, n, p).

    Returns:
        Tensor of shape (m, n, p).

    Raises:
        InputError: A wrong order or dtype, or sizes that do not match.

    Reference: arXiv:2603.05727, section 4.5; Kilmer and Martin (2011).
    """
    a, b = check_factors("t_product", a, b)
    c: Tensor
    if a.is_complex():
        c = torch.fft.ifft(facewise(torch.fft.fft(a), torch.fft.fft(b)))
    else:
        c = torch.fft.irfft(facewise(torch.fft.rfft(a), torch.fft.rfft(b)), n=a.shape[2])
    return c
