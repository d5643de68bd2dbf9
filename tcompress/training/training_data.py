"""What a model is trained on, and the head that a task needs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tcompress.blockwise.output_sampler import LEFT_OUT
from tcompress.data import calibration, tables
from tcompress.data.chats import ChatWriter
from tcompress.data.encoding import TextEncoder, image_reader, pieces_of
from tcompress.data.examples import Examples, Needs, check_columns, load_examples
from tcompress.data.generated_text import written_texts
from tcompress.data.grids import as_input
from tcompress.data.inputs import (
    IGNORED,
    SERIES,
    VOLUMES,
    frames_of,
    grid_shape,
    image_shape,
    inputs_of,
    window_of,
)
from tcompress.data.labels import Classes, are_numbers, is_independent, label_names, matched
from tcompress.data.pictures import decode
from tcompress.data.sentences import PLAIN, SentenceEncoder
from tcompress.errors import DataError, listed
from tcompress.hf.opening import has_head, load_model
from tcompress.models import SourceModel
from tcompress.options import TrainingData
from tcompress.options.steps import FEW
from tcompress.progress import Progress, Silent
from tcompress.training.batches import Encoded, Row, Text
from tcompress.training.tasks import Task, masked
from tcompress.training.text_agreement import without_words

BUILTIN, TEACHER = "builtin", "teacher"
WRITTEN = 2048  # texts that a teacher writes, at most
FEWEST_HELD = 128  # examples of a source, where these are not a tenth of it
COMPARED = 2**14  # tokens of each source that mixtures of weights are compared on
BESIDE = 256  # texts that ship, to see what healing does to others than the user's, at most


@dataclass
class Data:
    """Data of a run; `notes` say what is doubtful about it."""

    train: Encoded
    validation: Encoded
    name: str
    fingerprint: str
    labels: Classes
    pad: int
    held: dict[str, Encoded] = field(default_factory=dict)
    """Without a task: what is held out, by source, and text that ships beside it."""
    notes: list[str] = field(default_factory=list)


def load_data(
    source: SourceModel,
    options: TrainingData,
    task: Task | None,
    seed: int,
    teacher: SourceModel | None = None,
    progress: Progress | None = None,
    beside: int = BESIDE,
    *,
    variants: bool = False,
) -> Data:
    """Read and encode the data of a run; without a task inputs alone, `beside` texts that ship.

    With `variants`, texts that mixtures of weights are compared on are followed by themselves
    without some of their words.
    """
    reader = _Reader(source, options, task, seed, teacher, progress or Silent())
    parts = reader.training()
    found = _joined(parts)
    given = reader.validation(found)
    if given is not None:
        kept = [_with_classes(given, found)]
    else:
        most = max(1, options.validation_samples // len(parts))
        split = []
        for part in parts:
            fewest = min(FEWEST_HELD, len(part) // 10) if task is None else task.fewest_held
            split.append(_split_off(part, options.holdout, most, seed, fewest))
        parts, kept = [own for own, _ in split], [own for _, own in split]
        found = _joined(parts)
    if options.weights:
        found = _joined([_seen(*pair, seed) for pair in zip(parts, options.weights, strict=True)])
    held = _joined(kept)
    train, validation = reader.encode(found, "train on"), reader.encode(held, "validate on")
    sources = {} if task is not None else reader.sources(kept, beside, variants=variants)
    digest = hashlib.sha256((found.fingerprint + held.fingerprint).encode()).hexdigest()
    pad = reader.encoder.pad if reader.encoder else 0
    notes = [_few(found.name, len(train))] if len(train) < FEW else []
    return Data(train, validation, found.name, digest, found.labels, pad, sources, notes)


def _few(name: str, count: int) -> str:
    examples = f"{count} example" + "s" * (count != 1)
    return f"warning: {name} has {examples} to train on: with fewer than {FEW} little is learnt"


def check_training_data(
    source: SourceModel,
    options: TrainingData,
    task: Task | None,
    seed: int,
    teacher: SourceModel | None = None,
) -> None:
    """Reads the data of a run without encoding it; errors are those of `load_data`."""
    reader = _Reader(source, options, task, seed, teacher)
    reader.validation(reader.training()[0])


class _Reader:
    """Reads examples, and writes them as a model's inputs."""

    def __init__(
        self,
        source: SourceModel,
        options: TrainingData,
        task: Task | None,
        seed: int,
        teacher: SourceModel | None,
        progress: Progress | None = None,
    ) -> None:
        self.source, self.options, self.task, self.seed = source, options, task, seed
        self.teacher, self._progress = teacher, progress  # where data is only checked, none
        self.inputs = inputs_of(source)
        self.model = source.model_class.__name__
        self._check_inputs()
        # Healing reads texts as the encoder will, and so does a task that compares embeddings.
        embeds = task is None or task.name == "sts"
        self.sentences = SentenceEncoder.imitated(source) if embeds else PLAIN
        self.encoder: TextEncoder | None = None
        if self.inputs.text:
            self.encoder = self.sentences.reader(source, self.inputs, options.max_length)
        needs = Needs() if task is None else task.needs
        wanted = SERIES if needs.window else VOLUMES if needs.volume else None
        if task is not None and self.inputs.grid != wanted:
            what = {VOLUMES: "volumes", SERIES: "series", None: "neither volumes nor series"}
            text = f"`{self.model}` reads {what[self.inputs.grid]}, its task {what[wanted]}"
            raise DataError(text, "choose another task, or a model for this one")

    def _check_inputs(self) -> None:
        inputs, how = self.inputs, "train it with its own scripts"
        clips = inputs.image and frames_of(self.source.config)
        what = "sound" if inputs.audio else "clips" if clips else ""
        if inputs.image and inputs.text and not what:
            what = "texts and pictures together"
            how = "train its towers alone, or with their own scripts"
        if what:
            hint = f"{how}: a converted model is an ordinary model"
            raise DataError(f"`{self.model}` takes {what}, which cannot be trained on yet", hint)

    def training(self) -> list[Examples]:
        how = self.options.split, self.options.samples
        return [self._read(name, *how) for name in self.options.source]

    def validation(self, found: Examples) -> Examples | None:
        """Reads what is to be validated on, if it is named or the file has a part for it."""
        options = self.options
        name = options.validation or (None if found.whole else options.source[0])
        if name is None:
            return None
        return self._read(name, options.validation_split, options.validation_samples)

    def _read(self, name: str, split: str, samples: int) -> Examples:
        """Reads what the task needs, or all texts or pictures there are."""
        needs = self._needs()
        if needs is None:
            return self._read_inputs(name, split, samples)
        if name in (BUILTIN, TEACHER):
            what = "labels" if self.task is not None else "volumes or series"
            raise DataError(
                f"the data `{name}` has no {what}, which "
                f"`{self.model if self.task is None else self.task.name}` needs",
                hint="give data with `--data`, or leave the task out to heal",
            )
        columns = self.options.columns
        found = load_examples(name, split, needs, columns=columns, limit=samples, seed=self.seed)
        self._check_shape(found)
        return found if self.task is None else self.task.prepare(found)

    def _needs(self) -> Needs | None:
        """What examples are made of; None for inputs alone, of texts and pictures."""
        if self.inputs.grid == SERIES:
            return Needs(window=window_of(self.source))
        if self.task is None:
            return Needs(volume=True) if self.inputs.grid is not None else None
        needs = self.task.needs
        return needs if needs.target is not None or needs.texts[0] == 2 else None

    def _read_inputs(self, name: str, split: str, samples: int) -> Examples:
        """Reads texts, or pictures."""
        if name == TEACHER:
            return self._written(samples)
        if name == BUILTIN:
            if self.encoder is None:
                hint = "give pictures with `--data`: a folder, a file or a hub id"
                raise DataError("there are no built-in pictures to train on", hint)
            texts = calibration.builtin_texts()[:samples]
            digest = tables.hash_of(map(str.encode, texts)).hexdigest()
            return Examples("builtin text", "train", digest, (texts,))
        kind: tables.Kind = "text" if self.encoder else "image"
        given = self.options.columns
        columns_given = tuple(given[role] for role in ("text", "pair", "image") if role in given)
        with tables.opened(name, split) as content:
            table = tables.with_derived(content, given.values())
            table = tables.with_listed_texts(table) if kind == "text" else table
            kinds = tables.kinds_of(table)
            check_columns(table, {n: "text" if k == "chat" else k for n, k in kinds.items()}, given)
            chosen = tables.columns_of(table, columns_given, {kind}, {kind}, self.model)[kind]
            writer = ChatWriter(self.encoder and self.encoder.tokenizer, table.label)
            items = list(tables.draw_cells(table, chosen, samples, self.seed, writer))
            writer.close()
            cells = len(table.rows) * len(chosen)
        if self.encoder is not None and not self._is_causal:  # of which all tokens are read
            texts, how = [str(item) for item in items], (self.encoder, table.label, cells)
            items += pieces_of(texts, samples, *how)
        contents = (item.encode() if isinstance(item, str) else item for item in items)
        digest = tables.hash_of(contents).hexdigest()
        made = Examples(f"{table.label}:{','.join(chosen)}", split, digest)
        if self.encoder:
            return replace(made, texts=([str(item) for item in items],))
        return replace(made, images=tuple(cast(list[bytes], items)))

    def _written(self, samples: int) -> Examples:
        """What the teacher writes by itself; it writes nothing where data is only checked."""
        teacher, encoder = self.teacher, self.encoder
        if teacher is None or not self._is_causal or encoder is None:
            what = "there is none" if teacher is None else f"a `{self.model}` writes no text"
            text = f"the data `{TEACHER}` is what the teacher writes, but {what}"
            raise DataError(text, "give data with `--data`, or leave it out")
        texts = [TEACHER]
        if (progress := self._progress) is not None:
            count, model = min(samples, WRITTEN), load_model(teacher)
            progress.stage("the teacher is writing", count, "texts")
            how = count, encoder.limit, self.seed, progress.advance
            texts = written_texts(model, encoder.tokenizer, *how)
        digest = tables.hash_of(map(str.encode, texts)).hexdigest()
        return Examples("text that the teacher wrote", "train", digest, (texts,))

    @property
    def _is_causal(self) -> bool:
        return "CausalLM" in self.model or "LMHead" in self.model

    def sources(
        self, held: Sequence[Examples], beside: int, *, variants: bool
    ) -> dict[str, Encoded]:
        """Writes held-out examples by source, and text that ships beside text of the user."""
        parts = [*held]
        if self.encoder is not None and BUILTIN not in self.options.source:
            parts.append(self._read_inputs(BUILTIN, "train", beside))
        found: dict[str, Encoded] = {}
        for part in filter(len, parts):
            encoded, same = self._encoded(part), 1
            while (name := part.name if same == 1 else f"{part.name} ({same})") in found:
                same += 1  # files of one name, in several folders
            if len(encoded):  # a few words may be too short to compare anything on
                own = encoded.first(COMPARED)
                found[name] = self._with_variants(own) if variants else own
        return found

    def _with_variants(self, held: Encoded) -> Encoded:
        """Follow every text by itself without some of its words."""
        assert self.encoder is not None
        columns = [[text for ((text, *_), *_) in held.texts or ()]]
        columns += [[without_words(text, share) for text in columns[0]] for share in LEFT_OUT]
        prompted = (self.sentences.default.before(column) for column in columns)
        rows = [*zip(*map(self.encoder.encode, prompted), strict=True)]
        texts = [tuple((text,) for text in own) for own in zip(*columns, strict=True)]
        chosen = [place for place, own in enumerate(rows) if all(own)]
        return Encoded.of([rows[i] for i in chosen], texts=[texts[i] for i in chosen])

    def encode(self, examples: Examples, purpose: str) -> Encoded:
        """Writes examples as the model's inputs; for the purpose there must be some."""
        encoded = self._encoded(examples) if len(examples) else None
        if encoded is None or not len(encoded):
            hint = "give more data, or other columns"
            raise DataError(f"`{examples.name}` leaves nothing to {purpose}", hint)
        return encoded

    def _encoded(self, examples: Examples) -> Encoded:
        if self.task is not None:
            examples = self.task.expand(examples, self.seed)
        name = None if self.task is None else self.task.name
        if self.inputs.grid == SERIES:
            return self._series(examples)
        if self.inputs.grid is not None or self.encoder is None:
            read = self._picture_reader(examples)
            labels = None if examples.targets is None else _targets_of(examples)
            return Encoded([0] * len(examples), lambda place, _: [read(place)], labels)
        # Of a model that writes text long texts may be cut anywhere.
        if name == "causal-lm" or (name is None and self._is_causal):
            return self._windows(self.encoder, examples, with_labels=name == "causal-lm")
        if name == "masked-lm":
            return self._masked(self.encoder, examples)
        return self._texts(self.encoder, examples)

    def _texts(self, encoder: TextEncoder, examples: Examples) -> Encoded:
        pairs = self.task is not None and self.task.name == "sts"
        prompted = [self.sentences.default.before(list(texts)) for texts in examples.texts]
        columns = [(column,) for column in prompted] if pairs else [prompted]
        found = list(zip(*(encoder.encode(*texts) for texts in columns), strict=True))
        read = [*zip(*examples.texts, strict=True)]  # without prompts, which are the model's own
        texts: list[tuple[Text, ...]] = (
            [tuple((text,) for text in own) for own in read] if pairs else [(own,) for own in read]
        )
        labels = None
        if examples.targets is not None:
            labels = _targets_of(examples)
            if pairs:
                low, high = labels.min(), labels.max()
                labels = (labels - low) / (high - low).clamp_min(1e-12)
        elif not pairs:
            texts = [own for own, rows in zip(texts, found, strict=True) if all(rows)]
            found = [rows for rows in found if all(rows)]
        if not all(all(rows) for rows in found):
            hint = "remove rows with empty texts"
            raise DataError(f"`{examples.name}` has texts without any token", hint)
        return Encoded.of(found, labels, texts)

    def _picture_reader(self, examples: Examples) -> Callable[[int], Row]:
        """Reads a picture or a volume, given its place."""
        volumes, images = examples.volumes, examples.images
        if volumes is not None:
            return lambda place: {VOLUMES: as_input(volumes[place])}
        process = image_reader(self.source, needed=True)
        channels, name = image_shape(self.source.config)[0], f"`{examples.name}`"
        return lambda place: {"pixel_values": process(decode(images[place], channels, name))}

    def _series(self, examples: Examples) -> Encoded:
        windows = examples.windows
        assert windows is not None  # the model reads series

        def read(place: int, epoch: int) -> list[Row]:
            row = {SERIES: windows.past(place)}
            return [row if self.task is None else {**row, "labels": windows.future(place)}]

        return Encoded([0] * len(windows), read)

    def _check_shape(self, examples: Examples) -> None:
        """Compares volumes, or the variables of a series, with the model."""
        found = examples.shape
        if found is not None and found != (wanted := grid_shape(self.source, self.inputs)):
            text = f"`{examples.name}` has inputs of shape {found}, the model takes {wanted}"
            raise DataError(text, "give data of that shape, or a model for this one")

    def _windows(self, encoder: TextEncoder, examples: Examples, *, with_labels: bool) -> Encoded:
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

    def _masked(self, encoder: TextEncoder, examples: Examples) -> Encoded:
        tokenizer = encoder.tokenizer
        if tokenizer.mask_token_id is None:
            hint = "choose the task `causal-lm`, or another model"
            raise DataError(f"the tokenizer in `{encoder.place}` has no mask token", hint)
        special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        words = encoder.vocabulary or len(tokenizer)
        rows = [row for row in encoder.encode(examples.texts[0]) if row]

        def read(place: int, epoch: int) -> list[Row]:
            ids, seed = rows[place]["input_ids"], [self.seed, epoch, place]
            chosen = masked(ids, torch.isin(ids, special), tokenizer.mask_token_id, words, seed)
            return [{**rows[place], **chosen}]

        return Encoded([len(row["input_ids"]) for row in rows], read)


def _joined(parts: Sequence[Examples]) -> Examples:
    """Puts several data sets one after another."""
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
    return replace(
        first,
        name=" + ".join(part.name for part in parts),
        fingerprint=hashlib.sha256("".join(p.fingerprint for p in parts).encode()).hexdigest(),
        texts=tuple([text for own in column for text in own] for column in columns),
        images=tuple(image for part in parts for image in part.images),
        targets=None if first.targets is None else targets,
        labels=replace(
            first.labels, absent=frozenset.intersection(*(p.labels.absent for p in parts))
        ),
        volumes=np.concatenate(volumes) if volumes else None,
    )


def _targets_of(examples: Examples) -> torch.Tensor:
    """Targets of examples: (examples,), or with several labels marks (examples, classes)."""
    if not examples.labels.several:
        return torch.tensor(examples.targets)
    marks = torch.zeros(len(examples), len(examples.labels))
    for row, ids in enumerate(cast(list[tuple[int, ...]], examples.targets)):
        marks[row, [*ids]] = 1.0
    return marks


def _as_several(examples: Examples) -> Examples:
    """Takes one label of each example as one of several."""
    if examples.labels.several or examples.targets is None:
        return examples
    targets: Any = [(target,) for target in examples.targets]
    return replace(examples, targets=targets, labels=replace(examples.labels, several=True))


def _with_classes(held: Examples, train: Examples) -> Examples:
    """Numbers the classes of held-out data as those of the training data."""
    if train.labels.several:
        held = _as_several(held)
    elif held.labels.several:
        text = f"`{held.name}` has several labels an example, `{train.name}` one"
        raise DataError(text, "give data sets of the same kind")
    if held.classes == train.classes or held.targets is None:
        return held
    unknown = [held.classes[index] for index in held.labels.used]
    unknown = [name for name in unknown if name not in train.classes]
    if unknown:
        text = f"`{held.name}` has the classes {listed(unknown)}, which `{train.name}` has not"
        raise DataError(text, "give data sets with the same classes")
    places = {
        index: train.classes.index(name)
        for index, name in enumerate(held.classes)
        if name in train.classes
    }
    targets: Any = [
        tuple(places[one] for one in target) if isinstance(target, tuple) else places[int(target)]
        for target in held.targets
    ]
    return replace(held, targets=targets, labels=train.labels)


def _split_off(
    examples: Examples, share: float, most: int, seed: int, fewest: int
) -> tuple[Examples, Examples]:
    """Holds examples out at random, at least so many where they are not half of all."""
    order = np.random.default_rng([seed, 1]).permutation(len(examples))
    least = max(1, min(fewest, len(order) // 2))
    count = min(max(round(share * len(order)), least), most)
    return _chosen(examples, np.sort(order[count:])), _chosen(examples, np.sort(order[:count]))


def _seen(examples: Examples, weight: float, seed: int) -> Examples:
    """Takes examples as often as the weight says; of a part of them, which they are is drawn."""
    times, count = int(weight), len(examples)
    order = np.random.default_rng([seed, 2]).permutation(count)
    some = np.sort(order[: max(round((weight - times) * count), 0 if times else 1)])
    return _chosen(examples, np.concatenate([np.tile(np.arange(count), times), some]))


def _chosen(examples: Examples, indices: NDArray[np.int64]) -> Examples:
    places = indices.tolist()
    targets: Any = examples.targets
    return replace(
        examples,
        texts=tuple([column[place] for place in places] for column in examples.texts),
        images=tuple(examples.images[place] for place in places) if examples.images else (),
        targets=None if targets is None else [targets[place] for place in places],
        volumes=None if examples.volumes is None else examples.volumes[indices],
        windows=None if examples.windows is None else examples.windows.chosen(places),
    )


def head_options(
    task: Task | None, data: Data, source: SourceModel, teacher: SourceModel | None
) -> Mapping[str, Any]:
    """Options of a head to be added, or a check of the one there; numbers the classes likewise."""
    if task is None or task.head is None:
        return {}
    has = has_head(source, task.head)
    if task.head == "regression":
        if has:
            _check_labels(data.name, 1, source.config.num_labels, "score")
        return {"num_labels": 1, "problem_type": "regression"}
    if not len(data.labels):
        return {}
    if has:
        _number_like(data, source)
        _check_labels(data.name, len(data.labels), source.config.num_labels, "classes")
        return _problem(data, source)
    if len(data.labels) == 1 and not data.labels.several:
        [only] = data.labels.names
        text = f"`{data.name}` has one class, `{only}`: there is nothing to tell apart"
        raise DataError(text, "name another label column, or give data with all classes")
    if teacher is not None and has_head(teacher, task.head):
        _number_like(data, teacher)
    names = dict(enumerate(data.labels.names))
    numbers = {name: index for index, name in names.items()}
    kind = {"problem_type": SEVERAL} if data.labels.several else {}
    return {"num_labels": len(names), "id2label": names, "label2id": numbers, **kind}


SEVERAL = "multi_label_classification"
"""Name in Transformers of heads of which each label is a yes or no of its own."""


def _problem(data: Data, source: SourceModel) -> Mapping[str, Any]:
    """The kind of a head that is there: that of its config, or several labels where the data has.

    A head that has a yes or no for each label learns them so, of one label too.
    """
    if data.labels.several:
        if not is_independent(source.config):
            data.notes.append(
                "the data has several labels an example: the head gives each by itself from now "
                f"on (`problem_type: {SEVERAL}`)"
            )
        return {"problem_type": SEVERAL}
    if is_independent(source.config):
        data.labels = replace(data.labels, several=True)
        for part in (data.train, data.validation):
            if part.labels is not None:
                marks = torch.nn.functional.one_hot(part.labels, len(data.labels))
                part.labels = marks.float()
    return {}


def _check_labels(name: str, found: int, head: int, what: str) -> None:
    if found != head:
        text = f"`{name}` has {found} {what}, but the model's head has {head} labels"
        raise DataError(text, "give data that the head was made for, or a model without head")


def _number_like(data: Data, model: SourceModel) -> None:
    """Numbers the classes of the data as a model does."""
    labels = label_names(model.config)
    # That numbers are among others says too little: the head may be of another task.
    if len(data.labels) != len(labels) and are_numbers(data.labels.names):
        return  # whoever compares them refuses
    match = matched(labels, data.labels, data.name)
    data.notes += [match.doubt] if match.doubt else []
    order = torch.tensor(match.labels)
    for part in (data.train, data.validation):
        if part.labels is None:
            continue
        if data.labels.several:
            marks = torch.zeros(len(part.labels), len(labels))
            marks[:, order[order >= 0]] = part.labels[:, order >= 0]
            part.labels = marks
        else:
            part.labels = order[part.labels]
    if match.by == "name" or data.labels.absent:
        data.labels = Classes(tuple(labels), tuple(range(len(labels))), several=data.labels.several)
