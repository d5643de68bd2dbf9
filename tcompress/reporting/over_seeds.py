"""Models that differ in their seeds alone: the mean of a number, and how far it deviates."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath
from statistics import fmean, stdev
from typing import Any

from tcompress.options.load import SEED_SUFFIX
from tcompress.reporting import formatting as fmt
from tcompress.reporting.tree import ModelReport, metric_key, numbers_of


@dataclass(frozen=True)
class OverSeeds:
    """A number of several runs; `deviation` is that of a sample (n - 1)."""

    name: str  # of the number
    values: tuple[float, ...]  # in the order of the models

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def deviation(self) -> float:
        return stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def text(self) -> str:
        """Mean ± deviation, with as many digits behind the point."""
        return fmt.deviation_text(self.mean, self.deviation)


@dataclass(frozen=True)
class SeedGroup:
    """Models of one recipe, each with a seed of its own; the first seed comes first."""

    reports: tuple[ModelReport, ...]

    @property
    def name(self) -> str:
        """What their names have in common."""
        first = PurePath(self.reports[0].name).name
        return first.rpartition(SEED_SUFFIX)[0] or first

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(seed_of(report) for report in self.reports)

    @property
    def numbers(self) -> list[OverSeeds]:
        """Numbers that all of them have, of the same examples."""
        tables = [{metric_key(item): item for item in own} for own in numbers_of(self.reports)]
        shared = [key for key in tables[0] if all(key in table for table in tables)]
        labels = fmt.metric_labels(tables[0][key] for key in shared)
        return [
            OverSeeds(label, tuple(table[key].value for table in tables))
            for label, key in zip(labels, shared, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        numbers = [
            {"name": it.name, "mean": it.mean, "deviation": it.deviation, "values": [*it.values]}
            for it in self.numbers
        ]
        models = [report.name for report in self.reports]
        return {"models": models, "seeds": [*self.seeds], "numbers": numbers}


def seed_of(report: ModelReport) -> int:
    """Seed that a model was made with: of its weights, else of training, else of its data."""
    if report.init == "random" and report.seed is not None:
        return report.seed
    if report.training:
        return int(report.training[-1].settings.get("seed", 0))
    return int(((report.recipe or {}).get("calibration") or {}).get("seed", 0))


def seed_groups(reports: Iterable[ModelReport]) -> list[SeedGroup]:
    """Group models that were made alike, each with another seed; one alone is no group."""
    found: dict[str, dict[int, ModelReport]] = {}
    for report in reports:
        if report.recipe is not None:
            found.setdefault(_made_by(report), {}).setdefault(seed_of(report), report)
    return [
        SeedGroup(tuple(by_seed[seed] for seed in sorted(by_seed)))
        for by_seed in found.values()
        if len(by_seed) > 1
    ]


def _made_by(report: ModelReport) -> str:
    """Equal for models that were made in the same way, seeds left out."""
    said = {**(report.recipe or {}), "seed": None}
    said["calibration"] = {**(said.get("calibration") or {}), "seed": None}
    # Of more examples than are read, which are depends on the seed: sources are in the settings.
    runs = [(run.task, run.data, {**run.settings, "seed": None}) for run in report.training]
    size = report.parameters.total.dense, report.family, report.source
    return json.dumps([said, runs, size], sort_keys=True, default=str)
