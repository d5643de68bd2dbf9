"""Fits of Tucker factors that layers share, in the norm of the moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from tcompress.linalg.moments import Operator, conjugate_gradients, safe_cholesky

# W_l ~ U (sum_k A_lk C_k) V^T for l = 1..n: all share U, V and the cores C_k, but not the mixing
# weights A_l. For one matrix there is nothing to mix: U C V^T. Fits minimise
#
#     sum_l tr(S_l W'_l G_l W'_l^T) - 2 tr(S_l W'_l P_l^T),    P_l = W_l C_l,
#
# by turns over U, V, the cores and the mixing weights, each a linear least-squares problem.

Ranks = tuple[int, int, int]
TIGHT = 1e-9  # relative residual at which an update counts as solved


@dataclass(frozen=True)
class TuckerFactors:
    """Factors that matrices, or layers, share."""

    left: Tensor  # U  # (out, r2)
    cores: Tensor  # C_k  # (r1, r2, r3)
    right: Tensor  # V  # (d, r3)


@dataclass(frozen=True)
class Tucker(TuckerFactors):
    """Factors of n matrices of one shape."""

    mixing: Tensor  # A, all ones for a single matrix  # (n, r1)

    def middles(self) -> Tensor:
        """Returns sum_k A_lk C_k.  # (n, r2, r3)."""
        return mixed_cores(self.mixing, self.cores)


def clip_shared_ranks(count: int, d_out: int, d_in: int, ranks: Ranks) -> Ranks:
    """Lowers ranks to what the shape admits: beyond that they only add parameters."""
    clipped = (min(ranks[0], count), min(ranks[1], d_out), min(ranks[2], d_in))
    while True:
        r1, r2, r3 = clipped
        lower = (min(r1, r2 * r3), min(r2, r1 * r3), min(r3, r1 * r2))
        if lower == clipped:
            return clipped
        clipped = lower


def tucker_parameters(count: int, d_out: int, d_in: int, ranks: Ranks) -> int:
    """Counts the parameters of U, V, the cores and, of several matrices, the mixing weights."""
    r1, r2, r3 = ranks
    mixing = count * r1 if count > 1 else 0
    return r1 * r2 * r3 + d_out * r2 + d_in * r3 + mixing


def largest_rank(widths: int, budget: int) -> int:
    """Find the largest r of U G V^T, with r widths + r^2 parameters, within a budget."""
    return (isqrt(widths * widths + 4 * max(0, budget)) - widths) // 2


def rank_ladder(most: int, rows: int, columns: int) -> Iterator[Ranks]:
    """Lists sizes of shared factors by growing ranks, in proportion to the widths of a block.

    As many cores as blocks, where the ranks give them room: blocks of pretrained weights have
    little in common but the spaces they read and write.
    """
    wide = max(rows, columns)
    for rank in range(1, wide + 1):
        left, right = -(-rank * rows // wide), -(-rank * columns // wide)
        yield min(most, left * right), left, right


def fit_tucker(
    products: Tensor,
    grams: Tensor | None,
    ranks: Ranks,
    *,
    curvatures: Tensor | None = None,
    sweeps: int = 20,
    tolerance: float = 1e-6,
    inner: int = 10,
    start: int = 2,
) -> Tucker:
    """Fits shared factors: higher-order orthogonal iteration, then alternating least squares.

    No update makes the objective larger. To let matrices count alike, divide both moments of each
    by its scale. The columns of U, V and the mixing weights end orthonormal. `start` rounds of
    orthogonal iteration come first, then at most `sweeps` over all factors, each with at most
    `inner` steps of conjugate gradients, until one explains too little more, relative to all.

    # P_l = W_l C_l (n, out, d), damped G_l (n, d, d) or (d, d), S_l (n, out, out) or (out, out)
    """
    count, rows, cols = products.shape
    ranks = clip_shared_ranks(count, rows, cols, ranks)
    problem, outputs, inputs = _whitened(products, grams, curvatures)
    now = _started(problem, ranks, start)
    last = float("inf")
    for _ in range(sweeps):
        now = _update_left(problem, now, inner)
        now = _update_right(problem, now, inner)
        seen = _Projected.of(problem, now)
        now = _update_cores(seen, now, inner)
        now = _update_mixing(seen, now, inner)
        loss = seen.loss(now)
        if last - loss <= tolerance * abs(loss):
            break
        last = loss
    now = _with_right(now, _colored(inputs, now.right))  # W' = K^-T U M V^T L^-1
    now = _turned(_with_right(_turned(now), _colored(outputs, now.left)))
    if count == 1:
        now = replace(now, cores=now.mixing * now.cores, mixing=torch.ones_like(now.mixing))
    return now


@dataclass(frozen=True)
class _Problem:
    """Products and moments in coordinates where the mean moments are the identity."""

    products: Tensor  # S_l P_l  # (n, out, d)
    grams: Tensor | None  # G_l, or None where all are the identity  # (n, d, d)
    curvatures: Tensor | None  # S_l, likewise  # (n, out, out)
    free: Tensor  # the best matrices without any structure  # (n, out, d)

    def turned(self) -> _Problem:
        """The same problem for the transposed matrices."""
        return _Problem(self.products.mT, self.curvatures, self.grams, self.free.mT)


def _whitened(
    products: Tensor, grams: Tensor | None, curvatures: Tensor | None = None
) -> tuple[_Problem, Tensor | None, Tensor | None]:
    """The problem in whitened coordinates, and the roots of the mean S and the mean G."""
    turned, grams, inputs = _whitened_columns(products, grams)
    free = turned if grams is None else torch.cholesky_solve(turned.mT, safe_cholesky(grams)).mT
    if curvatures is None:
        return _Problem(turned, grams, None, free), None, inputs
    # K^T P: solving with K would be for S P, which is made next.
    _, curvatures, outputs = _whitened_columns(turned.mT, curvatures)
    assert outputs is not None
    turned, free = outputs.mT @ turned, outputs.mT @ free
    seen = turned if curvatures is None else curvatures @ turned
    return _Problem(seen, grams, curvatures, free), outputs, inputs


def _whitened_columns(
    products: Tensor, grams: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """P_l L^-T, L^-1 G_l L^-T and the root L of the mean moment."""
    if grams is None:
        return products, None, None
    root = safe_cholesky(grams if grams.ndim == 2 else grams.mean(0))
    products = torch.linalg.solve_triangular(root, products.mT, upper=False).mT
    if grams.ndim == 2:
        return products, None, root
    half = torch.linalg.solve_triangular(root, grams, upper=False)
    return products, torch.linalg.solve_triangular(root, half.mT, upper=False), root


def _colored(root: Tensor | None, factor: Tensor) -> Tensor:
    """L^-T V: a factor in the coordinates that whitening left."""
    return factor if root is None else torch.linalg.solve_triangular(root.mT, factor, upper=True)


def _started(problem: _Problem, ranks: Ranks, rounds: int) -> Tucker:
    """Leading eigenvectors of every unfolding; with moments, those that weigh the other side.

    Without moments, rounds of orthogonal iteration follow.
    """
    grams, curvatures, free = problem.grams, problem.curvatures, problem.free
    seen = free if grams is None else free @ grams
    weighted = free if curvatures is None else curvatures @ free
    flat = weighted.flatten(1)
    squares = (flat @ flat.mT, (seen @ free.mT).sum(0), (free.mT @ weighted).sum(0))
    mixing, left, right = (
        torch.linalg.eigh(square).eigenvectors[:, -rank:].flip(1)
        for square, rank in zip(squares, ranks, strict=True)
    )
    if grams is None and curvatures is None and rounds > 0:
        import tensorly  # takes a second to import, and few commands need it
        from tensorly.decomposition import tucker

        # The core of the start is never read: every round makes it anew.
        begin = (free, [mixing, left, right])
        with tensorly.backend_context("pytorch", local_threadsafe=True):
            _, found = tucker(free, list(ranks), init=begin, n_iter_max=rounds)
        mixing, left, right = found
    return Tucker(left, mixed_cores(mixing.mT, left.mT @ free @ right), right, mixing)


def _turned(now: Tucker) -> Tucker:
    """The factors of the transposed matrices."""
    return replace(now, left=now.right, cores=now.cores.mT, right=now.left)


def _with_right(now: Tucker, right: Tensor) -> Tucker:
    """Puts the columns of another V, made orthonormal, in the place of V."""
    right, rest = torch.linalg.qr(right)
    return replace(now, right=right, cores=now.cores @ rest.mT)


def _update_left(problem: _Problem, now: Tucker, inner: int = 10) -> Tucker:
    return _turned(_update_right(problem.turned(), _turned(now), inner))


def _update_right(problem: _Problem, now: Tucker, inner: int = 10) -> Tucker:
    """Solves sum_l G_l V (M_l^T U^T S_l U M_l) = sum_l (S_l P_l)^T U M_l for V, U^T U = I."""
    middles = now.middles()
    sights = None if problem.curvatures is None else now.left.mT @ problem.curvatures @ now.left
    squares = middles.mT @ (middles if sights is None else sights @ middles)
    total = squares.sum(0)

    def apply(right: Tensor) -> Tensor:
        grams = problem.grams
        return right @ total if grams is None else (grams @ right @ squares).sum(0)

    wanted = ((now.left.mT @ problem.products).mT @ middles).sum(0)
    return _with_right(now, _solved(apply, wanted, now.right, inner, total))


def _solved(
    apply: Operator, wanted: Tensor, start: Tensor, steps: int, square: Tensor | None = None
) -> Tensor:
    """Solve by conjugate gradients, preconditioned by what nearly multiplies from the right."""
    options: dict[str, Any] = {"iterations": steps, "tolerance": TIGHT}
    if square is not None:
        factor = safe_cholesky(square)
        options["precondition"] = lambda x: torch.cholesky_solve(x.mT, factor).mT
    return conjugate_gradients(apply, wanted, start, **options)


@dataclass(frozen=True)
class _Projected:
    """All that cores and mixing weights see of the problem, U and V being orthonormal."""

    products: Tensor  # U^T S_l P_l V  # (n, r2, r3)
    kernels: Tensor | None  # V^T G_l V, or None for the identity  # (n, r3, r3)
    sights: Tensor | None  # U^T S_l U, or None for the identity  # (n, r2, r2)

    @classmethod
    def of(cls, problem: _Problem, now: Tucker) -> _Projected:
        left, right, grams, curvatures = now.left, now.right, problem.grams, problem.curvatures
        kernels = None if grams is None else right.mT @ grams @ right
        sights = None if curvatures is None else left.mT @ curvatures @ left
        return cls(left.mT @ problem.products @ right, kernels, sights)

    def apply(self, middles: Tensor) -> Tensor:
        """U^T S_l U M_l V^T G_l V."""
        seen = middles if self.kernels is None else middles @ self.kernels
        return seen if self.sights is None else self.sights @ seen

    def loss(self, now: Tucker) -> float:
        """The objective at these factors."""
        middles = now.middles()
        return float((self.apply(middles) - 2 * self.products).mul(middles).sum())


def _update_cores(seen: _Projected, now: Tucker, inner: int) -> Tucker:
    """Solves sum_l A_lk M_l(C) K_l = sum_l A_lk U^T P_l V for the cores; A^T A = I."""
    back = now.mixing.mT

    def apply(cores: Tensor) -> Tensor:
        return mixed_cores(back, seen.apply(mixed_cores(now.mixing, cores)))

    wanted = mixed_cores(back, seen.products)
    return replace(now, cores=_solved(apply, wanted, now.cores, inner))


def _update_mixing(seen: _Projected, now: Tucker, inner: int) -> Tucker:
    """Regresses every U^T P_l V on the cores, and makes the columns of A orthonormal."""
    flat = now.cores.flatten(1)

    def apply(mixing: Tensor) -> Tensor:
        return seen.apply(mixed_cores(mixing, now.cores)).flatten(1) @ flat.mT

    wanted = seen.products.flatten(1) @ flat.mT
    mixing, rest = torch.linalg.qr(_solved(apply, wanted, now.mixing, inner, flat @ flat.mT))
    return replace(now, mixing=mixing, cores=mixed_cores(rest, now.cores))


# Layers of many sizes: one that is larger than the shared shape is cut into blocks of it, each with
# mixing weights of its own.

SHARED_SWEEPS, SHARED_STEPS = 12, 4
"""Rounds over all factors, and steps of conjugate gradients for each in a round."""


@dataclass(frozen=True)
class User:
    """A weight that is made of blocks of shared factors; no moment stands for the identity."""

    weight: Tensor  # W  # (m * a, q * b)
    gram: Tensor | None = None  # G, damped  # (q * b, q * b)
    curvature: Tensor | None = None  # S, damped  # (m * a, m * a)
    scale: float = 1.0  # what its errors are divided by, to count like those of others

    def turned(self) -> User:
        """The transposed weight: S and G change places."""
        return replace(self, weight=self.weight.mT, gram=self.curvature, curvature=self.gram)

    def error(self, factors: TuckerFactors) -> float:
        """The smallest error that mixing weights leave over, divided by the scale."""
        mixing = fit_mixing(self._in_moments(self.weight), self.gram, factors, self.curvature)
        missed = self.weight - mixed_weight(mixing, factors)
        return float(self._in_moments(missed).mul(missed).sum()) / self.scale

    def _in_moments(self, weight: Tensor) -> Tensor:
        """S W G."""
        seen = weight if self.gram is None else weight @ self.gram
        return seen if self.curvature is None else self.curvature @ seen


def fit_tucker_factors(
    users: Sequence[User], block: tuple[int, int], ranks: Ranks
) -> TuckerFactors:
    """Fits shared factors to all that use them, on their moments never worse than without them.

    Blocks are fitted in the norm of their own moments; what those side by side have in common is
    left to the mixing weights. Every weight is a multiple of the block.
    """
    blocks = [_grid(user.weight, block).flatten(0, 1) for user in users]
    pairs = zip(blocks, users, strict=True)
    scales = torch.cat([own.new_full((len(own),), user.scale) for own, user in pairs])
    weights = torch.cat(blocks) * scales.rsqrt()[:, None, None]
    fit = partial(fit_tucker, ranks=ranks, sweeps=SHARED_SWEEPS, inner=SHARED_STEPS)
    free = fit(weights, None)
    if all(user.gram is None and user.curvature is None for user in users):
        return free
    curvatures, grams = (_moments_of_blocks(users, block, axis) for axis in (0, 1))
    # The start weighs matrices by what stands before them, not by the size of their moments.
    for moments in (curvatures, grams):
        if moments is not None:
            level = moments.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
            moments /= level
            weights = weights * level.sqrt()
    products = weights if grams is None else weights @ grams
    aware = fit(products, grams, curvatures=curvatures)
    return min((aware, free), key=lambda found: sum(user.error(found) for user in users))


def fit_input_factor(users: Sequence[User], rank: int) -> Tensor:
    """Fits the factor V that weights W_l ~ U_l V^T which read one input share: closed form.

    With the moment G = L L^T of that input, the rows that the best V spans are the leading
    eigenvectors of sum_l L^T W_l^T S_l W_l L over their scales. The columns end orthonormal.

    # (out_l, d) each -> (d, r)
    """
    grams = [user.gram for user in users if user.gram is not None]
    root = safe_cholesky(torch.stack(grams).mean(0)) if grams else None
    total = torch.zeros(())
    for user in users:
        seen = user.weight if root is None else user.weight @ root
        weighed = seen if user.curvature is None else user.curvature @ seen
        total = total.to(seen) + seen.mT @ weighed / user.scale
    vectors = torch.linalg.eigh((total + total.mT) / 2).eigenvectors[:, -rank:].flip(1)
    return torch.linalg.qr(_colored(root, vectors)).Q


def fit_left_factor(product: Tensor, gram: Tensor | None, right: Tensor) -> Tensor:
    """Fits U of U V^T to a given V; what the outputs are worth does not change it.

    # (out, d), (d, d), (d, r) -> (out, r)
    """
    normal = right.mT @ (right if gram is None else gram @ right)
    return torch.cholesky_solve((product @ right).mT, safe_cholesky(normal)).mT


def fit_mixing(
    product: Tensor, gram: Tensor | None, factors: TuckerFactors, curvature: Tensor | None = None
) -> Tensor:
    """Fits the mixing weights of one layer to given shared factors: closed form.

    Blocks see each other where they read the same rows of moments, and are fitted together.

    # (m * a, q * b), (q * b, q * b), (m * a, m * a) -> (m, q, r1)
    """
    left, right, cores = factors.left, factors.right, factors.cores
    kernels = _between(gram, right, product.shape[1])  # (q, q, r3, r3)
    sights = (left.mT @ left)[None, None]  # rows of the grid do not see each other, and are alike
    if curvature is not None:
        sights = _between(curvature, left, product.shape[0])  # (m, m, r2, r2)
    flat = cores.flatten(1)
    # One row of the grid at a time: all products at once would take m q times the memory.
    rows = [
        ((sight[:, None, None] @ cores @ kernel[:, None]).flatten(3) @ flat.mT).flatten(0, 2)
        for sight in sights
        for kernel in kernels.transpose(0, 1)
    ]
    normal = torch.stack(rows).mT.flatten(0, 1)  # (m * q * r1,) * 2, with m = 1 where all are alike
    blocks = _grid(product, (len(left), len(right)))  # (m, q, a, b)
    wanted = (left.mT @ blocks @ right).flatten(2) @ flat.mT  # (m, q, r1)
    flat_wanted = wanted.reshape(-1, len(normal)).mT
    return torch.cholesky_solve(flat_wanted, safe_cholesky(normal)).mT.reshape(wanted.shape)


def mixed_weight(mixing: Tensor, factors: TuckerFactors) -> Tensor:
    """Returns the weight of one layer.  # (..., m, q, r1) -> (..., m * a, q * b)."""
    middles = mixed_cores(mixing, factors.cores)
    blocks = factors.left @ middles @ factors.right.mT  # (..., m, q, a, b)
    return blocks.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def mixed_cores(mixing: Tensor, cores: Tensor) -> Tensor:
    """Returns sum_k a_k C_k.  # (..., r1), (r1, r2, r3) -> (..., r2, r3)."""
    return (mixing @ cores.flatten(1)).unflatten(-1, tuple(cores.shape[1:]))


def _grid(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Cuts a weight into blocks.  # (m * a, q * b) -> (m, q, a, b)."""
    rows, columns = block
    return weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)


def _between(moment: Tensor | None, factor: Tensor, width: int) -> Tensor:
    """F^T G_ij F for all blocks i, j of a moment.  # (w, r) -> (width / w,) * 2 + (r, r)."""
    size = len(factor)
    moment = torch.eye(width).to(factor) if moment is None else moment
    return factor.mT @ _grid(moment, (size, size)) @ factor


def _moments_of_blocks(users: Sequence[User], block: tuple[int, int], axis: int) -> Tensor | None:
    """Moments of the rows (0) or columns (1) of all blocks, or None.  # (n, w, w)."""
    moments = [(user.curvature, user.gram)[axis] for user in users]
    if all(moment is None for moment in moments):
        return None
    found = []
    for user, moment in zip(users, moments, strict=True):
        width, weight = block[axis], user.weight
        if moment is None:
            moment = torch.eye(weight.shape[axis]).to(weight)
        own = _grid(moment, (width, width)).diagonal(dim1=0, dim2=1).movedim(-1, 0)
        count = weight.shape[1 - axis] // block[1 - axis]  # blocks that have each of them
        found.append(own.repeat(count, 1, 1) if axis else own.repeat_interleave(count, 0))
    return torch.cat(found)
