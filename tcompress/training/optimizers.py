"""Muon for matrices, AdamW for all else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.training.setup import Setup

# Coefficients of the quintic iteration of Jordan et al. (Muon, 2024). In three steps it brings
# singular values from a thirtieth of the largest to between 0.7 and 1.2.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 3
_MOMENTUM = 0.95
# Singular values of an update at a rate of 1. The same for all shapes, so that a rate suits narrow
# models and wide ones (Yang et al., arXiv:2310.17813); at a width of 600 as large as AdamW's.
_SPECTRAL = 5.0


def orthogonalised(matrices: Tensor) -> Tensor:
    """Replaces singular values by about one, in float32.  # (n, rows, columns).

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
    whole = polynomial = _polynomial(gram, square)
    for _ in range(_STEPS - 1):
        gram = polynomial @ gram @ polynomial
        polynomial = _polynomial(gram, gram @ gram)
        whole = polynomial @ whole
    x = whole @ x
    return x.mT if tall else x


def _polynomial(gram: Tensor, square: Tensor) -> Tensor:
    first, third, fifth = _QUINTIC
    found = third * gram + fifth * square
    found.diagonal(dim1=-2, dim2=-1).add_(first)
    return found


def _norm(matrices: Tensor) -> Tensor:
    return matrices.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-12)


class Muon(torch.optim.AdamW):
    """Moves matrices by orthogonalised momentum, and what is in other groups as AdamW does.

    Groups with `matrices` hold parameters of two or more dimensions: those of three are as many
    matrices as they have slices, those of more are a matrix of their first and second half.
    Matrices of one shape are orthogonalised together. Rates suit models of all widths alike.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__([{"matrices": False, **group} for group in groups], lr=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes one step."""
        moved = [
            (parameter, parameter.grad, group)
            for group in self.param_groups
            if group["matrices"]
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for parameter, *_ in moved:
            parameter.grad = None  # AdamW passes over it
        loss = super().step(closure)
        alike: dict[Any, list[tuple[Tensor, Tensor, dict[str, Any]]]] = defaultdict(list)
        for parameter, gradient, group in moved:
            parameter.grad = gradient
            update = as_matrices(self._momentum(parameter, gradient))
            alike[update.shape[1:], update.device].append((parameter, update, group))
        for own in alike.values():
            made = orthogonalised(torch.cat([update for _, update, _ in own]))
            counts = [len(update) for _, update, _ in own]
            for (parameter, _, group), update in zip(own, made.split(counts), strict=True):
                rate = group["lr"]
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update.reshape(parameter.shape), alpha=-rate * _SPECTRAL)
        return loss

    def _momentum(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Nesterov's."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
            state["step"] = torch.zeros(())  # which AdamW looks for when it is loaded
        kept = state["momentum"].lerp_(gradient, 1 - _MOMENTUM)
        return gradient.lerp(kept, _MOMENTUM)


def as_matrices(tensor: Tensor) -> Tensor:
    """Reads a tensor as matrices.  # (n, rows, columns)."""
    if tensor.ndim <= 3:
        return tensor.reshape(-1, *tensor.shape[-2:])
    half = tensor.ndim // 2
    return tensor.flatten(half).flatten(0, half - 1)[None]


def optimizer_of(setup: Setup) -> torch.optim.Optimizer:
    """Makes the optimizer of a run; vectors do not decay."""
    trained, options = setup.trained.values(), setup.options
    kind = options.optimizer or ("muon" if options.task is None else "adamw")
    decay = options.weight_decay
    tables = {
        id(parameter)
        for module in setup.model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    matrices = [value for value in trained if value.ndim > 1]
    moved = [
        value  # where width leaves nothing, a matrix may have no numbers at all
        for value in matrices
        if kind == "muon" and id(value) not in tables and value.numel()
    ]
    known = {*map(id, moved)}
    groups = [
        {"params": moved, "weight_decay": decay, "matrices": True},
        {"params": [own for own in matrices if id(own) not in known], "weight_decay": decay},
        {"params": [own for own in trained if own.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return Muon(groups) if kind == "muon" else torch.optim.AdamW(groups, lr=0.0)
