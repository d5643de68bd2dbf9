"""Weights of the block that comes next, read while the device computes with those of this one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise

from torch import Tensor

from tcompress.progress import READING, timed

Weight = tuple[Sequence[str], Tensor]
"""Names of parameters that are one tensor, and its values as stored, on the CPU."""


class Prefetch:
    """Reads the weights of blocks, each in a thread while the block before it computes.

    No more than one block is read ahead, which is the memory of the host that it takes. A block
    that was not foreseen is read when it is asked for, as all are where no order is given.

    Args:
        read: Reads the weights of a block one by one, in any thread.
        order: Names of blocks in the order in which they are likely to be asked for.
        pinned: Whether what is read ahead is put where a GPU copies from by itself.
    """

    def __init__(
        self, read: Callable[[str], Iterator[Weight]], order: Sequence[str], *, pinned: bool
    ) -> None:
        self._read, self._pinned = read, pinned
        self._following = dict(pairwise(order))
        self._ahead: _Ahead | None = None

    def take(self, block: str) -> Iterable[Weight]:
        """Return the weights of a block; what failed when they were read ahead is raised here."""
        if self._ahead is None or self._ahead.block != block:
            self.close()
            return self._read(block)
        with timed(READING):  # the thread is not heard, but the wait for it
            self._ahead.join()
        weights = self._ahead.result.result()
        self._ahead = None
        return weights

    def start_after(self, block: str) -> None:
        """Begin to read the block that follows one whose weights are on the device."""
        if block in self._following:
            following = self._following[block]
            self._ahead = _Ahead(following, self._read(following), pinned=self._pinned)
            self._ahead.start()

    def close(self) -> None:
        """Drop what was read ahead, and wait until the thread has read its current tensor."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stopped = True
            # Any thread may collect a walk that nobody ended, this one too.
            if ahead is not threading.current_thread():
                ahead.join()


class _Ahead(threading.Thread):
    """Reads the weights of one block, unless it is stopped before; an interpreter waits for it."""

    def __init__(self, block: str, weights: Iterator[Weight], *, pinned: bool) -> None:
        super().__init__(name=f"reading {block}", daemon=False)
        self.block, self.stopped = block, False
        self.result: Future[list[Weight]] = Future()
        self._weights, self._pinned = weights, pinned

    def run(self) -> None:
        read: list[Weight] = []
        try:
            for names, value in self._weights:
                if self.stopped:
                    break
                read.append((names, _pin(value) if self._pinned else value))
            self.result.set_result(read)
        except BaseException as error:  # handed to the thread that asks for the block
            self.result.set_exception(error)


def _pin(value: Tensor) -> Tensor:
    """Copy a tensor to pinned memory; where the system has none left it stays as it is."""
    try:
        return value.pin_memory()
    except RuntimeError:
        return value
