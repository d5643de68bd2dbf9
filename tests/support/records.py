"""Made-up records of training, metrics and times, for tests of what is shown of them."""

from pathlib import Path
from typing import Any

from tcompress.artifact.manifest import (
    CalibrationFacts,
    CurvePoint,
    Difference,
    ExportedFile,
    Interval,
    Manifest,
    Metric,
    SourceFacts,
    Speed,
    TrainingFacts,
    read_manifest,
    write_manifest,
)
from tcompress.planning.entries import Plan

MACHINE = {"device": "cpu", "device_name": "a processor", "dtype": "float32", "threads": 2}


def metric(value: float = 0.85, dense: float | None = 0.9, **facts: Any) -> Metric:
    """An accuracy with an interval and a difference."""
    difference = None
    if dense is not None:
        gap = value - dense
        around = Interval(low=gap - 0.01, high=gap + 0.01)
        difference = Difference(baseline="gpt2", baseline_value=dense, value=gap, interval=around)
    protocol = {"task": "classification", "data": "sst2", "versions": {"torch": "2"}}
    fields = {"name": "accuracy", "difference": difference, "protocol": protocol, **facts}
    return Metric(value=value, interval=Interval(low=value - 0.02, high=value + 0.02), **fields)


def speed(batch: int = 8, length: int = 32, mode: str = "eager", **facts: Any) -> Speed:
    """A pass that takes 5 ms where the dense model takes 10."""
    fields: dict[str, Any] = {
        "milliseconds": 5.0,
        "tokens_per_second": batch * length / 5e-3,
        "peak_bytes": 2_000_000,
        "baseline": "big",
        "baseline_milliseconds": 10.0,
        "ratio": 2.0,
        "protocol": MACHINE,
        **facts,
    }
    return Speed(batch=batch, length=length, mode=mode, **fields)


def onnx_file(bits: int, size: int) -> ExportedFile:
    """A file for ONNX Runtime that is twice as fast as PyTorch."""
    facts = {"difference": 1e-3, "agreement": 0.999, "milliseconds": 2.0, "ratio": 2.0}
    own = {"file": "onnx/model_int8.onnx", "bits": bits, "bytes": size, "protocol": {}, **facts}
    return ExportedFile(baseline_milliseconds=4.0, **own)


def training(points: int = 5, **facts: Any) -> TrainingFacts:
    """A run of 100 steps between points, whose third point was the best."""
    curve = [
        CurvePoint(step=100 * n, loss=2.0 / (n + 1), validation=0.8 - 0.01 * abs(n - 2))
        for n in range(points)
    ]
    fields: dict[str, Any] = {
        "stage": "end-to-end",
        "task": "classification",
        "teacher": "big",
        "data": "sst2",
        "objectives": {"task": 1.0},
        "settings": {"learning_rate": 1e-4},
        "steps": 100 * (points - 1),
        "samples": 3200,
        "tokens": 64_000,
        "seconds": 120.0,
        "validation": "accuracy",
        "best_step": 200,
        "best": 0.8,
        "environment": {"torch": "2"},
        **facts,
    }
    return TrainingFacts(curve=curve, **fields)


def record(folder: Path, **fields: Any) -> Manifest:
    """Add records to the manifest of a converted model."""
    manifest = read_manifest(folder)
    manifest = manifest.model_copy(update=fields)
    write_manifest(folder, manifest)
    return manifest


def record_dense(folder: Path, **fields: Any) -> None:
    """Write the manifest of a dense model that was trained."""
    manifest = Manifest(
        source=SourceFacts(id="the-base", fingerprint="", bytes=1),
        recipe={},
        plan=Plan(layers=(), method="dense"),
        calibration=CalibrationFacts(name="none"),
        fit={},
        checksums={},
        seconds=1.0,
        environment={"torch": "2"},
    )
    write_manifest(folder, manifest.model_copy(update=fields))
