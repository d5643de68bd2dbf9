"""Time as a cost: what layers of a form take, and what a model of such layers takes as a whole."""

from __future__ import annotations

import copy
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.errors import InputError, first_line
from tcompress.hf.build import install_layers
from tcompress.latency.drawn import DrawnWeights
from tcompress.latency.generation import Generation
from tcompress.latency.known import KnownTimes
from tcompress.latency.passes import Pass, forward_pass, spread, turns, waiting
from tcompress.latency.sizes import RandomInputs, sequence_length
from tcompress.models import SourceModel
from tcompress.models.narrower import with_keys
from tcompress.planning.entries import Form, LayerPlan, Plan
from tcompress.structures.modules.linear import PartLayout, StructuredLinear
from tcompress.structures.width import WidthLayout

# A layer of a form is timed by itself, at the rows that a pass of the model gives it; forms in
# between two sizes are interpolated. What is no layer (activations, attention, norms, embeddings)
# is what a whole model takes beyond its layers. The sum misses what layers do to each other, in
# caches above all: so a model of the planned forms is built, with any weights, and timed as well.

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
    def read(cls, text: str) -> Workload:
        """Reads `32x128`, or `decode`; raises `ValueError`."""
        if text == DECODE:
            return cls(1, PAST, decodes=True)
        found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text)
        if found is None:
            raise ValueError(f"`{text}` is no batch and length such as `32x128`, nor `{DECODE}`")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return DECODE if self.decodes else f"{self.batch}x{self.length}"


@dataclass
class ModelClock:
    """Times a dense model, and models of the same shape whose layers have other forms."""

    source: SourceModel
    work: Workload
    device: torch.device
    dtype: torch.dtype = torch.float32
    named: bool = True
    """Whether the pass was named; if not, texts are as long as the model allows."""

    def __post_init__(self) -> None:
        self._weights = DrawnWeights(self.device, self.dtype)
        self._dense = self._weights.model(self.source, self.source.config)
        self._wait = waiting(self.device)
        self._inputs = self._batch()
        self.rows = self.work.batch
        """Rows that a layer reads in a pass."""
        if not self.work.decodes:
            self.rows *= sequence_length(self.source, self._dense, self._inputs)
        config = self.source.config.to_json_string(use_diff=False)
        kind, what = self.source.model_class.__name__, (str(self.work), self.dtype)
        self.known = KnownTimes.of(self.device, kind, config, *what)
        if _DENSE not in self.known.values:
            self.known.values[_DENSE] = self._median(self._dense)
        self.seconds = self.known.values[_DENSE]
        """Of one pass of the dense model."""

    def _batch(self) -> dict[str, Tensor]:
        inputs = RandomInputs.of(self.source, self.source)
        self._kinds, kind = inputs.inputs, self.source.model_class
        if self.work.decodes and (self._kinds.decoder or not kind.can_generate()):
            raise InputError(
                f"`--at {DECODE}` is for models that generate text and have no encoder, not a "
                f"`{kind.__name__}`",
                "give a batch and a length, such as `--at 32x128`",
            )
        if self.named and inputs.has_length and not self.work.decodes:
            inputs.check([self.work.length])
        new = STEPS if self.work.decodes else 0
        self.work = replace(self.work, length=inputs.fitting([self.work.length], new)[0])
        return inputs.batch(self.work.batch, self.work.length, 0, self.device, self.dtype)

    def speedups(self, *plans: Plan) -> list[float]:
        """How many times as fast models of these forms are, weights aside; all timed in turn."""
        keys = [_key_of(plan) for plan in plans]
        new = {k: p for k, p in zip(keys, plans, strict=True) if k not in self.known.values}
        models = [*map(self._small, new.values())]
        with torch.inference_mode():
            ratios = self._ratios([*map(self._pass, models)]) if models else []
        self.known.values.update(zip(new, ratios, strict=True))
        self.known.keep()
        return [self.known.values[key] for key in keys]

    def layer_times(self, width: int) -> LayerTimes:
        """Makes times of layers, which count in units of a layer of this width beside the model."""
        known = self.known.values
        times = LayerTimes(self.rows, width, self.device, self.dtype, known)
        if times.unit_key not in known:
            [ratio] = self._ratios([times.unit_pass])
            known[times.unit_key] = self.seconds / ratio
        return times

    def _ratios(self, others: Sequence[Pass]) -> list[float]:
        """The dense model's time over that of passes, all timed in turn."""
        found: list[list[float]] = [[] for _ in others]
        with torch.inference_mode():
            for run in others:
                run()
            start = time.perf_counter()
            for dense, *own in turns([self._pass(self._dense), *others], wait=self._wait):
                for known, seconds in zip(found, own, strict=True):
                    known.append(dense / seconds)
                if all(map(_settled, found)) or _late(start, len(found[0])):
                    break
        return [median(known) for known in found]

    def _small(self, plan: Plan) -> nn.Module:
        if plan.plain is not None:
            return self._weights.model(self.source, with_keys(self.source, plan.plain).config)
        same = {id(own): own for own in self._dense.parameters()}  # what is not replaced
        small, name = copy.deepcopy(self._dense, same), self.source.keymap.runtime_name
        made = install_layers(small, plan.layers, name, dtype=self.dtype, device=self.device)
        for module in made.values():
            self._weights.fill(module)
        return small

    def _median(self, model: nn.Module) -> float:
        with torch.inference_mode():
            try:
                run = self._pass(model)
                for _ in range(2):
                    run()
            except Exception as error:
                raise InputError(
                    f"the model cannot run at {self.work} ({first_line(error)})",
                    "give another `--at`",
                ) from error
            alone = turns([run], wait=self._wait)
            start, found = time.perf_counter(), list[float]()
            while not (len(found) >= REPEATS or _late(start, len(found))):
                found += next(alone)
            return median(found)

    def _pass(self, model: nn.Module) -> Pass:
        if self.work.decodes:
            return Generation(model, self._kinds, self._inputs, STEPS).decoding()
        return forward_pass(model, self._kinds, self._inputs)


def _key_of(plan: Plan) -> str:
    """Names what a model of a plan's forms takes its time for."""
    layers = [(e.key, [(p.terms, p.channels) for p in e.parts], e.reads) for e in plan.layers]
    return hashlib.sha256(repr((layers, plan.plain)).encode()).hexdigest()


def _late(start: float, repeats: int) -> bool:
    return repeats >= FEWEST and time.perf_counter() - start > MOST_SECONDS


def _settled(ratios: Sequence[float]) -> bool:
    """Whether the median of these is known well enough, by how far the middle half is apart."""
    if len(ratios) < REPEATS:
        return False
    return (spread(ratios) or 0.0) / len(ratios) ** 0.5 < _SURE


def fill_at_random(module: nn.Module) -> None:
    """Gives a module weights of no meaning: small numbers, as fast to multiply as any."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.02, 0.02)


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
    known: dict[str, float] = field(default_factory=dict)
    share: float = 1.0
    """Of these times, what layers take within a model."""

    def __post_init__(self) -> None:
        self.unit_key = f"unit of {self.width}"
        self.unit_pass = self._pass(nn.Linear(self.width, self.width, **self._place))
        """One pass of the unit."""

    @property
    def _place(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}

    def of(self, form: Form, bias: bool = True) -> float:
        """Times one layer of a form."""
        key = repr(([(part.terms, part.channels) for part in form.parts], form.reads, bias))
        if key not in self.known:
            layer = StructuredLinear(form.parts, bias=bias, reads=form.reads, **self._place)
            fill_at_random(layer)
            self.known[key] = self._measure(layer.eval())
        return self.share * self.known[key]

    def matrix(self, inputs: int, outputs: int, like: LayerPlan) -> float:
        """Times a plain matrix that is no larger than a layer, between sizes that were timed."""
        corners = [
            _around(size, whole)
            for size, whole in ((inputs, like.in_features), (outputs, like.out_features))
        ]
        total = 0.0
        for (one, share), (two, part) in product(*corners):
            total += share * part * self._corner(one, two, like.bias)
        return total

    def _corner(self, inputs: int, outputs: int, bias: bool) -> float:
        if not inputs or not outputs:  # which PyTorch's own layer warns of
            term = WidthLayout(in_features=inputs, out_features=outputs)
            return self.of(Form((PartLayout(name="", terms=(term,)),)), bias)
        key = repr((inputs, outputs, bias))
        if key not in self.known:
            layer = nn.Linear(inputs, outputs, bias, self.device, self.dtype)
            self.known[key] = self._measure(layer)
        return self.share * self.known[key]

    def _measure(self, layer: nn.Module) -> float:
        run, wait = self._pass(layer), waiting(self.device)
        with torch.inference_mode():
            found = islice(turns([run, self.unit_pass], wait=wait), 3)
            times, units = map(list, zip(*found, strict=True))
            count = min(200, round(_LEAST / max(*times, 1e-9)))
            if count > 3:
                times = [run.seconds(wait=wait) for _ in range(count)]
                units += [self.unit_pass.seconds(wait=wait) for _ in range(3)]
        return self.known[self.unit_key] * median(times) / median(units)

    def _pass(self, layer: nn.Module) -> Pass:
        inputs: Any = layer.in_features
        x = torch.randn(self.rows, inputs, **self._place)
        return Pass(lambda _: layer(x))


def _around(size: int, whole: int) -> list[tuple[int, float]]:
    """Sizes to time beside a size, with their shares; eighths of the whole, and small ones."""
    step = max(1, whole // 8)
    low = size // step * step
    high = low + step
    if low == size or high > whole:
        return [(size, 1.0)]
    if not low:
        small = max(1, step // 4)
        low, high = (0, small) if size < small else (small, step)
    share = (size - low) / (high - low)
    return [(low, 1 - share), (high, share)]


def interpolated(
    sizes: Sequence[float], measure: Callable[[int], float], points: int
) -> list[float]:
    """Measures some of ascending sizes, first and last too, and gives those between by them."""
    import numpy as np

    if len(sizes) <= points:
        return [measure(index) for index in range(len(sizes))]
    wanted = np.linspace(sizes[0], sizes[-1], points)
    chosen = sorted({int(np.abs(np.asarray(sizes) - want).argmin()) for want in wanted})
    times = [measure(index) for index in chosen]
    return [float(t) for t in np.interp(sizes, [sizes[index] for index in chosen], times)]
