"""What is known of the models of a sweep: kept as files, so that nothing is measured twice.

Identities are chained: that of a model covers the weights and the settings that it comes from, that
of a measurement the model too. A changed setting changes those behind it, and no others.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tcompress.artifact.checksums import digest_of
from tcompress.artifact.manifest import Metric, Speed
from tcompress.options import Bench, Convert, Evaluate, Finetune
from tcompress.reporting.tree import ModelReport

_Kept = TypeVar("_Kept", bound=BaseModel)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Stage(_Model):
    """One model.

    Attributes:
        identity: What it comes from.
        report: What is known without running it; None before it is made.
        seconds: How long that took.
        metrics: Numbers, by identity of their measurement.
        speed: Times, likewise.
        baselines: What others are compared with, likewise; of the dense model only.
    """

    identity: str
    report: ModelReport | None = None
    seconds: float | None = None
    metrics: dict[str, tuple[Metric, ...]] = Field(default_factory=dict)
    speed: dict[str, tuple[Speed, ...]] = Field(default_factory=dict)
    baselines: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Record(_Model):
    """A cell: the model as it was converted and, if it was trained, that one too."""

    converted: Stage
    trained: Stage | None = None


def read_record(path: Path, kind: type[_Kept]) -> _Kept | None:
    """Reads a record; one that another version wrote counts as none."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def identity(*parts: Any) -> str:
    """Shortens what determines a result."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def of_conversion(weights: str, settings: Convert) -> str:
    """Identifies a converted model by the dense weights and the settings."""
    data = stamp(settings.calibration.source)
    return identity("convert", weights, settings.model_dump(mode="json"), data)


def of_training(model: str, settings: Finetune) -> str:
    """Identifies a trained model by the one that it was and the settings."""
    named = [*settings.data.source, settings.data.validation or "", settings.teacher]
    return identity("finetune", model, settings.model_dump(mode="json"), [*map(stamp, named)])


def of_evaluation(model: str, item: Evaluate) -> str:
    """Identifies a measurement; a threshold only judges it, and the rest changes no number."""
    settings = item.model_dump(mode="json", exclude={"threshold", "batch_size", "device"})
    return identity("evaluate", model, settings, stamp(item.data))


def of_bench(model: str, settings: Bench) -> str:
    """Identifies times."""
    return identity("bench", model, settings.model_dump(mode="json"))


def stamp(name: str) -> Any:
    """Changes with a local file or folder that is named; of all other names nothing is known."""
    path = Path(name).expanduser()
    if not name:
        return None
    if path.is_file():
        return digest_of(path)
    if path.is_dir():
        files = sorted(item for item in path.rglob("*") if item.is_file())
        return [
            (str(item.relative_to(path)), item.stat().st_size, item.stat().st_mtime_ns)
            for item in files
        ]
    return None
