"""A machine whose times are counted, so that tests of time do not depend on one."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from tcompress.models import SourceModel
from tcompress.planning.entries import Plan
from tcompress.planning.sites import roles_of
from tcompress.timing_model.clocks import LayerTimes, ModelClock

REST = 20_000  # numbers that every model multiplies by, whatever becomes of its layers


def dense_seconds(source: SourceModel) -> float:
    """Seconds that a pass of the dense model counts; all experts run."""
    layers = roles_of(source).layers
    sizes = (layer.in_features * layer.out_features * (layer.experts or 1) for layer in layers)
    return 1e-6 * (REST + sum(sizes))


@contextmanager
def counted_clock() -> Iterator[None]:
    """Count numbers of weights as time; a model takes a fifth longer than its layers alone."""

    def of_layer(_: LayerTimes, layer: nn.Module) -> float:
        return 1e-6 * sum(parameter.numel() for parameter in layer.parameters())

    def of_model(clock: ModelClock, *_: Any) -> float:
        return dense_seconds(clock.source)

    def speedups(clock: ModelClock, *plans: Plan) -> list[float]:
        whole = 1e6 * clock.seconds
        saved = [
            sum(entry.dense_parameters - entry.parameters for entry in plan.layers)
            for plan in plans
        ]
        return [whole / (whole - 1.2 * fewer) for fewer in saved]

    def speedup_of(clock: ModelClock, other: ModelClock) -> float:
        return clock.seconds / other.seconds

    def ratios(_: ModelClock, others: Sequence[Any]) -> list[float]:  # of units, that none reads
        return [1.0 for _ in others]

    with ExitStack() as stack:
        stack.enter_context(patch.object(LayerTimes, "_measure", of_layer))
        stack.enter_context(patch.object(ModelClock, "_median", of_model))
        stack.enter_context(patch.object(ModelClock, "speedups", speedups))
        stack.enter_context(patch.object(ModelClock, "speedup_of", speedup_of))
        stack.enter_context(patch.object(ModelClock, "_ratios", ratios))
        stack.enter_context(patch("tcompress.conversion.converter.bench", lambda *_, **__: None))
        yield
