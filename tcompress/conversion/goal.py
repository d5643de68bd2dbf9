"""From what layers may become to a plan: the budget is spent, exactly, where it saves most.

With several methods on offer all of them together are tried and each on its own. A mixture has
to be clearly better, by prediction, than the best single method at the same budget: predictions
compare sizes of one structure more reliably than structures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from tcompress.conversion.candidates import Sized
from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.costs import Choice, out_of_reach, size_of
from tcompress.planning.entries import BudgetPlan, Plan
from tcompress.planning.knapsack import (
    DENSE,
    Allocation,
    BudgetSite,
    Option,
    allocate,
    allocate_for_loss,
)
from tcompress.planning.knapsack import uniform as allocate_alike

MARGIN = 0.05  # what a mixture has to save, of the loss of the best single method
ATTEMPTS = 8  # each takes away what the last one spent too much, or gives some of it back
UNSPENT = 0.001  # of a budget, not worth another attempt

Chosen = dict[str, Choice | None]


@dataclass(frozen=True)
class _Candidate:
    """A way to spend the budget."""

    plan: Plan
    loss: float


@dataclass(frozen=True)
class Settler:
    """Spends one budget.

    Args:
        recipe: How to convert.
        source: The dense model, without blocks that are dropped.
        plan: The plan of equal sizes, which keeps within the budget.
        plan_with: Makes a plan of choices.
        sized: All layers that the budget sizes, with predicted losses.
        methods: Names of the methods on offer.
        singles: Those of them that are predicted for all layers.
    """

    recipe: Convert
    source: SourceModel
    plan: Plan
    plan_with: Callable[[Chosen], Plan]
    sized: Sequence[Sized]
    methods: Sequence[str]
    singles: Sequence[str]

    def run(self) -> Plan:
        """Returns the plan that is predicted to lose least, or for an error to be smallest.

        Raises:
            PlanError: The budget is out of reach.
        """
        assert self.plan.budget is not None
        alone = {name: self._tried([name]) for name in self.singles}
        found = dict(alone) if len(self.methods) == 1 else {"": self._tried(self.methods), **alone}
        if not any(isinstance(item, _Candidate) for item in found.values()):
            raise next(item for item in found.values() if isinstance(item, PlanError))
        fine = {name: item for name, item in alone.items() if isinstance(item, _Candidate)}
        best, single = self._best(found.get(""), fine)
        zero = fsum(item.zero for item in self.sized) or 1.0
        facts = self.plan.budget.model_copy(
            update={
                "chosen": "uniform" if self._alike else "loss",
                "error": best.loss / zero,
                "uniform_error": self._uniform_error(zero),
                "single_errors": {
                    name: item.loss / zero
                    for name, item in alone.items()
                    if isinstance(item, _Candidate) and len(self.methods) > 1
                },
            }
        )
        plan = best.plan if single is None else self._by_itself(single, best.plan)
        return plan.model_copy(update={"budget": facts})

    def _by_itself(self, name: str, plan: Plan) -> Plan:
        """Sizes a single method as it would be without others on offer."""
        if len(self.methods) == 1 or not all(item.quick for item in self.sized):
            return plan
        sized = [replace(item, offers=item.quick) for item in self.sized]
        found = replace(self, sized=sized)._tried([name])
        return found.plan if isinstance(found, _Candidate) else plan

    @property
    def _budget(self) -> BudgetPlan:
        assert self.plan.budget is not None
        return self.plan.budget

    @property
    def _alike(self) -> bool:
        """Whether all layers keep the same fraction: asked for, or since no data tells better."""
        if self.recipe.allocation == "uniform":
            return True
        limits_error = self._budget.kind in ("max_error", "tol")
        return self.recipe.calibration.source == "none" and not limits_error

    def _best(
        self, mixed: _Candidate | PlanError | None, alone: Mapping[str, _Candidate]
    ) -> tuple[_Candidate, str | None]:
        """Chooses among plans, with the name of the method that is alone in it, if one is.

        A mixture is taken only where it is clearly ahead.
        """
        name = min(alone, key=lambda name: self._rank(alone[name]), default=None)
        if not isinstance(mixed, _Candidate):
            assert name is not None
            return alone[name], name
        if name is None or self._rank(mixed)[0] < (1 - MARGIN) * self._rank(alone[name])[0]:
            return mixed, None
        return alone[name], name

    def _rank(self, item: _Candidate) -> tuple[float, float]:
        if self._budget.kind in ("max_error", "tol"):
            return float(item.plan.structured_rewritten + self._dense_left(item.plan)), item.loss
        return item.loss, 0.0

    def _tried(self, methods: Sequence[str]) -> _Candidate | PlanError:
        try:
            return self._candidate(methods)
        except PlanError as error:
            return error

    def _candidate(self, methods: Sequence[str]) -> _Candidate:
        kind, limit = self._budget.kind, self._budget.limit
        limits_error = kind in ("max_error", "tol")
        if not limits_error:
            return self._within(methods)
        sites = [item.site(methods, may_stay=True) for item in self.sized]
        if kind == "tol":
            found = within_tolerance(sites, [limit * item.zero for item in self.sized])
        elif self._alike:
            found = _alike_for_loss(sites, limit * fsum(item.zero for item in self.sized))
        else:
            found = allocate_for_loss(sites, limit * fsum(item.zero for item in self.sized))
        return _Candidate(self._plan(found), found.loss)

    def _within(self, methods: Sequence[str]) -> _Candidate:
        """Allocates less where layers end up not sharing what was counted once, but not too little.

        Where a layer would then not even shrink, it has to do without that method.
        """
        limit, spent = self._limits()
        room, barred = spent, set[tuple[str, str]]()
        fits, exceeds, best = 0, spent, None
        for _ in range(ATTEMPTS):
            # A rewritten layer makes up for what those before it lost; a dense one does not.
            sites = [
                item.site([m for m in methods if (item.key, m) not in barred], may_stay=False)
                for item in self.sized
            ]
            found = self._allocated(sites, room)
            plan = self._plan(found)
            over = self._measured(plan) - limit
            lost = self._refused(found, plan, methods)
            if lost:
                barred |= lost
            elif over > 0:
                exceeds = room
                room = room - over if best is None else (fits + room) // 2
            else:
                if best is None or found.loss < best.loss:
                    best = _Candidate(plan, found.loss)
                if room == spent or -over <= UNSPENT * spent:
                    break
                fits, room = room, (room + exceeds) // 2
        if best is not None:
            return best
        raise PlanError(
            f"`{self.recipe.budget}` could not be met: layers that would not shrink stay dense",
            "allow more, or name one method that may be used everywhere, such as `svd`",
        )

    def _refused(
        self, found: Allocation, plan: Plan, methods: Sequence[str]
    ) -> set[tuple[str, str]]:
        """Layers, each with its method, that were to be rewritten and then stayed dense."""
        if len(methods) == 1:
            return set()
        planned = self._planned(plan)
        lost = set()
        for item, option in zip(self.sized, found.choices, strict=True):
            if option.label != DENSE and item.key not in planned:
                own = (
                    m
                    for m in methods
                    if any(o.label == option.label for o in item.offers.get(m, ()))
                )
                lost.add((item.key, next(own)))
        return lost

    def _allocated(self, sites: Sequence[BudgetSite], room: int) -> Allocation:
        if self._alike:
            share = room / sum(site.dense for site in sites)
            return allocate_alike(sites, share)
        try:
            return allocate(sites, room)
        except PlanError as error:
            budget = self.recipe.budget
            if budget is None or budget.kind == "target":
                raise
            least = sum(min(_costs(site)) for site in sites)
            limit, spent = self._limits()
            raise out_of_reach(budget, limit - spent + least) from error

    def _limits(self) -> tuple[int, int]:
        """What a plan may measure, and what of it is for the layers that are sized."""
        dense = sum(item.dense * item.unit for item in self.sized)
        if self._budget.kind == "target":
            whole = int(self._budget.limit * dense)
            return whole, whole
        own = {item.key: item for item in self.sized}
        planned = {f"{entry.name}.{entry.parameter}": entry for entry in self.plan.layers}
        taken = sum(
            (planned[key].parameters if key in planned else item.dense) * item.unit
            for key, item in own.items()
        )
        limit = int(self._budget.limit)
        return limit, taken + limit - self._measured(self.plan)

    def _measured(self, plan: Plan) -> int:
        if self._budget.kind != "target":
            return size_of(plan, self.source, self.recipe)
        own = {item.key for item in self.sized}
        kept = sum(e.parameters for e in plan.layers if f"{e.name}.{e.parameter}" in own)
        return kept + self._dense_left(plan)

    def _planned(self, plan: Plan) -> set[str]:
        return {f"{entry.name}.{entry.parameter}" for entry in plan.layers}

    def _dense_left(self, plan: Plan) -> int:
        planned = self._planned(plan)
        return sum(item.dense for item in self.sized if item.key not in planned)

    def _plan(self, found: Allocation) -> Plan:
        chosen: Chosen = {}
        for item, option in zip(self.sized, found.choices, strict=True):
            chosen[item.key] = option.label if isinstance(option.label, Choice) else None
        if self.sized and not any(chosen.values()):
            raise PlanError(
                f"`{self.recipe.budget}` leaves every layer dense: no smaller size loses so little",
                "allow a larger error",
            )
        return self.plan_with(chosen)

    def _uniform_error(self, zero: float) -> float | None:
        """Predicted error of the same budget, shared out alike; None where it has no such form."""
        if self._budget.kind in ("max_error", "tol"):
            return None
        losses = []
        for name in self.singles:
            sites = [item.site([name], may_stay=False) for item in self.sized]
            _, room = self._limits()
            try:
                losses.append(allocate_alike(sites, room / sum(s.dense for s in sites)).loss)
            except PlanError:
                continue
        return min(losses) / zero if losses else None


def within_tolerance(sites: Sequence[BudgetSite], most: Sequence[float]) -> Allocation:
    """Chooses for every site the cheapest option that loses no more than its own limit.

    Args:
        sites: What may be chosen; all may stay dense.
        most: Largest loss of each.
    """
    chosen = []
    for site, limit in zip(sites, most, strict=True):
        fine = [option for option in site.options if option.loss <= limit]
        chosen.append(min(fine, key=lambda item: item.cost, default=None) or _stay(site))
    return Allocation(tuple(chosen), sum(c.cost for c in chosen), fsum(c.loss for c in chosen))


def _alike_for_loss(sites: Sequence[BudgetSite], most: float) -> Allocation:
    """The smallest fraction, the same for all sites, whose options lose no more than allowed."""
    shares = sorted({option.cost / site.dense for site in sites for option in site.options} | {1.0})
    low, high = 0, len(shares) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            fits = allocate_alike(sites, shares[middle]).loss <= most
        except PlanError:
            fits = False
        low, high = (low, middle) if fits else (middle + 1, high)
    return allocate_alike(sites, shares[low])


def _stay(site: BudgetSite) -> Option:
    return Option(site.dense, 0.0, DENSE)


def _costs(site: BudgetSite) -> list[int]:
    return [option.cost for option in site.options] + ([site.dense] if site.may_stay else [])
