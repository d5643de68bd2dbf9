"""Fits of slices in the norm of the data, and of any weight in the norm of the model's loss.

Everything is fitted and compared in float64, which not all devices have; passes have dtypes of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import log2

import torch
from torch import Tensor

from tcompress.linalg.moments import (
    Operator,
    column_gram,
    conjugate_gradients,
    large_singular_values,
    ridge_level,
    safe_cholesky,
    with_ridge,
)
from tcompress.linalg.transforms import Stages, build_blocks, mix_tubes, rotate


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: `mps` does not, nor do all `xpu`."""
    return device.type in ("cpu", "cuda", "meta") or _has_float64(device.type)


@cache
def _has_float64(kind: str) -> bool:
    try:
        torch.ones(1, dtype=torch.float64, device=kind).add(1)
    except (RuntimeError, TypeError):
        return False
    return True


def in_float64(tensor: Tensor) -> Tensor:
    """Copy a tensor to float64, on the CPU where its own device has none."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).double()


def compute_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """Returns the dtype to compute in: that of an active autocast, which float64 has none of."""
    exact = stored == torch.float64
    if not exact and has_autocast(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return stored


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_autocast(kind: str) -> bool:
    """Return whether devices of a kind have autocast; torch < 2.13 cannot ask when compiled."""
    return torch.amp.is_autocast_available(kind)


# Slices of the t-product: complex matrices in conjugate pairs, stored as real numbers.
#
# In the real Fourier basis (cos0, cos1, sin1, ..., [cos p/2]) a complex slice A + iB of frequency k
# maps the coefficients (c, s) to (A c + B s, A s - B c). Stored are A and B at the places of c and
# s, and a single real matrix for the real frequencies: d^2 / p numbers, as for a real transform.


def _pairs(count: int) -> tuple[list[int], list[int], list[int]]:
    """Places of cosines, of sines, and of the real frequencies."""
    pairs = (count - 1) // 2
    real = [0] if count % 2 else [0, count - 1]
    return [2 * k + 1 for k in range(pairs)], [2 * k + 2 for k in range(pairs)], real


def expand_conjugate_slices(slices: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Expands stored slices to what a real product applies.  # (..., p, c, a)."""
    count = slices.shape[-3]
    cosines, sines, _ = _pairs(count)
    place, partner, swap = ([*range(count)] for _ in range(3))
    sign = [0.0] * count
    for c, s in zip(cosines, sines, strict=True):
        place[s], partner[c] = c, s
        sign[c], sign[s] = 1.0, -1.0
        swap[c], swap[s] = s, c
    signs = slices.new_tensor(sign)[:, None, None]
    return slices[..., place, :, :], slices[..., partner, :, :] * signs, swap


def fit_conjugate_slices(target: Tensor, gram: Tensor | None, count: int) -> Tensor:
    """Regresses the complex slices on moments, both in the real Fourier basis.

    # (out, d), (d, d) -> (p, out / p, d / p)
    """
    cosines, sines, real = _pairs(count)
    t = target.unflatten(1, (count, -1)).unflatten(0, (count, -1)).transpose(1, 2)  # (p, p, c, a)
    out = t.new_empty(count, *t.shape[2:])
    same, mixed = t[cosines, cosines] + t[sines, sines], t[cosines, sines] - t[sines, cosines]
    right = torch.cat([same, mixed], -1)
    if gram is None:
        out[real], theta = t[real, real], right / 2
    else:
        g = gram.unflatten(1, (count, -1)).unflatten(0, (count, -1)).transpose(1, 2)
        same = g[cosines, cosines] + g[sines, sines]
        mixed = g[cosines, sines] - g[sines, cosines]
        normal = torch.cat([torch.cat([same, mixed], -1), torch.cat([mixed.mT, same], -1)], -2)
        theta = torch.cholesky_solve(right.mT, safe_cholesky(normal)).mT
        out[real] = torch.cholesky_solve(t[real, real].mT, safe_cholesky(g[real, real])).mT
    out[cosines], out[sines] = theta.chunk(2, -1)
    return out


# Fits of L-product slices: closed form for the slices, gradient ascent for the transform.
#
# A slice structure maps slice k of its (transformed) input to slice k of its (transformed) output.
# Its least-squares optimum is one regression per slice, so the optimum's value is a smooth function
# of the transform, which is fitted first.

SMALL = 512  # widths up to which a fit of a rotation is fastest on one thread


def diagonal_blocks(matrix: Tensor, count: int) -> Tensor:
    """Returns the diagonal blocks of a matrix cut into `count` rows and columns of blocks.

    # (count * c, count * a) -> (p, c, a)
    """
    grid = matrix.unflatten(1, (count, -1)).unflatten(0, (count, -1))  # (p, c, p, a)
    return grid.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def fit_slices(target: Tensor, gram: Tensor | None, count: int) -> Tensor:
    """Regresses every output slice on its own input slice: (W C)_kk G_kk^-1.

    # (out, d), (d, d) -> (p, out / p, d / p)
    """
    slices = diagonal_blocks(target, count)
    if gram is None:
        return slices.contiguous()
    return torch.cholesky_solve(slices.mT, safe_cholesky(diagonal_blocks(gram, count))).mT


@dataclass(frozen=True)
class Problem:
    """One weight that shares a transform with others."""

    target: Tensor  # W C  # (out, d)
    gram: Tensor  # G  # (d, d)
    scale: float  # E||W x||^2, so that every weight counts alike


def fit_rotation(
    problems: Sequence[Problem],
    stages: Stages,
    *,
    count: int,
    z: Tensor,
    output: bool,
    steps: int = 100,
) -> Tensor:
    """Fits the generators of a staged rotation by ascent on the variance that slices explain.

    The rotation, of the outputs or of the inputs, is followed by the tube transform z (p, p).
    Weights that share an input have one G.
    """
    device = problems[0].gram.device
    turn = partial(turn_rows, z=z.to(device, torch.float32), count=count)
    objective = (_output_objective if output else _input_objective)(problems, count, turn)
    shape = stages.generators_shape
    generators = torch.zeros(shape, dtype=torch.float32, device=device, requires_grad=True)
    optimiser = torch.optim.Adam([generators], lr=0.08)
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
    """Transform the last axis of a matrix as activations are transformed.

    # (rows, d), (stages, groups, b, b), (p, p)
    """
    return mix_tubes(rotate(matrix, blocks), z) if count > 1 else rotate(matrix, blocks)


Turn = Callable[[Tensor, Tensor], Tensor]


def _input_objective(problems: Sequence[Problem], count: int, turn: Turn) -> Operator:
    """Sum over slices of tr(E_k^T G_kk^-1 E_k), E_k = E[x'_k (W x)_k^T]."""
    root = _range(problems[0].gram)
    gram = (problems[0].gram / root**2).float()
    targets = [(problem.target / problem.scale**0.5 / root).float() for problem in problems]
    # Slice by slice, the outputs of all weights.  # (p * o, d)
    stacked = torch.cat([rows.unflatten(0, (count, -1)) for rows in targets], 1).flatten(0, 1)

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


def _output_objective(problems: Sequence[Problem], count: int, turn: Turn) -> Operator:
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


# Fits in the norm of the model's loss: moments of the inputs and of the outputs' gradients.
#
# With S = E[d d^T] over gradients d at the output of a layer (label-free Gauss-Newton curvature)
# and the moments of its input, replacing W by V changes what the model computes, to second order,
# by
#
#     tr(S V G V^T) - 2 tr(S V P^T) + const,    P = W C,    const = tr(S W D W^T).
#
# The value is a predicted loss: it compares across layers and structures. S couples all outputs of
# a layer, so slices have joint normal equations. G and S are taken as damped.


def damped_curvature(curvature: Tensor, damping: float) -> Tensor:
    """Adds a multiple of the identity to S, which is often nearly singular.  # (..., out, out).

    Outputs that the gradients never reached are then fitted as the inputs alone would have them.
    """
    return with_ridge(curvature, ridge_level(curvature, damping))


def curved_loss(fitted: Tensor, product: Tensor, gram: Tensor, curvature: Tensor) -> Tensor:
    """Returns tr(S V G V^T) - 2 tr(S V P^T): the predicted loss without its constant.

    # V and P = W C (..., out, d), G (..., d, d), S (..., out, out) -> (...)
    """
    return (curvature @ fitted).mul(fitted @ gram - 2 * product).sum((-2, -1))


def singular_values(matrix: Tensor) -> Tensor:
    """Returns the singular values of a matrix, float64, the largest first.

    # (..., out, d) -> (..., min(out, d))
    """
    if (values := large_singular_values(matrix)) is not None:
        return values
    # The squares are what counts: those of the smaller side are as exact, and much faster.
    tall = matrix.shape[-2] >= matrix.shape[-1]
    squares = torch.linalg.eigvalsh(column_gram(matrix if tall else matrix.mT))
    return squares.clamp_min(0).sqrt().flip(-1)


def lowrank_losses(spectrum: Tensor, constant: Tensor | float) -> Tensor:
    """Returns the predicted loss of the best factors of ranks 0, 1, ..., n, never growing.

    `constant`, tr(S W D W^T), is lost without any weight; it adds what none can reach.
    """
    saved = spectrum.square()
    tails = torch.nn.functional.pad(saved.flip(-1).cumsum(-1).flip(-1), (0, 1))
    missed = torch.as_tensor(constant, dtype=tails.dtype, device=tails.device) - saved.sum(-1)
    return tails + missed.clamp_min(0)[..., None]


def fit_slices_curved(
    product: Tensor,
    gram: Tensor,
    count: int,
    curvature: Tensor,
    start: Tensor | None = None,
    *,
    iterations: int = 50,
    tolerance: float = 1e-6,
) -> Tensor:
    """Fits all slices at once in the norm of both moments.

    The optimum solves sum_l S_kl V_l G_lk = (S P)_kk for every slice k. Slice by slice it would
    read S_kk V_k G_kk, whose inverse preconditions the conjugate gradients. They start from the
    slices of `fit_slices`, blind to S, if no others are given, and end no worse.

    # W C (out, d), damped G (d, d) and S (out, out), transformed -> (p, out / p, d / p)
    """
    inputs = safe_cholesky(diagonal_blocks(gram, count))
    outputs = safe_cholesky(diagonal_blocks(curvature, count))
    grams = gram.unflatten(0, (count, -1))  # (p, a, d)
    curves = curvature.unflatten(0, (count, -1))  # (p, c, out)

    def apply(slices: Tensor) -> Tensor:
        turned = (slices @ grams).flatten(0, 1)  # V G of the block-diagonal V  # (out, d)
        return curves @ turned.unflatten(1, (count, -1)).transpose(0, 1)

    def precondition(slices: Tensor) -> Tensor:
        half = torch.cholesky_solve(slices, outputs)
        return torch.cholesky_solve(half.mT, inputs).mT

    wanted = curves @ product.unflatten(1, (count, -1)).transpose(0, 1)  # (S P)_kk
    first = fit_slices(product, gram, count) if start is None else start
    return conjugate_gradients(
        apply, wanted, first, precondition=precondition, iterations=iterations, tolerance=tolerance
    )
