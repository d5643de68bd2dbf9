"""Fitted banks, as the layers that use them see them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tcompress.planning.entries import BankKey, LayerPlan
from tcompress.structures import Layout
from tcompress.structures.bank import bank_module
from tcompress.structures.capabilities import shared_of

Banks = Mapping[BankKey, Mapping[str, Tensor]]
"""Tensors of banks as they are stored, by owner and name of the bank."""

NO_BANKS: Banks = {}


def bank_of(
    entry: LayerPlan, layout: Layout, banks: Banks, device: torch.device
) -> dict[str, Tensor]:
    """Returns the bank that a term of a layer uses, in float64; nothing if it uses none."""
    shared = shared_of(layout)
    if shared is None:
        return {}
    found = banks[entry.bank_of.get(shared.name, entry.name), shared.name]
    return {key: tensor.to(device).double() for key, tensor in found.items()}


def owned(entry: LayerPlan, banks: Banks) -> dict[str, Tensor]:
    """Returns the banks that are stored with a layer, by name relative to it."""
    return {
        f"{bank_module(name)}.{key}": tensor
        for name in entry.own_banks
        for key, tensor in banks[entry.name, name].items()
    }
