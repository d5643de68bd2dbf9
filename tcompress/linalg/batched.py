"""Batched products that write where the result belongs.

All slice and rotation products of the project are one operation: ``p`` independent matrix
products whose operands and result are strided views of larger matrices. ``torch.bmm`` alone
returns a contiguous ``(p, tokens, c)`` tensor, and the copy that brings slices side by side
costs as much as the product, so the product is written into a strided view of the result.

Activations are logically ``(tokens, features)``. Their memory is row-major, or feature-major
(strides ``(1, tokens)``): between the stages of a rotation the feature-major form lets every
operand keep a unit stride, so that no stage copies anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS = (1, 0, 2)  # memory order of (batch, rows, cols): rows outermost, batches side by side
_FEATURES = (0, 2, 1)  # feature-major: batches outermost, rows innermost
_STRIDED = (2, 0, 1)  # feature-major with interleaved batches
_LOW = (torch.bfloat16, torch.float16)


def _empty(shape: tuple[int, ...], order: tuple[int, ...], like: Tensor) -> Tensor:
    memory = torch.empty([shape[axis] for axis in order], dtype=like.dtype, device=like.device)
    return memory.permute([order.index(axis) for axis in range(3)])


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    strides: tuple[int, ...] = tensor.stride()
    return tuple(sorted(range(3), key=lambda axis: -strides[axis]))


class _ProductInto(torch.autograd.Function):
    """``a @ b`` over a batch, with a chosen memory order; twice differentiable."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, order: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(a, b)
        return _product_into(a, b, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        (grad,) = grads
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = _apply(grad, b.transpose(1, 2), _memory_order(a))
        if ctx.needs_input_grad[1]:
            grad_b = _apply(a.transpose(1, 2), grad, _memory_order(b))
        return grad_a, grad_b, None


def _apply(a: Tensor, b: Tensor, order: tuple[int, ...]) -> Tensor:
    return _ProductInto.apply(a, b, order)  # type: ignore[no-untyped-call]


def _product_into(a: Tensor, b: Tensor, order: tuple[int, ...]) -> Tensor:
    out = _empty((a.shape[0], a.shape[1], b.shape[2]), order, a)
    if a.device.type == "cpu" and a.dtype in _LOW:
        # Strided operands of low precision fall to loops that are hundreds of times slower.
        return out.copy_(torch.bmm(a.contiguous(), b.contiguous()))
    torch.bmm(a, b, out=out)
    return out


def batched_product(a: Tensor, b: Tensor, order: tuple[int, ...]) -> Tensor:
    """Multiplies two batches of matrices into a given memory order.

    Args:
        a: Left operands.  # (batch, rows, inner)
        b: Right operands.  # (batch, inner, cols)
        order: Axes of the result from outermost to innermost in memory.

    Returns:
        The products as a view in that memory order.  # (batch, rows, cols)
    """
    if torch.compiler.is_compiling():
        return torch.bmm(a, b)  # a compiler chooses the memory order itself
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _apply(a, b, order)
    return _product_into(a, b, order)


def slice_product(x: Tensor, slices: Tensor, *, feature_major: bool = False) -> Tensor:
    """Multiplies every slice of the features by its own matrix: the facewise product.

    Args:
        x: Activations, row- or feature-major.  # (tokens, p * a)
        slices: One matrix per slice.  # (p, c, a)
        feature_major: Memory order of the result.

    Returns:
        Slices side by side.  # (tokens, p * c)
    """
    count, _, width = slices.shape
    parts = x.unflatten(1, (count, width)).transpose(0, 1)  # (p, tokens, a)
    out = batched_product(parts, slices.transpose(1, 2), _FEATURES if feature_major else _ROWS)
    return out.transpose(0, 1).flatten(1)


def rotate_runs(x: Tensor, blocks: Tensor, *, feature_major: bool = True) -> Tensor:
    """Multiplies every run of ``b`` neighbouring features by its own block.

    Args:
        x: Activations, row- or feature-major.  # (tokens, m * b)
        blocks: One block per run.  # (m, b, b)
        feature_major: Memory order of the result.

    Returns:
        The rotated activations.  # (tokens, m * b)
    """
    return slice_product(x, blocks, feature_major=feature_major)


def rotate_strided(x: Tensor, blocks: Tensor) -> Tensor:
    """Multiplies every group of ``b`` features that lie ``m`` apart by its own block.

    Args:
        x: Activations, feature-major if nothing is to be copied.  # (tokens, b * m)
        blocks: One block per group.  # (m, b, b)

    Returns:
        The rotated activations, feature-major.  # (tokens, b * m)
    """
    groups, size, _ = blocks.shape
    parts = x.unflatten(1, (size, groups)).permute(2, 0, 1)  # (m, tokens, b)
    out = batched_product(parts, blocks.transpose(1, 2), _STRIDED)
    return out.permute(1, 2, 0).flatten(1)
