"""Moments of activations, and what follows from them at once: low rank, conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite, prod
from typing import Any

import torch
from torch import Tensor

from tcompress.errors import REPAIR, FitError, message_of

# For dense inputs x and the inputs x' that the compressed part of the model produces, a fit
# minimises ``E ||W x - V x'||^2 = tr(V G V^T) - 2 tr(V C^T W^T) + tr(W D W^T)`` with
# ``G = E[x' x'^T]``, ``C = E[x x'^T]`` and ``D = E[x x^T]``.

# Means may be weighed by what a token is worth to the model's output: to second order an error at
# a token costs the squared gradient there, so tokens that the output hardly follows hardly count.

_TILE = 256  # columns of a Gram matrix that are taken at a time
LARGE = 1024  # rows of a matrix from which less is computed of it
_LEAST_RATIO = 1e-4  # of an eigenvalue to the largest one: float32 would blur smaller ones
_MOST_RATIO = 1e5  # of the largest eigenvalue to the mean of others: factors lose small ones beside
_MOST_OUTLIERS, _FAR_ABOVE = 32, 100.0  # eigenvalues that are taken out, times the others' mean
_ITERATIONS, _STAGES = 8, 3  # that find them, and how often that is done
ROWS_AT_ONCE = 2048  # whose products are added at a time
_PAIRS = (0, 0), (1, 0), (1, 1)  # whose moments are taken: 0 is x', 1 is x
WIDE = 2048  # inputs from which errors are told by rows: what no fit depends on is not summed up
ROWS_KEPT = 8  # of so many rows of a wide input one is kept to tell errors by
_NARROW = torch.float32, torch.bfloat16, torch.float16
_GOLDEN = (5**0.5 - 1) / 2  # whose multiples meet no length of texts again and again
_NOT_FINITE = "calibration activations hold NaN or infinity"
SMALLEST, LARGEST = 1e-15, 1e15  # whose products, and sums of very many of them, float32 holds


@dataclass(frozen=True)
class Moments:
    """Second moments of one layer input, float64; x' may have fewer channels than x."""

    gram: Tensor  # G = E[x' x'^T]  # (d', d')
    cross: Tensor  # C = E[x x'^T], or W C where it `is_product`  # (d, d') or (out, d')
    dense: Tensor | RowErrors  # D = E[x x^T]  # (d, d); of wide inputs some rows tell errors
    mean: Tensor  # E[x'], zero where the moments are not centred  # (d',)
    dense_mean: Tensor  # E[x], likewise  # (d,)
    rows: int  # number of tokens they were taken over; of equal weight, as many as tell the same
    lift: Tensor | None = None  # takes channels that are left to all; None for the same  # (d, d')
    is_product: bool = False  # of the weight of the only layer that reads x; D is then some rows

    def damped(self, damping: float) -> DampedMoments:
        """Adds the same multiple of the identity, times the mean diagonal of G, to all moments.

        In directions that the calibration never visited the fit then tends to the data-free one,
        instead of to zero.
        """
        return DampedMoments(self, ridge_level(self.gram, damping))

    def norm(self, weight: Tensor) -> float:
        """Returns E||W x||^2.  # (out, d)."""
        if isinstance(self.dense, RowErrors):
            return self.dense.norm(weight)
        weight = weight.to(self.gram.device, self._dtype)
        return float((weight @ self.dense.to(weight)).mul(weight).sum(dtype=torch.float64))

    def error(self, weight: Tensor, fitted: Tensor) -> float:
        """Returns E||W x - V x'||^2 / E||W x||^2.  # (out, d), (out, d)."""
        if isinstance(self.dense, RowErrors):
            return self.dense.error(weight, fitted)
        norm = self.norm(weight)
        weight, fitted = (it.to(self.gram.device, torch.float64) for it in (weight, fitted))
        if weight.shape != fitted.shape:
            explained = fitted @ self.gram.double() - 2 * weight @ self.cross.double()
            return relative_error(norm + float(explained.mul(fitted).sum()), norm)
        # With W - V apart, nothing cancels where both streams are the same or the fit is close.
        missed, weight = (weight - fitted).to(self._dtype), weight.to(self._dtype)

        def energy(left: Tensor, moment: Tensor, right: Tensor) -> float:
            return float((left @ moment.to(self._dtype)).mul(right).sum(dtype=torch.float64))

        lost = energy(missed, self.gram, missed)
        if self.gram is self.cross is self.dense and isfinite(lost):
            return relative_error(lost, norm)
        drifted = energy(missed, (self.cross - self.gram).mT, weight)
        moves = (self.dense.double() - self.cross).sub_(self.cross.mT).add_(self.gram)
        return relative_error(lost + 2 * drifted + energy(weight, moves, weight), norm)

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype that is exact enough for errors, and no slower than need be."""
        return torch.float32 if len(self.cross) >= WIDE else torch.float64


@dataclass(frozen=True, eq=False)
class RowErrors:
    """Paired rows of both streams, to measure errors by.

    Of passes in bfloat16 products may round as they do: errors below 1e-4 are then rough.
    """

    dense: Tensor  # times the roots of their shares of all weights, float32  # (rows, d)
    new: Tensor  # (rows, d')
    dense_mean: Tensor  # E[x], zero where nothing is centred, float64  # (d,)
    mean: Tensor  # E[x'], likewise  # (d',)
    passes: torch.dtype | None = None  # in which they were computed; `rounded_products`

    def norm(self, weight: Tensor) -> float:
        """Returns E||W x||^2.  # (out, d)."""
        with rounded_products(self.passes):
            return _energy(self.dense @ weight.to(self.dense).mT)

    def error(self, weight: Tensor, fitted: Tensor) -> float:
        """Returns E||W x - V x'||^2 / E||W x||^2.  # (out, d), (out, d')."""
        with rounded_products(self.passes):
            exact = self.dense @ weight.to(self.dense).mT
            missed = exact - self.new @ fitted.to(self.new).mT
        return relative_error(_energy(missed), _energy(exact))


def _energy(values: Tensor) -> float:
    [values] = multipliable(values)
    return float(torch.linalg.vector_norm(values, dim=-1).double().square().sum())


@dataclass(frozen=True, eq=False)
class DampedMoments:
    """Moments with the same level added to the diagonal of each.

    Only G is kept; the others, which are needed once, are made when they are asked for.
    """

    moments: Moments
    level: Tensor  # ()

    @cached_property
    def gram(self) -> Tensor:
        """G.  # (d', d')."""
        return with_ridge(self.moments.gram, self.level)

    @property
    def cross(self) -> Tensor | None:
        """C, made anew each time; None where it is G.  # (d, d')."""
        cross, lift = self.moments.cross, self.moments.lift
        if self.is_same:
            return None
        return (
            with_ridge(cross, self.level) if lift is None else cross + self.level * lift.to(cross)
        )

    @property
    def is_same(self) -> bool:
        """Tell whether C is G: the compressed model reads what the dense one does."""
        return self.lift is None and self.moments.cross is self.moments.gram

    def product(self, weight: Tensor, rows: slice = slice(None)) -> Tensor:
        """Returns W C in float64, of those rows of a layer that W is.  # (out, d) -> (out, d')."""
        cross, lift = self.moments.cross, self.moments.lift
        if self.moments.is_product:
            ridge = weight.double() if lift is None else weight.double() @ lift.to(cross)
            return cross[rows] + self.level * ridge
        damped = self.cross
        if damped is None:  # W is what solves it: what is rounded away would come back
            return weight.double() @ self.gram
        return product_with(damped, weight)

    def norm(self, weight: Tensor) -> float:
        """Returns E||W x||^2 of float64 W.  # (out, d)."""
        dense = self.moments.dense
        if isinstance(dense, RowErrors):
            return dense.norm(weight) + float(self.level * weight.square().sum())
        dense = self.gram if dense is self.moments.gram else with_ridge(dense, self.level)
        return float((weight @ dense).mul(weight).sum())

    @property
    def lift(self) -> Tensor | None:
        """Takes channels that are left to all.  # (d, d')."""
        return self.moments.lift


def ridge_level(moment: Tensor, damping: float) -> Tensor:
    """Returns a multiple of the mean diagonal, or of one where that is zero.  # (..., d, d)."""
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)
    return damping * torch.where(mean > 0, mean, torch.ones_like(mean))


def with_ridge(moment: Tensor, level: Tensor) -> Tensor:
    """Add a level to the diagonal, without a matrix of zeros beside it.  # (..., d, d), (...)."""
    raised = moment.clone()
    raised.diagonal(dim1=-2, dim2=-1).add_(level[..., None])
    return raised


def relative_error(error: float, norm: float) -> float:
    """Returns a squared error over the squared norm of what was aimed at; never infinite."""
    if error <= 0:
        return 0.0
    ratio = error / norm if norm > 0 else inf
    return 1.0 if ratio == inf else ratio


def multipliable(*rows: Tensor) -> list[Tensor]:
    """Returns rows in float32 where that holds sums of their products, all in float64 else."""
    sizes = [float(torch.stack(x.aminmax()).abs().amax()) if x.numel() else 0.0 for x in rows]
    narrow = all(size == 0 or SMALLEST < size < LARGEST for size in sizes)
    return [item.float() if narrow else item.double() for item in rows]


@contextmanager
def rounded_products(dtype: torch.dtype | None) -> Iterator[None]:
    """Let products of float32 matrices round what they multiply, as passes in bfloat16 do.

    Only where that takes a fraction of the time (AMX; of NVIDIA TF32, which rounds less), and sums
    stay float32. A setting of the whole process: one thread computes at a time.
    """
    if dtype != torch.bfloat16:
        yield
        return
    backends: Any = torch.backends
    units = [(backends.mkldnn.matmul, "bf16"), (backends.cuda.matmul, "tf32")]
    usual = backends.fp32_precision  # what units follow that have none of their own
    before = [unit.fp32_precision for unit, _ in units]
    try:
        for unit, precision in units:
            unit.fp32_precision = precision
        yield
    finally:
        for (unit, _), precision in zip(units, before, strict=True):
            unit.fp32_precision = "none" if precision == usual else precision


@contextmanager
def _without_autocast(device: torch.device | str) -> Iterator[None]:
    """Let products be of the dtype of their factors: hooks of modules run within their autocast."""
    kind = torch.device(device).type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            yield
    else:
        yield


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Adds sum a_i a_i^T to a float64 sum; of products that are equal one is taken."""
    add_lower(total, rows)
    mirror(total)


def add_lower(total: Tensor, rows: Tensor) -> None:
    """Adds what is below the diagonal, and some of what is above it, of sum a_i a_i^T."""
    for lower, columns in _lower(rows.shape[-1]):
        total[lower, columns] += rows[:, lower].T @ rows[:, columns]


def _lower(size: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of a square matrix in tiles that hold what is below its diagonal."""
    for first in range(0, size, _TILE):
        yield slice(first, None), slice(first, first + _TILE)


def mirror(total: Tensor) -> None:
    """Fills what is above the diagonal with what is below it, as `add_lower` leaves it."""
    starts = range(0, len(total), _TILE)
    for row, column in ((row, column) for row in starts for column in starts if column < row):
        tile = total[row : row + _TILE, column : column + _TILE]
        total[column : column + _TILE, row : row + _TILE] = tile.T


@dataclass
class ProductSum:
    """A sum of products of paired rows, a_i b_i^T, float64 unless less is asked for.

    Rows wait until there are many: the sum is larger than a batch, and is read and written whole,
    of a Gram matrix half of it. It takes no memory before there are some.
    """

    shape: tuple[int, int]
    device: torch.device | str
    dtype: torch.dtype = torch.float64
    passes: torch.dtype | None = None  # in which rows were computed; `rounded_products`
    _sum: Tensor | None = None
    _waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _is_gram: bool = True  # whether all that was added is
    _is_half: bool = False  # whether what is above the diagonal waits to be copied from below

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing was added."""
        return self._sum is None and not self._waiting

    def add(self, left: Tensor, right: Tensor) -> None:
        """Adds rows, which the caller does not change afterwards; the same twice for a Gram."""
        self._waiting.append((left, right))
        if self._is_full():
            self._sum_up()

    def merge(self, other: ProductSum) -> ProductSum:
        """Adds another sum; of a large one that has not begun it takes the rows."""
        if other.is_empty:
            return self
        if other._sum is None and self._is_large:
            self._waiting += other._waiting
            other._waiting.clear()
            self._sum_up()
            return self
        ours, theirs = self._sum_up(), other._sum_up()
        if self._is_half and other._is_half and len(ours) > LARGE:
            for lower in _lower(len(ours)):
                ours[lower] += theirs[lower]
        else:
            self.total().add_(other.total())
            self._is_gram &= other._is_gram
        return self

    @property
    def _is_large(self) -> bool:
        return max(self.shape) > LARGE

    def _is_full(self) -> bool:
        """Tell whether enough rows wait: of a large sum that is not begun, as many as it takes."""
        if sum(len(left) for left, _ in self._waiting) < ROWS_AT_ONCE:
            return False
        if self._sum is not None or not self._is_large:
            return True
        rows = {id(item): item.nbytes for pair in self._waiting for item in pair}
        return sum(rows.values()) > self.dtype.itemsize * prod(self.shape)

    def add_outer(self, left: Tensor, right: Tensor) -> None:
        """Adds a b^T of two vectors; to a Gram matrix with others that make it symmetric."""
        total = self._sum_up()
        left, right = left.to(total), right.to(total)
        if self._is_half and len(total) > LARGE:
            for rows, columns in _lower(len(total)):
                total[rows, columns].addr_(left[rows], right[columns])
        else:
            self.total().addr_(left, right)

    def total(self) -> Tensor:
        """Sum up all rows so far."""
        total = self._sum_up()
        if self._is_half:
            mirror(total)
            self._is_half = False
        return total

    def _sum_up(self) -> Tensor:
        if self._sum is None:
            self._sum = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if self._waiting and not all(a is b for a, b in self._waiting):
            if self._is_half:
                mirror(self._sum)
            self._is_gram = self._is_half = False
        while self._waiting:
            rows = self._some_rows()
            with _without_autocast(self.device), rounded_products(self.passes):
                if self._is_gram:
                    add_lower(self._sum, rows[0])
                    self._is_half = True
                else:
                    self._sum += rows[0].T @ rows[1]
        return self._sum

    def _some_rows(self) -> tuple[Tensor, Tensor]:
        """Take enough of the rows that wait for one product."""
        some: list[tuple[Tensor, Tensor]] = []
        while self._waiting and sum(len(left) for left, _ in some) < ROWS_AT_ONCE:
            some.append(self._waiting.pop(0))
        if len(some) == 1:
            return some[0]
        left, right = zip(*some, strict=True)
        rows = torch.cat(left)
        return rows, rows if self._is_gram else torch.cat(right)


def puts_out_little(inputs: int, outputs: int) -> bool:
    """Tell whether W C takes fewer operations than C, of a layer that alone reads a wide input."""
    return inputs >= WIDE and 2 * outputs <= inputs


def token_weights(gradients: Tensor) -> Tensor:
    """Returns what errors at tokens cost, by the gradients at a layer's output, float64.

    (tokens, out) -> (tokens,)
    """
    return gradients.double().square().sum(-1).clamp_min(1e-200)  # so that some are never none


def drawn_rows(rows: Tensor, weights: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    """Draws one of `ROWS_KEPT` rows, half of them by their squares, and says what each stands for.

    A few huge rows, such as those of first tokens, are most of all squares: they are in it always,
    and count for themselves. Sums over the others are met on the average (importance sampling).

    Args:
        rows: (rows, d), at least one
        weights: What rows count, float64.  # (rows,)
        offset: Where in steps of the draw it begins, from 0 to 1.

    Returns:
        Indices and weights of those that are drawn.  # (kept,)
    """
    sizes = weights * torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).square()
    parts = [item / item.sum() for item in (weights, sizes) if bool(item.sum() > 0)]
    if not parts or not bool(torch.isfinite(sizes.sum())):  # what is wrong is said of the sums
        return torch.arange(len(rows), device=rows.device), weights
    chances = torch.stack(parts).mean(0)
    count = -(-len(rows) // ROWS_KEPT)
    steps = (chances.cumsum(0) * count + offset).floor()
    times = steps.diff(prepend=steps.new_zeros(1))
    index = times.nonzero()[:, 0]
    return index, (weights * times / (count * chances))[index]


class MomentSums:
    """Accumulates moments of token rows in float64, about the means of the first batch.

    Of wide inputs of two streams some rows are drawn in the place of D, which tells errors: by them
    these are right to a few in a hundred, and take a fraction of the operations. Where one layer
    alone reads such an input, and puts out far less (`puts_out_little`), so does W C in the place
    of C.
    """

    def __init__(
        self,
        dense: int,
        new: int | None = None,
        device: torch.device | str = "cpu",
        passes: torch.dtype | None = None,
        weight: Tensor | None = None,
    ) -> None:
        self._sample = PairedRows(passes) if new is not None and dense >= WIDE else None
        new = dense if new is None else new
        self._passes, self._layer = passes, weight  # W in place of the identity  # (out, d)
        crossed = dense if weight is None else len(weight)
        shapes = [(new, new), (crossed, new)] + [(dense, dense)] * (self._sample is None)
        self._sums = [ProductSum(shape, device, passes=passes) for shape in shapes]
        # Of rows that are part of all three.
        self._same = ProductSum((new, new), device, passes=passes)
        self._means = [torch.zeros(n, dtype=torch.float64, device=device) for n in (new, dense)]
        # Means of the first rows, of both streams: moments about them do not cancel, nor round.
        self._centres: list[Tensor] = []
        self.rows = 0  # of tokens, so far
        self._weight = self._squares = 0.0  # sums of their weights, and of the weights' squares

    def add(self, dense: Tensor, new: Tensor, weights: Tensor | None = None) -> None:
        """Adds paired rows x of the dense and x' of the compressed model.  # (tokens, d).

        All count alike, or as their weights say.  # (tokens,)
        """
        if not len(dense):
            return
        pair = new.float(), dense.float()
        root = None if weights is None else weights.sqrt()
        weights = _ones(new) if weights is None else weights
        if not self.rows:
            means = [weights @ rows.double() / weights.sum() for rows in pair]
            self._centres = [mean.float() for mean in means]
        same = new is dense and torch.equal(*self._centres)
        pairs = zip(pair[:1] if same else pair, self._centres, strict=False)
        scaled = [rows - centre for rows, centre in pairs]
        if root is None:  # as they are in float32: a copy in float64 takes longer than their sum
            means = [rows.sum(0, dtype=torch.float64) for rows in scaled]
        else:
            scaled = [root[:, None] * rows for rows in scaled]
            means = [root @ rows for rows in scaled]
        for total, mean in zip(self._means, 2 * means if same else means, strict=True):
            total += mean
        scaled = multipliable(*scaled)
        if same:
            self._same.add(scaled[0], scaled[0])
        else:
            for products, (i, j) in zip(self._sums, _PAIRS, strict=False):
                rows = [scaled[i], scaled[j]]
                if i and self._layer is not None:
                    rows = multipliable(self._put_out(rows[0]), rows[1])
                products.add(*rows)
        if self._sample is not None:
            index, shares = drawn_rows(dense, weights, _GOLDEN * (self.rows + 1) % 1)
            x = dense[index]
            self._sample.add(x, x if new is dense else new[index], shares)
        self.rows += len(dense)
        self._weight += float(weights.sum())
        self._squares += float(weights.square().sum())

    def merge(self, other: MomentSums) -> MomentSums:
        """Add what another sum has taken, about means of its own."""
        if not self.rows or not other.rows:
            return self if self.rows else other
        pairs = zip(other._centres, self._centres, strict=True)
        shifts = [theirs.double() - ours.double() for theirs, ours in pairs]
        if all(products.is_empty for products in self._sums + other._sums):
            totals = [(self._same, other._same, _PAIRS[0])]
        else:
            totals = [*zip(self._sums, other._sums, _PAIRS, strict=False)]
            self._same.merge(other._same)
        for ours, theirs, (i, j) in totals:
            # sum w (x + s) (y + t)^T = sum w x y^T + (sum w x) t^T + s (sum w y + w t)^T
            right = other._means[j] + other._weight * shifts[j]
            ours.merge(theirs)
            for left, row in ((other._means[i], shifts[j]), (shifts[i], right)):
                ours.add_outer(self._put_out(left) if i else left, row)
        for mean, more, shift in zip(self._means, other._means, shifts, strict=True):
            mean += more + other._weight * shift
        if self._sample is not None and other._sample is not None:
            self._sample.merge(other._sample)
        self.rows += other.rows
        self._weight += other._weight
        self._squares += other._squares
        return self

    def _put_out(self, rows: Tensor) -> Tensor:
        """Returns what the layer makes of rows of x, if there is one.  # (..., d) -> (..., out)."""
        if self._layer is None:
            return rows
        with _without_autocast(rows.device), rounded_products(self._passes):
            return rows @ self._layer.to(rows).mT

    @property
    def means(self) -> list[Tensor]:
        """Means of the rows of both models.  # (d,)."""
        pairs = zip(self._means, self._centres, strict=True)
        return [total / self._weight + centre.double() for total, centre in pairs]

    def moments(self, *, centred: bool, last: bool = False) -> Moments:
        """Returns the moments so far; `centred` where a bias takes the shift of the means.

        With `last` the sums become the moments, which takes half the memory.
        """
        if not self.rows:
            raise FitError("no calibration rows reached this layer")
        pairs: Sequence[tuple[int, int]] = _PAIRS
        if all(products.is_empty for products in self._sums):
            totals, pairs = [self._same.total()], _PAIRS[:1]  # one for all three
        else:
            totals = [products.total() for products in self._sums]
            if not self._same.is_empty:
                same = self._same.total()
                added = same, self._put_out(same).mT, same
                totals = [one + more.to(one) for one, more in zip(totals, added, strict=False)]
        if not all(map(is_finite, totals)):
            raise FitError(_NOT_FINITE, REPAIR)
        shifts, means = [total / self._weight for total in self._means], self.means
        parts = []
        for total, (one, two) in zip(totals, pairs, strict=False):
            parts.append(total.div_(self._weight) if last else total / self._weight)
            shift, mean = ((self._put_out(it[one]) if one else it[0]) for it in (shifts, means))
            _add_outer(parts[-1], -shift, shifts[two])
            if not centred:
                _add_outer(parts[-1], mean, means[two])
        mean, dense_mean = means if centred else map(torch.zeros_like, means)
        gram, cross, *last_part = parts if len(parts) > 1 else 3 * parts
        # Squares of weights that are hardly above zero may all be none.
        rows = round(self._weight**2 / self._squares) if self._squares else 1
        sample = self._sample.moments(centred=centred, last=last) if self._sample else None
        facts = sample or last_part[0], mean, dense_mean, max(1, rows)
        is_product = self._layer is not None and cross is not gram
        return Moments(gram, cross, *facts, is_product=is_product)


def _add_outer(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a b^T in place; to a large matrix without another one beside it."""
    if len(total) > LARGE:
        total.addr_(left.to(total), right.to(total))
    else:
        total += torch.outer(left, right)


class PairedRows:
    """Collects paired rows of a wide input, where nothing but errors is asked for.

    They are fewer numbers than three moments, and errors by them take fewer operations.
    """

    def __init__(self, passes: torch.dtype | None = None) -> None:
        self._passes = passes
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.rows = 0  # of tokens, so far

    def add(self, dense: Tensor, new: Tensor, weights: Tensor | None = None) -> None:
        """Adds paired rows; arguments as for `MomentSums`."""
        self._parts.append((dense, new, _ones(new) if weights is None else weights))
        self.rows += len(dense)

    def merge(self, other: PairedRows) -> PairedRows:
        """Adds what another one has collected."""
        self._parts += other._parts
        self.rows += other.rows
        return self

    def moments(self, *, centred: bool, last: bool = False) -> RowErrors:
        """Returns the rows so far; arguments as for `MomentSums`."""
        dense, new, weights = (torch.cat(items) for items in zip(*self._parts, strict=True))
        if last:
            self._parts.clear()
        if not (is_finite(dense) and is_finite(new)):
            raise FitError(_NOT_FINITE, REPAIR)
        shares = weights / weights.sum()
        root, pair = shares.sqrt().float()[:, None], (dense.float(), new.float())
        means = [(shares if centred else 0 * shares) @ rows.double() for rows in pair]
        scaled = [(rows - mean.float()).mul_(root) for rows, mean in zip(pair, means, strict=True)]
        return RowErrors(scaled[0], scaled[1], means[0], means[1], self._passes)


def _ones(rows: Tensor) -> Tensor:
    return torch.ones(len(rows), dtype=torch.float64, device=rows.device)


@contextmanager
def naming(what: str, hint: str) -> Iterator[None]:
    """Put into numeric errors what they are about, such as a layer, and what to do about them.

    Algebra knows matrices alone. A hint that an error brings along stays.

    Raises:
        FitError: The `FitError` or `LinAlgError` of the block, after `what` and a colon.
    """
    try:
        yield
    except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        advice = getattr(error, "hint", None) or hint
        raise FitError(f"{what}: {message_of(error)}", advice) from error


def safe_cholesky(gram: Tensor) -> Tensor:
    """Factors a positive semidefinite matrix, raising its floor until it succeeds."""
    if not is_finite(gram):
        raise FitError("a moment matrix holds NaN or infinity")
    # The factorisation reads one triangle; a large matrix is as symmetric as it was summed up.
    large = gram.ndim == 2 and len(gram) > LARGE
    raised = gram.clone() if large else (gram + gram.mT).div_(2)
    diagonal = raised.diagonal(dim1=-2, dim2=-1).clone()
    scale = diagonal.mean(-1)[..., None].abs()
    exact = gram.dtype == torch.float64
    for floor in (0.0, 1e-12, 1e-10, 1e-8, 1e-6) if exact else (0.0, 1e-6, 1e-5, 1e-4, 1e-3):
        least = 1e-300 if exact else 1e-30
        raised.diagonal(dim1=-2, dim2=-1).copy_(diagonal + (floor * scale + least))
        in_place = large and gram.device.type == "cpu"
        factor, info = _written_over(raised) if in_place else torch.linalg.cholesky_ex(raised)
        if not bool(info.any()):
            return factor
        if in_place:
            raised.copy_(gram)
    raise FitError("a moment matrix is not positive semidefinite")


def _written_over(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Factors a large matrix in the memory that it takes: its columns lie as the solver has them.

    (n, n) -> (n, n), lower triangular, and what is not zero where it failed
    """
    info = torch.empty((), dtype=torch.int32)
    torch.linalg.cholesky_ex(gram.mT, out=(gram.mT, info))
    return gram.mT, info


def best_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors the best rank-r approximation of a matrix, through its smaller Gram matrix.

    The eigendecomposition of the smaller side is several times faster than an SVD; in float64 it
    blurs only directions below 1e-8 of the largest, far below what a truncation discards.
    """
    tall = matrix.shape[-2] >= matrix.shape[-1]
    a = matrix if tall else matrix.mT
    leading = leading_vectors(column_gram(a), rank)
    left, right = a @ leading, leading.mT
    return (left, right) if tall else (right.mT, left.mT)


def leading_vectors(gram: Tensor, rank: int) -> Tensor:
    """Find eigenvectors of the largest eigenvalues of a symmetric matrix.

    Of a large matrix, on the CPU, no others are computed, which takes less than half the time, and
    first in float32, where that tells them from the rest: one product with the matrix then makes
    their space as good as that of float64.

    (..., n, n) -> (..., n, rank), orthonormal, the largest last
    """
    large = gram.ndim == 2 and len(gram) >= max(LARGE, 2 * rank)
    if large and gram.device.type == "cpu" and is_finite(gram):
        outliers = _outlying_vectors(gram, rank)
        rest = gram - outliers @ (gram @ outliers).mT if outliers.numel() else gram
        if (others := _vectors_in_float32(rest, rank - outliers.shape[1])) is not None:
            # The largest first: those after them hardly change them.
            vectors = torch.cat([outliers, others.to(gram)], 1)
            return torch.linalg.qr(gram @ vectors)[0].flip(1)
        if (exact := _largest(gram, rank)[1]) is not None:
            return exact
    return torch.linalg.eigh(gram)[1][..., -rank:]


def _outlying_vectors(gram: Tensor, most: int) -> Tensor:
    """Find eigenvectors of eigenvalues far above all others, by randomised subspace iteration.

    Inputs of language models have a few such directions, beside which float32 loses the others.

    (n, n) -> (n, k), orthonormal, the largest first
    """
    count = min(_MOST_OUTLIERS, most // 2)
    start = torch.randn(len(gram), 2 * count, generator=torch.Generator().manual_seed(0))
    space = start.to(gram)
    for _ in range(_ITERATIONS):
        space = torch.linalg.qr(gram @ space)[0]
    values, turned = torch.linalg.eigh(space.mT @ (gram @ space))
    others = (gram.diagonal().sum() - values.sum()) / max(1, len(gram) - len(values))
    least = _LEAST_RATIO if gram.dtype == torch.float32 else 0.0
    far = values > torch.maximum(_FAR_ABOVE * others, least * values[-1:])
    far[:count] = False  # smaller ones have hardly converged
    return (space @ turned)[:, far].flip(1)


def _deflated(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Takes directions out of rows that outweigh all others, and returns the Gram matrix then.

    float32 holds small rows beside large ones, but not their products.

    (rows, n) -> (n, k), orthonormal, and A^T A of what is left  # (n, n)
    """
    outliers, gram = rows.new_zeros(rows.shape[1], 0), column_gram(rows)
    for _ in range(_STAGES):  # beside the largest ones others are seen too late
        more = _outlying_vectors(gram, most - outliers.shape[1])
        if not more.numel():
            break
        outliers = torch.linalg.qr(torch.cat([outliers, more], 1))[0]
        gram = column_gram(rows - (rows @ outliers) @ outliers.mT)
    return outliers, gram


def _vectors_in_float32(gram: Tensor, rank: int) -> Tensor | None:
    """Find eigenvectors of the largest eigenvalues; nothing where float32 would blur them.

    (n, n) -> (n, rank), float32, the largest first
    """
    scale = gram.diagonal().mean()
    if bool(scale > 0):
        values, vectors = _largest((gram / scale).float(), rank)
        if vectors is not None and values is not None and values[0] > _LEAST_RATIO * values[-1]:
            return vectors.flip(1)
    return None


def _largest(gram: Tensor, rank: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Find the largest eigenvalues and their vectors; nothing where the solver fails to."""
    from scipy.linalg import LinAlgError, eigh

    rows = len(gram)
    with suppress(LinAlgError):  # what is wrong is said as for small ones
        # Rows and columns may be exchanged: the solver may write over the copy that it gets.
        values, vectors = eigh(
            gram.numpy().T.copy(order="F"),
            subset_by_index=(rows - rank, rows - 1),
            driver="evr",
            overwrite_a=True,
            check_finite=False,
        )
        if len(values) == rank:  # fewer come back where many are the same to rounding
            return torch.from_numpy(values), torch.from_numpy(vectors)
    return None, None


def balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Scale both factors of every rank-one term to the same norm: low precision needs it."""
    ratio = balancing_ratio(left, right)
    return left * ratio[..., None, :], right / ratio[..., :, None]


def balancing_ratio(left: Tensor, right: Tensor) -> Tensor:
    """Compute scales that balance columns of a left and rows of a right factor; 1 for zeros."""
    ratio = (right.norm(dim=-1) / left.norm(dim=-2)).sqrt()
    return torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, torch.ones_like(ratio))


def fit_lowrank(
    target: Tensor | None,
    gram: Tensor | None,
    rank: int,
    curvature: Tensor | None = None,
    dense: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Fits A (out, r) and B (r, d), of equal scale, to W C in the norm of damped moments.

    With G = L L^T and S = K K^T the optimum is the truncated SVD of K^T (W C) L^-T, brought back
    by K^-T and L^-1. Any other square roots would give the same product. Without a target it is
    W G of the weight W (`dense`).
    """
    inputs = None if gram is None else safe_cholesky(gram)
    factors = None
    # Small sides gain nothing, so that fits of small models stay as exact as they are.
    if curvature is not None and gram is not None and is_large(curvature) and is_large(gram):
        factors = _large_factors(whitened(target, inputs, None, dense), curvature, rank)
    if factors is None:
        outputs = None if curvature is None else safe_cholesky(curvature)
        factors = best_factors(whitened(target, inputs, outputs, dense), rank)
        if outputs is not None:
            back = torch.linalg.solve_triangular(outputs.mT, factors[0], upper=True)
            factors = back, factors[1]
    left, right = factors
    if inputs is not None:  # B = right L^-1, that is L^T B^T = right^T
        right = torch.linalg.solve_triangular(inputs.mT, right.mT, upper=True).mT
    return balanced(left, right)


def condensed_weight(moment: Tensor, level: Tensor, weight: Tensor) -> Tensor:
    """Condenses a weight to as many outputs as inputs, all of which count alike.

    With S = K K^T it is R^T of W^T S W = R R^T: K^T W but for a rotation of the outputs, which no
    loss depends on.

    Args:
        moment: W^T S W of S as measured, float64.  # (in, in)
        level: Ridge on S.  # ()
        weight: W  # (out, in)

    Returns:
        R^T, float64.  # (in, in)

    Raises:
        FitError: It is not finite.
    """
    total = moment.new_zeros(moment.shape)
    add_gram(total, *multipliable(weight))
    total.mul_(level).add_(moment)
    if not is_finite(total):
        raise FitError("moments of gradients hold NaN or infinity", REPAIR)
    with suppress(FitError):
        return safe_cholesky(total).mT.contiguous()
    # The ridge is none where the weight puts out nothing, and sums round below that.
    values, vectors = torch.linalg.eigh(total)
    return values.clamp_min(0).sqrt()[:, None] * vectors.mT


def fit_condensed(
    condensed: Tensor, cross: Tensor | None, gram: Tensor, rank: int, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Fits A (out, r) and B (r, d), as `fit_lowrank` does, by a condensed weight R^T.

    The right factor is that of the condensed weight, and A = W C B^T then. Without C it is G.
    """
    inputs = safe_cholesky(gram)
    target = None if cross is None else product_with(cross, condensed)
    rows = whitened(target, inputs, None, condensed.to(gram))
    space = _leading_space(rows, rank)
    if space is None:
        space = leading_vectors(column_gram(rows), rank)
    right = torch.linalg.solve_triangular(inputs.mT, space, upper=True)
    read = inputs @ space if cross is None else cross.to(gram) @ right
    return balanced(weight.to(gram) @ read, right.mT)


def _leading_space(rows: Tensor, rank: int) -> Tensor | None:
    """Finds the leading right singular vectors of large rows; nothing where float32 blurs them.

    (rows, n) -> (n, rank), float64, the largest last
    """
    size = rows.abs().amax() if is_large(rows.mT) else rows.new_zeros(())
    if not 0 < float(size) < inf:
        return None
    outliers, gram = _deflated((rows / size).float(), rank)
    others = _vectors_in_float32(gram, rank - outliers.shape[1])
    if others is None:
        return None
    return torch.linalg.qr(torch.cat([outliers, others], 1).double())[0].flip(1)


def is_large(moment: Tensor) -> bool:
    """Tell whether float32 is worth its while: of one large matrix, on the CPU."""
    return moment.ndim == 2 and len(moment) > LARGE and moment.device.type == "cpu"


def keeps_in_float32(moment: Tensor) -> bool:
    """Tell whether float32 holds small eigenvalues of large moments beside the largest."""
    if not is_large(moment) or not 0 < float(scale := moment.diagonal().mean()) < inf:
        return False  # or there is something to say of it
    gram = (moment / scale).float()
    vectors = _outlying_vectors(gram, 2 * _MOST_OUTLIERS)
    if not vectors.numel():
        return True
    values = (gram @ vectors).mul(vectors).sum(0, dtype=torch.float64)
    others = (gram.diagonal().sum(dtype=torch.float64) - values.sum()) / (len(gram) - len(values))
    return bool(values.amax() < _MOST_RATIO * others)


def large_whitened(weight: Tensor, gram: Tensor, curvature: Tensor | None) -> Tensor:
    """Returns K^T W L of large moments G = L L^T and S = K K^T, to float32, in float64.

    Both are as `keeps_in_float32` has them, and what is wanted of it are sums of squares.
    """
    moments = [gram] if curvature is None else [gram, curvature]
    scales = [moment.diagonal().mean() for moment in moments]
    pairs = zip(moments, scales, strict=True)
    inputs, *outputs = (safe_cholesky((moment / scale).float()) for moment, scale in pairs)
    size = weight.abs().amax().clamp_min(torch.finfo(torch.float64).tiny)
    rows = (weight / size).float()
    product = whitened(None, inputs, outputs[0] if outputs else None, rows).double()
    return product.mul_(size * torch.stack(scales).prod().sqrt())


def large_singular_values(matrix: Tensor) -> Tensor | None:
    """Returns singular values of a large matrix, to float32; nothing of a small one, or of zeros.

    Directions that outweigh all others, beside which float32 loses those, are taken out before.

    (out, d) -> (min(out, d),), float64, the largest first
    """
    if not is_large(matrix) or not is_large(matrix.mT):
        return None
    size = matrix.abs().amax()
    if not 0 < float(size) < inf:
        return None
    exact = (matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT).double() / size
    outliers, gram = _deflated(exact.float(), exact.shape[1])
    few = outliers.shape[1]
    squares = torch.linalg.eigvalsh(gram).double().clamp_min(0)
    space = torch.linalg.qr(exact.mT @ (exact @ outliers.double()))[0]  # as float64 has it
    far = torch.linalg.svdvals(exact @ space).square()
    # What is left of all squares tells how large those of the others are together.
    others = (exact.square().sum() - far.sum()).clamp_min(0)
    squares[few:] *= others / squares[few:].sum().clamp_min(torch.finfo(torch.float64).tiny)
    squares[:few] = far  # in the place of the zeros where they were taken out
    return squares.sqrt().sort(descending=True)[0].mul_(size)


def _large_factors(
    input_whitened: Tensor, curvature: Tensor, rank: int
) -> tuple[Tensor, Tensor] | None:
    """Fits A and B L to X = W C L^-T in the norm of S; nothing where float32 would blur them.

    float32 finds but the space of the smaller side, where S, whose ridge is large, is harmless.
    """
    scale, size = curvature.diagonal().mean(), input_whitened.abs().amax()
    if not (0 < float(scale) < inf and 0 < float(size) < inf):
        return None  # there is nothing to fit, or something to say
    narrow_root = safe_cholesky((curvature / scale).float())
    whitened_rows = transposed_product(narrow_root, (input_whitened / size).float())
    tall = len(input_whitened) >= input_whitened.shape[1]
    space = _leading_space(whitened_rows if tall else whitened_rows.mT, rank)
    if space is None:
        return None
    if tall:
        return input_whitened @ space, space.mT
    root = safe_cholesky(curvature)
    left = torch.linalg.solve_triangular(root.mT, space, upper=True)
    return left, (root @ space).mT @ input_whitened


def whitened(
    target: Tensor | None,
    inputs: Tensor | None,
    outputs: Tensor | None,
    dense: Tensor | None = None,
) -> Tensor:
    """Returns K^T (W C) L^-T of the roots L and K: errors are plain sums of squares there.

    Without a target it is K^T W L, of the weight W (`dense`).
    """
    if target is None:
        assert dense is not None
        assert inputs is not None
        target, inputs = transposed_product(inputs, dense.mT).mT, None
    if outputs is not None:
        target = transposed_product(outputs, target)
    if inputs is None:
        return target
    return torch.linalg.solve_triangular(inputs, target.mT, upper=False).mT


def transposed_product(lower: Tensor, matrix: Tensor) -> Tensor:
    """Returns L^T M of a lower triangular L: of large ones, products with zeros are left out."""
    if lower.ndim > 2 or len(lower) <= LARGE:
        return lower.mT @ matrix
    starts = range(0, len(lower), LARGE)
    return torch.cat([lower[i:, i : i + LARGE].mT @ matrix[i:] for i in starts])


def product_with(moment: Tensor, weight: Tensor) -> Tensor:
    """Returns W C in float64; of large ones to float32, of whose products C is a sum.

    (d, d'), (out, d) -> (out, d')
    """
    if not (is_large(moment) and is_large(moment.mT)) or len(weight) <= LARGE:
        return weight.double() @ moment
    scale = moment.abs().amax().clamp_min(torch.finfo(torch.float64).tiny)
    return (weight.float() @ (moment / scale).float()).double().mul_(scale)


def column_gram(matrix: Tensor) -> Tensor:
    """Returns A^T A; of large ones, products that are equal are taken once.  # (..., n, n)."""
    if matrix.ndim > 2 or matrix.shape[-1] <= LARGE:
        return matrix.mT @ matrix
    total = matrix.new_zeros(matrix.shape[-1], matrix.shape[-1])
    add_gram(total, matrix)
    return total


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
    """Return whether a tensor holds only numbers, by what others survive in, without a mask.

    That is a sum; of a low precision the extremes, since a sum in a wider one takes ten times as
    long.
    """
    if tensor.dtype in _NARROW and tensor.numel():
        return bool(torch.isfinite(torch.stack(tensor.aminmax())).all())
    return bool(torch.isfinite(tensor.sum(dtype=torch.float64)))
