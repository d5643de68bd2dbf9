"""Answers are tried out, and judged by the change of the output on data held out.

Predictions compare sizes of one structure better than structures: what single candidates change
says little of what many of them change together. What blocks cost does not add up either, since
the layers that stay make up for much of what is gone: in low rank, at a quarter of its size,
predictions added up to 203, 209 and 264 with no block dropped, one and two, and 151, 148 and 153
were measured. How much agreement a predicted error costs depends on the model and on what it is
used for, and is known only of models that were fitted and tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import exp, inf, log

from tcompress.errors import FitError, PlanError
from tcompress.search.budgets import approach

TIE = 0.02
"""Answers so close to the best one are as good."""

CLEAR = 0.15
"""What a mixture has to be better by than the best structure alone, as a share of its change."""

STOP = 0.1
"""With fewer blocks, an answer worse than the best by more than this share ends the search."""

AIM, CLOSE = 0.95, 0.85
"""Of the agreement that is allowed: what is aimed at, and from where on no more is looked for."""

_GUESS = 2.0  # predicted error for each unit of agreement, before anything was tried


def largest_error(allowed: float, lost_at: Callable[[float], float | None]) -> float | None:
    """Try predicted errors, and return the largest that loses no more agreement than is allowed.

    `lost_at` tells what is lost, or nothing where no model is that small; neither does this where
    no try was good enough. What is lost follows a power of the error, so logarithms are tried.
    """
    losses: dict[float, float] = {}
    fine: list[float] = []
    start, aim = min(_GUESS * allowed, 0.5), AIM * allowed
    for number in approach(losses, log(start), log(aim), lambda it: min(it, 0.0), step=log(8)):
        lost = lost_at(exp(number))
        if lost is None:
            break
        losses[number] = log(max(lost, 1e-6))
        fine = [tried for tried, loss in losses.items() if loss <= log(allowed)]
        if fine and (max(fine) >= 0 or losses[max(fine)] >= log(CLOSE * allowed)):
            break
    return exp(max(fine)) if fine else None


def simplest(best: str, mixed: str, changes: Mapping[str, float]) -> str:
    """Return the best answer of one structure in place of a mixture that is not clearly better.

    A change that is a little smaller tells nothing of what a user measures: of all-MiniLM-L6-v2 at
    a quarter a mixture changed likenesses by a tenth less than low rank, agreed with the dense
    model exactly as well, and lost 0.012 more of the rank correlation with labels of 3,000 pairs.
    """
    singles = [name for name in changes if name != mixed]
    if best != mixed or not singles:
        return best
    single = min(singles, key=lambda name: changes[name])
    return single if ties(changes[single], changes[best], CLEAR) else best


def ties(change: float, smallest: float, margin: float = TIE) -> bool:
    """Whether a change is within a margin of the smallest one; that one always is."""
    return change <= smallest + margin * abs(smallest)


def try_out(
    names: Iterable[str],
    change: Callable[[str], float],
    *,
    stop: float = inf,
    prefer_last: bool = False,
) -> tuple[str, dict[str, float | None]]:
    """Tries answers one after another, and takes the best one.

    Each name is asked for only when those before were tried; an answer that is worse than the best
    by more than the share `stop` ends the search. Of answers that are as good the first is taken.
    Gives its name, and the changes of all that were tried; None where the budget is out of reach.
    """
    changes: dict[str, float | None] = {}
    fine: dict[str, float] = {}
    refused: list[PlanError | FitError] = []
    for name in names:
        changes[name] = None
        try:
            changes[name] = fine[name] = change(name)
        except (PlanError, FitError) as error:
            refused.append(error)
            continue
        if not ties(fine[name], min(fine.values()), stop):
            break
    if not fine:
        raise refused[-1 if prefer_last else 0]
    smallest = min(fine.values())
    order = [name for name in fine if ties(fine[name], smallest)]
    return order[-1 if prefer_last else 0], changes
