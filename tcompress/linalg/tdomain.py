"""Slices of the t-product: complex matrices in conjugate pairs, stored as real numbers.

In the real Fourier basis (cos0, cos1, sin1, ..., [cos p/2]) a complex slice A + iB of frequency k
maps the coefficients (c, s) to (A c + B s, A s - B c). Stored are A and B at the places of c and
s, and a single real matrix for the real frequencies: d^2 / p numbers, as for a real transform.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcompress.linalg.moments import safe_cholesky


def _pairs(count: int) -> tuple[list[int], list[int], list[int]]:
    """Places of cosines, of sines, and of the real frequencies."""
    pairs = (count - 1) // 2
    real = [0] if count % 2 else [0, count - 1]
    return [2 * k + 1 for k in range(pairs)], [2 * k + 2 for k in range(pairs)], real


def expand_conjugate_slices(slices: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Expands stored slices to what a real product applies.

    Args:
        slices: Stored numbers.  # (..., p, c, a)

    Returns:
        Slices for the own coefficients, slices for the partner's, both (..., p, c, a), and the
        place of every coefficient's partner.
    """
    count = slices.shape[-3]
    cosines, sines, real = _pairs(count)
    place, sign, partner = [0] * count, [0.0] * count, [0] * count
    swap = list(range(count))
    for c, s in zip(cosines, sines, strict=True):
        place[c] = place[s] = c
        partner[c] = partner[s] = s
        sign[c], sign[s] = 1.0, -1.0
        swap[c], swap[s] = s, c
    for index in real:
        place[index] = partner[index] = index
    signs = slices.new_tensor(sign)[:, None, None]
    return slices[..., place, :, :], slices[..., partner, :, :] * signs, swap


def fit_conjugate_slices(target: Tensor, gram: Tensor | None, count: int) -> Tensor:
    """Regresses the complex slices on moments, both in the real Fourier basis.

    Args:
        target: W C.  # (out, d)
        gram: G, or None for the identity.  # (d, d)
        count: Number of slices p.

    Returns:
        Stored numbers.  # (p, out / p, d / p)
    """
    cosines, sines, real = _pairs(count)
    t = target.unflatten(1, (count, -1)).unflatten(0, (count, -1)).transpose(1, 2)  # (p, p, c, a)
    out = torch.empty(count, *t.shape[2:], dtype=t.dtype, device=t.device)
    right = torch.cat(
        [t[cosines, cosines] + t[sines, sines], t[cosines, sines] - t[sines, cosines]], -1
    )
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
