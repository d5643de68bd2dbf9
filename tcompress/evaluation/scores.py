"""From the numbers of a model to metrics, differences and thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tcompress.artifact.averages import Mean, means_of, set_of
from tcompress.artifact.manifest import Difference, Metric
from tcompress.errors import InputError
from tcompress.evaluation.statistics import Array, Statistic, interval, resampled
from tcompress.evaluation.task_base import EvaluationTask, Measured

_UNDEFINED = {
    False: "give more examples; a model that answers everything alike has no correlation",
    True: "no more examples help: its predictions are ruined; leave it out of the models, or make "
    "it again, with a smaller reduction or with healing",
}
"""Hints on numbers that are not defined, by whether they are infinite."""


@dataclass(frozen=True)
class Baseline:
    """Numbers of a measured model that others are compared with; it can be kept for later runs."""

    name: str  # as it was given
    values: Sequence[float]  # its numbers on all examples
    draws: Sequence[Array]  # their values on resamples: (resamples,) each
    units: Sequence[int]  # numbers of examples
    signature: str  # equal for models that read the same tokens
    predictions: Any = field(default=None, repr=False)
    """Predictions for every example, for agreement with it; of language models not on disk."""
    labels: Sequence[str] = ()  # of the columns of predictions, where they have names
    fingerprint: str | None = None  # of its examples; older ones lack it
    seed: int | None = None  # of its resamples; likewise

    @classmethod
    def of(cls, name: str, measured: Measured, task: EvaluationTask) -> Baseline:
        """Compute numbers and resamples; fail where a number is not defined for this model."""
        statistics, options = measured.statistics, task.options
        values = [statistic.value() for statistic in statistics]
        for statistic, value in zip(statistics, values, strict=True):
            if not math.isfinite(value):
                where = f"`{statistic.name}` of `{name}` is not defined on `{task.examples.name}`"
                raise InputError(f"{where} ({value})", _UNDEFINED[math.isinf(value)])
        units = [statistic.units for statistic in statistics]
        # One example alone has nothing to draw from, nor has a model without numbers.
        times = options.bootstrap if units and units[0] > 1 else 0
        draws = resampled(statistics, times, options.seed) if units else []
        predicted = measured.predictions, task.labels
        same = task.examples.fingerprint, options.seed
        return cls(name, values, draws, units, task.prepared.signature, *predicted, *same)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        small = isinstance(self.predictions, np.ndarray)
        predictions = self.predictions.tolist() if small else None
        draws = [values.tolist() for values in self.draws]
        return {**vars(self), "draws": draws, "predictions": predictions}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Baseline:
        """Read what `to_json` returns."""
        predictions = data.get("predictions")
        arrays = {
            "draws": [np.asarray(values, float) for values in data["draws"]],
            "predictions": None if predictions is None else np.asarray(predictions),
        }
        return cls(**{**data, **arrays})


def metrics_of(
    statistics: Sequence[Statistic],
    numbers: Baseline,
    baseline: Baseline | None,
    protocol: Mapping[str, Any],
) -> list[Metric]:
    """Make metrics of a model's numbers, compared with a baseline if there is one.

    Numbers that only a model beside a baseline has, such as agreement, come last.
    """
    metrics = []
    for index, statistic in enumerate(statistics):
        facts, difference = dict(protocol), None
        if baseline is None:
            pass
        elif index >= len(baseline.values):
            facts["baseline"] = baseline.name
        elif statistic.per_token and numbers.signature != baseline.signature:
            facts["not_compared"] = "its tokens are not those of the baseline"
        else:
            draws, reference = numbers.draws[index], baseline.draws[index]
            # Texts cut into other windows make no pairs, nor do other resamples.
            paired = numbers.units[index] == baseline.units[index]
            paired = paired and len(draws) == len(reference)
            paired = paired and baseline.seed in (None, numbers.seed)
            difference = Difference(
                baseline=baseline.name,
                baseline_value=baseline.values[index],
                baseline_interval=interval(reference),
                value=numbers.values[index] - baseline.values[index],
                interval=interval(draws - reference) if paired else None,
            )
        metrics.append(
            Metric(
                name=statistic.name,
                value=numbers.values[index],
                higher_is_better=statistic.higher_is_better,
                interval=interval(numbers.draws[index]),
                difference=difference,
                protocol=facts,
            )
        )
    return metrics


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
        """Numbers that other models can be compared with, later too."""
        return tuple(item.baseline for item in self.sets)

    @property
    def stored(self) -> bool:
        """True if all of it is in the model's manifest."""
        return all(item.stored for item in self.sets)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to the user, each once."""
        return tuple(dict.fromkeys(note for item in self.sets for note in item.notes))


def document(scores: Sequence[ModelScores]) -> dict[str, Any]:
    """Make the JSON document of a measurement; of several sets one for each, and the means."""
    sets = [_set_document(scores, index) for index in range(len(scores[0].sets))]
    if len(sets) == 1:
        return sets[0]
    means = [{"name": item.name, "metrics": list(map(_plain, item.means))} for item in scores]
    return {"task": sets[0]["task"], "sets": sets, "means": means}


def _set_document(scores: Sequence[ModelScores], index: int) -> dict[str, Any]:
    """Make the document of one set; what the protocols of all models share is said once."""
    of_set = [item.sets[index] for item in scores]
    common = {
        name: value
        for name, value in of_set[0].protocol.items()
        if all(name in row.protocol and row.protocol[name] == value for row in of_set)
    }
    models = [
        {
            "name": item.name,
            "metrics": list(map(_plain, row.metrics)),
            f"{item.unit}_per_second": round(row.per_second, 3),
            "stored": row.stored,
            "notes": list(row.notes),
            "protocol": {k: value for k, value in row.protocol.items() if k not in common},
        }
        for item, row in zip(scores, of_set, strict=True)
    ]
    return {"task": common["task"], "data": common["data"], "protocol": common, "models": models}


def _plain(metric: Metric) -> dict[str, Any]:
    hidden = {"protocol", "mean_ratio"}
    return {**metric.model_dump(exclude=hidden), "ratio": metric.ratio}


def same_measurement(metric: Metric) -> tuple[object, ...]:
    """Equal for two measurements of which a manifest keeps the newer one."""
    return (metric.name, *set_of(metric))


class Threshold(NamedTuple):
    """A bound on the main number of a task, or a factor of the baseline's if it is `relative`."""

    value: float
    relative: bool

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Read `0.8` or `0.95x`, as `Evaluate` allows it."""
        return cls(float(text.removesuffix("x")), relative=text.endswith("x"))

    def missed(self, metric: Metric) -> bool:
        """True if a model fails; without a factor it does, unless it is the baseline."""
        if self.relative and metric.difference is None:
            return "not_compared" in metric.protocol
        value = metric.ratio if self.relative else metric.value
        if value is None:
            return True
        return value < self.value if metric.higher_is_better else value > self.value

    def __str__(self) -> str:
        return f"{self.value:g}" + (" x baseline" if self.relative else "")
