"""Which conversion to try next, so that the file of a runtime is as fast and small as asked.

A conversion is asked for a speed in PyTorch and for bytes of weights. What its file for another
runtime takes is measured; the next attempt goes by a line through the last two measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SURE, AIM, MOST = 1.03, 1.07, 1.15
"""Speed that is surely enough when it is measured again, the one that is aimed at, and the highest
that is not too much, in parts of what is asked for."""
HEADROOM = 0.99
"""Share of a size that is aimed at."""
STEEPEST = 2.0
"""Largest ratio of changes of the asked speed and of the file's, in logarithms."""
LEAST = 1.05
"""Lowest speed that a conversion is asked for."""


@dataclass(frozen=True)
class Goal:
    """Speed and size that the file has to reach; None for what was not asked."""

    speedup: float | None = None  # over the dense model in PyTorch
    bytes: int | None = None


@dataclass(frozen=True)
class Measured:
    """Measured size and time of a file."""

    bytes: int
    speedup: float  # over the dense model in PyTorch

    def missed(self, goal: Goal, near: float = 1.0) -> tuple[str, ...]:
        """Say in words which goals it does not reach; of a speed, a share may be enough."""
        words = []
        if goal.bytes is not None and self.bytes > goal.bytes:
            words.append(f"{self.bytes / 1e6:.4g} MB, not {goal.bytes / 1e6:.4g} MB")
        if goal.speedup is not None and self.speedup < near * goal.speedup:
            words.append(f"{self.speedup:.2f} x as fast, not {goal.speedup:g} x")
        return tuple(words)

    def fits(self, goal: Goal) -> bool:
        """Tell whether all goals are surely reached, and none by far at the cost of quality."""
        if self.missed(goal):
            return False
        if goal.speedup is None:
            return True
        # The size may ask for more than the speed.
        most = MOST if goal.bytes is None else math.inf
        return SURE * goal.speedup <= self.speedup <= most * goal.speedup


@dataclass(frozen=True)
class Ask:
    """Goals of the next conversion; None for what it need not look at."""

    speedup: float | None = None  # in PyTorch
    bytes: int | None = None  # of weights

    @classmethod
    def first(cls, goal: Goal, dense: Measured, weights: int) -> Ask | None:
        """Give the first attempt; None where the dense model's file reaches the goal.

        Of the dense file's bytes so many are its `weights`; the rest, names and shapes, stays.
        """
        if not dense.missed(goal):
            return None
        speedup = room = None
        if goal.speedup is not None and dense.speedup < goal.speedup:
            speedup = max(LEAST, AIM * goal.speedup / dense.speedup)
        if goal.bytes is not None and dense.bytes > goal.bytes:
            room = max(1, int(HEADROOM * goal.bytes - max(0, dense.bytes - weights)))
        return cls(speedup, room)


Attempt = tuple[Ask, Measured]


def next_ask(goal: Goal, dense: Measured, attempts: Sequence[Attempt]) -> Ask | None:
    """Give the next attempt after these; None where the last one fits or nothing would change."""
    ask, last = attempts[-1]
    if last.fits(goal):
        return None
    speedup, room = ask.speedup, ask.bytes
    if goal.speedup is not None and not SURE <= last.speedup / goal.speedup <= MOST:
        points = [(1.0, dense.speedup), *((one.speedup or 1.0, m.speedup) for one, m in attempts)]
        speedup = max(LEAST, _extended(points, AIM * goal.speedup))
    if goal.bytes is not None and last.bytes > goal.bytes:
        taken = room if room is not None else last.bytes
        room = int(taken - (last.bytes - HEADROOM * goal.bytes))
    following = Ask(speedup, room)
    return None if following == ask or (room is not None and room <= 0) else following


def _extended(points: Sequence[tuple[float, float]], aim: float) -> float:
    """Go along the line through the last two points, in logarithms, to where the file is `aim`."""
    (before, slow), (now, fast) = ((math.log(a), math.log(b)) for a, b in points[-2:])
    slope = (now - before) / (fast - slow) if abs(fast - slow) > 1e-9 else 1.0
    slope = min(STEEPEST, max(1 / STEEPEST, slope))
    return math.exp(now + slope * (math.log(aim) - fast))


def best(goal: Goal, attempts: Sequence[Attempt]) -> int:
    """Give the place of the attempt to go on with: the slowest and largest that reaches the goal.

    Where none does, the one that is nearest; of those that do, one that does surely.
    """

    def distance(number: int) -> tuple[float, float, float]:
        measured = attempts[number][1]
        short = unsure = 0.0
        if goal.bytes is not None:
            short = max(short, math.log(measured.bytes / goal.bytes))
        if goal.speedup is not None:
            ratio = measured.speedup / goal.speedup
            short = max(short, -math.log(ratio))
            unsure = max(0.0, math.log(SURE / ratio))
            if goal.bytes is None:
                unsure = max(unsure, math.log(ratio / MOST))
        return short, unsure, measured.speedup if goal.speedup else -measured.bytes

    return min(range(len(attempts)), key=distance)
