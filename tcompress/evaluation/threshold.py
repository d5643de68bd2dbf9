"""A quality that models have to reach."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tcompress.artifact.manifest import Metric
from tcompress.errors import InputError


@dataclass(frozen=True)
class Threshold:
    """A bound on the main number of a task. Use `Threshold.parse`.

    Attributes:
        value: A number, or a factor of the baseline's.
        relative: Whether it is a factor.
    """

    value: float
    relative: bool

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Reads `0.8` or `0.95x`.

        Raises:
            InputError: It is neither.
        """
        try:
            value = float(text.removesuffix("x"))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise InputError(
                f"`--threshold {text}` is no number", "write `0.8`, or `0.95x` for the baseline's"
            )
        return cls(value, relative=text.endswith("x"))

    def missed(self, metric: Metric) -> bool:
        """Tells whether a model fails.

        The baseline passes every factor. A model that cannot be compared with it, because it reads
        other tokens, fails.

        Args:
            metric: Main number of the model. Where lower is better, the bound is the most it may
                be.
        """
        if not self.relative:
            bound = self.value
        elif metric.difference is not None:
            bound = self.value * metric.difference.baseline_value
        else:
            return "not_compared" in metric.protocol
        return metric.value < bound if metric.higher_is_better else metric.value > bound

    def __str__(self) -> str:
        return f"{self.value:g}" + (" x baseline" if self.relative else "")
