"""One block rewritten: its attention replaced, its layers fitted to what two streams read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.attention.module import CHILD
from tcompress.blockwise.streams import (
    Readings,
    Stream,
    TokenRows,
    first_tensor,
    listed_item,
    queries_and_keys,
    token_rows,
)
from tcompress.data.calibration import CalibrationData
from tcompress.errors import DataError, FitError
from tcompress.fitting.channel_orders import Reductions, lift_of, narrowed_curvature, narrowed_rows
from tcompress.fitting.first_values import adapt
from tcompress.fitting.layer_fits import (
    NO_FACTORS,
    NO_ROUNDINGS,
    FittedLayer,
    LayerMoments,
    SharedFactors,
    fit_layers,
)
from tcompress.fitting.stream_moments import ExpertSums, Routing, SplitSums, routed_arguments
from tcompress.hf.build import SEED, fill, install_attention, install_layers
from tcompress.linalg.rounding import Rounding
from tcompress.models import SourceModel, read_finite
from tcompress.planning.entries import AttentionPlan, FactorsKey, LayerPlan
from tcompress.roles import Block
from tcompress.structures.modules.experts import is_routed
from tcompress.structures.modules.linear import channels_last
from tcompress.structures.modules.shared import FactorsModule

Group = tuple[LayerPlan, ...]
"""Layers that read one input."""


@dataclass(frozen=True, eq=False)
class FitInputs:
    """Statistics and settings of fits, all but what the layers read.

    Attributes:
        source: The dense model.
        damping: Ridge added to the moments.
        moments: Reader of what was measured of a block's layers, by kind and name of the block.
        reductions: Reader of the channels of a block's layers that stay, by name of the block.
        dtype_of: Dtype in which a layer is stored.
        device: Where fits are computed.
        factors: Those that layers share, fitted before.
        roundings: Of tensors of layers that are stored in few bits, by name.
        is_unfitted: Tells layers that stay as they are while nothing before them has changed.
    """

    source: SourceModel
    damping: float
    moments: Callable[[str, str], Mapping[str, Tensor]]
    reductions: Callable[[str], Reductions]
    dtype_of: Callable[[LayerPlan], torch.dtype]
    device: torch.device
    factors: SharedFactors = field(default_factory=lambda: NO_FACTORS)
    roundings: Mapping[str, Rounding] = field(default_factory=lambda: NO_ROUNDINGS)
    is_unfitted: Callable[[LayerPlan], bool] = lambda _: False


@dataclass(frozen=True)
class BlockResult:
    """Fits of one block."""

    block: str  # its name
    layers: dict[str, FittedLayer]  # by weight name
    biases: dict[str, Tensor]  # new ones, by layer name
    attention: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of attentions that begin with what queries and keys are like, by stored name."""


@dataclass(frozen=True, eq=False)
class StreamPairs:
    """Passes of the calibration data through the dense model, and through the rewritten one.

    They may be the same passes, where nothing before a block is rewritten.
    """

    data: CalibrationData  # batches held out are only measured on
    dense: Sequence[Stream]
    new: Sequence[Stream]

    def __iter__(self) -> Iterator[tuple[int, Stream, Stream]]:
        for index, (dense, new) in enumerate(zip(self.dense, self.new, strict=True)):
            yield index, dense, new

    def holds_out(self, index: int) -> bool:
        return index in self.data.holdout


@dataclass(frozen=True, eq=False)
class RewrittenBlock:
    """One block as it is, and its copy in which layers are replaced."""

    block: Block
    dense: nn.Module
    new: nn.Module
    result: BlockResult
    readings: Readings  # of the dense block
    rows: TokenRows  # of the dense block
    reductions: Reductions  # channels that stay
    routing: Routing  # of the dense block's experts

    def relative(self, path: str) -> str:
        """Path below the block."""
        return path.removeprefix(f"{self.block.name}.")

    def inputs(
        self, path: str, dense: Stream, new: Stream, arguments: Callable[..., Any] = first_tensor
    ) -> tuple[Any, Any]:
        """Inputs of a module in both streams."""
        x = self.readings.of(dense, path, arguments)
        if new is dense and not self.result.layers:  # nothing before it has changed
            return x, x
        return x, Readings(self.new, self.new.forward).of(new, path, arguments)


def dense_readings(block: Block | None, dense: nn.Module, forward: Callable[..., Any]) -> Readings:
    """Readings of a dense block, whose layers' inputs are kept where that is safe.

    Args:
        block: Roles of its layers; None where only the dense model has it.
        dense: The block.
        forward: Its forward pass.
    """
    if block is None:
        return Readings(dense, forward)
    layers = block.layers
    paths = [layer.name.removeprefix(f"{block.name}.") for layer in layers]
    # Which experts run, and on which tokens, is heard from every run.
    experts = any(layer.kind == "experts" or layer.routed for layer in layers)
    chosen = experts or any(listed_item(dense, path) for path in paths)
    return Readings(dense, forward, () if chosen else paths)


@dataclass(frozen=True, eq=False)
class BlockRewriter:
    """Maker of copies of blocks in which layers are replaced, as they are fitted one by one.

    Attributes:
        inputs: Statistics and settings of fits.
        streams: Passes that wait at the block.
        layers: Plans of layers, of whatever block.
        attention: Plans of attentions that are replaced.
    """

    inputs: FitInputs
    streams: StreamPairs
    layers: Sequence[LayerPlan]
    attention: Sequence[AttentionPlan] = ()
    _installed: dict[FactorsKey, FactorsModule] = field(default_factory=dict)
    """Modules of factors that layers of several blocks share, once their owners are in place."""

    def rewrite(
        self,
        block: Block,
        dense: nn.Module,
        readings: Readings,
        stored: BlockResult | None = None,
        progress: Callable[[str, str], None] = lambda *_: None,
    ) -> RewrittenBlock:
        """Rewrite a copy of a block, whose layers are fitted first unless fits are stored."""
        new = copy.deepcopy(dense)
        del new.forward  # the copy runs by itself; the original pauses its stream
        routed = [layer.name for layer in block.layers if layer.routed]
        rewritten = RewrittenBlock(
            block,
            dense,
            new,
            BlockResult(block.name, {}, {}) if stored is None else stored,
            readings,
            TokenRows(dense, block),
            self.inputs.reductions(block.name) if stored is None else {},
            Routing(dense, {name.removeprefix(f"{block.name}.") for name in routed}),
        )
        self._replace_attention(rewritten)
        for layers in block.groups:
            keys = [(layer.name, layer.parameter) for layer in layers]
            group = tuple(self._entries[key] for key in keys if key in self._entries)
            if not group:
                continue
            progress(block.name, ", ".join(entry.role for entry in group))
            if stored is None:
                self._fit_group(rewritten, group)
            self._install(rewritten, group)
        rewritten.rows.close()
        rewritten.routing.replay_in(new)
        return rewritten

    @cached_property
    def _paths(self) -> dict[str, str]:
        """Paths of layers in the model, by name in the checkpoint."""
        runtime = self.inputs.source.keymap.runtime_name
        return {entry.name: runtime(entry.name) or "" for entry in self.layers}

    @cached_property
    def _entries(self) -> dict[tuple[str, str], LayerPlan]:
        """Plans by path and parameter."""
        return {(self._paths[entry.name], entry.parameter): entry for entry in self.layers}

    def _replace_attention(self, rewritten: RewrittenBlock) -> None:
        """Replace the block's attention, before anything is fitted.

        What an interrupted run stored of it is used; what is missing is added.
        """
        name, new, source = rewritten.block.name, rewritten.new, self.inputs.source
        runtime = source.keymap.runtime_name

        def relative(stored: str) -> str:
            return rewritten.relative(runtime(stored) or "")

        entries = [e for e in self.attention if (runtime(e.name) or "").startswith(f"{name}.")]
        # The guard is a matter of storage.
        plain = [entry.model_copy(update={"guard": None}) for entry in entries]
        device = self.inputs.device
        modules = install_attention(new, plain, relative, dtype=torch.float32, device=device)
        readings = Readings(new, new.forward)
        fitted = [new for index, _, new in self.streams if not self.streams.holds_out(index)]
        for stored, module in modules.items():
            path, module.name = f"{module.name}.{CHILD}", f"{name}.{module.name}"
            module.fill(SEED, pretrained=True)
            module.requires_grad_(False)
            calls = (readings.of(stream, path, queries_and_keys) for stream in fitted)
            adapt(module, f"{stored}.{CHILD}", rewritten.result.attention, calls)

    def _fit_group(self, rewritten: RewrittenBlock, group: Group) -> None:
        """Fit layers that read one input, and add the fits to the block's result."""
        inputs, first, result = self.inputs, group[0], rewritten.result
        moments = self._group_moments(rewritten, group)
        reductions, store, keymap = rewritten.reductions, inputs.source.store, inputs.source.keymap
        weights, lifts = [], {}
        for entry in group:
            name = f"{self._paths[entry.name]}.{entry.parameter}"
            weight = read_finite(store, keymap, name, inputs.device)
            weights.append(narrowed_rows(entry, entry.matrix(weight), reductions))
            if entry.reads:
                lifts[entry.name] = lift_of(entry, reductions, inputs.device)
        curvatures = inputs.moments("curvature", rewritten.block.name)
        dtype = inputs.dtype_of(first)
        fitted = fit_layers(
            group,
            weights,
            [[item[entry.bias] for item in moments] for entry in group],
            dtype=dtype,
            damping=inputs.damping,
            curvatures={
                entry.name: narrowed_curvature(entry, curvatures[entry.name], reductions)
                for entry in group
                if entry.name in curvatures
            },
            factors=inputs.factors,
            lifts=lifts,
            roundings=inputs.roundings,
        )
        for entry, layer in zip(group, fitted, strict=True):
            result.layers[entry.key] = layer
            if entry.bias and entry.kind != "experts":
                path = f"{rewritten.relative(self._paths[entry.name])}.bias"
                bias = narrowed_rows(entry, rewritten.dense.get_parameter(path), reductions)
                shift = 0.0 if layer.shift is None else layer.shift
                result.biases[entry.name] = (bias.double() + shift).to(dtype)

    def _group_moments(
        self, rewritten: RewrittenBlock, group: Group
    ) -> list[dict[bool, LayerMoments]]:
        """Moments of a group's input, or of every expert's, by whether they are centred."""
        first = group[0]
        path = rewritten.relative(self._paths[first.name])
        try:
            if first.kind != "experts":
                return [self._moments(rewritten, group, path)]
            if is_routed(rewritten.dense.get_submodule(path)):
                return self._expert_moments(rewritten, first, path)
            return [{first.bias: LayerMoments()}]  # nothing is known of their routing
        except FitError as error:
            raise FitError(f"layer `{first.name}`: {error.message}", error.hint) from error

    def _moments(
        self, rewritten: RewrittenBlock, group: Group, relative: str
    ) -> dict[bool, LayerMoments]:
        """Moments of a group's input, by whether they are centred (layers with a bias)."""
        if not rewritten.result.layers and all(map(self.inputs.is_unfitted, group)):
            return {entry.bias: LayerMoments() for entry in group}
        sums = SplitSums()
        name, path = group[0].name, self._paths[group[0].name]
        listed = rewritten.rows.is_listed(path)
        weights = self._token_weights(rewritten.block.name, group)
        for index, dense, new in self.streams:
            rewritten.rows.batch = dense.batch
            x, y = rewritten.inputs(relative, dense, new)
            if listed and x is None:  # an expert that no token of these chose
                continue
            tokens = x.shape[:-1] if x is not None else None
            if listed and (y is None or y.shape[:-1] != tokens or tokens.numel() < _tokens(dense)):
                y = x  # in the two streams other tokens may choose it
            if x is None or y is None:
                raise DataError(f"layer `{name}` did not run on calibration data")
            same = y is x
            x = channels_last(rewritten.dense.get_submodule(relative), x)
            y = x if same else channels_last(rewritten.new.get_submodule(relative), y)
            rows, mask = rewritten.rows.of(x, path, group[0].role)
            if y.shape[:-1].numel() != x.shape[:-1].numel():
                raise DataError(
                    f"layer `{name}` reads other tokens once others are rewritten",
                    "convert this model without data: `--calib none`",
                )
            new_rows = rows if y is x else y.flatten(0, -2)
            if y is not x and group[0].reads:
                new_rows = group[0].reads.gather(new_rows)
            if mask is not None:
                same, rows = new_rows is rows, rows[mask]
                new_rows = rows if same else new_rows[mask]
            row_weights = weights.get(index)
            if row_weights is not None and len(row_weights) != len(rows):
                row_weights = None
            sums.add(rows, new_rows, holdout=self.streams.holds_out(index), weights=row_weights)
        return {flag: sums.moments(centred=flag) for flag in {entry.bias for entry in group}}

    def _token_weights(self, block: str, group: Group) -> dict[int, Tensor]:
        """Worth of the rows of a batch to all layers of a group, by batch."""
        data, measured = self.streams.data, self.inputs.moments("tokens", block)
        summed: dict[int, Tensor] = {}
        for entry in group:
            keys = {index: f"{entry.name}/{data.place(index)}" for index in data.fitted}
            named = {index: measured.get(key) for index, key in keys.items()}
            weights = {i: item.double() for i, item in named.items() if item is not None}
            mean = torch.cat([*weights.values()]).mean() if weights else 1.0
            for index, item in weights.items():
                before = summed.get(index)
                summed[index] = item / mean + (0.0 if before is None else before)
        return summed

    def _expert_moments(
        self, rewritten: RewrittenBlock, entry: LayerPlan, relative: str
    ) -> list[dict[bool, LayerMoments]]:
        """Moments of one input per expert; those that no token chose are fitted without data."""
        modules = rewritten.dense.get_submodule(relative), rewritten.new.get_submodule(relative)
        gathered = ExpertSums(*modules, down=entry.parameter == "down_proj")
        for index, dense, new in self.streams:
            routed, rerouted = rewritten.inputs(relative, dense, new, routed_arguments)
            if routed is None or rerouted is None:
                raise DataError(f"layer `{entry.name}` did not run on calibration data")
            _, mask = token_rows(routed[0], dense.batch, rewritten.block.name, entry.role)
            gathered.add(routed, rerouted[0], mask, holdout=self.streams.holds_out(index))
        return [{entry.bias: sums.moments(centred=False)} for sums in gathered.sums]

    def _install(self, rewritten: RewrittenBlock, group: Group) -> None:
        """Put fitted layers into the block's copy."""
        modules = install_layers(
            rewritten.new,
            group,
            lambda name: rewritten.relative(self._paths[name]),
            factors=self._installed,
            dtype=torch.float32,
            device=self.inputs.device,
        )
        for entry in group:
            module = modules[entry.name]
            fill(module, entry, rewritten.result.layers[entry.key].tensors)
            if entry.bias and entry.kind != "experts":
                with torch.no_grad():
                    module.get_parameter("bias").copy_(rewritten.result.biases[entry.name])
            module.requires_grad_(False)


def _tokens(stream: Stream) -> int:
    """Number of tokens that a block is given."""
    call = stream.waiting
    return first_tensor(*call.args, **call.kwargs).shape[:-1].numel()
