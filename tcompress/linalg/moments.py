"""Moments of activations, and what follows from them at once: low rank, conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from tcompress.errors import FitError

# For dense inputs x and the inputs x' that the compressed part of the model produces, a fit
# minimises ``E ||W x - V x'||^2 = tr(V G V^T) - 2 tr(V C^T W^T) + tr(W D W^T)`` with
# ``G = E[x' x'^T]``, ``C = E[x x'^T]`` and ``D = E[x x^T]``.

# Means may be weighed by what a token is worth to the model's output: to second order an error at
# a token costs the squared gradient there, so tokens that the output hardly follows hardly count.

_TILE = 256  # columns of a Gram matrix that are taken at a time
_ROWS = 2048  # whose products are added at a time
_PAIRS = (0, 0), (1, 0), (1, 1)  # whose moments are taken: 0 is x', 1 is x
SMALLEST, LARGEST = 1e-15, 1e15  # whose products, and sums of very many of them, float32 holds


@dataclass(frozen=True)
class Moments:
    """Second moments of one layer input, float64; x' may have fewer channels than x."""

    gram: Tensor  # G = E[x' x'^T]  # (d', d')
    cross: Tensor  # C = E[x x'^T]  # (d, d')
    dense: Tensor  # D = E[x x^T]  # (d, d)
    mean: Tensor  # E[x'], zero where the moments are not centred  # (d',)
    dense_mean: Tensor  # E[x], likewise  # (d,)
    rows: int  # number of tokens they were taken over; of equal weight, as many as tell the same
    lift: Tensor | None = None  # takes channels that are left to all; None for the same  # (d, d')

    @classmethod
    def identity(cls, features: int) -> Moments:
        """Returns G = C = D = I: with it a fit is the data-free one."""
        eye = torch.eye(features, dtype=torch.float64)
        zero = torch.zeros(features, dtype=torch.float64)
        return cls(eye, eye, eye, zero, zero, 0)

    @property
    def features(self) -> int:
        """Width d' of the input."""
        return self.gram.shape[-1]

    def damped(self, damping: float) -> Moments:
        """Adds the same multiple of the identity, times the mean diagonal of G, to all moments.

        In directions that the calibration never visited the fit then tends to the data-free one,
        instead of to zero.
        """
        mean = self.gram.diagonal().mean()
        level = damping * torch.where(mean > 0, mean, torch.ones_like(mean))
        ridge = level * torch.eye(self.features, dtype=self.gram.dtype, device=self.gram.device)
        if self.lift is None:
            gram, cross, dense = (moment + ridge for moment in (self.gram, self.cross, self.dense))
            return replace(self, gram=gram, cross=cross, dense=dense)
        wide = level * torch.eye(len(self.dense)).to(self.dense)
        cross = self.cross + level * self.lift.to(self.cross)
        return replace(self, gram=self.gram + ridge, cross=cross, dense=self.dense + wide)

    def to(self, device: torch.device | str) -> Moments:
        """Moves all tensors to a device."""
        own = ("gram", "cross", "dense", "mean", "dense_mean")
        return replace(self, **{name: getattr(self, name).to(device) for name in own})

    def error(self, weight: Tensor, fitted: Tensor) -> float:
        """Returns E||W x - V x'||^2 / E||W x||^2.  # (out, d), (out, d)."""
        weight, fitted = weight.to(self.gram), fitted.to(self.gram)
        norm = (weight @ self.dense).mul(weight).sum()
        if weight.shape != fitted.shape:
            explained = (fitted @ self.gram - 2 * weight @ self.cross).mul(fitted).sum()
            return relative_error(float(norm + explained), float(norm))
        # With W - V apart, nothing cancels where both streams are the same or the fit is close.
        missed = weight - fitted
        lost = (missed @ self.gram).mul(missed).sum()
        drifted = (missed @ (self.cross - self.gram).mT).mul(weight).sum()
        moved = (weight @ (self.dense - self.cross - self.cross.mT + self.gram)).mul(weight).sum()
        return relative_error(float(lost + 2 * drifted + moved), float(norm))


def relative_error(error: float, norm: float) -> float:
    """Returns a squared error over the squared norm of what was aimed at; never infinite."""
    if error <= 0:
        return 0.0
    ratio = error / norm if norm > 0 else inf
    return 1.0 if ratio == inf else ratio


def multipliable(*rows: Tensor) -> list[Tensor]:
    """Returns rows in float32 where that holds sums of their products, all in float64 else."""
    ends = [
        torch.stack(item.aminmax()).abs() if item.numel() else item.new_zeros(1) for item in rows
    ]
    sizes = [float(own.amax()) for own in ends]
    narrow = all(size == 0 or SMALLEST < size < LARGEST for size in sizes)
    return [item.float() if narrow else item.double() for item in rows]


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Adds sum a_i a_i^T to a float64 sum; of products that are equal one is taken."""
    for first in range(0, rows.shape[-1], _TILE):
        last = first + _TILE
        tile = rows[:, first:].T @ rows[:, first:last]
        total[first:, first:last] += tile
        total[first:last, last:] += tile[_TILE:].T


@dataclass
class ProductSum:
    """A sum of products of paired rows, a_i b_i^T, float64.

    Rows wait until there are many: the sum is larger than a batch, and is read and written whole.
    """

    _total: Tensor
    _waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def zero(cls, left: int, right: int, device: torch.device | str) -> ProductSum:
        return cls(torch.zeros(left, right, dtype=torch.float64, device=device))

    @property
    def total(self) -> Tensor:
        """The sum so far."""
        self._take()
        return self._total

    def add(self, left: Tensor, right: Tensor) -> None:
        """Adds rows, which the caller does not change afterwards; the same twice for a Gram."""
        self._waiting.append((left, right))
        if sum(len(own) for own, _ in self._waiting) >= _ROWS:
            self._take()

    def merge(self, other: ProductSum) -> None:
        """Adds another sum."""
        total = self.total
        total += other.total

    def _take(self) -> None:
        if self._waiting:
            left = torch.cat([own for own, _ in self._waiting])
            if all(one is two for one, two in self._waiting):
                add_gram(self._total, left)
            else:
                self._total += left.T @ torch.cat([own for _, own in self._waiting])
            self._waiting.clear()


def centre_of(rows: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighed mean of rows, float32; moments about it do not cancel, nor round.

    (rows, d), (rows,) -> (d,)
    """
    return (weights @ rows.double() / weights.sum()).float()


def token_weights(gradients: Tensor) -> Tensor:
    """Returns what errors at tokens cost, by the gradients at a layer's output, float64.

    (tokens, out) -> (tokens,)
    """
    return gradients.double().square().sum(-1).clamp_min(1e-200)  # so that some are never none


class MomentSums:
    """Accumulates moments of token rows in float64, about the means of the first batch."""

    def __init__(
        self, dense: int, new: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        new = dense if new is None else new
        sizes = new, dense
        self._sums = [ProductSum.zero(sizes[i], sizes[j], device) for i, j in _PAIRS]
        self._means = [torch.zeros(n, dtype=torch.float64, device=device) for n in sizes]
        self._centres: list[Tensor] = []  # means of the first rows, of both streams
        self._same: ProductSum | None = None  # of rows that are part of all three
        self._differs = False  # rows that are not
        self.rows = 0  # of tokens, so far
        self._weight = self._squares = 0.0  # sums of their weights, and of the weights' squares

    def add(self, dense: Tensor, new: Tensor, weights: Tensor | None = None) -> None:
        """Adds paired rows x of the dense and x' of the compressed model.  # (tokens, d).

        All count alike, or as their weights say.  # (tokens,)
        """
        if not len(dense):
            return
        pair = new.float(), dense.float()
        if weights is None:
            weights = torch.ones(len(new), dtype=torch.float64, device=new.device)
        if not self.rows:
            self._centres = [centre_of(rows, weights) for rows in pair]
        root = weights.sqrt()
        same = new is dense and torch.equal(*self._centres)
        scaled = [
            root[:, None] * (rows - centre)
            for rows, centre in zip(pair[:1] if same else pair, self._centres, strict=False)
        ]
        for total, rows in zip(self._means, 2 * scaled if same else scaled, strict=True):
            total += root @ rows
        scaled = multipliable(*scaled)
        if not same:
            self._differs = True
            for own, (i, j) in zip(self._sums, _PAIRS, strict=True):
                own.add(scaled[i], scaled[j])
        else:
            width = scaled[0].shape[-1]
            self._same = self._same or ProductSum.zero(width, width, new.device)
            self._same.add(scaled[0], scaled[0])
        self.rows += len(dense)
        self._weight += float(weights.sum())
        self._squares += float(weights.square().sum())

    def merge(self, other: MomentSums) -> MomentSums:
        """Add what another sum has taken, about means of its own."""
        if not self.rows or not other.rows:
            return self if self.rows else other
        pairs = zip(other._centres, self._centres, strict=True)
        shifts = [theirs.double() - ours.double() for theirs, ours in pairs]
        same = self._same and other._same and not (self._differs or other._differs)
        sums = (
            [(self._same, other._same, 0, 0)]
            if same
            else [
                (ours, theirs, i, j)
                for ours, theirs, (i, j) in zip(self._sums, other._sums, _PAIRS, strict=True)
            ]
        )
        for ours, theirs, i, j in sums:
            assert ours is not None
            assert theirs is not None
            ours.merge(theirs)
            # sum w (x + s) (y + t)^T = sum w x y^T + (sum w x) t^T + s (sum w y + w t)^T
            right = other._means[j] + other._weight * shifts[j]
            ours.total.addr_(other._means[i], shifts[j]).addr_(shifts[i], right)
        if not same and other._same is not None:
            if self._same is None:
                self._same = other._same
            else:
                self._same.merge(other._same)
        for mean, more, shift in zip(self._means, other._means, shifts, strict=True):
            mean += more + other._weight * shift
        self._differs |= other._differs
        self.rows += other.rows
        self._weight += other._weight
        self._squares += other._squares
        return self

    def moments(self, *, centred: bool) -> Moments:
        """Returns the moments so far; `centred` where a bias takes the shift of the means."""
        if not self.rows:
            raise FitError("no calibration rows reached this layer")
        totals = [own.total for own in self._sums]
        if self._same is not None:
            totals = [total + self._same.total for total in totals]
        if not all(bool(torch.isfinite(total).all()) for total in totals):
            hint = "repair the checkpoint, or convert this model without data: `--calib none`"
            raise FitError("calibration activations hold NaN or infinity", hint)
        shifts = [total / self._weight for total in self._means]
        means = [s + c.double() for s, c in zip(shifts, self._centres, strict=True)]
        parts = []
        for total, (one, two) in zip(totals, _PAIRS, strict=True):
            parts.append(total / self._weight - torch.outer(shifts[one], shifts[two]))
            if not centred:
                parts[-1] += torch.outer(means[one], means[two])
        mean, dense_mean = means if centred else map(torch.zeros_like, means)
        gram, cross, dense = parts
        rows = round(self._weight**2 / self._squares)
        return Moments(gram, cross, dense, mean, dense_mean, max(1, rows))


def safe_cholesky(gram: Tensor) -> Tensor:
    """Factors a positive semidefinite matrix, raising its floor until it succeeds."""
    if not bool(torch.isfinite(gram).all()):
        raise FitError("a moment matrix holds NaN or infinity")
    gram = (gram + gram.mT) / 2
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].abs()
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    exact = gram.dtype == torch.float64
    for floor in (0.0, 1e-12, 1e-10, 1e-8, 1e-6) if exact else (0.0, 1e-6, 1e-5, 1e-4, 1e-3):
        least = 1e-300 if exact else 1e-30
        factor, info = torch.linalg.cholesky_ex(gram + (floor * scale + least) * eye)
        if not bool(info.any()):
            return factor
    raise FitError("a moment matrix is not positive semidefinite")


def best_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors the best rank-r approximation of a matrix, through its smaller Gram matrix.

    The eigendecomposition of the smaller side is several times faster than an SVD; in float64 it
    blurs only directions below 1e-8 of the largest, far below what a truncation discards.
    """
    tall = matrix.shape[-2] >= matrix.shape[-1]
    a = matrix if tall else matrix.mT
    _, vectors = torch.linalg.eigh(a.mT @ a)
    leading = vectors[..., -rank:]
    left, right = a @ leading, leading.mT
    return (left, right) if tall else (right.mT, left.mT)


def balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Scale both factors of every rank-one term to the same norm: low precision needs it."""
    ratio = balancing_ratio(left, right)
    return left * ratio[..., None, :], right / ratio[..., :, None]


def balancing_ratio(left: Tensor, right: Tensor) -> Tensor:
    """Compute scales that balance columns of a left and rows of a right factor; 1 for zeros."""
    ratio = (right.norm(dim=-1) / left.norm(dim=-2)).sqrt()
    return torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, torch.ones_like(ratio))


def fit_lowrank(
    target: Tensor, gram: Tensor | None, rank: int, curvature: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Fits A (out, r) and B (r, d), of equal scale, to W C in the norm of damped moments.

    With G = L L^T and S = K K^T the optimum is the truncated SVD of K^T (W C) L^-T, brought back
    by K^-T and L^-1. Any other square roots would give the same product.
    """
    inputs = None if gram is None else safe_cholesky(gram)
    outputs = None if curvature is None else safe_cholesky(curvature)
    left, right = best_factors(whitened(target, inputs, outputs), rank)
    if outputs is not None:
        left = torch.linalg.solve_triangular(outputs.mT, left, upper=True)
    if inputs is not None:  # B = right L^-1, that is L^T B^T = right^T
        right = torch.linalg.solve_triangular(inputs.mT, right.mT, upper=True).mT
    return balanced(left, right)


def whitened(target: Tensor, inputs: Tensor | None, outputs: Tensor | None) -> Tensor:
    """Returns K^T (W C) L^-T of the roots L and K: errors are plain sums of squares there."""
    if outputs is not None:
        target = outputs.mT @ target
    if inputs is None:
        return target
    return torch.linalg.solve_triangular(inputs, target.mT, upper=False).mT


Operator = Callable[[Tensor], Tensor]


def conjugate_gradients(
    apply: Operator,
    wanted: Tensor,
    start: Tensor,
    *,
    precondition: Operator | None = None,
    iterations: int = 50,
    tolerance: float = 1e-6,
) -> Tensor:
    """Solves N x = b for positive semidefinite N, too large to be written down, from a good x.

    No step makes <x, N x> - 2 <x, b> larger, and where rounding did, the start comes back: the
    result is never worse than the start. `tolerance` is that of the residual relative to b, both
    measured in the norm of the preconditioner, which does not depend on the scale of N.
    """
    inverse = precondition or (lambda x: x)
    residual = wanted - apply(start)
    before = -_dot(start, wanted + residual)
    floor = tolerance**2 * _dot(wanted, inverse(wanted))
    x = descend(apply, start, residual, inverse, iterations, floor=floor)
    return x if _dot(x, apply(x) - 2 * wanted) <= before else start


def descend(
    apply: Operator,
    x: Tensor,
    residual: Tensor,
    inverse: Operator,
    steps: int,
    *,
    floor: float = 0.0,
    enough: float = 0.0,
    unseen: float = 0.0,
) -> Tensor:
    """Minimise by preconditioned conjugate gradients, each step to the minimum along its direction.

    It stops where the squared residual is at most `floor`, or `enough` of the first one, and in
    directions of no more curvature than `unseen`, where only rounding is left.
    """
    z = direction = inverse(residual)
    size = _dot(residual, z)
    floor = max(floor, enough * size)
    for _ in range(steps):
        if size <= floor:
            break
        image = apply(direction)
        bend = _dot(direction, image)
        if bend <= unseen * _dot(direction, direction):
            break
        x = x + (size / bend) * direction
        residual = residual - (size / bend) * image
        z = inverse(residual)
        size, last = _dot(residual, z), size
        direction = z + (size / last) * direction
    return x


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum())


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds only numbers; a sum, in which others survive, needs no mask."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float64)))
