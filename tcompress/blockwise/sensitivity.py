"""Sensitivity: what each layer reads, and how much a change of its output costs the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from tcompress import processes
from tcompress.artifact.disk_cache import load_tensors
from tcompress.blockwise.output_sampler import OutputSampler
from tcompress.blockwise.prefetch import Prefetch
from tcompress.blockwise.streams import (
    PartialModel,
    Stream,
    TokenRows,
    first_tensor,
    runs_twice,
)
from tcompress.data.inputs import Batch
from tcompress.errors import REPAIR, WITHOUT_DATA, DataError, FitError
from tcompress.linalg.fits import damped_curvature
from tcompress.linalg.moments import (
    MomentSums,
    ProductSum,
    is_finite,
    multipliable,
    naming,
    ridge_level,
    token_weights,
)
from tcompress.models import SourceModel
from tcompress.planning.entries import LayerPlan
from tcompress.progress import BACKWARD, FORWARD, MOMENTS, timed
from tcompress.roles import Block, Layer
from tcompress.structures.modules.linear import channels_last, factor_layouts

# Random directions of what the model is used for are propagated back through the dense model
# (methods: Kronecker-factored Gauss-Newton curvature). For a linear layer with input x and with the
# gradient δ at its output, the moments G = E[x x^T] and S = E[δ δ^T] predict how much a change of
# its weight costs the model, in one unit for all layers.
#
# Only one block holds weights at a time. Forward, the inputs of every block go to disk; backward,
# each block is run once more from there. So memory does not grow with depth.


class Sensitivity:
    """Second moments of a linear layer's input and of the gradients at its output, float64.

    Both come from passes in a dtype; None is that of weights. Of `condensed` layers gradients are
    summed up as they come back to the input, W^T δ.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        device: torch.device,
        passes: torch.dtype | None = None,
        *,
        condensed: bool = False,
    ) -> None:
        self.device, self._condensed, self._outputs = device, condensed, outputs
        # G, each token by what it is worth  # (in, in)
        self.inputs = MomentSums(inputs, device=device, passes=passes)
        # S, a sum over rows and no mean  # (out, out); where condensed W^T S W  # (in, in)
        size = inputs if condensed else outputs
        self.curvature = ProductSum((size, size), device, passes=passes)
        self._squares = 0.0  # of gradients at the output, where condensed
        self.weights: dict[int, Tensor] = {}  # by batch  # (tokens,)
        self.rows = 0  # tokens that were summed over; padding is left out

    def add(
        self, x: Tensor | None, gradient: Tensor, batch: int = 0, *, weighed: bool = True
    ) -> None:
        """Add rows of a batch, which all count alike where not `weighed`.

        Without x they are in the moments of another layer that reads the same.

        (rows, in), (rows, out)
        """
        if not len(gradient):
            return
        self.rows += len(gradient)
        weights = token_weights(gradient) if weighed else None
        if x is not None:
            rows = x.float()  # one copy, where sums are of pairs of rows
            self.inputs.add(rows, rows, weights)
        if self._condensed:
            self._squares += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        else:
            self._add_products(gradient)
        if weights is not None:
            self.weights[batch] = weights

    def add_returned(self, gradient: Tensor) -> None:
        """Add rows of W^T δ, of a condensed layer.  # (rows, in)."""
        self._add_products(gradient)

    def _add_products(self, gradient: Tensor) -> None:
        # No sums in bfloat16, as rows may be: a few large directions outweigh the ridge there.
        [gradient] = multipliable(gradient.clone())
        self.curvature.add(gradient, gradient)

    def ridge(self, damping: float) -> Tensor:
        """Return the ridge on S, of a condensed layer, in units of its mean diagonal.  # ()."""
        mean = torch.tensor(self._squares / (self.rows * self._outputs), dtype=torch.float64)
        return ridge_level(mean[None, None], damping).to(self.device)

    def merge(self, other: Sensitivity) -> Sensitivity:
        """Add what another sum has taken, about a centre of its own."""
        self.inputs = self.inputs.merge(other.inputs)
        self.curvature = self.curvature.merge(other.curvature) if self.rows else other.curvature
        self.weights |= other.weights
        self.rows += other.rows
        self._squares += other._squares
        return self


@dataclass
class _Visit:
    """One call of a block in one stream."""

    file: Path  # of the tensors among its arguments
    values: list[Any]  # arguments, with None for tensors
    form: pytree.TreeSpec  # how they are nested
    inputs: list[GradientEdge | None]  # of the floating tensors among the arguments, in order
    sinks: list[list[Tensor]]  # gradients of the floating tensors that the block returned


@dataclass
class BackwardWalk:
    """Passes of all batches through a model, and of gradients back through its blocks.

    Inputs of blocks are kept in a folder meanwhile; files are deleted as they are used.
    """

    source: SourceModel
    batches: Sequence[Batch]
    sampler: OutputSampler
    folder: Path
    device: torch.device
    condensed: Collection[str] = ()  # names of layers with W^T S W in place of S

    def __post_init__(self) -> None:
        self._model = PartialModel(self.source, self.device, head=True)
        self._zero = torch.zeros((), requires_grad=True, device=self.device)
        self._streams = self._model.streams(self.batches, keep=True, gradients=True)
        self._visits: dict[int, list[_Visit]] = {index: [] for index in self._streams}

    def run(
        self, progress: Callable[[str, str], None] = lambda *_: None
    ) -> Iterator[tuple[Block, dict[str, Sensitivity]]]:
        """Yield a block and the sensitivity of its layers, from the last block on."""
        order: list[Block] = []
        with TemporaryDirectory(dir=self.folder) as folder:
            for block, _ in self._model.walk(self._streams.values()):
                if block in order:
                    raise runs_twice(block.name)
                progress(block.name, "forward")
                for index in self._streams:
                    self._visit(index, Path(folder, f"{len(order)}-{index}.safetensors"))
                order.append(block)
            order.reverse()
            with closing(self._model.prefetch([block.name for block in order])) as prefetch:
                for block in order:
                    progress(block.name, "backward")
                    yield block, self._backward(block, prefetch)

    def _visit(self, index: int, file: Path) -> None:
        """Answer a call of a block with what it computes; its graph begins anew there."""
        stream = self._streams[index]
        call = stream.waiting
        leaves, form = pytree.tree_flatten((call.args, call.kwargs))
        edges = [get_gradient_edge(x) if x.requires_grad else None for x in leaves if _floating(x)]
        tensors = {
            str(number): leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
        }
        save_file(tensors, file)
        values = [None if isinstance(leaf, Tensor) else _copied(leaf) for leaf in leaves]
        visit = _Visit(file, values, form, edges, [])
        self._visits[index].append(visit)
        answer = self._model.answer_of(stream)
        state = answer[0] if isinstance(answer, tuple | list) else answer
        if _floating(state) and not is_finite(state):
            text = f"block `{call.block}` puts out NaN or infinity on the calibration data"
            raise FitError(text, REPAIR)
        stream.answer(pytree.tree_map(lambda value: self._marked(value, visit), answer))
        if stream.call is None:  # before the next pass ends: outputs may be large
            output, stream.output = stream.output, None
            _propagate(self.sampler(output, stream.batch, index))

    def _marked(self, value: Any, visit: _Visit) -> Any:
        """Start a graph at a value, and collect the gradients that come back to it."""
        if not _floating(value):
            return value
        with torch.enable_grad():
            marked = value.detach() + self._zero
        visit.sinks.append([])
        marked.register_hook(visit.sinks[-1].append)
        return marked

    def _backward(self, block: Block, prefetch: Prefetch) -> dict[str, Sensitivity]:
        # No module computes one expert's output.
        layers = [layer for layer in block.layers if layer.kind != "experts"]
        weighed, visit = self.sampler.weighs_tokens, partial(self._backward_visit, block.name)
        with self._model.loaded(block.name, prefetch) as module:
            facts = module, block, layers, self.device, self.source.autocast
            watch = _Watch(*facts, gradients=True, weighed=weighed, condensed=self.condensed)
            return watch.total(self._streams, len(self.batches), visit)

    def _backward_visit(self, block: str, index: int) -> None:
        visit = self._visits[index].pop()
        stored = load_tensors(visit.file, self.device)
        visit.file.unlink()
        leaves = [stored.get(str(number), value) for number, value in enumerate(visit.values)]
        args, kwargs = pytree.tree_unflatten(leaves, visit.form)
        # Embeddings have no graph, but what a layer computes from them has to.
        inputs = [leaf.requires_grad_() for leaf in leaves if _floating(leaf)]
        with torch.enable_grad(), timed(FORWARD):
            answer = self._model.forwards[block](*args, **kwargs)
        results = filter(_floating, pytree.tree_leaves(answer))
        pairs = [
            (value, torch.stack(sink).sum(0))
            for value, sink in zip(results, visit.sinks, strict=True)
            if sink and value.requires_grad
        ]
        _propagate(pairs)
        edges = zip(inputs, visit.inputs, strict=True)
        _propagate([(e, v.grad) for v, e in edges if e is not None and v.grad is not None])


def _copied(value: Any) -> Any:
    """Copy an argument as it is now: blocks may change what they are given, such as caches."""
    with suppress(RuntimeError, TypeError):  # of what cannot be copied, such as parts of a graph
        return deepcopy(value)
    return value


def _propagate(pairs: Sequence[tuple[Any, Tensor]]) -> None:
    """Send gradients back; what lies between blocks may be passed by several of them."""
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        with timed(BACKWARD):
            torch.autograd.backward(tensors, gradients, retain_graph=True)


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def input_moments(
    source: SourceModel,
    names: Collection[str],
    batches: Sequence[Batch],
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Block, dict[str, Sensitivity]]]:
    """Run all batches through the dense model, and yield moments of inputs block by block.

    They are by the names of layers that are asked for; nothing is known of outputs.
    """
    model = PartialModel(source, device)
    streams, remaining = model.streams(batches), {*model.blocks}

    def visit(index: int) -> None:
        answer = model.answer_of(streams[index])
        if remaining:  # the output head was never loaded
            streams[index].answer(answer)

    for block, readings in model.walk(streams.values()):
        if block.name not in remaining:
            text = "the model does not run its blocks one after another"
            raise DataError(text, WITHOUT_DATA)
        remaining.remove(block.name)
        progress(block.name)
        layers = [layer for layer in block.layers if layer.name in names]
        watch = _Watch(readings.block, block, layers, device, source.autocast)
        yield block, watch.total(streams, len(batches), visit)
        if not remaining:
            break


@dataclass
class _Watch:
    """Sums over what linear layers of a block read, and the gradients that come back to them.

    Without gradients only the first call of a layer counts: it reads tokens.
    """

    module: nn.Module
    block: Block
    layers: Sequence[Layer]
    device: torch.device
    passes: torch.dtype | None = None  # dtype of their products
    gradients: bool = False
    weighed: bool = False  # tokens count as much as the gradients that come back to them
    condensed: Collection[str] = ()  # names of layers with W^T S W in place of S
    _sums: dict[str, Sensitivity] = field(default_factory=dict)  # by name of a layer
    _called: set[str] = field(default_factory=set)  # layers that have run on this batch
    _arrivals: Counter[str] = field(default_factory=Counter)  # of gradients of this batch, by layer
    _read: set[tuple[str | None, int]] = field(default_factory=set)  # inputs, by who sums them up
    _index: int = 0  # of the batch

    def __post_init__(self) -> None:
        self._rows = TokenRows(self.module, self.block)
        # Tokens that all count alike are summed up once for all layers that read them.
        once = self.gradients and not self.weighed
        groups = [[layer for layer in group if layer in self.layers] for group in self.block.groups]
        self._readers = {
            layer.name: group[0].name
            for group in groups
            for layer in group
            if once and all(item.calls == 1 for item in group)
        }

    def total(
        self, streams: Mapping[int, Stream], batches: int, visit: Callable[[int], None]
    ) -> dict[str, Sensitivity]:
        """Visit all batches, of so many, and return the sums over them by name of a layer."""
        total = processes.Total(merged, self.device)
        with ExitStack() as hooks:
            hooks.callback(self._rows.close)
            for layer in self.layers:
                path = layer.name.removeprefix(f"{self.block.name}.")
                hook, module = partial(self._ran, layer), self.module.get_submodule(path)
                hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
                if layer.name in self.condensed:
                    handle = module.register_forward_pre_hook(_with_alias, with_kwargs=True)
                    hooks.enter_context(handle)
            for run in total.runs():
                self._sums = {layer.name: self._empty(layer) for layer in self.layers}
                for index in processes.batches_of(run, batches):
                    self._rows.batch, self._index = streams[index].batch, index
                    for of_batch in (self._called, self._arrivals, self._read):
                        of_batch.clear()
                    visit(index)
                with timed(MOMENTS):
                    total.add(self._sums)
        self._sums, sums = {}, total.whole()
        for name, reader in self._readers.items():
            sums[name].inputs = sums[reader].inputs
        return sums

    def _empty(self, layer: Layer) -> Sensitivity:
        facts = layer.in_features, layer.out_features, self.device, self.passes
        return Sensitivity(*facts, condensed=layer.name in self.condensed)

    def _ran(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        """Add what a layer has read, once the gradients of its output are there."""
        read = first_tensor(*args, **kwargs)
        x = channels_last(module, read.detach())
        rows, mask = self._rows.of(x, layer.name, layer.role)

        def arrived(gradient: Tensor) -> None:
            back = channels_last(module, gradient, output=True).reshape(len(rows), -1)
            pair = (rows, back) if mask is None else (rows[mask], back[mask])
            if not all(map(is_finite, pair)):
                raise FitError(f"layer `{layer.name}`: gradients hold NaN or infinity", REPAIR)
            with timed(MOMENTS):
                self._add(layer.name, *pair)

        def returned(gradient: Tensor) -> None:
            back = gradient.reshape(len(rows), -1)
            with timed(MOMENTS):
                self._sums[layer.name].add_returned(back if mask is None else back[mask])

        if self.gradients and output.requires_grad:
            output.register_hook(arrived)
            if layer.name in self.condensed:
                read.register_hook(returned)
        elif not self.gradients and layer.name not in self._called:
            x = (rows if mask is None else rows[mask]).float()  # one copy for both sides
            self._sums[layer.name].inputs.add(x, x)
            self._sums[layer.name].rows += len(x)
        self._called.add(layer.name)

    def _add(self, layer: str, rows: Tensor, gradient: Tensor) -> None:
        reader = self._readers.get(layer)
        call = reader, self._arrivals[layer]
        self._arrivals[layer] += 1
        if reader is not None and call not in self._read:
            x = rows.float()
            self._sums[reader].inputs.add(x, x)
        self._read.add(call)
        of_layer = rows if reader is None else None
        self._sums[layer].add(of_layer, gradient, self._index, weighed=self.weighed)


def _with_alias(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let a module read a tensor of its own: the gradient there is what it alone sends back."""
    read = first_tensor(*args, **kwargs)
    alias = read.view_as(read).requires_grad_()
    arguments = {key: alias if value is read else value for key, value in kwargs.items()}
    return tuple(alias if value is read else value for value in args), arguments


def merged(total: dict[Any, Any], other: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add sums to others of the same keys."""
    return total | {k: total[k].merge(sums) if k in total else sums for k, sums in other.items()}


def damped_inputs(
    measured: dict[str, Sensitivity], entries: Mapping[str, LayerPlan], damping: float
) -> dict[str, Tensor]:
    """Return damped input moments of layers that use shared factors, by planned name.

    What was measured is taken out of its mapping: the block may still be loaded beside it.
    """
    damped: dict[str, Tensor] = {}
    for name in [*measured]:
        sums = measured.pop(name)
        if sums.rows and name in entries and factor_layouts(entries[name].parts):
            entry = entries[name]
            with naming(f"layer `{entry.name}`", REPAIR):
                gram = sums.inputs.moments(centred=entry.bias).gram
            damped[entry.name] = damped_curvature(gram, damping * entry.in_features / sums.rows)
    return damped
