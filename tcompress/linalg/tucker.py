"""Shared Tucker factors: W_l ~ U (sum_k A_lk C_k) V^T for l = 1..n, in the norm of the moments.

All matrices share U, V and the cores C_k; each has only its mixing weights A_l of its own. For one
matrix there is nothing to mix and the form is U C V^T. Fits minimise

    sum_l tr(W'_l G_l W'_l^T) - 2 tr(W'_l P_l^T),    P_l = W_l C_l,

by turns over U, V, the cores and the mixing weights, each a linear least-squares problem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tcompress.linalg.moments import safe_cholesky
from tcompress.linalg.solve import conjugate_gradients

Ranks = tuple[int, int, int]
TIGHT = 1e-9  # relative residual at which an update counts as solved


@dataclass(frozen=True)
class Tucker:
    """Factors of n matrices of one shape.

    Attributes:
        left: U.  # (out, r2)
        cores: C_k.  # (r1, r2, r3)
        right: V.  # (d, r3)
        mixing: A, all ones for a single matrix.  # (n, r1)
    """

    left: Tensor
    cores: Tensor
    right: Tensor
    mixing: Tensor

    def middles(self) -> Tensor:
        """Returns sum_k A_lk C_k.  # (n, r2, r3)."""
        return _mix(self.mixing, self.cores)

    def matrices(self) -> Tensor:
        """Returns the matrices that the factors stand for.  # (n, out, d)."""
        return self.left @ self.middles() @ self.right.mT


def clip_ranks(count: int, d_out: int, d_in: int, ranks: Ranks) -> Ranks:
    """Lowers ranks to what the shape admits: beyond that they only add parameters.

    Args:
        count: Number of matrices n.
        d_out: Rows of each.
        d_in: Columns of each.
        ranks: Cores r1, then columns of U and V.
    """
    clipped = (min(ranks[0], count), min(ranks[1], d_out), min(ranks[2], d_in))
    while True:
        r1, r2, r3 = clipped
        lower = (min(r1, r2 * r3), min(r2, r1 * r3), min(r3, r1 * r2))
        if lower == clipped:
            return clipped
        clipped = lower


def tucker_parameters(count: int, d_out: int, d_in: int, ranks: Ranks) -> int:
    """Counts the parameters of U, V, the cores and, for more than one matrix, the mixing weights.

    Args:
        count: Number of matrices n.
        d_out: Rows of each.
        d_in: Columns of each.
        ranks: Cores r1, then columns of U and V.
    """
    r1, r2, r3 = ranks
    mixing = count * r1 if count > 1 else 0
    return r1 * r2 * r3 + d_out * r2 + d_in * r3 + mixing


def fit_tucker(
    products: Tensor,
    grams: Tensor | None,
    ranks: Ranks,
    *,
    sweeps: int = 20,
    tolerance: float = 1e-6,
    inner: int = 10,
    start: int = 2,
) -> Tucker:
    """Fits shared factors: higher-order orthogonal iteration, then alternating least squares.

    No update makes the objective larger. To let matrices count alike, divide both moments of each
    by its scale.

    Args:
        products: P_l = W_l C_l.  # (n, out, d)
        grams: G_l, damped; one matrix for all, or None for the identity.  # (n, d, d) or (d, d)
        ranks: Cores r1, then columns of U and V; lowered to what the shape admits.
        sweeps: Most rounds over all factors.
        tolerance: Stop where a round explains this little more, relative to all it explains.
        inner: Most steps of conjugate gradients for V, the cores and the mixing weights, whose
            normal matrices are never built.
        start: Rounds of orthogonal iteration to start from.

    Returns:
        The factors; U and the columns of the mixing weights are orthonormal.
    """
    count, rows, cols = products.shape
    ranks = clip_ranks(count, rows, cols, ranks)
    problem, root = _whitened(products, grams)
    now = _orthogonal_iteration(problem.free(), ranks, start)
    last = float("inf")
    for _ in range(sweeps):
        now = _update_left(problem, now)
        now = _update_right(problem, now, inner)
        seen = _Projected.of(problem, now)
        now = _update_cores(seen, now, inner)
        now = _update_mixing(seen, now, inner)
        loss = seen.loss(now)
        if last - loss <= tolerance * abs(loss):
            break
        last = loss
    if root is not None:  # W' = U M V^T L^-1
        now = replace(now, right=torch.linalg.solve_triangular(root.mT, now.right, upper=True))
    if count == 1:
        now = replace(now, cores=now.mixing * now.cores, mixing=torch.ones_like(now.mixing))
    return now


def fit_mixing(
    product: Tensor, gram: Tensor | None, left: Tensor, right: Tensor, cores: Tensor
) -> Tensor:
    """Fits the mixing weights of one layer to given shared factors: closed form.

    A layer larger than the shared shape is cut into a grid of blocks, each with its own weights;
    blocks side by side see different inputs and are fitted together, with the moments between
    them.

    Args:
        product: W C.  # (m * out, q * d)
        gram: G, damped; None for the identity.  # (q * d, q * d)
        left: U.  # (out, r2)
        right: V.  # (d, r3)
        cores: C_k.  # (r1, r2, r3)

    Returns:
        Weights of the cores for every block.  # (m, q, r1)
    """
    count = product.shape[1] // len(right)
    if gram is None:
        gram = torch.eye(product.shape[1], dtype=product.dtype, device=product.device)
    turned = gram.unflatten(1, (count, -1)) @ right  # (q * d, q, r3)
    kernels = right.mT @ turned.unflatten(0, (count, -1)).transpose(1, 2)  # (q, q, r3, r3)
    flat = cores.flatten(1)
    scaled = left.mT @ left @ cores
    # Row by row of the grid: all products at once would take q times the memory of q^2 cores.
    normal = torch.stack([(scaled @ row[:, None]).flatten(2) @ flat.mT for row in kernels])
    normal = normal.transpose(1, 2).flatten(2).flatten(0, 1)  # (q * r1, q * r1)
    blocks = product.unflatten(1, (count, -1)).unflatten(0, (-1, len(left)))  # (m, out, q, d)
    wanted = (left.mT @ blocks.transpose(1, 2) @ right).flatten(2) @ flat.mT  # (m, q, r1)
    solved = torch.cholesky_solve(wanted.flatten(1).mT, safe_cholesky(normal))
    return solved.mT.unflatten(1, (count, -1))


def mixed_weight(weights: Tensor, left: Tensor, right: Tensor, cores: Tensor) -> Tensor:
    """Returns the weight of one layer from its mixing weights and the shared factors.

    Args:
        weights: One set for every block.  # (m, q, r1)
        left: U.  # (out, r2)
        right: V.  # (d, r3)
        cores: C_k.  # (r1, r2, r3)

    Returns:
        The blocks, put together.  # (m * out, q * d)
    """
    blocks = left @ _mix(weights, cores) @ right.mT  # (m, q, out, d)
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)


def _mix(weights: Tensor, cores: Tensor) -> Tensor:
    """sum_k weights_k C_k.  # (..., r1) -> (..., r2, r3)."""
    return (weights @ cores.flatten(1)).unflatten(-1, tuple(cores.shape[1:]))


@dataclass(frozen=True)
class _Problem:
    """Products and moments in coordinates where the mean moment is the identity.

    Attributes:
        products: P_l L^-T.  # (n, out, d)
        grams: L^-1 G_l L^-T, or None where all are the identity.  # (n, d, d)
    """

    products: Tensor
    grams: Tensor | None

    def free(self) -> Tensor:
        """The best matrices without any structure.  # (n, out, d)."""
        if self.grams is None:
            return self.products
        return torch.cholesky_solve(self.products.mT, safe_cholesky(self.grams)).mT


def _whitened(products: Tensor, grams: Tensor | None) -> tuple[_Problem, Tensor | None]:
    """The problem in whitened coordinates, and the root L of the mean moment."""
    if grams is None:
        return _Problem(products, None), None
    root = safe_cholesky(grams if grams.ndim == 2 else grams.mean(0))
    turned = torch.linalg.solve_triangular(root, products.mT, upper=False).mT
    if grams.ndim == 2:
        return _Problem(turned, None), root
    half = torch.linalg.solve_triangular(root, grams, upper=False)
    return _Problem(turned, torch.linalg.solve_triangular(root, half.mT, upper=False)), root


def _orthogonal_iteration(tensor: Tensor, ranks: Ranks, rounds: int) -> Tucker:
    """Tucker factors in the plain norm, from the leading eigenvectors of every unfolding."""
    import tensorly  # takes a second to import, and few commands need it
    from tensorly.decomposition import tucker

    # Unfoldings are wide, and tensorly would take the SVD of the whole of each.
    factors = []
    for mode, rank in enumerate(ranks):
        unfolded = tensor.movedim(mode, 0).flatten(1)
        _, vectors = torch.linalg.eigh(unfolded @ unfolded.mT)
        factors.append(vectors[:, -rank:].flip(1))
    if rounds > 0:
        # The core of the start is never read: every round makes it anew.
        begin = (tensor, factors)
        with tensorly.backend_context("pytorch", local_threadsafe=True):
            _, factors = tucker(tensor, list(ranks), init=begin, n_iter_max=rounds)
    mixing, left, right = factors
    cores = _mix(mixing.mT, left.mT @ tensor @ right)
    return Tucker(left, cores, right, mixing)


def _update_left(problem: _Problem, now: Tucker) -> Tucker:
    """U = (sum_l P_l V M_l^T) (sum_l M_l V^T G_l V M_l^T)^-1, made orthonormal."""
    middles = now.middles()
    seen = middles
    if problem.grams is not None:
        seen = middles @ (now.right.mT @ problem.grams @ now.right)
    normal = (seen @ middles.mT).sum(0)
    wanted = (problem.products @ now.right @ middles.mT).sum(0)
    left = torch.cholesky_solve(wanted.mT, safe_cholesky(normal)).mT
    left, rest = torch.linalg.qr(left)
    return replace(now, left=left, cores=rest @ now.cores)


def _update_right(problem: _Problem, now: Tucker, inner: int) -> Tucker:
    """Solves sum_l G_l V (M_l^T M_l) = sum_l P_l^T U M_l for V, made orthonormal."""
    middles = now.middles()
    squares = middles.mT @ middles
    total = squares.sum(0)
    factor = safe_cholesky(total)

    def apply(right: Tensor) -> Tensor:
        if problem.grams is None:
            return right @ total
        return (problem.grams @ right @ squares).sum(0)

    wanted = ((now.left.mT @ problem.products).mT @ middles).sum(0)
    right = conjugate_gradients(
        apply,
        wanted,
        now.right,
        precondition=lambda x: torch.cholesky_solve(x.mT, factor).mT,
        iterations=inner,
        tolerance=TIGHT,
    )
    right, rest = torch.linalg.qr(right)
    return replace(now, right=right, cores=now.cores @ rest.mT)


@dataclass(frozen=True)
class _Projected:
    """All that cores and mixing weights see of the problem, U and V being orthonormal.

    Attributes:
        products: U^T P_l V.  # (n, r2, r3)
        kernels: V^T G_l V, or None for the identity.  # (n, r3, r3)
    """

    products: Tensor
    kernels: Tensor | None

    @classmethod
    def of(cls, problem: _Problem, now: Tucker) -> _Projected:
        kernels = None
        if problem.grams is not None:
            kernels = now.right.mT @ problem.grams @ now.right
        return cls(now.left.mT @ problem.products @ now.right, kernels)

    def apply(self, middles: Tensor) -> Tensor:
        """M_l V^T G_l V."""
        return middles if self.kernels is None else middles @ self.kernels

    def loss(self, now: Tucker) -> float:
        """The objective at these factors."""
        middles = now.middles()
        return float((self.apply(middles) - 2 * self.products).mul(middles).sum())


def _update_cores(seen: _Projected, now: Tucker, inner: int) -> Tucker:
    """Solves sum_l A_lk M_l(C) K_l = sum_l A_lk U^T P_l V for the cores; A^T A = I."""
    back = now.mixing.mT
    cores = conjugate_gradients(
        lambda cores: _mix(back, seen.apply(_mix(now.mixing, cores))),
        _mix(back, seen.products),
        now.cores,
        iterations=inner,
        tolerance=TIGHT,
    )
    return replace(now, cores=cores)


def _update_mixing(seen: _Projected, now: Tucker, inner: int) -> Tucker:
    """Regresses every U^T P_l V on the cores, and makes the columns of A orthonormal."""
    flat = now.cores.flatten(1)
    factor = safe_cholesky(flat @ flat.mT)
    mixing = conjugate_gradients(
        lambda mixing: seen.apply(_mix(mixing, now.cores)).flatten(1) @ flat.mT,
        seen.products.flatten(1) @ flat.mT,
        now.mixing,
        precondition=lambda x: torch.cholesky_solve(x.mT, factor).mT,
        iterations=inner,
        tolerance=TIGHT,
    )
    mixing, rest = torch.linalg.qr(mixing)
    return replace(now, mixing=mixing, cores=_mix(rest, now.cores))
