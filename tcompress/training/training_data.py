"""What a model is trained on, and the head that a task needs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from tcompress.data import calibration
from tcompress.data.encoding import TextEncoder, decode, image_reader
from tcompress.data.examples import (
    Examples,
    Needs,
    are_numbers,
    by_name,
    check_columns,
    doubts,
    label_names,
    load_examples,
)
from tcompress.data.inputs import IGNORED, Inputs, frames_of, image_shape, inputs_of
from tcompress.data.tables import Kind, columns_of, draw_cells, kinds_of, opened, with_derived
from tcompress.errors import DataError
from tcompress.hf.opening import has_head
from tcompress.models import SourceModel
from tcompress.options import TrainingData
from tcompress.training.batches import (
    Encoded,
    Row,
    check_task,
    grid_rows,
    joined,
    split_off,
    unlabelled_needs,
    with_classes,
)
from tcompress.training.tasks import Task, check_labels, masked


@dataclass
class Data:
    """Data of a run.

    Attributes:
        train: What is trained on.
        validation: What is held out.
        name: Name, for people.
        fingerprint: SHA-256 of the contents.
        classes: Names of classes, for classification.
        pad: Token to pad with.
        notes: What is doubtful about it.
    """

    train: Encoded
    validation: Encoded
    name: str
    fingerprint: str
    classes: tuple[str, ...]
    pad: int
    notes: list[str] = field(default_factory=list)


def load_data(source: SourceModel, options: TrainingData, task: Task | None, seed: int) -> Data:
    """Reads and encodes the data of a run.

    Args:
        source: The model; its own tokenizer and image processor are used.
        options: What to read.
        task: The task; None to read inputs alone.
        seed: Seed of the choice of examples.

    Raises:
        DataError: There is no such data, or it is not what the model and the task take.
    """
    reader = _Reader(source, options, task, seed)
    parts = [reader.read(name, options.split, options.samples) for name in options.source]
    found = joined(parts)
    if options.validation is not None:
        held = reader.read(options.validation, options.validation_split, options.validation_samples)
        held = with_classes(held, found)
    elif not found.whole:  # the file has a part for it
        name = options.source[0]
        held = reader.read(name, options.validation_split, options.validation_samples)
    else:
        fewest = 1 if task is None else task.fewest_held
        found, held = split_off(found, options, seed, fewest)
    _check_left(found, found, "train on")
    _check_left(held, held, "validate on")
    train = reader.encode(found)
    validation = reader.encode(held)
    _check_left(train, found, "train on")
    _check_left(validation, held, "validate on")
    digest = hashlib.sha256((found.fingerprint + held.fingerprint).encode()).hexdigest()
    pad = reader.encoder.pad if reader.encoder else 0
    return Data(train, validation, found.name, digest, found.classes, pad)


def check_training_data(
    source: SourceModel, options: TrainingData, task: Task | None, seed: int
) -> None:
    """Reads the data of a run without encoding it.

    Raises:
        DataError: There is no such data, or it is not what the model and the task take.
    """
    reader = _Reader(source, options, task, seed)
    for name in options.source:
        reader.read(name, options.split, options.samples)
    if options.validation is not None:
        reader.read(options.validation, options.validation_split, options.validation_samples)


def _check_left(part: Sized, examples: Examples, what: str) -> None:
    """Raises an error if there is nothing, before or after encoding."""
    if not len(part):
        raise DataError(
            f"`{examples.name}` leaves nothing to {what}", hint="give more data, or other columns"
        )


class _Reader:
    def __init__(
        self, source: SourceModel, options: TrainingData, task: Task | None, seed: int
    ) -> None:
        self.source, self.options, self.task, self.seed = source, options, task, seed
        self.inputs: Inputs = inputs_of(source)
        if self.inputs.audio:
            raise DataError(
                f"`{source.model_class.__name__}` takes sound, which cannot be trained on yet",
                hint="train it with its own scripts: a converted model is an ordinary model",
            )
        if self.inputs.image and frames_of(source.config):
            raise DataError(
                f"`{source.model_class.__name__}` takes clips, which cannot be trained on yet",
                hint="train it with its own scripts: a converted model is an ordinary model",
            )
        if self.inputs.text and self.inputs.image:
            raise DataError(
                f"`{source.model_class.__name__}` takes texts and pictures together, which cannot "
                "be trained on yet",
                hint="train its towers alone, or with their own scripts: a converted model is an "
                "ordinary model",
            )
        self.encoder: TextEncoder | None = None
        if self.inputs.text:
            self.encoder = TextEncoder.open(source, self.inputs, options.max_length)
        if task is not None:
            check_task(task.needs, source, self.inputs)

    def read(self, name: str, split: str, samples: int) -> Examples:
        """Reads what the task needs, or all texts or pictures there are."""
        needs = self._needs()
        if needs is not None and name == "builtin":
            what = "labels" if self.task is not None else "volumes or series"
            raise DataError(
                f"the built-in data has no {what}, which "
                f"`{self.source.model_class.__name__ if self.task is None else self.task.name}` "
                "needs",
                hint="give data with `--data`, or leave the task out to heal",
            )
        if needs is not None:
            columns = self.options.columns
            found = load_examples(
                name, split, needs, columns=columns, limit=samples, seed=self.seed
            )
            return found if self.task is None else self.task.prepare(found)
        if name == "builtin":
            return self._builtin(samples)
        kind: Kind = "text" if self.encoder else "image"
        given = self.options.columns
        columns_given = tuple(given[role] for role in ("text", "pair", "image") if role in given)
        with opened(name, split) as content:
            table = with_derived(content, given.values())
            check_columns(table, kinds_of(table), given)
            model = self.source.model_class.__name__
            chosen = columns_of(table, columns_given, {kind}, {kind}, model)[kind]
            drawn = list(draw_cells(table, chosen, samples, self.seed))
        label = f"{table.label}:{','.join(chosen)}"
        return _unlabelled(label, split, drawn, kind)

    def _needs(self) -> Needs | None:
        """What examples are made of; None for inputs alone, of texts and pictures."""
        if self.task is None:
            grid = self.inputs.grid is not None
            return unlabelled_needs(self.source, self.inputs) if grid else None
        needs = self.task.needs_for(self.source)
        reads_rows = needs.target is not None or needs.window is not None or needs.texts[0] == 2
        return needs if reads_rows else None

    def _builtin(self, samples: int) -> Examples:
        if self.encoder:
            return _unlabelled(
                "builtin text", "train", calibration.builtin_texts()[:samples], "text"
            )
        raise DataError(
            "there are no built-in pictures to train on",
            hint="give pictures with `--data`: a folder, a file or a hub id",
        )

    def encode(self, examples: Examples) -> Encoded:
        """Writes examples as the model's inputs."""
        if self.task is not None:
            examples = self.task.expand(examples, self.seed)
        if self.inputs.grid is not None:
            labelled = self.task is not None
            return Encoded(*grid_rows(examples, self.source, self.inputs, labelled=labelled))
        if self.encoder is None:
            return self._pictures(examples)
        name = None if self.task is None else self.task.name
        if name == "causal-lm" or (name is None and _is_causal(self.source)):
            return self._windows(examples, with_labels=name == "causal-lm")
        if name == "masked-lm":
            return self._masked(examples)
        per_example = 2 if name == "sts" else 1
        if per_example == 2:
            pairs = zip(*examples.texts, strict=True)
            rows = self.encoder.encode([text for pair in pairs for text in pair])
        else:
            rows = self.encoder.encode(*examples.texts)
        labels = None
        if examples.targets is not None:
            labels = self._labels(examples)
        elif per_example == 1:
            rows = [row for row in rows if row]
        if not all(rows):
            raise DataError(
                f"`{examples.name}` has texts without any token",
                hint="remove rows with empty texts",
            )
        return Encoded(rows, labels, per_example)

    def _labels(self, examples: Examples) -> Tensor:
        labels = torch.tensor(examples.targets)
        if labels.is_floating_point() and self.task is not None and self.task.name == "sts":
            low, high = labels.min(), labels.max()
            labels = (labels - low) / (high - low).clamp_min(1e-12)
        return labels

    def _pictures(self, examples: Examples) -> Encoded:
        process = image_reader(self.source, needed=True)
        channels = image_shape(self.source.config)[0]

        def read(content: bytes) -> Tensor:
            return process(decode(content, channels, f"`{examples.name}`"))

        labels = None if examples.targets is None else torch.tensor(examples.targets)
        return Encoded(examples.images, labels, read=read)

    def _windows(self, examples: Examples, *, with_labels: bool) -> Encoded:
        """Texts one after another, cut into windows of equal length."""
        assert self.encoder is not None
        stream = self._stream(examples.texts[0])
        size = self.encoder.limit
        cuts = stream.split(size)
        # The rest is shorter; one that is too short to predict anything is dropped.
        pieces = [ids for ids in cuts if len(ids) > 1]
        rows: list[Row] = []
        labels: list[Tensor] = []
        for ids in pieces:
            rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            labels.append(torch.cat([ids[1:], ids.new_tensor([IGNORED])]))
        return Encoded(rows, cast(Any, labels) if with_labels else None)

    def _stream(self, texts: Sequence[str]) -> Tensor:
        assert self.encoder is not None
        end = self.encoder.end
        ids: list[int] = []
        for row in self.encoder.encode_whole(texts):
            ids += row
            if end is not None and row and row[-1] != end:
                ids.append(end)
        return torch.tensor(ids, dtype=torch.long)

    def _masked(self, examples: Examples) -> Encoded:
        assert self.encoder is not None
        tokenizer = self.encoder.tokenizer
        if tokenizer.mask_token_id is None:
            raise DataError(
                f"the tokenizer in `{self.encoder.place}` has no mask token",
                hint="choose the task `causal-lm`, or another model",
            )
        special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        words = self.encoder.vocabulary or len(tokenizer)

        def mask(row: Row, seed: list[int]) -> Row:
            ids = row["input_ids"]
            chosen = masked(
                ids, torch.isin(ids, special), tokenizer.mask_token_id, words, [self.seed, *seed]
            )
            return {**row, **chosen}

        rows = [row for row in self.encoder.encode(examples.texts[0]) if row]
        return Encoded(rows, mask=mask)


def _is_causal(source: SourceModel) -> bool:
    """Tells whether a model writes text, so that long texts may be cut anywhere."""
    return "CausalLM" in source.model_class.__name__ or "LMHead" in source.model_class.__name__


def _unlabelled(label: str, split: str, drawn: Sequence[str | bytes], kind: Kind) -> Examples:
    digest = hashlib.sha256()
    for item in drawn:
        content = item.encode() if isinstance(item, str) else item
        digest.update(f"{len(content)} ".encode() + content)
    if kind == "text":
        texts = [str(item) for item in drawn]
        return Examples(label, split, digest.hexdigest(), texts=(texts,))
    return Examples(label, split, digest.hexdigest(), images=tuple(cast(list[bytes], drawn)))


# The head that a task needs, and which of its labels is which class of the data.


def head_options(
    task: Task | None, data: Data, source: SourceModel, teacher: SourceModel | None
) -> Mapping[str, Any]:
    """Options of a head that is added, or a check of the one that is there.

    The classes of the data are numbered as the head, or else the teacher, numbers its labels.

    Args:
        task: The task, if there is one.
        data: The data; its labels may be numbered anew.
        source: The student.
        teacher: The teacher whose logits are imitated, if they are.

    Raises:
        DataError: The labels do not fit the head, or there is one class only.
    """
    if task is None or task.head is None:
        return {}
    has = has_head(source, task.head)
    if task.head == "regression":
        if has:
            check_labels(data.name, 1, source.config.num_labels, "score")
        return {"num_labels": 1, "problem_type": "regression"}
    if not data.classes:
        return {}
    if has:
        _number_like(data, source)
        check_labels(data.name, len(data.classes), source.config.num_labels)
        return {}
    if len(data.classes) == 1:
        raise DataError(
            f"`{data.name}` has one class, `{data.classes[0]}`: there is nothing to tell apart",
            "name another label column, or give data with all classes",
        )
    if teacher is not None and has_head(teacher, task.head):
        _number_like(data, teacher)
    names = dict(enumerate(data.classes))
    return {
        "num_labels": len(names),
        "id2label": names,
        "label2id": {name: index for index, name in names.items()},
    }


def _number_like(data: Data, model: SourceModel) -> None:
    """Numbers the classes of the data as a model does, if it calls them by the same names."""
    labels = label_names(model.config)
    order = by_name(labels, data.classes)
    # That numbers are among others says too little: the head may be of another task.
    if order is None or (len(order) < len(labels) and are_numbers(data.classes)):
        note = doubts(labels, data.classes)
        data.notes += [note] if note else []
        return
    for part in (data.train, data.validation):
        if part.labels is not None:
            part.labels = torch.tensor(order)[part.labels]
    data.classes = tuple(labels)
