"""Data-aware conversion: block by block, with a dense and a compressed stream of activations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tcompress.attention.module import CHILD
from tcompress.blockwise.comparison import OutputComparison
from tcompress.blockwise.output_sampler import OutputSampler
from tcompress.blockwise.streams import (
    Branch,
    PartialModel,
    Readings,
    Stream,
    TokenRows,
    common_block,
    first_tensor,
    handed_on,
    listed_item,
    queries_and_keys,
    token_rows,
)
from tcompress.data.calibration import CalibrationData
from tcompress.errors import DataError, FitError
from tcompress.fitting.channel_orders import Reductions, lift_of, narrowed_curvature, narrowed_rows
from tcompress.fitting.first_values import adapt
from tcompress.fitting.layer_fits import FittedLayer, LayerMoments, SharedFactors, fit_layers
from tcompress.hf.build import SEED, fill, install_attention, install_layers, set_module
from tcompress.linalg.moments import MomentSums
from tcompress.linalg.rounding import Rounding
from tcompress.models import SourceModel, read_finite
from tcompress.planning.entries import FactorsKey, LayerPlan, Plan
from tcompress.planning.sites import roles_of, tied_to
from tcompress.roles import Block
from tcompress.structures.modules.embedding import StructuredEmbedding, TiedTable
from tcompress.structures.modules.experts import (
    StructuredExperts,
    activated,
    bias_of,
    is_routed,
    up_name,
)
from tcompress.structures.modules.linear import channels_last
from tcompress.structures.modules.shared import FactorsModule


class SplitSums:
    """Accumulates the moments of one layer input, of rows to fit on and of rows held out."""

    def __init__(self) -> None:
        self._sums: dict[bool, MomentSums] = {}

    def add(
        self, dense: Tensor, new: Tensor, *, holdout: bool, weights: Tensor | None = None
    ) -> None:
        """Adds paired rows of both streams, and what they are worth.  # (rows, d), (rows,)."""
        if holdout not in self._sums:
            self._sums[holdout] = MomentSums(dense.shape[-1], new.shape[-1], dense.device)
        self._sums[holdout].add(dense, new, weights)

    def moments(self, *, centred: bool) -> LayerMoments:
        """Returns both moments; without rows to fit on there are none (a data-free fit)."""
        train, held = self._sums.get(False), self._sums.get(True)
        if train is None or not train.rows:
            return LayerMoments()
        return LayerMoments(
            train.moments(centred=centred),
            held.moments(centred=centred) if held is not None and held.rows else None,
        )


# Routed experts during calibration: both streams follow the dense stream's routing.


Arguments = tuple[Any, ...]
Routed = tuple[Tensor, Tensor, Tensor]  # hidden states, experts of each token, their weights


def routed_arguments(*args: Tensor, **kwargs: Tensor) -> Routed:
    """Returns the arguments of routed experts, whatever the family calls them."""
    hidden, index, weights = (*args, *kwargs.values())
    return hidden, index, weights


class Routing:
    """Records the dense stream's routing in a block and replays it in the compressed one.

    Without it the two streams would send a token to different experts, and rows would not pair.
    """

    def __init__(self, dense: nn.Module, inside: Collection[str]) -> None:
        self.inside = tuple(inside)
        self._routes: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.current = 0
        for path in self.inside:
            hook = partial(self._record, path)
            dense.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def replay_in(self, new: nn.Module) -> None:
        """Makes the experts of the compressed block follow the recorded routing."""
        for path in self.inside:
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


class ExpertSums:
    """Moments of the inputs of all experts' up projections, or of their down projections."""

    def __init__(self, dense: Any, new: Any, *, down: bool) -> None:
        self._dense = dense
        self._down = down
        name = up_name(dense)
        self._bias = bias_of(dense, name)
        weight: Tensor = getattr(dense, name)
        self._weight = weight.mT if dense.is_transposed else weight
        stack = new.stacks.get(name) if down and isinstance(new, StructuredExperts) else None
        self._new_weight = self._weight if stack is None else stack.dense_weight(torch.float32)
        self.sums: Sequence[SplitSums] = [SplitSums() for _ in range(len(weight))]

    def add(self, routed: Routed, hidden: Tensor, mask: Tensor | None, *, holdout: bool) -> None:
        """Adds a batch: arguments of the dense experts, tokens of the other stream, and a mask."""
        dense_hidden, index, weights = routed
        # A weight of zero means that a token skips its expert, as in some families.
        counts = weights != 0 if weights.shape == index.shape else torch.ones_like(index).bool()
        for expert, sums in enumerate(self.sums):
            chosen = ((index == expert) & counts).any(-1)
            rows = chosen if mask is None else chosen & mask
            if not bool(rows.any()):
                continue
            one = self._inputs(dense_hidden[rows], self._weight, expert)
            two = self._inputs(hidden[rows], self._new_weight, expert)
            sums.add(one, two, holdout=holdout)

    def _inputs(self, tokens: Tensor, weight: Tensor, expert: int) -> Tensor:
        if not self._down:
            return tokens
        bias = None if self._bias is None else self._bias[expert]
        return activated(self._dense, linear(tokens, weight[expert], bias))


# Data-aware conversion: block by block, with a dense and a compressed stream of activations.


Group = tuple[LayerPlan, ...]


@dataclass(frozen=True)
class BlockResult:
    """Fits of one block."""

    block: str  # its name
    layers: dict[str, FittedLayer]  # by weight name
    biases: dict[str, Tensor]  # new ones, by layer name
    attention: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of attentions that begin with what queries and keys are like, by stored name."""


@dataclass
class BlockPair:
    """One block as it is, and its copy that is being rewritten."""

    block: Block
    dense: nn.Module
    new: nn.Module
    result: BlockResult
    readings: Readings  # of the dense block

    def inside(self, path: str) -> str:
        """Path below the block."""
        return path.removeprefix(f"{self.block.name}.")

    def inputs(
        self, path: str, one: Stream, two: Stream, arguments: Callable[..., Any] = first_tensor
    ) -> tuple[Any, Any]:
        """What a module reads in both streams."""
        dense = self.readings.of(one, path, arguments)
        if two is one and not self.result.layers:  # nothing before it has changed
            return dense, dense
        return dense, Readings(self.new, self.new.forward).of(two, path, arguments)


@dataclass
class BlockFitter:
    """Walks two streams through the model and fits every block on the way."""

    source: SourceModel  # the dense model
    plan: Plan
    data: CalibrationData  # batches held out are only measured on
    _: KW_ONLY
    damping: float  # ridge added to the moments
    curvatures: Callable[[str], Mapping[str, Tensor]]
    """Gives moments of the output gradients of a block's layers, by layer name."""
    tokens: Callable[[str], Mapping[str, Tensor]]
    """Gives what tokens are worth, by layer name and batch; nothing where it was not measured."""
    channels: Callable[[str], Reductions]
    """Tells which channels of a block's layers stay."""
    factors: SharedFactors  # fitted before
    dtype_of: Callable[[LayerPlan], torch.dtype]  # in which a layer is stored
    device: torch.device
    whole: SourceModel
    """The dense model with all its blocks, where `source` lacks some. Its states are the targets,
    so that the blocks that stay make up for those that are gone."""
    tables: Mapping[str, StructuredEmbedding]
    """Rewritten word embeddings by module path, fitted before."""
    roundings: Mapping[str, Rounding] = field(default_factory=dict)
    """Of tensors of layers that are stored in few bits, by name."""
    sampler: OutputSampler | None = None
    """Compares what the model puts out before and after, on the batches held out."""

    def __post_init__(self) -> None:
        self.comparison = OutputComparison(self.sampler) if self.sampler else None
        """What the model puts out before and after, where a sampler tells what counts."""
        self._blocks = {self.source.original_name(b.name): b for b in roles_of(self.source).blocks}
        self.unreached = set(self._blocks)  # blocks that the data has not come to
        names = [block.name for block in roles_of(self.whole).blocks]
        head = self.sampler is not None
        self._model = PartialModel(self.whole, names, self.device, head=head)
        for path, table in self.tables.items():
            for name in (path, *tied_to(self.whole, path)):
                module = self._model.model.get_submodule(name)
                if isinstance(module, nn.Embedding):  # the output head is never reached
                    branch = Branch(module, TiedTable(table, module))
                    set_module(self._model.model, name, branch)
        runtime = self.source.keymap.runtime_name
        self._paths = {entry.name: runtime(entry.name) or "" for entry in self.plan.layers}
        self._entries = {(self._paths[e.name], e.parameter): e for e in self.plan.layers}
        self._attention = {runtime(entry.name) or "": entry for entry in self.plan.attention}
        self._installed: dict[FactorsKey, FactorsModule] = {}
        judged = self.data.holdout or range(len(self.data.batches))  # one sample is all there is
        pairs = [
            (self.sampler.with_variants(batch), True)
            if self.sampler is not None and index in judged
            else (batch, False)
            for index, batch in enumerate(self.data.batches)
        ]
        self._dense = [self._model.stream(batch, keep=keep) for batch, keep in pairs]
        self._new = [self._model.stream(b, rewritten=True, keep=keep) for b, keep in pairs]

    def run(
        self, done: Callable[[str], BlockResult | None], progress: Callable[[str, str], None]
    ) -> Iterator[BlockResult]:
        """Fits all blocks in the order in which the model runs them.

        Of a block that an interrupted run finished, `done` returns the stored result.
        """
        streams, left = [*self._dense, *self._new], self.unreached
        with self._model.paused(streams):
            while (left or self.sampler) and (name := common_block(streams)):
                block = self._blocks.get(name)
                if block is not None and name not in left:
                    raise _runs_twice(name)
                left.discard(name)
                with self._model.loaded(name) as dense:
                    own = self._model.forwards[name]
                    if block is None:  # only the dense model has it
                        self._advance(partial(self._model.answer_of, forward=own), own, None)
                        continue
                    stored = done(block.name)
                    new = copy.deepcopy(dense)
                    del new.forward  # the copy runs by itself; the original pauses its stream
                    result = stored or BlockResult(block.name, {}, {})
                    readings = self._readings(name, dense)
                    pair = BlockPair(block, dense, new, result, readings)
                    routing = self._fit(pair, progress, fresh=stored is None)
                    if not left and self.sampler is None:  # the output head was never loaded
                        self._check_end(name)
                    else:
                        self._advance(readings.answer, new.forward, routing)
                if stored is None:
                    yield result

    def _readings(self, name: str, dense: nn.Module) -> Readings:
        block, forward = self._blocks.get(name), self._model.forwards[name]
        if block is None:  # only the dense model has it
            return Readings(dense, forward)
        layers = block.layers
        paths = [layer.name.removeprefix(f"{block.name}.") for layer in layers]
        # Which experts run, and on which tokens, is heard from every run.
        experts = any(layer.kind == "experts" or layer.routed for layer in layers)
        chosen = experts or any(listed_item(dense, path) for path in paths)
        return Readings(dense, forward, () if chosen else paths)

    def _fit(
        self, pair: BlockPair, progress: Callable[[str, str], None], *, fresh: bool
    ) -> Routing:
        """Rewrites a block's copy; what is fresh is fitted first."""
        block, result = pair.block, pair.result
        self._rows = TokenRows(pair.dense, block)
        self._reductions = self.channels(block.name) if fresh else {}
        self._replace_attention(pair, result.attention)
        routed = {pair.inside(layer.name) for layer in block.layers if layer.routed}
        routing = Routing(pair.dense, routed)
        for layers in block.groups:
            keys = [(layer.name, layer.parameter) for layer in layers]
            group = tuple(self._entries[key] for key in keys if key in self._entries)
            if not group:
                continue
            progress(block.name, ", ".join(entry.role for entry in group))
            if fresh:
                self._fit_group(pair, group)
            self._install(pair, group)
        self._rows.close()
        routing.replay_in(pair.new)
        return routing

    def _replace_attention(self, pair: BlockPair, known: dict[str, Tensor]) -> None:
        """Replaces the block's attention, before anything is fitted.

        What an interrupted run stored of it is known; what is missing is added.
        """
        name, new = pair.block.name, pair.new

        def inside(stored: str) -> str:
            return pair.inside(self.source.keymap.runtime_name(stored) or "")

        own = [e for path, e in self._attention.items() if path.startswith(f"{name}.")]
        # The guard is a matter of storage.
        plain = [entry.model_copy(update={"guard": None}) for entry in own]
        made = install_attention(new, plain, inside, dtype=torch.float32, device=self.device)
        seen = Readings(new, new.forward)
        fit = [s for index, s in enumerate(self._new) if index not in self.data.holdout]
        for stored, module in made.items():
            path, module.name = f"{module.name}.{CHILD}", f"{name}.{module.name}"
            module.fill(SEED, pretrained=True)
            module.requires_grad_(False)
            calls = (seen.of(s, path, queries_and_keys) for s in fit)
            adapt(module, f"{stored}.{CHILD}", known, calls)

    def _check_end(self, name: str) -> None:
        """Makes sure that no block follows the last one, such as one that runs again."""
        stream = self._dense[0]
        answer = self._model.answer_of(stream)
        try:
            stream.answer(answer)
        except Exception:  # the output head, which holds no weights: the end was reached
            return
        if stream.call is not None and stream.call.block in self._blocks:
            raise _runs_twice(stream.call.block)

    def _advance(
        self, dense: Callable[[Stream], Any], new: Callable[..., Any], routing: Routing | None
    ) -> None:
        """Answers all streams; without routing it is a block that only the dense ones run."""
        for index, (one, two) in enumerate(zip(self._dense, self._new, strict=True)):
            if routing is not None:
                routing.current = index
            one.answer(dense(one))
            call, answer = two.waiting, self._model.answer_of(two, new)
            two.answer(handed_on(call, answer) if routing is None else answer)
            if self.comparison is not None and one.output is not None:
                origin = self.data.origins.get(index, self.data.name)
                self.comparison.add(origin, one.output, two.output, one.batch)
                one.output = two.output = None  # at once: logits are large

    def _fit_group(self, pair: BlockPair, group: Group) -> None:
        first, result = group[0], pair.result
        inside = pair.inside(self._paths[first.name])
        try:
            if first.kind == "experts" and not is_routed(pair.dense.get_submodule(inside)):
                moments = [{first.bias: LayerMoments()}]  # nothing is known of their routing
            elif first.kind == "experts":
                moments = self._expert_moments(pair, first, inside)
            else:
                moments = [self._moments(pair, group, inside)]
        except FitError as error:
            raise FitError(f"layer `{first.name}`: {error.message}", error.hint) from error
        known = self._reductions
        weights, lifts = [], {}
        for entry in group:
            name = f"{self._paths[entry.name]}.{entry.parameter}"
            weight = read_finite(self.source.store, self.source.keymap, name, self.device)
            weights.append(narrowed_rows(entry, entry.matrix(weight), known))
            if entry.reads:
                lifts[entry.name] = lift_of(entry, known, self.device)
        curves = self.curvatures(pair.block.name)
        named = {entry.name: entry for entry in group if entry.name in curves}
        dtype = self.dtype_of(first)
        fitted = fit_layers(
            group,
            weights,
            [[item[entry.bias] for item in moments] for entry in group],
            dtype=dtype,
            damping=self.damping,
            curvatures={
                name: narrowed_curvature(entry, curves[name], known)
                for name, entry in named.items()
            },
            factors=self.factors,
            lifts=lifts,
            roundings=self.roundings,
        )
        for entry, layer in zip(group, fitted, strict=True):
            result.layers[entry.key] = layer
            if entry.bias and entry.kind != "experts":
                path = f"{pair.inside(self._paths[entry.name])}.bias"
                bias = narrowed_rows(entry, pair.dense.get_parameter(path), known)
                shift = 0.0 if layer.shift is None else layer.shift
                result.biases[entry.name] = (bias.double() + shift).to(dtype)

    def _moments(self, pair: BlockPair, group: Group, inside: str) -> dict[bool, LayerMoments]:
        """Moments of a group's input, by whether they are centred (layers with a bias)."""
        sums = SplitSums()
        name, path = group[0].name, self._paths[group[0].name]
        listed = self._rows.is_listed(path)
        weights = self._token_weights(pair.block.name, group)
        for index, (one, two) in enumerate(zip(self._dense, self._new, strict=True)):
            self._rows.batch = one.batch
            x, y = pair.inputs(inside, one, two)
            if listed and x is None:  # an expert that no token of these chose
                continue
            tokens = x.shape[:-1] if x is not None else None
            if listed and (y is None or y.shape[:-1] != tokens or tokens.numel() < _tokens(one)):
                y = x  # in the two streams other tokens may choose it
            if x is None or y is None:
                raise DataError(f"layer `{name}` did not run on calibration data")
            same = y is x
            x = channels_last(pair.dense.get_submodule(inside), x)
            y = x if same else channels_last(pair.new.get_submodule(inside), y)
            rows, mask = self._rows.of(x, path, group[0].role)
            if y.shape[:-1].numel() != x.shape[:-1].numel():
                raise DataError(
                    f"layer `{name}` reads other tokens once others are rewritten",
                    "convert this model without data: `--calib none`",
                )
            pairs = rows if y is x else y.flatten(0, -2)
            if y is not x and group[0].reads:
                pairs = group[0].reads.gather(pairs)
            if mask is not None:
                same, rows = pairs is rows, rows[mask]
                pairs = rows if same else pairs[mask]
            own = weights.get(index)
            own = own if own is not None and len(own) == len(rows) else None
            sums.add(rows, pairs, holdout=index in self.data.holdout, weights=own)
        return {flag: sums.moments(centred=flag) for flag in {entry.bias for entry in group}}

    def _token_weights(self, block: str, group: Group) -> dict[int, Tensor]:
        """Gives what the rows of a batch are worth to all layers of a group, by batch."""
        known = self.tokens(block)
        found: dict[int, Tensor] = {}
        for entry in group:
            keys = {i: f"{entry.name}/{self.data.place(i)}" for i in self.data.fitted}
            named = {index: known.get(key) for index, key in keys.items()}
            own = {i: item.double() for i, item in named.items() if item is not None}
            mean = torch.cat([*own.values()]).mean() if own else 1.0
            for index, item in own.items():
                before = found.get(index)
                found[index] = item / mean + (0.0 if before is None else before)
        return found

    def _expert_moments(
        self, pair: BlockPair, entry: LayerPlan, inside: str
    ) -> list[dict[bool, LayerMoments]]:
        """Moments of one input per expert; those that no token chose are fitted without data."""
        modules = pair.dense.get_submodule(inside), pair.new.get_submodule(inside)
        gathered = ExpertSums(*modules, down=entry.parameter == "down_proj")
        for index, (one, two) in enumerate(zip(self._dense, self._new, strict=True)):
            routed, other = pair.inputs(inside, one, two, routed_arguments)
            if routed is None or other is None:
                raise DataError(f"layer `{entry.name}` did not run on calibration data")
            _, mask = token_rows(routed[0], one.batch, pair.block.name, entry.role)
            gathered.add(routed, other[0], mask, holdout=index in self.data.holdout)
        return [{entry.bias: sums.moments(centred=False)} for sums in gathered.sums]

    def _install(self, pair: BlockPair, group: Group) -> None:
        made = install_layers(
            pair.new,
            group,
            lambda name: pair.inside(self._paths[name]),
            factors=self._installed,
            dtype=torch.float32,
            device=self.device,
        )
        for entry in group:
            module = made[entry.name]
            fill(module, entry, pair.result.layers[entry.key].tensors)
            if entry.bias and entry.kind != "experts":
                with torch.no_grad():
                    module.get_parameter("bias").copy_(pair.result.biases[entry.name])
            module.requires_grad_(False)


def _tokens(stream: Stream) -> int:
    """Number of tokens that a block is given."""
    call = stream.waiting
    return first_tensor(*call.args, **call.kwargs).shape[:-1].numel()


def _runs_twice(block: str) -> DataError:
    return DataError(
        f"block `{block}` runs more than once in a forward pass",
        "convert this model without data: `--calib none`",
    )
