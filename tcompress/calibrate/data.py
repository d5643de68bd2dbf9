"""Batches of calibration data for a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcompress.errors import DataError
from tcompress.reading import builtin
from tcompress.reading.collate import collate
from tcompress.reading.columns import Kind, Pool, columns_of, draw_texts, undecoded
from tcompress.reading.examples import Needs, load_examples
from tcompress.reading.images import decode, has_processor_file, image_reader, plain_reader
from tcompress.reading.inputs import (
    SERIES,
    Inputs,
    frames_of,
    grid_shape,
    image_shape,
    inputs_of,
    spectrogram_shape,
    window_of,
)
from tcompress.reading.tables import opened
from tcompress.reading.tokens import TextEncoder
from tcompress.reading.volumes import as_input
from tcompress.source import SourceModel

if TYPE_CHECKING:
    from tcompress.options import Calibration

_Item = TypeVar("_Item", np.uint8, np.float32)

Example = dict[str, Tensor]  # inputs of one sample, without the batch axis


@dataclass(frozen=True)
class CalibrationData:
    """Batches to run through a model.

    Attributes:
        batches: Keyword arguments of the model's forward pass, on the CPU.
        holdout: Indices of the batches kept back for measuring; none if there is one sample.
        name: What was used, such as `builtin text` or `train.parquet:text`.
        samples: Number of samples over all batches.
        tokens: Number of tokens of text, padding not counted.
        fingerprint: SHA-256 of the texts, pixels and sounds.
    """

    batches: list[dict[str, Tensor]]
    holdout: list[int]
    name: str
    samples: int
    tokens: int
    fingerprint: str


def load_batches(source: SourceModel, options: Calibration) -> CalibrationData:
    """Read, draw and encode the calibration data of a model.

    Which samples are drawn, and which of them are held out, does not depend on the batch size.

    Args:
        source: The model; its own tokenizer and image processor are used.
        options: What to use; `source` must not be `none`.

    Raises:
        DataError: If there is no such data, it is not what the model takes, or the model
            comes without the tokenizer or processor that it needs.
    """
    inputs = inputs_of(source)
    reads_text = inputs.text or inputs.decoder
    encoder = TextEncoder.open(source, inputs, options.max_length) if reads_text else None
    drawn = _Drawn()
    if options.source != "builtin" and inputs.grid is None:
        _draw_from_data(drawn, source, inputs, options)
    elif options.source != "builtin":
        _draw_grids(drawn, source, inputs, options)
    _draw_builtin(drawn, source, inputs, options)
    examples = _examples(drawn, inputs, encoder)
    fitted, held = _split(examples, options.holdout)
    count, tokens = len(examples), sum(map(_tokens, examples))
    pad = encoder.pad if encoder else 0
    batches = [*_batches(fitted, options.batch_size, pad)]
    first = len(batches)
    batches += _batches(held, options.batch_size, pad)
    return CalibrationData(
        batches=batches,
        holdout=list(range(first, len(batches))),
        name=" + ".join(drawn.names),
        samples=count,
        tokens=tokens,
        fingerprint=drawn.digest.hexdigest(),
    )


@dataclass
class _Drawn:
    """Samples before they are put together; `frames` are pictures, sounds, volumes or series."""

    texts: list[str] = field(default_factory=list)
    frames: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)

    def add_texts(self, texts: Iterable[str], name: str) -> None:
        self.texts = list(texts)
        self.names.append(name)
        for text in self.texts:
            content = text.encode()
            self.digest.update(f"{len(content)} ".encode() + content)

    def hashed(self, content: NDArray[_Item]) -> NDArray[_Item]:
        self.digest.update(f"{content.shape} ".encode() + content.tobytes())
        return content


def _draw_from_data(
    drawn: _Drawn, source: SourceModel, inputs: Inputs, options: Calibration
) -> None:
    model = source.model_class.__name__
    if inputs.audio:
        raise DataError(
            f"`{model}` takes sound, which cannot be read from `{options.source}`",
            hint="give `--calib builtin` or `--calib none`",
        )
    if inputs.image and frames_of(source.config):
        raise DataError(
            f"`{model}` takes clips, which cannot be read from `{options.source}`",
            hint="give `--calib builtin` or `--calib none`",
        )
    main: dict[Kind, bool] = {"text": inputs.text, "image": inputs.image}
    needed = {kind for kind, present in main.items() if present}
    wanted: set[Kind] = needed | {"text"} if inputs.decoder else needed
    with opened(options.source, options.split) as found:
        table = undecoded(found)
        chosen = columns_of(table, options.columns, wanted, needed, model)
        named = tuple(name for columns in chosen.values() for name in columns)
        if chosen.get("text"):
            pool = Pool(table, chosen["text"])
            drawn.add_texts(map(str, pool.draw(options.samples, options.seed)), table.label)
        if chosen.get("image"):
            # Without it real pictures would be scaled in a way that the model never saw.
            read = image_reader(source, needed=True)
            channels = image_shape(source.config)[0]
            files = Pool(table, chosen["image"]).draw(options.samples, options.seed)
            for content in files:
                pixels = decode(cast(bytes, content), channels, f"`{table.label}`")
                drawn.frames.append(read(drawn.hashed(pixels)))
        if not drawn.texts and not drawn.frames:
            raise DataError(
                f"all {len(table.rows)} rows of `{table.label}` are empty in the columns "
                + ", ".join(f"`{name}`" for name in named),
                hint="name other columns in `calibration.columns`, or give other data",
            )
        is_plain = table.rows.info.builder_name in ("text", "imagefolder")
        drawn.names = [table.label if is_plain else f"{table.label}:{','.join(named)}"]


def _draw_builtin(drawn: _Drawn, source: SourceModel, inputs: Inputs, options: Calibration) -> None:
    """Draw what the model needs and has not got yet."""
    if inputs.image and not drawn.frames and frames_of(source.config):
        drawn.names.append("builtin clips (synthetic, without the model's image processor)")
        drawn.frames = list(_clips(drawn, source, options))
    if inputs.image and not drawn.frames:
        known = "" if has_processor_file(source) else ", without the model's image processor"
        drawn.names.append(f"builtin images (synthetic{known})")
        drawn.frames = list(_pictures(drawn, source, options))
    if inputs.grid is not None and not drawn.frames:
        _draw_builtin_grids(drawn, source, inputs, options)
    if inputs.audio:
        drawn.names.append("builtin audio (synthetic)")
        shape = spectrogram_shape(source)
        for index in range(min(options.samples, builtin.MOST_SOUNDS)):
            sound = builtin.speech(*shape, np.random.default_rng([options.seed, index]))
            drawn.frames.append(torch.from_numpy(drawn.hashed(sound)))
    if (inputs.text or inputs.decoder) and not drawn.texts:
        texts = draw_texts(builtin.texts(), options.samples, options.seed)
        drawn.add_texts(texts, "builtin text")


def _draw_grids(drawn: _Drawn, source: SourceModel, inputs: Inputs, options: Calibration) -> None:
    """Draw volumes, or windows of a series, from data."""
    series = inputs.grid == SERIES
    needs = Needs(window=window_of(source)) if series else Needs(volume=True)
    found = load_examples(
        options.source, options.split, needs, limit=options.samples, seed=options.seed
    )
    drawn.names.append(found.name)
    if found.windows is not None:
        frames = [found.windows.past(index) for index in range(len(found))]
    else:
        assert found.volumes is not None  # one of the two was asked for
        frames = [as_input(volume) for volume in found.volumes]
    wanted = grid_shape(source, inputs)
    if tuple(frames[0].shape) != wanted:
        raise DataError(
            f"`{found.name}` has inputs of shape {tuple(frames[0].shape)}, the model takes "
            f"{wanted}",
            hint="give data of that shape, `--calib builtin` or `--calib none`",
        )
    drawn.frames = [torch.from_numpy(drawn.hashed(frame.numpy())) for frame in frames]


def _draw_builtin_grids(
    drawn: _Drawn, source: SourceModel, inputs: Inputs, options: Calibration
) -> None:
    series, shape = inputs.grid == SERIES, grid_shape(source, inputs)
    drawn.names.append(f"builtin {'series' if series else 'volumes'} (synthetic)")
    for index in range(min(options.samples, builtin.MOST_PICTURES)):
        rng = np.random.default_rng([options.seed, index])
        made = builtin.series(shape[0], shape[1], rng) if series else builtin.volume(shape, rng)
        drawn.frames.append(torch.from_numpy(drawn.hashed(made)))


def _pictures(drawn: _Drawn, source: SourceModel, options: Calibration) -> Iterator[Tensor]:
    read = image_reader(source, needed=False)
    channels, height, width = image_shape(source.config)
    for index in range(min(options.samples, builtin.MOST_PICTURES)):
        rng = np.random.default_rng([options.seed, index])
        yield read(drawn.hashed(builtin.picture(height, width, channels, rng)))


def _clips(drawn: _Drawn, source: SourceModel, options: Calibration) -> Iterator[Tensor]:
    """Pictures that drift, each from another place to another side."""
    read, count = plain_reader(source), frames_of(source.config) or 1
    channels, height, width = image_shape(source.config)
    for index in range(min(options.samples, builtin.MOST_PICTURES)):
        rng = np.random.default_rng([options.seed, index])
        still = drawn.hashed(builtin.picture(height, width, channels, rng))
        step = rng.integers(-height // 16, height // 16 + 1, 2)
        yield torch.stack(
            [read(np.roll(still, tuple(frame * step), (0, 1))) for frame in range(count)]
        )


def _examples(drawn: _Drawn, inputs: Inputs, encoder: TextEncoder | None) -> list[Example]:
    frame = "input_features" if inputs.audio else inputs.grid or "pixel_values"
    if encoder is None:
        return [{frame: value} for value in drawn.frames]
    texts = drawn.texts
    if inputs.image or inputs.audio:
        # With fewer pictures than texts each picture gets several, so that no text is lost.
        count = min(len(texts), len(drawn.frames))
        texts = [" ".join(texts[index::count]) for index in range(count)]
    rows = encoder.encode(texts)
    if inputs.image or inputs.audio:
        for row, value in zip(rows, drawn.frames, strict=False):
            if row:
                row[frame] = value
    examples = [row for row in rows if row]
    if not examples:
        raise DataError(
            f"the tokenizer in `{encoder.place}` gives no tokens for any text",
            hint="check the tokenizer, or convert with `--calib none`",
        )
    return examples


def _split(examples: list[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Sort by length, longest first, and hold out samples at equal distances."""
    ordered = sorted(examples, key=_order)
    if len(ordered) == 1:
        return ordered, []
    count = min(max(round(share * len(ordered)), 1), len(ordered) - 1)
    held = {int((index + 0.5) * len(ordered) / count) for index in range(count)}
    return (
        [example for index, example in enumerate(ordered) if index not in held],
        [example for index, example in enumerate(ordered) if index in held],
    )


def _order(example: Example) -> tuple[tuple[int, ...], int]:
    return _frame_shape(example), -_tokens(example)


def _frame_shape(example: Example) -> tuple[int, ...]:
    return tuple(size for value in example.values() if value.ndim > 1 for size in value.shape)


def _tokens(example: Example) -> int:
    ids = example.get("input_ids", example.get("decoder_input_ids"))
    return 0 if ids is None else len(ids)


def _batches(examples: list[Example], size: int, pad: int) -> Iterator[dict[str, Tensor]]:
    """Batch sorted examples; only pictures of equal shape go together."""
    for _, run in groupby(examples, key=_frame_shape):
        same = list(run)
        for first in range(0, len(same), size):
            chunk = same[first : first + size]
            yield collate(chunk, pad)
            for item in chunk:
                item.clear()  # pictures take memory
