"""Rounding in the norm of the moments: what one column loses, the columns after it make up for.

Frantar et al., GPTQ, arXiv:2210.17323. Rows are independent of each other; leading dimensions are
worked on together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tcompress.linalg.fits import damped_curvature
from tcompress.linalg.rounding import GROUP, Rounding, code_bounds, matrix_shape, quantize, rounded

_DAMPING = 0.01  # ridge on the moments, in units of their mean diagonal


def rounded_in_norm(weight: Tensor, gram: Tensor, rounding: Rounding) -> Tensor:
    """Round a weight to few bits so that its product with the inputs changes little.

    Scales are those of `quantize` for what is left of a group when its turn comes. Where all
    numbers of a row have one scale, or a row is shorter than a group, nothing is won by it, and
    every number is rounded to nearest.

    Args:
        weight: Any leading dimensions.  # (..., out, in), floating
        gram: Moments of the inputs, symmetric, positive semidefinite.  # (..., in, in)
        rounding: Bits, and the numbers that share a scale.

    Returns:
        Numbers on the grid, in the weight's dtype: to round them again changes nothing.
    """
    size, group = weight.shape[-1], rounding.group
    if group is None or matrix_shape(weight.shape)[1] != size:
        return rounded(weight, rounding)
    left = weight.double().clone()
    lower = torch.linalg.cholesky(damped_curvature(gram.double(), _DAMPING))
    # Row i says what the columns after i take over.
    upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    grid = torch.empty_like(left)
    lowest, highest = code_bounds(rounding.bits)
    for start in range(0, size, group):
        part = slice(start, min(start + group, size))
        block, factor = left[..., part], upper[..., part, part]  # a view: changes stay
        width = block.shape[-1]
        rows = pad(block.reshape(-1, width).float(), (0, max(0, GROUP - width)))
        _, scale = quantize(rows, rounding.bits)
        scale = scale.double().reshape(block.shape[:-1])
        step = torch.where(scale == 0, 1.0, scale)
        errors = torch.empty_like(block)
        for column in range(width):
            codes = (block[..., column] / step).round().clamp(lowest, highest)
            value = codes * scale
            grid[..., start + column] = value
            error = (block[..., column] - value) / factor[..., column, column, None]
            errors[..., column] = error
            block[..., column:] -= error[..., None] * factor[..., None, column, column:]
        left[..., part.stop :] -= errors @ upper[..., part, part.stop :]
    return grid.to(weight.dtype)


def rounded_factors(
    product: Tensor,
    gram: Tensor,
    factors: tuple[Tensor, Tensor],
    roundings: tuple[Rounding | None, Rounding | None],
) -> tuple[Tensor, Tensor]:
    """Round two factors of W = A B: first B, then an A that is fitted to the rounded B.

    Args:
        product: W G, or the cross moments that the fit aims at.  # (..., out, in)
        gram: Moments of the inputs.  # (..., in, in)
        factors: A (..., out, rank) and B (..., rank, in).
        roundings: Those of A and of B; None for one that stays as it is.
    """
    a, b = (factor.double() for factor in factors)
    if roundings[1] is not None:
        b = rounded_in_norm(b, gram, roundings[1])
    inner = b @ gram.double() @ b.mT
    a = torch.linalg.solve(damped_curvature(inner, 1e-10), b @ product.double().mT).mT
    return (a if roundings[0] is None else rounded_in_norm(a, inner, roundings[0])), b
