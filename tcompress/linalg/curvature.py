"""Fits in the norm of the model's loss: moments of the inputs and of the outputs' gradients.

With S = E[d d^T] over gradients d at the output of a layer (label-free Gauss-Newton curvature)
and the moments of its input, replacing W by V changes what the model computes, to second order, by

    tr(S V G V^T) - 2 tr(S V P^T) + const,    P = W C,    const = tr(S W D W^T).

The value is a predicted loss: it compares across layers and structures. S couples all outputs of
a layer, so slices have joint normal equations. G and S are taken as damped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcompress.linalg.lowrank import balanced, best_factors
from tcompress.linalg.moments import safe_cholesky
from tcompress.linalg.slices import diagonal_blocks, fit_slices
from tcompress.linalg.solve import conjugate_gradients


def damped_curvature(curvature: Tensor, damping: float) -> Tensor:
    """Adds a multiple of the identity to S, which is often nearly singular.

    Outputs that the gradients never reached are then fitted as the inputs alone would have them.

    Args:
        curvature: S.  # (..., out, out)
        damping: Ridge as a multiple of the mean diagonal element of S; of 1 where S is zero.
    """
    mean = curvature.diagonal(dim1=-2, dim2=-1).mean(-1)
    level = damping * torch.where(mean > 0, mean, torch.ones_like(mean))
    eye = torch.eye(curvature.shape[-1], dtype=curvature.dtype, device=curvature.device)
    return curvature + level[..., None, None] * eye


def curved_loss(fitted: Tensor, product: Tensor, gram: Tensor, curvature: Tensor) -> Tensor:
    """Returns tr(S V G V^T) - 2 tr(S V P^T): the predicted loss without its constant.

    Args:
        fitted: V.  # (..., out, d)
        product: P = W C, the dense weight times the cross moment.  # (..., out, d)
        gram: G.  # (..., d, d)
        curvature: S.  # (..., out, out)

    Returns:
        One number per weight.  # (...)
    """
    return (curvature @ fitted).mul(fitted @ gram - 2 * product).sum((-2, -1))


def curved_constant(weight: Tensor, dense: Tensor, curvature: Tensor) -> Tensor:
    """Returns tr(S W D W^T), which added to `curved_loss` makes it the whole predicted loss.

    Args:
        weight: Dense weight W.  # (..., out, d)
        dense: D, the moment of the dense inputs, damped as G and C are.  # (..., d, d)
        curvature: S.  # (..., out, out)

    Returns:
        One number per weight.  # (...)
    """
    return (curvature @ weight).mul(weight @ dense).sum((-2, -1))


def fit_lowrank_curved(
    product: Tensor, gram: Tensor, curvature: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Fits A B in the norm of both moments: closed form.

    With G = L L^T and S = K K^T the optimum is the truncated SVD of K^T (W C) L^-T, brought back
    by K^-T and L^-1. Any other square roots would give the same product.

    Args:
        product: W C.  # (..., out, d)
        gram: G, damped.  # (..., d, d)
        curvature: S, damped.  # (..., out, out)
        rank: Rank r.

    Returns:
        A (out, r) and B (r, d), of equal scale.
    """
    inputs, outputs = safe_cholesky(gram), safe_cholesky(curvature)
    left, right = best_factors(_whitened(product, inputs, outputs), rank)
    left = torch.linalg.solve_triangular(outputs.mT, left, upper=True)
    # B = right L^-1, that is L^T B^T = right^T.
    return balanced(left, torch.linalg.solve_triangular(inputs.mT, right.mT, upper=True).mT)


def lowrank_spectrum(product: Tensor, gram: Tensor, curvature: Tensor) -> Tensor:
    """Returns what every further rank saves: the squares of these values are predicted losses.

    Args:
        product: W C.  # (..., out, d)
        gram: G, damped.  # (..., d, d)
        curvature: S, damped.  # (..., out, out)

    Returns:
        Singular values of K^T (W C) L^-T, largest first.  # (..., min(out, d))
    """
    whitened = whitened_product(product, gram, curvature)
    # The squares are what counts: those of the smaller side are as exact, and much faster.
    tall = whitened.shape[-2] >= whitened.shape[-1]
    squares = torch.linalg.eigvalsh(whitened.mT @ whitened if tall else whitened @ whitened.mT)
    return squares.clamp_min(0).sqrt().flip(-1)


def whitened_product(product: Tensor, gram: Tensor, curvature: Tensor) -> Tensor:
    """Returns K^T (W C) L^-T with G = L L^T and S = K K^T: errors are plain sums of squares there.

    Args:
        product: W C.  # (..., out, d)
        gram: G, damped.  # (..., d, d)
        curvature: S, damped.  # (..., out, out)
    """
    return _whitened(product, safe_cholesky(gram), safe_cholesky(curvature))


def lowrank_losses(spectrum: Tensor, constant: Tensor | float | None = None) -> Tensor:
    """Returns the predicted loss of the best factors of every rank.

    Args:
        spectrum: From `lowrank_spectrum`.  # (..., n)
        constant: From `curved_constant`; it adds what no weight at all can reach. Without it that
            part is taken as zero, as it is where the layer's inputs are those of the dense model.

    Returns:
        Losses of ranks 0, 1, ..., n, never growing.  # (..., n + 1)
    """
    saved = spectrum.square()
    tails = torch.nn.functional.pad(saved.flip(-1).cumsum(-1).flip(-1), (0, 1))
    if constant is None:
        return tails
    missed = torch.as_tensor(constant, dtype=tails.dtype, device=tails.device) - saved.sum(-1)
    return tails + missed.clamp_min(0)[..., None]


def _whitened(product: Tensor, inputs: Tensor, outputs: Tensor) -> Tensor:
    """K^T P L^-T."""
    return torch.linalg.solve_triangular(inputs, (outputs.mT @ product).mT, upper=False).mT


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
    read S_kk V_k G_kk, whose inverse preconditions the conjugate gradients.

    Args:
        product: W C in transformed coordinates.  # (out, d)
        gram: G in transformed coordinates, damped.  # (d, d)
        count: Number of slices p.
        curvature: S in transformed coordinates, damped.  # (out, out)
        start: First slices; default `fit_slices`, blind to S.  # (p, out / p, d / p)
        iterations: Most steps to take.
        tolerance: Relative residual at which to stop.

    Returns:
        Slices whose predicted loss is at most that of the start.  # (p, out / p, d / p)
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
        apply,
        wanted,
        first,
        precondition=precondition,
        iterations=iterations,
        tolerance=tolerance,
    )
