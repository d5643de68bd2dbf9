"""Sensitivity: what each layer reads, and how much a change of its output costs the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from tcompress import processes
from tcompress.artifact.disk_cache import load_tensors
from tcompress.blockwise.output_sampler import OutputSampler
from tcompress.blockwise.streams import (
    PartialModel,
    Stream,
    TokenRows,
    common_block,
    first_tensor,
    runs_twice,
)
from tcompress.errors import DataError, FitError
from tcompress.linalg.fits import damped_curvature
from tcompress.linalg.moments import ProductSum, centre_of, is_finite, multipliable, token_weights
from tcompress.models import SourceModel
from tcompress.planning.entries import LayerPlan
from tcompress.progress import BACKWARD, FORWARD, MOMENTS, timed
from tcompress.roles import Block, Layer, Roles
from tcompress.structures.modules.linear import channels_last, factor_layouts

# Random directions of what the model is used for are propagated back through the dense model
# (methods: Kronecker-factored Gauss-Newton curvature). For a linear layer with input x and with the
# gradient δ at its output, the moments G = E[x x^T] and S = E[δ δ^T] predict how much a change of
# its weight costs the model, in one unit for all layers.
#
# Only one block holds weights at a time. Forward, the inputs of every block go to disk; backward,
# each block is run once more from there. So memory does not grow with depth.


@dataclass
class Sensitivity:
    """Second moments of a linear layer's input and of the gradients at its output, float64."""

    grams: ProductSum  # G about the centre, weighed, summed over rows  # (in, in)
    curvatures: ProductSum  # S, summed over rows  # (out, out)
    total: Tensor  # weighed sum of the inputs, less the centre  # (in,)
    centre: Tensor  # mean of the first inputs, float32  # (in,)
    rows: int = 0  # tokens that were summed over; padding is left out
    weight: float = 0.0  # sum of what these tokens are worth
    weights: dict[int, Tensor] = field(default_factory=dict)  # by batch  # (tokens,)

    @classmethod
    def empty(cls, inputs: int, outputs: int, device: torch.device) -> Sensitivity:
        grams = ProductSum.zero(inputs, inputs, device)
        curvatures = ProductSum.zero(outputs, outputs, device)
        total = torch.zeros(inputs, dtype=torch.float64, device=device)
        return cls(grams, curvatures, total, total.float())

    @property
    def gram(self) -> Tensor:
        return self.grams.total

    @property
    def curvature(self) -> Tensor:
        return self.curvatures.total

    def add(self, x: Tensor, gradient: Tensor, batch: int = 0, *, weighed: bool = True) -> None:
        """Add rows of a batch, which all count alike where not `weighed`.

        (rows, in), (rows, out)
        """
        if not len(x):
            return
        weights = token_weights(gradient) if weighed else torch.ones_like(x[:, 0]).double()
        if not self.rows:
            self.centre = centre_of(x.float(), weights)
        root = weights.sqrt()
        x = root[:, None] * (x.float() - self.centre)
        self.total += root @ x
        [x], [gradient] = multipliable(x), multipliable(gradient.clone())
        self.grams.add(x, x)
        self.curvatures.add(gradient, gradient)
        self.rows += len(x)
        self.weight += float(weights.sum())
        if weighed:
            self.weights[batch] = weights

    def merge(self, other: Sensitivity) -> Sensitivity:
        """Add what another sum has taken, about a centre of its own."""
        if not self.rows or not other.rows:
            return self if self.rows else other
        shift = other.centre.double() - self.centre.double()
        self.grams.merge(other.grams)
        self.gram.addr_(other.total, shift).addr_(shift, other.total + other.weight * shift)
        self.curvatures.merge(other.curvatures)
        self.total += other.total + other.weight * shift
        self.rows += other.rows
        self.weight += other.weight
        self.weights |= other.weights
        return self

    @property
    def mean(self) -> Tensor:
        """Weighed mean of the inputs.  # (in,)."""
        return self.total / self.weight + self.centre

    def moment(self, *, centred: bool) -> Tensor:
        """Return the mean of G, about its mean for layers whose bias takes it up.  # (in, in)."""
        shift = self.total / self.weight
        gram = self.gram / self.weight
        gram -= torch.outer(shift, shift)
        return gram if centred else gram.add_(torch.outer(self.mean, self.mean))


@dataclass
class _Visit:
    """One call of a block in one stream."""

    block: str
    file: Path  # of the tensors among its arguments
    values: list[Any]  # arguments, with None for tensors
    form: pytree.TreeSpec  # how they are nested
    inputs: list[GradientEdge | None]  # of the floating tensors among the arguments, in order
    sinks: list[list[Tensor]]  # gradients of the floating tensors that the block returned


class _Mark(torch.autograd.Function):
    """The identity, which starts a graph and collects the gradient that comes back to it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, sink: list[Tensor]) -> Tensor:
        ctx.sink = sink
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.sink.append(gradient)
        return None, None, None


class BackwardWalk:
    """Passes of all batches through a model, and of gradients back through its blocks.

    Inputs of blocks are kept in a folder meanwhile; files are deleted as they are used.
    """

    def __init__(
        self,
        source: SourceModel,
        roles: Roles,
        batches: Sequence[Mapping[str, Tensor]],
        sampler: OutputSampler,
        folder: Path,
        device: torch.device,
    ) -> None:
        self._blocks = {block.name: block for block in roles.blocks}
        self._model = PartialModel(source, list(self._blocks), device, head=True)
        self._sampler = sampler
        self._folder = folder
        self._device = device
        self._anchor = torch.zeros((), requires_grad=True, device=device)
        self._count = len(batches)
        self._streams = {
            index: self._model.stream(batches[index], keep=True, gradients=True)
            for index in processes.own_batches(self._count)
        }
        self._visits: dict[int, list[_Visit]] = {index: [] for index in self._streams}

    def run(
        self, progress: Callable[[str, str], None] = lambda *_: None
    ) -> Iterator[tuple[str, dict[str, Sensitivity]]]:
        """Yield a block's name and the sensitivity of its layers, from the last block on."""
        order: list[str] = []
        try:
            streams = [*self._streams.values()]
            with self._model.paused(streams):
                while name := common_block(streams):
                    if name in order:
                        raise runs_twice(name)
                    progress(name, "forward")
                    with self._model.loaded(name):
                        for index in self._streams:
                            file = self._folder / f"{len(order)}-{index}.safetensors"
                            self._visit(index, file)
                    order.append(name)
            for name in reversed(order):
                progress(name, "backward")
                yield name, self._backward(self._blocks[name])
        finally:
            for visit in chain(*self._visits.values()):
                visit.file.unlink(missing_ok=True)

    def _visit(self, index: int, file: Path) -> None:
        """Answer a call of a block with what it computes; its graph begins anew there."""
        stream = self._streams[index]
        call = stream.waiting
        arguments = (call.args, call.kwargs)
        leaves = filter(_floating, pytree.tree_leaves(arguments))
        edges = [get_gradient_edge(value) if value.requires_grad else None for value in leaves]
        bare = pytree.tree_map_only(Tensor, Tensor.detach, arguments)
        flat, form = pytree.tree_flatten(bare)
        tensors = {
            str(index): value.cpu().clone(memory_format=torch.contiguous_format)
            for index, value in enumerate(flat)
            if isinstance(value, Tensor)
        }
        save_file(tensors, file)
        values = [None if isinstance(value, Tensor) else _copied(value) for value in flat]
        visit = _Visit(call.block, file, values, form, edges, [])
        self._visits[index].append(visit)
        with torch.no_grad(), timed(FORWARD):
            answer = self._model.forwards[call.block](*bare[0], **bare[1])
        state = answer[0] if isinstance(answer, tuple | list) else answer
        if _floating(state) and not is_finite(state):
            raise FitError(
                f"block `{call.block}` puts out NaN or infinity on the calibration data",
                "repair the checkpoint, or convert this model without data: `--calib none`",
            )
        stream.answer(pytree.tree_map(lambda value: self._marked(value, visit), answer))
        if stream.call is None:  # before the next pass ends: outputs may be large
            self._start_backward(stream, index)

    def _marked(self, value: Any, visit: _Visit) -> Any:
        if not _floating(value):
            return value
        visit.sinks.append([])
        with torch.enable_grad():
            return _Mark.apply(self._anchor, value, visit.sinks[-1])  # type: ignore[no-untyped-call]

    def _start_backward(self, stream: Stream, index: int) -> None:
        output, stream.output = stream.output, None
        _propagate(self._sampler(output, stream.batch, index))

    def _backward(self, block: Block) -> dict[str, Sensitivity]:
        # No module computes one expert's output.
        layers = [layer for layer in block.layers if layer.kind != "experts"]
        with (
            self._model.loaded(block.name) as module,
            _watched(module, block, layers, self._device, gradients=True) as watch,
        ):
            for run in watch.runs():
                for index in processes.batches_of(run, self._count):
                    watch.begin(self._streams[index].batch, index)
                    watch.weighed = self._sampler.weighs_tokens
                    self._backward_visit(self._visits[index].pop())
            return watch.total()

    def _backward_visit(self, visit: _Visit) -> None:
        stored = load_tensors(visit.file, self._device)
        visit.file.unlink()
        flat = [stored.get(str(index), value) for index, value in enumerate(visit.values)]
        args, kwargs = pytree.tree_unflatten(flat, visit.form)
        # Embeddings have no graph, but what a layer computes from them has to.
        inputs = [value.requires_grad_() for value in flat if _floating(value)]
        with torch.enable_grad(), timed(FORWARD):
            answer = self._model.forwards[visit.block](*args, **kwargs)
        results = [value for value in pytree.tree_flatten(answer)[0] if _floating(value)]
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
    try:
        return deepcopy(value)
    except (RuntimeError, TypeError):  # it holds what cannot be copied, such as parts of a graph
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
    roles: Roles,
    names: Collection[str],
    batches: Sequence[Mapping[str, Tensor]],
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[str, dict[str, Sensitivity]]]:
    """Run all batches through the dense model, and yield moments of inputs block by block.

    They are by the names of layers that are asked for; nothing is known of outputs.
    """
    blocks = {block.name: block for block in roles.blocks}
    model = PartialModel(source, list(blocks), device)
    by_index = {i: model.stream(batches[i]) for i in processes.own_batches(len(batches))}
    streams = [*by_index.values()]
    with model.paused(streams):
        while blocks and (name := common_block(streams)):
            block = blocks.pop(name, None)
            if block is None:
                raise DataError(
                    "the model does not run its blocks one after another",
                    "convert this model without data: `--calib none`",
                )
            progress(name)
            layers = [layer for layer in block.layers if layer.name in names]
            with (
                model.loaded(name) as module,
                _watched(module, block, layers, device, gradients=False) as watch,
            ):
                for run in watch.runs():
                    for index in processes.batches_of(run, len(batches)):
                        watch.begin(by_index[index].batch)
                        answer = model.answer_of(by_index[index])
                        if blocks:  # the output head was never loaded
                            by_index[index].answer(answer)
                sums = watch.total()
            yield name, sums


@contextmanager
def _watched(
    module: nn.Module,
    block: Block,
    layers: Sequence[Layer],
    device: torch.device,
    *,
    gradients: bool,
) -> Iterator[_Watch]:
    """Sum over what some layers of a block read while the block of code runs."""
    watch, handles = _Watch(TokenRows(module, block), gradients, device, layers), []
    for layer in layers:
        hooked = module.get_submodule(layer.name.removeprefix(f"{block.name}."))
        hook = partial(watch.ran, layer.name, layer.role)
        handles.append(hooked.register_forward_hook(hook, with_kwargs=True))
    try:
        yield watch
    finally:
        watch.rows.close()
        for handle in handles:
            handle.remove()


def _merged(total: dict[str, Sensitivity], more: dict[str, Sensitivity]) -> dict[str, Sensitivity]:
    return {name: sums.merge(more[name]) for name, sums in total.items()}


@dataclass
class _Watch:
    """Sums over what the linear layers of a block read, and the gradients that come back to them.

    Without gradients only the first call of a layer counts: it reads tokens.
    """

    rows: TokenRows
    gradients: bool
    device: torch.device
    layers: Sequence[Layer]
    sums: dict[str, Sensitivity] = field(default_factory=dict)  # by name of a layer
    weighed: bool = False
    """Whether tokens count as much as the gradients that come back to them."""
    _total: processes.Total[dict[str, Sensitivity]] = field(init=False)
    _called: set[str] = field(default_factory=set)  # layers that have run on this batch
    _index: int = 0  # of the batch

    def __post_init__(self) -> None:
        self._total = processes.Total(_merged, self.device)

    def runs(self) -> Iterator[int]:
        """Runs of batches that this process is to look at; their sums are added up."""
        for run in self._total.runs():
            self.sums = {}
            for layer in self.layers:
                outputs = sum(part.size for part in layer.parts) if self.gradients else 0
                empty = Sensitivity.empty(layer.in_features, outputs, self.device)
                self.sums[layer.name] = empty
            yield run
            self._total.add(self.sums)

    def total(self) -> dict[str, Sensitivity]:
        """Return sums over all batches, by name of a layer."""
        return self._total.whole()

    def begin(self, batch: Mapping[str, Tensor], index: int = 0) -> None:
        """Look at another batch."""
        self.rows.batch, self._index = batch, index
        self._called.clear()

    def ran(
        self, name: str, role: str, layer: nn.Module, args: Any, kwargs: Any, output: Tensor
    ) -> None:
        """Add what a layer has read, once the gradients of its output are there."""
        x = channels_last(layer, first_tensor(*args, **kwargs).detach())
        rows, mask = self.rows.of(x, name, role)

        def arrived(gradient: Tensor) -> None:
            back = channels_last(layer, gradient, output=True).reshape(len(rows), -1)
            pair = (rows, back) if mask is None else (rows[mask], back[mask])
            if not all(map(is_finite, pair)):
                raise FitError(
                    f"layer `{name}`: gradients hold NaN or infinity",
                    "repair the checkpoint, or convert this model without data: `--calib none`",
                )
            with timed(MOMENTS):
                self.sums[name].add(*pair, self._index, weighed=self.weighed)

        if not self.gradients and name not in self._called:
            x = rows if mask is None else rows[mask]
            self.sums[name].add(x, x.new_empty(len(x), 0), weighed=False)
        elif self.gradients and output.requires_grad:
            output.register_hook(arrived)
        self._called.add(name)


def damped_inputs(
    measured: Mapping[str, Sensitivity], entries: Mapping[str, LayerPlan], damping: float
) -> dict[str, Tensor]:
    """Return damped input moments of layers that use shared factors, by planned name."""
    return {
        entries[name].name: damped_curvature(
            sums.moment(centred=entries[name].bias), damping * entries[name].in_features / sums.rows
        )
        for name, sums in measured.items()
        if sums.rows and name in entries and factor_layouts(entries[name].parts)
    }
