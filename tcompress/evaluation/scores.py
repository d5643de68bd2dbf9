"""What a measurement gives: numbers of a model, to show and to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tcompress.artifact.manifest import Metric, read_manifest, write_manifest
from tcompress.evaluation.compare import Baseline

_SAME = ("task", "data_fingerprint", "split")  # of two measurements of which the newer is kept


@dataclass(frozen=True)
class ModelScores:
    """Numbers of one model.

    Attributes:
        name: The model as it was given.
        metrics: Its numbers, the main one first.
        unit: What was counted: `examples`, `windows`.
        per_second: How many of them the model did in a second, loading not counted.
        stored: Whether the numbers are in the model's manifest.
        notes: What the user should know.
        baseline: What other models can be compared with, without measuring this one again.
    """

    name: str
    metrics: tuple[Metric, ...]
    unit: str
    per_second: float
    stored: bool = False
    notes: tuple[str, ...] = ()
    baseline: Baseline | None = field(default=None, repr=False, compare=False)

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


def store(folder: Path, metrics: Sequence[Metric]) -> bool:
    """Adds numbers to the manifest of a converted model, in place of older ones on the same data.

    Returns:
        Whether there is a manifest that can be written.

    Raises:
        ArtifactError: The manifest is damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    new = {_identity(metric) for metric in metrics}
    kept = [metric for metric in manifest.metrics if _identity(metric) not in new]
    manifest.metrics = [*kept, *metrics]
    try:
        write_manifest(folder, manifest)
    except OSError:  # models are often kept where they cannot be changed
        return False
    return True


def _identity(metric: Metric) -> tuple[object, ...]:
    return (metric.name, *(metric.protocol.get(name) for name in _SAME))
