"""What candidates cost in time: layers by themselves, and models of planned forms as a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch

from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.convert_options import Budget
from tcompress.planning.couplings import Coupling, Kind
from tcompress.planning.entries import Form, LayerPlan, Plan
from tcompress.search.knapsack import Option
from tcompress.search.predict import LayerCandidates
from tcompress.search.width import WidthSite, forms_of
from tcompress.timing_model.clocks import (
    USUAL_PASS,
    LayerTimes,
    ModelClock,
    Workload,
    interpolated,
)

POINTS = 6  # sizes of a method that are timed, for each shape of layers
TRIES = 3  # plans of one answer, each with the time that the last one missed made up for
CLOSE = 0.02  # of the speed asked for: no better plan is looked for
FAR = 0.1  # of the speed asked for, below it: perhaps it cannot be reached

_NANO = 1e9


def clock_of(source: SourceModel, recipe: Convert, device: torch.device) -> ModelClock:
    """Times a dense model at the pass that a recipe is about."""
    work, dtype = Workload.read(recipe.at or USUAL_PASS), getattr(torch, recipe.dtype or "float32")
    return ModelClock(source, work, device, dtype, named=recipe.at is not None)


@dataclass
class Prices:
    """Times of the candidates of one model, in nanoseconds."""

    clock: ModelClock
    times: LayerTimes
    entries: Mapping[str, LayerPlan]  # by weight name in the checkpoint

    def price(self, layers: Iterable[LayerCandidates], widths: Sequence[WidthSite]) -> None:
        """Gives all options their time."""
        beside = self._beside([coupling for site in widths for coupling in site.couplings])
        attentions = {site.keys[0]: beside["attention"] for site in widths if site.is_attention}
        extra = defaultdict(float, attentions)  # beside structures all channels are there
        for site in sorted(widths, key=lambda site: site.is_attention):
            if site.is_attention:  # by now all that it does beside products is known
                [heads] = site.couplings
                one = sum(extra[key] for key in site.keys) / heads.size
                more = [one * size for size in heads.sizes]
            else:
                fixed = sum(attentions.get(key, 0.0) for key in site.keys)
                kinds = [coupling.kind for coupling in site.couplings]
                more = [
                    fixed + sum(beside[kind] * size for kind, size in zip(kinds, own, strict=True))
                    for own in site.sizes
                ]
                extra[site.keys[0]] += more[-1] - fixed
            site.options = [
                replace(own, time=round(self._products(own.label) + _NANO * seconds))  # type: ignore[arg-type]
                for own, seconds in zip(site.options, more, strict=True)
            ]
        for item in layers:
            entry, nanos = self.entries[item.key], round(_NANO * extra.get(item.key, 0.0))
            item.time = round(_NANO * self._dense(entry)) + nanos
            for offers in (item.offers, item.quick, item.alone):
                for name, options in offers.items():
                    offers[name] = self._priced(entry, options, nanos)

    def rest(self, layers: Iterable[LayerCandidates]) -> int:
        """Time of the dense model that none of these layers takes.

        None at least: a machine that slowed down after the model was timed tells less than nothing.
        """
        return max(0, round(_NANO * self.clock.seconds) - sum(item.time for item in layers))

    def _beside(self, couplings: Sequence[Coupling]) -> dict[str, float]:
        """Seconds beside products: of a neuron, a dimension of heads, an attention as such.

        Models without feed-forwards, and without attentions, say what these take as a whole: more
        than their products by themselves, or less, and then all products are less.
        """
        kinds: tuple[Kind, ...] = ("neurons", "heads")
        gone = [{c: 0 for c in couplings if c.kind == kind and 0 in c.sizes} for kind in kinds]
        inner = [own for own in couplings if own.kind in ("values", "scores")]
        narrow = {own: own.near(0.25) for own in inner}
        *taken, narrower = self._saved(*gone, narrow)
        products = [self._products_saved(own) for own in gone]
        if sum(taken) < sum(products):
            self.times.share *= max(0.0, sum(taken)) / sum(products)
        neurons, attentions = (
            seconds - self._products_saved(own) for seconds, own in zip(taken, gone, strict=True)
        )
        more = narrower - self._products_saved(narrow)
        dimension = max(0.0, more) / max(1, sum(own.size - narrow[own] for own in inner))
        inside = {layer for own in gone[1] for layer in own.layers}
        attentions -= dimension * sum(own.size for own in inner if inside.issuperset(own.layers))
        return {
            "neurons": max(0.0, neurons) / max(1, sum(own.size for own in gone[0])),
            "values": dimension,
            "scores": dimension,
            "attention": max(0.0, attentions) / max(1, len(gone[1])),
        }

    def _saved(self, *sizes: Mapping[Coupling, int]) -> list[float]:
        """Seconds that models of these sizes save."""
        plans = [
            Plan(layers=tuple(e.model_copy(update=form._asdict()) for e, form in own))
            for own in map(self._narrow, filter(None, sizes))
        ]
        speeds = iter(self.clock.speedups(*plans) if plans else ())
        return [self.clock.seconds * (1 - 1 / next(speeds)) if own else 0.0 for own in sizes]

    def _products_saved(self, chosen: Mapping[Coupling, int]) -> float:
        pairs = self._narrow(chosen)
        return sum(self._dense(entry) - self._matrix(entry, form) for entry, form in pairs)

    def _narrow(self, chosen: Mapping[Coupling, int]) -> list[tuple[LayerPlan, Form]]:
        forms = forms_of(chosen, {self._path(e): e for e in self.entries.values()})
        return [(self.entries[key], form) for key, form in forms]

    def _path(self, entry: LayerPlan) -> str:
        name = self.clock.source.keymap.runtime_name(entry.name) or entry.name
        return f"{name}.{entry.parameter}"

    def _priced(self, entry: LayerPlan, options: Sequence[Option], more: int) -> list[Option]:
        order = sorted(range(len(options)), key=lambda index: options[index].cost)
        found = interpolated(
            [options[index].cost for index in order],
            lambda place: self.times.of(Form(options[order[place]].label), entry.bias),  # type: ignore[arg-type]
            POINTS,
        )
        seconds = dict(zip(order, found, strict=True))
        return [
            replace(own, time=round(_NANO * seconds[index]) + more)
            for index, own in enumerate(options)
        ]

    def _products(self, label: Iterable[tuple[str, Form]]) -> float:
        return _NANO * sum(self._matrix(self.entries[key], form) for key, form in label)

    def _dense(self, entry: LayerPlan) -> float:
        return self.times.matrix(entry.in_features, entry.out_features, entry)

    def _matrix(self, entry: LayerPlan, form: Form) -> float:
        inputs = form.parts[0].terms[0].in_features
        return self.times.matrix(inputs, sum(part.out_features for part in form.parts), entry)


@dataclass(frozen=True)
class TimeGoal:
    """A pass that is to be so fast; what it is predicted to take is corrected by whole models."""

    budget: Budget
    clock: ModelClock

    @property
    def speedup(self) -> float:
        """How many times as fast as the dense model a pass is to be."""
        if self.budget.kind == "speedup":
            return self.budget.limit
        return 1e3 * self.clock.seconds / self.budget.limit

    def room(self, rest: int) -> float:
        """Nanoseconds for layers, as far as single times add up; `rest` is for all else."""
        return _NANO * self.clock.seconds / self.speedup - rest

    def reach(self, solve: Callable[[int], Plan], rest: int, least: int) -> tuple[Plan, float]:
        """Plans with room for layers, in nanoseconds, until a model is as fast as asked for.

        Gives the plan and its speed; `rest` is what the model takes beside these layers, `least`
        what their fastest candidates take.
        """
        tried: dict[int, tuple[Plan, float]] = {}
        room = self.room(rest)
        for attempt in range(2 * TRIES):
            room = max(least, round(room))
            if room in tried:
                break
            plan = solve(room)
            [speed] = self.clock.speedups(plan)
            tried[room] = plan, speed
            # Another try tells less than the last ones where the machine is not at rest.
            most = CLOSE * min(TRIES, 1 + attempt) if attempt < TRIES else inf
            over = [speed / self.speedup - 1 for _, speed in tried.values()]
            if any(-CLOSE <= own <= most for own in over):
                break
            room = self._next({own: speed for own, (_, speed) in tried.items()}, room)
            far = max(over) < -FAR and attempt + 2 >= TRIES
            if max(over) < 0 and (far or attempt + TRIES >= 2 * TRIES):
                room = least  # whether it can be reached at all
        fast = [own for own in tried.values() if own[1] >= self.speedup * (1 - CLOSE)]
        if not fast:
            raise self._out_of_reach(*max(tried.values(), key=lambda own: own[1]))
        return min(fast, key=lambda own: (own[1] < self.speedup, own[1]))

    def _next(self, speeds: Mapping[int, float], last: float) -> float:
        """Room that is to have the speed asked for, by what others had."""
        whole = _NANO * self.clock.seconds
        aim = whole / self.speedup / (1 + CLOSE / 2)
        slow = {room: whole / own for room, own in speeds.items() if whole / own > aim}
        fast = {room: whole / own for room, own in speeds.items() if room not in slow}
        if not slow or not fast:
            return last + aim - whole / speeds[round(last)]
        low, high = max(fast), min(slow)
        share = (aim - fast[low]) / (slow[high] - fast[low])
        return low + share * (high - low)

    def _out_of_reach(self, plan: Plan, speed: float) -> PlanError:
        error = plan.budget and plan.budget.error
        lost = f", at a predicted error of {error:.2g}" if error is not None else ""
        return PlanError(
            f"`{self.budget}` is out of reach at {self.clock.work}: the fastest candidates make "
            f"the model {speed:.3g} x as fast{lost}",
            "allow more time, offer `--method width` or `auto`, or drop blocks too",
        )
