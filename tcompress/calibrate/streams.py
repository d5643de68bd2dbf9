"""Forward passes that can be paused at every transformer block.

A data-aware conversion walks through the model block by block with two streams of activations:
the dense one, and the one that the already rewritten blocks produce. Every model family wires its
blocks differently (masks by layer, position biases handed on, encoders feeding decoders), so the
model's own forward keeps control: it runs in a thread per batch and stream, and every call of a
block hands over to the converter, which decides when and with which weights the block runs. Only
one thread runs at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.errors import DataError


class _Stop(BaseException):
    """Unwinds a paused forward pass whose rest is not needed."""


@dataclass
class Call:
    """A call of a block that waits to be answered.

    Attributes:
        block: Name of the block.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """

    block: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Stream:
    """One forward pass of one batch, paused whenever it calls a block.

    Args:
        forward: Runs the model on a batch.
        batch: Inputs of the model.
        rewritten: Whether it is the stream of what was rewritten already.
        keep: Whether to keep what the pass puts out, as `output`.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        batch: Mapping[str, Tensor],
        *,
        rewritten: bool = False,
        keep: bool = False,
    ) -> None:
        self.batch = batch
        self.rewritten = rewritten
        self.output: Any = None
        self._keep = keep
        self.call: Call | None = None
        self._forward = forward
        self._answer: Any = None
        self._error: BaseException | None = None
        self._mine = threading.Semaphore(0)
        self._main = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Runs up to the first block."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    def answer(self, result: Any) -> None:
        """Gives the waiting call its result and runs up to the next block, or to the end."""
        self._answer, self.call = result, None
        self._mine.release()
        self._wait()

    def close(self) -> None:
        """Ends the pass where it is."""
        if self.call is not None:
            self.answer(_Stop())
        if self._thread is not None:
            self._thread.join()

    def visit(self, call: Call) -> Any:
        """Called by a block, in the stream's own thread: pauses until there is an answer."""
        self.call = call
        self._main.release()
        self._mine.acquire()
        if isinstance(self._answer, _Stop):
            raise self._answer
        return self._answer

    def _wait(self) -> None:
        self._main.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        _CURRENT.stream = self
        try:
            with torch.no_grad():
                output = self._forward(**self.batch)
            self.output = output if self._keep else None
        except _Stop:
            pass
        except BaseException as error:  # handed to the main thread
            self._error = error
        finally:
            self._main.release()


class Fork(nn.Module):
    """Two modules in one place, outside the blocks: each stream runs its own.

    Args:
        dense: The model's own.
        rewritten: What takes its place.
    """

    def __init__(self, dense: nn.Module, rewritten: nn.Module) -> None:
        super().__init__()
        self.dense, self.rewritten = dense, rewritten

    @property
    def weight(self) -> Any:
        """The dense weight, for hosts that ask for its dtype."""
        return self.dense.weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the one that the current stream is for."""
        stream: Stream = _CURRENT.stream
        return (self.rewritten if stream.rewritten else self.dense)(*args, **kwargs)


def common_block(streams: Sequence[Stream]) -> str:
    """Returns the block at which all these passes wait.

    Raises:
        DataError: They do not run the same blocks in the same order.
    """
    names = {stream.call.block if stream.call else "" for stream in streams}
    if len(names) > 1:
        raise DataError(
            f"forward passes differ in their blocks: {', '.join(sorted(names))}",
            "convert this model without data: `--calib none`",
        )
    return names.pop()


_CURRENT = threading.local()


def intercept_blocks(model: nn.Module, blocks: list[str]) -> dict[str, Callable[..., Any]]:
    """Makes every call of these blocks pause its stream.

    Args:
        model: The model; its blocks keep their modules, only their `forward` is replaced.
        blocks: Names of the blocks.

    Returns:
        The blocks' own forward functions by name.
    """
    own: dict[str, Callable[..., Any]] = {}
    for name in blocks:
        block = model.get_submodule(name)
        own[name] = block.forward
        block.forward = _pausing(name)
    return own


def _pausing(name: str) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        stream: Stream = _CURRENT.stream
        return stream.visit(Call(name, args, kwargs))

    return forward
