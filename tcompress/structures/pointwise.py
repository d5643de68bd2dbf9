"""Convolutions whose kernels cover one point: linear layers on channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tcompress.structures.linear import PartLayout, StructuredLinear

_SIZES = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")


def channels_last(module: nn.Module, x: Tensor, *, output: bool = False) -> Tensor:
    """Gives rows as a linear layer has them of what a module reads or returns.

    Args:
        module: Any module; convolutions, dense or structured, have their channels elsewhere.
        x: Input or output.  # (batch, channels, *positions) of a convolution, else (..., width)
        output: Whether it is the output, of which no positions are left out.
    """
    if not hasattr(module, "kernel_size"):
        return x
    steps: tuple[int, ...] = module.stride  # type: ignore[assignment]
    if not output and max(steps) > 1:
        places: list[Any] = [slice(None, None, step) for step in steps]
        x = x[(..., *places)]
    return x.movedim(-1 - len(steps), -1)


class PointwiseConvolution(StructuredLinear):
    """A structured linear layer in the place of a convolution.

    Args:
        parts: Layout of the layer.
        host: The convolution, whose sizes and stride it has.
        options: Those of `StructuredLinear`.
    """

    stride: tuple[int, ...]

    def __init__(self, parts: Sequence[PartLayout], host: nn.Module, **options: Any) -> None:
        super().__init__(parts, **options)
        for name in _SIZES:  # some hosts read them
            setattr(self, name, getattr(host, name))

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer.

        Args:
            x: Input.  # (batch, in_channels, *positions)

        Returns:
            Output.  # (batch, out_channels, *positions)
        """
        rows = super().forward(channels_last(self, x))
        return rows.movedim(-1, -1 - len(self.stride)).contiguous()
