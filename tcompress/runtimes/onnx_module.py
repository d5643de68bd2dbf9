"""An ONNX file in the place of a model in PyTorch, for whatever runs forward passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from tcompress.errors import InputError
from tcompress.runtimes.onnx_session import OnnxModel


class OnnxModule(nn.Module):
    """A forward pass in ONNX Runtime: named tensors in, a `ModelOutput` of tensors out.

    A cache that the file asks for is empty, so that texts are read from their beginning.
    """

    def __init__(self, file: OnnxModel, config: Any) -> None:
        super().__init__()
        self.file, self.config = file, config
        states = [name for name in file.inputs if name.startswith("encoder_")]
        if states:
            text = f"`{file.path}` is the second part of a model: it asks for `{states[0]}`"
            raise InputError(text, "measure this model with `--runtime torch`")

    @property
    def device(self) -> torch.device:
        """The device of inputs and outputs."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs and outputs that are no ids."""
        return torch.float32

    @property
    def base_model(self) -> OnnxModule:
        """The module itself: hidden states are among its outputs, if the file has them."""
        return self

    def forward(self, **inputs: Any) -> ModelOutput:
        """Compute all outputs of a file but its cache."""
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        first = next(iter(tensors.values()))
        tensors |= self._empty_cache(first.shape[0])
        if "position_ids" in self.file.inputs and "position_ids" not in tensors:
            tensors["position_ids"] = _positions(tensors, first)
        names = [name for name in self.file.outputs if not name.startswith("present.")]
        arrays = self.file.run(tensors, names)
        return ModelOutput({name: torch.from_numpy(value) for name, value in arrays.items()})

    def _empty_cache(self, batch: int) -> dict[str, Tensor]:
        """Keys and values of no tokens.  # (batch, heads, 0, width) each."""
        sizes = {item.name: item.shape for item in self.file.session.get_inputs()}
        return {
            name: torch.from_numpy(np.zeros((batch, shape[1], 0, shape[3]), dtype=np.float32))
            for name, shape in sizes.items()
            if name.startswith("past_key_values.")
        }


def _positions(inputs: dict[str, Tensor], first: Tensor) -> Tensor:
    """Number the tokens of each text, padding before it left out.  # (batch, length)."""
    mask = inputs.get("attention_mask", torch.ones_like(first))
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
