"""From the numbers of a model to metrics: intervals, and differences to the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tcompress.artifact.manifest import Difference, Metric
from tcompress.errors import InputError
from tcompress.evaluation.bootstrap import interval, resampled
from tcompress.evaluation.statistics import Array, Statistic


@dataclass(frozen=True)
class Baseline:
    """What of a measured model others are compared with; it can be kept for later runs.

    Attributes:
        name: The model as it was given.
        values: Its numbers on all examples.
        draws: Their values on resamples.  # (resamples,) each
        units: Number of examples of each number.
        signature: Equal for models that read the same tokens.
    """

    name: str
    values: Sequence[float]
    draws: Sequence[Array]
    units: Sequence[int]
    signature: str

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {**vars(self), "draws": [draws.tolist() for draws in self.draws]}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Baseline:
        """Reads what `to_json` returns."""
        draws = [np.asarray(draws, dtype=float) for draws in data["draws"]]
        return cls(**{**data, "draws": draws})


@dataclass(frozen=True)
class Measured:
    """Numbers of a model, and their values on resamples.

    Attributes:
        name: The model as it was given.
        statistics: The numbers.
        values: Their values on all examples.
        draws: Their values on resamples.
        signature: Equal for models that read the same tokens.
    """

    name: str
    statistics: Sequence[Statistic]
    values: Sequence[float]
    draws: Sequence[Array]
    signature: str

    @classmethod
    def of(
        cls, name: str, statistics: Sequence[Statistic], signature: str, times: int, seed: int
    ) -> Measured:
        """Computes numbers and resamples.

        Raises:
            InputError: A number is not defined for this model.
        """
        values = [statistic.value() for statistic in statistics]
        for statistic, value in zip(statistics, values, strict=True):
            if not math.isfinite(value):
                raise InputError(
                    f"`{statistic.name}` of `{name}` is not defined on this data ({value})",
                    "give more examples; a model that answers everything alike has no correlation",
                )
        # One example alone has nothing to draw from.
        times = times if statistics[0].units > 1 else 0
        return cls(name, statistics, values, resampled(statistics, times, seed), signature)

    @property
    def baseline(self) -> Baseline:
        """What other models can be compared with."""
        units = [statistic.units for statistic in self.statistics]
        return Baseline(self.name, self.values, self.draws, units, self.signature)

    def metrics(self, baseline: Baseline | None, protocol: Mapping[str, Any]) -> list[Metric]:
        """Makes metrics.

        Args:
            baseline: What to compare with, if anything.
            protocol: How it was measured.
        """
        return [self._metric(index, baseline, protocol) for index in range(len(self.values))]

    def _metric(self, index: int, baseline: Baseline | None, protocol: Mapping[str, Any]) -> Metric:
        statistic = self.statistics[index]
        facts = dict(protocol)
        difference = None
        if baseline is not None and statistic.per_token and self._other_tokens(baseline):
            facts["not_compared"] = "its tokens are not those of the baseline"
        elif baseline is not None:
            difference = self._difference(index, baseline)
        return Metric(
            name=statistic.name,
            value=self.values[index],
            higher_is_better=statistic.higher_is_better,
            interval=interval(self.draws[index]),
            difference=difference,
            protocol=facts,
        )

    def _difference(self, index: int, baseline: Baseline) -> Difference:
        # Texts cut into other windows make no pairs.
        one, two = self.draws[index], baseline.draws[index]
        paired = self.statistics[index].units == baseline.units[index]
        return Difference(
            baseline=baseline.name,
            baseline_value=baseline.values[index],
            value=self.values[index] - baseline.values[index],
            interval=interval(one - two) if paired and len(one) == len(two) else None,
        )

    def _other_tokens(self, baseline: Baseline) -> bool:
        return self.signature != baseline.signature
