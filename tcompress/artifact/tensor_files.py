"""Tensors that work in progress keeps in files, and reads back onto the device that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcompress.files import beside


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Writes tensors of any device, all of them or nothing."""
    with beside(path) as other:
        save_file(
            {name: item.cpu().contiguous() for name, item in tensors.items()}, other, metadata
        )


def load_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Reads tensors onto the device that computes with them.

    Whoever reads has to say where: a file does not know on which device its tensors were made, and
    one that stays behind on the CPU fails on all others, in the first product.
    """
    # The library reads onto a device by itself only if it knows its name.
    return {name: item.to(device) for name, item in load_file(path).items()}
