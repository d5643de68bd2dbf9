"""Muon for matrices, AdamW for all else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.training.setup import Setup
from tcompress.training.sharding import like, whole

# Coefficients of the quintic iteration of Jordan et al. (Muon, 2024). In three steps it brings
# singular values from a thirtieth of the largest to between 0.7 and 1.2.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 3
_MOMENTUM = 0.95
# Singular values of an update at a rate of 1. The same for all shapes, so that a rate suits narrow
# models and wide ones (Yang et al., arXiv:2310.17813); at a width of 600 as large as AdamW's.
_SPECTRAL = 5.0
_GRAIN = 128  # sizes of batches on a GPU are multiples of it


def orthogonalised(matrices: Tensor) -> Tensor:
    """Replace singular values by about one, in float32.  # (n, rows, columns).

    PyTorch's own Muon computes in bfloat16, which is slow on most CPUs, and takes one matrix. It
    divides by the Frobenius norm and needs five steps; the Schatten 8-norm, which the first step
    has all but computed, is nearer to the largest singular value and saves two. Steps are
    polynomials of the Gram matrix, which alone is iterated: long rows are multiplied twice in all.
    """
    x = matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / _norm(x)
    gram = x @ x.mT
    square = gram @ gram
    size = _norm(square) ** 0.25
    x, gram, square = x / size, gram / size**2, square / size**4
    product = polynomial = _polynomial(gram, square)
    for _ in range(_STEPS - 1):
        gram = polynomial @ gram @ polynomial
        polynomial = _polynomial(gram, gram @ gram)
        product = polynomial @ product
    x = product @ x
    return x.mT if tall else x


def _polynomial(gram: Tensor, square: Tensor) -> Tensor:
    first, third, fifth = _QUINTIC
    polynomial = third * gram + fifth * square
    polynomial.diagonal(dim1=-2, dim2=-1).add_(first)
    return polynomial


def _norm(matrices: Tensor) -> Tensor:
    return matrices.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-12)


class Muon(torch.optim.AdamW):
    """Optimizer of matrices by orthogonalised momentum, of what is in other groups as AdamW.

    Groups with `matrices` hold parameters of two or more dimensions: those of three are as many
    matrices as they have slices, those of more are a matrix of their first and second half.
    Matrices of one shape are orthogonalised together. Rates suit models of all widths alike.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__([{"matrices": False, **group} for group in groups], lr=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["matrices"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            parameters = [value for value in group["params"] if value.grad is not None]
            if group["matrices"] and parameters:
                self._move(parameters, group["lr"], group["weight_decay"])
        return loss

    def _move(self, parameters: list[Tensor], rate: float, decay: float) -> None:
        alike: dict[Any, list[int]] = defaultdict(list)
        updates = [*self._momenta(parameters)]
        for index, update in enumerate(updates):
            matrices = as_matrices(torch.empty(update.shape, device="meta"))
            alike[_batch_shape(matrices, update.device), update.device].append(index)
        for (shape, _), indices in alike.items():
            together = [as_matrices(whole(updates[index])) for index in indices]
            for index, update in zip(
                indices, orthogonalised_together(together, shape), strict=True
            ):
                pattern = parameters[index]
                updates[index] = like(update.reshape(pattern.shape), pattern)
        torch._foreach_mul_(parameters, 1 - rate * decay)
        torch._foreach_add_(parameters, updates, alpha=-rate * _SPECTRAL)

    def _momenta(self, parameters: list[Tensor]) -> Sequence[Tensor]:
        """Nesterov's."""
        gradients = [own for value in parameters if (own := value.grad) is not None]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if not (state := self.state[parameter]):
                state["momentum"] = torch.zeros_like(gradient)
                state["step"] = torch.zeros(())  # which AdamW looks for when it is loaded
        momenta = [self.state[parameter]["momentum"] for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
        return torch._foreach_lerp(gradients, momenta, _MOMENTUM)


def _batch_shape(matrices: Tensor, device: torch.device) -> tuple[int, ...]:
    """Shape of the batch that matrices are orthogonalised in on a device.

    Ranks differ from layer to layer. A GPU takes about as long to begin a small product as to
    compute it, so that there matrices lie on their side and are filled up with zeros, which stay
    zero, to few shapes; a CPU would only compute more.
    """
    rows, columns = matrices.shape[-2:]
    if device.type == "cpu":
        return rows, columns
    return tuple(-(-size // _GRAIN) * _GRAIN for size in sorted((rows, columns)))


def orthogonalised_together(parts: list[Tensor], shape: tuple[int, ...]) -> list[Tensor]:
    """Orthogonalise matrices in one batch of a shape, in which all of them have room."""
    counts = [len(part) for part in parts]
    if all(part.shape[1:] == shape for part in parts):
        return [*orthogonalised(torch.cat(parts)).split(counts)]
    batch = parts[0].new_zeros(sum(counts), *shape)
    torch._foreach_copy_([*map(_room, batch.split(counts), parts)], parts)
    return [*map(_room, orthogonalised(batch).split(counts), parts)]


def _room(batch: Tensor, part: Tensor) -> Tensor:
    """Room of matrices in a batch, in which the tall ones lie on their side."""
    rows, columns = part.shape[-2:]
    if rows > columns:
        return batch[:, :columns, :rows].mT
    return batch[:, :rows, :columns]


def as_matrices(tensor: Tensor) -> Tensor:
    """Read a tensor as matrices.  # (n, rows, columns)."""
    if tensor.ndim <= 3:
        return tensor.reshape(-1, *tensor.shape[-2:])
    half = tensor.ndim // 2
    return tensor.flatten(half).flatten(0, half - 1)[None]


def optimizer_of(setup: Setup, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """Make the optimizer of a run; vectors do not decay, and AdamW alone can be `fused`."""
    trained, options = setup.trained.values(), setup.options
    kind = options.optimizer or ("muon" if options.task is None else "adamw")
    decay = options.weight_decay
    tables = {
        id(parameter)
        for module in setup.model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    moved, by_adam, vectors = list[Tensor](), list[Tensor](), list[Tensor]()
    for value in trained:  # where width leaves nothing, a matrix may have no numbers at all
        by_muon = kind == "muon" and id(value) not in tables and value.numel()
        (vectors if value.ndim <= 1 else moved if by_muon else by_adam).append(value)
    groups: list[dict[str, Any]] = [
        {"params": moved, "weight_decay": decay, "matrices": True},
        {"params": by_adam, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return Muon(groups) if kind == "muon" else torch.optim.AdamW(groups, lr=0.0, fused=fused)
