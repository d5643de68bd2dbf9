"""What a conversion writes: every tensor of the output, and how its value is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tcompress.artifact.shards import Stored
from tcompress.conversion.fit import FittedLayer
from tcompress.errors import FitError
from tcompress.integration.build import stored_name
from tcompress.planning.embeddings import tied_to
from tcompress.planning.entries import LayerPlan
from tcompress.source import SourceModel

Cluster = tuple[LayerPlan, ...]
"""Layers that are fitted together: an owner of input sides and those that share them."""


def clusters_of(layers: Sequence[LayerPlan]) -> list[Cluster]:
    """Groups planned layers by the input sides they share."""
    members: dict[str, list[LayerPlan]] = {}
    for entry in layers:
        name = entry.input_of or f"{entry.name}.{entry.parameter}"
        if entry.input_of is not None:
            name = f"{entry.input_of}.weight"
        members.setdefault(name, []).append(entry)
    return [tuple(group) for group in members.values()]


@dataclass
class Outputs:
    """All tensors of the output, in the order of the source's weight files.

    Attributes:
        source: The dense model.
        dtype: Dtype asked for, or None to keep that of the source.
        copied: Checkpoint names of tensors that are carried over.
        made: Clusters by the names of the tensors they yield.
        tensors: Everything that will be written.
    """

    source: SourceModel
    dtype: torch.dtype | None
    copied: set[str] = field(default_factory=set)
    made: dict[str, Cluster] = field(default_factory=dict)
    tensors: list[Stored] = field(default_factory=list)

    @classmethod
    def of(
        cls, source: SourceModel, layers: Sequence[LayerPlan], dtype: torch.dtype | None
    ) -> Outputs:
        """Lists the outputs of a plan: tables of embeddings among the layers."""
        self = cls(source, dtype)
        replaced: dict[str, Cluster] = {}
        for cluster in clusters_of(layers):
            for entry in cluster:
                for key in self._sources(entry):
                    replaced[key] = cluster
        done: set[int] = set()
        store = source.store
        for key in sorted(store.keys(), key=lambda key: (store.file_of(key), key)):
            if key not in replaced:
                self.copied.add(key)
                self.tensors.append(Stored(key, tuple(store.shape(key)), self._cast(key)))
            elif id(replaced[key]) not in done:
                done.add(id(replaced[key]))
                self._add_cluster(replaced[key])
        return self

    def _sources(self, entry: LayerPlan) -> Iterator[str]:
        keymap, path = self.source.keymap, self.runtime_name(entry)
        yield from keymap.sources(f"{path}.{entry.parameter}").keys
        if entry.kind == "embedding":  # a tied head may have been stored a second time
            tied = (keymap.sources(f"{name}.weight").keys for name in tied_to(self.source, path))
            yield from (key for keys in tied for key in keys)
        if entry.bias and entry.kind != "experts":
            yield from keymap.sources(f"{self.runtime_name(entry)}.bias").keys

    def runtime_name(self, entry: LayerPlan) -> str:
        """Returns the module path of a planned layer in the source model."""
        return self.source.keymap.runtime_name(entry.name) or entry.name

    def dtype_of(self, entry: LayerPlan) -> torch.dtype:
        """Returns the dtype in which a rewritten layer is stored."""
        return self._cast(next(iter(self._sources(entry))))

    def _cast(self, key: str) -> torch.dtype:
        own = self.source.store.dtype(key)
        return own if self.dtype is None or not own.is_floating_point else self.dtype

    def _add_cluster(self, cluster: Cluster) -> None:
        for entry in cluster:
            dtype = self.dtype_of(entry)
            shapes = {stored_name(entry, name): s for name, s in entry.tensor_shapes.items()}
            shapes[entry.parameter] = (0,)
            if entry.bias and entry.kind != "experts":
                shapes["bias"] = (entry.out_features,)
            for name, shape in shapes.items():
                key = f"{entry.name}.{name}"
                self.made[key] = cluster
                self.tensors.append(Stored(key, shape, dtype))


def layer_values(
    entry: LayerPlan, fitted: FittedLayer, bias: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns everything that is stored for one layer, by checkpoint name."""
    values = {stored_name(entry, name): tensor for name, tensor in fitted.tensors.items()}
    values[entry.parameter] = torch.empty(0, dtype=dtype)  # the guard under the dense name
    if bias is not None:
        values["bias"] = bias.to(dtype)
    return {f"{entry.name}.{name}": tensor for name, tensor in values.items()}


def copied_value(source: SourceModel, item: Stored) -> Tensor:
    """Reads a tensor that is carried over.

    Raises:
        FitError: It holds NaN; infinities may be masks.
    """
    tensor = source.store.tensor(item.key)
    if tensor.is_floating_point() and tensor.numel():
        low, high = torch.aminmax(tensor)
        if bool(torch.isnan(low)) or bool(torch.isnan(high)):
            name = source.store.name_inside(item.key)
            raise FitError(
                f"tensor `{name}` of the source holds NaN", "repair the checkpoint first"
            )
    return tensor.to(item.dtype)
