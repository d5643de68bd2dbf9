"""How many blocks to drop under a budget: tried out, one block after another.

Fewer blocks leave more of the budget to each layer of the others. What blocks cost and what layers
cost does not add up, since the layers that stay make up for much of what is gone: on
all-MiniLM-L6-v2 in low rank, at a quarter of its size, predictions added up to 203, 209 and 264
with no block dropped, one and two, and 151, 148 and 153 were measured. So every number of blocks is
fitted and measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from tcompress.conversion.depth import depth_without
from tcompress.errors import PlanError
from tcompress.planning.entries import BlockLoss, DepthPlan

TIE = 0.02
"""Trials so close to the best one are as good: the one with the fewest blocks is the fastest."""

STOP = 0.1
"""A trial that is worse than the best by more than this share of it ends the search."""


def ties(found: float, least: float, margin: float = TIE) -> bool:
    """Whether a change is within a margin of the smallest one; that one always is."""
    return found <= least + margin * abs(least)


def weigh_depths(
    depth: DepthPlan, blocks: Iterator[BlockLoss], change: Callable[[DepthPlan], float]
) -> DepthPlan:
    """Chooses how many blocks to drop.

    Args:
        depth: All stacks, with all their blocks.
        blocks: Blocks to drop, in the order in which they may go.
        change: Fits what is left within the budget, and measures how far the output then is from
            the dense model's.

    Returns:
        The blocks that stay, and all changes measured.

    Raises:
        PlanError: The budget is out of reach however many blocks go.
    """
    dropped: list[BlockLoss] = []
    tried: list[tuple[DepthPlan, float]] = []
    weighed: list[float | None] = []
    refused: PlanError | None = None
    for item in chain([None], blocks):
        dropped += [] if item is None else [item]
        candidate = depth_without(depth.stacks, dropped)
        try:
            tried.append((candidate, change(candidate)))
        except PlanError as error:  # with all these blocks the budget is too small
            refused = error
            weighed.append(None)
            continue
        weighed.append(tried[-1][1])
        if not ties(tried[-1][1], min(found for _, found in tried), STOP):
            break
    if not tried:
        assert refused is not None
        raise refused
    least = min(found for _, found in tried)
    chosen = next(plan for plan, found in reversed(tried) if ties(found, least))
    return chosen.model_copy(update={"weighed": tuple(weighed)})
