"""From the numbers of a model to metrics, differences and thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tcompress.artifact.manifest import Difference, Metric
from tcompress.errors import InputError
from tcompress.evaluation.statistics import Array, Statistic, interval, resampled


@dataclass(frozen=True)
class Baseline:
    """Numbers of a measured model that others are compared with; it can be kept for later runs."""

    name: str  # as it was given
    values: Sequence[float]  # its numbers on all examples
    draws: Sequence[Array]  # their values on resamples: (resamples,) each
    units: Sequence[int]  # numbers of examples
    signature: str  # equal for models that read the same tokens
    predictions: Any = field(default=None, repr=False)
    """What it said of every example, for agreement with it; of language models not on disk."""

    @classmethod
    def of(
        cls,
        name: str,
        statistics: Sequence[Statistic],
        signature: str,
        times: int,
        seed: int,
        predictions: Any = None,
    ) -> Baseline:
        """Computes numbers and resamples; fails where a number is not defined for this model."""
        values = [statistic.value() for statistic in statistics]
        for statistic, value in zip(statistics, values, strict=True):
            if not math.isfinite(value):
                raise InputError(
                    f"`{statistic.name}` of `{name}` is not defined on this data ({value})",
                    "give more examples; a model that answers everything alike has no correlation",
                )
        units = [statistic.units for statistic in statistics]
        # One example alone has nothing to draw from.
        draws = resampled(statistics, times if units[0] > 1 else 0, seed)
        return cls(name, values, draws, units, signature, predictions)

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        small = isinstance(self.predictions, np.ndarray)
        found = self.predictions.tolist() if small else None
        return {**vars(self), "draws": [d.tolist() for d in self.draws], "predictions": found}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Baseline:
        """Reads what `to_json` returns."""
        draws, found = data["draws"], data.get("predictions")
        arrays = {"draws": [np.asarray(own, float) for own in draws]}
        return cls(
            **{**data, **arrays, "predictions": None if found is None else np.asarray(found)}
        )


def metrics_of(
    statistics: Sequence[Statistic],
    own: Baseline,
    baseline: Baseline | None,
    protocol: Mapping[str, Any],
) -> list[Metric]:
    """Makes metrics of a model's own numbers, compared with a baseline if there is one.

    Numbers that only a model beside a baseline has, such as agreement, come last.
    """
    made = []
    for index, statistic in enumerate(statistics):
        facts, difference = dict(protocol), None
        if baseline is None or index >= len(baseline.values):
            pass
        elif statistic.per_token and own.signature != baseline.signature:
            facts["not_compared"] = "its tokens are not those of the baseline"
        else:
            one, two = own.draws[index], baseline.draws[index]
            # Texts cut into other windows make no pairs.
            paired = own.units[index] == baseline.units[index] and len(one) == len(two)
            difference = Difference(
                baseline=baseline.name,
                baseline_value=baseline.values[index],
                value=own.values[index] - baseline.values[index],
                interval=interval(one - two) if paired else None,
            )
        made.append(
            Metric(
                name=statistic.name,
                value=own.values[index],
                higher_is_better=statistic.higher_is_better,
                interval=interval(own.draws[index]),
                difference=difference,
                protocol=facts,
            )
        )
    return made


@dataclass(frozen=True)
class ModelScores:
    """Numbers of one model."""

    name: str  # as it was given
    metrics: tuple[Metric, ...]  # the main one first
    unit: str  # what was counted: `examples`, `windows`
    per_second: float  # of these, loading not counted
    stored: bool = False  # in the model's manifest
    notes: tuple[str, ...] = ()  # what the user should know
    baseline: Baseline | None = field(default=None, repr=False, compare=False)  # for other models

    def to_json(self, common: dict[str, Any]) -> dict[str, Any]:
        """Makes plain data; `common` is what the protocols of all models share."""
        own = self.metrics[0].protocol
        return {
            "name": self.name,
            "metrics": [
                {**metric.model_dump(exclude={"protocol"}), "ratio": ratio_of(metric)}
                for metric in self.metrics
            ],
            f"{self.unit}_per_second": round(self.per_second, 3),
            "stored": self.stored,
            "notes": list(self.notes),
            "protocol": {name: value for name, value in own.items() if name not in common},
        }


def ratio_of(metric: Metric) -> float | None:
    """Gives a number as a multiple of the baseline's, None if there is none above zero."""
    against = metric.difference
    if against is None or against.baseline_value <= 0:
        return None
    return metric.value / against.baseline_value


def document(scores: Sequence[ModelScores]) -> dict[str, Any]:
    """Makes the JSON document of a measurement."""
    protocols = [item.metrics[0].protocol for item in scores]
    common = {
        name: value
        for name, value in protocols[0].items()
        if all(name in other and other[name] == value for other in protocols)
    }
    return {
        "task": common["task"],
        "data": common["data"],
        "protocol": common,
        "models": [item.to_json(common) for item in scores],
    }


def same_measurement(metric: Metric) -> tuple[object, ...]:
    """Equal for two measurements of which a manifest keeps the newer one."""
    names = ("task", "data_fingerprint", "split")
    return (metric.name, *(metric.protocol.get(name) for name in names))


@dataclass(frozen=True)
class Threshold:
    """A bound on the main number of a task, or a factor of the baseline's if it is `relative`."""

    value: float
    relative: bool

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Reads `0.8` or `0.95x`, as `Evaluate` allows it."""
        return cls(float(text.removesuffix("x")), relative=text.endswith("x"))

    def missed(self, metric: Metric) -> bool:
        """Tells whether a model fails; one with other tokens misses any factor of the baseline."""
        if not self.relative:
            bound = self.value
        elif metric.difference is not None:
            bound = self.value * metric.difference.baseline_value
        else:
            return "not_compared" in metric.protocol
        return metric.value < bound if metric.higher_is_better else metric.value > bound

    def __str__(self) -> str:
        return f"{self.value:g}" + (" x baseline" if self.relative else "")
