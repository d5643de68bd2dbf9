"""One block rewritten: its attention replaced, its layers fitted to what two streams read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tcompress import processes
from tcompress.attention.module import CHILD
from tcompress.blockwise.sensitivity import merged
from tcompress.blockwise.streams import (
    Readings,
    Stream,
    TokenRows,
    cast_to,
    first_tensor,
    queries_and_keys,
    token_rows,
)
from tcompress.data.calibration import CalibrationData
from tcompress.errors import WITHOUT_DATA, DataError
from tcompress.fitting.channel_orders import (
    Reductions,
    lift_of,
    narrowed_curvature,
    narrowed_rows,
    reductions_of,
)
from tcompress.fitting.first_values import adapt, start_layer
from tcompress.fitting.layer_fits import (
    DATA_FREE,
    MORE_DATA,
    BlockResult,
    LayerMoments,
    LayerToFit,
    SharedFactors,
    dense_matrix,
    fit_layers,
)
from tcompress.hf.build import SEED, fill, install_attention, install_layers
from tcompress.linalg.moments import (
    WIDE,
    Moments,
    MomentSums,
    PairedRows,
    naming,
    puts_out_little,
)
from tcompress.linalg.rounding import Rounding
from tcompress.memory import give_back_memory
from tcompress.models import SourceModel, read_finite
from tcompress.planning.costs import path_of
from tcompress.planning.entries import AttentionPlan, FactorsKey, LayerPlan
from tcompress.planning.sites import module_path
from tcompress.progress import MOMENTS, timed
from tcompress.roles import Block, Layer
from tcompress.structures.modules.experts import (
    StructuredExperts,
    activated,
    bias_of,
    is_routed,
    up_name,
)
from tcompress.structures.modules.linear import channels_last
from tcompress.structures.modules.shared import FactorsModule, factors_module

Group = tuple[LayerPlan, ...]
"""Layers that read one input."""


@dataclass(frozen=True, eq=False)
class FitInputs:
    """Statistics and settings of fits, all but what the layers read."""

    source: SourceModel  # the dense model
    damping: float  # ridge added to the moments
    moments: Callable[[str, str], Mapping[str, Tensor]]
    """Reads what was measured of a block's layers, by kind and name of the block."""
    dtype_of: Callable[[LayerPlan], torch.dtype]  # in which a layer is stored
    device: torch.device  # where fits are computed
    factors: SharedFactors = field(default_factory=dict)  # fitted before
    roundings: Mapping[str, Rounding] = field(default_factory=dict)
    """Of tensors of layers that are stored in few bits, by name."""
    skips_plain: bool = False
    """Whether plain layers stay as they are while nothing before them has changed."""

    def reductions(self, block: str, layers: Sequence[LayerPlan]) -> Reductions:
        """Which channels of a block stay, by name; by the weights alone where no data has told."""
        measured = self.moments("channels", block)
        return reductions_of(measured, self.source, block, layers, self.device)


def fit_group(
    inputs: FitInputs,
    group: Group,
    result: BlockResult,
    reductions: Reductions,
    moments: Sequence[Sequence[LayerMoments]] | None = None,
) -> None:
    """Fit layers that read one input, and add the fits to the result of their block.

    Without moments they are fitted to their weights, or drawn where the model begins at random.
    """
    source, device, factors = inputs.source, inputs.device, inputs.factors
    dtype, seed = inputs.dtype_of(group[0]), source.seed
    pairs = [(e, narrowed_rows(e, dense_matrix(source, e, device), reductions)) for e in group]
    if seed is not None:
        with torch.no_grad():
            fitted = [start_layer(*pair, dtype=dtype, factors=factors, seed=seed) for pair in pairs]
    else:
        kinds = ("curvature", "condensed") if moments else ()
        measures = [inputs.moments(kind, result.block) for kind in kinds]
        layers = []
        for (entry, weight), measured in zip(pairs, moments or repeat(DATA_FREE), strict=False):
            facts: dict[str, Any] = {}
            if not entry.is_plain:  # plain matrices are fitted by inputs alone
                facts = {kind: of.get(entry.name) for kind, of in zip(kinds, measures, strict=True)}
            if (curvature := facts.get("curvature")) is not None:
                facts["curvature"] = narrowed_curvature(entry, curvature, reductions)
            lift = lift_of(entry, reductions, device)
            layers.append(LayerToFit(entry, weight, measured, lift=lift, **facts))
        roundings = inputs.roundings if moments else {}
        options: dict[str, Any] = {"dtype": dtype, "damping": inputs.damping}
        fitted = fit_layers(layers, factors=factors, roundings=roundings, **options)
    for entry, layer in zip(group, fitted, strict=True):
        result.layers[entry.key] = layer
        for name in entry.own_factors:  # they are stored with it
            tensors = factors[entry.name, name].items()
            layer.tensors.update((f"{factors_module(name)}.{key}", item) for key, item in tensors)
        if entry.bias and entry.kind != "experts":
            name = f"{module_path(source, entry.name)}.bias"
            bias = read_finite(source.store, source.keymap, name, device)
            shift = 0.0 if layer.shift is None else layer.shift
            exact = narrowed_rows(entry, bias, reductions).double() + shift
            layer.tensors["bias"] = exact.to(inputs.dtype_of(entry))


def outputs_stand_for_input(group: Sequence[LayerPlan | Layer]) -> bool:
    """Tell whether outputs stand for a wide input in sums of both streams: of one layer alone."""
    first = group[0]
    alone = len(group) == 1 and first.kind != "experts"
    return alone and puts_out_little(first.in_features, first.out_features)


Rows = tuple[int, Tensor, Tensor, Tensor | None]
"""Number of an expert (0 without any), what it reads in both streams, and what that is worth.

(rows, d), (rows, d'), (rows,)
"""

Sums = dict[tuple[int, bool], MomentSums | PairedRows]
"""Moments of a layer's input, by expert (0 without any) and whether the rows are held out."""


def add_rows(
    sums: Sums,
    rows: Rows,
    passes: torch.dtype | None = None,
    weight: Tensor | None = None,
    *,
    holdout: bool,
) -> None:
    """Add paired rows of both streams to what is summed up of their expert.

    They were computed in the dtype of the `passes`; None is that of weights. The `weight` is that
    of a layer whose outputs stand for its inputs, as in `MomentSums`.  # (out, d)
    """
    expert, dense, new, weights = rows
    if not len(dense):
        return
    key, widths = (expert, holdout), (dense.shape[-1], new.shape[-1])
    if key not in sums:
        if holdout and widths[0] >= WIDE:
            sums[key] = PairedRows(passes)
        else:
            sums[key] = MomentSums(*widths, dense.device, passes, weight)
    sums[key].add(dense, new, weights)


def _moments(sums: Sums, expert: int, *, centred: bool, last: bool) -> LayerMoments:
    """Return moments of both; without rows to fit on there are none (a data-free fit).

    With `last` the sums are given up for them.
    """
    fitted, held = (sums.get((expert, holdout)) for holdout in (False, True))
    if fitted is None:
        return LayerMoments()
    train = fitted.moments(centred=centred, last=last)
    assert isinstance(train, Moments)
    return LayerMoments(train, held.moments(centred=centred, last=last) if held else None)


# Routed experts during calibration: both streams follow the dense stream's routing.


def routed_arguments(*args: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, the experts of each token and their weights, whatever their names."""
    hidden, index, weights = (*args, *kwargs.values())
    return hidden, index, weights


class Routing:
    """The dense stream's routing in a block, recorded and replayed in the compressed one.

    Without it the two streams would send a token to different experts, and rows would not pair.
    """

    def __init__(self, dense: nn.Module, block: Block) -> None:
        names = (layer.name for layer in block.layers if layer.routed)
        self.paths = {name.removeprefix(f"{block.name}.") for name in names}
        self.current = 0  # index of the batch
        self._routes: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._hooks = ExitStack()
        self._hook(dense, self._record)

    def replay_in(self, new: nn.Module) -> None:
        """Make the experts of the compressed block follow the recorded routing."""
        self._hook(new, self._replay)

    def close(self) -> None:
        """Forget all routes, and leave both blocks alone."""
        self._hooks.close()
        self._routes.clear()

    def _hook(self, block: nn.Module, hook: Callable[..., Any]) -> None:
        for path in self.paths:
            module, hook_of = block.get_submodule(path), partial(hook, path)
            self._hooks.enter_context(module.register_forward_pre_hook(hook_of, with_kwargs=True))

    def _record(self, path: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._routes[path, self.current] = routed_arguments(*args, **kwargs)[1:]

    def _replay(self, path: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden = routed_arguments(*args, **kwargs)[0]
        return (hidden, *self._routes[path, self.current]), {}


StreamPairs = Mapping[int, tuple[Stream, Stream]]
"""Passes through the dense model and through the rewritten one, by index of the batch.

They may be the same passes, where nothing before a block is rewritten. Several processes have some
of the batches each.
"""


@dataclass(eq=False)
class RewrittenBlock:
    """One block as it is, and its copy `new` in which layers are replaced."""

    rewriter: BlockRewriter
    block: Block
    readings: Readings  # of the dense block
    result: BlockResult

    def __post_init__(self) -> None:
        self.inputs, self.dense = self.rewriter.inputs, self.readings.block
        # Weights are shared: layers are replaced as a whole, and nothing writes into what stays.
        shared = {id(item): item for item in (*self.dense.parameters(), *self.dense.buffers())}
        self.new = copy.deepcopy(self.dense, shared)
        del self.new.forward  # the copy runs by itself; the original pauses its stream
        self.forward = cast_to(self.inputs.source.autocast, self.inputs.device, self.new.forward)
        self.place: dict[str, Any] = {"dtype": torch.float32, "device": self.inputs.device}
        self.rows, self.routing = TokenRows(self.dense, self.block), Routing(self.dense, self.block)

    def path(self, name: str) -> str:
        """Path of a planned module below the block."""
        return module_path(self.inputs.source, name).removeprefix(f"{self.block.name}.")

    def replace_attention(self) -> None:
        """Replace the block's attention, before anything is fitted.

        What an interrupted run stored of it is used; what is missing is added.
        """
        name, source, rewriter = self.block.name, self.inputs.source, self.rewriter
        # The guard is a matter of storage.
        plain = [
            entry.model_copy(update={"guard": None})
            for entry in rewriter.attention
            if module_path(source, entry.name).startswith(f"{name}.")
        ]
        modules = install_attention(self.new, plain, self.path, **self.place)
        for stored, module in modules.items():
            module.name = f"{name}.{module.name}"
            module.fill(SEED, pretrained=True)
            module.requires_grad_(False)
            passes = (rewriter.streams[index][1].waiting for index in rewriter.data.fitted)
            calls = (item.input_of(module, self.forward, queries_and_keys) for item in passes)
            adapt(module, f"{stored}.{CHILD}", self.result.attention, calls)

    def moments(self, group: Group, last: Collection[Layer] = ()) -> list[list[LayerMoments]]:
        """Moments of the input, or of every expert's, for every layer of a group.

        What the `last` layers read is forgotten then: nothing asks for it again.
        """
        first = group[0]
        with naming(f"layer `{first.name}`", MORE_DATA):
            sums, experts = self._sums(group), range(first.copies)
            self.readings.drop([it.name.removeprefix(f"{self.block.name}.") for it in last])
            if first.in_features >= WIDE:  # a fit takes more than the passes that led to it
                give_back_memory()
            centred = [entry.bias and entry.kind != "experts" for entry in group]
            alike = len({*centred}) == 1
            moments = {
                flag: [_moments(sums, expert, centred=flag, last=alike) for expert in experts]
                for flag in {*centred}
            }
        return [moments[flag] for flag in centred]

    def _sums(self, group: Group) -> Sums:
        """Sum up moments of a group's input; none of what stays as it was."""
        first, data = group[0], self.rewriter.data
        rows_of: Callable[[int], Iterable[Rows]]
        if first.kind != "experts":
            plain = all(entry.reads is None and entry.is_plain for entry in group)
            if self.inputs.skips_plain and plain and not self.result.layers:
                return {}
            rows_of = partial(self._layer_rows, first, self._token_weights(group))
        elif is_routed(self.dense.get_submodule(self.path(first.name))):
            rows_of = self._expert_rows(first)
        else:
            return {}  # nothing is known of their routing
        total, weight = processes.Total(merged, self.inputs.device), self._weight_of(group)
        for run in total.runs():
            sums: Sums = {}
            for index in processes.batches_of(run, len(data.batches)):
                for rows in rows_of(index):
                    with timed(MOMENTS):
                        facts = self.inputs.source.autocast, weight
                        add_rows(sums, rows, *facts, holdout=index in data.holdout)
            with timed(MOMENTS):
                total.add(sums)
        return total.whole()

    def _weight_of(self, group: Group) -> Tensor | None:
        """Weight of a layer that alone reads an input far wider than what it puts out, float32."""
        first, inputs = group[0], self.inputs
        if outputs_stand_for_input(group) and first.outputs_left == first.out_features:
            return dense_matrix(inputs.source, first, inputs.device).float()
        return None

    def _read(self, path: str, index: int, arguments: Callable[..., Any] = first_tensor) -> Any:
        """Inputs of a module in both streams of a batch."""
        dense, new = self.rewriter.streams[index]
        self.rows.batch = dense.batch
        x = self.readings.of(dense, path, arguments)
        if new is dense and not self.result.layers:  # nothing before it has changed
            return x, x
        return x, new.waiting.input_of(self.new.get_submodule(path), self.forward, arguments)

    def _layer_rows(
        self, entry: LayerPlan, weights: Mapping[int, Tensor], index: int
    ) -> Iterator[Rows]:
        """Rows of a batch that a layer reads, but for an expert of a list that none of them chose.

        They count as much as their weights say, by batch.
        """
        path = self.path(entry.name)
        name = f"{self.block.name}.{path}"
        modules = self.dense.get_submodule(path), self.new.get_submodule(path)
        x, y = self._read(path, index)
        if name in self.rows.items:  # in the two streams other tokens may choose it
            if x is None:
                return
            state, tokens = self.rewriter.streams[index][0].waiting.state, x.shape[:-1]
            is_part = tokens.numel() < state.shape[:-1].numel()
            y = x if y is None or y.shape[:-1] != tokens or is_part else y
        if x is None or y is None:
            raise DataError(f"layer `{entry.name}` did not run on calibration data")
        same, x = y is x, channels_last(modules[0], x)
        rows, mask = self.rows.of(x, name, entry.role)
        counts = slice(None) if mask is None else mask
        rows = new_rows = rows[counts]
        if not same:
            y = channels_last(modules[1], y)
            if y.shape[:-1].numel() != x.shape[:-1].numel():
                raise DataError(
                    f"layer `{entry.name}` reads other tokens once others are rewritten",
                    WITHOUT_DATA,
                )
            new_rows = y.flatten(0, -2)
            new_rows = (entry.reads.gather(new_rows) if entry.reads else new_rows)[counts]
        row_weights = weights.get(index)
        fits = row_weights is not None and len(row_weights) == len(rows)
        yield 0, rows, new_rows, row_weights if fits else None

    def _token_weights(self, group: Group) -> dict[int, Tensor]:
        """Worth of the rows of a batch to all layers of a group, by batch."""
        data, measured = self.rewriter.data, self.inputs.moments("tokens", self.block.name)
        summed: dict[int, Tensor] = {}
        for entry in group:
            named = {i: measured.get(f"{entry.name}/{data.place(i)}") for i in data.fitted}
            weights = {i: item.double() for i, item in named.items() if item is not None}
            mean = torch.cat([*weights.values()]).mean() if weights else 1.0
            for index, item in weights.items():
                summed[index] = item / mean + summed.get(index, 0.0)
        return summed

    def _expert_rows(self, entry: LayerPlan) -> Callable[[int], Iterator[Rows]]:
        """Rows of every expert; those that no token chose are fitted without data."""
        path = self.path(entry.name)
        experts: Any = self.dense.get_submodule(path)
        new_experts: Any = self.new.get_submodule(path)
        down, name = entry.parameter == "down_proj", up_name(experts)
        bias, up = bias_of(experts, name), getattr(experts, name)
        up = new_up = up.mT if experts.is_transposed else up
        if down and isinstance(new_experts, StructuredExperts) and name in new_experts.stacks:
            new_up = new_experts.stacks[name].dense_weight(torch.float32)

        def read(tokens: Tensor, weight: Tensor, expert: int) -> Tensor:
            if not down:
                return tokens
            shift = None if bias is None else bias[expert]
            return activated(experts, linear(tokens, weight[expert], shift))

        def rows_of(index: int) -> Iterator[Rows]:
            routed, rerouted = self._read(path, index, routed_arguments)
            if routed is None or rerouted is None:
                raise DataError(f"layer `{entry.name}` did not run on calibration data")
            hidden, chosen, weights = routed
            _, mask = token_rows(hidden, self.rows.batch, self.block.name, entry.role)
            # A weight of zero means that a token skips its expert, as in some families.
            counts = weights != 0 if weights.shape == chosen.shape else True
            for expert in range(len(up)):
                rows = ((chosen == expert) & counts).any(-1)
                rows = rows if mask is None else rows & mask
                if bool(rows.any()):
                    x = read(hidden[rows], up, expert)
                    yield expert, x, read(rerouted[0][rows], new_up, expert), None

        return rows_of

    def install(self, group: Group) -> None:
        """Put fitted layers into the copy."""
        installed = self.rewriter.installed
        modules = install_layers(self.new, group, self.path, installed, **self.place)
        for entry in group:
            fill(modules[entry.name], entry, self.result.layers[entry.key].tensors)
            modules[entry.name].requires_grad_(False)


@dataclass(frozen=True, eq=False)
class BlockRewriter:
    """Maker of copies of blocks in which layers are replaced, as they are fitted one by one."""

    inputs: FitInputs
    data: CalibrationData  # batches held out are only measured on
    streams: StreamPairs  # which wait at the block
    layers: Sequence[LayerPlan]  # of whatever block
    attention: Sequence[AttentionPlan] = ()  # those that are replaced
    installed: dict[FactorsKey, FactorsModule] = field(default_factory=dict)
    """Modules of factors that layers of several blocks share, once their owners are in place."""
    reads_once: bool = False
    """Whether no block is rewritten again, so that what its layers read is forgotten at once."""

    def rewrite(
        self,
        block: Block,
        readings: Readings,
        stored: BlockResult | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> RewrittenBlock:
        """Rewrite a copy of a block, whose layers are fitted first unless fits are stored."""
        result = BlockResult(block.name) if stored is None else stored
        reductions = self.inputs.reductions(block.name, self.layers) if stored is None else {}
        rewritten = RewrittenBlock(self, block, readings, result)
        rewritten.replace_attention()
        entries = {path_of(self.inputs.source, entry): entry for entry in self.layers}
        for layers in block.groups:
            names = (layer.weight_name for layer in layers)
            group = tuple(entries[name] for name in names if name in entries)
            if not group:
                continue
            progress(f"{block.name} {', '.join(entry.role for entry in group)}")
            if stored is None:
                moments = partial(rewritten.moments, group, layers if self.reads_once else ())
                fit_group(self.inputs, group, result, reductions, moments())
            rewritten.install(group)
        rewritten.rows.close()
        rewritten.routing.replay_in(rewritten.new)
        return rewritten
