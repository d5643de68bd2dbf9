"""Forward passes that can be paused at every block, and what layers read meanwhile."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tcompress import processes
from tcompress.attention.visibility import Visible
from tcompress.errors import DataError, SourceError
from tcompress.memory import free_memory
from tcompress.models import SourceModel, read_finite, tell_padding
from tcompress.progress import FORWARD, timed
from tcompress.roles import Block
from tcompress.roles.projections import chooses


class PartialModel:
    """The source model with its blocks on the meta device until they are needed.

    Its forward passes pause at every block. Everything outside the blocks is loaded at once, the
    output head only where asked for: a calibration stops after the last block. What is not stored
    at all, such as a pooler that nobody trained, is then zero. Weights are float32, and
    so are products, but in blocks where the source says otherwise (`autocast`): the head stays
    exact, since small changes of an output are measured.
    """

    def __init__(
        self, source: SourceModel, blocks: list[str], device: torch.device, *, head: bool = False
    ) -> None:
        self.source = source
        self.device = device
        config = copy.deepcopy(source.config)
        # Buffers that no checkpoint holds (rotary frequencies, position ids) are computed for
        # real; a key-value cache would grow with every run of a block.
        with init_empty_weights(include_buffers=False):
            self.model: nn.Module = source.model_class._from_config(config).eval()
        tell_padding(self.model)
        for module in self.model.modules():
            if getattr(module, "config", None) is not None:
                module.config.use_cache = False  # type: ignore[union-attr]
        for buffer_name, buffer in list(self.model.named_buffers()):
            _put(self.model, buffer_name, buffer.to(device))
        output = self.model.get_output_embeddings()  # type: ignore[operator]
        in_blocks = tuple(f"{name}." for name in blocks)
        heads = (name for name, item in self.model.named_modules() if item is output and name)
        skipped = (*in_blocks, *(f"{name}." for name in heads))
        self._stored = list(self.model.state_dict(keep_vars=True))
        self._load(name for name in self._stored if not name.startswith(skipped))
        if head:
            self._load(self._empty(in_blocks))
            for name in self._empty(in_blocks):
                shape = self.model.get_parameter(name).shape
                _put(self.model, name, torch.zeros(shape, device=device))
        self.forwards = {
            name: cast_to(source.autocast, device, forward)
            for name, forward in intercept_blocks(self.model, blocks).items()
        }

    def stream(self, batch: Mapping[str, Tensor], **options: bool) -> Stream:
        """Make a forward pass; options as for `Stream`."""
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if ids is not None and mask is not None and mask.shape == ids.shape:
            for pad in ids[mask == 0][:1].tolist():  # what the data is filled up with
                tell_padding(self.model, pad)
        moved = {key: value.to(self.device) for key, value in batch.items()}
        return Stream(self.model, moved, **options)

    @contextmanager
    def paused(self, streams: Sequence[Stream]) -> Iterator[None]:
        """Start forward passes, which pause at their first block, and end them afterwards."""
        try:
            for stream in streams:
                stream.start()
                _give_back()
            yield
        finally:
            for stream in streams:
                stream.close()

    @contextmanager
    def loaded(self, block: str) -> Iterator[nn.Module]:
        """Load one block, and free its weights afterwards."""
        self._load(name for name in self._stored if name.startswith(f"{block}."))
        module = self.model.get_submodule(block)
        yield module
        for name, parameter in list(module.named_parameters()):
            _put(module, name, parameter.to("meta"))
        _give_back()

    def answer_of(self, stream: Stream, forward: Callable[..., Any] | None = None) -> Any:
        """Run the block at which a pass waits, or another in its place; return what it computes."""
        call = stream.waiting
        with torch.no_grad(), timed(FORWARD):
            return (forward or self.forwards[call.block])(*call.args, **call.kwargs)

    def _empty(self, in_blocks: tuple[str, ...]) -> list[str]:
        """Parameters outside the blocks that are not loaded."""
        named = self.model.named_parameters(remove_duplicate=False)
        return [name for name, item in named if item.is_meta and not name.startswith(in_blocks)]

    def _load(self, names: Iterable[str]) -> None:
        """Read parameters and persistent buffers; what the checkpoint lacks stays empty."""
        shared: dict[tuple[str, ...], torch.Tensor] = {}
        for name in names:
            try:
                sources = self.source.keymap.sources(name)
            except SourceError:
                continue  # a head that this checkpoint does not have
            key = (*sources.keys, *sources.patterns, name if sources.converter else "")
            if key not in shared:
                value = read_finite(self.source.store, self.source.keymap, name, self.device)
                if value.is_floating_point():
                    value = value.float()
                shared[key] = value
            _put(self.model, name, shared[key])


def cast_to(
    dtype: torch.dtype | None, device: torch.device, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """Make a block compute its products in a dtype; None leaves it as it is.

    What it puts out is float32: what follows may be no part of a block.
    """
    if dtype is None:
        return forward
    cast = torch.autocast(device.type, dtype)(forward)

    def widened(value: Tensor) -> Tensor:
        return value.float() if value.dtype == dtype else value

    def run(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(Tensor, widened, cast(*args, **kwargs))

    return run


def _give_back() -> None:
    """Return freed memory to the system: what one thread has freed no other one can take."""
    with suppress(OSError, AttributeError, TypeError):  # the allocator of glibc alone can
        ctypes.CDLL(None).malloc_trim(0)


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


class _Stop(BaseException):
    """Unwinds a paused forward pass whose rest is not needed."""


@dataclass
class Call:
    """A call of a block that waits to be answered."""

    block: str  # its name
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Stream:
    """One forward pass of one batch, paused whenever it calls a block.

    It may be the pass of what was rewritten already, keep what it puts out as `output`, and have a
    graph of what it computes outside the blocks (`gradients`).
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        batch: Mapping[str, Tensor],
        *,
        rewritten: bool = False,
        keep: bool = False,
        gradients: bool = False,
    ) -> None:
        self.batch, self.rewritten = batch, rewritten
        self.output: Any = None
        self.call: Call | None = None
        self._forward, self._keep, self._gradients = forward, keep, gradients
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._events: SimpleQueue[Call | BaseException | None] = SimpleQueue()
        """Calls of blocks, and the end of the pass: an error, or nothing."""
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> Call:
        assert self.call is not None
        return self.call

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
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
        if self._thread is not None:
            self._thread.join()

    def visit(self, call: Call) -> Any:
        """Called by a block, in the stream's own thread: pauses until there is an answer."""
        self._events.put(call)
        answer = self._answers.get()
        if isinstance(answer, _Stop):
            raise answer
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
            with torch.set_grad_enabled(self._gradients):
                output = self._forward(**self.batch)
            self.output = output if self._keep else None
        except _Stop:
            pass
        except BaseException as error:  # handed to the main thread
            end = error
        self._events.put(end)


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
        stream: Stream = _CURRENT.stream
        return (self.rewritten if stream.rewritten else self.dense)(*args, **kwargs)


def common_block(streams: Sequence[Stream]) -> str:
    """Return the block at which all passes of all processes wait; nothing once they have ended."""
    names = {stream.call.block if stream.call else "" for stream in streams}
    names = set[str]().union(*processes.gathered(names))
    if len(names) > 1:
        hint = "convert this model without data: `--calib none`"
        raise DataError(f"forward passes differ in their blocks: {', '.join(sorted(names))}", hint)
    return next(iter(names), "")


def runs_twice(block: str) -> DataError:
    """Refuse a block that a pass comes to again: it cannot be rewritten for two inputs."""
    return DataError(
        f"block `{block}` runs more than once in a forward pass",
        "convert this model without data: `--calib none`",
    )


_CURRENT = threading.local()


def intercept_blocks(model: nn.Module, blocks: list[str]) -> dict[str, Callable[..., Any]]:
    """Make every call of these blocks pause its stream; return their own forward functions."""

    def pausing(name: str, *args: Any, **kwargs: Any) -> Any:
        stream: Stream = _CURRENT.stream
        return stream.visit(Call(name, args, kwargs))

    forwards: dict[str, Callable[..., Any]] = {}
    for name in blocks:
        block = model.get_submodule(name)
        forwards[name] = block.forward
        block.forward = partial(pausing, name)
    return forwards


class _Captured(BaseException):
    """Raised to end the run of a block as soon as an input is read."""


def run_to_input(run: Callable[[], Any], module: nn.Module, arguments: Callable[..., Any]) -> Any:
    """Run a block up to the first call of one of its modules.

    Returns what `arguments` makes of the module's arguments, or None if it was not called.
    """
    inputs: list[Any] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(arguments(*args, **kwargs))
        raise _Captured

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        run()
    except _Captured:
        pass
    finally:
        handle.remove()
    return inputs[0] if inputs else None


def first_tensor(*args: Any, **kwargs: Any) -> Tensor:
    """Return the first tensor argument: the input of a linear layer."""
    return next(item for item in (*args, *kwargs.values()) if isinstance(item, Tensor))


FEED_FORWARD = 4  # times as wide as the state that a block is given, usually


LEAST_ROOM = 2**28  # bytes of readings that are kept, at least
ROOM_SHARE = 12  # else so much of what is free: what is not kept is computed again for every layer


def room_on(device: torch.device) -> float:
    """Return the bytes of readings that a device has room for beside all else."""
    return max(LEAST_ROOM, (free_memory(device) or 0) / ROOM_SHARE)


class Readings:
    """Inputs of modules of a block in passes that wait at it, and answers of the block.

    As much of it is kept as there is room for, so that a block runs once for all its modules.
    """

    def __init__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        paths: Collection[str] = (),
        room: float = LEAST_ROOM,
    ) -> None:
        self._block = block
        self._forward = forward
        self._paths = paths  # of modules whose first tensor argument is asked for
        self._room = room  # bytes
        self._cache: dict[int, tuple[dict[str, Tensor], Any]] = {}  # by stream

    def of(self, stream: Stream, path: str, arguments: Callable[..., Any] = first_tensor) -> Any:
        """Input of a module; None if it is not called."""
        if arguments is first_tensor and path in self._paths:
            cached = self._cached(stream)
            if cached is not None and path in cached[0]:
                return cached[0][path]
        call, module = stream.waiting, self._block.get_submodule(path)
        with torch.no_grad(), timed(FORWARD):
            return run_to_input(lambda: self._forward(*call.args, **call.kwargs), module, arguments)

    def answer(self, stream: Stream) -> Any:
        """Answer of the block."""
        cached = self._cache.get(id(stream))
        return self._run(stream) if cached is None else cached[1]

    def _run(self, stream: Stream) -> Any:
        call = stream.waiting
        with torch.no_grad(), timed(FORWARD):
            return self._forward(*call.args, **call.kwargs)

    def _cached(self, stream: Stream) -> tuple[dict[str, Tensor], Any] | None:
        if id(stream) in self._cache:
            return self._cache[id(stream)]
        call = stream.waiting
        state = first_tensor(*call.args, **call.kwargs)
        if (len(self._paths) + FEED_FORWARD) * state.nbytes > self._room:
            return None
        inputs: dict[str, tuple[Tensor, int]] = {}

        def hook(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = first_tensor(*args, **kwargs)
            inputs.setdefault(path, (x, x._version))

        handles = [
            self._block.get_submodule(path).register_forward_pre_hook(
                partial(hook, path), with_kwargs=True
            )
            for path in self._paths
        ]
        try:
            answer = self._run(stream)
        finally:
            for handle in handles:
                handle.remove()
        same = {path: x for path, (x, version) in inputs.items() if x._version == version}
        self._cache[id(stream)] = same, answer
        held = {x.data_ptr(): x.nbytes for x in (*same.values(), state)}
        self._room -= sum(held.values())
        return self._cache[id(stream)]


def queries_and_keys(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, **_: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return queries, keys and valid tokens of a call of an attention."""
    return q, k, Visible.of(mask, q, k, causal=causal).tokens


def handed_on(call: Call, answer: Any) -> Any:
    """Return what a block that is left out would return: the state that it was given.

    All else of its own answer is kept, such as position biases.
    """
    state = first_tensor(*call.args, **call.kwargs)
    named = dict(answer) if isinstance(answer, Mapping) else {}
    several = isinstance(answer, tuple | list)
    output = next(iter(named.values())) if named else answer[0] if several else answer
    if state.shape != output.shape:
        raise DataError(
            f"block `{call.block}` turns {list(state.shape)} into {list(output.shape)}, so that it "
            "cannot be left out",
            "name the blocks to keep: `--keep-layers`",
        )
    if named:
        return named | {next(iter(named)): state}
    return (state, *answer[1:]) if several else state


def token_rows(
    x: Tensor, batch: Mapping[str, Tensor], block: str, role: str
) -> tuple[Tensor, Tensor | None]:
    """Flatten a layer input to rows (rows, d), with a mask of those that are not padding.

    The mask (rows,) is the one whose shape fits; where an encoder's and a decoder's both fit, the
    block's name and the layer's role tell which one it reads. None where all rows count.
    """
    rows = x.reshape(-1, x.shape[-1])
    if "vision" in block:
        return rows, None
    reads_encoder = role in ("cross_k", "cross_v") or "decoder" not in block
    decodes = not reads_encoder and any(name.startswith("decoder_") for name in batch)
    mask = batch.get("decoder_attention_mask" if decodes else "attention_mask")
    if mask is None or mask.dim() != 2 or len(rows) != mask.numel():
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
        self.batch: Mapping[str, Tensor] = {}  # what the model reads
        self._block = block.name
        self._masks: dict[str, Tensor] = {}  # by path of an item
        self._items: dict[str, str] = {}  # by name of a layer
        for layer in block.layers:
            item = listed_item(module, layer.name.removeprefix(f"{block.name}."))
            if item is not None:
                self._items[layer.name] = item
        self._handles = []
        for path in {item.rpartition(".")[0] for item in self._items.values()}:
            hook, listed = partial(self._ask, path), module.get_submodule(path)
            self._handles.append(listed.register_forward_pre_hook(hook, with_kwargs=True))

    def is_listed(self, layer: str) -> bool:
        """True where a layer belongs to an item of a list of experts."""
        return layer in self._items

    def of(self, x: Tensor, layer: str, role: str) -> tuple[Tensor, Tensor | None]:
        """Flatten what a layer reads, as `token_rows` does.  # (..., d)."""
        rows, mask = token_rows(x, self.batch, self._block, role)
        listed = self._masks.get(self._items.get(layer, ""))
        return rows, listed if listed is not None and len(listed) == len(rows) else mask

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

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
