"""Batches of calibration data for a model, from files or from what ships, and all of its texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from tcompress.data import synthetic
from tcompress.data.chats import ChatWriter
from tcompress.data.encoding import (
    TextEncoder,
    image_reader,
    pixels_of,
    plain_reader,
    processor_settings,
)
from tcompress.data.examples import Needs, load_examples
from tcompress.data.grids import as_input
from tcompress.data.inputs import (
    SERIES,
    Batch,
    Inputs,
    collate,
    frames_of,
    grid_shape,
    image_shape,
    inputs_of,
    spectrogram_shape,
    window_of,
)
from tcompress.data.sentences import Prompt, SentenceEncoder
from tcompress.data.tables import (
    Kind,
    Table,
    all_empty,
    columns_of,
    content,
    draw_cells,
    draw_texts,
    hash_of,
    opened,
    with_listed_texts,
)
from tcompress.errors import DataError, listed
from tcompress.models import SourceModel
from tcompress.options.convert_options import FEWEST, Calibration

MOST_PICTURES = 256
MOST_SOUNDS = 64
_ROWS = 1000  # read at a time


def builtin_texts() -> list[str]:
    """Give the shipped texts, each a line."""
    file = resources.files("tcompress") / "assets" / "calibration.txt"
    return file.read_text(encoding="utf-8").splitlines()


@dataclass(frozen=True)
class CalibrationData:
    """Batches to run through a model."""

    batches: list[dict[str, Tensor]]  # keyword arguments of the model's forward pass, on the CPU
    # Indices of the batches kept back for measuring; none if there is one sample.
    holdout: list[int]
    name: str  # what was used, such as `builtin text` or `train.parquet:text`
    samples: int  # number of samples over all batches
    tokens: int  # number of tokens of text, padding not counted
    fingerprint: str  # SHA-256 of the texts, pixels and sounds that were drawn
    origins: dict[int, str] = field(default_factory=dict)
    """Names of the sources of batches kept back, by index; no batch mixes them."""
    places: tuple[int, ...] = ()
    """Indices of the batches among those of the whole data, where some are left out."""

    @property
    def fitted(self) -> list[int]:
        """Indices of the batches to fit on."""
        return [index for index in range(len(self.batches)) if index not in self.holdout]

    @property
    def fitted_batches(self) -> list[dict[str, Tensor]]:
        return [self.batches[index] for index in self.fitted]

    def place(self, index: int) -> int:
        """Index of a batch among those of the whole data."""
        return self.places[index] if self.places else index

    def part(self, samples: int) -> CalibrationData:
        """The same with fewer batches to fit on, of all lengths; what is held out stays."""
        fitted = self.fitted
        count = max(1, round(len(fitted) * samples / self.samples))
        if count >= len(fitted):
            return self
        chosen = {fitted[index * len(fitted) // count] for index in range(count)}
        indices = sorted({*chosen, *self.holdout})
        positions = {index: position for position, index in enumerate(indices)}
        return replace(
            self,
            batches=[self.batches[index] for index in indices],
            holdout=[positions[index] for index in self.holdout],
            samples=samples,
            origins={positions[index]: name for index, name in self.origins.items()},
            places=tuple(map(self.place, indices)),
        )


_WIDEST_BYTES, _SCORES_BYTES = 2**27, 2**29
"""Of the input of the widest layer, and of the scores, for the tokens that are run together."""


def samples_in(batch: Batch) -> int:
    """Count the samples of a batch."""
    return len(next(iter(batch.values())))


Named = tuple[Any, str]
"""A text, or a frame, and the name of its source."""


class _SourceData(NamedTuple):
    """Texts and frames of one source; `frames` are pictures, sounds, volumes or series."""

    name: str
    texts: Sequence[str] = ()
    frames: Sequence[Tensor] = ()


class _Example(NamedTuple):
    inputs: dict[str, Tensor]  # of one sample, without the batch axis
    origin: str


def load_batches(source: SourceModel, options: Calibration, widest: int = 0) -> CalibrationData:
    """Read, draw and encode the calibration data of a model, whose widest layer has so many inputs.

    Which samples are drawn, and which of them are held out, does not depend on the batch size.
    """
    inputs = inputs_of(source)
    reads_text = inputs.text or inputs.decoder
    sentences = SentenceEncoder.imitated(source)
    encoder = sentences.reader(source, inputs, options.max_length) if reads_text else None
    sources = _Sources(source, inputs, options, encoder)
    parts = sources.draw()
    examples = _examples(parts, sources.most, inputs, encoder, sentences.default)
    if sources.most > options.count:
        mean = sum(map(_tokens, examples)) / len(examples)
        examples = examples[: options.enough(mean, widest)]
    fitted, held = _split(examples, options.holdout)
    count, tokens = len(examples), sum(map(_tokens, examples))
    pad = encoder.pad if encoder else 0
    limits = (options.batch_size, most_tokens(source, widest))
    batches = [*_batches(fitted, *limits, pad)]
    origins: dict[int, str] = {}
    for origin in dict.fromkeys(item.name for item in parts):
        of_source = [item for item in held if item.origin == origin]
        for batch in _batches(of_source, *limits, pad):
            origins[len(batches)] = origin
            batches.append(batch)
    return CalibrationData(
        batches=batches,
        holdout=[*origins],
        name=" + ".join(item.name for item in parts),
        samples=count,
        tokens=tokens,
        fingerprint=sources.digest.hexdigest(),
        origins=origins,
    )


class _Sources:
    """The sources that a user names, and what ships where they lack something."""

    def __init__(
        self, source: SourceModel, inputs: Inputs, options: Calibration, encoder: TextEncoder | None
    ) -> None:
        self._encoder = encoder
        self._source, self._inputs, self._options = source, inputs, options
        self._named = [name for name in options.source if name != "builtin"]
        self._columns: set[str] = set()  # those of all tables
        only_text = not (inputs.image or inputs.audio or inputs.grid)
        self.most = options.most if only_text else options.count
        self.digest = hashlib.sha256()

    def draw(self) -> list[_SourceData]:
        inputs, options = self._inputs, self._options
        read = self._from_table if inputs.grid is None else self._from_grids
        parts = [read(name) for name in self._named]
        unknown = {*options.columns} - self._columns
        if unknown and len(parts) > 1:
            hint = f"name others; there are {listed(self._columns)}"
            raise DataError(f"none of the data has the columns {listed(unknown)}", hint)
        builtin, texts = "builtin" in options.source, sum(len(item.texts) for item in parts)
        if not any(item.frames for item in parts) or builtin:
            parts += self._made()
        is_short = texts < FEWEST and options.samples is None and not inputs.image
        if (inputs.text or inputs.decoder) and (builtin or is_short or not texts):
            shipped = draw_texts(builtin_texts(), self.most, options.seed)
            parts.append(_SourceData("builtin text", self._hashed_texts(shipped)))
        return parts

    def _from_table(self, source: str) -> _SourceData:
        inputs, options = self._inputs, self._options
        model = self._source.model_class.__name__
        clips = inputs.image and frames_of(self._source.config)
        if inputs.audio or clips:
            what = f"{'sound' if inputs.audio else 'clips'}, which cannot be read from `{source}`"
            raise DataError(f"`{model}` takes {what}", "give `--calib builtin` or `--calib none`")
        main: dict[Kind, bool] = {"text": inputs.text, "image": inputs.image}
        needed = {kind for kind, present in main.items() if present}
        kinds: set[Kind] = needed | {"text"} if inputs.decoder else needed
        texts: list[str] = []
        frames: list[Tensor] = []
        with opened(source, options.split) as stored:
            table = with_listed_texts(stored) if kinds == {"text"} else stored
            names = {*table.rows.column_names}
            self._columns |= names
            columns = [name for name in options.columns if name in names or len(self._named) == 1]
            chosen = columns_of(table, columns, kinds, needed, model)
            used_columns = [name for columns in chosen.values() for name in columns]
            if chosen.get("text"):
                tokenizer = self._encoder.tokenizer if self._encoder else None
                writer = ChatWriter(tokenizer, table.label)
                cells = draw_cells(table, chosen["text"], self.most, options.seed, writer)
                texts = self._hashed_texts(map(str, cells))
                writer.close()
                if self._encoder is not None and not inputs.image:
                    where = table.label, len(table.rows) * len(chosen["text"])
                    pieces = self._encoder.pieces(texts, self.most, *where)
                    texts += self._hashed_texts(pieces)
            if chosen.get("image"):
                # Without it real pictures would be scaled in a way that the model never saw.
                read = image_reader(self._source, needed=True)
                channels = image_shape(self._source.config)[0]
                for picture in draw_cells(table, chosen["image"], self._share, options.seed):
                    pixels = pixels_of(cast(bytes, picture), channels, f"`{table.label}`")
                    frames.append(read(self._hashed(pixels)))
            if not texts and not frames:
                raise all_empty(table, ", ".join(f"`{name}`" for name in used_columns))
            label = label_among(self._named, source, table.label)
            label += "" if table.is_plain else f":{','.join(used_columns)}"
            return _SourceData(label, texts, frames)

    @property
    def _share(self) -> int:
        """Pictures of one source: they take memory."""
        return -(-self._options.count // len(self._options.source))

    def _from_grids(self, source: str) -> _SourceData:
        options, series = self._options, self._inputs.grid == SERIES
        needs = Needs(window=window_of(self._source)) if series else Needs(volume=True)
        examples = load_examples(source, options.split, needs, limit=self._share, seed=options.seed)
        if examples.windows is not None:
            frames = [examples.windows.past(index) for index in range(len(examples))]
        else:
            assert examples.volumes is not None  # one of the two was asked for
            frames = [as_input(volume) for volume in examples.volumes]
        shape = grid_shape(self._source, self._inputs)
        if examples.shape != shape:
            hint = "give data of that shape, `--calib builtin` or `--calib none`"
            has = f"`{examples.name}` has inputs of shape {examples.shape}"
            raise DataError(f"{has}, the model takes {shape}", hint)
        hashed = [torch.from_numpy(self._hashed(frame.numpy())) for frame in frames]
        return _SourceData(label_among(self._named, source, examples.name), (), hashed)

    def _made(self) -> Iterator[_SourceData]:
        """Frames that ship with no file, for models that read any."""
        inputs = self._inputs
        if inputs.image:
            yield self._pictures()
        if inputs.grid is not None:
            shape, is_series = grid_shape(self._source, inputs), inputs.grid == SERIES
            of_volumes = partial(synthetic.volume, shape)
            draw = partial(synthetic.series, shape[0], shape[1]) if is_series else of_volumes
            yield self._make(f"builtin {'series' if is_series else 'volumes'} (synthetic)", draw)
        if inputs.audio:
            bands = spectrogram_shape(self._source)
            draw = partial(synthetic.speech, *bands)
            yield self._make("builtin audio (synthetic)", draw, MOST_SOUNDS)

    def _pictures(self) -> _SourceData:
        channels, height, width = image_shape(self._source.config)
        count = frames_of(self._source.config)
        missing = count or not processor_settings(self._source)
        lack = ", without the model's image processor" if missing else ""
        read = plain_reader(self._source) if count else image_reader(self._source, needed=False)

        def drift(still: Any, rng: Generator) -> Tensor:
            """A clip: a picture that moves, each from another place to another side."""
            step = rng.integers(-height // 16, height // 16 + 1, 2)
            moved = (np.roll(still, tuple(frame * step), (0, 1)) for frame in range(count or 1))
            return torch.stack([read(pixels) for pixels in moved])

        return self._make(
            f"builtin {'clips' if count else 'images'} (synthetic{lack})",
            lambda rng: synthetic.picture(height, width, channels, rng),
            read=drift if count else lambda pixels, _: read(pixels),
        )

    def _make(
        self,
        name: str,
        make: Callable[[Generator], NDArray[Any]],
        limit: int = MOST_PICTURES,
        read: Callable[[Any, Generator], Tensor] = lambda made, _: torch.from_numpy(made),
    ) -> _SourceData:
        """Make samples, each from a seed of its own, and turn them into inputs."""
        seeds = ([self._options.seed, index] for index in range(min(self._share, limit)))
        draws = map(np.random.default_rng, seeds)
        return _SourceData(name, (), [read(self._hashed(make(rng)), rng) for rng in draws])

    def _hashed_texts(self, texts: Iterable[str]) -> list[str]:
        listed = list(texts)
        hash_of(map(str.encode, listed), self.digest)
        return listed

    def _hashed(self, content: NDArray[Any]) -> NDArray[Any]:
        self.digest.update(f"{content.shape} ".encode() + content.tobytes())
        return content


def label_among(sources: Sequence[str], source: str, label: str) -> str:
    """Add the folder to the label of one of several sources, where names of files are equal."""
    alike = [Path(name).name for name in sources].count(Path(source).name) > 1
    return f"{Path(source).expanduser().resolve().parent.name}/{label}" if alike else label


def _by_turns(parts: Iterable[Sequence[Named]], count: int) -> list[Named]:
    """Draw from several sources in turn; where one ends, the others go on."""
    turns = chain.from_iterable(zip_longest(*parts))
    return [item for item in turns if item is not None][:count]


def _examples(
    parts: Sequence[_SourceData],
    count: int,
    inputs: Inputs,
    encoder: TextEncoder | None,
    prompt: Prompt,
) -> list[_Example]:
    name = "input_features" if inputs.audio else inputs.grid or "pixel_values"
    frames = _by_turns(([(frame, item.name) for frame in item.frames] for item in parts), count)
    if encoder is None:
        return [_Example({name: value}, origin) for value, origin in frames]
    texts = _by_turns(([(text, item.name) for text in item.texts] for item in parts), count)
    if inputs.image or inputs.audio:
        # With fewer pictures than texts each picture gets several, so that no text is lost.
        pictured = min(len(texts), len(frames))
        groups = (texts[index::pictured] for index in range(pictured))
        captions = (" ".join(text for text, _ in group) for group in groups)
        texts = [(text, origin) for text, (_, origin) in zip(captions, texts, strict=False)]
    rows = encoder.encode(prompt.before([text for text, _ in texts]))
    for row, (value, _) in zip(rows, frames, strict=False):
        if row:
            row[name] = value
    pairs = zip(rows, texts, strict=True)
    examples = [_Example(row, origin) for row, (_, origin) in pairs if row]
    if not examples:
        hint = "check the tokenizer, or convert with `--calib none`"
        raise DataError(f"the tokenizer in `{encoder.place}` gives no tokens for any text", hint)
    return examples


def _split(examples: list[_Example], share: float) -> tuple[list[_Example], list[_Example]]:
    """Sort by length, longest first, and hold out samples at equal distances."""
    ordered = sorted(examples, key=lambda item: (_frame_shape(item), -_tokens(item)))
    if len(ordered) == 1:
        return ordered, []
    count = min(max(round(share * len(ordered)), 1), len(ordered) - 1)
    held = {int((index + 0.5) * len(ordered) / count) for index in range(count)}
    fitted = [example for index, example in enumerate(ordered) if index not in held]
    return fitted, [ordered[index] for index in sorted(held)]


def _frame_shape(example: _Example) -> tuple[int, ...]:
    frames = (value.shape for value in example.inputs.values() if value.ndim > 1)
    return tuple(chain.from_iterable(frames))


def _tokens(example: _Example) -> int:
    ids = example.inputs.get("input_ids", example.inputs.get("decoder_input_ids"))
    return 0 if ids is None else len(ids)


def most_tokens(source: SourceModel, widest: int) -> int:
    """Number of tokens that are run together through a model, at most.

    What its widest layer reads, and the scores of all tokens of a vocabulary, stay below a size.
    """
    scores = _SCORES_BYTES // (4 * max(1, scores_of(source)))
    return min(_WIDEST_BYTES // (4 * max(1, widest)), scores)


def scores_of(source: SourceModel) -> int:
    """Number of scores that a model gives each token of a text; none without such a head."""
    head = source.keymap.model.get_output_embeddings()  # type: ignore[operator]
    return int(getattr(head, "out_features", 0))


def _batches(
    examples: list[_Example], size: int, tokens: int, pad: int
) -> Iterator[dict[str, Tensor]]:
    """Batch sorted examples, the longest first; only pictures of equal shape go together."""
    for _, run in groupby(examples, key=_frame_shape):
        same, first = list(run), 0
        while first < len(same):
            count = min(size, max(1, tokens // max(1, _tokens(same[first]))))
            chunk = same[first : first + count]
            first += count
            yield collate([item.inputs for item in chunk], pad)
            for item in chunk:
                item.inputs.clear()  # pictures take memory


class WholeTexts(NamedTuple):
    """All texts of one source of data; to be read before the next source is asked for."""

    name: str  # such as `train.csv:text`
    rows: int
    chunks: Iterator[list[list[str]]]  # some rows at a time, each with its texts

    @classmethod
    def of(cls, source: SourceModel, options: Calibration, tokenizer: Any) -> Iterator[WholeTexts]:
        """List the sources that a calibration names; its columns are those that it reads.

        Chats are written by the tokenizer's template.
        """
        model, inputs = source.model_class.__name__, inputs_of(source)
        kinds: set[Kind] = {"text", "image"} if inputs.image else {"text"}
        for name in options.source:
            if name == "builtin":
                texts = builtin_texts()
                yield cls("builtin text", len(texts), iter([[[text] for text in texts]]))
                continue
            with opened(name, options.split) as stored:
                table = with_listed_texts(stored) if kinds == {"text"} else stored
                has, single = table.rows.column_names, len(options.source) == 1
                named = [column for column in options.columns if column in has or single]
                columns = columns_of(table, named, kinds, {"text"}, model)["text"]
                label = label_among(options.source, name, table.label)
                if table.rows.info.builder_name != "text":
                    label += f":{','.join(columns)}"
                chunks = _chunks(table, columns, ChatWriter(tokenizer, table.label))
                yield cls(label, len(table.rows), chunks)


def _chunks(
    table: Table, columns: tuple[str, ...], writer: ChatWriter
) -> Iterator[list[list[str]]]:
    rows, empty = table.rows.select_columns([*columns]), True
    for part in rows.iter(batch_size=_ROWS):
        cells = zip(*(part[column] for column in columns), strict=True)
        texts = [[content(writer(cell)) for cell in row] for row in cells]
        yield [[text for text in row if isinstance(text, str)] for row in texts]
        empty = empty and not any(map(any, texts))
    writer.close()
    if empty:
        raise all_empty(table, listed(columns))
