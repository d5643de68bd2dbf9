"""From a budget to one kept fraction of all layers: what shapes alone can say of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

from tcompress.errors import PlanError
from tcompress.options import Convert
from tcompress.options.budget import Budget
from tcompress.planning.disk import disk_bytes
from tcompress.planning.entries import BudgetPlan, Plan
from tcompress.source import SourceModel

STAND_IN = 0.5
"""Kept fraction of layers whose sizes nothing but data can tell."""

_LARGEST, _STEP, _STEPS = 0.99, 0.8, 30  # down to a thousandth
_HALVINGS = 14
_SHARES = tuple(round(n / 10**k, k) for k in (4, 3, 2) for n in range(10, 100))
"""Targets of two digits, from a thousandth on."""


def size_of(plan: Plan, source: SourceModel, recipe: Convert) -> int:
    """Measures a plan in the unit of its recipe's budget: parameters or bytes.

    Args:
        plan: What is done; for a fraction the rewritten weights count, else the whole model.
        source: The dense model, without blocks that are dropped.
        recipe: What was asked for.
    """
    kind = recipe.budget.kind if recipe.budget else "target"
    if kind == "target_bytes":
        return disk_bytes(source, plan, recipe.dtype)
    if kind == "target_params":
        return plan.parameters - plan.saved
    return plan.structured_rewritten


def plan_within(
    recipe: Convert, source: SourceModel, plan_of: Callable[[float | None], Plan]
) -> Plan:
    """Plans the same kept fraction for all layers: the largest that a budget allows.

    Args:
        recipe: What was asked for.
        source: The dense model, without blocks that are dropped.
        plan_of: Plans with a kept fraction; with None as large as the methods themselves say.

    Raises:
        PlanError: The budget is below what the smallest sizes take, or the model is within it.
    """
    budget = recipe.budget
    if budget is None:
        return plan_of(None)
    if not budget.is_size or budget.kind == "target":
        fraction = budget.limit if budget.is_size else STAND_IN
        try:
            plan = plan_of(fraction)
        except PlanError as error:
            hint = _smallest(fraction, plan_of) if budget.is_size else None
            raise PlanError(error.message, hint or error.hint) from error
    else:
        fraction, plan = _largest(recipe, budget, source, plan_of)
    chosen = "later" if recipe.by_loss else "uniform"
    facts = BudgetPlan(kind=budget.kind, limit=budget.limit, chosen=chosen, fraction=fraction)
    return plan.model_copy(update={"budget": facts})


def _smallest(fraction: float, plan_of: Callable[[float | None], Plan]) -> str | None:
    """Says from which target on layers are rewritten, if a larger one than this helps at all."""

    @cache
    def rewritten(share: float) -> int:
        try:
            return len(plan_of(share).layers)
        except PlanError:
            return 0

    shares = [share for share in _SHARES if share > fraction]
    most = rewritten(shares[-1]) if shares else 0
    if not most:
        return None
    first, last = (
        shares[bisect_left(shares, True, key=lambda share: rewritten(share) >= count)]
        for count in (1, most)
    )
    more = f" that rewrites a layer, and {last:g} rewrites {most}" if last > first else ""
    return f"{first:g} is the smallest target{more}"


def _largest(
    recipe: Convert, budget: Budget, source: SourceModel, plan_of: Callable[[float | None], Plan]
) -> tuple[float, Plan]:
    def tried(fraction: float) -> tuple[int, Plan] | None:
        try:
            plan = plan_of(fraction)
        except PlanError:
            return None
        return size_of(plan, source, recipe), plan

    high, sizes = _LARGEST, []
    _check_below_dense(plan_of, budget, source, recipe)
    for _ in range(_STEPS):
        found = tried(high)
        if found is not None and found[0] <= budget.limit:
            break
        sizes += [] if found is None else [found[0]]
        high *= _STEP
    else:
        raise out_of_reach(budget, min(sizes, default=0))
    low, plan, high = high, found[1], min(1.0, high / _STEP)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = tried(middle)
        if found is not None and found[0] <= budget.limit:
            low, plan = middle, found[1]
        else:
            high = middle
    return low, plan


def out_of_reach(budget: Budget, smallest: int) -> PlanError:
    """Says that a budget is too small, and how small it may be."""
    unit = "bytes" if budget.kind == "target_bytes" else "parameters"
    return PlanError(
        f"`{budget}` is out of reach: the smallest possible is {smallest:,} {unit}",
        "embeddings and norms count and stay as they are; allow more, offer a method with "
        "smaller sizes, keep fewer layers dense, or drop blocks too",
    )


def _check_below_dense(
    plan_of: Callable[[float | None], Plan], budget: Budget, source: SourceModel, recipe: Convert
) -> None:
    plan = Plan(layers=(), parameters=sum(p.numel() for p in source.keymap.model.parameters()))
    dense = size_of(plan, source, recipe)
    if dense <= budget.limit:
        unit = "bytes" if budget.kind == "target_bytes" else "parameters"
        raise PlanError(
            f"`{budget}` asks for nothing: the dense model has {dense:,} {unit}",
            "give a smaller number",
        )
