"""Forward passes that can be paused at every block, and what layers read meanwhile."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tcompress import processes
from tcompress.attention.visibility import Visible
from tcompress.blockwise.prefetch import Prefetch, Weight
from tcompress.data.inputs import Batch
from tcompress.errors import WITHOUT_DATA, DataError, SourceError
from tcompress.memory import free_memory, give_back_memory, pins
from tcompress.models import SourceModel, read_finite, tell_padding
from tcompress.models.keymap import CPU
from tcompress.planning.sites import roles_of
from tcompress.progress import FORWARD, timed
from tcompress.roles import Block
from tcompress.roles.projections import chooses

Forward = Callable[..., Any]


class PartialModel:
    """The source model with its blocks on the meta device until they are needed.

    Its forward passes pause at every block. Everything outside the blocks is loaded at once, the
    output head only where asked for: a calibration stops after the last block. What is not stored
    at all, such as a pooler that nobody trained, is then zero; what need not be, such as sinusoids,
    is computed as the class does. Weights are float32, and so are products, but in blocks where the
    source says otherwise (`autocast`), and linear layers are stored so: the head stays exact, since
    small changes of an output are measured.
    """

    def __init__(self, source: SourceModel, device: torch.device, *, head: bool = False) -> None:
        self.source, self.device = source, device
        self.blocks = {block.name: block for block in roles_of(source).blocks}
        # Buffers that no checkpoint holds (rotary frequencies, position ids) are computed for
        # real; a key-value cache would grow with every run of a block.
        with init_empty_weights(include_buffers=False):
            config = copy.deepcopy(source.config)
            self.model: nn.Module = source.model_class._from_config(config).eval()
        tell_padding(self.model)
        for module in self.model.modules():
            if getattr(module, "config", None) is not None:
                module.config.use_cache = False  # type: ignore[union-attr]
        for name, buffer in list(self.model.named_buffers()):
            _put(self.model, name, buffer.to(device))
        self._stored = list(self.model.state_dict(keep_vars=True))
        output = self.model.get_output_embeddings()  # type: ignore[operator]
        if head and output is not None and not isinstance(output, nn.Embedding):
            output.register_forward_pre_hook(_end_unless_kept)
        output = None if head else output
        heads = (name for name, item in self.model.named_modules() if item is output and name)
        skipped = tuple(f"{name}." for name in (*self.blocks, *heads))
        self._load(self._read(name for name in self._stored if not name.startswith(skipped)))
        self._compute("", skipped)
        for name, item in list(self.model.named_parameters(remove_duplicate=False)):
            if head and item.is_meta and not name.startswith(skipped):
                _put(self.model, name, torch.zeros(item.shape, device=device))
        self.forwards = {
            name: cast_to(source.autocast, device, forward)
            for name, forward in intercept_blocks(self.model, self.blocks).items()
        }

    def stream(self, batch: Batch, **options: bool) -> Stream:
        """Make a forward pass; options as for `Stream`."""
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if ids is not None and mask is not None and mask.shape == ids.shape:
            for pad in ids[mask == 0][:1].tolist():  # what the data is filled up with
                tell_padding(self.model, pad)
        moved = {key: value.to(self.device) for key, value in batch.items()}
        return Stream(self.model, moved, **options)

    def streams(self, batches: Sequence[Batch], **options: bool) -> dict[int, Stream]:
        """Make a pass of every batch that this process looks at, by its index."""
        indices = processes.own_batches(len(batches))
        return {index: self.stream(batches[index], **options) for index in indices}

    def walk(self, streams: Collection[Stream]) -> Iterator[tuple[Block, Readings]]:
        """Start forward passes; yield every block at which they pause, to be answered.

        It is loaded meanwhile. Passes end with the loop, be it at the end of the model or before.
        """
        with ExitStack() as ends:
            prefetch = ends.enter_context(closing(self.prefetch([*self.blocks])))
            for stream in streams:
                ends.callback(stream.close)
                stream.start()
                give_back_memory()
            while name := _common_block(streams):
                block = self.blocks[name]
                with self.loaded(name, prefetch) as module:
                    room = room_on(self.device)
                    readings = _readings(block, module, self.forwards[name], room)
                    yield block, readings
                    readings.drop()  # whoever has them: the next block needs the memory

    def prefetch(self, order: Sequence[str]) -> Prefetch:
        """Make what reads blocks in an order, each while the device computes with the one before.

        Not on the CPU: it has no time to spare, and its memory is the limit there.
        """
        ahead = () if self.device.type == "cpu" else order
        return Prefetch(self._read_block, ahead, pinned=pins(self.device))

    @contextmanager
    def loaded(self, block: str, prefetch: Prefetch) -> Iterator[nn.Module]:
        """Load one block and have the next one read; free the weights of the block afterwards."""
        self._load(prefetch.take(block))
        self._compute(f"{block}.")
        prefetch.start_after(block)
        module = self.model.get_submodule(block)
        try:
            yield module
        finally:  # where a walk ends before the model does too
            for name, parameter in list(module.named_parameters()):
                _put(module, name, parameter.to("meta"))
            give_back_memory()

    def answer_of(self, stream: Stream) -> Any:
        """Run the block at which a pass waits, and return what it computes."""
        return stream.waiting.run(self.forwards[stream.waiting.block])

    def _read_block(self, block: str) -> Iterator[Weight]:
        return self._read(name for name in self._stored if name.startswith(f"{block}."))

    def _read(self, names: Iterable[str]) -> Iterator[Weight]:
        """Read parameters and persistent buffers; what the checkpoint lacks is left out."""
        tied: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            try:
                sources = self.source.keymap.sources(name)
            except SourceError:
                continue  # a head that this checkpoint does not have
            key = (*sources.keys, *sources.patterns, name if sources.converter else "")
            tied.setdefault(key, []).append(name)
        for group in tied.values():
            yield group, read_finite(self.source.store, self.source.keymap, group[0], CPU)

    def _compute(self, prefix: str, skipped: tuple[str, ...] = ()) -> None:
        """Give first values to parameters that their classes do not ask a checkpoint for."""
        for name, item in list(self.model.named_parameters(remove_duplicate=False)):
            inside = name.startswith(prefix) and not name.startswith(skipped)
            if item.is_meta and inside and name not in self.source.keymap.missing:
                _put(self.model, name, self._first_value(name))

    def _first_value(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        # All parameters of a module get theirs together: of a copy, whose children have no values.
        empty = {id(x): nn.Parameter(x.to("meta"), False) for x in module.parameters()}
        module = copy.deepcopy(module, empty)
        for key, item in module.named_parameters(recurse=False):
            value = torch.empty(item.shape, device=self.device)
            module.register_parameter(key, nn.Parameter(value, False))
        self.model._init_weights(module)  # type: ignore[operator]
        return module.get_parameter(leaf).detach()

    def _load(self, weights: Iterable[Weight]) -> None:
        """Put weights into the model, on its device; what is not among them stays.

        They are float32, but for those of linear layers of blocks that a checkpoint holds in the
        dtype of their products: these would be made from a copy, in every pass anew.
        """
        for names, value in weights:
            moved = value.to(self.device, non_blocking=pins(self.device))
            lowered = moved.dtype == self.source.autocast and all(map(self._is_product, names))
            moved = moved.float() if moved.is_floating_point() and not lowered else moved
            for name in names:
                _put(self.model, name, moved)

    def _is_product(self, name: str) -> bool:
        """Tell whether a parameter is a weight of a linear layer in a block."""
        path, _, leaf = name.rpartition(".")
        inside = any(path.startswith(f"{block}.") for block in self.blocks)
        return inside and leaf == "weight" and type(self.model.get_submodule(path)) is nn.Linear


def cast_to(dtype: torch.dtype | None, device: torch.device, forward: Forward) -> Forward:
    """Make a block compute its products in a dtype; None leaves it as it is.

    What it puts out is float32: what follows may be no part of a block.
    """
    if dtype is None:
        return forward
    return convert_outputs_to_fp32(torch.autocast(device.type, dtype)(forward))


def _put(root: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer."""
    path, _, leaf = name.rpartition(".")
    owner = root.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value


# A data-aware conversion walks through the model block by block with two streams of activations:
# the dense one, and the one that the already rewritten blocks produce. Every model family wires its
# blocks differently (masks by layer, position biases handed on, encoders feeding decoders), so the
# model's own forward keeps control: it runs in a thread per batch and stream, and every call of a
# block hands over to the converter, which decides when and with which weights the block runs. Only
# one thread runs at any time.


def first_tensor(*args: Any, **kwargs: Any) -> Tensor:
    """Return the first tensor argument: the input of a linear layer."""
    return next(item for item in (*args, *kwargs.values()) if isinstance(item, Tensor))


class _Stop(BaseException):
    """Unwinds a forward pass, or the run of a block, whose rest is not needed."""


@dataclass
class Call:
    """A call of a block that waits to be answered."""

    block: str  # its name
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def state(self) -> Tensor:
        """The state that the block is given.  # (..., d)."""
        return first_tensor(*self.args, **self.kwargs)

    def run(self, forward: Forward) -> Any:
        """Return what a block would answer, without a graph."""
        with torch.no_grad(), timed(FORWARD):
            return forward(*self.args, **self.kwargs)

    def input_of(
        self, module: nn.Module, forward: Forward, arguments: Callable[..., Any] = first_tensor
    ) -> Any:
        """Run the block up to the first call of one of its modules.

        Returns what `arguments` makes of the module's arguments, or None if it was not called.
        """
        inputs: list[Any] = []

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs.append(arguments(*args, **kwargs))
            raise _Stop

        with suppress(_Stop), module.register_forward_pre_hook(hook, with_kwargs=True):
            self.run(forward)
        return inputs[0] if inputs else None


_CURRENT = threading.local()


@dataclass(eq=False)
class Stream:
    """One forward pass of one batch, paused whenever it calls a block."""

    forward: Forward
    batch: Batch
    _: KW_ONLY
    rewritten: bool = False  # it is the pass of what was rewritten already
    keep: bool = False  # it keeps what it puts out as `output`
    gradients: bool = False  # it has a graph of what it computes outside the blocks

    def __post_init__(self) -> None:
        self.output: Any = None
        self.call: Call | None = None
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._events: SimpleQueue[Call | BaseException | None] = SimpleQueue()
        """Calls of blocks, and the end of the pass: an error, or nothing."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def waiting(self) -> Call:
        assert self.call is not None
        return self.call

    def start(self) -> None:
        self._thread.start()
        self._wait()

    def answer(self, result: Any) -> None:
        """Give the waiting call its result and run up to the next block, or to the end."""
        self.call = None
        self._answers.put(result)
        self._wait()

    def close(self) -> None:
        if self.call is not None:
            self.answer(_Stop())
        if self._thread.is_alive():
            self._thread.join()

    @staticmethod
    def pause(block: str, /, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a block, in the thread of a stream: pause until there is an answer."""
        stream: Stream = _CURRENT.stream
        stream._events.put(Call(block, args, kwargs))
        answer = stream._answers.get()
        if isinstance(answer, _Stop):
            raise _Stop  # one that no frame holds, else the pass would hold itself
        return answer

    def _wait(self) -> None:
        with timed(FORWARD):  # of what lies between the blocks
            event = self._events.get()
        if isinstance(event, BaseException):
            raise event
        self.call = event

    def _run(self) -> None:
        _CURRENT.stream = self
        end: BaseException | None = None
        try:
            with suppress(_Stop), torch.set_grad_enabled(self.gradients):
                output = self.forward(**self.batch)
                self.output = output if self.keep else None
        except BaseException as error:  # handed to the main thread
            end = error
        self._events.put(end)


def _end_unless_kept(*_: Any) -> None:
    """End a pass, at the output head, whose output nobody keeps: logits take time and memory."""
    stream = getattr(_CURRENT, "stream", None)
    if stream is not None and not (stream.keep or stream.gradients):
        raise _Stop


class Branch(nn.Module):
    """Two modules in one place, outside the blocks: each stream runs its own."""

    def __init__(self, dense: nn.Module, rewritten: nn.Module) -> None:
        super().__init__()
        self.dense, self.rewritten = dense, rewritten

    @property
    def weight(self) -> Any:
        """The dense weight, for models that ask for its dtype."""
        return self.dense.weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the one that the current stream is for."""
        return (self.rewritten if _CURRENT.stream.rewritten else self.dense)(*args, **kwargs)


def _common_block(streams: Collection[Stream]) -> str:
    """Return the block at which all passes of all processes wait; nothing once they have ended."""
    names = {stream.call.block if stream.call else "" for stream in streams}
    names = set[str]().union(*processes.gathered(names))
    if len(names) > 1:
        text = f"forward passes differ in their blocks: {', '.join(sorted(names))}"
        raise DataError(text, WITHOUT_DATA)
    return next(iter(names), "")


def runs_twice(block: str) -> DataError:
    """Refuse a block that a pass comes to again: it cannot be rewritten for two inputs."""
    return DataError(f"block `{block}` runs more than once in a forward pass", WITHOUT_DATA)


def intercept_blocks(model: nn.Module, blocks: Iterable[str]) -> dict[str, Forward]:
    """Make every call of these blocks pause its stream; return their own forward functions."""
    forwards: dict[str, Forward] = {}
    for name in blocks:
        block = model.get_submodule(name)
        forwards[name] = block.forward
        block.forward = partial(Stream.pause, name)
    return forwards


FEED_FORWARD = 4  # times as wide as the state that a block is given, usually

LEAST_ROOM = 2**28  # bytes of readings that are kept, at least
ROOM_SHARE = 12  # else so much of what is free: what is not kept is computed again for every layer


def room_on(device: torch.device) -> float:
    """Return the bytes of readings that a device has room for beside all else."""
    return max(LEAST_ROOM, (free_memory(device) or 0) / ROOM_SHARE)


@dataclass
class Readings:
    """Inputs of modules of a block in passes that wait at it, and answers of the block.

    As much of it is kept as there is room for, so that a block runs once for all its modules.
    """

    block: nn.Module
    forward: Forward
    paths: Collection[str] = ()  # of modules whose first tensor argument is asked for
    room: float = LEAST_ROOM  # bytes
    _kept: dict[int, tuple[dict[str, Tensor], Any]] = field(default_factory=dict, init=False)
    """Inputs of modules by path, and the answer, by stream."""

    def of(self, stream: Stream, path: str, arguments: Callable[..., Any] = first_tensor) -> Any:
        """Input of a module; None if it is not called."""
        if path in self.paths:
            inputs, _ = self._kept.get(id(stream)) or self._keep(stream)
            if path in inputs:
                return inputs[path]
        module = self.block.get_submodule(path)
        return stream.waiting.input_of(module, self.forward, arguments)

    def answer(self, stream: Stream) -> Any:
        """Answer of the block."""
        kept = self._kept.get(id(stream))
        return kept[1] if kept else stream.waiting.run(self.forward)

    def drop(self, paths: Collection[str] | None = None) -> None:
        """Forget what these modules read, unless others read it too, or all that was kept."""
        if paths is None:
            self._kept.clear()
            return
        for inputs, _ in self._kept.values():
            for path in paths:
                inputs.pop(path, None)

    def _keep(self, stream: Stream) -> tuple[dict[str, Tensor], Any]:
        """Run the block and keep what its modules read; nothing where there is no room."""
        call = stream.waiting
        if (len(self.paths) + FEED_FORWARD) * call.state.nbytes > self.room:
            return {}, None
        inputs: dict[str, tuple[Tensor, int]] = {}

        def hook(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = first_tensor(*args, **kwargs)
            inputs.setdefault(path, (x, x._version))

        with ExitStack() as hooks:
            for path in self.paths:
                module = self.block.get_submodule(path)
                handle = module.register_forward_pre_hook(partial(hook, path), with_kwargs=True)
                hooks.enter_context(handle)
            answer = call.run(self.forward)
        same = {path: x for path, (x, version) in inputs.items() if x._version == version}
        self.room -= sum({x.data_ptr(): x.nbytes for x in (*same.values(), call.state)}.values())
        self._kept[id(stream)] = same, answer
        return same, answer


def _readings(block: Block, module: nn.Module, forward: Forward, room: float) -> Readings:
    """Readings of a block with this forward pass, kept where that is safe."""
    paths = [layer.name.removeprefix(f"{block.name}.") for layer in block.layers]
    # Which experts run, and on which tokens, is heard from every run.
    experts = any(layer.kind == "experts" or layer.routed for layer in block.layers)
    chosen = experts or any(listed_item(module, path) for path in paths)
    return Readings(module, forward, () if chosen else paths, room)


def queries_and_keys(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, **_: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return queries, keys and valid tokens of a call of an attention."""
    return q, k, Visible.of(mask, q, k, causal=causal).tokens


def handed_on(call: Call, answer: Any) -> Any:
    """Return what a block that is left out would return: the state that it was given.

    All else of its own answer is kept, such as position biases.
    """
    (output, *others), form = pytree.tree_flatten(answer)
    if call.state.shape != output.shape:
        raise DataError(
            f"block `{call.block}` turns {list(call.state.shape)} into {list(output.shape)}, so "
            "that it cannot be left out",
            "name the blocks to keep: `--keep-layers`",
        )
    return pytree.tree_unflatten([call.state, *others], form)


def token_rows(x: Tensor, batch: Batch, block: str, role: str) -> tuple[Tensor, Tensor | None]:
    """Flatten a layer input to rows (rows, d), with a mask of those that are not padding.

    The mask (rows,) is the one whose shape fits; where an encoder's and a decoder's both fit, the
    block's name and the layer's role tell which one it reads. None where all rows count.
    """
    rows = x.reshape(-1, x.shape[-1])
    reads_encoder = role in ("cross_k", "cross_v") or "decoder" not in block
    decodes = not reads_encoder and any(name.startswith("decoder_") for name in batch)
    mask = batch.get("decoder_attention_mask" if decodes else "attention_mask")
    if mask is None or mask.dim() != 2 or len(rows) != mask.numel() or "vision" in block:
        return rows, None
    if x.dim() > 2 and mask.shape != x.shape[:2]:
        return rows, None
    return rows, mask.reshape(-1).to(torch.bool)


def listed_item(block: nn.Module, path: str) -> str | None:
    """Find the item of a list of routed experts that a layer belongs to, as paths in a block."""
    modules = {name: module for name, module in block.named_modules() if name}
    steps = path.split(".")
    for depth in range(1, len(steps)):
        if isinstance(modules[".".join(steps[:depth])], (nn.ModuleList, nn.ModuleDict)):
            parent = ".".join(steps[: depth - 1])
            names = [name for name, _ in block.get_submodule(parent).named_children()]
            if any(chooses(f"{parent}.{name}".lstrip("."), modules) for name in names):
                return ".".join(steps[: depth + 1])
    return None


class TokenRows:
    """Masks of the rows that the layers of a block read: which are no padding.

    The items of a list of experts read some tokens each. A list that is handed the routing is run
    with the mask in the place of hidden states and with items that only listen, before it runs
    as it is: so every item's rows are known, whatever form the routing has. Where the list has no
    pass of its own, the rows of its items cannot be told apart and all count.
    """

    def __init__(self, module: nn.Module, block: Block) -> None:
        self.batch: Batch = {}  # what the model reads
        self._block = block.name
        self._masks: dict[str, Tensor] = {}  # by path of an item
        names = [layer.name for layer in block.layers]
        items = {name: listed_item(module, name.removeprefix(f"{block.name}.")) for name in names}
        self.items = {name: item for name, item in items.items() if item}  # of lists, by layer
        hooks = ExitStack()
        for path in {item.rpartition(".")[0] for item in self.items.values()}:
            hook, listed = partial(self._ask, path), module.get_submodule(path)
            hooks.enter_context(listed.register_forward_pre_hook(hook, with_kwargs=True))
        self.close = hooks.close

    def of(self, x: Tensor, layer: str, role: str) -> tuple[Tensor, Tensor | None]:
        """Flatten what a layer reads, as `token_rows` does.  # (..., d)."""
        rows, mask = token_rows(x, self.batch, self._block, role)
        listed = self._masks.get(self.items.get(layer, ""))
        return rows, listed if listed is not None and len(listed) == len(rows) else mask

    def _ask(
        self, path: str, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        modules = dict(experts._modules)
        for name in modules:
            self._masks.pop(f"{path}.{name}", None)
        if not args or len(args) + len(kwargs) < 2:  # it is not handed the routing
            return
        hidden, *routing = args
        _, mask = token_rows(hidden, self.batch, self._block, "")
        if mask is None:
            return
        marked = mask.to(hidden)[:, None].expand(-1, hidden.shape[-1]).reshape(hidden.shape)
        listeners = {name: _Listener() for name in modules}
        experts._modules.update(listeners)
        try:
            with torch.no_grad():
                experts.forward(marked, *routing, **kwargs)
        finally:
            experts._modules.update(modules)
        for name, listener in listeners.items():
            if listener.heard is not None:
                self._masks[f"{path}.{name}"] = listener.heard


class _Listener(nn.Module):
    """Stands in for an expert, and keeps which of its rows are marked."""

    heard: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        self.heard = rows[..., 0].flatten() > 0
        return rows
