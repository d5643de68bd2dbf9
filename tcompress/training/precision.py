"""Mixed precision where PyTorch alone would be slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


def fast_precision(accelerator: Accelerator) -> AbstractContextManager[Any]:
    """Returns the context to train in: on a CPU, bfloat16 with attention in float32."""
    low = accelerator.mixed_precision != "no" and accelerator.device.type == "cpu"
    return FloatAttention() if low else nullcontext()


class FloatAttention(TorchFunctionMode):
    """Computes softmax attention in float32, whatever autocast says.

    The backward pass of PyTorch's attention in bfloat16 takes longer on a CPU than those of all
    products together: 0.9 of 1.2 seconds of a step of a small encoder. Hosts call it in many
    places, some of which go past the attention interface, so that the call itself is caught.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Lets everything but attention through."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = {name: _as_float(value) for name, value in (kwargs or {}).items()}
        with torch.autocast("cpu", enabled=False):
            return func(*map(_as_float, args), **named)


def _as_float(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value
