"""Fits of L-product slices: closed form for the slices, gradient ascent for the transform.

A slice structure maps slice k of its (transformed) input to slice k of its (transformed) output.
Its least-squares optimum is one regression per slice, so the optimum's value is a smooth function
of the transform, which is fitted first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import log2

import torch
from torch import Tensor

from tcompress.linalg.lowrank import balanced, best_factors, fit_lowrank
from tcompress.linalg.moments import safe_cholesky
from tcompress.linalg.rotation import Stages, build_blocks, mix_tubes, rotate

SMALL = 512  # widths up to which a fit of a rotation is fastest on one thread


def diagonal_blocks(matrix: Tensor, count: int) -> Tensor:
    """Returns the diagonal blocks of a matrix cut into `count` rows and columns of blocks.

    Args:
        matrix: Any matrix.  # (count * c, count * a)
        count: Number of slices p.

    Returns:
        A view.  # (p, c, a)
    """
    grid = matrix.unflatten(1, (count, -1)).unflatten(0, (count, -1))  # (p, c, p, a)
    return grid.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def fit_slices(target: Tensor, gram: Tensor, count: int) -> Tensor:
    """Regresses every output slice on its own input slice.

    Args:
        target: W C in transformed coordinates.  # (out, d)
        gram: G in transformed coordinates.  # (d, d)
        count: Number of slices p.

    Returns:
        (W C)_kk G_kk^-1 for every slice k.  # (p, out / p, d / p)
    """
    factor = safe_cholesky(diagonal_blocks(gram, count))
    return torch.cholesky_solve(diagonal_blocks(target, count).mT, factor).mT


def fit_truncated_slices(
    target: Tensor, gram: Tensor | None, count: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Fits the truncated L-SVD: every slice keeps its leading `rank` singular triplets.

    Args:
        target: W C in transformed coordinates.  # (out, d)
        gram: G in transformed coordinates, or None for the identity.  # (d, d)
        count: Number of slices p.
        rank: Tubal rank.

    Returns:
        Left (p, out / p, rank) and right (p, rank, d / p) factors of the slices.
    """
    slices = diagonal_blocks(target, count)
    if gram is None:
        return balanced(*best_factors(slices, rank))
    return fit_lowrank(slices, diagonal_blocks(gram, count), rank)


@dataclass(frozen=True)
class Problem:
    """One weight that shares a transform with others.

    Attributes:
        target: W C.  # (out, d)
        gram: G.  # (d, d)
        scale: E||W x||^2, so that every weight counts alike.
    """

    target: Tensor
    gram: Tensor
    scale: float


def fit_rotation(
    problems: Sequence[Problem],
    stages: Stages,
    *,
    count: int,
    z: Tensor,
    output: bool,
    steps: int = 100,
    rate: float = 0.08,
) -> Tensor:
    """Fits the generators of a staged rotation by ascent on the variance that slices explain.

    Args:
        problems: The weights that share the transform. Those that share an input have one G.
        stages: Shape of the rotation.
        count: Number of slices p.
        z: Tube transform that follows the rotation.  # (p, p)
        output: True if the transform acts on the outputs, False on the inputs.
        steps: Adam steps with a cosine schedule.
        rate: Learning rate in the generators.

    Returns:
        Generators.  # stages.generators_shape
    """
    device = problems[0].gram.device
    turn = partial(turn_rows, z=z.to(device, torch.float32), count=count)
    objective = (_output_objective if output else _input_objective)(problems, count, turn)
    generators = torch.zeros(stages.generators_shape, device=device)
    generators.requires_grad_()
    optimiser = torch.optim.Adam([generators], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    with _threads_for(stages.features), torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            loss = -objective(build_blocks(generators, stages.block).float())
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    return generators.detach().double()


@contextmanager
def _threads_for(features: int) -> Iterator[None]:
    """Computes on one thread where the many small products would mostly wait for each other."""
    before = torch.get_num_threads()
    if features <= SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def turn_rows(matrix: Tensor, blocks: Tensor, z: Tensor, count: int) -> Tensor:
    """Takes the last axis of a matrix to transformed coordinates, as activations are taken.

    Args:
        matrix: Rows in host coordinates.  # (rows, d)
        blocks: Stages of the rotation.  # (stages, groups, b, b)
        z: Tube transform that follows.  # (p, p)
        count: Number of slices p.
    """
    return mix_tubes(rotate(matrix, blocks), z) if count > 1 else rotate(matrix, blocks)


Turn = Callable[[Tensor, Tensor], Tensor]


def _input_objective(
    problems: Sequence[Problem], count: int, turn: Turn
) -> Callable[[Tensor], Tensor]:
    """Sum over slices of tr(E_k^T G_kk^-1 E_k), E_k = E[x'_k (W x)_k^T]."""
    root = _range(problems[0].gram)
    gram = (problems[0].gram / root**2).float()
    targets = [(problem.target / problem.scale**0.5 / root).float() for problem in problems]
    rows = torch.cat([target.unflatten(0, (count, -1)) for target in targets], 1)
    stacked = rows.flatten(0, 1)  # slice by slice, the outputs of all weights  # (p * o, d)

    def explained(blocks: Tensor) -> Tensor:
        turned = turn(turn(gram, blocks).mT, blocks)
        grams = diagonal_blocks(turned, count)
        factor, info = torch.linalg.cholesky_ex(grams)
        if bool(info.any()):
            factor = safe_cholesky(grams)
        cross = diagonal_blocks(turn(stacked, blocks), count)  # (p, o, a)
        half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
        return half.square().sum() / len(problems)

    return explained


def _range(gram: Tensor) -> float:
    """A power of two whose square is about the size of G: dividing by it rounds nothing."""
    size = float(gram.diagonal().mean())
    return 2.0 ** round(log2(size) / 2) if size > 0 else 1.0


def _output_objective(
    problems: Sequence[Problem], count: int, turn: Turn
) -> Callable[[Tensor], Tensor]:
    """Sum over slices of tr(T_k^T M_k T_k), M_k = E_k^T G_kk^-1 E_k, E_k = E[x'_k (W x)^T]."""
    halves = []
    for problem in problems:
        factor = safe_cholesky(diagonal_blocks(problem.gram, count))
        cross = (problem.target / problem.scale**0.5).mT.unflatten(0, (count, -1))  # (p, a, out)
        halves.append(torch.linalg.solve_triangular(factor, cross, upper=False).float())
    stacked = torch.cat(halves, 1).flatten(0, 1)  # slice by slice: rows of all problems

    def explained(blocks: Tensor) -> Tensor:
        return diagonal_blocks(turn(stacked, blocks), count).square().sum() / len(problems)

    return explained
