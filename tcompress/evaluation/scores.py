"""From the numbers of a model to metrics, differences and thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tcompress.artifact.averages import Mean, means_of, set_of
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
        data: str,
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
                    f"`{statistic.name}` of `{name}` is not defined on `{data}` ({value})",
                    "give more examples; a model that answers everything alike has no correlation",
                )
        units = [statistic.units for statistic in statistics]
        # One example alone has nothing to draw from, nor has a model without numbers.
        draws = resampled(statistics, times if units[0] > 1 else 0, seed) if units else []
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
        if baseline is None:
            pass
        elif index >= len(baseline.values):
            facts["baseline"] = baseline.name
        elif statistic.per_token and own.signature != baseline.signature:
            facts["not_compared"] = "its tokens are not those of the baseline"
        else:
            one, two = own.draws[index], baseline.draws[index]
            # Texts cut into other windows make no pairs.
            paired = own.units[index] == baseline.units[index] and len(one) == len(two)
            difference = Difference(
                baseline=baseline.name,
                baseline_value=baseline.values[index],
                baseline_interval=interval(two),
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
class SetScores:
    """Numbers of one model on one set."""

    metrics: tuple[Metric, ...]  # the main one first; none of a baseline without labels
    protocol: Mapping[str, Any]  # how they were measured
    per_second: float  # of what was counted, loading not included
    stored: bool  # in the model's manifest
    notes: tuple[str, ...]  # what the user should know
    baseline: Baseline = field(repr=False, compare=False)  # for other models


@dataclass(frozen=True)
class ModelScores:
    """Numbers of one model."""

    name: str  # as it was given
    unit: str  # what was counted: `examples`, `windows`
    sets: tuple[SetScores, ...]  # in the order of the data

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """All numbers, set after set."""
        return tuple(metric for item in self.sets for metric in item.metrics)

    @property
    def means(self) -> list[Mean]:
        """Means over the sets, of the main number and of agreement; none of one set alone."""
        return means_of(self.metrics)

    @property
    def baseline(self) -> tuple[Baseline, ...]:
        """What other models can be compared with, later too."""
        return tuple(item.baseline for item in self.sets)

    @property
    def stored(self) -> bool:
        """Whether all of it is in the model's manifest."""
        return all(item.stored for item in self.sets)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know, each once."""
        return tuple(dict.fromkeys(note for item in self.sets for note in item.notes))


def document(scores: Sequence[ModelScores]) -> dict[str, Any]:
    """Makes the JSON document of a measurement; of several sets one for each, and the means."""
    sets = [_set_document(scores, index) for index in range(len(scores[0].sets))]
    if len(sets) == 1:
        return sets[0]
    means = [{"name": item.name, "metrics": list(map(_plain, item.means))} for item in scores]
    return {"task": sets[0]["task"], "sets": sets, "means": means}


def _set_document(scores: Sequence[ModelScores], index: int) -> dict[str, Any]:
    """Makes the document of one set; what the protocols of all models share is said once."""
    found = [item.sets[index] for item in scores]
    common = {
        name: value
        for name, value in found[0].protocol.items()
        if all(name in other.protocol and other.protocol[name] == value for other in found)
    }
    models = [
        {
            "name": item.name,
            "metrics": list(map(_plain, own.metrics)),
            f"{item.unit}_per_second": round(own.per_second, 3),
            "stored": own.stored,
            "notes": list(own.notes),
            "protocol": {k: value for k, value in own.protocol.items() if k not in common},
        }
        for item, own in zip(scores, found, strict=True)
    ]
    return {"task": common["task"], "data": common["data"], "protocol": common, "models": models}


def _plain(metric: Metric) -> dict[str, Any]:
    """Makes plain data of a number."""
    hidden = {"protocol", "mean_ratio"}
    return {**metric.model_dump(exclude=hidden), "ratio": metric.ratio}


def same_measurement(metric: Metric) -> tuple[object, ...]:
    """Equal for two measurements of which a manifest keeps the newer one."""
    return (metric.name, *set_of(metric))


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
        """Tells whether a model fails; without a factor it does, unless it is the baseline."""
        if self.relative and metric.difference is None:
            return "not_compared" in metric.protocol
        found = metric.ratio if self.relative else metric.value
        if found is None:
            return True
        return found < self.value if metric.higher_is_better else found > self.value

    def __str__(self) -> str:
        return f"{self.value:g}" + (" x baseline" if self.relative else "")
