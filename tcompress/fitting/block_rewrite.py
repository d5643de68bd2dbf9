"""One block rewritten: its attention replaced, its layers fitted to what two streams read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tcompress import processes
from tcompress.attention.module import CHILD
from tcompress.blockwise.streams import (
    Readings,
    Stream,
    TokenRows,
    cast_to,
    first_tensor,
    listed_item,
    queries_and_keys,
    room_on,
    token_rows,
)
from tcompress.data.calibration import CalibrationData
from tcompress.errors import WITHOUT_DATA, DataError, FitError
from tcompress.fitting.channel_orders import Reductions, lift_of, narrowed_curvature, narrowed_rows
from tcompress.fitting.embeddings import read_table
from tcompress.fitting.first_values import adapt, start_layer
from tcompress.fitting.layer_fits import (
    NO_FACTORS,
    BlockResult,
    LayerMoments,
    SharedFactors,
    fit_layers,
)
from tcompress.hf.build import SEED, fill, install_attention, install_layers
from tcompress.linalg.moments import WIDE, Moments, MomentSums, PairedRows
from tcompress.linalg.rounding import Rounding
from tcompress.models import SourceModel, read_finite
from tcompress.planning.costs import path_of
from tcompress.planning.entries import AttentionPlan, FactorsKey, LayerPlan
from tcompress.progress import MOMENTS, timed
from tcompress.roles import Block
from tcompress.structures.modules.experts import (
    StructuredExperts,
    activated,
    bias_of,
    is_routed,
    up_name,
)
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
    roundings: Mapping[str, Rounding] = field(default_factory=dict)
    is_unfitted: Callable[[LayerPlan], bool] = lambda _: False


def dense_matrix(source: SourceModel, entry: LayerPlan, device: torch.device) -> Tensor:
    """Read the dense weight of a planned layer, or table.  # ([experts,] out, in)."""
    if entry.kind == "embedding":
        return read_table(source, entry, device)
    name = path_of(source, entry)
    return entry.matrix(read_finite(source.store, source.keymap, name, device))


def fit_group(
    inputs: FitInputs,
    group: Group,
    result: BlockResult,
    reductions: Reductions,
    moments: Sequence[Sequence[LayerMoments]] = (),
) -> None:
    """Fit layers that read one input, and add the fits to the result of their block.

    Without moments they are fitted to their weights, or drawn where the model begins at random.
    """
    source, device, first = inputs.source, inputs.device, group[0]
    dtype, seed = inputs.dtype_of(first), source.seed
    weights = [dense_matrix(source, entry, device) for entry in group]
    weights = [narrowed_rows(*pair, reductions) for pair in zip(group, weights, strict=True)]
    if seed is not None:
        factors, pairs = inputs.factors, zip(group, weights, strict=True)
        with torch.no_grad():
            fitted = [start_layer(e, w, dtype=dtype, factors=factors, seed=seed) for e, w in pairs]
    else:
        curvatures = inputs.moments("curvature", result.block) if moments else {}
        fitted = fit_layers(
            group,
            weights,
            moments or [[LayerMoments()] for _ in group],
            dtype=dtype,
            damping=inputs.damping,
            curvatures={
                entry.name: narrowed_curvature(entry, curvatures[entry.name], reductions)
                for entry in group
                if entry.name in curvatures
            },
            factors=inputs.factors,
            lifts={e.name: lift_of(e, reductions, device) for e in group if e.reads},
            roundings=inputs.roundings if moments else {},
        )
    for entry, layer in zip(group, fitted, strict=True):
        result.layers[entry.key] = layer
        if entry.bias and entry.kind != "experts":
            name = f"{path_of(source, entry).removesuffix(entry.parameter)}bias"
            bias = read_finite(source.store, source.keymap, name, device)
            bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
            shift = 0.0 if layer.shift is None else layer.shift
            exact = narrowed_rows(entry, bias, reductions).double() + shift
            result.biases[entry.name] = exact.to(inputs.dtype_of(entry))


class SplitSums:
    """Moments of one layer input, of rows to fit on and of rows held out."""

    def __init__(self) -> None:
        self._sums: dict[bool, MomentSums | PairedRows] = {}

    def add(
        self, dense: Tensor, new: Tensor, *, holdout: bool, weights: Tensor | None = None
    ) -> None:
        """Add paired rows of both streams, and what they are worth.  # (rows, d), (rows,)."""
        if holdout not in self._sums:
            if holdout and dense.shape[-1] >= WIDE:
                self._sums[holdout] = PairedRows()
            else:
                size = (dense.shape[-1], new.shape[-1])
                self._sums[holdout] = MomentSums(*size, dense.device)
        self._sums[holdout].add(dense, new, weights)

    def merge(self, other: SplitSums) -> SplitSums:
        """Add what another sum has taken."""
        for holdout, sums in other._sums.items():
            ours = self._sums.get(holdout)
            self._sums[holdout] = sums if ours is None else ours.merge(sums)  # type: ignore[arg-type]
        return self

    def moments(self, *, centred: bool, last: bool = False) -> LayerMoments:
        """Return both moments; without rows to fit on there are none (a data-free fit).

        With `last` the sums are given up for them.
        """
        train, held = self._sums.get(False), self._sums.get(True)
        if train is None or not train.rows:
            return LayerMoments()
        fitted = train.moments(centred=centred, last=last)
        assert isinstance(fitted, Moments)
        return LayerMoments(
            fitted,
            held.moments(centred=centred, last=last) if held is not None and held.rows else None,
        )


# Routed experts during calibration: both streams follow the dense stream's routing.


Arguments = tuple[Any, ...]
Routed = tuple[Tensor, Tensor, Tensor]  # hidden states, experts of each token, their weights


def routed_arguments(*args: Tensor, **kwargs: Tensor) -> Routed:
    """Return the arguments of routed experts, whatever the family calls them."""
    hidden, index, weights = (*args, *kwargs.values())
    return hidden, index, weights


class Routing:
    """The dense stream's routing in a block, recorded and replayed in the compressed one.

    Without it the two streams would send a token to different experts, and rows would not pair.
    """

    def __init__(self, dense: nn.Module, paths: Collection[str]) -> None:
        self.paths = tuple(paths)
        self._routes: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.current = 0
        for path in self.paths:
            hook = partial(self._record, path)
            dense.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def replay_in(self, new: nn.Module) -> None:
        """Make the experts of the compressed block follow the recorded routing."""
        for path in self.paths:
            hook = partial(self._replay, path)
            new.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def _record(self, path: str, host: nn.Module, args: Arguments, kwargs: dict[str, Any]) -> None:
        _, index, weights = routed_arguments(*args, **kwargs)
        self._routes[path, self.current] = (index, weights)

    def _replay(
        self, path: str, host: nn.Module, args: Arguments, kwargs: dict[str, Any]
    ) -> tuple[Arguments, dict[str, Any]]:
        hidden, _, _ = routed_arguments(*args, **kwargs)
        return (hidden, *self._routes[path, self.current]), {}


@dataclass(frozen=True, eq=False)
class StreamPairs:
    """Passes of the calibration data through the dense model, and through the rewritten one.

    They may be the same passes, where nothing before a block is rewritten. Several processes have
    some of the batches each.
    """

    data: CalibrationData  # batches held out are only measured on
    dense: Mapping[int, Stream]  # by index of the batch
    new: Mapping[int, Stream]

    def __iter__(self) -> Iterator[tuple[int, Stream, Stream]]:
        for index, dense in self.dense.items():
            yield index, dense, self.new[index]

    def of_run(self, run: int) -> Iterator[tuple[int, Stream, Stream]]:
        """Passes of one of the runs that batches are summed up in."""
        for index in processes.batches_of(run, len(self.data.batches)):
            yield index, self.dense[index], self.new[index]

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
    autocast: torch.dtype | None  # dtype of products in passes

    @property
    def forward(self) -> Callable[..., Any]:
        """Forward pass of the copy."""
        return cast_to(self.autocast, next(self.dense.parameters()).device, self.new.forward)

    def inputs(
        self, path: str, dense: Stream, new: Stream, arguments: Callable[..., Any] = first_tensor
    ) -> tuple[Any, Any]:
        """Inputs of a module in both streams."""
        x = self.readings.of(dense, path, arguments)
        if new is dense and not self.result.layers:  # nothing before it has changed
            return x, x
        return x, new.waiting.input_of(self.new.get_submodule(path), self.forward, arguments)


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
    device = next(dense.parameters()).device
    return Readings(dense, forward, () if chosen else paths, room_on(device))


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
        progress: Callable[[str], None] = lambda _: None,
    ) -> RewrittenBlock:
        """Rewrite a copy of a block, whose layers are fitted first unless fits are stored."""
        # Weights are shared: layers are replaced as a whole, and nothing writes into what stays.
        shared = {id(item): item for item in (*dense.parameters(), *dense.buffers())}
        new = copy.deepcopy(dense, shared)
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
            self.inputs.source.autocast,
        )
        self._replace_attention(rewritten)
        for layers in block.groups:
            names = (layer.weight_name for layer in layers)
            group = tuple(self._entries[name] for name in names if name in self._entries)
            if not group:
                continue
            progress(f"{block.name} {', '.join(entry.role for entry in group)}")
            if stored is None:
                moments = self._moments(rewritten, group)
                fit_group(self.inputs, group, rewritten.result, rewritten.reductions, moments)
            self._install(rewritten, group)
        rewritten.rows.close()
        rewritten.routing.replay_in(new)
        return rewritten

    @cached_property
    def _entries(self) -> dict[str, LayerPlan]:
        """Plans by name of the weight in the model."""
        return {path_of(self.inputs.source, entry): entry for entry in self.layers}

    def _path(self, name: str) -> str:
        """Path in the model of a planned module."""
        return self.inputs.source.keymap.runtime_name(name) or name

    def _relative(self, rewritten: RewrittenBlock, name: str) -> str:
        """Path of a planned module below its block."""
        return self._path(name).removeprefix(f"{rewritten.block.name}.")

    def _replace_attention(self, rewritten: RewrittenBlock) -> None:
        """Replace the block's attention, before anything is fitted.

        What an interrupted run stored of it is used; what is missing is added.
        """
        name, new, device = rewritten.block.name, rewritten.new, self.inputs.device
        entries = [e for e in self.attention if self._path(e.name).startswith(f"{name}.")]
        # The guard is a matter of storage.
        plain = [entry.model_copy(update={"guard": None}) for entry in entries]
        relative = partial(self._relative, rewritten)
        modules = install_attention(new, plain, relative, dtype=torch.float32, device=device)
        readings = Readings(new, rewritten.forward)
        fitted = [new for index, _, new in self.streams if not self.streams.holds_out(index)]
        for stored, module in modules.items():
            path, module.name = f"{module.name}.{CHILD}", f"{name}.{module.name}"
            module.fill(SEED, pretrained=True)
            module.requires_grad_(False)
            calls = (readings.of(stream, path, queries_and_keys) for stream in fitted)
            adapt(module, f"{stored}.{CHILD}", rewritten.result.attention, calls)

    def _moments(self, rewritten: RewrittenBlock, group: Group) -> list[Sequence[LayerMoments]]:
        """Moments of the input, or of every expert's, for every layer of a group."""
        first = group[0]
        path = self._relative(rewritten, first.name)
        try:
            if first.kind != "experts":
                sums = self._sums(rewritten, group, path)
                flags = {entry.bias for entry in group}
                last = len(flags) == 1
                moments = {flag: [sums.moments(centred=flag, last=last)] for flag in flags}
                return [moments[entry.bias] for entry in group]
            if not is_routed(rewritten.dense.get_submodule(path)):
                return [[LayerMoments()]] * len(group)  # nothing is known of their routing
            experts = self._expert_sums(rewritten, first, path)
            return [[sums.moments(centred=False, last=True) for sums in experts]] * len(group)
        except FitError as error:
            raise FitError(f"layer `{first.name}`: {error.message}", error.hint) from error

    def _sums(self, rewritten: RewrittenBlock, group: Group, relative: str) -> SplitSums:
        """Moments of a group's input in both streams; none of what stays as it was."""
        if not rewritten.result.layers and all(map(self.inputs.is_unfitted, group)):
            return SplitSums()
        name, path = group[0].name, self._path(group[0].name)
        listed = path in rewritten.rows.items
        weights = self._token_weights(rewritten.block.name, group)
        total = processes.Total(SplitSums.merge, self.inputs.device)
        for run in total.runs():
            sums = SplitSums()
            for index, dense, new in self.streams.of_run(run):
                rewritten.rows.batch = dense.batch
                x, y = rewritten.inputs(relative, dense, new)
                if listed and x is None:  # an expert that no token of these chose
                    continue
                tokens = x.shape[:-1] if x is not None else None
                if listed and (
                    y is None or y.shape[:-1] != tokens or tokens.numel() < _tokens(dense)
                ):
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
                        WITHOUT_DATA,
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
                holdout = self.streams.holds_out(index)
                with timed(MOMENTS):
                    sums.add(rows, new_rows, holdout=holdout, weights=row_weights)
            total.add(sums)
        return total.whole()

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

    def _expert_sums(
        self, rewritten: RewrittenBlock, entry: LayerPlan, relative: str
    ) -> Sequence[SplitSums]:
        """Moments of one input per expert; those that no token chose are fitted without data."""
        experts: Any = rewritten.dense.get_submodule(relative)
        new: Any = rewritten.new.get_submodule(relative)
        down, name = entry.parameter == "down_proj", up_name(experts)
        bias, up = bias_of(experts, name), getattr(experts, name)
        up = up.mT if experts.is_transposed else up
        stack = new.stacks.get(name) if down and isinstance(new, StructuredExperts) else None
        new_up = up if stack is None else stack.dense_weight(torch.float32)

        def read(tokens: Tensor, weight: Tensor, expert: int) -> Tensor:
            if not down:
                return tokens
            shift = None if bias is None else bias[expert]
            return activated(experts, linear(tokens, weight[expert], shift))

        def merge(total: list[SplitSums], more: list[SplitSums]) -> list[SplitSums]:
            return [*map(SplitSums.merge, total, more)]

        total = processes.Total(merge, self.inputs.device)
        for run in total.runs():
            sums = [SplitSums() for _ in up]
            for index, dense, other in self.streams.of_run(run):
                routed, rerouted = rewritten.inputs(relative, dense, other, routed_arguments)
                if routed is None or rerouted is None:
                    raise DataError(f"layer `{entry.name}` did not run on calibration data")
                hidden, chosen, weights = routed
                _, mask = token_rows(hidden, dense.batch, rewritten.block.name, entry.role)
                # A weight of zero means that a token skips its expert, as in some families.
                alike = weights.shape == chosen.shape
                counts = weights != 0 if alike else torch.ones_like(chosen).bool()
                for expert, split in enumerate(sums):
                    rows = ((chosen == expert) & counts).any(-1)
                    rows = rows if mask is None else rows & mask
                    if bool(rows.any()):
                        pair = (hidden[rows], up), (rerouted[0][rows], new_up)
                        x, y = (read(*item, expert) for item in pair)
                        split.add(x, y, holdout=self.streams.holds_out(index))
            total.add(sums)
        return total.whole()

    def _install(self, rewritten: RewrittenBlock, group: Group) -> None:
        """Put fitted layers into the block's copy."""
        modules = install_layers(
            rewritten.new,
            group,
            partial(self._relative, rewritten),
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
    return stream.waiting.state.shape[:-1].numel()
