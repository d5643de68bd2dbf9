"""Banks: tensors that the cores of several layers share, of one block or of the whole model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tcompress.structures.base import Layout
from tcompress.structures.capabilities import shared_of


def bank_module(name: str) -> str:
    """Names the module that holds a bank, below the layer that owns it."""
    return f"tc_bank_{name}"


class BankModule(nn.Module):
    """Owns the tensors of a bank and hands them out.

    Layers that share it call this module, never its tensors, so that hooks which bring offloaded
    tensors to the device run for every caller.

    Args:
        layout: Layout of any term that uses it.
        dtype: Dtype of the tensors.
        device: Device of the tensors.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        shared = shared_of(layout)
        for name, shape in (shared.shapes if shared else {}).items():
            empty = torch.empty(shape, dtype=dtype, device=device)
            self.register_parameter(name, nn.Parameter(empty))

    def forward(self) -> dict[str, Tensor]:
        """Returns the tensors by name."""
        return dict(self.named_parameters(recurse=False))

    def extra_repr(self) -> str:
        """Shows shapes."""
        own = self.named_parameters(recurse=False)
        return ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in own)
