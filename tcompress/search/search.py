"""Which form every site takes: one candidate for each, of least loss within the budget.

A pass over the calibration data, done once, tells what every layer may become, what that costs
and what it is predicted to lose, in one unit for all structures. A budget is then one problem over
these candidates. Where predictions are known to mislead, between structures and between numbers of
blocks, the answers are tried: fitted, and judged by the change of the output on data held out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.data.calibration import CalibrationData
from tcompress.errors import PlanError
from tcompress.fitting.block_rewrite import FitInputs
from tcompress.fitting.channel_orders import read_reductions
from tcompress.fitting.workdir import FitWorkplace
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.limits import Budget
from tcompress.planning.entries import Plan
from tcompress.planning.planner import grouped
from tcompress.planning.sites import structure_of
from tcompress.progress import Progress
from tcompress.search.bits import TableSite, table_forms, table_site
from tcompress.search.budgets import BudgetProblem
from tcompress.search.layer_times import Time
from tcompress.search.plain_width import plan_in_time
from tcompress.search.predictions import Predictions, Predictor
from tcompress.search.resources import RESOURCES, Goal, Resource
from tcompress.search.substitution import (
    Factors,
    Substitute,
    SubstitutionWalk,
    factors_of,
    in_question,
    judged_batches,
    to_try,
)
from tcompress.search.width import is_unfitted, with_losses

FAR = 1.5
"""Answers predicted to lose so many times as much as the best are not tried."""

HOPELESS = 2.5
"""The same before candidates are tried, which changes predictions."""


@dataclass(frozen=True)
class Priced:
    """Candidates with what they take of a resource."""

    resource: Resource
    predictions: Predictions

    def goal(self, budget: Budget) -> Goal:
        """Ask for models that take so little."""
        return Goal(self.resource, budget, self.resource.rest(self.predictions.layers))


@dataclass(frozen=True, eq=False)
class Measurements:
    """What is measured of a model, for every budget; each part when it is first asked for."""

    source: SourceModel
    recipe: Convert
    plan: Plan  # of equal sizes
    data: CalibrationData | None  # what is held out is not looked at
    workdir: FitWorkplace  # where moments are kept
    device: torch.device
    progress: Progress
    several: bool
    """Whether each method that takes all layers may be an answer by itself."""
    changes: dict[int, float] = field(default_factory=dict)
    """What the output changes by with the substitutes that were tried, by their place."""
    resources: dict[str, Priced] = field(default_factory=dict)
    """Those that were measured, by unit."""
    tables: dict[float, TableSite] = field(default_factory=dict)
    """Word embeddings, by what the output changes by for a predicted loss of one."""

    @cached_property
    def predictions(self) -> Predictions:
        """Candidates and what they are predicted to lose."""
        parts = (self.source, self.recipe, self.plan, self.data, self.workdir, self.device)
        return Predictor.of(*parts, self.progress, several=self.several).run()

    def priced(self, unit: str) -> Priced:
        """Measure what candidates take of a resource, once."""
        if unit not in self.resources:
            kind = RESOURCES[unit]
            self.progress.stage(kind.stage, 1, "")
            resource = kind.of(self.source, self.recipe, self.plan, self.device)
            predictions = resource.priced(self.predictions)
            self.progress.advance(1, resource.where)
            self.resources[unit] = Priced(resource, predictions)
        return self.resources[unit]

    def factors(
        self, methods: Collection[str], workdir: FitWorkplace, progress: Progress
    ) -> Factors:
        """Compare losses of candidates by these methods with those of some in the dense model."""
        substitutes = in_question(self.predictions.substitutes, methods)
        chosen = to_try(substitutes)
        untried = {n: item for n, item in chosen.items() if n not in self.changes}
        if untried:
            blocks = len({item.block for item in chosen.values()})
            progress.stage(f"trying {len(untried)} candidates", blocks, "blocks")
            walk = self._substitution([*untried.values()], workdir)
            changes = walk.changes(lambda block: progress.advance(1, block))
            self.changes.update(zip(untried, changes, strict=True))
        return factors_of(substitutes, self.changes)

    def _substitution(
        self, substitutes: Sequence[Substitute], workdir: FitWorkplace
    ) -> SubstitutionWalk:
        assert self.data is not None
        inputs = FitInputs(
            self.source,
            self.recipe.calibration.damping,
            workdir.moments,
            reductions=lambda block: read_reductions(workdir.moments("channels", block)),
            dtype_of=lambda _: torch.float32,
            device=self.device,
            is_unfitted=is_unfitted,
        )
        sampler = sampler_of(self.source)
        return SubstitutionWalk(inputs, self.plan.attention, self.data, sampler, substitutes)

    def table(self, usual: float | None) -> TableSite:
        """Measure what the word embedding may become, once.

        Args:
            usual: What the output changes by for a predicted loss of one, where that is known.
        """
        assert self.data is not None
        fitted = [self.data.batches[index] for index in self.data.fitted]
        unit = usual or 1 / sum(len(next(iter(batch.values()))) for batch in fitted)
        if unit not in self.tables:
            count = len(table_forms(self.source, self.recipe))
            self.progress.stage("trying word embeddings", count, "tables")
            sampler = sampler_of(self.source)
            width = getattr(self.source.config.get_text_config(), "hidden_size", 0) or 1
            self.tables[unit] = table_site(
                self.source,
                self.recipe,
                self.plan,
                self.data,
                sampler,
                judged_batches(self.data, sampler.with_variants, 8 * width),
                unit,
                self.device,
                lambda name: self.progress.advance(1, name),
            )
        return self.tables[unit]


@dataclass(frozen=True)
class Request:
    """One budget that is asked of a measured model."""

    recipe: Convert
    plan: Plan  # of equal sizes
    workdir: FitWorkplace
    progress: Progress

    @property
    def label(self) -> str:
        """Name of the method."""
        return self.recipe.method.name if self.recipe.method else ""


def answers(measured: Measurements, request: Request) -> dict[str, Plan]:
    """Return plans with final sizes, in the order of preference, none of them twice.

    Each method that takes all layers is an answer too where it was measured alone, beside what
    `auto` makes of all of them.
    """
    recipe, label = request.recipe, request.label
    by_loss = recipe.by_loss
    asks = by_loss if measured.data is None else recipe.measures_sensitivity
    if not request.plan.layers or not asks:
        return {label: request.plan}
    predictions = measured.predictions
    if recipe.plain and recipe.time_budget:
        request.progress.stage("timing widths", 1, "")
        return {label: plan_in_time(measured.source, recipe, request.plan, measured.device)}
    if not predictions.layers:  # as with experts alone
        if not by_loss or (recipe.budget is not None and recipe.budget.is_size):
            return {label: request.plan}
        raise PlanError(
            "no error is predicted for any of these layers (experts have none), so that a "
            "largest error gives them no size",
            "give a size instead, such as `--target 0.25`",
        )
    goal = None
    if (unit := _resource_of(recipe)) is not None:
        priced = measured.priced(unit)
        predictions, limit = priced.predictions, recipe.resource_budget
        goal = None if limit is None else priced.goal(limit)
    groups = grouped(request.plan, measured.source)
    problem = BudgetProblem(recipe, measured.source, request.plan, groups, predictions)
    names = predictions.methods
    if goal is not None:
        names = _worth_trying(_limited(problem, goal, round(goal.room)), names)
    if measured.data is not None:
        factors = measured.factors(names, request.workdir, request.progress)
        problem = replace(problem, predictions=_scaled(predictions, factors))
        storage = request.plan.storage
        if recipe.chooses_table and storage is not None and storage.embeddings is not None:
            problem = replace(problem, table=measured.table(factors.usual))
    return _solved(problem, names, label, goal)


def _resource_of(recipe: Convert) -> str | None:
    """Name the resource that candidates are priced by, if any counts."""
    budget = recipe.resource_budget
    if budget is None:
        return Time.unit if recipe.counts_time else None
    return budget.unit


def _limited(problem: BudgetProblem, goal: Goal, room: int) -> BudgetProblem:
    return replace(problem, room=(goal.resource.unit, room))


def _scaled(predictions: Predictions, factors: Factors) -> Predictions:
    """Correct what candidates are predicted to lose by what some of them did lose."""
    tables = (predictions.layers, predictions.alone, predictions.quick)
    layers, single, quick = (tuple(map(factors.scaled, sites)) for sites in tables)
    widths = tuple(with_losses(site, factors.channels) for site in predictions.widths)
    return replace(predictions, layers=layers, alone=single, quick=quick, widths=widths)


def _solved(
    problem: BudgetProblem, names: Sequence[str], label: str, goal: Goal | None
) -> dict[str, Plan]:
    """Spend the budget on all methods, and on each alone; whole models are timed where it counts.

    Args:
        problem: The budget, and what it may be spent on.
        names: Methods that are worth it.
        label: Name of the answer that uses all of them.
        goal: What models are to take little of, if anything.
    """
    predictions = problem.predictions
    complete = [name for name in predictions.whole if name in names]

    def answer(name: str, room: int | None) -> Plan:
        limited = problem if goal is None or room is None else _limited(problem, goal, room)
        if name == label:
            return limited.best(names, complete)
        return limited.of_alone().best([name], [name])

    def least(name: str, unit: str) -> int:
        if name == label:
            return problem.least(names, unit)
        return problem.of_alone().least([name], unit)

    plans: dict[str, Plan] = {}
    refused: list[PlanError] = []
    for name in (label, *(name for name in predictions.single if name in names)):
        try:
            plan = answer(name, None if goal is None else round(goal.room))
        except PlanError as error:
            refused.append(error)
            continue
        if all(plan.layers != earlier.layers for earlier in plans.values()):
            plans[name] = plan
    plans = dict(_in_question(plans))
    if goal is not None:  # whole models are measured for those in question alone
        unmeasured, plans = plans or {label: problem.plan}, {}
        for name in unmeasured:
            try:
                plan, ratio = goal.reach(partial(answer, name), least(name, goal.resource.unit))
                plans[name] = _with_facts(plan, goal.resource.facts(ratio))
            except PlanError as error:
                refused.append(error)
    if not plans:
        raise refused[-1]
    return plans


def _worth_trying(problem: BudgetProblem, names: Sequence[str]) -> list[str]:
    """List methods that a goal may use.

    Others take too much whatever they lose, or are predicted to lose many times as much as all
    methods together, which use nothing of them.
    """
    assert problem.room is not None
    unit, room = problem.room
    fast = [name for name in names if problem.least([name], unit) <= room] or [*names]
    try:
        together = problem.solve(fast)
    except PlanError:
        return fast
    structures = _structures(together.plan)

    def hopeless(name: str) -> bool:
        try:
            return problem.solve([name]).loss > HOPELESS * together.loss
        except PlanError:
            return True

    offers = problem.predictions.offers or {}
    kinds = {name: structure_of(offers[name][0]).name for name in fast}
    return [name for name in fast if kinds[name] in structures or not hopeless(name)]


def _with_facts(plan: Plan, facts: Mapping[str, Any]) -> Plan:
    assert plan.budget is not None
    return plan.model_copy(update={"budget": plan.budget.model_copy(update=facts)})


def within_error(measured: Measurements, request: Request, error: float) -> Plan | None:
    """Return the cheapest plan of so small a predicted error; None if all layers stay."""
    assert request.plan.budget is not None
    budget = request.plan.budget.model_copy(update={"kind": "max_error", "limit": error})
    request = replace(request, plan=request.plan.model_copy(update={"budget": budget}))
    try:
        [plan] = answers(measured, request).values()
    except PlanError:
        if not measured.predictions.layers:
            raise
        return None
    if not request.recipe.counts_time or not measured.resources or plan.budget is None:
        return plan
    time = measured.priced(Time.unit).resource
    [speedup] = time.ratios(plan)
    return _with_facts(plan, time.facts(speedup))


def _in_question(plans: Mapping[str, Plan]) -> Iterator[tuple[str, Plan]]:
    """Leave out answers predicted to lose far more than the first, or of the same structure."""
    first = next(iter(plans.values()), None)
    if first is None:
        return
    kinds = _structures(first)
    for name, plan in plans.items():
        budgets = [budget for budget in (first.budget, plan.budget) if budget is not None]
        errors = [budget.error for budget in budgets if budget.error is not None]
        hopeless = len(errors) == 2 and errors[1] > FAR * errors[0]
        if plan is first or not (hopeless or (len(kinds) == 1 and _structures(plan) == kinds)):
            yield name, plan


def _structures(plan: Plan) -> set[str]:
    parts = (part for entry in plan.layers for part in entry.parts)
    return {term.structure for part in parts for term in part.terms}
