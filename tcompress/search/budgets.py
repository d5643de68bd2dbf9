"""A budget as one problem: a candidate for every site, of least loss within what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, copysign, fsum, inf
from typing import NamedTuple

from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.limits import Budget
from tcompress.options.method_options import NARROWING
from tcompress.planning.costs import UNSPENT, out_of_reach, size_of
from tcompress.planning.entries import LayerForm, Plan
from tcompress.planning.planner import covered, resized
from tcompress.search import knapsack
from tcompress.search.bits import TableCandidate, TableSite
from tcompress.search.candidates import NANOSECONDS, PARAMETERS, Site
from tcompress.search.knapsack import Allocation
from tcompress.search.predictions import Predictions

MARGIN = 0.05  # what a mixture has to save, of the loss of the best single method
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
    number = start
    for _ in range(TRIES):
        number = placed(number)
        if number in taken:
            return
        yield number
        low = max((tried for tried, value in taken.items() if value <= aim), default=inf)
        high = min((tried for tried, value in taken.items() if value > aim), default=-inf)
        if low < high:
            share = (aim - taken[low]) / (taken[high] - taken[low])
            number = low + min(_SHARES[1], max(_SHARES[0], share)) * (high - low)
        else:
            move, numbers, values = aim - taken[number], [*taken], [*taken.values()]
            if len(taken) > 1 and values[-1] == values[-2]:
                furthest = max(abs(after - before) for before, after in pairwise(numbers))
                move = copysign(max(2 * furthest, UNSPENT * abs(aim), abs(move)), move)
            elif len(taken) > 1:
                slope = (values[-1] - values[-2]) / (numbers[-1] - numbers[-2])
                move /= min(_SLOPES[1], max(_SLOPES[0], slope))
            number += min(step, max(-step, move))


class Answer(NamedTuple):
    """A plan that keeps to a budget."""

    plan: Plan
    loss: float  # what it is predicted to lose
    rank: float  # what it is judged by: its loss, or its size where an error is limited


@dataclass(frozen=True)
class BudgetProblem:
    """One budget, and the sites that it is spent on."""

    recipe: Convert  # what was asked for
    source: SourceModel
    plan: Plan  # a plan of equal sizes
    predictions: Predictions  # what may be chosen from
    methods: Sequence[str]  # that candidates may be of
    table: TableSite | None = None  # what the word embedding may become, where that is chosen too
    room: int = 0  # for the sites, where a resource is limited

    def best(self) -> Plan:
        """Return the plan that is predicted to lose least, or for an error to be smallest.

        A mixture of methods has to be clearly better than the best of those that can take all
        layers: predictions compare sizes of one structure more reliably.
        """
        several = len(self.methods) > 1
        answers: dict[str, Answer] = {}
        refused: list[PlanError] = []
        for name in ("", *self.singles) if several else self.singles:
            try:
                answers[name] = replace(self, methods=[name] if name else self.methods).solve()
            except PlanError as error:
                refused.append(error)
        if not answers:
            raise refused[0]
        mixed = answers.pop("", None)
        name = min(answers, key=lambda name: (answers[name].rank, answers[name].loss), default="")
        if mixed and (not name or mixed.rank < (1 - MARGIN) * answers[name].rank):
            return _with_facts(self, mixed, answers)
        answer = answers[name]
        takes_all = all(site.candidates for site in self.predictions.singly)
        if several and takes_all and self.recipe.calibration.is_none:
            with suppress(PlanError):  # sized as it would be without others on offer
                answer = answer._replace(plan=self.alone(name).solve().plan)
        return _with_facts(self, answer, answers if several else {})

    @property
    def singles(self) -> list[str]:
        """Methods that are answers by themselves: one alone, or those that all layers may take."""
        complete = self.predictions.complete
        return [name for name in self.methods if name in complete or len(self.methods) == 1]

    def alone(self, method: str) -> BudgetProblem:
        """Return the same for one method in all layers, with what it offers them then."""
        predictions = replace(self.predictions, layers=self.predictions.singly)
        return replace(self, methods=[method], predictions=predictions)

    def least(self, unit: str) -> int:
        """Return what the candidates take that take least of a resource."""
        sites = self.sites(may_stay=True)
        if not self.alike:
            return _least(sites, unit)
        shares = (
            min(item.costs[unit] for item in site.every) / site.dense[unit]
            for site in sites
            if site.dense[unit]
        )
        return ceil(max(shares, default=0.0) * sum(site.dense[unit] for site in sites))

    def most(self, unit: str) -> int:
        """Return what the layers that have candidates take of a resource as they are."""
        return sum(site.dense[unit] for site in self.predictions.layers)

    def dense(self) -> Plan:
        """Return the plan that leaves all layers as they are that have candidates."""
        forms: dict[str, LayerForm | None] = {site.key: None for site in self.predictions.layers}
        return _with_facts(self, Answer(resized(self.plan, forms, self.source), 0.0, 0.0), {})

    def solve(self) -> Answer:
        """Spend the budget on candidates of these methods."""
        if self.budget.is_size:
            return self._within()
        limit, sites, resource = self.budget.limit, self.sites(may_stay=True), self.resource
        if self.budget.is_resource:
            allocation = self._allocated(sites, self.room)
        elif self.budget.limits_each:
            allocation = knapsack.allocate_within_each(sites, limit, resource)
        else:
            spend = knapsack.uniform_for_loss if self.alike else knapsack.allocate_for_loss
            everything = fsum(site.left_out for site in self.predictions.layers)
            allocation = spend(sites, limit * everything, resource)
        plan, loss, cost = self._plan(allocation), allocation.loss, allocation.cost
        if resource == PARAMETERS:  # with what layers share
            planned = {entry.key for entry in plan.layers}
            dense = (site for site in self.predictions.layers if site.key not in planned)
            cost = plan.structured_rewritten + sum(site.dense[PARAMETERS] for site in dense)
        return Answer(plan, loss, float(cost) if self.budget.is_error else loss)

    def _within(self) -> Answer:
        """Allocate less where layers end up not sharing what was counted once, but not too little.

        Where a layer would then not even shrink, it has to do without that method.
        """
        limit, spent = self.limits()
        barred = set[tuple[str, str]]()
        answers: list[Answer] = []
        sizes: dict[float, float] = {}
        least = min(spent, self.least(self.resource))

        def placed(room: float) -> float:
            last = not answers and len(sizes) == TRIES - 1  # whether it can be met at all
            return least if last else max(least, int(room))

        for room in approach(sizes, spent, limit, placed):
            while True:
                # A rewritten layer makes up for what those before it lost; a dense one does not.
                sites = self.sites(may_stay=self.table is not None, barred=barred)
                allocation = self._allocated(sites, int(room))
                plan = self._plan(allocation)
                refused = self._refused(allocation, plan) if len(self.methods) > 1 else set()
                if refused <= barred:
                    break
                barred |= refused
            sizes[room] = size = self._measured(plan)
            if size <= limit:
                answers.append(Answer(plan, allocation.loss, allocation.loss))
                if room == spent or limit - size <= UNSPENT * spent:
                    break
        if answers:
            return min(answers, key=lambda answer: answer.loss)
        raise PlanError(
            f"`{self.budget}` could not be met: layers that would not shrink stay dense",
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
            for item in site.candidates
            if item.form.parts == dense.get(site.key)
        }

    def sites(self, *, may_stay: bool, barred: Collection[tuple[str, str]] = ()) -> list[Site]:
        """List what a budget chooses from."""
        layers = []
        for site in self.predictions.layers:
            methods = [name for name in self.methods if (site.key, name) not in barred]
            layers.append(site.offering(methods, may_stay=may_stay))
        widths = self.predictions.widths if NARROWING in self.methods else ()
        if self.budget.limits_each:
            widths = tuple(site for site in widths if not site.is_attention)
        sites = knapsack.joined(layers, widths, self.resource, may_stay=may_stay)
        return sites if self.table is None else [*sites, self.table]

    def _allocated(self, sites: Sequence[Site], room: int) -> Allocation:
        resource, budget, limit = self.resource, self.budget, self.recipe.resource_budget
        if self.alike:
            fraction = room / sum(site.dense[resource] for site in sites)
            if limit is not None and not budget.is_resource:
                share = self.room / sum(site.dense[limit.unit] for site in sites)
                sites = knapsack.within_share(sites, share, limit.unit)
            return knapsack.uniform(sites, fraction, resource)
        try:
            if limit is not None and not budget.is_resource:
                return knapsack.allocate_within(sites, {resource: room, limit.unit: self.room})
            return knapsack.allocate(sites, room, resource)
        except PlanError as error:
            if budget.is_resource:
                raise
            smallest, (most, spent) = _least(sites, resource), self.limits()
            if smallest <= spent:  # what is out of reach is the other budget
                raise
            if budget.is_fraction:
                share = smallest / sum(site.dense[resource] for site in sites)
                share = ceil(1e4 * share) / 1e4
                raise PlanError(
                    f"`{budget}` is out of reach: the smallest possible is {share:g}",
                    "allow more, or offer other methods",
                ) from error
            size = most - spent + smallest
            raise out_of_reach(budget, self.source, self.recipe, self.plan, size) from error

    def _plan(self, allocation: Allocation) -> Plan:
        plan = self.plan
        unsized = {entry.key for entry in plan.layers} - self.predictions.fixed
        # Of experts no error is known.
        forms: dict[str, LayerForm | None] = dict.fromkeys(unsized if self.budget.is_error else ())
        for choice in allocation.choices:
            forms |= choice.forms
            if isinstance(choice, TableCandidate):
                plan = choice.within(plan)
        if self.table is None and not any(forms.values()):
            raise PlanError(
                f"`{self.budget}` leaves every layer dense: no smaller size loses so little",
                "allow a larger error",
            )
        return resized(plan, forms, self.source)

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

    def limits(self) -> tuple[int, int]:
        """Give what a plan may measure, and what of it is for the sites."""
        dense = sum(site.dense[PARAMETERS] for site in self.predictions.layers)
        limit = int(self.budget.limit * (dense if self.budget.is_fraction else 1))
        measured = self._measured(self.plan) if self.table is None else self.table.smallest
        return limit, self._of_layers(self.plan) + limit - measured

    def _measured(self, plan: Plan) -> int:
        if self.budget.is_fraction:
            return self._of_layers(plan)
        return size_of(plan, self.source, self.recipe)

    def _of_layers(self, plan: Plan) -> int:
        """Count what the layers take that have candidates, rewritten or dense."""
        planned = {entry.key: entry.parameters for entry in plan.layers}
        layers = self.predictions.layers
        sizes = (planned.get(site.key, site.dense[PARAMETERS]) * site.unit for site in layers)
        return round(sum(sizes))


def _least(sites: Sequence[Site], resource: str) -> int:
    return sum(min(item.costs[resource] for item in site.every) for site in sites)


def _with_facts(problem: BudgetProblem, answer: Answer, alone: dict[str, Answer]) -> Plan:
    """Add to a plan what was predicted: its loss, that of equal shares and of each method."""
    everything = fsum(site.left_out for site in problem.predictions.layers) or 1.0
    alike = []
    for name in problem.singles if problem.budget.is_size else ():
        sites = replace(problem, methods=[name]).sites(may_stay=False)
        share = problem.limits()[1] / sum(site.dense[problem.resource] for site in sites)
        with suppress(PlanError):
            alike.append(knapsack.uniform(sites, share, problem.resource).loss)
    facts = {
        "chosen": "uniform" if problem.alike else "loss",
        "error": answer.loss / everything,
        "uniform_error": min(alike) / everything if alike else None,
        "single_errors": {name: item.loss / everything for name, item in alone.items()},
    }
    budget = problem.plan.with_facts(facts).budget
    return covered(answer.plan.model_copy(update={"budget": budget}), problem.source)
