"""The L-SVD, its truncation and the ranks of third-order tensors.

The rules for real results, precision and errors are those of `lproduct`.

Reference: arXiv:2603.05727, sections 4.3 and 4.4; Kilmer and Martin (2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcompress.errors import InputError
from tcompress.linalg.ldomain import ROUNDING, check_tensor, domain_of


def l_svd(a: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (m, m, p) (m, n, p) (n, n, p)
    """Decompose a = U * S * V^T with L-orthogonal U and V and f-diagonal S.

    Args:
        a: Tensor of shape (m, n, p).
        z: Invertible matrix of shape (p, p).

    Returns:
        U of shape (m, m, p), S of shape (m, n, p), V of shape (n, n, p).

    Raises:
        InputError: A wrong order, dtype or size, or a singular `z`.

    Reference: arXiv:2603.05727, theorem 8 and remark 2.
    """
    check_tensor("l_svd", "a", a, finite=True)
    domain = domain_of("l_svd", z, a)
    u, s, v = domain.svd(domain.slices(a), full=True)
    m, n = a.shape[:2]
    diagonal = torch.nn.functional.pad(torch.diag_embed(s), (0, n - s.shape[1], 0, m - s.shape[1]))
    return domain.back(u), domain.back(diagonal), domain.back(v)


def truncated_l_svd(a: Tensor, z: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the k singular tubes of the largest 2-norm, largest first.

    If Z is a multiple of a unitary matrix, U_k * S_k * V_k^T is the best approximation of `a` of
    tubal rank k in the Frobenius norm, and its squared error is the sum of the squared norms of the
    discarded tubes. For any other Z the choice still follows the definition (norms of the tubes
    S(i, i, :), not of their transforms), but nothing of the kind is guaranteed.

    Args:
        a: Tensor of shape (m, n, p).
        z: Invertible matrix of shape (p, p).
        k: How many tubes to keep, 1 to min(m, n).

    Returns:
        U_k of shape (m, k, p), S_k of shape (k, k, p), V_k of shape (n, k, p).

    Raises:
        InputError: A wrong order, dtype or size, a singular `z`, or k out of range.

    Reference: arXiv:2603.05727, section 4.4.
    """
    check_tensor("truncated_l_svd", "a", a, finite=True)
    if not 1 <= k <= min(a.shape[:2]):
        raise InputError(
            f"`truncated_l_svd` of a tensor of shape {tuple(a.shape)} can keep 1 to "
            f"{min(a.shape[:2])} singular tubes, found `k` = {k}"
        )
    domain = domain_of("truncated_l_svd", z, a)
    u, s, v = domain.svd(domain.slices(a))
    norms = torch.linalg.vector_norm(domain.tubes(s), dim=1)
    keep = norms.argsort(descending=True, stable=True)[:k]
    s = torch.diag_embed(s[:, keep])
    return domain.back(u[:, :, keep]), domain.back(s), domain.back(v[:, :, keep])


def singular_tubes(a: Tensor, z: Tensor) -> Tensor:  # (min(m, n), p)
    """Return the diagonal tubes S(i, i, :) of the L-SVD, one per row, in the order of i.

    Within every slice of the transform the singular values decrease with i; the norms of the tubes
    decrease too if Z is a multiple of a unitary matrix.

    Args:
        a: Tensor of shape (m, n, p).
        z: Invertible matrix of shape (p, p).

    Returns:
        Tubes of shape (min(m, n), p), in the original domain.

    Raises:
        InputError: A wrong order, dtype or size, or a singular `z`.

    Reference: arXiv:2603.05727, theorem 8.
    """
    check_tensor("singular_tubes", "a", a, finite=True)
    domain = domain_of("singular_tubes", z, a)
    return domain.tubes(torch.linalg.svdvals(domain.slices(a)))


def tubal_rank(a: Tensor, z: Tensor, tol: float | None = None) -> int:
    """Count the nonzero singular tubes.

    Args:
        a: Tensor of shape (m, n, p).
        z: Invertible matrix of shape (p, p).
        tol: Norms up to this count as zero; by default 10 max(m, n) machine epsilons times the
            largest norm.

    Returns:
        The tubal rank, 0 to min(m, n): the largest rank of a slice of the transform.

    Raises:
        InputError: A wrong order, dtype or size, or a singular `z`.

    Reference: arXiv:2603.05727, definition 10.
    """
    norms = torch.linalg.vector_norm(singular_tubes(a, z), dim=1)
    return int((norms > _zero(norms, a, tol)).sum())


def average_rank(a: Tensor, z: Tensor, tol: float | None = None) -> float:
    """Return the mean rank of the slices of the transform.

    Args:
        a: Tensor of shape (m, n, p).
        z: Invertible matrix of shape (p, p).
        tol: Singular values of the transformed slices up to this count as zero; by default
            10 max(m, n) machine epsilons times the largest one of *all* slices, because rounding
            in the transform scales with the whole tensor.

    Returns:
        The average rank, 0 to min(m, n), a multiple of 1/p.

    Raises:
        InputError: A wrong order, dtype or size, or a singular `z`.

    Reference: arXiv:2603.05727, definition 9.
    """
    check_tensor("average_rank", "a", a, finite=True)
    values = torch.linalg.svdvals(domain_of("average_rank", z, a).slices(a))
    return int((values > _zero(values, a, tol)).sum()) / a.shape[2]


def _zero(values: Tensor, a: Tensor, tol: float | None) -> Tensor | float:
    if tol is not None:
        return tol
    return ROUNDING * max(a.shape[:2]) * torch.finfo(values.dtype).eps * values.max()
