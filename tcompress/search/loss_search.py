"""The largest predicted error with which a model loses no more agreement than is allowed.

How much agreement a predicted error costs depends on the model and on what it is used for, and is
known only of models that were fitted and tried. Both grow together, nearly in proportion: so a few
tries, each placed by those before it, come close to what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import NamedTuple

TRIES = 5
GUESS = 2.0  # predicted error for each unit of agreement, before anything was tried
AIM = 0.95  # of what is allowed: a try a little above it is of no use
CLOSE = 0.85  # of what is allowed: no larger error is looked for
_STEP, _LEAST = 8.0, 1e-6


class Tried(NamedTuple):
    """One model that was tried."""

    error: float  # largest predicted error that it was allowed
    lost: float  # agreement that it loses


def largest_error(allowed: float, lost_at: Callable[[float], float | None]) -> Tried | None:
    """Tries predicted errors, and returns the largest that loses no more than is allowed.

    `lost_at` tells what is lost, or nothing where no model is that small; neither does this where
    no try was good enough.
    """
    fine: Tried | None = None
    over: Tried | None = None
    last: Tried | None = None
    error = min(GUESS * allowed, 0.5)
    for _ in range(TRIES):
        lost = lost_at(error)
        if lost is None:
            break
        tried = Tried(error, max(lost, _LEAST))
        if lost > allowed:
            over = tried
        else:
            fine = tried
        if fine is not None and (fine.lost >= CLOSE * allowed or fine.error >= 1):
            break
        error = min(_following(fine, over, last, AIM * allowed), 1.0)
        last = tried
    return fine


def _following(fine: Tried | None, over: Tried | None, last: Tried | None, aim: float) -> float:
    """Where a try is next: between what is known on both sides, else in proportion.

    What is lost follows a power of the error; two tries on one side tell which.
    """
    if fine is None or over is None or fine.error >= over.error or fine.lost >= over.lost:
        nearest = over or fine
        assert nearest is not None  # one of them was tried
        power = 1.0
        if last is not None and last.error != nearest.error and last.lost != nearest.lost:
            power = log(nearest.lost / last.lost) / log(nearest.error / last.error)
        ratio = (aim / nearest.lost) ** (1 / min(2.0, max(0.5, power)))
        return nearest.error * min(_STEP, max(1 / _STEP, ratio))
    share = log(aim / fine.lost) / log(over.lost / fine.lost)
    return fine.error * (over.error / fine.error) ** min(0.95, max(0.05, share))
