"""A budget as one problem: a candidate for every site, of least loss within what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import fsum
from typing import Any

from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.convert_options import Budget
from tcompress.planning.costs import out_of_reach, size_of
from tcompress.planning.entries import Form, LayerPlan, Plan
from tcompress.planning.planner import covered, resized
from tcompress.search.bits import TABLE, TableSite
from tcompress.search.knapsack import (
    DENSE,
    Allocation,
    BudgetSite,
    Option,
    allocate,
    allocate_both,
    allocate_for_loss,
    joint,
)
from tcompress.search.knapsack import uniform as allocate_alike
from tcompress.search.predict import LayerCandidates
from tcompress.search.width import WidthSite
from tcompress.structures.width import WidthSpec

WIDTH = WidthSpec().name

MARGIN = 0.05  # what a mixture has to save, of the loss of the best single method
ATTEMPTS = 8  # each takes away what the last one spent too much, or gives some of it back
UNSPENT = 0.001  # of a budget, not worth another attempt


@dataclass(frozen=True)
class _Answer:
    plan: Plan
    loss: float
    size: int  # what a smallest answer is judged by


@dataclass(frozen=True)
class BudgetProblem:
    """One budget, and the layers that it is spent on; `plan` has equal sizes."""

    recipe: Convert
    source: SourceModel
    plan: Plan
    groups: Sequence[Sequence[LayerPlan]]  # those together that read one input
    layers: Sequence[LayerCandidates]
    fixed: frozenset[str] = frozenset()  # weights of layers that have a size of their own
    widths: Sequence[WidthSite] = ()
    table: TableSite | None = None  # where bits of the word embedding are chosen too
    room: int | None = None
    """Nanoseconds that these layers may take, where time is limited too, or alone."""

    def best(self, methods: Sequence[str], singles: Sequence[str]) -> Plan:
        """Returns the plan that is predicted to lose least, or for an error to be smallest.

        A mixture of the `methods` has to be clearly better than the best of the `singles`, those
        that can take all layers: predictions compare sizes of one structure more reliably.
        """
        answers: dict[str, _Answer] = {}
        refused: list[PlanError] = []
        for name in ("", *singles) if len(methods) > 1 else singles:
            try:
                answers[name] = self.solve([name] if name else methods)
            except PlanError as error:
                refused.append(error)
        if not answers:
            raise refused[0]
        mixed = answers.pop("", None)
        name = min(answers, key=lambda name: self._rank(answers[name]), default="")
        if mixed is not None and (
            not name or self._rank(mixed)[0] < (1 - MARGIN) * self._rank(answers[name])[0]
        ):
            return self._with_facts(mixed.plan, mixed.loss, singles, answers)
        plan = answers[name].plan
        if len(methods) > 1 and all(item.quick for item in self.layers):
            with suppress(PlanError):  # sized as it would be without others on offer
                layers = [replace(item, offers=item.quick) for item in self.layers]
                plan = replace(self, layers=layers).solve([name]).plan
        single = answers if len(methods) > 1 else {}
        return self._with_facts(plan, answers[name].loss, singles, single)

    def of_alone(self) -> BudgetProblem:
        """The same for one method in all layers, with nothing else on offer."""
        return replace(self, layers=[replace(item, offers=item.alone) for item in self.layers])

    def least_time(self, methods: Sequence[str]) -> int:
        """Returns nanoseconds that the fastest candidates of these methods take."""
        sites = self.sites(methods, may_stay=True).values()
        return sum(min(option.time for option in site.every) for site in sites)

    def solve(self, methods: Sequence[str]) -> _Answer:
        """Spends the budget on candidates of these methods."""
        if self._budget.is_time:
            return self._in_time(methods)
        if not self._budget.is_error:
            return self._within(methods)
        limit = self._budget.limit
        sites = self.sites(methods, may_stay=True)
        if self._budget.limits_each:
            left_out = {item.key: item.left_out for item in self.layers}
            most = [limit * fsum(left_out[key] for key in keys) for keys in sites]
            found = within_tolerance([*sites.values()], most)
        else:
            spend = _alike_for_loss if self._alike else allocate_for_loss
            found = spend([*sites.values()], limit * fsum(item.left_out for item in self.layers))
        plan = self._plan(found, sites)
        if self._timed:
            return _Answer(plan, found.loss, found.cost)
        return _Answer(plan, found.loss, plan.structured_rewritten + self._dense_left(plan))

    def _in_time(self, methods: Sequence[str]) -> _Answer:
        assert self.room is not None
        sites = self.sites(methods, may_stay=True)
        found = self._allocated([*sites.values()], self.room)
        return _Answer(self._plan(found, sites), found.loss, found.cost)

    def _within(self, methods: Sequence[str]) -> _Answer:
        """Allocates less where layers end up not sharing what was counted once, but not too little.

        Where a layer would then not even shrink, it has to do without that method.
        """
        limit, spent = self._limits()
        room, barred = spent, set[tuple[str, str]]()
        fits, exceeds, best = 0, spent, None
        for _ in range(ATTEMPTS):
            # A rewritten layer makes up for what those before it lost; a dense one does not.
            sites = self.sites(methods, may_stay=self.table is not None, barred=barred)
            found = self._allocated([*sites.values()], room)
            plan = self._plan(found, sites)
            over = self._measured(plan) - limit
            lost = self._refused(found, plan) if len(methods) > 1 else set()
            if lost:
                barred |= lost
            elif over > 0:
                exceeds = room
                room = room - over if best is None else (fits + room) // 2
            else:
                if best is None or found.loss < best.loss:
                    best = _Answer(plan, found.loss, limit + over)
                if room == spent or -over <= UNSPENT * spent:
                    break
                fits, room = room, (room + exceeds) // 2
        if best is not None:
            return best
        raise PlanError(
            f"`{self.recipe.budget}` could not be met: layers that would not shrink stay dense",
            "allow more, or name one method that may be used everywhere, such as `svd`",
        )

    def _refused(self, found: Allocation, plan: Plan) -> set[tuple[str, str]]:
        """Layers, each with its method, that were to be rewritten and then stayed dense."""
        planned = {entry.key for entry in plan.layers}
        chosen: dict[str, Form] = {}
        for choice in found.choices:
            chosen |= () if choice.label == DENSE else choice.label  # type: ignore[call-overload]
        return {
            (item.key, name)
            for item in self.layers
            if chosen.get(item.key) is not None and item.key not in planned
            for name, options in item.offers.items()
            if any(option.label == chosen[item.key].parts for option in options)
        }

    def sites(
        self,
        methods: Sequence[str],
        *,
        may_stay: bool,
        barred: Collection[tuple[str, str]] = (),
    ) -> dict[tuple[str, ...], BudgetSite]:
        """Lists what a budget chooses from, by the keys of the layers that it is chosen for."""
        timed = self._timed
        found: dict[tuple[str, ...], BudgetSite] = {}
        for item in self.layers:
            allowed = [name for name in methods if (item.key, name) not in barred]
            found[item.key,] = item.site(allowed, may_stay=may_stay, timed=timed)
        for site in self.widths if WIDTH in methods else ():  # an attention after its parts
            if site.is_attention and self._budget.limits_each:
                continue
            offered = [replace(o, cost=o.time) for o in site.options] if timed else [*site.options]
            parts = [keys for keys in found if {*keys} <= {*site.keys}]
            members = [found.pop(keys) for keys in parts]
            if len(members) == 1:
                offered += members[0].options
            elif any(member.options for member in members):
                offered += [_flattened(option, parts) for option in joint(members)]
            dense, time = (sum(getattr(m, name) for m in members) for name in ("dense", "time"))
            keys = tuple(chain.from_iterable(parts))
            found[keys] = BudgetSite(keys[0], offered, dense, may_stay, time)
        if self.table is not None:
            found[TABLE,] = self.table.site
        return found

    def _allocated(self, sites: Sequence[BudgetSite], room: int) -> Allocation:
        if self._alike:
            return allocate_alike(sites, room / sum(site.dense for site in sites))
        budget = self.recipe.budget
        try:
            if self.room is not None and not self._budget.is_time:
                return allocate_both(sites, room, self.room)
            return allocate(sites, room)
        except PlanError as error:
            if budget is None or budget.is_fraction or budget.is_time:
                raise
            costs = [[option.cost for option in site.options] for site in sites]
            least = sum(
                min(own + [site.dense] * site.may_stay)
                for own, site in zip(costs, sites, strict=True)
            )
            limit, spent = self._limits()
            size = limit - spent + least
            raise out_of_reach(budget, self.source, self.recipe, self.plan, size) from error

    def _plan(self, found: Allocation, sites: Iterable[tuple[str, ...]]) -> Plan:
        forms: dict[str, Any] = {}
        for keys, choice in zip(sites, found.choices, strict=True):
            forms |= dict.fromkeys(keys) if choice.label == DENSE else dict(choice.label)  # type: ignore[call-overload]
        plan, place = self.plan, forms.pop(TABLE, None)
        if self.table is not None and isinstance(place, int):
            plan = self.table.candidates[place].within(plan)
        elif forms and not any(forms.values()):
            raise PlanError(
                f"`{self.recipe.budget}` leaves every layer dense: no smaller size loses so little",
                "allow a larger error",
            )
        chosen: dict[str, Form | None] = {}
        if self._budget.is_error:  # of experts no error is known
            chosen = dict.fromkeys({entry.key for entry in self.plan.layers} - self.fixed)
        chosen |= forms
        return resized(plan, self.groups, chosen, self.source)

    @property
    def _budget(self) -> Budget:
        assert self.plan.budget is not None
        return self.plan.budget.asked

    @property
    def _timed(self) -> bool:
        """Whether time is what candidates cost; beside a size it is a second cost."""
        return self._budget.is_time or (self._budget.is_error and self.recipe.counts_time)

    @property
    def _alike(self) -> bool:
        """Whether all layers keep the same fraction: asked for, or since no data tells better."""
        if self.recipe.allocation == "uniform":
            return True
        return self.recipe.calibration.is_none and self._budget.is_size

    def _rank(self, item: _Answer) -> tuple[float, float]:
        return (float(item.size), item.loss) if self._budget.is_error else (item.loss, 0.0)

    def _limits(self) -> tuple[int, int]:
        """What a plan may measure, and what of it is for the layers that are sized."""
        if self._budget.is_fraction:
            whole = int(self._budget.limit * sum(item.dense for item in self.layers))
            return whole, whole
        planned = {entry.key: entry.parameters for entry in self.plan.layers}
        taken = round(sum(planned.get(item.key, item.dense) * item.unit for item in self.layers))
        taken += 0 if self.table is None else self.table.cost_in(self.plan)
        limit = int(self._budget.limit)
        return limit, taken + limit - self._measured(self.plan)

    def _measured(self, plan: Plan) -> int:
        if not self._budget.is_fraction:
            return size_of(plan, self.source, self.recipe)
        own = {item.key for item in self.layers}
        kept = sum(entry.parameters for entry in plan.layers if entry.key in own)
        return kept + self._dense_left(plan)

    def _dense_left(self, plan: Plan) -> int:
        planned = {entry.key for entry in plan.layers}
        return sum(item.dense for item in self.layers if item.key not in planned)

    def _with_facts(
        self, plan: Plan, loss: float, singles: Sequence[str], alone: Mapping[str, _Answer]
    ) -> Plan:
        """Adds to a plan what was predicted: its loss, that of equal shares and of each method."""
        everything = fsum(item.left_out for item in self.layers) or 1.0
        alike = []
        for name in singles if self._budget.is_size else ():
            sites = [*self.sites([name], may_stay=False).values()]
            share = self._limits()[1] / sum(site.dense for site in sites)
            with suppress(PlanError):
                alike.append(allocate_alike(sites, share).loss)
        assert self.plan.budget is not None
        facts = self.plan.budget.model_copy(
            update={
                "chosen": "uniform" if self._alike else "loss",
                "error": loss / everything,
                "uniform_error": min(alike) / everything if alike else None,
                "single_errors": {name: item.loss / everything for name, item in alone.items()},
            }
        )
        return covered(plan.model_copy(update={"budget": facts}), self.source)


def _flattened(option: Option, parts: Sequence[Sequence[str]]) -> Option:
    """Gives an option of several sites the forms of their layers, by key, as its label."""
    labels: Any = option.label
    pairs = zip(parts, labels, strict=True)
    forms = [[(key, None) for key in keys] if own == DENSE else own for keys, own in pairs]
    return replace(option, label=tuple(chain.from_iterable(forms)))


def within_tolerance(sites: Sequence[BudgetSite], most: Sequence[float]) -> Allocation:
    """Chooses for every site the cheapest option that loses no more than its own limit."""
    chosen = []
    for site, limit in zip(sites, most, strict=True):
        fine = [option for option in site.options if option.loss <= limit]
        dense = Option(site.dense, 0.0, DENSE)
        chosen.append(min(fine, key=lambda item: item.cost, default=dense))
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
