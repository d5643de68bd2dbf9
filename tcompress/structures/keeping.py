"""Kept weights: dense weights that passes without gradients use, and when they are out of date."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from tcompress.structures.side import SideModule

_Source = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, int, int | None]
"""Where a tensor is looked up, the tensor, its address and its version."""


class KeptWeight:
    """One dense weight, and the state of all tensors that it was built from.

    It is out of date when one of them is another tensor, or was written to. What writes without
    counting versions (fused optimizers) trains, and layers drop the weight for that.
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Forgets the weight, which frees its memory."""
        self._weight: Tensor | None = None
        self._sources: list[_Source] = []
        self._sides: list[tuple[SideModule, int]] = []

    def current(self) -> Tensor | None:
        """Returns the weight, unless it is out of date; runs before every small product."""
        for owner, name, tensor, address, version in self._sources:
            if (
                owner.get(name) is not tensor
                or tensor.data_ptr() != address
                or (version is not None and tensor._version != version)
            ):
                return None
        for side, changes in self._sides:
            if side.changes != changes:
                return None
        return self._weight

    def renew(self, modules: Iterable[nn.Module], build: Callable[[], Tensor]) -> Tensor | None:
        """Builds the weight anew.

        Args:
            modules: Owners of all tensors that it is built from.
            build: Builds it.  # ([experts,] out, in)

        Returns:
            The weight, or None while a tensor is elsewhere, as offloading leaves it.
        """
        self.drop()
        modules = list(modules)
        sources = [
            (module._parameters, name, tensor)
            for module in modules
            for name, tensor in module._parameters.items()
            if tensor is not None and name != "bias"
        ]
        if any(tensor.is_meta for _, _, tensor in sources):
            return None
        # A tensor made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._weight = build()
        self._sources = [(*item, item[2].data_ptr(), _version(item[2])) for item in sources]
        self._sides = [(item, item.changes) for item in modules if isinstance(item, SideModule)]
        return self._weight


def _version(tensor: Tensor) -> int | None:
    """Counts changes in place; inference tensors do not."""
    return None if tensor.is_inference() else tensor._version
