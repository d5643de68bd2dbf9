"""Sinusoidal positions whose frequencies are scaled slice by slice.

Reference: "Structured Multidimensional Representation Learning for Large Language Models"
(arXiv:2603.05727), Definition 13 and Remark 4.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scaling = Literal["standard", "linear", "exponential", "harmonic"]


def slice_scales(p: int, scaling: Scaling) -> Tensor:
    """Returns the factor of the frequencies in each slice, float64.  # (p,)."""
    k = torch.arange(1, p + 1, dtype=torch.float64)
    if scaling == "linear":
        return k / p
    if scaling == "exponential":
        return torch.exp2((k - 1) / max(p - 1, 1))
    return k if scaling == "harmonic" else torch.ones_like(k)


def slice_positions(tokens: int, width: int, p: int, scaling: Scaling) -> Tensor:
    """Builds a table of positions, float64.

    Feature j of slice k, both from 1, of token t from 1 is sin or cos (j odd or even) of
    t alpha_k / 10000^(2 floor((j - 1) / 2) / d_s), with d_s = width / p.

    Args:
        tokens: Rows of the table.
        width: Features, which p divides; slices are runs of them.
        p: Number of slices.
        scaling: How the frequencies of the slices differ.

    Returns:
        The table.  # (tokens, width)
    """
    features = width // p
    index = torch.arange(features)
    rates = 10000.0 ** (-2.0 * (index // 2).double() / features)  # (d_s,)
    time = torch.arange(1, tokens + 1, dtype=torch.float64)
    angles = time[:, None, None] * slice_scales(p, scaling)[:, None] * rates  # (T, p, d_s)
    return torch.where(index % 2 == 0, angles.sin(), angles.cos()).reshape(tokens, width)
