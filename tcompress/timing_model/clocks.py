"""Clocks of a model: what layers of a form take, and what a model of such layers takes as a whole.

A layer of a form is timed by itself, at the rows that a pass of the model gives it; forms in
between two sizes are interpolated. What is no layer (activations, attention, norms, embeddings) is
what the model takes beyond its layers. The sum misses what layers do to each other, in caches above
all: so a model of the planned forms is built, with any weights, and timed as well.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, product
from statistics import median
from typing import Any

import torch
from torch import nn

from tcompress import processes
from tcompress.artifact.disk_cache import fingerprint
from tcompress.errors import InputError, first_line
from tcompress.hf.build import install_attention, install_layers
from tcompress.latency.generation import Generation
from tcompress.latency.passes import Pass, forward_pass, spread, turns, waiting
from tcompress.latency.sizes import RandomInputs, sequence_length
from tcompress.models import SourceModel
from tcompress.models.narrower import with_keys
from tcompress.planning.entries import LayerForm, LayerPlan, Plan
from tcompress.structures.modules.linear import PartLayout, StructuredLinear
from tcompress.structures.width import plain_layout
from tcompress.timing_model.random_weights import RandomWeights
from tcompress.timing_model.timing_cache import TimingCache

USUAL_PASS = "32x128"
"""The pass that time counts of, where none is named."""
DECODE = "decode"
PAST = 128  # tokens before those that are decoded
STEPS = 4  # tokens that are decoded in a row, each of them the pass
REPEATS = 9
FEWEST = 3  # repeats, where a pass is long
MOST_SECONDS = 3.0  # for one model, where the machine does not come to rest
_DENSE = "dense"
_SURE = 0.015  # standard error of a speed that is believed
_LEAST = 4e-3  # seconds that one measurement of a layer takes at least


@dataclass(frozen=True)
class Workload:
    """The pass that time is counted of."""

    batch: int
    length: int
    decodes: bool = False  # one token for each sequence, after so many others

    @classmethod
    def read(cls, text: str | None) -> Workload:
        """Read `32x128`, or `decode`; without either the usual pass; raises `ValueError`."""
        text = USUAL_PASS if text is None else text
        if text == DECODE:
            return cls(1, PAST, decodes=True)
        if not re.fullmatch(r"[1-9][0-9]{0,5}x[1-9][0-9]{0,5}", text):
            raise ValueError(f"`{text}` is no batch and length such as `32x128`, nor `{DECODE}`")
        batch, length = map(int, text.split("x"))
        return cls(batch, length)

    def __str__(self) -> str:
        return DECODE if self.decodes else f"{self.batch}x{self.length}"


@dataclass
class ModelClock:
    """Clock of a dense model, and of models of the same shape whose layers have other forms.

    Dense are its layers: attentions and word embeddings may have other forms (`fixed`) from the
    start, and then they are part of all that is timed.
    """

    source: SourceModel
    work: Workload
    device: torch.device
    dtype: torch.dtype = torch.float32
    named: bool = True
    """True where a user named the pass; if not, texts are as long as the model allows."""
    fixed: Plan = field(default_factory=lambda: Plan(layers=()))
    """Attentions and word embeddings that all models have, whatever becomes of their layers."""
    longest: int | None = None
    """Most tokens of a pass that nobody named, where attentions are of one length."""

    def __post_init__(self) -> None:
        self._weights = RandomWeights(self.device, self.dtype)
        self._dense = self._start()
        self._wait = waiting(self.device)
        random_inputs = RandomInputs.of(self.source, self.source)
        self._kinds = random_inputs.inputs
        self.work = self._fitting(random_inputs)
        size = self.work.batch, self.work.length
        self.rows = self.work.batch
        """Rows that a layer reads in a pass."""
        with self._running():
            self._inputs = random_inputs.batch(*size, 0, self.device, self.dtype)
            if not self.work.decodes:
                self.rows *= sequence_length(self.source, self._dense, self._inputs)
        config = self.source.config.to_json_string(use_diff=False)
        model = (self.source.model_class.__name__, config, *_names_of(self.fixed))
        self.key = fingerprint(*model)
        """Names what the dense model takes its time for."""
        self._cache = TimingCache.of(self.device, *model, str(self.work), self.dtype)
        if _DENSE not in self._cache.values:
            self._cache.values[_DENSE] = processes.first(lambda: self._median(self._dense))
        self.seconds = self._cache.values[_DENSE]
        """Of one pass of the dense model."""

    def _fitting(self, random_inputs: RandomInputs) -> Workload:
        """The pass at a length that the model has positions for."""
        work, kind = self.work, self.source.model_class
        if work.decodes and (self._kinds.decoder or not kind.can_generate()):
            raise InputError(
                f"`--at {DECODE}` is for models that generate text and have no encoder, not a "
                f"`{kind.__name__}`",
                "give a batch and a length, such as `--at 32x128`",
            )
        if self.named and random_inputs.has_length and not work.decodes:
            random_inputs.check([work.length])
        length, new_tokens = work.length, STEPS if work.decodes else 0
        if not self.named and self.longest is not None:
            length = min(length, self.longest)
        return replace(work, length=random_inputs.fitting([length], new_tokens)[0])

    def speedups(self, *plans: Plan) -> list[float]:
        """Speed of models of these forms over that of the dense one; all are timed in turn."""
        keys = [_key_of(plan) for plan in plans]
        new = {k: p for k, p in zip(keys, plans, strict=True) if k not in self._cache.values}

        def measure() -> list[float]:
            models = [*map(self._small, new.values())]
            with torch.inference_mode():
                return self._ratios([*map(self._pass, models)])

        if new:
            self._cache.values.update(zip(new, processes.first(measure), strict=True))
        self._cache.keep()
        return [self._cache.values[key] for key in keys]

    def speedup_of(self, other: ModelClock) -> float:
        """Speed of another dense model over that of this one; both are timed in turn."""
        if other.key not in self._cache.values:
            [speed] = processes.first(lambda: self._ratios([other._pass(other._dense)]))
            self._cache.values[other.key] = speed
            self._cache.keep()
        return self._cache.values[other.key]

    def layer_times(self, width: int) -> LayerTimes:
        """Make times of layers, which count in units of a layer of this width beside the model."""
        measured = self._cache.values
        times = LayerTimes(self.rows, width, self.device, self.dtype, measured)
        if times.unit_key not in measured:
            [ratio] = processes.first(lambda: self._ratios([times.unit_pass]))
            measured[times.unit_key] = self.seconds / ratio
        return times

    def _ratios(self, passes: Sequence[Pass]) -> list[float]:
        """The dense model's time over that of passes, all timed in turn."""
        ratios: list[list[float]] = [[] for _ in passes]
        with torch.inference_mode():
            for run in passes:
                run()
            start = time.perf_counter()
            timed = turns([self._pass(self._dense), *passes], wait=self._wait)
            for dense, *seconds_of_passes in timed:
                for ratios_of_pass, seconds in zip(ratios, seconds_of_passes, strict=True):
                    ratios_of_pass.append(dense / seconds)
                if all(map(_settled, ratios)) or _late(start, len(ratios[0])):
                    break
        return [*map(median, ratios)]

    def _start(self) -> nn.Module:
        model, fixed = self._weights.model(self.source, self.source.config), self.fixed
        name, device = self.source.keymap.runtime_name, self.device
        install_attention(model, fixed.attention, name, dtype=self.dtype, device=device)
        install_layers(model, fixed.embeddings, name, dtype=self.dtype, device=device)
        if fixed.attention or fixed.embeddings:
            self._weights.fill(model)
        return model

    def _small(self, plan: Plan) -> nn.Module:
        if plan.plain is not None:
            return self._weights.model(self.source, with_keys(self.source, plan.plain).config)
        shared = {id(item): item for item in self._dense.parameters()}  # what is not replaced
        small, name = copy.deepcopy(self._dense, shared), self.source.keymap.runtime_name
        tables = [entry for entry in plan.embeddings if entry not in self.fixed.embeddings]
        entries = (*tables, *plan.layers)
        layers = install_layers(small, entries, name, dtype=self.dtype, device=self.device)
        for layer in layers.values():
            self._weights.fill(layer)
        return small

    def _median(self, model: nn.Module) -> float:
        with torch.inference_mode():
            with self._running():
                run = self._pass(model)
                run()
                run()
            timed = turns([run], wait=self._wait)
            start, times = time.perf_counter(), list[float]()
            while not (len(times) >= REPEATS or _late(start, len(times))):
                times += next(timed)
            return median(times)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Turn whatever drawing inputs or a model raises into an `InputError`."""
        try:
            yield
        except Exception as error:
            raise InputError(
                f"the model cannot run at {self.work} ({first_line(error)})",
                "give another `--at`",
            ) from error

    def _pass(self, model: nn.Module) -> Pass:
        if self.work.decodes:
            return Generation(model, self._kinds, self._inputs, STEPS).decoding()
        return forward_pass(model, self._kinds, self._inputs)


def _key_of(plan: Plan) -> str:
    """Name what a model of a plan's forms takes its time for."""
    layers = [(e.key, [(p.terms, p.channels) for p in e.parts], e.reads) for e in plan.entries]
    return fingerprint(layers, plan.plain)


def _names_of(fixed: Plan) -> tuple[str, ...]:
    """Name forms that models have from the start; dense ones need no name."""
    attention = [entry.model_dump_json() for entry in fixed.attention]
    return (*attention, _key_of(fixed)) if attention or fixed.embeddings else ()


def _late(start: float, repeats: int) -> bool:
    return repeats >= FEWEST and time.perf_counter() - start > MOST_SECONDS


def _settled(ratios: Sequence[float]) -> bool:
    """Tell from how far the middle half is apart if the median of these can be believed."""
    if len(ratios) < REPEATS:
        return False
    return (spread(ratios) or 0.0) / len(ratios) ** 0.5 < _SURE


@dataclass
class LayerTimes:
    """Seconds that layers of a form take by themselves; what was measured is not measured again.

    They count in units of one square layer, timed beside each of them and, to know what the unit
    is, beside the model: a machine that is slower for a while makes no layer dearer than others.
    """

    rows: int
    width: int  # of the unit
    device: torch.device
    dtype: torch.dtype = torch.float32
    measured: dict[str, float] = field(default_factory=dict)  # seconds by what was timed
    share: float = 1.0
    """Of these times, what layers take within a model."""

    def __post_init__(self) -> None:
        self.unit_key = f"unit of {self.width}"
        self.unit_pass = self._pass(nn.Linear(self.width, self.width, **self._factory_options))
        """One pass of the unit."""

    @property
    def _factory_options(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}

    def of(self, form: LayerForm, bias: bool = True) -> float:
        """Time one layer of a form."""

        def build() -> nn.Module:
            options = self._factory_options
            structured = StructuredLinear(form.parts, bias=bias, reads=form.reads, **options)
            with torch.no_grad():
                for parameter in structured.parameters():
                    parameter.uniform_(-0.02, 0.02)  # small numbers, as fast to multiply as any
            return structured.eval()

        parts = [(part.terms, part.channels) for part in form.parts]
        return self._seconds((parts, form.reads, bias), build)

    def matrix(self, inputs: int, outputs: int, like: LayerPlan) -> float:
        """Time a plain matrix that is no larger than a layer, between sizes that were timed."""
        corners = product(_around(inputs, like.in_features), _around(outputs, like.out_features))
        return sum(
            input_share * output_share * self._corner(input_size, output_size, like.bias)
            for (input_size, input_share), (output_size, output_share) in corners
        )

    def _corner(self, inputs: int, outputs: int, bias: bool) -> float:
        if not inputs or not outputs:  # which PyTorch's own layer warns of
            term = plain_layout(inputs, outputs)
            return self.of(LayerForm((PartLayout(name="", terms=(term,)),)), bias)
        options = (bias, self.device, self.dtype)
        return self._seconds((inputs, outputs, bias), lambda: nn.Linear(inputs, outputs, *options))

    def _seconds(self, named: object, build: Callable[[], nn.Module]) -> float:
        key = repr(named)
        if key not in self.measured:
            self.measured[key] = processes.first(lambda: self._measure(build()))
        return self.share * self.measured[key]

    def _measure(self, layer: nn.Module) -> float:
        run, wait = self._pass(layer), waiting(self.device)
        with torch.inference_mode():
            timed = islice(turns([run, self.unit_pass], wait=wait), 3)
            times, units = map(list, zip(*timed, strict=True))
            count = min(200, round(_LEAST / max(*times, 1e-9)))
            if count > 3:
                times = [run.seconds(wait=wait) for _ in range(count)]
                units += [self.unit_pass.seconds(wait=wait) for _ in range(3)]
        return self.measured[self.unit_key] * median(times) / median(units)

    def _pass(self, layer: nn.Module) -> Pass:
        inputs: Any = layer.in_features
        x = torch.randn(self.rows, inputs, **self._factory_options)
        return Pass(lambda _: layer(x))


def _around(size: int, largest: int) -> list[tuple[int, float]]:
    """Sizes to time beside a size, with their shares; eighths of the largest, and small ones."""
    step = max(1, largest // 8)
    low = size // step * step
    high = low + step
    if low == size or high > largest:
        return [(size, 1.0)]
    if not low:
        small = max(1, step // 4)
        low, high = (0, small) if size < small else (small, step)
    share = (size - low) / (high - low)
    return [(low, 1 - share), (high, share)]


def interpolated(
    sizes: Sequence[float], measure: Callable[[int], float], points: int
) -> list[float]:
    """Measure some sizes, the smallest and the largest too, and give those between by them."""
    import numpy as np

    if len(sizes) <= points:
        return [measure(index) for index in range(len(sizes))]
    order = np.argsort(sizes, kind="stable")
    ascending = np.asarray(sizes)[order]
    even = np.linspace(ascending[0], ascending[-1], points)
    chosen = sorted({int(np.abs(ascending - size).argmin()) for size in even})
    times = [measure(int(order[index])) for index in chosen]
    return [float(t) for t in np.interp(sizes, ascending[chosen], times)]
