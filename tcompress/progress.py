"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable


class Progress(Protocol):
    """Hears how far long work is."""

    def stage(self, name: str, total: int, unit: str) -> None:
        """A new stage begins."""

    def advance(self, amount: int = 1, note: str = "") -> None:
        """The current stage went on."""

    def shorten(self, total: int) -> None:
        """The current stage has less to do than was said."""

    def part(self, name: str, number: int, total: int) -> None:
        """The next of several jobs begins, which has stages of its own; numbers start at 1."""

    def tell(self, text: str) -> None:
        """Something is to be said beside it."""


@runtime_checkable
class Overview(Protocol):
    """Hears of the stages of a whole command, inside of which work says how far it is."""

    def begin(self, stage: str, minutes_left: float) -> None:
        """The next stage of the command begins."""

    def learn(self, name: str, value: float) -> None:
        """A number of the model so far is known, in place of an older one."""


@dataclass(frozen=True)
class Job:
    """Progress of a stage, as text such as `3 of 8 blocks`."""

    name: str
    total: int
    unit: str
    done: int = 0

    def advanced(self, amount: int) -> Job:
        return replace(self, done=self.done + amount)

    def shortened(self, total: int) -> Job:
        return replace(self, total=total)

    def __str__(self) -> str:
        if self.unit == "bytes":
            return f"{self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB"
        return f"{self.done:,} of {self.total:,} {self.unit}"


class Silent:
    """Says nothing."""

    def stage(self, name: str, total: int, unit: str) -> None: ...
    def advance(self, amount: int = 1, note: str = "") -> None: ...
    def shorten(self, total: int) -> None: ...
    def part(self, name: str, number: int, total: int) -> None: ...
    def tell(self, text: str) -> None: ...


@dataclass(frozen=True)
class Renamed:
    """Passes all on to another progress, with one name for every stage."""

    progress: Progress
    name: str

    def stage(self, name: str, total: int, unit: str) -> None:
        self.progress.stage(self.name, total, unit)

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.progress.advance(amount, note)

    def shorten(self, total: int) -> None:
        self.progress.shorten(total)

    def part(self, name: str, number: int, total: int) -> None:
        self.progress.part(name, number, total)

    def tell(self, text: str) -> None:
        self.progress.tell(text)


_listening: ContextVar[tuple[Progress, set[str]] | None] = ContextVar("listening", default=None)


@contextmanager
def listening(progress: Progress) -> Iterator[None]:
    """Let a command's progress hear what is told while the block runs, each text once.

    In a block whose progress is `Silent` no other one hears anything.
    """
    before = _listening.get()
    if before is not None and isinstance(before[0], Silent):
        yield
        return
    token = _listening.set((progress, set()))
    try:
        yield
    finally:
        _listening.reset(token)


def tell(text: str) -> None:
    """Tell a command's progress, if there is one, what data was taken for, or left out."""
    if (heard := _listening.get()) is not None and text not in heard[1]:
        heard[1].add(text)
        heard[0].tell(text)
