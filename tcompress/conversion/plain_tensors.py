"""Plain models: rewritten layers as the family stores its own, and a width that is fast enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tcompress.fitting.block_rewrite import BlockResult
from tcompress.models import SourceModel, read_finite
from tcompress.models.keymap import CPU
from tcompress.planning.costs import path_of
from tcompress.planning.entries import LayerPlan
from tcompress.planning.plain_widths import shapes_of
from tcompress.structures.modules.linear import tensor_prefix

Fused = tuple[LayerPlan, ...]
"""Layers whose weights a checkpoint stores in the same tensors."""


def fused_layers(source: SourceModel, layers: Sequence[LayerPlan]) -> list[Fused]:
    """Groups layers by the tensors that store them."""
    groups: dict[tuple[str, ...], list[LayerPlan]] = {}
    for entry in layers:
        groups.setdefault(source.keymap.sources(path_of(source, entry)).keys, []).append(entry)
    return [*map(tuple, groups.values())]


def fitted_parameters(
    source: SourceModel, entry: LayerPlan, result: BlockResult
) -> Iterator[tuple[str, Tensor]]:
    """Gives the weight of a layer, and its bias, as the model has them, by name."""
    path, tensors = path_of(source, entry), result.layers[entry.key].tensors
    names = (f"{tensor_prefix(entry.parts, index, 0)}w" for index in range(len(entry.parts)))
    yield path, entry.as_stored(torch.cat([tensors[name] for name in names], -2))
    if entry.name in result.biases:
        yield f"{path.rpartition('.')[0]}.bias", result.biases[entry.name]


@dataclass
class PlainTensors:
    """Tensors of rewritten layers by the keys that the source has for them."""

    source: SourceModel
    _names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters that are stored together, by every key that stores them."""
    _last: tuple[tuple[str, ...], dict[str, Tensor]] = ((), {})  # names, and what stores them

    def add(self, fused: Fused) -> dict[str, tuple[int, ...]]:
        """Notes layers, and gives the shapes of all tensors that store them."""
        shapes_here = {
            k: shape for entry in fused for k, shape in shapes_of(entry, self.source).items()
        }
        keymap = self.source.keymap
        stored_shapes: dict[str, tuple[int, ...]] = {}
        for names in dict.fromkeys(map(keymap.stored_together, shapes_here)):
            dense = keymap.model.get_parameter_or_buffer
            shapes = {name: shapes_here.get(name) or tuple(dense(name).shape) for name in names}
            empty = {name: torch.empty(size, device="meta") for name, size in shapes.items()}
            stored = keymap.as_stored(empty)
            self._names |= dict.fromkeys(stored, names)
            stored_shapes |= {key: tuple(tensor.shape) for key, tensor in stored.items()}
        return stored_shapes

    def value(self, key: str, fused: Fused, result: BlockResult) -> Tensor:
        """Gives one of these tensors as it was fitted."""
        names = self._names[key]
        if self._last[0] != names:  # experts are made of one stack
            fitted: Mapping[str, Tensor] = {
                name: tensor
                for entry in fused
                for name, tensor in fitted_parameters(self.source, entry, result)
            }
            values = {name: self._value(name, fitted) for name in names}
            self._last = names, self.source.keymap.as_stored(values)
        return self._last[1][key]

    def _value(self, name: str, known: Mapping[str, Tensor]) -> Tensor:
        if name in known:
            return known[name]
        return read_finite(self.source.store, self.source.keymap, name, CPU)
