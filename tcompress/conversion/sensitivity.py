"""One walk of the dense model: what each layer reads, and what its output is worth."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from tcompress.conversion.blocks import TokenRows
from tcompress.conversion.paused import Skeleton, Stream, first_tensor, intercept_blocks
from tcompress.errors import DataError, FitError
from tcompress.linalg.moments import centre_of, row_products
from tcompress.models import SourceModel
from tcompress.roles import Anatomy, Block
from tcompress.structures.modules.linear import channels_last

# One label-free backward pass, block by block: what each layer's output is worth to the model.
#
# Random directions of what the model is used for are propagated back through the dense model
# (methods: Kronecker-factored Gauss-Newton curvature). For a linear layer with input x and with the
# gradient δ at its output, the moments G = E[x x^T] and S = E[δ δ^T] predict how much a change of
# its weight costs the model, in one unit for all layers.
#
# Only one block holds weights at a time. Forward, the inputs of every block go to disk; backward,
# each block is run once more from there. So memory does not grow with depth.


Probe = Callable[[Any, Mapping[str, Tensor]], Sequence[tuple[Tensor, Tensor]]]
"""From a model's output and its inputs to tensors of the output and their random gradients."""


@dataclass
class Worth:
    """Second moments of a linear layer's input and of the gradients at its output, float64.

    Attributes:
        gram: G about the centre, summed over rows.  # (in, in)
        curvature: S, summed over rows.  # (out, out)
        total: Sum of the inputs, less the centre.  # (in,)
        centre: Mean of the first inputs, float32.  # (in,)
        rows: Tokens that were summed over; padding is left out.
        half: The same of every second batch alone, where that was asked for.
    """

    gram: Tensor
    curvature: Tensor
    total: Tensor
    centre: Tensor
    rows: int = 0
    half: Worth | None = None

    @classmethod
    def empty(cls, inputs: int, outputs: int, device: torch.device) -> Worth:
        """Starts with nothing seen."""
        gram = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        curvature = torch.zeros(outputs, outputs, dtype=torch.float64, device=device)
        total = torch.zeros(inputs, dtype=torch.float64, device=device)
        return cls(gram, curvature, total, total.float())

    def add(self, x: Tensor, gradient: Tensor) -> None:
        """Adds rows.  # (rows, in), (rows, out)."""
        if not len(x):
            return
        if not self.rows:
            self.centre = centre_of(x)
        x = x.float() - self.centre
        self.gram += row_products(x, x)
        self.curvature += row_products(gradient, gradient)
        self.total += x.sum(0, dtype=torch.float64)
        self.rows += len(x)

    def include(self, other: Worth, sign: int = 1) -> Worth:
        """Returns the sums of both; without the other one where the sign is -1."""
        apart = other.centre.double() - self.centre.double()
        cross = torch.outer(other.total, apart)
        gram = other.gram + cross + cross.mT + other.rows * torch.outer(apart, apart)
        return Worth(
            self.gram + sign * gram,
            self.curvature + sign * other.curvature,
            self.total + sign * (other.total + other.rows * apart),
            self.centre,
            self.rows + sign * other.rows,
        )

    def moment(self, *, centred: bool) -> Tensor:
        """Returns G per row, without the mean for layers whose bias takes it up.  # (in, in)."""
        shift = self.total / self.rows
        gram, mean = self.gram / self.rows - torch.outer(shift, shift), shift + self.centre
        return gram if centred else gram + torch.outer(mean, mean)


@dataclass
class _Visit:
    """One call of a block in one stream."""

    block: str
    file: Path  # of the tensors among its arguments
    values: list[Any]  # arguments, with None for tensors
    form: pytree.TreeSpec  # how they are nested
    inputs: list[GradientEdge | None]  # of the floating tensors among the arguments, in order
    sinks: list[list[Tensor]]  # gradients of the floating tensors that the block returned


@dataclass
class _Pass:
    stream: Stream
    output: list[Any] = field(default_factory=list)
    visits: list[_Visit] = field(default_factory=list)


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
    """Runs all batches through the model, and gradients back through its blocks.

    Args:
        source: The dense model.
        anatomy: Its blocks.
        batches: Calibration batches.
        probe: Chooses random gradients of the model's output.
        folder: Where inputs of blocks are kept meanwhile; files are deleted as they are used.
        device: Where to compute.
        halved: Blocks of which sums over every second batch are wanted too.
    """

    def __init__(
        self,
        source: SourceModel,
        anatomy: Anatomy,
        batches: Sequence[Mapping[str, Tensor]],
        probe: Probe,
        folder: Path,
        device: torch.device,
        halved: Collection[str] = (),
    ) -> None:
        self._halved = halved
        self._blocks = {block.name: block for block in anatomy.blocks}
        self._skeleton = Skeleton(source, list(self._blocks), device)
        self._skeleton.load_rest()
        self._own = intercept_blocks(self._skeleton.model, list(self._blocks))
        self._probe = probe
        self._folder = folder
        self._device = device
        self._anchor = torch.zeros((), requires_grad=True, device=device)
        self._passes: list[_Pass] = []
        for batch in batches:
            moved = {key: value.to(device) for key, value in batch.items()}
            output: list[Any] = []
            self._passes.append(_Pass(Stream(self._recording(output), moved), output))

    def run(
        self, progress: Callable[[str, str], None] = lambda *_: None
    ) -> Iterator[tuple[str, dict[str, Worth]]]:
        """Yields a block's name and what its layers are worth by name, from the last block on.

        Args:
            progress: Called with a block's name and `forward` or `backward`.

        Raises:
            DataError: The model does not run its blocks alike for all batches.
            FitError: Activations or gradients are not finite.
        """
        try:
            order = list(self._forward(progress))
            for name in reversed(order):
                progress(name, "backward")
                yield name, self._backward(self._blocks[name])
        finally:
            for item in self._passes:
                item.stream.close()
                for visit in item.visits:
                    visit.file.unlink(missing_ok=True)

    def _recording(self, output: list[Any]) -> Callable[..., None]:
        def forward(**batch: Tensor) -> None:
            with torch.enable_grad():
                output.append(self._skeleton.model(**batch))

        return forward

    def _forward(self, progress: Callable[[str, str], None]) -> Iterator[str]:
        for item in self._passes:
            item.stream.start()
        count = 0
        while any(item.stream.call is not None for item in self._passes):
            names = {item.stream.call.block if item.stream.call else "" for item in self._passes}
            if len(names) > 1:
                raise DataError(
                    f"forward passes differ in their blocks: {', '.join(sorted(names))}"
                )
            name = names.pop()
            progress(name, "forward")
            self._skeleton.load_block(name)
            for index, item in enumerate(self._passes):
                self._visit(item, self._folder / f"{count}-{index}.safetensors")
            self._skeleton.drop_block(name)
            count += 1
            yield name

    def _visit(self, item: _Pass, file: Path) -> None:
        """Answers a call of a block with what it computes; its graph begins anew there."""
        call = item.stream.call
        assert call is not None
        flat = pytree.tree_leaves((call.args, call.kwargs))
        edges = [
            get_gradient_edge(value) if value.requires_grad else None
            for value in flat
            if _floating(value)
        ]
        bare = pytree.tree_map_only(Tensor, Tensor.detach, (call.args, call.kwargs))
        visit = _kept(call.block, bare, file, edges)
        item.visits.append(visit)
        with torch.no_grad():
            answer = self._own[call.block](*bare[0], **bare[1])
        if not _finite(answer[0] if isinstance(answer, tuple | list) else answer):
            raise FitError(
                f"block `{call.block}` puts out NaN or infinity on the calibration data",
                "repair the checkpoint, or convert this model without data: `--calib none`",
            )
        item.stream.answer(pytree.tree_map(lambda value: self._marked(value, visit), answer))
        if item.stream.call is None:  # before the next pass ends: outputs may be large
            self._start_backward(item)

    def _marked(self, value: Any, visit: _Visit) -> Any:
        if not _floating(value):
            return value
        visit.sinks.append([])
        with torch.enable_grad():
            return _Mark.apply(self._anchor, value, visit.sinks[-1])  # type: ignore[no-untyped-call]

    def _start_backward(self, item: _Pass) -> None:
        _propagate(self._probe(item.output.pop(), item.stream.batch))

    def _backward(self, block: Block) -> dict[str, Worth]:
        module = self._skeleton.load_block(block.name)
        halved = block.name in self._halved
        watch = _Watch(module, block, self._device, halved=halved)
        for index, item in enumerate(self._passes):
            visit = item.visits.pop()
            watch.rows.batch = item.stream.batch
            watch.sums = watch.second if halved and index % 2 else watch.found
            self._backward_visit(visit)
        watch.close()
        self._skeleton.drop_block(block.name)
        return watch.joined() if halved else watch.found

    def _backward_visit(self, visit: _Visit) -> None:
        stored = load_file(visit.file, device=str(self._device))
        visit.file.unlink()
        flat = [stored.get(str(index), value) for index, value in enumerate(visit.values)]
        args, kwargs = pytree.tree_unflatten(flat, visit.form)
        # Embeddings have no graph, but what a layer computes from them has to.
        inputs = [value.requires_grad_() for value in flat if _floating(value)]
        with torch.enable_grad():
            answer = self._own[visit.block](*args, **kwargs)
        results = [value for value in pytree.tree_flatten(answer)[0] if _floating(value)]
        pairs = [
            (value, torch.stack(sink).sum(0))
            for value, sink in zip(results, visit.sinks, strict=True)
            if sink and value.requires_grad
        ]
        _propagate(pairs)
        _propagate(
            [
                (edge, value.grad)
                for value, edge in zip(inputs, visit.inputs, strict=True)
                if edge is not None and value.grad is not None
            ]
        )


class _Watch:
    """Sums what the linear layers of a block read and which gradients come back to them."""

    def __init__(
        self, module: nn.Module, block: Block, device: torch.device, *, halved: bool
    ) -> None:
        self.rows = TokenRows(module, block)
        self.found: dict[str, Worth] = {}
        self.second: dict[str, Worth] = {}
        self.sums = self.found
        self._handles = []
        for layer in block.layers:
            if layer.kind == "experts":
                continue  # no module computes one expert's output
            outputs = sum(part.size for part in layer.parts)
            for sums in (self.found, self.second) if halved else (self.found,):
                sums[layer.name] = Worth.empty(layer.in_features, outputs, device)
            inside = module.get_submodule(layer.name.removeprefix(f"{block.name}."))
            hook = self._hook(layer.name, layer.role)
            self._handles.append(inside.register_forward_hook(hook, with_kwargs=True))

    def _hook(self, name: str, role: str) -> Callable[..., None]:
        def seen(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            x = channels_last(layer, first_tensor(*args, **kwargs).detach())
            rows, mask = self.rows.of(x, name, role)

            def arrived(gradient: Tensor) -> None:
                back = channels_last(layer, gradient, output=True).reshape(len(rows), -1)
                kept = (rows, back) if mask is None else (rows[mask], back[mask])
                if not all(bool(torch.isfinite(part.sum(dtype=torch.float64))) for part in kept):
                    raise FitError(
                        f"layer `{name}`: gradients hold NaN or infinity",
                        "repair the checkpoint, or convert this model without data: `--calib none`",
                    )
                self.sums[name].add(*kept)

            if output.requires_grad:
                output.register_hook(arrived)

        return seen

    def joined(self) -> dict[str, Worth]:
        """Sums over all batches, with those of the second half apart."""
        found = {name: worth.include(self.second[name]) for name, worth in self.found.items()}
        for name, worth in found.items():
            worth.half = self.second[name]
        return found

    def close(self) -> None:
        """Stops watching."""
        self.rows.close()
        for handle in self._handles:
            handle.remove()


def _kept(
    block: str, arguments: tuple[Any, Any], file: Path, edges: list[GradientEdge | None]
) -> _Visit:
    """Writes the tensors among the arguments of a block to a file; the rest stays in memory."""
    flat, form = pytree.tree_flatten(arguments)
    tensors = {
        str(index): value.cpu().clone(memory_format=torch.contiguous_format)
        for index, value in enumerate(flat)
        if isinstance(value, Tensor)
    }
    save_file(tensors, file)
    values = [None if isinstance(value, Tensor) else _copied(value) for value in flat]
    return _Visit(block, file, values, form, edges, [])


def _copied(value: Any) -> Any:
    """Copies an argument as it is now: blocks may change what they are given, such as caches."""
    try:
        return deepcopy(value)
    except (RuntimeError, TypeError):  # it holds what cannot be copied, such as parts of a graph
        return value


def _propagate(pairs: Sequence[tuple[Any, Tensor]]) -> None:
    """Sends gradients back; what lies between blocks may be passed by several of them."""
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, gradients, retain_graph=True)


def _finite(state: Any) -> bool:
    return not _floating(state) or bool(torch.isfinite(state.sum(dtype=torch.float64)))


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


# One walk of the dense model: moments of what layers read, without anything that is rewritten.


def input_moments(
    source: SourceModel,
    anatomy: Anatomy,
    wanted: Collection[str],
    batches: Sequence[Mapping[str, Tensor]],
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[str, dict[str, Worth]]]:
    """Runs all batches through the dense model, block by block.

    Args:
        source: The model.
        anatomy: Its blocks.
        wanted: Names of layers in the model.
        batches: Calibration batches.
        device: Where to compute.
        progress: Called with a block's name.

    Yields:
        A block's name, and the moments of the inputs of its layers by name; nothing is known of
        outputs.

    Raises:
        DataError: The model does not run its blocks one after another.
    """
    blocks = {block.name: block for block in anatomy.blocks}
    skeleton = Skeleton(source, list(blocks), device)
    own = intercept_blocks(skeleton.model, list(blocks))
    moved = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
    streams = [Stream(skeleton.model, batch) for batch in moved]
    try:
        for stream in streams:
            stream.start()
        while blocks and streams[0].call is not None:
            names = {stream.call.block if stream.call else "" for stream in streams}
            block = blocks.pop(names.pop(), None)
            if names or block is None:
                raise DataError(
                    "the model does not run its blocks one after another",
                    "convert this model without data: `--calib none`",
                )
            progress(block.name)
            module = skeleton.load_block(block.name)
            with _InputSums(module, block, wanted, device) as watch:
                for stream in streams:
                    call = stream.call
                    assert call is not None
                    watch.begin(stream.batch)
                    with torch.no_grad():
                        answer = own[block.name](*call.args, **call.kwargs)
                    if blocks:  # the output head was never loaded
                        stream.answer(answer)
            skeleton.drop_block(block.name)
            yield block.name, watch.found
    finally:
        for stream in streams:
            stream.close()


class _InputSums:
    """Sums what the layers of a block read."""

    def __init__(
        self, module: nn.Module, block: Block, wanted: Collection[str], device: torch.device
    ) -> None:
        self.found: dict[str, Worth] = {}
        self._rows = TokenRows(module, block)
        self._seen: set[str] = set()
        self._handles = []
        for layer in block.layers:
            if layer.name in wanted:
                self.found[layer.name] = Worth.empty(layer.in_features, 0, device)
                inside = module.get_submodule(layer.name.removeprefix(f"{block.name}."))
                hook = self._hook(layer.name, layer.role)
                self._handles.append(inside.register_forward_pre_hook(hook, with_kwargs=True))

    def begin(self, batch: Mapping[str, Tensor]) -> None:
        """Looks at another batch."""
        self._rows.batch, self._seen = batch, set()

    def _hook(self, name: str, role: str) -> Callable[..., None]:
        def seen(layer: nn.Module, args: Any, kwargs: Any) -> None:
            if name in self._seen:  # only the first call reads tokens
                return
            self._seen.add(name)
            x = channels_last(layer, first_tensor(*args, **kwargs))
            rows, mask = self._rows.of(x, name, role)
            rows = rows if mask is None else rows[mask]
            self.found[name].add(rows, rows.new_empty(len(rows), 0))

        return seen

    def __enter__(self) -> _InputSums:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()
        for handle in self._handles:
            handle.remove()
