"""Convolutions that make a grid of patches, in place of one linear map."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from tcompress.hosts.configs import TCompressGridConfig

_CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Convolutions(nn.Module):
    """Convolutions of stride 2 until a patch is one place (HOT, appendix on volumes).

    The kernel has 3 places along each axis. Channels double up to the width; a norm over all
    channels and places, and an activation, stand between two convolutions.

    Args:
        config: The configuration.
    """

    def __init__(self, config: TCompressGridConfig) -> None:
        super().__init__()
        kind, steps = _CONVOLUTIONS[len(config.patch_size)], max(config.patch_size).bit_length() - 1
        widths = [max(1, config.hidden_size >> (steps - step)) for step in range(1, steps + 1)]
        self.activation = ACT2FN[config.hidden_act]
        self.layers = nn.ModuleList()
        self.norms = nn.ModuleList([nn.GroupNorm(1, width) for width in widths[:-1]])
        for step, (before, after) in enumerate(pairwise([config.num_channels, *widths])):
            strides = tuple(2 if patch >> step > 1 else 1 for patch in config.patch_size)
            self.layers.append(kind(before, after, 3, strides, padding=1))

    def forward(self, grid_values: Tensor) -> Tensor:
        """Embeds inputs.  # (batch, channels, *input_size) -> (batch, *grid, width)."""
        states = self.layers[0](grid_values)
        for norm, layer in zip(self.norms, self.layers[1:], strict=True):
            states = layer(self.activation(norm(states)))
        return states.movedim(1, -1)
