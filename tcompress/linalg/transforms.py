"""Fixed p x p transforms Z for the mode-3 transform of the L-product."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import numpy as np
import scipy.fft
import scipy.linalg
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcompress.errors import InputError

# Everything is built in numpy and handed to torch at the very end, so that neither a default
# device (models are built under `torch.device("meta")`) nor a default dtype can change a transform.
Matrix = NDArray[np.float64]


def fixed_transform(kind: str, size: int, seed: int = 0) -> Tensor:  # (p, p)
    """Build a fixed orthogonal transform Z; its rows are the basis vectors.

    | kind       | basis                                                               | sizes     |
    |------------|---------------------------------------------------------------------|-----------|
    | `dct`      | orthonormal DCT-II, the transform of the paper's experiments        | any       |
    | `identity` | no mixing: slices are the contiguous blocks themselves              | any       |
    | `haar`     | Haar wavelets: the mean, then differences from coarse to fine       | power of 2|
    | `hadamard` | Sylvester's Hadamard matrix divided by sqrt(p)                      | power of 2|
    | `random`   | Q of a seeded Gaussian matrix's QR, signs such that diag(R) > 0     | any       |
    | `dft`      | real Fourier basis cos0, cos1, sin1, cos2, sin2, ..., [cos p/2]     | any       |

    `dft` is real: cos_k[j] = sqrt(2/p) cos(2 pi j k / p), likewise sin_k; cos0 and, for even p, the
    last row cos p/2 carry sqrt(1/p). With c_k and s_k the coefficients of a real tube, its unitary
    DFT is c_0 at 0, (c_k - i s_k) / sqrt(2) at k, the conjugate of that at p - k, and c_{p/2} at
    p/2. As a *real* Z it defines its own L-product; the t-product multiplies the complex numbers
    (see `tdomain.py`).

    Args:
        kind: One of `FIXED_TRANSFORMS`.
        size: The number of slices p.
        seed: Seed of `random`, at least 0; the other kinds ignore it. Neither reads nor changes
            any global random state.

    Returns:
        Z of shape (p, p), float64, on the CPU, with Z Z^T = I.

    Raises:
        InputError: The kind is unknown, no such transform of this size exists, or the seed is
            negative.

    Reference: arXiv:2603.05727, section 4.5 and section 5.2.
    """
    reason = check_transform(kind, size)
    if reason is not None:
        raise InputError(reason, hint="choose another number of slices, or `dct`, which takes any")
    if seed < 0:
        raise InputError(f"`seed` of a transform must be at least 0, found {seed}")
    return torch.from_numpy(np.ascontiguousarray(_BUILDERS[kind](size, seed)))


def check_transform(kind: str, size: int) -> str | None:
    """Say why a transform of this kind cannot have this size.

    Args:
        kind: One of `FIXED_TRANSFORMS`.
        size: The number of slices p.

    Returns:
        The reason, as a sentence without full stop, or None if the transform exists.

    Raises:
        InputError: The kind is unknown.
    """
    if kind not in _BUILDERS:
        known = ", ".join(f"`{name}`" for name in FIXED_TRANSFORMS)
        near = difflib.get_close_matches(kind.lower(), FIXED_TRANSFORMS, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else None
        raise InputError(f"unknown transform `{kind}`, known are {known}", hint=hint)
    if size < 1:
        return f"a transform needs at least 1 slice, found {size}"
    if kind in _POWER_OF_TWO and size.bit_count() != 1:
        return f"transform `{kind}` needs a power of two as number of slices, found {size}"
    return None


def _dct(size: int, seed: int) -> Matrix:
    matrix: Matrix = scipy.fft.dct(np.eye(size), norm="ortho", axis=0)
    return matrix


def _identity(size: int, seed: int) -> Matrix:
    return np.eye(size)


def _haar(size: int, seed: int) -> Matrix:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        finest = np.kron(np.eye(len(matrix)), [1.0, -1.0])
        matrix = np.concatenate([np.kron(matrix, [1.0, 1.0]), finest]) / np.sqrt(2)
    return matrix


def _hadamard(size: int, seed: int) -> Matrix:
    matrix: Matrix = scipy.linalg.hadamard(size, dtype=np.float64) / np.sqrt(size)
    return matrix


def _random(size: int, seed: int) -> Matrix:
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))
    # Without the sign fix, Q would depend on the QR implementation and not be Haar distributed.
    signed: Matrix = q * np.where(np.diag(r) < 0, -1.0, 1.0)
    return signed


def _dft(size: int, seed: int) -> Matrix:
    position = np.arange(size)
    frequency = np.arange(1, (size - 1) // 2 + 1)
    # j * k is reduced modulo p as an integer: no precision is lost in large angles.
    angle = 2 * np.pi * (np.outer(frequency, position) % size) / size
    pairs = np.stack([np.cos(angle), np.sin(angle)], axis=1).reshape(-1, size) * np.sqrt(2)
    rows = [np.ones((1, size)), pairs]
    if size % 2 == 0:
        rows.append((1.0 - 2.0 * (position % 2))[None])
    matrix: Matrix = np.concatenate(rows) / np.sqrt(size)
    return matrix


_POWER_OF_TWO = frozenset({"haar", "hadamard"})
_BUILDERS: dict[str, Callable[[int, int], Matrix]] = {
    "dct": _dct,
    "identity": _identity,
    "haar": _haar,
    "hadamard": _hadamard,
    "random": _random,
    "dft": _dft,
}
FIXED_TRANSFORMS: tuple[str, ...] = tuple(_BUILDERS)
