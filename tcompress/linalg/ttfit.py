"""Fits of tensor-train matrices in the norm of the data, and what a fit costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tcompress.errors import FitError
from tcompress.linalg.moments import Operator, descend, safe_cholesky
from tcompress.linalg.tensortrain import Ints, balance_cores, merge_cores, tt_shape, tt_to_matrix

# With all cores but one held, W is linear in that core, so its optimum solves a linear system. The
# core is kept at the centre of an orthogonal chain: then that system is no worse conditioned than
# the moments themselves.

SIDE = 4096  # largest normal matrix that is factored
ROOM = 2**26  # most numbers in a tensor made on the way to it
SWEEPS = 4  # passes over the cores
STEPS = 15  # conjugate gradients per core, where its system is not solved at once
CURVED_STEPS = 6  # the same with S: more sweeps of fewer steps get further in the same time
ENOUGH = 1e-6  # of the first squared residual: the next core gains more than a last digit here
ROUNDING = 1e-10  # of the right-hand side: a residual that is nothing but rounding
FLOOR = 1e-10  # ridge on normal matrices, relative to their mean diagonal element


def fit_tt(
    product: Tensor,
    gram: Tensor | None,
    cores: Sequence[Tensor],
    sweeps: int = SWEEPS,
    curvature: Tensor | None = None,
) -> list[Tensor]:
    """Fits cores to minimise tr(S W G W^T) - 2 tr(S W P^T), never ending above where they start.

    Without S the equations of a core separate over its output index, and one Cholesky
    factorisation solves them all. With S, with padded rows (which must not count) and for cores
    too large to factor, a few steps of conjugate gradients take its place. `cores` are the start,
    at ranks that `clip_ranks` leaves alone; they may pad the matrix, by anything. A sweep goes to
    the last core and back to the first. Cores come back in float64, of equal scale.

    # P (out, in), damped G (in, in), (R_{n-1}, I_n, J_n, R_n), S (out, out)
    """
    start = [core.detach().double() for core in cores]
    problem = TTProblem.of(product, gram, curvature, start)
    fitted = orthogonalised(start)
    for _ in range(sweeps):
        fitted = _sweep(problem, fitted)
    fitted = balance_cores(fitted)
    # No step goes up, but their rounding may, once there is nothing left to gain.
    losses = [tt_loss(product, gram, found, curvature) for found in (start, fitted)]
    return fitted if bool(losses[1] <= losses[0]) else start


def tt_loss(
    product: Tensor, gram: Tensor | None, cores: Sequence[Tensor], curvature: Tensor | None = None
) -> Tensor:
    """Returns tr(S W G W^T) - 2 tr(S W P^T), in float64.

    # (out, in), (in, in), (R_{n-1}, I_n, J_n, R_n), (out, out)
    """
    rows, columns = product.shape
    weight = tt_to_matrix([core.double() for core in cores])[:rows, :columns]
    residual = (weight if gram is None else weight @ gram.double()) - 2 * product.double()
    left = weight if curvature is None else curvature.double() @ weight
    return (left * residual).sum()


@dataclass(frozen=True)
class TTProblem:
    """Problem that the cores are fitted to, float64; no moment stands for the identity."""

    product: Tensor  # P  # (out, in)
    gram: Tensor | None  # G  # (in, in)
    curvature: Tensor | None  # S  # (out, out)
    in_modes: tuple[int, ...]  # their product may be larger than `in`
    out_modes: tuple[int, ...]  # likewise

    @classmethod
    def of(
        cls, product: Tensor, gram: Tensor | None, curvature: Tensor | None, cores: Sequence[Tensor]
    ) -> TTProblem:
        """Checks the moments and takes them to float64."""
        moments = [None if m is None else m.detach().double() for m in (product, gram, curvature)]
        if not all(bool(torch.isfinite(moment).all()) for moment in moments if moment is not None):
            raise FitError("the moments of a layer hold NaN or infinity")
        in_modes, out_modes, _ = tt_shape(cores)
        return cls(product.detach().double(), moments[1], moments[2], in_modes, out_modes)

    @property
    def separates(self) -> bool:
        """True if every output index of a core has the same normal equations of its own."""
        return self.curvature is None and prod(self.out_modes) == len(self.product)

    @cached_property
    def scale(self) -> float:
        """Mean curvature of the loss over all elements of the weight."""
        return prod(float(m.diagonal().mean()) for m in (self.padded_gram, self.padded_curvature))

    @cached_property
    def padded_gram(self) -> Tensor:
        """G with zeros for padded inputs.  # (J, J)."""
        return self._padded(self.gram, self.product.shape[1], prod(self.in_modes))

    @cached_property
    def padded_curvature(self) -> Tensor:
        """S with zeros for padded outputs.  # (I, I)."""
        return self._padded(self.curvature, len(self.product), prod(self.out_modes))

    def _padded(self, moment: Tensor | None, size: int, whole: int) -> Tensor:
        moment = torch.eye(size).to(self.product) if moment is None else moment
        return pad(moment, (0, whole - size, 0, whole - size))

    def weighted(self, matrix: Tensor) -> Tensor:
        """S times a matrix, with zeros for all that is padded.  # (out, in) to (I, J)."""
        if self.curvature is not None:
            matrix = self.curvature @ matrix
        rows, columns = self.product.shape
        return pad(matrix, (0, prod(self.in_modes) - columns, 0, prod(self.out_modes) - rows))

    def normal(self, matrix: Tensor) -> Tensor:
        """S W G of a padded W, with zeros for all that is padded.  # (I, J)."""
        rows, columns = self.product.shape
        matrix = matrix[:rows, :columns]
        return self.weighted(matrix if self.gram is None else matrix @ self.gram)


def orthogonalised(cores: Sequence[Tensor]) -> list[Tensor]:
    """Makes all cores but the first right-orthogonal; the matrix stays as it is."""
    cores = list(cores)
    for n in range(len(cores) - 1, 0, -1):
        _pass_left(cores, n)
    return cores


def _pass_right(cores: list[Tensor], n: int) -> None:
    """Makes core n left-orthogonal and moves the rest of it into the next."""
    basis, rest = torch.linalg.qr(cores[n].flatten(0, 2))
    cores[n] = basis.unflatten(0, cores[n].shape[:3])
    cores[n + 1] = torch.tensordot(rest, cores[n + 1], 1)


def _pass_left(cores: list[Tensor], n: int) -> None:
    """Makes core n right-orthogonal and moves the rest of it into the one before."""
    basis, rest = torch.linalg.qr(cores[n].flatten(1).mT)
    cores[n] = basis.mT.unflatten(1, cores[n].shape[1:])
    cores[n - 1] = cores[n - 1] @ rest.mT


def _sweep(problem: TTProblem, cores: Sequence[Tensor]) -> list[Tensor]:
    """Updates the cores from the first to the last and back to the second."""
    cores = list(cores)
    end = torch.ones(1, 1, 1, 1).to(cores[0])
    rights = [end]
    for core in reversed(cores[1:]):
        rights.append(merge_cores(core, rights[-1]))
    lefts = [end]
    if len(cores) == 1:
        return [update_core(problem, end, cores[0], end)]
    for n in range(len(cores) - 1):
        cores[n] = update_core(problem, lefts[n], cores[n], rights.pop())
        _pass_right(cores, n)
        lefts.append(merge_cores(lefts[n], cores[n]))
    right = end
    for n in range(len(cores) - 1, 0, -1):
        cores[n] = update_core(problem, lefts[n], cores[n], right)
        _pass_left(cores, n)
        right = merge_cores(cores[n], right)
    return cores


def update_core(problem: TTProblem, left: Tensor, core: Tensor, right: Tensor) -> Tensor:
    """Moves one core to its optimum, or with conjugate gradients towards it; never away from it.

    # (1, o, p, a), (a, i, j, b), (b, x, r, 1)
    """
    # Solving for the change, not for the core, leaves alone what the moments do not see.
    wanted = pull_back(problem.weighted(problem.product), left, right)
    (a, i, j, b), (_, o, p, _), (_, x, r, _) = core.shape, left.shape, right.shape
    small = _Place(a, i, j, b, o, p, x, r).is_small
    matrix = normal_matrix(problem.padded_gram, left, right) if small else None
    if matrix is not None and problem.separates:
        residual = wanted - _from_rows(matrix @ _to_rows(core), core)
        return core + _matrix_solver(matrix)(residual)

    def image(tensor: Tensor) -> Tensor:
        return pull_back(problem.normal(tt_to_matrix([left, tensor, right])), left, right)

    solve = _block_solver(problem, left, right) if matrix is None else _matrix_solver(matrix)
    if not problem.separates:
        solve = _with_outputs(solve, problem.padded_curvature, left, right)
    residual = wanted - image(core)
    if bool(residual.norm() <= ROUNDING * wanted.norm()):
        return core  # what is left is rounding; where moments see nothing, steps along it are long
    steps = STEPS if problem.curvature is None else CURVED_STEPS
    return descend(image, core, residual, solve, steps, enough=ENOUGH, unseen=FLOOR * problem.scale)


def pull_back(matrix: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Contracts a dense matrix with all cores but one: the adjoint of building it from that core.

    # (o * i * x, p * j * r), (1, o, p, a), (b, x, r, 1) -> (a, i, j, b)
    """
    (_, o, p, a), (b, x, r, _) = left.shape, right.shape
    grid = matrix.reshape(o, len(matrix) // (o * x), x, p, matrix.shape[1] // (p * r), r)
    left, right = left[0], right[..., 0]
    if a * (o * p + b) * x * r <= b * (x * r + a) * o * p:
        return torch.einsum("aixjr,bxr->aijb", torch.einsum("opa,oixpjr->aixjr", left, grid), right)
    return torch.einsum("opa,oipjb->aijb", left, torch.einsum("oixpjr,bxr->oipjb", grid, right))


def normal_matrix(gram: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Builds the matrix of a core's normal equations, the same for all its output indices.

    # (p * j * r, p * j * r), (1, o, p, a), (b, x, r, 1) -> (a * j * b, a * j * b)
    """
    grid = _six(gram, left, right)
    before = torch.einsum("opa,oqc->pqac", left[0], left[0])
    after = torch.einsum("bxr,dxs->rsbd", right[..., 0], right[..., 0])
    (_, _, p, a), (b, _, r, _) = left.shape, right.shape
    if a * r <= p * b:  # what is left of G is smaller once contracted with the cores before
        half = torch.einsum("pqac,pjrqks->acjrks", before, grid)
        whole = torch.einsum("acjrks,rsbd->ajbckd", half, after)
    else:
        half = torch.einsum("pjrqks,rsbd->pjqkbd", grid, after)
        whole = torch.einsum("pqac,pjqkbd->ajbckd", before, half)
    return whole.flatten(3).flatten(0, 2)


def _six(gram: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Views G by input modes before, of and after a core: (p, j, r, p, j, r)."""
    p, r = left.shape[2], right.shape[2]
    return gram.view(2 * (p, len(gram) // (p * r), r))


def _to_rows(tensor: Tensor) -> Tensor:
    """Brings (a, i, j, b) to (a * j * b, i)."""
    return tensor.permute(0, 2, 3, 1).flatten(0, 2)


def _from_rows(rows: Tensor, like: Tensor) -> Tensor:
    a, i, j, b = like.shape
    return rows.view(a, j, b, i).permute(0, 3, 1, 2)


def _factor(matrices: Tensor) -> Tensor:
    """Factors normal matrices, raising their diagonals in place by a numerical floor."""
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    diagonal += FLOOR * diagonal.mean()
    factors, info = torch.linalg.cholesky_ex(matrices)
    return safe_cholesky(matrices) if bool(info.any()) else factors


def _matrix_solver(matrix: Tensor) -> Operator:
    """Solves the normal equations of all output indices with one factorisation."""
    factor = _factor(matrix)
    return lambda tensor: _from_rows(torch.cholesky_solve(_to_rows(tensor), factor), tensor)


def _block_solver(problem: TTProblem, left: Tensor, right: Tensor) -> Operator:
    """Solves with the blocks of the normal matrix that couple input indices j only."""
    grid = _six(problem.padded_gram, left, right)
    before = torch.einsum("opa,oqa->apq", left[0], left[0])
    after = torch.einsum("bxr,bxs->brs", right[..., 0], right[..., 0])
    half = torch.einsum("apq,pjrqks->ajrks", before, grid)
    factors = _factor(torch.einsum("ajrks,brs->abjk", half, after))

    def solve(tensor: Tensor) -> Tensor:
        return torch.cholesky_solve(tensor.permute(0, 3, 2, 1), factors).permute(0, 3, 2, 1)

    return solve


def _with_outputs(solve: Operator, curvature: Tensor, left: Tensor, right: Tensor) -> Operator:
    """Adds to a solver the mean curvature between the output indices of the core."""
    o, x = left.shape[1], right.shape[1]
    i = len(curvature) // (o * x)
    mean = torch.einsum("oixokx->ik", curvature.view(2 * (o, i, x)))
    factor = safe_cholesky(mean + 1e-6 * mean.diagonal().mean() * torch.eye(i).to(mean))

    def solve_both(tensor: Tensor) -> Tensor:
        solved = solve(tensor).movedim(1, 0)
        return torch.cholesky_solve(solved.flatten(1), factor).view(solved.shape).movedim(0, 1)

    return solve_both


def fit_macs(in_modes: Ints, out_modes: Ints, ranks: Ints, *, separates: bool = True) -> float:
    """Counts the multiply-adds of `fit_tt`, roughly."""
    places = _places(in_modes, out_modes, ranks)
    return SWEEPS * sum(place.visits * place.macs(separates=separates) for place in places)


def fit_bytes(in_modes: Ints, out_modes: Ints, ranks: Ints) -> int:
    """Bytes of the largest normal matrix of `fit_tt`, its factor, and what it is made from."""
    places = list(_places(in_modes, out_modes, ranks))
    return 8 * max(2 * place.side**2 + place.half if place.is_small else 0 for place in places)


class _Place(NamedTuple):
    """A core (a, i, j, b) between o outputs and p inputs before it, x and r after it."""

    a: int
    i: int
    j: int
    b: int
    o: int
    p: int
    x: int
    r: int
    visits: int = 1  # in a sweep

    @property
    def side(self) -> int:
        return self.a * self.j * self.b

    @property
    def half(self) -> int:
        """Numbers in G once contracted with the cores before, or with those after."""
        return (self.j * min(self.a * self.r, self.p * self.b)) ** 2

    @property
    def is_small(self) -> bool:
        """True if the normal matrix of the core can be built and factored."""
        largest = max((self.p * self.a) ** 2, (self.r * self.b) ** 2, self.half)
        return self.side <= SIDE and largest <= ROOM

    def macs(self, *, separates: bool) -> float:
        inputs = self.p * self.j * self.r
        dense = inputs * self.o * self.i * self.x
        pull = dense * min(self.a, self.b)
        total = float(pull)
        if self.is_small:
            a, p, b, r = self.a**2, self.p**2, self.b**2, self.r**2
            build = self.j**2 * min(a * p * r + a * r * b, p * r * b + p * a * b)
            total += build + self.side**3 / 6 + 2.0 * self.side**2 * self.i
        if not (self.is_small and separates):
            # Steps of conjugate gradients: build the matrix, multiply it by G, pull it back.
            total += STEPS * (2.0 * pull + dense * inputs)
        return total


def _places(in_modes: Ints, out_modes: Ints, ranks: Ints) -> Iterator[_Place]:
    bonds, last = (1, *ranks, 1), len(in_modes) - 1
    for n, (i, j) in enumerate(zip(out_modes, in_modes, strict=True)):
        before = prod(out_modes[:n]), prod(in_modes[:n])
        behind = prod(out_modes[n + 1 :]), prod(in_modes[n + 1 :])
        yield _Place(bonds[n], i, j, bonds[n + 1], *before, *behind, 2 if 0 < n < last else 1)
