"""Weights of no meaning, for models that are built to be timed."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from tcompress.models import SourceModel, tell_padding

# A pass reads each of its weights once. Where there are more than any cache holds, one that was
# read that long ago comes from memory as a new one would, so it may be the same one: weights come
# from a ring, and models of any depth, as many as are timed in one turn, take bounded memory.

RING_BYTES = 2**29
_ALIGNED = 64  # numbers


@dataclass
class RandomWeights:
    """Small numbers as weights of models, as fast to multiply as any, in bounded memory."""

    device: torch.device
    dtype: torch.dtype
    ring_bytes: int = RING_BYTES
    _position: int = field(default=0, init=False)
    _filled: int = field(default=0, init=False)
    """Numbers of the ring that have a value; memory that has none is not taken yet."""

    def __post_init__(self) -> None:
        self._ring = self._empty(self.ring_bytes // self.dtype.itemsize)

    def model(self, source: SourceModel, config: Any) -> nn.Module:
        with init_empty_weights(include_buffers=False):
            model = source.model_class._from_config(deepcopy(config))
        tell_padding(model)
        model.tie_weights()  # each name of a tied tensor got an empty one
        self.fill(model)
        on_device: nn.Module = model.to(device=self.device, dtype=self.dtype)
        return on_device.eval()

    def fill(self, module: nn.Module) -> None:
        """Replace all parameters; what was one parameter stays one."""
        new = dict[int, nn.Parameter]()
        for owner in module.modules():
            for name, old in owner._parameters.items():
                if old is not None:
                    if id(old) not in new:
                        new[id(old)] = nn.Parameter(self._values(old.shape), requires_grad=False)
                    owner._parameters[name] = new[id(old)]

    def _values(self, shape: torch.Size) -> Tensor:
        count = shape.numel()
        if len(shape) < 2 or count > len(self._ring):  # scales of norms, which let nothing vanish
            return self._empty(count).fill_(1.0 if len(shape) < 2 else 0.01).view(shape)
        if self._position + count > len(self._ring):
            self._position = 0
        end = self._position + count
        if end > self._filled:
            self._ring[self._filled : end].uniform_(-0.02, 0.02)
            self._filled = end
        values = self._ring[self._position : end].view(shape)
        self._position = -(-end // _ALIGNED) * _ALIGNED
        return values

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, device=self.device, dtype=self.dtype)
