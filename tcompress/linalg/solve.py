"""Conjugate gradients for normal equations that are too large to be written down."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Operator = Callable[[Tensor], Tensor]


def conjugate_gradients(
    apply: Operator,
    wanted: Tensor,
    start: Tensor,
    *,
    precondition: Operator | None = None,
    iterations: int = 50,
    tolerance: float = 1e-6,
) -> Tensor:
    """Solves N x = b for positive semidefinite N, starting from a known good x.

    No step makes <x, N x> - 2 <x, b> larger, and where rounding did, the start comes back: the
    result is never worse than the start.

    Args:
        apply: x to N x, both of the shape of `start`.
        wanted: b.  # (...)
        start: First x.  # (...)
        precondition: An approximate inverse of N, positive definite; default the identity.
        iterations: Most steps to take.
        tolerance: Stop where the residual is this small relative to b, both measured in the norm
            of the preconditioner, which does not depend on the scale of N.

    Returns:
        The solution.  # (...)
    """
    inverse = precondition or _same
    x, residual = start, wanted - apply(start)
    before = -_dot(start, wanted + residual)
    floor = tolerance**2 * _dot(wanted, inverse(wanted))
    z = direction = inverse(residual)
    size = _dot(residual, z)
    for _ in range(iterations):
        if size <= floor:
            break
        image = apply(direction)
        bend = _dot(direction, image)
        if bend <= 0:  # only rounding is left in this direction
            break
        x = x + (size / bend) * direction
        residual = residual - (size / bend) * image
        z = inverse(residual)
        size, last = _dot(residual, z), size
        direction = z + (size / last) * direction
    return x if _dot(x, apply(x) - 2 * wanted) <= before else start


def _same(x: Tensor) -> Tensor:
    return x


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum())
