"""Data that a model is trained on: read, split, and encoded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tcompress.artifact.checksums import stamps_of
from tcompress.data import calibration, tables
from tcompress.data.chats import ChatWriter
from tcompress.data.examples import Examples, Needs, check_columns, load_examples
from tcompress.data.generated_text import written_texts
from tcompress.data.inputs import SERIES, window_of
from tcompress.data.labels import Classes
from tcompress.errors import DataError, counted, listed
from tcompress.hf.opening import load_model
from tcompress.models import SourceModel
from tcompress.options import TrainingData
from tcompress.options.steps import FEW
from tcompress.progress import Progress, Silent
from tcompress.training.batches import Encoded
from tcompress.training.encoded_examples import ExampleEncoder
from tcompress.training.tasks import TrainingTask

BUILTIN, TEACHER = "builtin", "teacher"
WRITTEN = 2048  # texts that a teacher writes, at most
FEWEST_HELD = 128  # examples of a source, where these are not a tenth of it
BESIDE = 256  # texts that ship, to see what healing does to others than the user's, at most


@dataclass(frozen=True, eq=False)
class Data:
    """Data of a run; `notes` say what is doubtful about it."""

    train: Encoded
    validation: Encoded
    name: str
    fingerprint: str
    files: Mapping[str, str]  # stamps of local files and folders, from before they were read
    labels: Classes
    pad: int
    held: dict[str, Encoded] = field(default_factory=dict)
    """Without a task: examples that are held out, by source, and text that ships beside it."""
    notes: tuple[str, ...] = ()


def load_data(
    source: SourceModel,
    options: TrainingData,
    task: TrainingTask | None,
    seed: int,
    teacher: SourceModel | None = None,
    progress: Progress | None = None,
    beside: int = BESIDE,
    *,
    variants: bool = False,
    device: torch.device | str = "cpu",
) -> Data:
    """Read and encode the data of a run; without a task inputs alone, `beside` texts that ship.

    With `variants`, texts that mixtures of weights are compared on are followed by themselves
    without some of their words. A teacher that writes data does so on the device.
    """
    files = stamps_of(options.names)
    encoder = ExampleEncoder.of(source, task, seed, options.max_length)
    reader = ExampleReader(encoder, options, teacher, progress or Silent(), device)
    parts = reader.training()
    training = _joined(parts)
    held_out = [_with_classes(part, training) for part in reader.validation(parts)]
    if options.validation is None:
        limit = max(1, options.validation_samples // len(parts))
        for index, part in enumerate(parts):
            if part.whole:
                fewest = min(FEWEST_HELD, len(part) // 10) if task is None else task.fewest_held
                parts[index], held = _split_off(part, options.holdout, limit, seed, fewest)
                held_out.append(held)
        training = _joined(parts)
    if options.weights:
        pairs = zip(parts, options.weights, strict=True)
        training = _joined([_weighted(*pair, seed) for pair in pairs])
    validation = _joined(held_out)
    train = encoder.encode(training, "train on")
    validated = encoder.encode(validation, "validate on")
    compared = [] if task is not None else [*held_out, *reader.beside(beside)]
    absent = training.labels.absent & validation.labels.absent
    few = (
        f"warning: {training.name} has {counted(len(train), 'example')} to train on: with fewer "
        f"than {FEW} little is learnt"
    )
    digest = hashlib.sha256((training.fingerprint + validation.fingerprint).encode()).hexdigest()
    return Data(
        train,
        validated,
        training.name,
        digest,
        files,
        replace(training.labels, absent=absent),
        encoder.texts.pad if encoder.texts else 0,
        encoder.by_source(compared, variants=variants),
        (few,) if len(train) < FEW else (),
    )


def check_training_data(
    source: SourceModel,
    options: TrainingData,
    task: TrainingTask | None,
    seed: int,
    teacher: SourceModel | None = None,
) -> None:
    """Read the data of a run without encoding it; errors are those of `load_data`."""
    encoder = ExampleEncoder.of(source, task, seed, options.max_length)
    reader = ExampleReader(encoder, options, teacher)
    reader.validation(reader.training())


@dataclass(frozen=True)
class ExampleReader:
    """Source of examples for an encoder, as options say."""

    encoder: ExampleEncoder
    options: TrainingData
    teacher: SourceModel | None
    progress: Progress | None = None  # none where data is only checked
    device: torch.device | str = "cpu"  # on which a teacher writes

    def training(self) -> list[Examples]:
        """Read the examples to train on, source by source."""
        options = self.options
        return [self._read(name, options.split, options.samples) for name in options.source]

    def validation(self, training: Sequence[Examples]) -> list[Examples]:
        """Read the examples to validate on: those named, or what files have as a part for them."""
        options, sources = self.options, self.options.source
        names = [name for name, part in zip(sources, training, strict=True) if not part.whole]
        names = [options.validation] if options.validation else names
        split, samples = options.validation_split, options.validation_samples
        return [self._read(name, split, samples) for name in names]

    def beside(self, count: int) -> list[Examples]:
        """Read so many texts that ship, for models of texts that are not trained on them."""
        if self.encoder.texts is None or BUILTIN in self.options.source:
            return []
        return [self._read_inputs(BUILTIN, "train", count)]

    def _read(self, name: str, split: str, samples: int) -> Examples:
        """Read the examples that the task needs, or all texts or pictures there are."""
        task, needs = self.encoder.task, self._needs()
        if needs is None:
            return self._read_inputs(name, split, samples)
        if name in (BUILTIN, TEACHER):
            what, needing = "volumes or series", self.encoder.model
            if task is not None:
                what, needing = "targets" if task.needs.generates else "labels", task.name
            hint = "give data with `--data`, or leave the task out to heal"
            raise DataError(f"the data `{name}` has no {what}, which `{needing}` needs", hint)
        columns, seed = self.options.columns, self.encoder.seed
        examples = load_examples(name, split, needs, columns=columns, limit=samples, seed=seed)
        self.encoder.check_shape(examples)
        return examples if task is None else task.prepare(examples)

    def _needs(self) -> Needs | None:
        """Needs of the task; None for inputs alone, of texts and pictures."""
        task, grid = self.encoder.task, self.encoder.inputs.grid
        if grid == SERIES:
            return Needs(window=window_of(self.encoder.source))
        if task is None:
            return Needs(volume=True) if grid is not None else None
        return task.needs if task.needs.target is not None or task.needs.texts[0] == 2 else None

    def _read_inputs(self, name: str, split: str, samples: int) -> Examples:
        encoder = self.encoder
        if name == TEACHER:
            return self._written(samples)
        if name == BUILTIN:
            if encoder.texts is None:
                hint = "give pictures with `--data`: a folder, a file or a hub id"
                raise DataError("there are no built-in pictures to train on", hint)
            texts = calibration.builtin_texts()[:samples]
            digest = tables.hash_of(map(str.encode, texts)).hexdigest()
            return Examples("builtin text", "train", digest, (texts,))
        kind: tables.Kind = "text" if encoder.texts else "image"
        columns = self.options.columns
        named = tuple(columns[role] for role in ("text", "pair", "image") if role in columns)
        with tables.opened(name, split) as content:
            table = tables.with_derived(content, columns.values())
            table = tables.with_listed_texts(table) if kind == "text" else table
            kinds = tables.kinds_of(table)
            plain = {name: "text" if kind == "chat" else kind for name, kind in kinds.items()}
            check_columns(table, plain, columns, Needs())
            chosen = tables.columns_of(table, named, {kind}, {kind}, encoder.model)[kind]
            writer = ChatWriter(encoder.texts and encoder.texts.tokenizer, table.label)
            items = list(tables.draw_cells(table, chosen, samples, encoder.seed, writer))
            writer.close()
            cells = len(table.rows) * len(chosen)
        writes = encoder.task is not None and encoder.task.name == "causal-lm"
        if encoder.texts is not None and not (encoder.is_causal or writes):  # which read all tokens
            texts = [str(item) for item in items]
            items += encoder.texts.pieces(texts, samples, table.label, cells)
        contents = (item.encode() if isinstance(item, str) else item for item in items)
        digest = tables.hash_of(contents).hexdigest()
        examples = Examples(f"{table.label}:{','.join(chosen)}", split, digest)
        if encoder.texts:
            return replace(examples, texts=([str(item) for item in items],))
        return replace(examples, images=tuple(cast(list[bytes], items)))

    def _written(self, samples: int) -> Examples:
        """Texts that the teacher writes; it writes nothing where data is only checked."""
        teacher, encoder = self.teacher, self.encoder.texts
        if teacher is None or not self.encoder.is_causal or encoder is None:
            name = self.encoder.model
            what = "there is none" if teacher is None else f"a `{name}` writes no text"
            text = f"the data `{TEACHER}` is what the teacher writes, but {what}"
            raise DataError(text, "give data with `--data`, or leave it out")
        texts = [TEACHER]
        if (progress := self.progress) is not None:
            count, model = min(samples, WRITTEN), load_model(teacher, device=self.device)
            progress.stage("the teacher is writing", count, "texts")
            how = count, encoder.limit, self.encoder.seed, progress.advance
            texts = written_texts(model, encoder.tokenizer, *how)
        digest = tables.hash_of(map(str.encode, texts)).hexdigest()
        return Examples("text that the teacher wrote", "train", digest, (texts,))


def _joined(parts: Sequence[Examples]) -> Examples:
    """Put several data sets one after another."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.windows is not None:
        text = f"`{first.name}` and `{parts[1].name}` are series, of which one can be trained on"
        raise DataError(text, "give one file with all series")
    if any(part.labels.several for part in parts):
        parts = [_as_several(part) for part in parts]
        first = parts[0]
    for part in parts[1:]:
        if part.classes != first.classes or len(part.texts) != len(first.texts):
            raise DataError(
                f"`{first.name}` and `{part.name}` do not go together: they have "
                f"{len(first.classes)} and {len(part.classes)} classes, and {len(first.texts)} and "
                f"{len(part.texts)} texts in an example",
                hint="give data sets with the same columns and classes",
            )
    targets: Any = [target for part in parts for target in part.targets or ()]
    volumes = [part.volumes for part in parts if part.volumes is not None]
    columns = zip(*(part.texts for part in parts), strict=True)
    absent = frozenset.intersection(*(part.labels.absent for part in parts))
    return replace(
        first,
        name=" + ".join(part.name for part in parts),
        fingerprint=hashlib.sha256("".join(p.fingerprint for p in parts).encode()).hexdigest(),
        texts=tuple([text for texts in column for text in texts] for column in columns),
        images=tuple(image for part in parts for image in part.images),
        targets=None if first.targets is None else targets,
        labels=replace(first.labels, absent=absent),
        volumes=np.concatenate(volumes) if volumes else None,
    )


def _as_several(examples: Examples) -> Examples:
    """Take one label of each example as one of several."""
    if examples.labels.several or examples.targets is None:
        return examples
    targets: Any = [(target,) for target in examples.targets]
    return replace(examples, targets=targets, labels=replace(examples.labels, several=True))


def _with_classes(held: Examples, train: Examples) -> Examples:
    """Number the classes of held-out data as those of the training data."""
    if train.labels.several:
        held = _as_several(held)
    elif held.labels.several:
        text = f"`{held.name}` has several labels an example, `{train.name}` one"
        raise DataError(text, "give data sets of the same kind")
    if held.classes == train.classes or held.targets is None:
        return held
    numbers = {
        index: train.classes.index(name)
        for index, name in enumerate(held.classes)
        if name in train.classes
    }
    unknown = [held.classes[index] for index in held.labels.used if index not in numbers]
    if unknown:
        text = f"`{held.name}` has the classes {listed(unknown)}, which `{train.name}` has not"
        raise DataError(text, "give data sets with the same classes")
    targets: Any = [
        tuple(numbers[label] for label in target)
        if isinstance(target, tuple)
        else numbers[int(target)]
        for target in held.targets
    ]
    absent = frozenset(range(len(train.classes))) - {numbers[index] for index in held.labels.used}
    return replace(held, targets=targets, labels=replace(train.labels, absent=absent))


def _split_off(
    examples: Examples, share: float, limit: int, seed: int, fewest: int
) -> tuple[Examples, Examples]:
    """Hold examples out at random, at least so many where they are not half of all."""
    order = np.random.default_rng([seed, 1]).permutation(len(examples))
    fewest = max(1, min(fewest, len(order) // 2))
    count = min(max(round(share * len(order)), fewest), limit)
    return _chosen(examples, np.sort(order[count:])), _chosen(examples, np.sort(order[:count]))


def _weighted(examples: Examples, weight: float, seed: int) -> Examples:
    """Take examples as often as the weight says; of a part of them, which they are is drawn."""
    times, count = int(weight), len(examples)
    order = np.random.default_rng([seed, 2]).permutation(count)
    part = np.sort(order[: max(round((weight - times) * count), 0 if times else 1)])
    return _chosen(examples, np.concatenate([np.tile(np.arange(count), times), part]))


def _chosen(examples: Examples, indices: NDArray[np.int64]) -> Examples:
    rows = indices.tolist()
    targets: Any = examples.targets
    return replace(
        examples,
        texts=tuple([column[row] for row in rows] for column in examples.texts),
        images=tuple(examples.images[row] for row in rows) if examples.images else (),
        targets=None if targets is None else [targets[row] for row in rows],
        volumes=None if examples.volumes is None else examples.volumes[indices],
        windows=None if examples.windows is None else examples.windows.chosen(rows),
    )
