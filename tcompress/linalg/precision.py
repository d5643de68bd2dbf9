"""Where float64 is: in it everything is fitted and compared, and not all devices have it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: `mps` does not, nor do all `xpu`."""
    return device.type in ("cpu", "cuda", "meta") or _has_float64(device.type)


@cache
def _has_float64(kind: str) -> bool:
    try:
        torch.ones(1, dtype=torch.float64, device=kind).add(1)
    except (RuntimeError, TypeError):
        return False
    return True


def in_float64(tensor: Tensor) -> Tensor:
    """Copy a tensor to float64, on the CPU where its own device has none."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).double()
