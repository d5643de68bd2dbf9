"""The rows of the table: a model, and what one would take in its place."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter
from torch import nn

from tcompress.artifact.averages import AGREEMENT, main_of
from tcompress.compression import static_row
from tcompress.compression.attempts import Measured
from tcompress.compression.effort import Effort
from tcompress.compression.table import Row, kept_layers, layers_that_reach
from tcompress.compression.working import DENSE, Work
from tcompress.conversion.converter import convert
from tcompress.errors import PlanError
from tcompress.evaluation.measuring import evaluate
from tcompress.evaluation.scores import Baseline
from tcompress.fields import RuntimeName
from tcompress.options import Evaluate
from tcompress.options.choose import conversion
from tcompress.options.compress_options import Compress
from tcompress.options.read import read
from tcompress.planning.sites import roles_of
from tcompress.progress import Renamed

SHIPPED = "this model"
"""Name of the rows of the model that is written."""


def measurement(settings: Compress, effort: Effort, runtime: RuntimeName = "torch") -> Evaluate:
    """Give the measurement of quality that was asked for."""
    limit: dict[str, Any] = {} if effort.examples is None else {"limit": effort.examples}
    limit |= {} if effort.intervals else {"bootstrap": 0}
    options = {"seed": settings.seed, "runtime": [runtime], "device": "cpu", **limit}
    return read(Evaluate, {"task": settings.task, "data": list(settings.test_data), **options})


def baselines(work: Work) -> list[Row]:
    """Measure the dense model in PyTorch, in 8 and 4 bits, and a model of fewer layers."""
    rows = [row_of(work, DENSE, work.original, "torch")]
    if work.runtime != "torch":
        rows.append(row_of(work, DENSE, work.dense, work.runtime))
    there = rows[-1]
    if work.effort.other_rows:
        if work.runtime != "torch" and work.goal.bytes is not None:
            rows.append(row_of(work, DENSE, work.dense, "onnx-q4"))
        rows += _fewer_layers(work, there)
    return [*rows, *_static(work)]


def _static(work: Work) -> list[Row]:
    """Measure a table of token vectors, where the goal is that far from the dense model."""
    if not static_row.is_shown(work.source, work.settings):
        return []
    if (row := _kept(work, static_row.TABLE, "torch", work.original)) is not None:
        return [row]
    with work.timed(f"Measuring a {static_row.TABLE}"):
        texts = static_row.texts_of(work)
        model = static_row.build(work, texts)
        if model is None:
            return []
        row = Row(static_row.TABLE, "torch", model.nbytes, static_row.speed(work, model))
        if work.settings.task is not None:
            row = _with_quality(work, row, work.original, model)
        else:
            row = replace(row, agreement=static_row.agreement(work, texts, model))
    work.place.note("row", row=asdict(row), folder=work.original.name)
    return [row]


def _fewer_layers(work: Work, dense: Row) -> list[Row]:
    """Measure the most whole layers that reach the goal, as they are."""
    blocks = roles_of(work.source).blocks
    numbers = sum(layer.parameters for block in blocks for layer in block.layers)
    store = work.source.store
    stored = store.dtype(max(store.keys(), key=store.nbytes)).itemsize
    each = max(1, numbers // max(1, len(blocks)) * (stored if work.runtime == "torch" else 1))
    measured = Measured(dense.bytes, dense.speedup)
    count = layers_that_reach(len(blocks), work.goal, measured, each)
    if not 0 < count < len(blocks):
        return []
    name = f"{count} of {len(blocks)} layers, not healed"
    folder = work.place.folder / "fewer-layers"
    with suppress(PlanError):  # stacks of several kinds, and the like
        if not (folder / "config.json").is_file():
            bits = {} if work.runtime == "torch" else {"bits": 8}
            if bits and work.goal.bytes is not None:
                bits["embedding_bits"] = 4
            kept = kept_layers(len(blocks), count)
            settings = conversion({"keep_layers": kept, **bits})
            convert(work.source, settings, folder, force=True, progress=work.progress)
        return [
            row_of(work, name, work.exported(folder, "fewer-layers-exported", name), work.runtime)
        ]
    return []


def row_of(work: Work, name: str, folder: Path, runtime: RuntimeName) -> Row:
    """Measure a model once; what was measured before an interruption is read."""
    if (row := _kept(work, name, runtime, folder)) is not None:
        return row
    with work.timed(f"Measuring {name} in {runtime}"):
        dense = (name, runtime) == (DENSE, "torch")
        size = work.source.store.total_bytes if dense else work.bytes_read(folder, runtime)
        speed = 1.0 if dense else work.speed(folder, runtime)
        row = Row(name, runtime, size, speed)
        if work.settings.task is not None:
            row = _with_quality(work, row, folder)
    work.place.note("row", row=asdict(row), folder=folder.name)
    return row


def _kept(work: Work, name: str, runtime: RuntimeName, folder: Path) -> Row | None:
    """Read what was measured of a folder before an interruption."""
    # Healing may have had no time before, and has some now: another folder is what ships.
    notes = (note for note in work.place.notes("row") if note.get("folder") == folder.name)
    rows = (TypeAdapter(Row).validate_python(note["row"]) for note in notes)
    return next((row for row in rows if (row.name, row.runtime) == (name, runtime)), None)


def _with_quality(work: Work, row: Row, folder: Path, stand_in: nn.Module | None = None) -> Row:
    """Evaluate a model, or what stands in for it, beside the dense one in PyTorch."""
    dense = (row.name, row.runtime) == (DENSE, "torch")
    sets = () if dense else work.place.notes("baseline")[-1]["sets"]
    settings = measurement(work.settings, work.effort, row.runtime)
    trust = work.source.trust_remote_code
    shown = Renamed(work.progress, f"{row.name} in {row.runtime}")
    shared: dict[str, Any] = {"trust_remote_code": trust, "progress": shown}
    shared |= {"save": work.is_ours(folder), "stand_in": stand_in}
    [scores] = evaluate([folder], settings, baseline=[*map(Baseline.of_json, sets)], **shared)
    main = main_of(scores.metrics, several=len(scores.sets) > 1)
    assert main is not None  # a task has a number
    if dense:
        work.place.note("quality", name=main.name)
        named = [replace(one, name=work.source.id) for one in scores.baseline]
        work.place.note("baseline", sets=[one.to_json() for one in named])
    agreements = [one.value for one in scores.metrics if one.name == AGREEMENT]
    interval = None if main.interval is None else (main.interval.low, main.interval.high)
    agreement = fmean(agreements) if agreements else None
    return replace(row, quality=main.value, interval=interval, agreement=agreement)
