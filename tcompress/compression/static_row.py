"""The row of a table of token vectors, which is what there is to beat far from the dense model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from tcompress.artifact.reader import open_checked
from tcompress.compression.attempts import Goal, Measured
from tcompress.compression.effort import minutes_text
from tcompress.compression.static_vectors import (
    LEAST_DIMENSIONS,
    MOST_DIMENSIONS,
    ROW_BYTES,
    StaticModule,
    table,
    token_vectors,
)
from tcompress.compression.table import Row
from tcompress.compression.working import DENSE, Work
from tcompress.data.calibration import CalibrationData, load_batches
from tcompress.data.inputs import inputs_of
from tcompress.data.sentences import SentenceEncoder, unit_length
from tcompress.errors import InputError
from tcompress.exports.runtime_files import RuntimeFiles
from tcompress.hf.opening import load_model
from tcompress.latency.paired_timing import PairedTiming, TimedModel, threads
from tcompress.latency.sizes import Cell, RandomInputs
from tcompress.models import SourceModel
from tcompress.options import Bench
from tcompress.options.compress_options import Compress
from tcompress.options.convert_options import Calibration
from tcompress.options.read import read

TABLE = "table of token vectors"
"""Name of the row."""
SPEEDUP, BYTES = 15, 4_000_000
"""Goals beyond which such a table is shown: a higher speed, or fewer bytes."""
SHARE, LOOK = 0.2, 0.1
"""Most of the minutes that the vectors may take; the part of that after which it is foreseen."""


def is_shown(source: SourceModel, settings: Compress) -> bool:
    """Tell whether a table could be what one would take in a sentence encoder's place."""
    small = settings.most_bytes is not None and settings.most_bytes < BYTES
    if not (small or (settings.speedup or 0) > SPEEDUP) or not source.embeds_texts:
        return False
    # Layers after pooling read the encoder's width.
    return all(layer is unit_length for layer in SentenceEncoder.of(source, last=False).layers)


def build(work: Work, data: CalibrationData) -> StaticModule | None:
    """Make the table from the dense encoder; None where that would take too long."""
    source = work.source
    sentences = SentenceEncoder.of(source)
    reader = sentences.reader(source, inputs_of(source), None)
    dense = load_model(source, dtype=torch.float32)
    rows = dense.get_input_embeddings().weight.shape[0]
    most = 60 * SHARE * work.settings.most_minutes
    work.progress.stage(TABLE, rows, "tokens")
    parts, count, start = list[Tensor](), 0, time.perf_counter()
    for part in token_vectors(dense, reader.tokenizer, sentences, range(rows)):
        parts.append(part)
        count += len(part)
        work.progress.advance(len(part))
        seconds = time.perf_counter() - start
        # One slow batch on a busy machine says little.
        if seconds > LOOK * most and seconds * rows / count > most:
            minutes = minutes_text(seconds * rows / count / 60)
            work.say(f"no {TABLE}: {rows:,} tokens take about {minutes}")
            return None
    vectors = torch.cat(parts)
    if not vectors.isfinite().all():
        raise InputError(f"`{source.id}` embeds tokens by values that are not finite", "repair it")
    counts = _counts(data, rows) if work.settings.data else None
    silent = [token for token in reader.tokenizer.all_special_ids if token < rows]
    width = _width(work.goal, rows, min(vectors.shape))
    return table(source.config, vectors, counts, silent, width)


def _width(goal: Goal, rows: int, most: int) -> int:
    width = MOST_DIMENSIONS if goal.bytes is None else goal.bytes // rows - ROW_BYTES
    return min(most, max(LEAST_DIMENSIONS, min(MOST_DIMENSIONS, width)))


def texts_of(work: Work) -> CalibrationData:
    """Read the texts whose tokens are counted, and those that agreement is measured on."""
    source = list(work.settings.data) or ["builtin"]
    return load_batches(
        work.source, read(Calibration, {"source": source, "seed": work.settings.seed})
    )


def _counts(data: CalibrationData, rows: int) -> Tensor:
    """Count the tokens of texts that are fitted to.  # (rows,), in float64."""
    counts = torch.zeros(rows, dtype=torch.float64)
    for index in data.fitted:
        batch = data.batches[index]
        ids = batch["input_ids"][batch["attention_mask"].bool()]
        counts += torch.bincount(ids, minlength=rows)
    return counts


def agreement(work: Work, data: CalibrationData, model: nn.Module) -> float | None:
    """Rank correlation of a model's similarities and the dense one's on texts held out."""
    sentences = SentenceEncoder.of(work.source)
    dense = load_model(work.source, dtype=torch.float32)
    one, two = (_similarities(each, sentences, data) for each in (dense, model))
    ranked = spearmanr(one, two).statistic if len(one) > 2 else np.nan
    return None if np.isnan(ranked) else float(ranked)


def _similarities(model: Any, sentences: SentenceEncoder, data: CalibrationData) -> Any:
    """Cosines of all pairs of texts held out.  # (n (n - 1) / 2,)."""
    batches = [data.batches[index] for index in data.holdout]
    with torch.inference_mode():
        states = [model.base_model(**batch).last_hidden_state.float() for batch in batches]
    pairs = zip(states, batches, strict=True)
    unit = torch.cat([sentences(hidden, batch["attention_mask"]) for hidden, batch in pairs])
    above = np.triu_indices(len(unit), 1)
    return (unit.double() @ unit.double().T).numpy()[above]


def speed(work: Work, model: StaticModule) -> float:
    """Times as fast as the dense model in PyTorch."""
    source, (batch, length) = work.source, work.settings.batch_and_length
    dense = load_model(source)
    kind = next(dense.parameters()).dtype
    options = Bench(repeats=work.effort.repeats, threads=work.settings.threads, device="cpu")
    timing = PairedTiming(
        TimedModel(TABLE, source, model),
        TimedModel(DENSE, source, dense),
        RandomInputs.of(source, source),
        torch.device("cpu"),
        kind,
        options,
        time.perf_counter,
        lambda *_: model,
    )
    with threads(work.settings.threads):
        return timing.measure(Cell(batch, length, "eager")).ratio


def compared(work: Work, row: Row, folder: Path, rows: Sequence[Row]) -> Row:
    """Add to the row of what was made, without labels, its agreement on the texts of the table's.

    A model with other tokens reads those texts otherwise, and is not compared.
    """
    unlabelled = work.settings.task is None and work.settings.vocab is None
    if not unlabelled or all(one.name != TABLE for one in rows):
        return row
    source = open_checked(str(folder), trust=work.source.trust_remote_code)
    with RuntimeFiles.opened() as files:
        model = load_model(source) if row.runtime == "torch" else files(source, row.runtime)
        return replace(row, agreement=agreement(work, texts_of(work), model))


def words(goal: Goal, shipped: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """Say that the table reaches the goal and is at least as good as what was made, if it is."""
    for row in rows:
        if row.name != TABLE or Measured(row.bytes, row.speedup).missed(goal):
            continue
        name = "agreement" if row.quality is None else "quality"
        numbers = getattr(shipped, name), getattr(row, name)
        if None not in numbers and numbers[1] >= numbers[0]:
            better = f"{name} {numbers[1]:.4f}, not {numbers[0]:.4f}"
            return (f"a {TABLE} reaches the goal too, with {better}: model2vec makes one",)
    return ()
