"""Layers of many sizes over one bank of Tucker factors: grids of blocks U (sum_k a_k C_k) V^T.

A layer larger than the shared shape is cut into blocks, each with mixing weights of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tcompress.linalg.moments import safe_cholesky
from tcompress.linalg.tucker import Ranks, fit_tucker

SWEEPS, STEPS = 12, 4
"""Rounds over all factors, and steps of conjugate gradients for each in a round."""


@dataclass(frozen=True)
class Bank:
    """What layers share.

    Attributes:
        left: U.  # (a, r2)
        right: V.  # (b, r3)
        cores: C_k.  # (r1, r2, r3)
    """

    left: Tensor
    right: Tensor
    cores: Tensor

    @property
    def block(self) -> tuple[int, int]:
        """Shape of a block."""
        return len(self.left), len(self.right)


@dataclass(frozen=True)
class User:
    """A weight that is made of blocks of a bank.

    Attributes:
        weight: W.  # (m * a, q * b)
        gram: G, damped; None for the identity.  # (q * b, q * b)
        curvature: S, damped; None for the identity.  # (m * a, m * a)
        scale: What its errors are divided by, to count like those of others.
    """

    weight: Tensor
    gram: Tensor | None = None
    curvature: Tensor | None = None
    scale: float = 1.0

    def turned(self) -> User:
        """The transposed weight: S and G change places."""
        return replace(self, weight=self.weight.mT, gram=self.curvature, curvature=self.gram)

    def error(self, bank: Bank) -> float:
        """The smallest error that mixing weights leave over, divided by the scale."""
        mixing = fit_mixing(self._weighed(self.weight), self.gram, bank, self.curvature)
        missed = self.weight - mixed_weight(mixing, bank)
        return float(self._weighed(missed).mul(missed).sum()) / self.scale

    def _weighed(self, weight: Tensor) -> Tensor:
        """S W G."""
        seen = weight if self.gram is None else weight @ self.gram
        return seen if self.curvature is None else self.curvature @ seen


def fit_bank(users: Sequence[User], block: tuple[int, int], ranks: Ranks) -> Bank:
    """Fits a bank to all that use it, on their moments never worse than without them.

    Blocks are fitted in the norm of their own moments; what those side by side have in common is
    left to the mixing weights.

    Args:
        users: The weights, each a multiple of the block.
        block: Rows a and columns b of a block.
        ranks: Cores r1, then columns of U and V; within what the shape admits.
    """
    blocks = [_grid(user.weight, block).flatten(0, 1) for user in users]
    scales = torch.cat(
        [own.new_full((len(own),), user.scale) for own, user in zip(blocks, users, strict=True)]
    )
    weights = torch.cat(blocks) * scales.rsqrt()[:, None, None]
    plain = fit_tucker(weights, None, ranks, sweeps=SWEEPS, inner=STEPS)
    free = Bank(plain.left, plain.right, plain.cores)
    if all(user.gram is None and user.curvature is None for user in users):
        return free
    curvatures, grams = (_moments_of_blocks(users, block, side) for side in (0, 1))
    # The start weighs matrices by what stands before them, not by the size of their moments.
    for moments in (curvatures, grams):
        if moments is not None:
            level = moments.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
            moments /= level
            weights = weights * level.sqrt()
    products = weights if grams is None else weights @ grams
    fitted = fit_tucker(products, grams, ranks, curvatures=curvatures, sweeps=SWEEPS, inner=STEPS)
    aware = Bank(fitted.left, fitted.right, fitted.cores)
    return min((aware, free), key=lambda bank: sum(user.error(bank) for user in users))


def fit_mixing(
    product: Tensor, gram: Tensor | None, bank: Bank, curvature: Tensor | None = None
) -> Tensor:
    """Fits the mixing weights of one layer to a given bank: closed form.

    Blocks see each other where they read the same rows of moments, and are fitted together.

    Args:
        product: S W C.  # (m * a, q * b)
        gram: G, damped; None for the identity.  # (q * b, q * b)
        bank: The shared factors.
        curvature: S, damped; None for the identity.  # (m * a, m * a)

    Returns:
        Weights of the cores for every block.  # (m, q, r1)
    """
    left, right, cores = bank.left, bank.right, bank.cores
    kernels = _between(gram, right, product.shape[1])  # (q, q, r3, r3)
    if curvature is None:  # rows of the grid do not see each other, and are all alike
        sights = (left.mT @ left)[None, None]
    else:
        sights = _between(curvature, left, product.shape[0])  # (m, m, r2, r2)
    flat = cores.flatten(1)
    # One row of the grid at a time: all products at once would take m q times the memory.
    rows = [
        ((sight[:, None, None] @ cores @ kernel[:, None]).flatten(3) @ flat.mT).flatten(0, 2)
        for sight in sights
        for kernel in kernels.transpose(0, 1)
    ]
    normal = torch.stack(rows).mT.flatten(0, 1)  # (m * q * r1,) * 2, with m = 1 where all are alike
    blocks = _grid(product, bank.block)  # (m, q, a, b)
    wanted = (left.mT @ blocks @ right).flatten(2) @ flat.mT  # (m, q, r1)
    flat_wanted = wanted.reshape(-1, len(normal)).mT
    return torch.cholesky_solve(flat_wanted, safe_cholesky(normal)).mT.reshape(wanted.shape)


def mixed_weight(mixing: Tensor, bank: Bank) -> Tensor:
    """Returns the weight of one layer from its mixing weights and a bank.

    Args:
        mixing: One set for every block.  # (..., m, q, r1)
        bank: The shared factors.

    Returns:
        The blocks, put together.  # (..., m * a, q * b)
    """
    blocks = bank.left @ mixed_cores(mixing, bank.cores) @ bank.right.mT  # (..., m, q, a, b)
    return blocks.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def mixed_cores(mixing: Tensor, cores: Tensor) -> Tensor:
    """Returns sum_k a_k C_k.  # (..., r1), (r1, r2, r3) -> (..., r2, r3)."""
    return (mixing @ cores.flatten(1)).unflatten(-1, tuple(cores.shape[1:]))


def _grid(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Cuts a weight into blocks.  # (m * a, q * b) -> (m, q, a, b)."""
    rows, columns = block
    return weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)


def _between(moment: Tensor | None, factor: Tensor, width: int) -> Tensor:
    """F^T G_ij F for all blocks i, j of a moment.  # (w, r) -> (width / w,) * 2 + (r, r)."""
    size = len(factor)
    if moment is None:
        moment = torch.eye(width, dtype=factor.dtype, device=factor.device)
    return factor.mT @ _grid(moment, (size, size)) @ factor


def _moments_of_blocks(users: Sequence[User], block: tuple[int, int], side: int) -> Tensor | None:
    """Moments of the rows (0) or columns (1) of all blocks, or None.  # (n, w, w)."""
    if all((user.gram if side else user.curvature) is None for user in users):
        return None
    return torch.cat([_per_block(user, block, side) for user in users])


def _per_block(user: User, block: tuple[int, int], side: int) -> Tensor:
    width, weight = block[side], user.weight
    moment = user.gram if side else user.curvature
    if moment is None:
        moment = torch.eye(weight.shape[side], dtype=weight.dtype, device=weight.device)
    own = _grid(moment, (width, width)).diagonal(dim1=0, dim2=1).movedim(-1, 0)
    rows, columns = (size // edge for size, edge in zip(weight.shape, block, strict=True))
    grid = own[None].expand(rows, -1, -1, -1) if side else own[:, None].expand(-1, columns, -1, -1)
    return grid.flatten(0, 1)
