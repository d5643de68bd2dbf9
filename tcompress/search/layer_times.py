"""What candidates cost in time: layers by themselves, and models of planned forms as a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tcompress.errors import PlanError
from tcompress.latency.paired_timing import threads
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.limits import Budget
from tcompress.planning.couplings import Coupling, Kind
from tcompress.planning.entries import Form, LayerPlan, Plan
from tcompress.search.candidates import NANOSECONDS, PARAMETERS, Candidate, Forms, Site, WidthSite
from tcompress.search.predictions import Predictions
from tcompress.search.resources import Resource
from tcompress.search.width import forms_of
from tcompress.timing_model.clocks import (
    USUAL_PASS,
    LayerTimes,
    ModelClock,
    Workload,
    interpolated,
)

POINTS = 6  # sizes of a method that are timed, for each shape of layers

_NANO = 1e9


def clock_of(source: SourceModel, recipe: Convert, device: torch.device) -> ModelClock:
    """Times a dense model at the pass that a recipe is about."""
    work, dtype = Workload.read(recipe.at or USUAL_PASS), getattr(torch, recipe.dtype or "float32")
    return ModelClock(source, work, device, dtype, named=recipe.at is not None)


def speedup_asked(budget: Budget, clock: ModelClock) -> float:
    """Return how many times as fast as the dense model a pass is to be."""
    return budget.limit if budget.kind == "speedup" else 1e3 * clock.seconds / budget.limit


@dataclass(frozen=True)
class Time(Resource):
    """Time of a pass: layers are timed by themselves, planned models as a whole."""

    unit = NANOSECONDS
    stage = "timing layers"

    clock: ModelClock
    times: LayerTimes
    entries: Mapping[str, LayerPlan]  # by weight name in the checkpoint
    threads: int | None

    @classmethod
    def of(cls, source: SourceModel, recipe: Convert, plan: Plan, device: torch.device) -> Time:
        """Time the dense model in the pass that a recipe is about."""
        entries = {entry.key: entry for entry in plan.layers if entry.kind != "experts"}
        width = min(entry.in_features for entry in entries.values())
        with threads(recipe.threads):
            clock = clock_of(source, recipe, device)
            return cls(clock, clock.layer_times(width), entries, recipe.threads)

    @property
    def whole(self) -> float:
        """Nanoseconds of the dense model."""
        return _NANO * self.clock.seconds

    @property
    def where(self) -> str:
        """The pass, for people."""
        return str(self.clock.work)

    def ratios(self, *plans: Plan) -> list[float]:
        """Measure how many times as fast as the dense model such models are, weights aside."""
        with threads(self.threads):
            return self.clock.speedups(*plans)

    def asked(self, budget: Budget) -> float:
        """Return how many times as fast a pass is to be."""
        return speedup_asked(budget, self.clock)

    def facts(self, ratio: float) -> dict[str, Any]:
        """Name what was measured, for the budget of a plan."""
        return {"speedup": ratio, "at": self.where, "seconds": self.clock.seconds}

    def out_of_reach(self, budget: Budget, plan: Plan, ratio: float) -> PlanError:
        """Say how fast the model can be at most, and what that would lose."""
        error = plan.budget and plan.budget.error
        lost = f", at a predicted error of {error:.2g}" if error is not None else ""
        return PlanError(
            f"`{budget}` is out of reach at {self.where}: the fastest candidates make "
            f"the model {ratio:.3g} x as fast{lost}",
            "allow more time, offer `--method width` or `auto`, or drop blocks too",
        )

    def priced(self, predictions: Predictions) -> Predictions:
        """Add their time to the costs of all candidates."""
        with threads(self.threads):
            return self._priced(predictions)

    def _priced(self, predictions: Predictions) -> Predictions:
        widths = predictions.widths
        seconds_of = self._beside([order.coupling for site in widths for order in site.orders])
        attentions = {site.key: seconds_of["attention"] for site in widths if site.is_attention}
        extra = defaultdict(float, attentions)  # beside structures all channels are there
        timed: dict[int, WidthSite] = {}
        for index in sorted(range(len(widths)), key=lambda index: widths[index].is_attention):
            site = widths[index]
            if site.is_attention:  # by now all that it does beside products is known
                heads = site.orders[0].coupling
                of_head = sum(extra[key] for key in site.keys) / heads.size
                extras = [of_head * size for size in heads.sizes]
            else:
                fixed = sum(attentions.get(key, 0.0) for key in site.keys)
                kinds = [order.coupling.kind for order in site.orders]
                extras = [
                    fixed + sum(seconds_of[kind] * n for kind, n in zip(kinds, sizes, strict=True))
                    for sizes in site.sizes
                ]
                extra[site.key] += extras[-1] - fixed
            candidates = (
                item.costing(self.unit, round(self._products(item.forms) + _NANO * seconds))
                for item, seconds in zip(site.candidates, extras, strict=True)
            )
            timed[index] = replace(site, candidates=tuple(candidates))

        def of_layer(site: Site) -> Site:
            entry, nanos = self.entries[site.key], round(_NANO * extra.get(site.key, 0.0))
            candidates: dict[int, Candidate] = {}
            for name in site.methods:
                places = [n for n, item in enumerate(site.candidates) if item.method == name]
                offered = self._layer_candidates(entry, site.of(name), nanos)
                candidates |= dict(zip(places, offered, strict=True))
            dense = {**site.dense, NANOSECONDS: round(_NANO * self._dense(entry)) + nanos}
            ordered = tuple(candidates[index] for index in range(len(candidates)))
            return replace(site, candidates=ordered, dense=dense)

        tables = (predictions.layers, predictions.alone, predictions.quick)
        layers, single, quick = (tuple(map(of_layer, sites)) for sites in tables)
        timed_widths = tuple(timed[index] for index in range(len(widths)))
        return replace(predictions, layers=layers, alone=single, quick=quick, widths=timed_widths)

    def _beside(self, couplings: Sequence[Coupling]) -> dict[str, float]:
        """Seconds beside products: of a neuron, a dimension of heads, an attention as such.

        Models without feed-forwards, and without attentions, say what these take as a whole: more
        than their products by themselves, or less, and then all products are less.
        """
        kinds: tuple[Kind, ...] = ("neurons", "heads")
        gone = [{c: 0 for c in couplings if c.kind == kind and 0 in c.sizes} for kind in kinds]
        inner = [coupling for coupling in couplings if coupling.kind in ("values", "scores")]
        narrow = {coupling: coupling.near(0.25) for coupling in inner}
        *saved, narrower = self._saved(*gone, narrow)
        products = [self._products_saved(coupling) for coupling in gone]
        if sum(saved) < sum(products):
            self.times.share *= max(0.0, sum(saved)) / sum(products)
        neurons, attentions = (
            seconds - self._products_saved(coupling)
            for seconds, coupling in zip(saved, gone, strict=True)
        )
        rest = narrower - self._products_saved(narrow)
        dimension = max(0.0, rest) / max(
            1, sum(coupling.size - narrow[coupling] for coupling in inner)
        )
        attention_layers = {layer for coupling in gone[1] for layer in coupling.layers}
        attentions -= dimension * sum(
            coupling.size for coupling in inner if attention_layers.issuperset(coupling.layers)
        )
        return {
            "neurons": max(0.0, neurons) / max(1, sum(coupling.size for coupling in gone[0])),
            "values": dimension,
            "scores": dimension,
            "attention": max(0.0, attentions) / max(1, len(gone[1])),
        }

    def _saved(self, *sizes: Mapping[Coupling, int]) -> list[float]:
        """Seconds that models of these sizes save."""
        plans = [
            Plan(layers=tuple(e.model_copy(update=form._asdict()) for e, form in pairs))
            for pairs in map(self._narrow, filter(None, sizes))
        ]
        speeds = iter(self.clock.speedups(*plans) if plans else ())
        return [self.clock.seconds * (1 - 1 / next(speeds)) if pairs else 0.0 for pairs in sizes]

    def _products_saved(self, chosen: Mapping[Coupling, int]) -> float:
        pairs = self._narrow(chosen)
        return sum(self._dense(entry) - self._matrix(entry, form) for entry, form in pairs)

    def _narrow(self, chosen: Mapping[Coupling, int]) -> list[tuple[LayerPlan, Form]]:
        forms = forms_of(chosen, {self._path(e): e for e in self.entries.values()})
        return [(self.entries[key], form) for key, form in forms]

    def _path(self, entry: LayerPlan) -> str:
        name = self.clock.source.keymap.runtime_name(entry.name) or entry.name
        return f"{name}.{entry.parameter}"

    def _layer_candidates(
        self, entry: LayerPlan, candidates: Sequence[Candidate], nanos: int
    ) -> list[Candidate]:
        sizes = [item.costs[PARAMETERS] for item in candidates]
        order = sorted(range(len(candidates)), key=lambda index: sizes[index])
        measured = interpolated(
            [sizes[index] for index in order],
            lambda place: self.times.of(candidates[order[place]].form, entry.bias),
            POINTS,
        )
        seconds = dict(zip(order, measured, strict=True))
        return [
            item.costing(self.unit, round(_NANO * seconds[index]) + nanos)
            for index, item in enumerate(candidates)
        ]

    def _products(self, forms: Forms) -> float:
        return _NANO * sum(self._matrix(self.entries[key], form) for key, form in forms if form)

    def _dense(self, entry: LayerPlan) -> float:
        return self.times.matrix(entry.in_features, entry.out_features, entry)

    def _matrix(self, entry: LayerPlan, form: Form) -> float:
        inputs = form.parts[0].terms[0].in_features
        return self.times.matrix(inputs, sum(part.out_features for part in form.parts), entry)
