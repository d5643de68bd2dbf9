"""Where the time of long work went: seconds of its stages, and of the parts of a stage.

Stages are announced in one place, the progress that hears of them, so a progress in front of it
keeps their times. What takes long inside of stages, wherever it is done, says so by `timed`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from tcompress.progress import Progress

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


class StageTimes:
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
        self._progress, self._clock = progress, clock
        self._spent: dict[str, dict[str, float]] = {}
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
                self._add(stage, part, seconds)
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
        self._add(self._stage, self._part, now - self._since)
        self._stage, self._part, self._since = stage, part, now

    def stage(self, name: str, total: int, unit: str) -> None:
        kind = re.sub(r"\d[\d,.]* ", "", name).partition(" of ")[0]
        self.turn_to("trying models" if unit == "trial" else kind)
        self._save()
        self._progress.stage(name, total, unit)

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._progress.advance(amount, note)
        if self._clock() - self._kept > _KEPT_AFTER:
            self._save()

    def shorten(self, total: int) -> None:
        self._progress.shorten(total)

    def part(self, name: str, number: int, total: int) -> None:
        self._progress.part(name, number, total)

    def tell(self, text: str) -> None:
        self._progress.tell(text)

    def _add(self, stage: str, part: str, seconds: float) -> None:
        parts = self._spent.setdefault(stage, {})
        parts[part] = parts.get(part, 0.0) + seconds

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
