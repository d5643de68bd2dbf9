"""Orthogonal transforms of a few block-diagonal stages: the fitted transform of ``lprod``.

Even stages rotate each run of ``b`` neighbouring coordinates, odd stages each group of ``b``
coordinates that lie ``d / b`` apart. Every block is ``exp(A - A^T)``; the stored numbers are the
generators, the strict upper triangles of ``A``, so training them keeps orthogonality.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tcompress.linalg.batched import rotate_runs, rotate_strided


@dataclass(frozen=True)
class Stages:
    """Shape of a staged rotation.

    Attributes:
        features: Width d of the rotated space.
        block: Size b of the blocks; divides d.
        count: Number of stages, contiguous and strided in turn.
    """

    features: int
    block: int
    count: int

    @property
    def groups(self) -> int:
        """Blocks in one stage."""
        return self.features // self.block

    @property
    def generators_shape(self) -> tuple[int, int, int]:
        """Shape of the stored numbers: (stages, groups, b (b - 1) / 2)."""
        return (self.count, self.groups, self.block * (self.block - 1) // 2)

    @property
    def macs(self) -> int:
        """Multiply-adds for one token."""
        return self.count * self.features * self.block


def nearest_block(features: int, wanted: int) -> int:
    """Returns the divisor of `features` that is closest to `wanted`, the smaller one of two."""
    divisors = [size for size in range(1, features + 1) if features % size == 0]
    return min(divisors, key=lambda size: (abs(size - wanted), size))


_SQUARINGS, _TERMS = 6, 10


def build_blocks(generators: Tensor, block: int) -> Tensor:
    """Builds the orthogonal blocks from their generators.

    Computed in float64, whatever the generators' dtype, by a Taylor series with scaling and
    squaring. A fixed number of batched products serves all blocks at once, several times faster
    than `torch.linalg.matrix_exp`, which sorts matrices by norm; exact to rounding up to norms
    of about 10, far beyond what a fit reaches.

    Args:
        generators: Strict upper triangles.  # (..., b (b - 1) / 2)
        block: Size b of a block.

    Returns:
        exp(A - A^T), float64.  # (..., b, b)
    """
    rows, cols = torch.triu_indices(block, block, 1, device=generators.device)
    upper = generators.new_zeros(*generators.shape[:-1], block, block, dtype=torch.float64)
    upper[..., rows, cols] = generators.double()
    step = (upper - upper.mT) / 2**_SQUARINGS
    eye = torch.eye(block, dtype=torch.float64, device=generators.device)
    result = eye + step / _TERMS
    for term in range(_TERMS - 1, 0, -1):
        result = eye + step @ result / term
    for _ in range(_SQUARINGS):
        result = result @ result
    return result


def merges_with(stages: Stages, size: int) -> bool:
    """Tells whether a p x p transform of tubes can be folded into the last, strided, stage."""
    return stages.count % 2 == 0 and stages.block % size == 0


def fold_tube_transform(blocks: Tensor, z: Tensor) -> Tensor:
    """Folds a tube transform into the last stage, at no cost when the model runs.

    The tubes of a p-slice tensor lie ``d / p`` apart; when p divides b they lie inside the groups
    of a strided stage, where ``Z`` acts as ``Z (x) I`` of size b.

    Args:
        blocks: All stages.  # (stages, groups, b, b)
        z: Transform of the tubes.  # (p, p)

    Returns:
        Stages whose last one applies Z after its rotation.  # (stages, groups, b, b)
    """
    inner = torch.eye(blocks.shape[-1] // z.shape[0], dtype=blocks.dtype, device=blocks.device)
    mixing = torch.kron(z.to(blocks), inner)
    return torch.cat([blocks[:-1], (mixing @ blocks[-1])[None]])


def mix_tubes(x: Tensor, z: Tensor) -> Tensor:
    """Multiplies the tubes of every token's p-slice tensor by a p x p transform.

    Args:
        x: Activations, row- or feature-major; the result is alike.  # (tokens, d)
        z: Transform Z.  # (p, p)

    Returns:
        Transformed activations.  # (tokens, d)
    """
    size = z.shape[0]
    if x.stride(0) == 1 and x.stride(1) > 1:
        return (z @ x.mT.reshape(size, -1)).view(x.shape[1], x.shape[0]).mT
    return (z @ x.unflatten(1, (size, -1))).flatten(1)


def rotate(x: Tensor, blocks: Tensor) -> Tensor:
    """Applies the stages in order: T x.

    Args:
        x: Activations, row-major.  # (tokens, d)
        blocks: Orthogonal blocks.  # (stages, groups, b, b)

    Returns:
        Rotated activations, feature-major.  # (tokens, d)
    """
    for index, stage in enumerate(blocks.unbind(0)):
        x = rotate_runs(x, stage) if index % 2 == 0 else rotate_strided(x, stage)
    return x


def rotate_back(x: Tensor, blocks: Tensor) -> Tensor:
    """Applies the transposed stages in reverse order: T^T x.

    Args:
        x: Activations, feature-major if nothing is to be copied.  # (tokens, d)
        blocks: Orthogonal blocks.  # (stages, groups, b, b)

    Returns:
        Activations in the original coordinates, row-major.  # (tokens, d)
    """
    last_first = list(enumerate(blocks.unbind(0)))[::-1]
    for index, stage in last_first:
        if index % 2:
            x = rotate_strided(x, stage.mT)
        else:
            x = rotate_runs(x, stage.mT, feature_major=index > 0)
    return x
