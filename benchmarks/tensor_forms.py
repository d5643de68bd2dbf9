"""Tensor decompositions of weights that `tensorly` has, fitted in the norm of the moments.

A *form* is a map from factors to weights that is linear in every factor: CP, Tucker, block terms,
a tensor ring. Each begins with what `tensorly.decomposition` makes of the weight alone, and is
fitted to moments by turns over the factors, as the structures of tcompress are: least squares by
conjugate gradients, so that no step makes the error larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import tensorly
import torch
from tensorly.decomposition import (
    parafac,
    partial_tucker,
    tensor_ring,
    tensor_ring_als,
    tucker,
)
from torch import Tensor

from tcompress.linalg.moments import conjugate_gradients
from tcompress.linalg.tensortrain import matrix_modes

Factors = list[Tensor]
Weights = tuple[Tensor, ...]
Shape = tuple[int, int]
STEPS = 8  # of conjugate gradients, for each factor in a round


@dataclass(frozen=True)
class Effort:
    """When a fit ends: after so many rounds, or one that won less than a share of the error."""

    rounds: int = 12
    least: float = 2e-3


@dataclass(frozen=True)
class Weighed:
    """A dense weight, and the Gram matrix of its inputs over the energy of its outputs."""

    weight: Tensor  # (out, in), float64
    gram: Tensor  # (in, in), float64

    @classmethod
    def of(cls, weight: Tensor, gram: Tensor) -> Weighed:
        """Scale the moments so that a weight of zeros has an error of 1."""
        weight = weight.detach().double()
        return cls(weight, gram / (weight @ gram).mul(weight).sum())

    def error(self, fitted: Tensor) -> float:
        """Squared error of the outputs over the energy of the dense ones."""
        missed = self.weight - fitted.detach()
        return float((missed @ self.gram).mul(missed).sum())


@dataclass(frozen=True)
class Form:
    """A way to store weights as few small tensors.

    Attributes:
        name: For people.
        weights: What factors stand for; linear in each of them.
        start: Factors of the weights alone, by `tensorly`.
    """

    name: str
    weights: Callable[[Factors], Weights]
    start: Callable[[Sequence[Tensor]], Factors]

    def fit(self, layers: Sequence[Weighed], effort: Effort) -> tuple[Factors, Factors]:
        """Factors by `tensorly` and those fitted to moments."""
        with tensorly.backend_context("pytorch", local_threadsafe=True):
            begin = self.start([layer.weight for layer in layers])
        return begin, fit(self.weights, begin, layers, effort)


def fit(
    weights: Callable[[Factors], Weights],
    begin: Factors,
    layers: Sequence[Weighed],
    effort: Effort,
) -> Factors:
    """Alternating least squares over all factors."""
    factors = [factor.clone() for factor in begin]
    last = errors(weights(factors), layers)
    for _ in range(effort.rounds):
        for index in range(len(factors)):
            factors[index] = _solved(weights, factors, index, layers)
        error = errors(weights(factors), layers)
        if last - error <= effort.least * error:
            break
        last = error
    return factors


def errors(weights: Weights, layers: Sequence[Weighed]) -> float:
    """Mean error of all layers."""
    pairs = zip(weights, layers, strict=True)
    return sum(layer.error(weight) for weight, layer in pairs) / len(layers)


def _solved(
    weights: Callable[[Factors], Weights], factors: Factors, index: int, layers: Sequence[Weighed]
) -> Tensor:
    """One factor by least squares, the others as they are."""
    now = factors[index].clone().requires_grad_()

    def at(factor: Tensor) -> Weights:
        return weights([*factors[:index], factor, *factors[index + 1 :]])

    images = at(now)

    def adjoint(seen: Sequence[Tensor]) -> Tensor:
        moved = [one @ layer.gram for one, layer in zip(seen, layers, strict=True)]
        (gradient,) = torch.autograd.grad(images, now, moved, retain_graph=True)
        return gradient

    def apply(factor: Tensor) -> Tensor:
        with torch.no_grad():
            seen = at(factor)
        return adjoint(seen)

    target = adjoint([layer.weight for layer in layers])
    return conjugate_gradients(apply, target, factors[index], iterations=STEPS, tolerance=1e-9)


# ---------------------------------------------------------------- one weight
def forms_of(shape: Shape, target: float) -> Iterator[Form]:
    """All forms of one weight, with the largest ranks within a budget."""
    budget = int(target * prod(shape))
    for order in (2, 3):
        modes = Modes.of(shape, order)
        rank = budget // sum(modes.all)
        yield Form(f"CP, {2 * order} modes", partial(_cp, modes), partial(_cp_start, modes, rank))
    pairs = Modes.of(shape, 3)
    rank = budget // sum(pairs.pairs)
    start = partial(_paired_cp_start, pairs, rank)
    yield Form("CP, 3 pairs of modes", partial(_paired_cp, pairs), start)
    modes = Modes.of(shape, 2)
    for terms in (1, 4, 16):
        ranks = tucker_ranks(modes.all, budget // terms)
        name = "Tucker, 4 modes" if terms == 1 else f"block terms, {terms} of 4 modes"
        start = partial(_terms_start, modes, terms, ranks)
        yield Form(name, partial(_terms, modes), start)
    rank = largest(lambda r: r * r * sum(modes.all), budget)
    yield Form("ring, 4 modes", partial(_ring, modes), partial(_ring_start, modes, rank))
    first, second, third = pairs.pairs
    for back in (2, 4):
        front = first // back
        rest = budget - first * back * front
        rank = rest // (front * second + third * back)
        start = partial(_paired_ring_start, pairs, (back, front, rank, back))
        yield Form(f"ring of {back}, 3 pairs of modes", partial(_paired_ring, pairs), start)


@dataclass(frozen=True)
class Modes:
    """How rows and columns of a weight are folded."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, shape: Shape, order: int) -> Modes:
        """The modes of a tensor train of this order."""
        columns, rows = matrix_modes(shape[1], shape[0], order)
        return cls(tuple(rows), tuple(columns))

    @property
    def all(self) -> tuple[int, ...]:
        """Sizes of the modes of rows, then of those of columns."""
        return *self.rows, *self.columns

    @property
    def pairs(self) -> tuple[int, ...]:
        """Sizes of the modes when the k-th of the rows and of the columns are one."""
        return tuple(i * j for i, j in zip(self.rows, self.columns, strict=True))

    @property
    def shape(self) -> Shape:
        """Rows and columns."""
        return prod(self.rows), prod(self.columns)

    def fold(self, weight: Tensor) -> Tensor:
        """A tensor with one mode for each."""
        return weight.reshape(self.all)

    def fold_pairs(self, weight: Tensor) -> Tensor:
        """A tensor with one mode for each pair."""
        order = len(self.rows)
        turns = [axis for k in range(order) for axis in (k, order + k)]
        return self.fold(weight).permute(turns).reshape(self.pairs)

    def unfold_pairs(self, tensor: Tensor) -> Tensor:
        """The weight that has a tensor of pairs."""
        order = len(self.rows)
        sizes = [size for pair in zip(self.rows, self.columns, strict=True) for size in pair]
        turns = [*range(0, 2 * order, 2), *range(1, 2 * order, 2)]
        return tensor.reshape(sizes).permute(turns).reshape(self.shape)


def _khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    """Column-wise Kronecker product.  # (n_k, r) each -> (prod n_k, r)."""
    total = factors[0]
    for factor in factors[1:]:
        total = (total[:, None] * factor).flatten(0, 1)
    return total


def _cp(modes: Modes, factors: Factors) -> Weights:
    order = len(modes.rows)
    return (_khatri_rao(factors[:order]) @ _khatri_rao(factors[order:]).mT,)


def _cp_start(modes: Modes, rank: int, weights: Sequence[Tensor]) -> Factors:
    return _parafac(modes.fold(weights[0]), rank)


def _paired_cp(modes: Modes, factors: Factors) -> Weights:
    *first, last = factors
    return (modes.unfold_pairs(_khatri_rao(first) @ last.mT),)


def _paired_cp_start(modes: Modes, rank: int, weights: Sequence[Tensor]) -> Factors:
    return _parafac(modes.fold_pairs(weights[0]), rank)


def _parafac(tensor: Tensor, rank: int) -> Factors:
    options = {"init": "random", "random_state": 0, "n_iter_max": 10, "normalize_factors": True}
    scales, factors = parafac(tensor, rank, **options)
    share = scales ** (1 / len(factors))
    return [factor * share for factor in factors]


def _terms(modes: Modes, factors: Factors) -> Weights:
    """Sums of Tucker terms.  # core (k, r1, .., r4), factors (k, n, r)."""
    core, *sides = factors
    rows, columns = sides[:2], sides[2:]
    left = torch.einsum("kia,kjb,kabcd->kijcd", *rows, core).flatten(1, 2).flatten(2, 3)
    right = torch.einsum("kmc,knd->kmncd", *columns).flatten(1, 2).flatten(2, 3)
    return (left.transpose(0, 1).flatten(1) @ right.transpose(0, 1).flatten(1).mT,)


def _terms_start(
    modes: Modes, terms: int, ranks: Sequence[int], weights: Sequence[Tensor]
) -> Factors:
    """One Tucker decomposition after the other, each of what is left over."""
    rest, found = modes.fold(weights[0]), []
    for _ in range(terms):
        core, sides = tucker(rest, list(ranks), n_iter_max=5)
        found.append([core, *sides])
        rest = rest - tensorly.tucker_to_tensor((core, sides))
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def _ring(modes: Modes, factors: Factors) -> Weights:
    """A closed chain of one core for each mode.  # (r, n, r) each."""
    order = len(modes.rows)
    rows, columns = (_chain(part) for part in (factors[:order], factors[order:]))
    return (rows.transpose(0, 1).flatten(1) @ columns.permute(2, 0, 1).flatten(0, 1),)


def _chain(cores: Sequence[Tensor]) -> Tensor:
    """Product of cores.  # (a, n1, b), (b, n2, c) -> (a, n1 n2, c)."""
    total = cores[0]
    for core in cores[1:]:
        total = torch.tensordot(total, core, 1).flatten(1, 2)
    return total


def _ring_start(modes: Modes, rank: int, weights: Sequence[Tensor]) -> Factors:
    options = {"ls_solve": "normal_eq", "n_iter_max": 3, "tol": 0, "random_state": 0}
    return list(tensor_ring_als(modes.fold(weights[0]), rank, **options))


def _paired_ring(modes: Modes, factors: Factors) -> Weights:
    *first, last = factors
    rows = _chain(first).transpose(0, 1).flatten(1)  # (n1 n2, back * r)
    return (modes.unfold_pairs(rows @ last.permute(2, 0, 1).flatten(0, 1)),)


def _paired_ring_start(modes: Modes, ranks: tuple[int, ...], weights: Sequence[Tensor]) -> Factors:
    return list(tensor_ring(modes.fold_pairs(weights[0]), list(ranks)))


# ---------------------------------------------------------------- one attention
def attention_forms(width: int, heads: int, target: float) -> Iterator[Form]:
    """The four projections of an attention as one tensor, d x d_h x 4 x H, at several ranks."""
    size = width // heads
    budget = int(target * 4 * width * width)
    shares = [(size, 4, heads), (size, 4, 2 * heads // 3), (size, 3, heads)]
    shares += [(size * part // 4, 4, heads) for part in (3, 2, 1)]
    for rest in shares:
        sides = sum(n * r for n, r in zip((size, 4, heads), rest, strict=True) if r < n)
        rank = (budget - sides) // (width + prod(rest))
        if rank < 1:
            continue
        ranks = min(rank, width), *rest
        text = " x ".join(map(str, ranks))
        weights = partial(_heads, width, heads, ranks)
        yield Form(f"heads, {text}", weights, partial(_heads_start, heads, ranks))


def _heads(width: int, heads: int, ranks: Sequence[int], factors: Factors) -> Weights:
    """q, k, v and o of a core and factors of the modes that are smaller than full."""
    core, *sides = factors
    sizes = width, width // heads, 4, heads
    given = iter(sides)
    for axis in reversed(range(1, 4)):
        if ranks[axis] < sizes[axis]:
            core = torch.tensordot(core, next(given), ([axis], [1])).movedim(-1, axis)
    tensor = torch.tensordot(next(given), core, 1)  # (d, d_h, 4, H)
    q, k, v, o = tensor.permute(2, 3, 1, 0).flatten(1, 2)  # (4, H d_h, d)
    return q, k, v, o.mT


def _heads_start(heads: int, ranks: Sequence[int], weights: Sequence[Tensor]) -> Factors:
    q, k, v, o = weights
    stacked = torch.stack((q, k, v, o.mT)).unflatten(1, (heads, -1))  # (4, H, d_h, d)
    tensor = stacked.permute(3, 2, 0, 1) / stacked.flatten(1).norm(dim=1)[None, None, :, None]
    axes = [axis for axis in range(4) if axis == 0 or ranks[axis] < tensor.shape[axis]]
    chosen = [ranks[axis] for axis in axes]
    (core, sides), _ = partial_tucker(tensor, chosen, modes=axes, n_iter_max=10)
    factors = [core, *sides[1:][::-1], sides[0]]
    norms = stacked.flatten(1).norm(dim=1)
    if ranks[2] == 4:
        factors[0] = core * norms[:, None]
    else:
        place = 1 + (ranks[3] < heads)
        factors[place] = factors[place] * norms[:, None]
    return factors


# ---------------------------------------------------------------- sizes
def tucker_ranks(sizes: Sequence[int], budget: int) -> list[int]:
    """The largest ranks, in proportion to the modes, of a Tucker decomposition within a budget."""

    def cost(ranks: Sequence[int]) -> int:
        return prod(ranks) + sum(r * n for r, n in zip(ranks, sizes, strict=True))

    def shares(thousandths: int) -> list[int]:
        return [max(1, thousandths * size // 1000) for size in sizes]

    ranks = shares(min(1000, largest(lambda part: cost(shares(part)), budget)))
    for axis in range(len(sizes)):  # what rounding has left over
        more = [rank + (i == axis) for i, rank in enumerate(ranks)]
        if more[axis] <= sizes[axis] and cost(more) <= budget:
            ranks = more
    return ranks


def largest(cost: Callable[[int], int], budget: int) -> int:
    """The largest number up to 4096 whose cost, which grows with it, is within a budget."""
    low, high = 1, 4096
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle - 1)
    return low
