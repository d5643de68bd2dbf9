"""How long work says how far it is, and where its time went."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
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


@dataclass
class Job:
    """Progress of a stage, as text such as `3 of 8 blocks`."""

    name: str
    total: int
    unit: str
    done: int = 0

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


class Forwarding:
    """Passes all on to another progress."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def stage(self, name: str, total: int, unit: str) -> None:
        self.progress.stage(name, total, unit)

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.progress.advance(amount, note)

    def shorten(self, total: int) -> None:
        self.progress.shorten(total)

    def part(self, name: str, number: int, total: int) -> None:
        self.progress.part(name, number, total)

    def tell(self, text: str) -> None:
        self.progress.tell(text)


class Renamed(Forwarding):
    """Passes all on to another progress, with one name for every stage."""

    def __init__(self, progress: Progress, name: str) -> None:
        super().__init__(progress)
        self.name = name

    def stage(self, name: str, total: int, unit: str) -> None:
        super().stage(self.name, total, unit)


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


# Where the time of long work went: seconds of its stages, and of the parts of a stage.
#
# Stages are announced in one place, the progress that hears of them, so a progress in front of it
# keeps their times. What takes long inside of stages, wherever it is done, says so by `timed`.

Seconds = Mapping[str, Mapping[str, float]]
"""Seconds by stage, and in it by part; no second is counted twice."""

COMPUTING = "computing"
READING = "reading weights"
FORWARD = "forward passes"
BACKWARD = "backward passes"
MOMENTS = "sums of moments"
"""Parts of a stage; the first is all that no other one is told of."""

_KEPT_AFTER = 10.0
"""Seconds of a stage after which they are kept."""

_current: ContextVar[StageTimes | None] = ContextVar("stage_times", default=None)


class StageTimes(Forwarding):
    """A progress that passes all on to another one, and keeps the seconds of stages.

    Stages whose names differ in a number or a file alone are one, and so are all trials.

    Args:
        progress: Hears of everything.
        first: Name of what is done before a stage is announced.
        clock: Seconds since any time.
    """

    def __init__(
        self, progress: Progress, first: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(progress)
        self._clock = clock
        self._spent: dict[str, dict[str, float]] = defaultdict(partial(defaultdict, float))
        self._stage, self._part = first, COMPUTING
        self._since = self._kept = clock()
        self._keep: Callable[[Seconds], None] = lambda _: None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hear of parts that are `timed` while the block runs."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def resume(self, before: Seconds, keep: Callable[[Seconds], None]) -> None:
        """Add what an interrupted run took, and have all kept for the case of another one."""
        for stage, parts in before.items():
            for part, seconds in parts.items():
                self._spent[stage][part] += seconds
        self._keep = keep

    @property
    def seconds(self) -> dict[str, dict[str, float]]:
        """Seconds so far, to hundredths; what took less than one is left out."""
        self.turn_to(self._stage, self._part)
        rounded = {
            stage: {part: round(value, 2) for part, value in parts.items() if value >= 0.005}
            for stage, parts in self._spent.items()
        }
        return {stage: parts for stage, parts in rounded.items() if parts}

    @property
    def total(self) -> float:
        """Seconds of all stages, of earlier runs too."""
        self.turn_to(self._stage, self._part)
        return round(sum(sum(parts.values()) for parts in self._spent.values()), 2)

    @property
    def stage_and_part(self) -> tuple[str, str]:
        """The running stage, and the part of it."""
        return self._stage, self._part

    def turn_to(self, stage: str, part: str = COMPUTING) -> None:
        """Count time for a stage, or a part of it, from now on."""
        now = self._clock()
        self._spent[self._stage][self._part] += now - self._since
        self._stage, self._part, self._since = stage, part, now

    def stage(self, name: str, total: int, unit: str) -> None:
        kind = re.sub(r"\d[\d,.]* ", "", name).partition(" of ")[0]
        self.turn_to("trying models" if unit == "trial" else kind)
        self._save()
        super().stage(name, total, unit)

    def advance(self, amount: int = 1, note: str = "") -> None:
        super().advance(amount, note)
        if self._clock() - self._kept > _KEPT_AFTER:
            self._save()

    def _save(self) -> None:
        self._keep(self.seconds)
        self._kept = self._clock()


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Count the time of the block for a part of the running stage, if anybody listens.

    Of a part inside of another one the inner one counts. Other threads are not heard.
    """
    times = _current.get()
    if times is None:
        yield
        return
    stage, outer = times.stage_and_part
    times.turn_to(stage, part)
    try:
        yield
    finally:
        times.turn_to(times.stage_and_part[0], outer)


def by_stage(seconds: Seconds) -> dict[str, float]:
    """Add up the parts of every stage, the longest stage first."""
    sums = {stage: sum(parts.values()) for stage, parts in seconds.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
