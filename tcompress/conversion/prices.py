"""What candidates cost in time: layers by themselves, and models of planned forms as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tcompress.conversion.candidates import LayerCandidates
from tcompress.conversion.channels import WidthSite, forms_of
from tcompress.errors import PlanError
from tcompress.latency.predicted import (
    USUAL_PASS,
    LayerTimes,
    ModelClock,
    Workload,
    interpolated,
)
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.convert_options import Budget
from tcompress.planning.channels import Coupling
from tcompress.planning.entries import Form, LayerPlan, Plan
from tcompress.planning.knapsack import Option

POINTS = 6  # sizes of a method that are timed, for each shape of layers
TRIES = 4  # plans of one answer, each with the time that the last one missed made up for
CLOSE = 0.02  # of the speed asked for: no better plan is looked for

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
        slopes = self._slopes([coupling for site in widths for coupling in site.couplings])
        extra = {}  # beside structures all channels are there
        for site in widths:
            beside = [_NANO * sum(map(_times(slopes), site.couplings, own)) for own in site.sizes]
            extra[site.keys[0]] = round(beside[-1])
            site.options = [
                replace(own, time=round(self._products(own.label) + more))  # type: ignore[arg-type]
                for own, more in zip(site.options, beside, strict=True)
            ]
        for item in layers:
            entry, more = self.entries[item.key], extra.get(item.key, 0)
            item.time = round(_NANO * self._dense(entry)) + more
            for offers in (item.offers, item.quick, item.alone):
                for name, options in offers.items():
                    offers[name] = self._priced(entry, options, more)

    def rest(self, layers: Iterable[LayerCandidates]) -> int:
        """Time of the dense model that none of these layers takes."""
        return round(_NANO * self.clock.seconds) - sum(item.time for item in layers)

    def _slopes(self, couplings: Sequence[Coupling]) -> dict[bool, float]:
        """Seconds that a neuron, and a dimension of heads, takes beside products."""
        return {
            neurons: self._slope([c for c in couplings if (c.kind == "neurons") == neurons])
            for neurons in (True, False)
        }

    def _slope(self, couplings: Sequence[Coupling]) -> float:
        chosen = {own: own.near(0.25) for own in couplings}
        fewer = sum(own.size - size for own, size in chosen.items())
        if not fewer:
            return 0.0
        forms = forms_of(chosen, {self._path(e): e for e in self.entries.values()})
        narrow = [(self.entries[key], form) for key, form in forms]
        plan = Plan(layers=tuple(e.model_copy(update=form._asdict()) for e, form in narrow))
        saved = self.clock.seconds * (1 - 1 / self.clock.speedup(plan))
        products = sum(self._dense(entry) - self._matrix(entry, form) for entry, form in narrow)
        return max(0.0, (saved - products) / fewer)

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


def _times(slopes: Mapping[bool, float]) -> Callable[[Coupling, int], float]:
    return lambda coupling, size: slopes[coupling.kind == "neurons"] * size


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

    def reach(self, solve: Callable[[int], Plan], rest: int) -> tuple[Plan, float]:
        """Plans with room for layers, in nanoseconds, until a model is as fast as asked for.

        Gives the plan and its speed; `rest` is what the model takes beside these layers.
        """
        whole = _NANO * self.clock.seconds
        allowed = whole / self.speedup
        room = allowed - rest
        best: tuple[Plan, float] | None = None
        for _ in range(TRIES):
            if room <= 0:
                break
            try:
                plan = solve(round(room))
            except PlanError:
                if best is None:
                    raise
                break
            speed = self.clock.speedup(plan)
            if (
                best is None
                or (speed >= self.speedup) > (best[1] >= self.speedup)
                or (speed >= self.speedup and speed < best[1])
            ):
                best = plan, speed
            if 0 <= speed / self.speedup - 1 <= CLOSE:
                break
            room -= whole / speed - allowed / (1 + CLOSE / 2)
        if best is None or best[1] < self.speedup * (1 - CLOSE):
            raise self._out_of_reach(best)
        return best

    def _out_of_reach(self, best: tuple[Plan, float] | None) -> PlanError:
        most = f": at most {best[1]:.3g} x was reached" if best else ""
        return PlanError(
            f"`{self.budget}` is out of reach at {self.clock.work}{most}",
            "allow more time, offer `--method width` or `auto`, or drop blocks too",
        )
