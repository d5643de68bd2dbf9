"""What a sweep has found: the models beside the dense one, and what could not be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

import tcompress
from tcompress.artifact.manifest import Metric
from tcompress.options import Recipe
from tcompress.options.load import dump_recipe
from tcompress.reporting.front import Candidate, FrontReport, front_of
from tcompress.reporting.html import write_html
from tcompress.reporting.tree import ModelReport
from tcompress.source import SourceModel
from tcompress.sweeping.cells import Cell


@dataclass(frozen=True)
class Done:
    """A finished cell.

    Attributes:
        cell: The cell.
        reports: Its models: as converted and, if it was trained, as trained.
        seconds: How long each took.
        missed: Thresholds that it misses, in words.
    """

    cell: Cell
    reports: tuple[ModelReport, ...]
    seconds: tuple[float, ...]
    missed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "name": self.cell.name,
            "status": "done",
            "recipe": _sparse(self.cell.recipe),
            "reports": [report.to_json() for report in self.reports],
            "seconds": list(self.seconds),
            "missed": list(self.missed),
        }


@dataclass(frozen=True)
class Stopped:
    """A cell without a result.

    Attributes:
        name: Its name.
        status: `refused` if the method does not fit the model; `failed` if something went wrong.
        reason: What, in words.
    """

    name: str
    status: Literal["refused", "failed"]
    reason: str


@dataclass(frozen=True)
class Swept:
    """What a sweep has found.

    Attributes:
        folder: Folder with a model for each cell, `sweep.json` and the page.
        page: The HTML report.
        model: Name of the dense model.
        recipe: What was asked for.
        front: All models, the dense one among them, with what each costs.
        dense: Report on the dense model.
        cells: Finished cells.
        stopped: The other ones.
    """

    folder: Path
    page: Path
    model: str
    recipe: Recipe
    front: FrontReport
    dense: ModelReport
    cells: tuple[Done, ...]
    stopped: tuple[Stopped, ...] = field(default=())

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        source: SourceModel,
        folder: Path,
        dense: ModelReport,
        cells: Sequence[Done],
        stopped: Sequence[Stopped],
    ) -> Swept:
        """Compares what was found."""
        dense = _comparable(dense, cells)
        candidates = [
            Candidate(
                name=done.cell.name,
                report=done.reports[-1],
                converted=done.reports[0].metrics[0] if len(done.reports) > 1 else None,
                seconds=sum(done.seconds),
            )
            for done in cells
        ]
        front = front_of([Candidate("dense", dense), *candidates])
        page = folder / "sweep.html" if recipe.report is None else Path(recipe.report).expanduser()
        return cls(folder, page, source.id, recipe, front, dense, tuple(cells), tuple(stopped))

    @property
    def missed(self) -> bool:
        """Whether a threshold was declared, and no cell reaches it."""
        declared = any(item.threshold is not None for item in self.recipe.evaluate)
        return declared and bool(self.cells) and all(done.missed for done in self.cells)

    @property
    def failed(self) -> bool:
        """Whether something went wrong in a cell, or none is left; a refusal is an answer."""
        return not self.cells or any(item.status == "failed" for item in self.stopped)

    def write_page(self) -> Path:
        """Writes the HTML report, the models in the order of the table."""
        reports = {"dense": self.dense} | {item.cell.name: item.reports[-1] for item in self.cells}
        return write_html([reports[row.name] for row in self.front.rows], self.page)

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "tool_version": tcompress.__version__,
            "output": str(self.folder),
            "model": self.model,
            "recipe": _sparse(self.recipe),
            **self.front.model_dump(mode="json"),
            "stopped": [dict(vars(item)) for item in self.stopped],
            "dense": self.dense.to_json(),
            "cells": [done.to_json() for done in self.cells],
            "html": str(self.page),
        }


def fallback_metric(report: ModelReport) -> Metric:
    """What stands for quality where no task is measured: an error of the conversion.

    With calibration data it is that of the last layer, whose input has gone through all others;
    without, the mean over the layers' weights.
    """
    facts = report.calibration
    protocol: dict[str, Any] = {"task": "conversion", "data": facts.name if facts else None}
    if "held_out" in report.errors:
        last = report.layers[-1]
        name, value = "held-out error of the last layer", last.errors["held_out"]
        protocol |= {"layer": last.name}
    else:
        kind = next(iter(report.errors))
        name, value = f"mean {kind} error", report.errors[kind]
    return Metric(name=name, value=value, higher_is_better=False, protocol=protocol)


def _comparable(dense: ModelReport, cells: Sequence[Done]) -> ModelReport:
    """Gives the dense model the error that others are compared by: none."""
    if dense.metrics or not cells:
        return dense
    metric = cells[0].reports[-1].metrics[0].model_copy(update={"value": 0.0})
    return dense.model_copy(update={"metrics": (metric,)})


def _sparse(recipe: Recipe) -> Any:
    """A recipe as plain data that `tcompress run` reads, without values that are defaults."""
    return yaml.safe_load(dump_recipe(recipe))
