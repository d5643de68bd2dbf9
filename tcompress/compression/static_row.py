"""A table of token vectors, which is what there is to beat far from the dense model, and its row.

Without any block, a text is embedded as the weighted mean of its rows. The vectors are what the
dense encoder makes of each token alone, as model2vec distils them
(https://github.com/MinishLab/model2vec); the weights are smooth inverse frequencies (Arora et al.,
2017, https://openreview.net/forum?id=SyK00v5xx).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from tcompress.artifact.reader import open_checked
from tcompress.blockwise.output_sampler import rank_correlation
from tcompress.compression.attempts import Goal, Measured
from tcompress.compression.effort import minutes_text
from tcompress.compression.table import Row
from tcompress.compression.working import DENSE, Work
from tcompress.data.calibration import CalibrationData, load_batches
from tcompress.data.inputs import inputs_of
from tcompress.data.sentences import SentenceEncoder, unit_length
from tcompress.errors import InputError
from tcompress.exports.onnx_folder import RuntimeFiles
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
MOST_DIMENSIONS, LEAST_DIMENSIONS = 256, 32
ROW_BYTES = 6
"""Bytes of a row beside its numbers: a scale in float32, a weight in float16."""
BATCH = 256
SMOOTHING, RANK_SMOOTHING = 1e-2, 1e-4
"""Frequency of a token whose weight is one half; as counted, and as guessed from ranks."""


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
    one, two = (_embeddings(each, sentences, data) for each in (dense, model))
    ranked = rank_correlation([*zip(one, two, strict=True)])
    return None if isnan(ranked) else ranked


def _embeddings(model: Any, sentences: SentenceEncoder, data: CalibrationData) -> list[Tensor]:
    """Embeddings of texts held out, by batch."""
    batches = [data.batches[index] for index in data.holdout]
    with torch.inference_mode():
        states = [model.base_model(**batch).last_hidden_state.float() for batch in batches]
    pairs = zip(states, batches, strict=True)
    return [sentences(hidden, batch["attention_mask"]) for hidden, batch in pairs]


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


class StaticModule(nn.Module):
    """A table in the place of an encoder, for whatever runs forward passes.

    Every token's state is the weighted mean of the whole text, so that any pooling gives that.

    Args:
        config: The encoder's.
        vectors: One of each token.  # (tokens, width); stored in 8 bits with a scale per row.
        weights: From 0 for tokens that are not read to 1.  # (tokens,)
    """

    values: Tensor
    scales: Tensor
    weights: Tensor
    dtype = torch.float32  # of what is put out
    device = torch.device("cpu")

    def __init__(self, config: Any, vectors: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.config = config
        scales = vectors.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        self.register_buffer("values", (127 * vectors / scales).round().to(torch.int8))
        self.register_buffer("scales", (scales[:, 0] / 127).float())
        self.register_buffer("weights", weights.half())

    @property
    def base_model(self) -> StaticModule:
        """The module itself, which has no head."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and weights."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> ModelOutput:
        """Give `last_hidden_state`, alike for all tokens of a text.  # (batch, length, width)."""
        shares = self.weights[input_ids].float()
        shares = shares if attention_mask is None else shares * attention_mask
        shares = shares / shares.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        scaled = (shares * self.scales[input_ids]).unsqueeze(1)
        mean = scaled @ self.values[input_ids].float()
        return ModelOutput(last_hidden_state=mean.expand(-1, input_ids.shape[1], -1))


def token_vectors(
    dense: PreTrainedModel, tokenizer: Any, sentences: SentenceEncoder, tokens: range
) -> Iterator[Tensor]:
    """Embed each token alone between special tokens; a batch at a time.  # (n, d) each."""
    empty, one = (tokenizer(text)["input_ids"] for text in ("", "a"))
    pairs = zip(empty, one, strict=False)
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    before, after = (torch.tensor(ids).long() for ids in (empty[:shared], empty[shared:]))
    body: Any = dense.base_model
    for first in range(0, len(tokens), BATCH):
        ids = torch.tensor(tokens[first : first + BATCH])[:, None]
        sides = (side.expand(len(ids), -1) for side in (before, after))
        inputs = torch.cat([next(sides), ids, next(sides)], 1)
        mask = torch.ones_like(inputs)
        with torch.inference_mode():
            hidden = body(input_ids=inputs, attention_mask=mask).last_hidden_state
            yield sentences.embed(hidden.float(), mask, 0)


def table(
    config: Any, vectors: Tensor, counts: Tensor | None, silent: list[int], width: int
) -> StaticModule:
    """Make the table of tokens that are embedded each.

    Args:
        config: The encoder's.
        vectors: Of all tokens.  # (tokens, d)
        counts: How often each is in texts; None to guess that from the rank.  # (tokens,)
        silent: Tokens that weigh nothing.
        width: Of the table; principal components of the vectors, around the mean of all texts.
    """
    zipf = counts is None
    counts = 1 / (torch.arange(len(vectors)) + 2.0) if counts is None else counts.clone()
    counts[silent] = 0
    frequencies = counts.double() / counts.sum().clamp_min(1e-9)
    smoothing = RANK_SMOOTHING if zipf else SMOOTHING
    weights = smoothing / (smoothing + frequencies)
    weights[silent] = 0
    parts = frequencies * weights  # of all texts, by token
    centred = vectors.double() - (parts / parts.sum().clamp_min(1e-9)) @ vectors.double()
    _, directions = torch.linalg.eigh(centred.T @ centred)
    return StaticModule(config, centred @ directions[:, -width:].flip(1), weights)
