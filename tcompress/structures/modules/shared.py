"""What several layers share: transforms of their input or output, and factors of their cores."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from tcompress.errors import refuse_replica
from tcompress.linalg.fits import compute_dtype
from tcompress.structures.base import Layout, Side, decoded, encoded, shared_shapes, transform_of


def version_of(tensor: Tensor) -> int | None:
    """Counts changes in place; inference tensors do not."""
    return None if tensor.is_inference() else tensor._version


class TransformModule(nn.Module):
    """Owns what `encode` or `decode` of a term needs, and applies it.

    Other layers that share it call this module, never its tensors, so that hooks which bring
    offloaded tensors to the device run for every caller. With several `readers` of one and the
    same input, the result is kept until all of them have read it. It takes a dtype and a device.
    """

    changes: int = 0
    """Counts what may change tensors without changing their versions or addresses: passes that
    gradients flowed through, casts and moves."""

    _replicate_for_data_parallel = refuse_replica

    def __init__(self, layout: Layout, side: Side, readers: int = 1, **place: Any) -> None:
        super().__init__()
        self.layout, self.side, self.readers = layout, side, readers
        transform = transform_of(layout, side)
        assert transform is not None  # there would be no module
        self._transform = transform
        for name, shape in transform.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **place)))
        # Not a buffer: loading fills buffers that no file has with whatever memory holds.
        with torch.device("cpu"):  # models are built on the meta device before they are loaded
            self._constants = dict(transform.constants())
        self._built: tuple[Any, dict[str, Tensor], Any] | None = None
        self._last: tuple[weakref.ref[Tensor], Any, Tensor, set[int]] | None = None

    def operator(self, like: Tensor) -> Any:
        """Builds what is applied, or returns the one built from the same numbers before.

        Numbers are compared, not versions or addresses: fused optimizers change tensors without
        counting versions, and addresses are used again.
        """
        tensors = {**dict(self.named_parameters(recurse=False)), **self._constants}
        training = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
        compiling = torch.compiler.is_compiling()
        if training and not compiling:
            self.changes += 1
        if training or compiling:
            return self._transform.build(tensors, like)
        stamp = (like.dtype, like.device)
        last = self._built
        if last is None or last[0] != stamp or not _same(last[1], tensors):
            with torch.inference_mode(False), torch.no_grad():
                copies = {name: tensor.clone() for name, tensor in tensors.items()}
                built = self._transform.build(copies, like)
            last = self._built = (stamp, copies, built)
        return last[2]

    def forward(self, x: Tensor, reader: int = 0) -> Tensor:
        """Encodes or decodes activations.  # (..., features) -> (tokens, features).

        When the same reader asks again, the input counts as new.
        """
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if self.readers == 1 or traced:
            return self._apply_transform(x)
        dtype = compute_dtype(x.device, x.dtype)
        key = (dtype, torch.is_grad_enabled(), x.data_ptr(), version_of(x))
        last = self._last
        if last is None or last[0]() is not x or last[1] != key or reader in last[3]:
            last = self._last = weakref.ref(x), key, self._apply_transform(x), set()
        last[3].add(reader)
        if len(last[3]) >= self.readers:
            self._last = None
        return last[2]

    def _apply_transform(self, x: Tensor) -> Tensor:
        stored = next((tensor.dtype for tensor in self.parameters(recurse=False)), x.dtype)
        rows = x.to(compute_dtype(x.device, stored))
        operator = self.operator(rows)
        if self.side == "in":
            return encoded(self.layout, rows.reshape(-1, rows.shape[-1]), operator)
        return decoded(self.layout, rows, operator)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.changes += 1  # a cast may find the address that its first tensor left
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves caches behind: they hold weak references."""
        return {**self.__dict__, "_built": None, "_last": None}

    def extra_repr(self) -> str:
        return f"{self.layout.structure}, side={self.side}, readers={self.readers}"


def _same(copies: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> bool:
    """Return whether tensors still hold the numbers that were copied."""
    return all(
        tensor.dtype == copies[name].dtype
        and tensor.device == copies[name].device
        and torch.equal(tensor, copies[name])
        for name, tensor in tensors.items()
    )


def factors_module(name: str) -> str:
    """Names the module that holds shared factors, below the layer that owns it."""
    return f"tc_bank_{name}"


class FactorsModule(nn.Module):
    """Owns shared factors; for the sake of hooks, layers call it as they do `TransformModule`.

    It takes a dtype and a device.
    """

    def __init__(self, layout: Layout, **place: Any) -> None:
        super().__init__()
        for name, shape in shared_shapes(layout).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **place)))

    def forward(self) -> dict[str, Tensor]:
        """Returns the tensors by name."""
        return dict(self.named_parameters(recurse=False))

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in self().items())
