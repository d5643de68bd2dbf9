"""The width of a plain model that is fast enough."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tcompress.errors import PlanError
from tcompress.latency.paired_timing import threads
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.entries import Plan
from tcompress.planning.plain_widths import possible_widths, width_of, with_width
from tcompress.planning.planner import make_plan
from tcompress.search.layer_times import clock_of, speedup_asked
from tcompress.search.resources import CLOSE, TRIES


def plan_in_time(source: SourceModel, recipe: Convert, plan: Plan, device: torch.device) -> Plan:
    """Plans the largest width with which a pass is as fast as asked for, within a size if any.

    Time is taken to grow evenly between two widths that were timed.
    """
    assert recipe.time_budget is not None
    assert plan.budget is not None
    widths = possible_widths(source)
    with threads(recipe.threads):
        clock = clock_of(source, recipe, device)
        speedup = speedup_asked(recipe.time_budget, clock)

        def timed(width: int) -> tuple[Plan, float]:
            narrow = make_plan(with_width(recipe, width / widths.stop), source, plan.method)
            [speed] = clock.speedups(narrow)
            return narrow, speed

        widest = widths[-1] if recipe.budget == recipe.time_budget else width_of(plan)
        chosen, speed = _fast_enough(widths, widest, timed, speedup)
    if speed < speedup:
        raise PlanError(
            f"`{recipe.time_budget}` is out of reach of a plain model at {clock.work}: with "
            f"{widths[0]} neurons {speed:.3g} x was reached",
            "allow more time, drop blocks too, or leave `--plain` out",
        )
    facts = {"speedup": speed, "at": str(clock.work), "seconds": clock.seconds}
    facts |= {"chosen": "uniform", "fraction": chosen.kept}
    return chosen.model_copy(update={"budget": plan.budget.model_copy(update=facts)})


def _fast_enough(
    widths: range, widest: int, timed: Callable[[int], tuple[Plan, float]], speedup: float
) -> tuple[Plan, float]:
    """Looks for the largest width of this speed; gives the smallest where none has it."""
    fast, slow, slowest = widths[0], widths.stop, 1.0  # the dense model
    best = timed(fast)
    for _ in range(TRIES):
        if best[1] < speedup or best[1] <= (1 + CLOSE) * speedup or fast >= widest:
            break
        share = (1 / speedup - 1 / best[1]) / (slowest - 1 / best[1])
        between = fast + int(share * (slow - fast)) // widths.step * widths.step
        width = min(widest, max(between, fast + widths.step))
        if width >= slow:
            break
        candidate = timed(width)
        if candidate[1] >= speedup:
            fast, best = width, candidate
        else:
            slow, slowest = width, 1 / candidate[1]
    return best
