"""Data-aware conversion: block by block, with a dense and a compressed stream of activations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tcompress.attention.module import CHILD
from tcompress.conversion.fit import NO_BANKS, Banks, FittedLayer, LayerMoments, fit_layers
from tcompress.conversion.output_sampler import OutputProbe
from tcompress.conversion.paused import (
    Fork,
    Skeleton,
    Stream,
    common_block,
    first_tensor,
    handed_on,
    intercept_blocks,
    queries_and_keys,
    run_to_input,
    token_rows,
)
from tcompress.conversion.start import SplitSums, adapt
from tcompress.errors import DataError, FitError
from tcompress.hf.attention_hooks import SEED, install_attention
from tcompress.hf.build import fill, install_layers, set_module
from tcompress.models import SourceModel, read_finite
from tcompress.planning.entries import AttentionPlan, BankKey, LayerPlan
from tcompress.planning.sites import tied_to
from tcompress.roles import Anatomy, Block, anatomy_of
from tcompress.roles.projections import chooses
from tcompress.structures.modules.embedding import StructuredEmbedding, TiedTable
from tcompress.structures.modules.experts import (
    StructuredExperts,
    activated,
    bias_of,
    is_routed,
    up_name,
)
from tcompress.structures.modules.linear import channels_last
from tcompress.structures.modules.shared import BankModule

# Routed experts during calibration: both streams follow the dense stream's routing.


Arguments = tuple[Any, ...]
Routed = tuple[Tensor, Tensor, Tensor]  # hidden states, experts of each token, their weights


def routed_arguments(*args: Tensor, **kwargs: Tensor) -> Routed:
    """Returns the arguments of routed experts, whatever the family calls them."""
    hidden, index, weights = (*args, *kwargs.values())
    return hidden, index, weights


def listed_item(block: nn.Module, inside: str) -> str | None:
    """Finds the item of a list of experts, which a router chooses, that a layer belongs to.

    Args:
        block: The block.
        inside: Path of the layer below the block.

    Returns:
        Path of the item below the block; None if the layer is in no such list.
    """
    modules = {name: module for name, module in block.named_modules() if name}
    steps = inside.split(".")
    for depth in range(1, len(steps)):
        if isinstance(modules[".".join(steps[:depth])], (nn.ModuleList, nn.ModuleDict)):
            parent = ".".join(steps[: depth - 1])
            names = [name for name, _ in block.get_submodule(parent).named_children()]
            if any(chooses(f"{parent}.{name}".lstrip("."), modules) for name in names):
                return ".".join(steps[: depth + 1])
    return None


class TokenRows:
    """Tells which rows that the layers of a block read are no padding.

    The items of a list of experts read some tokens each. A list that is handed the routing is run
    with the mask in the place of hidden states and with items that only listen, before it runs
    as it is: so every item's rows are known, whatever form the routing has. Where the list has no
    pass of its own, the rows of its items cannot be told apart and all count.

    Args:
        module: The block.
        block: Its layers.

    Attributes:
        batch: What the model reads.
    """

    def __init__(self, module: nn.Module, block: Block) -> None:
        self.batch: Mapping[str, Tensor] = {}
        self._block = block.name
        self._masks: dict[str, Tensor] = {}  # by path of an item
        self._items: dict[str, str] = {}  # by name of a layer
        for layer in block.layers:
            item = listed_item(module, layer.name.removeprefix(f"{block.name}."))
            if item is not None:
                self._items[layer.name] = item
        self._handles = [
            module.get_submodule(path).register_forward_pre_hook(
                partial(self._ask, path), with_kwargs=True
            )
            for path in {item.rpartition(".")[0] for item in self._items.values()}
        ]

    def is_listed(self, layer: str) -> bool:
        """Tells whether a layer belongs to an item of a list of experts."""
        return layer in self._items

    def of(self, x: Tensor, layer: str, role: str) -> tuple[Tensor, Tensor | None]:
        """Flattens what a layer reads, as `token_rows` does.

        Args:
            x: What it reads.  # (..., d)
            layer: Its name.
            role: Its role.
        """
        rows, mask = token_rows(x, self.batch, self._block, role)
        own = self._masks.get(self._items.get(layer, ""))
        return rows, own if own is not None and len(own) == len(rows) else mask

    def close(self) -> None:
        """Asks no more."""
        for handle in self._handles:
            handle.remove()

    def _ask(self, path: str, experts: nn.Module, args: Arguments, kwargs: dict[str, Any]) -> None:
        own = dict(experts._modules)
        for name in own:
            self._masks.pop(f"{path}.{name}", None)
        if not args or len(args) + len(kwargs) < 2:  # it is not handed the routing
            return
        hidden, *routing = args
        _, mask = token_rows(hidden, self.batch, self._block, "")
        if mask is None:
            return
        marked = mask.to(hidden)[:, None].expand(-1, hidden.shape[-1]).reshape(hidden.shape)
        listeners = {name: _Listener() for name in own}
        experts._modules.update(listeners)
        try:
            with torch.no_grad():
                experts.forward(marked, *routing, **kwargs)
        finally:
            experts._modules.update(own)
        for name, listener in listeners.items():
            if listener.heard is not None:
                self._masks[f"{path}.{name}"] = listener.heard


class _Listener(nn.Module):
    """Stands in for an expert, and keeps which of its rows are marked."""

    heard: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        self.heard = rows[..., 0].flatten() > 0
        return rows


class Routing:
    """Records the dense stream's routing in a block and replays it in the compressed one.

    Without it the two streams would send a token to different experts, and rows would not pair.

    Args:
        dense: The dense block.
        inside: Paths of routed experts below the block.
    """

    def __init__(self, dense: nn.Module, inside: Collection[str]) -> None:
        self._inside = tuple(inside)
        self._routes: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.current = 0
        for path in self._inside:
            hook = partial(self._record, path)
            dense.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def replay_in(self, new: nn.Module) -> None:
        """Makes the experts of the compressed block follow the recorded routing."""
        for path in self._inside:
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
    """Moments of the inputs of all experts' up or down projections.

    Args:
        dense: The dense experts module.
        new: The one being rewritten; None while nothing of it is.
        down: True for the input of the down projections.
    """

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
        """Adds one batch.

        Args:
            routed: Arguments of the dense experts.
            hidden: Tokens of the compressed stream.  # (tokens, d)
            mask: Tokens that are not padding.  # (tokens,)
            holdout: Whether the batch is only measured on.
        """
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
    """Fits of one block, with the bias of every layer that has one.

    Attributes:
        block: Name of the block.
        layers: Results by weight name.
        biases: New biases by layer name.
        attention: Tensors of mechanisms that begin with what queries and keys are like, by the
            name under which they are stored.
    """

    block: str
    layers: dict[str, FittedLayer]
    biases: dict[str, Tensor]
    attention: dict[str, Tensor] = field(default_factory=dict)


class BlockFitter:
    """Walks two streams through the model and fits every block on the way.

    Args:
        source: The dense model.
        anatomy: Its blocks.
        entries: Planned layers.
        batches: Calibration batches.
        holdout: Indices of batches that are only measured on.
        damping: Ridge added to the moments.
        curvatures: Gives moments of the output gradients of a block's layers, by layer name.
        banks: What layers share, fitted before, by owner and name.
        dtype_of: Dtype in which a layer is stored.
        device: Where to compute.
        whole: The dense model with all its blocks, where `source` lacks some. Its states are
            aimed at, so that what is left makes up for blocks that are gone.
        tables: Rewritten word embeddings by module path, fitted before.
        attention: Attentions that get another mechanism; the layers behind them are fitted to what
            it yields.
        probe: Compares what the model puts out before and after, on the batches that are only
            measured on; the result is `change`.

    Attributes:
        change: Change of the output per sample, once all blocks are fitted; None without a probe.
    """

    def __init__(
        self,
        source: SourceModel,
        anatomy: Anatomy,
        entries: Sequence[LayerPlan],
        batches: Sequence[Mapping[str, Tensor]],
        holdout: Sequence[int],
        *,
        damping: float,
        curvatures: Callable[[str], Mapping[str, Tensor]] = lambda _: {},
        banks: Banks = NO_BANKS,
        dtype_of: Callable[[LayerPlan], torch.dtype],
        device: torch.device,
        whole: SourceModel | None = None,
        tables: Mapping[str, StructuredEmbedding] = MappingProxyType({}),
        attention: Sequence[AttentionPlan] = (),
        probe: OutputProbe | None = None,
    ) -> None:
        self.change: float | None = None if probe is None else 0.0
        self._probe = probe
        self._source = source
        self._blocks = {source.original_name(block.name): block for block in anatomy.blocks}
        self._damping = damping
        self._curvatures = curvatures
        self._banks = banks
        self._installed: dict[BankKey, BankModule] = {}
        self._dtype_of = dtype_of
        self._holdout = frozenset(holdout)
        self._device = device
        dense = whole or source
        names = [block.name for block in anatomy_of(dense.meta_model()).blocks]
        self._skeleton = Skeleton(dense, names, device)
        for path, table in tables.items():
            for name in (path, *tied_to(dense, path)):
                module = self._skeleton.model.get_submodule(name)
                if isinstance(module, nn.Embedding):  # the output head is never reached
                    fork = Fork(module, TiedTable(table, module))
                    set_module(self._skeleton.model, name, fork)
        own = intercept_blocks(self._skeleton.model, names)
        self._own = {block.name: own[name] for name, block in self._blocks.items()}
        self._gone = {name: own[name] for name in names if name not in self._blocks}
        keymap = source.keymap
        self._paths = {entry.name: keymap.runtime_name(entry.name) or "" for entry in entries}
        self._entries = {(self._paths[entry.name], entry.parameter): entry for entry in entries}
        self._attention = {keymap.runtime_name(entry.name) or "": entry for entry in attention}
        self._runtime = keymap.runtime_name
        moved = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
        judged = self._holdout or range(len(moved))  # one sample is all that there is
        kept = [probe is not None and index in judged for index in range(len(moved))]
        pairs, model = list(zip(moved, kept, strict=True)), self._skeleton.model
        self._dense = [Stream(model, batch, keep=keep) for batch, keep in pairs]
        self._new = [Stream(model, batch, rewritten=True, keep=keep) for batch, keep in pairs]
        self.unreached = set(self._blocks)  # blocks that the data has not come to
        self._measured = sum(len(next(iter(batch.values()))) for batch, keep in pairs if keep)
        if probe is not None:
            self._skeleton.load_rest()

    def run(
        self,
        done: Callable[[str], BlockResult | None],
        progress: Callable[[str, str], None],
    ) -> Iterator[BlockResult]:
        """Fits all blocks in the order in which the model runs them.

        Args:
            done: Returns the stored result of a block that an interrupted run finished.
            progress: Called with a block's name and the roles of the group at work.

        Raises:
            DataError: The model does not run its blocks one after another.
            FitError: A fit failed, or activations are not finite.
        """
        streams = [*self._dense, *self._new]
        try:
            for stream in streams:
                stream.start()
            left = self.unreached
            while (left or self._probe) and self._dense[0].call is not None:
                name = common_block(streams)
                if name in self._gone:
                    self._pass_by(name)
                    continue
                if name not in left:
                    raise _runs_twice(name)
                left.discard(name)
                block = self._blocks[name]
                result = done(block.name)
                fresh = result is None
                result = self._block(block, result, progress, last=not left)
                if fresh:
                    yield result
        finally:
            for stream in streams:
                stream.close()

    def _pass_by(self, name: str) -> None:
        """Goes past a block that only the dense model has."""
        self._skeleton.load_block(name)
        own = self._gone[name]
        self._advance(own, own, None)
        self._skeleton.drop_block(name)

    def _block(
        self,
        block: Block,
        stored: BlockResult | None,
        progress: Callable[[str, str], None],
        *,
        last: bool,
    ) -> BlockResult:
        before = self._source.original_name(block.name)
        dense = self._skeleton.load_block(before)
        new = copy.deepcopy(dense)
        del new.forward  # the copy runs by itself; the original pauses its stream
        self._rows = TokenRows(dense, block)
        result = BlockResult(block.name, {}, {})
        self._exchange(block, new, (stored or result).attention)
        experts = {layer.name for layer in block.layers if layer.routed}
        routing = Routing(dense, [name.removeprefix(f"{block.name}.") for name in experts])
        for group in self._groups(block):
            progress(block.name, ", ".join(entry.role for entry in group))
            if stored is None:
                self._fit_group(block, group, dense, new, result)
            self._install(block, group, new, stored or result)
        self._rows.close()
        if last and self._probe is None:  # the output head was never loaded
            self._check_end(block.name)
            return stored or result
        routing.replay_in(new)
        self._advance(self._own[block.name], new.forward, routing)
        self._skeleton.drop_block(before)
        return stored or result

    def _exchange(self, block: Block, new: nn.Module, known: dict[str, Tensor]) -> None:
        """Gives the block's attention its mechanism, before anything is fitted.

        Args:
            block: The block.
            new: Its copy.
            known: What an interrupted run stored of them; what is missing is added.
        """

        def inside(name: str) -> str | None:
            return (self._runtime(name) or "").removeprefix(f"{block.name}.")

        fit = [s for index, s in enumerate(self._new) if index not in self._holdout]
        own = [e for path, e in self._attention.items() if path.startswith(f"{block.name}.")]
        # The guard is a matter of storage.
        plain = [entry.model_copy(update={"guard": None}) for entry in own]
        made = install_attention(new, plain, inside, dtype=torch.float32, device=self._device)
        for name, module in made.items():
            path = f"{module.name}.{CHILD}"
            module.name = f"{block.name}.{module.name}"
            module.fill(SEED, pretrained=True)
            module.requires_grad_(False)
            calls = (
                self._input(block.name, s, new.forward, new, path, queries_and_keys) for s in fit
            )
            adapt(module, f"{name}.{CHILD}", known, calls)

    def _check_end(self, block: str) -> None:
        """Makes sure that no block follows the last one, such as one that runs again."""
        stream = self._dense[0]
        call = stream.call
        assert call is not None
        with torch.no_grad():
            answer = self._own[block](*call.args, **call.kwargs)
        try:
            stream.answer(answer)
        except Exception:  # the output head, which holds no weights: the end was reached
            return
        if stream.call is not None and stream.call.block not in self._gone:
            raise _runs_twice(stream.call.block)

    def _groups(self, block: Block) -> Iterator[Group]:
        for group in block.groups:
            keys = [(layer.name, layer.parameter) for layer in group]
            entries = tuple(self._entries[key] for key in keys if key in self._entries)
            if entries:
                yield entries

    def _advance(
        self, dense: Callable[..., Any], new: Callable[..., Any], routing: Routing | None
    ) -> None:
        """Answers all streams; without routing it is a block that only the dense ones run."""
        for index, (one, two) in enumerate(zip(self._dense, self._new, strict=True)):
            for stream, forward in ((one, dense), (two, new)):
                if routing is not None:
                    routing.current = index
                call = stream.call
                assert call is not None
                with torch.no_grad():
                    answer = forward(*call.args, **call.kwargs)
                skipped = routing is None and stream is two
                stream.answer(handed_on(call, answer) if skipped else answer)
            self._compare(one, two)

    def _compare(self, dense: Stream, new: Stream) -> None:
        """Adds up the change of outputs, which are let go of at once: logits are large."""
        if self._probe is None or dense.output is None or self.change is None:
            return
        self.change += self._probe.change(dense.output, new.output, dense.batch) / self._measured
        dense.output = new.output = None

    def _fit_group(
        self, block: Block, group: Group, dense: nn.Module, new: nn.Module, result: BlockResult
    ) -> None:
        path = self._paths[group[0].name]
        inside = path.removeprefix(f"{block.name}.")
        try:
            if group[0].kind == "experts" and not is_routed(dense.get_submodule(inside)):
                moments = [{group[0].bias: LayerMoments()}]  # nothing is known of their routing
            elif group[0].kind == "experts":
                moments = self._expert_moments(block, group[0], dense, new, inside)
            else:
                moments = [self._moments(block, group, dense, new, inside)]
        except FitError as error:
            raise FitError(f"layer `{group[0].name}`: {error.message}", error.hint) from error
        weights, own = [], []
        for entry in group:
            name = f"{self._paths[entry.name]}.{entry.parameter}"
            weight = read_finite(self._source.store, self._source.keymap, name)
            weights.append(entry.matrix(weight).to(self._device))
            own.append([pair[entry.bias] for pair in moments])
        by_dtype = self._dtype_of(group[0])
        curves = {name: s.to(self._device) for name, s in self._curvatures(block.name).items()}
        fitted = fit_layers(
            group,
            weights,
            own,
            dtype=by_dtype,
            damping=self._damping,
            curvatures=curves,
            banks=self._banks,
        )
        for entry, layer in zip(group, fitted, strict=True):
            result.layers[entry.key] = layer
            if entry.bias and entry.kind != "experts":
                bias = dense.get_submodule(
                    self._paths[entry.name].removeprefix(f"{block.name}.")
                ).bias
                shift = 0.0 if layer.shift is None else layer.shift
                result.biases[entry.name] = (bias.double() + shift).to(by_dtype)  # type: ignore[operator,union-attr]

    def _moments(
        self, block: Block, group: Group, dense: nn.Module, new: nn.Module, inside: str
    ) -> dict[bool, LayerMoments]:
        """Moments of a group's input, by whether they are centred (layers with a bias)."""
        sums = SplitSums()
        listed = self._rows.is_listed(self._paths[group[0].name])
        for index, (one, two) in enumerate(zip(self._dense, self._new, strict=True)):
            self._rows.batch = one.batch
            x = self._input(block.name, one, self._own[block.name], dense, inside)
            y = self._input(block.name, two, new.forward, new, inside)
            if listed and x is None:  # an expert that no token of these chose
                continue
            if listed and (y is None or y.shape != x.shape or x.shape[:-1].numel() < _tokens(one)):
                y = x  # in the two streams other tokens may choose it
            if x is None or y is None:
                raise DataError(f"layer `{group[0].name}` did not run on calibration data")
            x = channels_last(dense.get_submodule(inside), x)
            y = channels_last(new.get_submodule(inside), y)
            rows, mask = self._rows.of(x, self._paths[group[0].name], group[0].role)
            if y.numel() != x.numel():
                raise DataError(
                    f"layer `{group[0].name}` reads other tokens once others are rewritten",
                    "convert this model without data: `--calib none`",
                )
            pairs = y.reshape(rows.shape)
            if mask is not None:
                rows, pairs = rows[mask], pairs[mask]
            sums.add(rows, pairs, holdout=index in self._holdout)
        centred = {entry.bias for entry in group}
        return {flag: sums.moments(centred=flag) for flag in centred}

    def _expert_moments(
        self, block: Block, entry: LayerPlan, dense: nn.Module, new: nn.Module, inside: str
    ) -> list[dict[bool, LayerMoments]]:
        """Moments of one input per expert; those that no token chose are fitted without data."""
        down = entry.parameter == "down_proj"
        gathered = ExpertSums(dense.get_submodule(inside), new.get_submodule(inside), down=down)
        for index, (one, two) in enumerate(zip(self._dense, self._new, strict=True)):
            own = self._own[block.name]
            routed = self._input(block.name, one, own, dense, inside, routed_arguments)
            other = self._input(block.name, two, new.forward, new, inside, routed_arguments)
            if routed is None or other is None:
                raise DataError(f"layer `{entry.name}` did not run on calibration data")
            _, mask = token_rows(routed[0], one.batch, block.name, entry.role)
            gathered.add(routed, other[0], mask, holdout=index in self._holdout)
        return [{entry.bias: sums.moments(centred=False)} for sums in gathered.sums]

    @staticmethod
    def _input(
        block: str,
        stream: Stream,
        forward: Callable[..., Any],
        module: nn.Module,
        inside: str,
        arguments: Callable[..., Any] = first_tensor,
    ) -> Any:
        call = stream.call
        assert call is not None
        with torch.no_grad():
            target = module.get_submodule(inside)
            return run_to_input(lambda: forward(*call.args, **call.kwargs), target, arguments)

    def _install(self, block: Block, group: Group, new: nn.Module, result: BlockResult) -> None:
        def inside(name: str) -> str | None:
            return self._paths[name].removeprefix(f"{block.name}.")

        options = {"dtype": torch.float32, "device": self._device}
        made = install_layers(new, group, inside, banks=self._installed, **options)  # type: ignore[arg-type]
        for entry in group:
            module = made[entry.name]
            fill(module, entry, result.layers[entry.key].tensors)
            if entry.bias and entry.kind != "experts":
                with torch.no_grad():
                    module.bias.copy_(result.biases[entry.name])  # type: ignore[union-attr,operator]
            module.requires_grad_(False)


def _tokens(stream: Stream) -> int:
    """Number of tokens that a block is given."""
    call = stream.call
    assert call is not None
    return first_tensor(*call.args, **call.kwargs).shape[:-1].numel()


def _runs_twice(block: str) -> DataError:
    return DataError(
        f"block `{block}` runs more than once in a forward pass",
        "convert this model without data: `--calib none`",
    )
