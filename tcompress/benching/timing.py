"""Timing two things in turn, so that whatever slows the machine down slows both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import quantiles

Pass = Callable[[], object]
Clock = Callable[[], float]
Seconds = tuple[list[float], list[float]]


def spread(times: Sequence[float]) -> float | None:
    """Returns the distance of the quartiles over the median; None for fewer than four times."""
    if len(times) < 4:
        return None
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else None


def alternate(
    one: Pass,
    other: Pass,
    repeats: int,
    clock: Clock = time.perf_counter,
    wait: Callable[[], None] = lambda: None,
) -> Seconds:
    """Times two passes in turn; who goes first changes with every repeat.

    Args:
        one: The first.
        other: The second.
        repeats: How often each runs.
        clock: Tells the time in seconds.
        wait: Returns when the device has done all its work.

    Returns:
        Seconds of every run of the first, and of the second.
    """
    times: Seconds = ([], [])
    sides = list(zip((one, other), times, strict=True))
    for _ in range(repeats):
        for run, seconds in sides:
            wait()
            start = clock()
            run()
            wait()
            seconds.append(clock() - start)
        sides.reverse()
    return times
