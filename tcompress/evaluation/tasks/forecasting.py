"""Forecasting of multivariate series."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tcompress.errors import DataError
from tcompress.evaluation.runner import Runner, checked
from tcompress.evaluation.statistics import Statistic, ratio
from tcompress.evaluation.tasks.base import Prepared, Task
from tcompress.integration.models import Head
from tcompress.reading.examples import Examples, Needs
from tcompress.reading.inputs import grid_shape, inputs_of, window_of
from tcompress.reading.series import Windows
from tcompress.source import SourceModel

FITTED_ROWS, RIDGE = 2**16, 1e-3
"""Rows that the linear forecast is fitted to, and its ridge in units of their mean square."""

Forecast = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Forecasting(Task):
    """What comes next in all variables of a series, in standardised values."""

    name: ClassVar[str] = "forecasting"
    summary: ClassVar[str] = "what comes next in the variables of a series"
    needs: ClassVar[Needs] = Needs(window=(0, 0))
    metrics: ClassVar[tuple[str, ...]] = ("mse", "mae")
    head: ClassVar[Head | None] = "forecasting"
    max_length: ClassVar[int | None] = None

    def needs_for(self, sources: Sequence[SourceModel]) -> Needs:
        """Windows of the size that the models were made for.

        Raises:
            DataError: A model forecasts nothing, or they do not forecast alike.
        """
        found = {source.id: window_of(source) for source in sources}
        if len({*found.values()}) > 1:
            sizes = ", ".join(f"`{name}` {c} + {h}" for name, (c, h) in found.items())
            raise DataError(
                f"the models have windows of different sizes, context and horizon: {sizes}",
                "compare models of one size, or measure them one by one",
            )
        return replace(self.needs, window=next(iter(found.values())))

    def check(self, source: SourceModel, examples: Examples) -> None:
        super().check(source, examples)
        assert examples.windows is not None  # that is what the task needs
        wanted, found = grid_shape(source, inputs_of(source))[1], examples.windows.variables
        if len(found) != wanted:
            raise DataError(
                f"`{examples.name}` has {len(found)} series, the model takes {wanted}",
                "give data with so many columns beside `date`",
            )

    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        assert examples.windows is not None
        return _Prepared(examples.windows)


class _Prepared(Prepared):
    unit = "windows"

    def __init__(self, windows: Windows) -> None:
        super().__init__()
        self._windows = windows
        self.facts = {
            "context": windows.context,
            "horizon": windows.horizon,
            "values": "standardised by the training part",
        }

    @property
    def units(self) -> int:
        return len(self._windows)

    def run(self, runner: Runner) -> Sequence[Statistic]:
        if "naive" not in self.facts:  # the same for every model
            self.facts["naive"] = naive_errors(self._windows)
        squares, sizes = [], []
        for first in range(0, self.units, runner.batch_size):
            past, future = self._windows.batch(slice(first, first + runner.batch_size))
            past = past.to(runner.device, runner.model.dtype)
            forecast = runner.model(past_values=past).prediction_outputs.float().cpu()
            error = (forecast - future).double()
            squares.append(error.square().mean((1, 2)))
            sizes.append(error.abs().mean((1, 2)))
            runner.advance(len(past))
        return [
            ratio(name, checked(torch.cat(values)).numpy(), higher_is_better=False)
            for name, values in (("mse", squares), ("mae", sizes))
        ]


def naive_errors(windows: Windows) -> dict[str, dict[str, float]]:
    """Measures forecasts that need no model: what every model has to beat.

    Args:
        windows: What is measured.

    Returns:
        `mse` and `mae` by name of the forecast, of the values that models are measured on.
    """
    forecasts: dict[str, Forecast] = {
        "last value": lambda past: past[:, -1:],
        "context mean": lambda past: past.mean(1, keepdim=True),
    }
    linear = _linear(windows)
    if linear is not None:
        forecasts["linear"] = linear
    sums = {name: [0.0, 0.0] for name in forecasts}
    step = _step(windows)
    for first in range(0, len(windows), step):
        past, future = (part.double() for part in windows.batch(slice(first, first + step)))
        for name, forecast in forecasts.items():
            error = forecast(past) - future
            sums[name][0] += float(error.square().mean((1, 2)).sum())
            sums[name][1] += float(error.abs().mean((1, 2)).sum())
    return {
        name: {"mse": mse / len(windows), "mae": mae / len(windows)}
        for name, (mse, mae) in sums.items()
    }


def _step(windows: Windows) -> int:
    """Windows that are held in float64 at a time."""
    return max(1, 2**22 // ((windows.context + windows.horizon) * len(windows.variables)))


def _linear(windows: Windows) -> Forecast | None:
    """One linear map from a context to a horizon for all variables, fitted to the training part.

    Values count less the last of the context; None without a training part.
    """
    last = windows.train - windows.context - windows.horizon
    if last < 0:
        return None
    step = -(-(last + 1) * len(windows.variables) // FITTED_ROWS)
    training = replace(windows, starts=np.arange(0, last + 1, step))
    size = windows.context
    gram = torch.zeros(size, size, dtype=torch.float64)
    cross = torch.zeros(size, windows.horizon, dtype=torch.float64)
    count = _step(windows)
    for first in range(0, len(training), count):
        past, future = (part.double() for part in training.batch(slice(first, first + count)))
        x, y = ((part - past[:, -1:]).mT.flatten(0, 1) for part in (past, future))
        gram, cross = gram + x.mT @ x, cross + x.mT @ y
    level = RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny
    weight = torch.linalg.solve(gram + level * torch.eye(size).to(gram), cross)

    def forecast(past: Tensor) -> Tensor:
        return past[:, -1:] + (weight.mT @ (past - past[:, -1:]))

    return forecast
