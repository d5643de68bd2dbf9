"""Independent, literal forms of the L-product for tests: plain loops over the slices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import settings
from torch import Tensor
from torch.testing import assert_close

from tcompress.linalg import complex_dft, fixed_transform

# Beside the fixed real ones: complex, scaled unitary, and a Z that is only invertible.
TRANSFORMS = ("dct", "identity", "hadamard", "random", "t-product", "unitary-dft", "invertible")

# Repeatable, and no clock: the first example pays for imports.
quick = settings(deadline=None, derandomize=True, max_examples=40)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Seeded float64 normal numbers."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def transform(kind: str, p: int) -> Tensor:
    """Build one of `TRANSFORMS`."""
    if kind == "invertible":  # condition number 3, not a multiple of an orthogonal matrix
        left, right = fixed_transform("random", p, 1), fixed_transform("random", p, 2)
        return left @ torch.linspace(0.5, 1.5, p, dtype=torch.float64).diag() @ right
    if kind in ("t-product", "unitary-dft"):
        return complex_dft(p, unitary=kind == "unitary-dft")
    return fixed_transform(kind, p)


def per_slice(function: Callable[..., Tensor], z: Tensor, *tensors: Tensor) -> Tensor:
    """Stack function(slices) over the slices of the transform and map it back, in loops."""
    p = len(z)
    hats = [[combine(z[k], a) for k in range(p)] for a in tensors]
    result = torch.stack([function(*(hat[k] for hat in hats)) for k in range(p)], dim=2)
    inverse = torch.linalg.inv(z)
    back = torch.stack([combine(inverse[k], result) for k in range(p)], dim=2)
    if back.is_complex() and not any(a.is_complex() for a in tensors):
        assert_close(back.imag, torch.zeros_like(back.imag), rtol=0, atol=1e-12)
        return back.real
    return back


def combine(row: Tensor, a: Tensor) -> Tensor:
    """Sum of the frontal slices weighted by one row of a transform."""
    weighted = [row[j] * a[:, :, j] for j in range(a.shape[2])]
    return torch.stack(weighted).sum(0)


def near(actual: Tensor, expected: Tensor) -> None:
    """Compare in float64, dtype and shape included."""
    assert_close(actual, expected, rtol=1e-10, atol=1e-11)
