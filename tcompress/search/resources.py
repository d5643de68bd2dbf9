"""What a model takes that has to be measured, and plans that take no more than is allowed.

Of time, layers are timed by themselves and models of planned forms as a whole. Plain models have
one width for all layers: the largest that is fast enough is looked for.

To add a resource: a subclass of `Resource`, and a field of `Convert` with
`limits=Limit("resource", unit)`; `tests/search/test_resource_contract.py` tries it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import inf
from operator import mul
from typing import Any, ClassVar

import torch

from tcompress.errors import PlanError
from tcompress.latency.paired_timing import threads
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.limits import Budget
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.planning.plain_widths import possible_widths, width_of, with_width
from tcompress.planning.planner import make_plan
from tcompress.planning.sites import Coupling, module_path
from tcompress.search.budgets import TRIES, BudgetProblem, approach
from tcompress.search.candidates import (
    NANOSECONDS,
    PARAMETERS,
    Candidate,
    SearchInputs,
    Site,
    narrow_layers,
)
from tcompress.search.predictions import Predictions
from tcompress.timing_model.clocks import LayerTimes, ModelClock, Workload, interpolated

CLOSE = 0.02  # of the ratio asked for: no better plan is looked for
FAR = 0.1  # of the ratio asked for, below it: perhaps it cannot be reached

RESOURCES: dict[str, type[Resource]] = {}  # by the unit that they are counted in


@dataclass(frozen=True, kw_only=True)
class Resource(ABC):
    """Something that a model takes, and its candidates, in whole numbers of a unit.

    Of models that have lost blocks or tokens, or have other attentions or word embeddings, before
    any layer changes, the dense one is what a budget is relative to (`whole`).
    """

    unit: ClassVar[str]  # its name among costs, and in the limit of its option
    stage: ClassVar[str] = "measuring layers"
    """What is done while candidates are priced, for people."""

    whole: Resource | None = None  # of the dense model as it was, where that is another one
    fewer: float = 1.0  # how many times less than that the dense model here takes

    def __init_subclass__(cls) -> None:
        RESOURCES[cls.unit] = cls

    @classmethod
    def measured(cls, inputs: SearchInputs) -> Resource:
        """Measure the model whose layers change, and the dense one where that is another."""
        source, recipe = inputs.source, inputs.recipe
        resource = cls.of(source, recipe, inputs.plan, inputs.device)
        if source is inputs.whole and not (recipe.attention or recipe.embeddings):
            return resource
        whole = cls.of(inputs.whole, recipe, Plan(layers=()), inputs.device)
        return replace(resource, whole=whole, fewer=whole.over(resource))

    @classmethod
    @abstractmethod
    def of(cls, source: SourceModel, recipe: Convert, plan: Plan, device: torch.device) -> Resource:
        """Measure the dense model."""

    @property
    @abstractmethod
    def dense(self) -> float:
        """What the dense model takes."""

    def over(self, other: Resource) -> float:
        """Measure how many times less than this dense model another one takes."""
        return self.dense / other.dense

    @property
    def where(self) -> str:
        """What it was measured on, for people."""
        return self.unit

    @abstractmethod
    def priced(self, predictions: Predictions) -> Predictions:
        """Add what they take to the costs of all candidates, and of layers as they are."""

    @abstractmethod
    def ratio(self, plan: Plan) -> float:
        """Measure how many times less than the dense model such a model takes."""

    @abstractmethod
    def reduction(self, budget: Budget) -> float:
        """Return how many times less than the dense model a model is to take."""

    def facts(self, ratio: float) -> dict[str, Any]:
        """Name what was measured, for the budget of a plan."""
        return {}

    def out_of_reach(self, budget: Budget, plan: Plan, ratio: float) -> PlanError:
        """Say that a budget is too small, and how small it may be."""
        lowest = budget.limit * self.reduction(budget) / ratio
        return PlanError(
            f"`{budget}` is out of reach: the smallest possible is {lowest:.3g} {self.unit}",
            "allow more, offer `--method width` or `auto`, or drop blocks too",
        )

    def asked(self, budget: Budget) -> float:
        """Return how many times less than the dense model here a model is to take."""
        return (self.whole or self).reduction(budget) / self.fewer

    def is_met(self, budget: Budget) -> bool:
        """Tell if no layer has to change, since the dense model here takes no more than allowed.

        Raises:
            PlanError: So does the dense model as it was.
        """
        reduction = (self.whole or self).reduction(budget)
        if reduction <= 1:
            takes = replace(budget, limit=budget.limit * reduction)
            raise PlanError(
                f"`{budget}` asks for nothing: the dense model takes no more than `{takes}`",
                "allow less than that",
            )
        return self.asked(budget) <= 1

    def facts_of(self, ratio: float) -> dict[str, Any]:
        """Name what was measured of a model, for the budget of a plan.

        It takes so many times less than the dense model here.
        """
        return (self.whole or self).facts(self.fewer * ratio)

    def rest(self, layers: Iterable[Site]) -> int:
        """Count what the dense model takes beside these layers."""
        # A machine that slowed down after the model was timed would tell less than nothing.
        return max(0, round(self.dense) - sum(site.dense[self.unit] for site in layers))

    def reach(self, problem: BudgetProblem) -> Plan:
        """Plan with room for layers until a model takes as little as is allowed.

        What candidates are predicted to take together is corrected by what whole models do.

        Raises:
            PlanError: No plan takes so little.
        """
        budget, tried = problem.recipe.resource_budget, list[tuple[Plan, float]]()
        assert budget is not None
        reduction, least = self.asked(budget), problem.least(self.unit)
        most = problem.most(self.unit)

        def placed(room: float) -> float:
            over = max((ratio / reduction - 1 for _, ratio in tried), default=0.0)
            if over < 0 and len(tried) >= (2 if over < -FAR else TRIES - 2):
                room = least  # whether it can be reached at all
            return max(least, min(most, round(room)))

        def fine() -> list[tuple[Plan, float]]:
            return [item for item in tried if item[1] >= reduction * (1 - CLOSE)]

        taken: dict[float, float] = {}
        aim = self.dense / reduction / (1 + CLOSE / 2)
        for room in approach(taken, problem.room, aim, placed):
            try:
                plan = replace(problem, room=round(room)).best()
            except PlanError:
                if not fine():
                    raise
                taken[room] = self.dense  # with so much room all layers stay as they are
                continue
            tried.append((plan, self.ratio(plan)))
            taken[room] = self.dense / tried[-1][1]
            # Another try tells less than the last ones where the machine is not at rest.
            above = CLOSE * len(tried) if len(tried) <= TRIES // 2 else inf
            if any(-CLOSE <= ratio / reduction - 1 <= above for _, ratio in tried):
                break
        if not fine():
            plan, ratio = max(tried, key=lambda item: item[1])
            raise (self.whole or self).out_of_reach(budget, plan, self.fewer * ratio)
        plan, ratio = min(fine(), key=lambda item: (item[1] < reduction, item[1]))
        return plan.with_facts(self.facts_of(ratio))


POINTS = 6  # sizes of a method that are timed, for each shape of layers
_NANO = 1e9


@dataclass(frozen=True)
class Time(Resource):
    """Time of a pass: layers are timed by themselves, planned models as a whole."""

    unit = NANOSECONDS
    stage = "timing layers"

    clock: ModelClock
    entries: Mapping[str, LayerPlan]  # by weight name in the checkpoint
    threads: int | None

    @classmethod
    def of(cls, source: SourceModel, recipe: Convert, plan: Plan, device: torch.device) -> Time:
        entries = {entry.key: entry for entry in plan.layers if entry.kind != "experts"}
        work, dtype = Workload.read(recipe.at), getattr(torch, recipe.dtype or "float32")
        # Those that a budget of bytes chooses are no part of all models.
        tables = plan.embeddings if recipe.embeddings else ()
        fixed = Plan(layers=(), attention=plan.attention, embeddings=tables)
        with threads(recipe.threads):
            named = recipe.at is not None
            longest = getattr(recipe.attention, "length", None)  # of the dense model's pass too
            limits: dict[str, Any] = {"named": named, "fixed": fixed, "longest": longest}
            clock = ModelClock(source, work, device, dtype, **limits)
        return cls(clock, entries, recipe.threads)

    @cached_property
    def times(self) -> LayerTimes:
        """Clock of layers by themselves."""
        return self.clock.layer_times(min(entry.in_features for entry in self.entries.values()))

    @property
    def dense(self) -> float:
        return _NANO * self.clock.seconds

    def over(self, other: Resource) -> float:
        assert isinstance(other, Time)
        with threads(self.threads):
            return self.clock.speedup_of(other.clock)

    @property
    def where(self) -> str:
        return str(self.clock.work)

    def ratio(self, plan: Plan) -> float:
        with threads(self.threads):
            return self.clock.speedups(plan)[0]

    def reduction(self, budget: Budget) -> float:
        return budget.limit if budget.kind == "speedup" else 1e3 * self.clock.seconds / budget.limit

    def facts(self, ratio: float) -> dict[str, Any]:
        return {"speedup": ratio, "at": self.where, "seconds": self.clock.seconds}

    def out_of_reach(self, budget: Budget, plan: Plan, ratio: float) -> PlanError:
        error = plan.budget and plan.budget.error
        lost = f", at a predicted error of {error:.2g}" if error is not None else ""
        return PlanError(
            f"`{budget}` is out of reach at {self.where}: the fastest candidates make "
            f"the model {ratio:.3g} x as fast{lost}",
            "allow more time, offer `--method width` or `auto`, or drop blocks too",
        )

    def priced(self, predictions: Predictions) -> Predictions:
        widths, timed = predictions.widths, [*predictions.widths]
        with threads(self.threads):
            seconds_of = self._beside([order.coupling for site in widths for order in site.orders])
            attentions = {site.key: seconds_of["attention"] for site in widths if site.is_attention}
            extra = defaultdict(float, attentions)  # beside structures all channels are there
            for index, site in sorted(enumerate(widths), key=lambda item: item[1].is_attention):
                if site.is_attention:  # by now all that it does beside products is known
                    heads = site.orders[0].coupling
                    of_head = sum(extra[key] for key in site.keys) / heads.size
                    beside = [of_head * size for size in heads.sizes]
                else:
                    fixed = sum(attentions.get(key, 0.0) for key in site.keys)
                    each = [seconds_of[order.coupling.kind] for order in site.orders]
                    beside = [fixed + sum(map(mul, each, sizes)) for sizes in site.sizes]
                    extra[site.key] += beside[-1] - fixed
                pairs = zip(site.candidates, beside, strict=True)
                costs = (round(self._products(item) + _NANO * seconds) for item, seconds in pairs)
                timed[index] = site.costing(self.unit, costs, 0)

            def of_layer(site: Site) -> Site:
                entry, nanos = self.entries[site.key], round(_NANO * extra.get(site.key, 0.0))
                of_methods = (self._timed(entry, site.of(name)) for name in site.methods)
                costs = [round(_NANO * seconds) + nanos for seconds in chain(*of_methods)]
                return site.costing(self.unit, costs, round(_NANO * self._unchanged(entry)) + nanos)

            parts = (predictions.layers, predictions.singly)
            layers, singly = (tuple(map(of_layer, sites)) for sites in parts)
            return replace(predictions, layers=layers, singly=singly, widths=tuple(timed))

    def _beside(self, couplings: Sequence[Coupling]) -> dict[str, float]:
        """Seconds beside products: of a neuron, a dimension of heads, an attention as such.

        Models without feed-forwards, and without attentions, say what these take as a whole: more
        than their products by themselves, or less, and then all products are less.
        """
        neurons = {c: 0 for c in couplings if c.kind == "neurons" and 0 in c.sizes}
        heads = {c: 0 for c in couplings if c.kind == "heads" and 0 in c.sizes}
        inner = {c: c.near(0.25) for c in couplings if c.kind in ("values", "scores")}
        source, planned = self.clock.source, self.entries.values()
        entries = {module_path(source, entry.name): entry for entry in planned}
        plans = [
            Plan(layers=tuple(narrow_layers(sizes, entries))) for sizes in (neurons, heads, inner)
        ]
        speeds = iter(self.clock.speedups(*(plan for plan in plans if plan.layers)))
        saved = [
            self.clock.seconds * (1 - 1 / next(speeds)) if plan.layers else 0.0 for plan in plans
        ]
        of_both, products = sum(saved[:2]), sum(map(self._products_saved, plans[:2]))
        if of_both < products:
            self.times.share *= max(0.0, of_both) / products
        of_neurons, of_attentions, of_inner = (
            seconds - self._products_saved(plan) for seconds, plan in zip(saved, plans, strict=True)
        )
        dimension = max(0.0, of_inner) / max(1, sum(c.size - size for c, size in inner.items()))
        whole = {layer for coupling in heads for layer in coupling.layers}
        of_attentions -= dimension * sum(c.size for c in inner if whole.issuperset(c.layers))
        return {
            "neurons": max(0.0, of_neurons) / max(1, sum(coupling.size for coupling in neurons)),
            "values": dimension,
            "scores": dimension,
            "attention": max(0.0, of_attentions) / max(1, len(heads)),
        }

    def _products_saved(self, plan: Plan) -> float:
        return sum(self._unchanged(entry) - self._narrowed(entry) for entry in plan.layers)

    def _timed(self, entry: LayerPlan, candidates: Sequence[Candidate]) -> list[float]:
        """Seconds that forms of a layer take; few are timed."""
        sizes = [item.costs[PARAMETERS] for item in candidates]
        forms = [item.form for item in candidates]
        return interpolated(sizes, lambda index: self.times.of(forms[index], entry.bias), POINTS)

    def _products(self, item: Candidate) -> float:
        forms = ((self.entries[key], form) for key, form in item.forms if form)
        narrow = (entry.model_copy(update=form._asdict()) for entry, form in forms)
        return _NANO * sum(map(self._narrowed, narrow))

    def _unchanged(self, entry: LayerPlan) -> float:
        return self.times.matrix(entry.in_features, entry.out_features, entry)

    def _narrowed(self, entry: LayerPlan) -> float:
        return self.times.matrix(entry.inputs_left, entry.outputs_left, entry)


def plan_in_time(inputs: SearchInputs) -> Plan:
    """Plan the largest width of a plain model with which a pass is as fast as asked for.

    Time is taken to grow evenly between two widths that were timed; a size may be limited too.
    """
    source, recipe, plan = inputs.source, inputs.recipe, inputs.plan
    budget, widths = recipe.time_budget, possible_widths(source)
    assert budget is not None
    time = Time.measured(inputs)
    speedup = time.asked(budget)
    if recipe.budget == budget and time.is_met(budget):
        facts = {**time.facts_of(1.0), "chosen": "uniform", "fraction": 1.0}
        dense = make_plan(recipe.without_method, source, plan.method)
        return dense.model_copy(update={"budget": plan.budget}).with_facts(facts)

    def timed(width: int) -> tuple[Plan, float]:
        narrow = make_plan(with_width(recipe, width / widths.stop), source, plan.method)
        return narrow, time.ratio(narrow)

    widest = widths[-1] if recipe.budget == budget else width_of(plan)
    chosen, speed = _fast_enough(widths, widest, timed, speedup)
    if speed < speedup:
        raise PlanError(
            f"`{budget}` is out of reach of a plain model at {time.where}: with "
            f"{widths[0]} neurons {time.fewer * speed:.3g} x was reached",
            "allow more time, drop blocks too, or leave `--plain` out",
        )
    facts = {**time.facts_of(speed), "chosen": "uniform", "fraction": chosen.kept}
    return chosen.model_copy(update={"budget": plan.budget}).with_facts(facts)


def _fast_enough(
    widths: range, widest: int, timed: Callable[[int], tuple[Plan, float]], speedup: float
) -> tuple[Plan, float]:
    """Look for the largest width of this speed; take the smallest where none has it."""
    tried: dict[float, tuple[Plan, float]] = {}
    seconds = {float(widths.stop): 1.0}

    def largest() -> float:
        return max((width for width, (_, speed) in tried.items() if speed >= speedup), default=0)

    def placed(width: float) -> float:
        steps = max(int(width) // widths.step, largest() // widths.step + 1)
        return min(widest, steps * widths.step)

    for width in approach(seconds, widths[0], 1 / speedup, placed):
        tried[width] = timed(int(width))
        seconds[width] = 1 / tried[width][1]
        if not largest() or tried[largest()][1] <= (1 + CLOSE) * speedup:
            break
    return tried[largest() or widths[0]]
