"""What a conversion writes: every tensor of the output, and how its value is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isnan

import torch
from torch import Tensor

from tcompress.artifact.shards import Stored
from tcompress.conversion.blocks import BlockResult
from tcompress.conversion.fit import WIDER, FittedLayer
from tcompress.conversion.start import generator_of, projection_moments
from tcompress.errors import FitError
from tcompress.integration.attention import first_values
from tcompress.integration.build import stored_name
from tcompress.integration.forms import first_table
from tcompress.planning.disk import rewritten_names
from tcompress.planning.embeddings import tied_to
from tcompress.planning.entries import AttentionPlan, FormPlan, LayerPlan
from tcompress.source import SourceModel, read_finite
from tcompress.source.keymap import FACTOR_PREFIX

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
        started: Attentions by the names of the tensors that their mechanisms store.
        moved: Checkpoint names of dense tensors by the name under which they are stored.
        parts: Dense parameters of the model by the name under which they are stored, where the
            checkpoint has them fused with what is rewritten.
        positions: Tables of positions that are made anew, by checkpoint name.
        tensors: Everything that will be written.
        adapted: First values of mechanisms that calibration data told, by checkpoint name.
        begun: The attention whose first values were made last, and these, by checkpoint name.
    """

    source: SourceModel
    dtype: torch.dtype | None
    copied: set[str] = field(default_factory=set)
    made: dict[str, Cluster] = field(default_factory=dict)
    started: dict[str, AttentionPlan] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    positions: dict[str, FormPlan] = field(default_factory=dict)
    tensors: list[Stored] = field(default_factory=list)
    adapted: dict[str, Tensor] = field(default_factory=dict)
    begun: tuple[str, dict[str, Tensor]] = ("", {})

    @classmethod
    def of(
        cls,
        source: SourceModel,
        layers: Sequence[LayerPlan],
        dtype: torch.dtype | None,
        attention: Sequence[AttentionPlan] = (),
        forms: Sequence[FormPlan] = (),
    ) -> Outputs:
        """Lists the outputs of a plan: tables of embeddings among the layers."""
        self = cls(source, dtype)
        self.positions = {f"{e.name}.weight": e for e in forms if e.kind == "positions"}
        replaced: dict[str, list[Cluster]] = {}  # several where the checkpoint fuses layers
        for cluster in clusters_of(layers):
            for entry in cluster:
                for key in self._sources(entry):
                    replaced.setdefault(key, []).append(cluster)
        done: set[int] = set()
        self.parts = source.keymap.apart(rewritten_names(source, layers))
        guarded = {self._key(e.guard.name, "weight"): e for e in attention if e.guard}
        unused = {
            self._key(layer.name, leaf)
            for entry in attention
            for layer in entry.unused
            for leaf in (("weight", "bias") if layer.bias else ("weight",))
        }
        store = source.store
        useless = {*source.keymap.stale, *source.keymap.unmatched, *unused}
        for key in sorted(store.keys(), key=lambda key: (store.file_of(key), key)):
            if key in useless:
                continue
            if key in guarded:
                guard = guarded[key].guard
                assert guard is not None
                name = f"{guard.name}.{FACTOR_PREFIX}weight"
                self.moved[name] = key
                self.tensors.append(Stored(name, guard.shape, self._cast(key)))
            elif key not in replaced:
                self.copied.add(key)
                self.tensors.append(Stored(key, tuple(store.shape(key)), self._cast(key)))
            for cluster in replaced.get(key, ()):
                if id(cluster) not in done:
                    done.add(id(cluster))
                    self._add_cluster(cluster)
        for name, path in self.parts.items():
            shape = tuple(source.keymap.model.get_parameter_or_buffer(path).shape)
            dtype = self._cast(source.keymap.sources(path).keys[0])
            self.tensors.append(Stored(name, shape, dtype))
        for other in attention:
            self._add_mechanism(other)
        return self

    def take(self, block: Callable[[str], BlockResult | None]) -> None:
        """Takes over what calibration data told of the first values of mechanisms.

        Args:
            block: Reads the fits of a block by its name in the model.
        """
        for name in dict.fromkeys(entry.block for entry in self.started.values()):
            result = block(self.source.keymap.runtime_name(name) or name)
            self.adapted |= result.attention if result is not None else {}

    def given(self, item: Stored) -> Tensor | None:
        """Makes the value of a tensor that is not fitted; None for one that is.

        Raises:
            FitError: It is carried over and holds NaN.
        """
        if item.key in self.positions:
            drawn = self.source.store.tensor(item.key)
            return first_table(self.positions[item.key], drawn).to(item.dtype)
        if item.key in self.parts:
            keymap = self.source.keymap
            return read_finite(self.source.store, keymap, self.parts[item.key]).to(item.dtype)
        if item.key in self.copied or item.key in self.moved:
            return copied_value(self.source, item, self.moved.get(item.key))
        if item.key in self.started:
            entry = self.started[item.key]
            if self.begun[0] != entry.name:  # tensors of one attention follow each other
                self.begun = entry.name, started_values(self.source, entry)
            return self.adapted.get(item.key, self.begun[1][item.key]).to(item.dtype)
        return None

    def _key(self, name: str, leaf: str) -> str:
        """Name in the checkpoint of a tensor of a planned module."""
        path = self.source.keymap.runtime_name(name) or name
        return self.source.keymap.sources(f"{path}.{leaf}").keys[0]

    def _add_mechanism(self, entry: AttentionPlan) -> None:
        dtype = self._cast(self._key(entry.like, "weight"))
        shapes = dict(entry.tensor_shapes) | dict.fromkeys(entry.guards, (0,))
        for key, shape in shapes.items():
            self.started[key] = entry
            self.tensors.append(Stored(key, shape, dtype))

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
        if not bool(torch.isfinite(values["bias"]).all()):
            raise FitError(f"the bias of layer `{entry.name}` does not fit into {dtype}", WIDER)
    return {f"{entry.name}.{name}": tensor for name, tensor in values.items()}


def started_values(source: SourceModel, entry: AttentionPlan) -> dict[str, Tensor]:
    """Makes the tensors of a mechanism, and empty ones under the names of dense weights.

    Args:
        source: The dense model; with a seed it is trained from scratch.
        entry: The attention.
    """
    guards = {key: torch.empty(0) for key in entry.guards}
    if source.seed is None:
        return guards | first_values(entry, moments=projection_moments(source, entry))
    own = generator_of(source.seed, entry.name).initial_seed()
    return guards | first_values(entry, own, pretrained=False)


def copied_value(source: SourceModel, item: Stored, key: str | None = None) -> Tensor:
    """Reads a tensor that is carried over.

    Args:
        source: The dense model.
        item: What is stored.
        key: Its name in the source, where that is another.

    Raises:
        FitError: It holds NaN or infinity, or does not fit into the dtype; what is no weight may
            hold minus infinity, as masks do, and a single number infinity, as bounds do.
    """
    key = item.key if key is None else key
    tensor = source.store.tensor(key)
    if tensor.is_floating_point() and tensor.numel():
        low, high = map(float, torch.aminmax(tensor))
        largest = max(high, -low) if key.endswith(".weight") else high
        name = source.store.name_inside(key)
        bound = tensor.numel() == 1 and abs(high) == inf
        if isnan(largest) or (largest == inf and not bound):
            raise FitError(
                f"tensor `{name}` of the source holds NaN or infinity",
                "repair the checkpoint first",
            )
        if largest > torch.finfo(item.dtype).max and not bound:
            raise FitError(f"tensor `{name}` of the source does not fit into {item.dtype}", WIDER)
    return tensor.to(item.dtype)
