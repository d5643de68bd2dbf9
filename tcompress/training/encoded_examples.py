"""Examples as a model's inputs: texts, windows, hidden words, pictures, volumes and series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from tcompress.blockwise.output_sampler import LEFT_OUT
from tcompress.data.encoding import (
    TextEncoder,
    check_seq2seq,
    encode_seq2seq,
    image_reader,
    pixels_of,
)
from tcompress.data.examples import Examples
from tcompress.data.grids import as_input
from tcompress.data.inputs import (
    IGNORED,
    SERIES,
    VOLUMES,
    Inputs,
    check_texts,
    frames_of,
    grid_shape,
    image_shape,
    inputs_of,
)
from tcompress.data.sentences import PLAIN, SentenceEncoder
from tcompress.errors import DataError
from tcompress.models import SourceModel
from tcompress.training.batches import Encoded, Row, Text
from tcompress.training.tasks import TrainingTask, masked

COMPARED = 2**14  # tokens of each source that mixtures of weights are compared on


@dataclass(frozen=True)
class ExampleEncoder:
    """Encoder of examples for a model and a task, if there is one. Use `ExampleEncoder.of`."""

    source: SourceModel
    task: TrainingTask | None
    seed: int
    inputs: Inputs
    sentences: SentenceEncoder
    texts: TextEncoder | None  # of a model that reads texts

    @classmethod
    def of(
        cls, source: SourceModel, task: TrainingTask | None, seed: int, max_length: int
    ) -> ExampleEncoder:
        """Open the tokenizer of a model that reads texts.

        Raises:
            DataError: The model reads what cannot be trained on, or what the task has not.
        """
        inputs = inputs_of(source)
        _check_inputs(source, inputs)
        if task is not None:
            _check_task(task, source, inputs)
        if task is not None and task.needs.generates:
            check_seq2seq(source)
        # Healing reads texts as the encoder will, and so does a task that compares embeddings.
        embeds = task is None or task.name == "sts"
        sentences = SentenceEncoder.imitated(source) if embeds else PLAIN
        texts = sentences.reader(source, inputs, max_length) if inputs.text else None
        return cls(source, task, seed, inputs, sentences, texts)

    @property
    def model(self) -> str:
        return self.source.model_class.__name__

    @property
    def is_causal(self) -> bool:
        """True of models that write text."""
        return "CausalLM" in self.model or "LMHead" in self.model

    def encode(self, examples: Examples, purpose: str) -> Encoded:
        """Encode examples, of which there must be some for the purpose."""
        encoded = self._encoded(examples) if len(examples) else None
        if encoded is None or not len(encoded):
            hint = "give more data, or other columns"
            raise DataError(f"`{examples.name}` leaves nothing to {purpose}", hint)
        return encoded

    def by_source(self, parts: Iterable[Examples], *, variants: bool) -> dict[str, Encoded]:
        """Encode the first examples of every source, which mixtures are compared on.

        With `variants`, texts are followed by themselves without some of their words.
        """
        sources: dict[str, Encoded] = {}
        for part in filter(len, parts):
            encoded, same = self._encoded(part), 1
            while (name := part.name if same == 1 else f"{part.name} ({same})") in sources:
                same += 1  # files of one name, in several folders
            if len(encoded):  # a few words may be too short to compare anything on
                first = encoded.first(COMPARED)
                sources[name] = self._with_variants(first) if variants else first
        return sources

    def _with_variants(self, held: Encoded) -> Encoded:
        """Follow every text by itself without some of its words."""
        assert self.texts is not None
        columns = [[text for ((text, *_), *_) in held.texts or ()]]
        columns += [[without_words(text, share) for text in columns[0]] for share in LEFT_OUT]
        prompted = (self.sentences.default.before(column) for column in columns)
        rows = [*zip(*map(self.texts.encode, prompted), strict=True)]
        texts = [tuple((text,) for text in row) for row in zip(*columns, strict=True)]
        chosen = [index for index, row in enumerate(rows) if all(row)]
        return Encoded.of([rows[i] for i in chosen], texts=[texts[i] for i in chosen])

    def _encoded(self, examples: Examples) -> Encoded:
        if self.task is not None:
            examples = self.task.expand(examples, self.seed)
        name = None if self.task is None else self.task.name
        if self.inputs.grid == SERIES:
            return self._series(examples)
        if self.inputs.grid is not None or self.texts is None:
            read = self._picture_reader(examples)
            targets = _targets_of(examples)
            return Encoded([0] * len(examples), lambda index, _: [read(index)], targets)
        # Of a model that writes text long texts may be cut anywhere.
        if name == "causal-lm" or (name is None and self.is_causal):
            return _windows(self.texts, examples, with_labels=name == "causal-lm")
        if name == "masked-lm":
            return _masked(self.texts, examples.texts[:1], self.seed)
        if name == "seq2seq":
            return self._source_target(self.texts, examples)
        if name == "pretraining":
            return self._pretraining(self.texts, examples)
        return self._texts(self.texts, examples)

    def _source_target(self, encoder: TextEncoder, examples: Examples) -> Encoded:
        sources, targets = examples.texts
        rows = encode_seq2seq(self.source, encoder, sources, targets, examples.name)
        encoded = Encoded.of([(row,) for row in rows])
        # What a teacher computes has rows for the tokens of two texts: too little to cache it by.
        encoded.is_fixed = False
        return encoded

    def _texts(self, encoder: TextEncoder, examples: Examples) -> Encoded:
        pairs = self.task is not None and self.task.name == "sts"
        prompted = [self.sentences.default.before(list(texts)) for texts in examples.texts]
        columns = [(column,) for column in prompted] if pairs else [prompted]
        encoded = list(zip(*(encoder.encode(*texts) for texts in columns), strict=True))
        plain = [*zip(*examples.texts, strict=True)]  # without prompts, which are the model's own
        texts: list[tuple[Text, ...]] = [
            tuple((text,) for text in row) if pairs else (row,) for row in plain
        ]
        labels = _targets_of(examples)
        if labels is None and not pairs:
            texts = [text for text, rows in zip(texts, encoded, strict=True) if all(rows)]
            encoded = [rows for rows in encoded if all(rows)]
        if not all(all(rows) for rows in encoded):
            hint = "remove rows with empty texts"
            raise DataError(f"`{examples.name}` has texts without any token", hint)
        return Encoded.of(encoded, labels, texts)

    def _pretraining(self, encoder: TextEncoder, examples: Examples) -> Encoded:
        """Pairs of texts with hidden words, others in every epoch; of three texts in the first."""
        hidden = _masked(encoder, examples.texts, self.seed, _targets_of(examples))

        def read(index: int, epoch: int) -> list[Row]:
            [row] = hidden.read(index, epoch)
            row["words"] = row.pop("labels")
            return [row]

        return replace(hidden, read=read)

    def _picture_reader(self, examples: Examples) -> Callable[[int], Row]:
        """Make the function that reads a picture or a volume, by its index."""
        volumes, images = examples.volumes, examples.images
        if volumes is not None:
            return lambda index: {VOLUMES: as_input(volumes[index])}
        process = image_reader(self.source, needed=True)
        channels, name = image_shape(self.source.config)[0], f"`{examples.name}`"
        return lambda index: {"pixel_values": process(pixels_of(images[index], channels, name))}

    def _series(self, examples: Examples) -> Encoded:
        windows = examples.windows
        assert windows is not None  # the model reads series

        def read(index: int, epoch: int) -> list[Row]:
            row = {SERIES: windows.past(index)}
            return [row if self.task is None else {**row, "labels": windows.future(index)}]

        return Encoded([0] * len(windows), read)

    def check_shape(self, examples: Examples) -> None:
        """Compare volumes, the variables of a series, or the number of texts, with the model."""
        if examples.texts:
            check_texts(self.source, len(examples.texts), examples.name)
        shape = examples.shape
        if shape is not None and shape != (expected := grid_shape(self.source, self.inputs)):
            text = f"`{examples.name}` has inputs of shape {shape}, the model takes {expected}"
            raise DataError(text, "give data of that shape, or a model for this one")


def without_words(text: str, share: float) -> str:
    """Leave a share of the words out, which are the same whenever the text is met.

    Texts that have much in common are what embeddings tell apart; of others poor models know as
    much as good ones.
    """
    words = text.split()
    drawn = np.random.default_rng([len(text), round(1000 * share)]).random(len(words))
    remaining = [word for word, chance in zip(words, drawn, strict=True) if chance >= share]
    return " ".join(remaining or words[:1]) or text


def _check_inputs(source: SourceModel, inputs: Inputs) -> None:
    how = "train it with its own scripts"
    clips = inputs.image and frames_of(source.config)
    what = "sound" if inputs.audio else "clips" if clips else ""
    if inputs.image and inputs.text and not what:
        what = "texts and pictures together"
        how = "train its towers alone, or with their own scripts"
    if what:
        hint = f"{how}: a converted model is an ordinary model"
        name = source.model_class.__name__
        raise DataError(f"`{name}` takes {what}, which cannot be trained on yet", hint)


def _check_task(task: TrainingTask, source: SourceModel, inputs: Inputs) -> None:
    needs, grids = task.needs, {VOLUMES: "volumes", SERIES: "series"}
    reads = grids[inputs.grid] if inputs.grid else "texts" if inputs.text else "pictures"
    wanted = "series" if needs.window else "volumes" if needs.volume else "texts"
    wanted = "pictures" if needs.image else wanted
    if reads != wanted:
        text = f"`{source.model_class.__name__}` reads {reads}, the task `{task.name}` {wanted}"
        raise DataError(text, "choose another task, or a model for this one")


def _windows(encoder: TextEncoder, examples: Examples, *, with_labels: bool) -> Encoded:
    """Texts one after another, cut into windows of equal length."""
    end, stream = encoder.end, list[int]()
    for ids in encoder.encode_whole(examples.texts[0]):
        stream += ids if end is None or not ids or ids[-1] == end else [*ids, end]
    rows: list[tuple[Row]] = []
    for window in torch.tensor(stream, dtype=torch.long).split(encoder.limit):
        # The last one is shorter; one that is too short to predict anything is dropped.
        if len(window) > 1:
            row = {"input_ids": window, "attention_mask": torch.ones_like(window)}
            if with_labels:
                row["labels"] = torch.cat([window[1:], window.new_tensor([IGNORED])])
            rows.append((row,))
    return Encoded.of(rows)


def _masked(
    encoder: TextEncoder,
    texts: Sequence[Sequence[str]],
    seed: int,
    targets: Tensor | None = None,
) -> Encoded:
    """Texts with hidden words, others in every epoch.

    Special tokens are never hidden, and of three texts only words of the first are.
    """
    tokenizer = encoder.tokenizer
    if tokenizer.mask_token_id is None:
        hint = "choose the task `causal-lm`, or another model"
        raise DataError(f"the tokenizer in `{encoder.place}` has no mask token", hint)
    special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
    how = tokenizer.mask_token_id, encoder.vocabulary or len(tokenizer)
    encoded = encoder.encode(*texts)
    nonempty = [index for index, row in enumerate(encoded) if row]
    rows = [encoded[index] for index in nonempty]

    def read(index: int, epoch: int) -> list[Row]:
        row = rows[index]
        spared = torch.isin(row["input_ids"], special)
        if len(texts) == 3:
            spared |= row["token_type_ids"] > 0
        return [{**row, **masked(row["input_ids"], spared, *how, [seed, epoch, index])}]

    labels = None if targets is None else targets[nonempty]
    return Encoded([len(row["input_ids"]) for row in rows], read, labels)


def _targets_of(examples: Examples) -> Tensor | None:
    """Targets of examples: (examples,), or with several labels marks (examples, classes)."""
    if examples.targets is None:
        return None
    if not examples.labels.several:
        return torch.tensor(examples.targets)
    marks = torch.zeros(len(examples), len(examples.labels))
    for row, ids in enumerate(cast(list[tuple[int, ...]], examples.targets)):
        marks[row, [*ids]] = 1.0
    return marks
