"""Forecasting of multivariate series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tcompress.errors import DataError
from tcompress.evaluation.runner import Runner, checked
from tcompress.evaluation.statistics import Statistic, ratio
from tcompress.evaluation.tasks.base import Prepared, Task
from tcompress.integration.models import Head
from tcompress.reading.examples import Examples, Needs
from tcompress.reading.inputs import grid_shape, inputs_of, window_of
from tcompress.reading.series import Windows
from tcompress.source import SourceModel


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
