"""Processes that do one conversion together, as `torchrun` and `accelerate launch` start them.

All of them run the same program on the same input. What takes long is shared out among them and
gathered in an order that does not depend on how many there are, so that any number of processes
comes to the same bytes: batches are summed up in `RUNS` runs, whose sums are added in their order
whoever made them. Where there is one process alone, nothing here does anything but call.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from tcompress.errors import PlanError, ProcessError, TCompressError

if TYPE_CHECKING:  # places are looked at before anything is imported that takes seconds
    import torch

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")

RUNS = 8
"""Runs of batches that are summed up by themselves; so many processes at most share them."""

PATIENCE = timedelta(days=7)
"""That one process works while the others wait."""

_STORE_PATIENCE = timedelta(seconds=10)  # with the launcher's store

_group: ContextVar[Any] = ContextVar("group", default=None)
"""What this process shares work in; None where it works alone, or does its share of something."""


def is_launched() -> bool:
    """True where this is one of several processes."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1


def is_first() -> bool:
    """True where this process talks to the user."""
    return os.environ.get("RANK", "0") == "0"


def speaks() -> bool:
    """True for the first process that asks: of what all meet, one alone is to report.

    Where the launcher's store cannot be reached every process reports.
    """
    if not is_launched():
        return True
    with suppress(Exception):
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limits: dict[str, Any] = {"timeout": _STORE_PATIENCE, "wait_for_workers": False}
        store = TCPStore(host, port, is_master=False, **limits)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return bool(store.add(f"tcompress/reported/{attempt}", 1) == 1)
    return True


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Work together with the processes that a launcher has started, while the block runs.

    Args:
        device: What this process computes on. On GPUs every process takes one of its own.

    Raises:
        ProcessError: Another process has ended, or does not answer.
    """
    if not is_launched() or _group.get() is not None:
        yield
        return
    import torch.distributed as dist
    from accelerate import PartialState

    with _lost_processes():
        # Or as who called has set it up.
        PartialState(cpu=device.type == "cpu", timeout=PATIENCE)
        # Tensors travel by way of the CPU, whatever the processes compute on.
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
    lost = True  # where a process is stopped amid something, to part would wait for the others
    try:
        with _within(group):
            yield
        lost = False
    except TCompressError as error:
        lost = isinstance(error, ProcessError)
        raise
    finally:
        # Threads of gloo that still hold tensors abort an interpreter that ends (PyTorch #179291).
        if not lost and dist.is_initialized():
            with suppress(ValueError):  # healing has parted already
                dist.destroy_process_group(group)


def count() -> int:
    """Number of processes that work together."""
    group = _group.get()
    return 1 if group is None else int(group.size())


def rank() -> int:
    """Number of this process; the first is 0."""
    group = _group.get()
    return 0 if group is None else int(group.rank())


def leads() -> bool:
    """True in the first process, which alone writes."""
    return rank() == 0


@contextmanager
def _within(group: Any) -> Iterator[None]:
    """Let the block work together with a group of processes; with none, alone."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def alone() -> AbstractContextManager[None]:
    """Let a block run in this process by itself."""
    return _within(None)


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """What a piece of work came to: a value, or an error."""

    value: T | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, work: Callable[[], T]) -> _Outcome[T]:
        try:
            with alone():
                return cls(work())
        except Exception as error:
            return cls(error=error)

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def first(work: Callable[[], T]) -> T:
    """Have the first process do something alone, and all know its result, or its error.

    Everything before it has ended in all processes when it begins.
    """
    if count() == 1:
        return work()
    import torch.distributed as dist

    with _lost_processes():
        dist.barrier(_group.get())
    outcome = agreed(_Outcome.of(work) if leads() else None)
    assert outcome is not None
    return outcome.result()


def agreed(value: T) -> T:
    """Return what the first process has come to."""
    if count() == 1:
        return value
    import torch.distributed as dist

    box = [value]
    with _lost_processes():
        dist.broadcast_object_list(box, 0, _group.get())
    return box[0]


def by_first(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method one that the first process alone runs, as `first` says."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return first(lambda: method(*args, **kwargs))

    return run


class Crew(Generic[S]):
    """Processes of which the first says what all do next; between that it works alone.

    The others `follow` until they are told that it is over; the first works in a block that is
    `led`. Where there is one process alone, it does what it says.

    Args:
        work: Does one job, in all processes. It shares out what it can. That there is no plan is
            found by all, and the first may go on from there; after any other error, which one may
            meet alone, all end.
    """

    def __init__(self, work: Callable[[S], None]) -> None:
        self._work, self._group = work, _group.get()
        self._others_wait = count() > 1

    def do(self, job: S, *, last: bool = False) -> None:
        """Have all processes do a job, the first among them; after the last one nobody waits."""
        others = self._others_wait
        self._others_wait = False
        try:
            with _within(self._group):
                if others:
                    agreed((job, last))
                self._work(job)
        except PlanError:  # others have met it as well, and wait for what follows
            self._others_wait = others and not last
            raise
        self._others_wait = others and not last

    @contextmanager
    def led(self) -> Iterator[None]:
        """Let the first process work alone, and the others end when it does, with its error."""
        end: Exception | None = None
        try:
            with _within(None):
                yield
        except Exception as error:
            end = error
            raise
        finally:
            if self._others_wait:
                with _within(self._group):
                    agreed(end)

    def follow(self) -> None:
        """Do what the first process says, until all is done.

        Raises:
            Exception: What the first process ended with, or the last job.
        """
        while (message := agreed(None)) is not None:
            if isinstance(message, Exception):
                raise message
            job, last = message
            try:
                self._work(job)
            except PlanError:
                if last:
                    raise
            if last:
                return


def shared_out(work: Callable[[S], T], items: Sequence[S], device: torch.device | str) -> list[T]:
    """Do something with every item, each in one process; all get all results, in order.

    Args:
        work: Makes a result of an item. It shares out nothing itself.
        items: The same in all processes.
        device: Where the tensors of the results are wanted.

    Raises:
        Exception: What the first item that failed has raised, in all processes.
    """
    if count() == 1:
        return [work(item) for item in items]
    made: dict[int, _Outcome[T]] = {}
    for number in range(rank(), len(items), count()):
        made[number] = _Outcome.of(lambda number=number: work(items[number]))  # type: ignore[misc]
        if made[number].error is not None:
            break
    merged: dict[int, _Outcome[T]] = {}
    for part in gathered(made):
        merged |= part
    return [moved(merged[number].result(), device) for number in sorted(merged)]


def gathered(value: T) -> list[T]:
    """Exchange a value with all processes; their tensors are on the CPU then. In order of ranks."""
    if count() == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * count()
    with _lost_processes():
        dist.all_gather_object(values, moved(value, "cpu"), _group.get())
    return values


def batches_of(run: int, batches: int) -> list[int]:
    """Indices of the batches, of so many, in a run; none past the last run."""
    return [index for index in range(batches) if index * RUNS // batches == run]


def own_batches(batches: int) -> list[int]:
    """Indices of the batches that this process looks at."""
    return [i for run in range(rank(), RUNS, count()) for i in batches_of(run, batches)]


class Total(Generic[T]):
    """A sum over all batches, taken run by run, and the same in all processes.

        total = Total(merge, device)
        for run in total.runs():
            total.add(sum over the batches of the run)
        total.whole()

    One process keeps the sum, and every other one no more than the run that it is at.

    Args:
        merge: Adds the second of two sums to the first.
        device: Where sums are.
    """

    def __init__(self, merge: Callable[[T, T], T], device: torch.device | str) -> None:
        self._merge, self._device = merge, device
        self._start = 0  # first of the runs that processes are at
        self._sum: T | None = None

    def runs(self) -> Iterator[int]:
        """Runs of this process, in their order; those past the last one have no batches."""
        while self._start < RUNS:
            yield self._start + rank()
            self._start += count()

    def add(self, part: T) -> None:
        """Add the sum of the run that this process is at, after those of the runs before."""
        for sender in range(min(count(), RUNS - self._start)):
            sent: T | None = part if sender == rank() else None
            if sender and (leads() or sender == rank()):
                sent = _sent(sent, sender, self._device)
            if leads() and sent is not None:
                self._sum = sent if self._sum is None else self._merge(self._sum, sent)

    def whole(self) -> T:
        """Give the sum to all processes, which all ask for it once."""
        if count() > 1:
            shared = agreed(moved(self._sum, "cpu") if leads() else None)
            self._sum = self._sum if leads() else moved(shared, self._device)
        assert self._sum is not None
        return self._sum


def _sent(value: T | None, sender: int, device: torch.device | str) -> T | None:
    """Send a value to the first process, which alone gets it."""
    import torch.distributed as dist

    group = _group.get()
    with _lost_processes():
        if rank() == sender:
            target = dist.get_global_rank(group, 0)
            dist.send_object_list([moved(value, "cpu")], target, group)
            return None
        box: list[Any] = [None]
        dist.recv_object_list(box, dist.get_global_rank(group, sender), group)
    return moved(box[0], device)


def moved(value: T, device: torch.device | str, copies: dict[int, Any] | None = None) -> T:
    """Copy a value whose tensors, however deep, are on a device, and that names it as its own.

    A tensor that is in it twice, as both sides of a Gram matrix are, stays one.
    """
    import torch

    copies = {} if copies is None else copies  # by id of what they are copies of
    result: Any = value
    if isinstance(value, torch.Tensor):
        result = copies.get(id(value))
        if result is None:
            result = copies[id(value)] = value.to(device)
    elif isinstance(value, torch.device):  # where a sum that has waiting rows alone is to begin
        result = torch.device(device)
    elif isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        result = copy.copy(value)
        result.update({key: moved(item, device, copies) for key, item in value.items()})
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        result = type(value)(*(moved(item, device, copies) for item in value))
    elif isinstance(value, list | tuple):
        result = type(value)(moved(item, device, copies) for item in value)
    elif hasattr(value, "__dict__") and type(value).__module__.startswith(__package__ or ""):
        result = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(result, name, moved(item, device, copies))
    return result  # type: ignore[no-any-return]


@contextmanager
def _lost_processes() -> Iterator[None]:
    """Say that another process is gone, in place of what the network has to say of it."""
    try:
        yield
    except (RuntimeError, EOFError) as error:  # of gloo, NCCL and the store
        raise ProcessError(
            "another of the processes that convert together has ended",
            "its own message says why; the same command goes on where it stopped",
        ) from error
