"""Which form every site takes: one candidate for each, of least loss within the budget.

A pass over the calibration data, done once, tells what every layer may become, what that costs
and what it is predicted to lose, in one unit for all structures. A budget is then one problem over
these candidates. Where predictions are known to mislead, between structures and between numbers of
blocks, the answers are tried: fitted, and judged by the change of the output on data held out.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from tcompress import processes
from tcompress.data.calibration import samples_in
from tcompress.errors import PlanError
from tcompress.options.convert_options import TIMES
from tcompress.planning.entries import Plan
from tcompress.planning.sites import structure_of
from tcompress.search.bits import TableSite, table_site
from tcompress.search.budgets import BudgetProblem
from tcompress.search.candidates import SearchInputs
from tcompress.search.corrections import Factors, Substitute, changes_with, factors_of, to_try
from tcompress.search.predictions import Predictions, Predictor
from tcompress.search.resources import RESOURCES, Resource, Time, plan_in_time

FAR = 1.5  # answers predicted to lose so many times as much as the best are not tried
HOPELESS = 2.5  # the same before candidates are tried, which changes predictions


@dataclass(frozen=True, eq=False)
class Measurements:
    """What is measured of a model, for every budget; each part when it is first asked for."""

    inputs: SearchInputs
    changes: dict[Substitute, float] = field(default_factory=dict)  # of the output, where tried
    resources: dict[str, tuple[Resource, Predictions]] = field(default_factory=dict)  # by unit
    tables: dict[float, TableSite] = field(default_factory=dict)  # by change for a loss of one

    @cached_property
    def predictions(self) -> Predictions:
        """Candidates and what they are predicted to lose."""
        return Predictor(self.inputs).run()

    def priced(self, unit: str) -> tuple[Resource, Predictions]:
        """Measure what candidates take of a resource, once."""
        if unit not in self.resources:
            kind, inputs = RESOURCES[unit], self.inputs
            inputs.progress.stage(kind.stage, 1, "")
            resource = kind.measured(inputs)
            self.resources[unit] = resource, resource.priced(self.predictions)
            inputs.progress.advance(1, resource.where)
        return self.resources[unit]

    def factors(self, methods: Collection[str], inputs: SearchInputs) -> Factors:
        """Compare losses of candidates by these methods with those of some in the dense model."""
        substitutes = [item for item in self.predictions.substitutes if item.method in methods]
        chosen = to_try(substitutes)
        untried = [item for item in chosen if item not in self.changes]
        if untried:
            blocks = len({item.block for item in chosen})
            inputs.progress.stage(f"trying {len(untried)} candidates", blocks, "blocks")
            count = processes.count()
            shares = [untried[start::count] for start in range(min(count, len(untried)))]
            work = partial(changes_with, inputs, len(untried) + 1)
            results = processes.shared_out(work, shares, inputs.device)
            for share, changes in zip(shares, results, strict=True):
                self.changes.update(zip(share, changes, strict=True))
        return factors_of(substitutes, self.changes)


@dataclass(frozen=True)
class Statistics:
    """What conversions of one model to several speeds measure once.

    Moments, orders of channels, predicted losses and times of candidates hold for conversions that
    differ in nothing but their speed.
    """

    folder: Path  # for moments; whoever made it removes it
    _measured: dict[str, Measurements] = field(default_factory=dict)

    def answers(self, inputs: SearchInputs) -> dict[str, Plan]:
        """Return plans; what a conversion like it has measured is not measured again."""
        if not inputs.plan.layers:  # fewer blocks alone: nothing is measured
            return answers(inputs)
        recipe = inputs.recipe.model_copy(update=dict.fromkeys(TIMES, None))
        data = inputs.data and inputs.data.fingerprint
        depth = inputs.plan.depth and inputs.plan.depth.model_dump_json()
        facts = (inputs.source.store.fingerprint(), data, len(inputs.plan.layers), depth)
        key = " ".join([*map(str, facts), recipe.model_dump_json()])
        moments = self.folder / str([*self._measured, key].index(key))
        if moments.is_dir():  # without data there are none
            shutil.copytree(moments, inputs.workdir.folder, dirs_exist_ok=True)
        measured = self._measured.get(key) or Measurements(inputs)
        plans = answers(inputs, measured)
        if key not in self._measured:
            self._measured[key] = measured
            inputs.workdir.copy_moments(moments)
        return plans


def answers(inputs: SearchInputs, measured: Measurements | None = None) -> dict[str, Plan]:
    """Return plans with final sizes, in the order of preference, none of them twice.

    Each method that takes all layers is an answer too where it was measured alone, beside what
    `auto` makes of all of them. What is measured of the model on the way is added to `measured`.
    """
    measured = measured or Measurements(inputs)
    recipe, plan = inputs.recipe, inputs.plan
    label = recipe.method.name if recipe.method else ""
    asks = recipe.by_loss if inputs.data is None else recipe.measures_sensitivity
    if not plan.layers or not asks:
        return {label: plan}
    predictions = measured.predictions
    if recipe.plain and recipe.time_budget:
        inputs.progress.stage("timing widths", 1, "")
        return {label: plan_in_time(inputs)}
    if not predictions.layers:  # as with experts alone
        if not recipe.by_loss or (recipe.budget is not None and recipe.budget.is_size):
            return {label: plan}
        raise PlanError(
            "no error is predicted for any of these layers (experts have none), so that a "
            "largest error gives them no size",
            "give a size instead, such as `--target 0.25`",
        )
    limit, resource = recipe.resource_budget, None
    if limit is not None or recipe.counts_time:
        resource, predictions = measured.priced(limit.unit if limit else Time.unit)
    problem = BudgetProblem(recipe, inputs.source, plan, predictions, [*predictions.offers])
    if limit is not None and resource is not None:
        if recipe.budget == limit and resource.is_met(limit):
            return {label: problem.dense().with_facts(resource.facts_of(1.0))}
        allowed = resource.dense / resource.asked(limit)
        room = round(allowed - resource.rest(predictions.layers))
        problem = replace(problem, room=room)
        limited, unit = problem, resource.unit  # by one process alone, as all that is solved
        names = processes.first(lambda: _worth_trying(limited, unit).methods)
        problem = replace(problem, methods=names)
    if inputs.data is not None:
        factors = measured.factors(problem.methods, inputs)
        # What candidates are predicted to lose is corrected by what some of them did lose.
        corrected = predictions.mapped(lambda site: site.scaled(factors.by_key))
        problem = replace(problem, predictions=corrected)
        if recipe.chooses_table and plan.storage is not None and plan.storage.embeddings:
            batches = inputs.measured_data.fitted_batches
            change = factors.usual or 1 / sum(map(samples_in, batches))
            if change not in measured.tables:
                measured.tables[change] = table_site(inputs, change)
            problem = replace(problem, table=measured.tables[change])
    # By one process alone: solvers with a time limit may differ. What it times of whole models the
    # others do not know: nothing that all do together may ask for it afterwards.
    return processes.first(lambda: _solved(problem, label, resource if limit else None))


def _solved(problem: BudgetProblem, label: str, resource: Resource | None) -> dict[str, Plan]:
    """Spend the budget on all methods, which `label` names, and on each alone.

    Where models are to take little of a resource, whole ones are measured.
    """
    problems = {label: problem}
    for name in problem.predictions.singles:
        if name in problem.methods:
            problems.setdefault(name, problem.alone(name))
    refused: list[PlanError] = []
    different: dict[str, Plan] = {}
    for name, item in problems.items():
        try:
            plan = item.best()
        except PlanError as error:
            refused.append(error)
            continue
        if all(plan.layers != earlier.layers for earlier in different.values()):
            different[name] = plan
    first = next(iter(different.values()), problem.plan)
    plans = {name: plan for name, plan in different.items() if _in_question(plan, first)}
    if resource is not None:  # whole models are measured for those in question alone
        names, plans = [*plans] or [label], {}
        for name in names:
            try:
                plans[name] = resource.reach(problems[name])
            except PlanError as error:
                refused.append(error)
    if not plans:
        raise refused[-1]
    return plans


def _worth_trying(problem: BudgetProblem, unit: str) -> BudgetProblem:
    """Leave out methods that a limited resource makes nothing of.

    They take too much whatever they lose, or are predicted to lose many times as much as all
    methods together, which use nothing of them.
    """
    single = {name: replace(problem, methods=[name]) for name in problem.methods}
    fast = [name for name, alone in single.items() if alone.least(unit) <= problem.room]
    problem = replace(problem, methods=fast or problem.methods)
    try:
        together = problem.solve()
    except PlanError:
        return problem
    structures, offers = _structures(together.plan), problem.predictions.offers

    def worth(name: str) -> bool:
        if structure_of(offers[name][0]).name in structures:
            return True
        try:
            return single[name].solve().loss <= HOPELESS * together.loss
        except PlanError:
            return False

    return replace(problem, methods=[*filter(worth, problem.methods)])


def within_error(inputs: SearchInputs, measured: Measurements, error: float) -> Plan | None:
    """Return the cheapest plan of so small a predicted error; None if all layers stay."""
    plan = inputs.plan.with_facts({"kind": "max_error", "limit": error})
    try:
        [plan] = answers(replace(inputs, plan=plan), measured).values()
    except PlanError:
        if not measured.predictions.layers:
            raise
        return None
    if Time.unit not in measured.resources:
        return plan
    time, _ = measured.resources[Time.unit]
    return plan.with_facts(time.facts_of(time.ratio(plan)))


def _in_question(plan: Plan, first: Plan) -> bool:
    """Tell if a plan is the first, or of other structures and predicted to lose not far more."""
    errors = [item.budget.error or 0.0 for item in (first, plan) if item.budget]
    kinds = _structures(first)
    alike = len(kinds) == 1 and _structures(plan) == kinds
    return plan is first or not (alike or errors[-1] > FAR * errors[0])


def _structures(plan: Plan) -> set[str]:
    parts = (part for entry in plan.layers for part in entry.parts)
    return {term.structure for part in parts for term in part.terms}
