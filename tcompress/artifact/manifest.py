"""The manifest `tcompress.json`: where a model comes from and what is known of it."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import tcompress
from tcompress.artifact.format import FORMAT_VERSION, MANIFEST, check_format_version
from tcompress.errors import ArtifactError
from tcompress.planning.entries import Plan


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SourceFacts(_Section):
    """The dense model that was converted."""

    id: str
    revision: str | None = None
    fingerprint: str
    bytes: int


class CalibrationFacts(_Section):
    """The data that the fit looked at."""

    name: str
    samples: int = 0
    held_out_samples: int = 0
    tokens: int = 0
    fingerprint: str | None = None


class Metric(_Section):
    """A number and how it was measured.

    Attributes:
        name: What was measured.
        value: The number.
        protocol: Everything needed to measure it again.
    """

    name: str
    value: float
    protocol: dict[str, Any]


class Manifest(_Section):
    """All that is recorded of a conversion."""

    format_version: int = FORMAT_VERSION
    tool_version: str = Field(default_factory=lambda: tcompress.__version__)
    created: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    source: SourceFacts
    recipe: dict[str, Any]
    plan: Plan
    calibration: CalibrationFacts
    fit: dict[str, dict[str, float]]
    checksums: dict[str, str]
    seconds: float
    environment: dict[str, str]
    metrics: list[Metric] = Field(default_factory=list)


def environment() -> dict[str, str]:
    """Versions that a number may depend on."""
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest beside the old one, then renames it."""
    beside = folder / f"{MANIFEST}.tmp"
    beside.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    beside.rename(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest | None:
    """Reads the manifest of a converted model; one that was saved again has none.

    Raises:
        ArtifactError: It is of a newer format, or damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        check_format_version(raw.get("format_version"))
        return Manifest.model_validate(raw)
    except (ValueError, AttributeError, ValidationError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(
            f"`{path}` is damaged: {error}", "convert the model again, or restore the file"
        ) from error
