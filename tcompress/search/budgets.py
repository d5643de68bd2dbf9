"""A budget as one problem: a candidate for every site, of least loss within what is allowed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import copysign, fsum, inf

from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.limits import Budget
from tcompress.options.method_options import NARROWING
from tcompress.planning.costs import out_of_reach, size_of
from tcompress.planning.entries import LayerForm, LayerPlan, Plan
from tcompress.planning.planner import covered, resized
from tcompress.search.bits import TableCandidate, TableSite
from tcompress.search.candidates import NANOSECONDS, PARAMETERS, Candidate, Site
from tcompress.search.joint_width import joined
from tcompress.search.knapsack import (
    Allocation,
    allocate,
    allocate_for_loss,
    allocate_within,
    uniform,
)
from tcompress.search.predictions import Predictions

MARGIN = 0.05  # what a mixture has to save, of the loss of the best single method
UNSPENT = 0.001  # of a budget, not worth another try
TRIES = 6  # numbers that are tried, at most: each takes a plan, a measurement or a fit
_SHARES = (0.05, 0.95)  # of the way between two tries: closer to either, little would be learned
_SLOPES = (0.5, 2.0)  # that two tries on one side are believed to tell


def approach(
    taken: dict[float, float],
    start: float,
    aim: float,
    placed: Callable[[float], float] = float,
    step: float = inf,
) -> Iterator[float]:
    """Yield numbers to try, the next by what those before took, until one was tried before.

    It lies between the closest on both sides of the aim, as a straight line tells. Where all are on
    one side, one more is taken to take one more, or what the last two tell; where these take the
    same, sizes have steps, and the next one goes twice as far as any before.

    Args:
        taken: What numbers take, which grows with them. The caller adds each before the next.
        start: The first number.
        aim: What the number looked for takes.
        placed: Makes a number one that can be tried.
        step: Furthest that a try is from the last one, where all are on one side.
    """
    number = placed(start)
    for _ in range(TRIES):
        if number in taken:
            return
        yield number
        low = max((tried for tried, value in taken.items() if value <= aim), default=inf)
        high = min((tried for tried, value in taken.items() if value > aim), default=-inf)
        if low < high:
            share = (aim - taken[low]) / (taken[high] - taken[low])
            number = placed(low + min(_SHARES[1], max(_SHARES[0], share)) * (high - low))
        else:
            move = (aim - taken[number]) / _slope(taken)
            numbers = [*taken]
            if len(numbers) > 1 and taken[numbers[-1]] == taken[numbers[-2]]:
                furthest = max(abs(after - before) for before, after in pairwise(numbers))
                move = copysign(max(2 * furthest, UNSPENT * abs(aim), abs(move)), move)
            number = placed(number + min(step, max(-step, move)))


def _slope(taken: dict[float, float]) -> float:
    (last, value), *before = [*taken.items()][::-1]
    if not before or before[0][0] == last or before[0][1] == value:
        return 1.0
    slope = (value - before[0][1]) / (last - before[0][0])
    return min(_SLOPES[1], max(_SLOPES[0], slope))


@dataclass(frozen=True)
class Answer:
    """A plan that keeps to a budget."""

    plan: Plan
    loss: float  # what it is predicted to lose
    size: int  # what it is judged by where the smallest is looked for


@dataclass(frozen=True)
class BudgetProblem:
    """One budget, and the sites that it is spent on."""

    recipe: Convert  # what was asked for
    source: SourceModel
    plan: Plan  # a plan of equal sizes
    groups: Sequence[Sequence[LayerPlan]]  # its layers, those together that read one input
    predictions: Predictions  # what may be chosen from
    table: TableSite | None = None  # what the word embedding may become, where that is chosen too
    room: tuple[str, int] | None = None  # for the sites, by unit of a limited resource

    def best(self, methods: Sequence[str], singles: Sequence[str]) -> Plan:
        """Return the plan that is predicted to lose least, or for an error to be smallest.

        A mixture of the `methods` has to be clearly better than the best of the `singles`, those
        that can take all layers: predictions compare sizes of one structure more reliably.
        """
        answers: dict[str, Answer] = {}
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
            return _with_facts(self, mixed, singles, answers)
        answer = answers[name]
        uncorrected = self.predictions.uncorrected
        if len(methods) > 1 and uncorrected and all(site.candidates for site in uncorrected):
            with suppress(PlanError):  # sized as it would be without others on offer
                answer = replace(answer, plan=self._of(uncorrected).solve([name]).plan)
        return _with_facts(self, answer, singles, answers if len(methods) > 1 else {})

    def limited(self, unit: str, room: float) -> BudgetProblem:
        """Return the same with so much of a resource for the sites."""
        return replace(self, room=(unit, round(room)))

    def of_alone(self) -> BudgetProblem:
        """Return the same for one method in all layers, with nothing else on offer."""
        return self._of(self.predictions.singly)

    def _of(self, layers: tuple[Site, ...]) -> BudgetProblem:
        return replace(self, predictions=replace(self.predictions, layers=layers))

    def least(self, methods: Sequence[str], unit: str) -> int:
        """Return what the candidates of these methods take that take least of a resource."""
        sites = self.sites(methods, may_stay=True)
        return sum(min(item.costs[unit] for item in site.every) for site in sites)

    def solve(self, methods: Sequence[str]) -> Answer:
        """Spend the budget on candidates of these methods."""
        if self.budget.is_size:
            return self._within(methods)
        limit, sites = self.budget.limit, self.sites(methods, may_stay=True)
        left_out = {site.key: site.left_out for site in self.predictions.layers}
        if self.budget.is_resource:
            assert self.room is not None
            allocation = self._allocated(sites, self.room[1])
        elif self.budget.limits_each:
            limits = [limit * fsum(left_out[key] for key in site.keys) for site in sites]
            allocation = within_tolerance(sites, limits, self.resource)
        else:
            spend = _alike_for_loss if self.alike else allocate_for_loss
            allocation = spend(sites, limit * fsum(left_out.values()), self.resource)
        plan = self._plan(allocation)
        if self.resource != PARAMETERS:
            return Answer(plan, allocation.loss, allocation.cost)
        return Answer(plan, allocation.loss, plan.structured_rewritten + self._dense_left(plan))

    def _within(self, methods: Sequence[str]) -> Answer:
        """Allocate less where layers end up not sharing what was counted once, but not too little.

        Where a layer would then not even shrink, it has to do without that method.
        """
        limit, spent = self.limits()
        barred = set[tuple[str, str]]()
        answers: dict[float, Answer] = {}
        sizes: dict[float, float] = {}
        least = min(spent, self.least(methods, self.resource))

        def placed(room: float) -> float:
            last = not answers and len(sizes) == TRIES - 1  # whether it can be met at all
            return least if last else max(least, int(room))

        for room in approach(sizes, spent, limit, placed):
            while True:
                # A rewritten layer makes up for what those before it lost; a dense one does not.
                sites = self.sites(methods, may_stay=self.table is not None, barred=barred)
                allocation = self._allocated(sites, int(room))
                plan = self._plan(allocation)
                refused = self._refused(allocation, plan) if len(methods) > 1 else set()
                if refused <= barred:
                    break
                barred |= refused
            sizes[room] = size = self._measured(plan)
            if size <= limit:
                answers[room] = Answer(plan, allocation.loss, size)
                if room == spent or limit - size <= UNSPENT * spent:
                    break
        if answers:
            return min(answers.values(), key=lambda answer: answer.loss)
        raise PlanError(
            f"`{self.recipe.budget}` could not be met: layers that would not shrink stay dense",
            "allow more, or name one method that may be used everywhere, such as `svd`",
        )

    def _refused(self, allocation: Allocation, plan: Plan) -> set[tuple[str, str]]:
        """List layers, each with its method, that were to be rewritten and then stayed dense."""
        planned = {entry.key for entry in plan.layers}
        forms = [form for choice in allocation.choices for form in choice.forms]
        dense = {key: form.parts for key, form in forms if form and key not in planned}
        return {
            (site.key, item.method)
            for site in self.predictions.layers
            if site.key in dense
            for item in site.candidates
            if item.form.parts == dense[site.key]
        }

    def sites(
        self,
        methods: Sequence[str],
        *,
        may_stay: bool,
        barred: Collection[tuple[str, str]] = (),
    ) -> list[Site]:
        """List what a budget chooses from."""
        layers = [
            site.offering([m for m in methods if (site.key, m) not in barred], may_stay=may_stay)
            for site in self.predictions.layers
        ]
        widths = self.predictions.widths if NARROWING in methods else ()
        if self.budget.limits_each:
            widths = tuple(site for site in widths if not site.is_attention)
        sites = joined(layers, widths, self.resource, may_stay=may_stay) if widths else layers
        return sites if self.table is None else [*sites, self.table]

    def _allocated(self, sites: Sequence[Site], room: int) -> Allocation:
        resource = self.resource
        if self.alike:
            return uniform(sites, room / sum(site.dense[resource] for site in sites), resource)
        budget = self.recipe.budget
        try:
            if self.room is not None and not self.budget.is_resource:
                return allocate_within(sites, {resource: room, **dict([self.room])})
            return allocate(sites, room, resource)
        except PlanError as error:
            if budget is None or budget.is_fraction or budget.is_resource:
                raise
            smallest = sum(min(item.costs[resource] for item in site.every) for site in sites)
            limit, spent = self.limits()
            size = limit - spent + smallest
            if size <= limit:  # what is out of reach is the other budget
                raise
            raise out_of_reach(budget, self.source, self.recipe, self.plan, size) from error

    def _plan(self, allocation: Allocation) -> Plan:
        plan = self.plan
        forms: dict[str, LayerForm | None] = {}
        for choice in allocation.choices:
            forms |= choice.forms
            if isinstance(choice, TableCandidate):
                plan = choice.table.within(plan)
        if self.table is None and forms and not any(forms.values()):
            raise PlanError(
                f"`{self.recipe.budget}` leaves every layer dense: no smaller size loses so little",
                "allow a larger error",
            )
        chosen: dict[str, LayerForm | None] = {}
        if self.budget.is_error:  # of experts no error is known
            keys = {entry.key for entry in self.plan.layers}
            chosen = dict.fromkeys(keys - self.predictions.fixed)
        return resized(plan, self.groups, chosen | forms, self.source)

    @property
    def budget(self) -> Budget:
        assert self.plan.budget is not None
        return self.plan.budget.asked

    @property
    def resource(self) -> str:
        """What candidates cost; beside a size, a limited resource is a second cost."""
        if self.budget.is_error:
            return NANOSECONDS if self.recipe.counts_time else PARAMETERS
        return self.budget.unit

    @property
    def alike(self) -> bool:
        """Whether all layers keep the same fraction: asked for, or since no data tells better."""
        if self.recipe.allocation == "uniform":
            return True
        return self.recipe.calibration.is_none and self.budget.is_size

    def _rank(self, answer: Answer) -> tuple[float, float]:
        if self.budget.is_error:
            return float(answer.size), answer.loss
        return answer.loss, 0.0

    def limits(self) -> tuple[int, int]:
        """Give what a plan may measure, and what of it is for the sites."""
        layers = self.predictions.layers
        if self.budget.is_fraction:
            total = int(self.budget.limit * sum(site.dense[PARAMETERS] for site in layers))
            return total, total
        planned = {entry.key: entry.parameters for entry in self.plan.layers}
        sizes = (planned.get(site.key, site.dense[PARAMETERS]) * site.unit for site in layers)
        planned_size = round(sum(sizes)) + (
            0 if self.table is None else self.table.cost_in(self.plan)
        )
        limit = int(self.budget.limit)
        return limit, planned_size + limit - self._measured(self.plan)

    def _measured(self, plan: Plan) -> int:
        if not self.budget.is_fraction:
            return size_of(plan, self.source, self.recipe)
        keys = {site.key for site in self.predictions.layers}
        parameters = sum(entry.parameters for entry in plan.layers if entry.key in keys)
        return parameters + self._dense_left(plan)

    def _dense_left(self, plan: Plan) -> int:
        planned = {entry.key for entry in plan.layers}
        layers = self.predictions.layers
        return sum(site.dense[PARAMETERS] for site in layers if site.key not in planned)


def _with_facts(
    problem: BudgetProblem, answer: Answer, singles: Sequence[str], alone: dict[str, Answer]
) -> Plan:
    """Add to a plan what was predicted: its loss, that of equal shares and of each method."""
    everything = fsum(site.left_out for site in problem.predictions.layers) or 1.0
    alike = []
    for name in singles if problem.budget.is_size else ():
        sites = problem.sites([name], may_stay=False)
        share = problem.limits()[1] / sum(site.dense[problem.resource] for site in sites)
        with suppress(PlanError):
            alike.append(uniform(sites, share, problem.resource).loss)
    facts = {
        "chosen": "uniform" if problem.alike else "loss",
        "error": answer.loss / everything,
        "uniform_error": min(alike) / everything if alike else None,
        "single_errors": {name: item.loss / everything for name, item in alone.items()},
    }
    budget = problem.plan.with_facts(facts).budget
    return covered(answer.plan.model_copy(update={"budget": budget}), problem.source)


def within_tolerance(sites: Sequence[Site], most: Sequence[float], resource: str) -> Allocation:
    """Choose for every site the cheapest candidate that loses no more than its own limit."""
    chosen: list[Candidate] = []
    for site, limit in zip(sites, most, strict=True):
        fine = [item for item in site.candidates if item.loss <= limit]
        chosen.append(min(fine, key=lambda item: item.costs[resource], default=site.stays))
    return Allocation.of(chosen, resource)


def _alike_for_loss(sites: Sequence[Site], most: float, resource: str) -> Allocation:
    """Find the smallest fraction, the same for all sites, that loses no more than allowed."""
    pairs = (
        (item.costs[resource], site.dense[resource]) for site in sites for item in site.candidates
    )
    shares = sorted({cost / dense for cost, dense in pairs} | {1.0})

    def fits(share: float) -> bool:
        try:
            return uniform(sites, share, resource).loss <= most
        except PlanError:
            return False

    index = bisect_left(shares, True, hi=len(shares) - 1, key=fits)
    return uniform(sites, shares[index], resource)
