"""Parts that every task is made of: examples, a model's inputs, and running it in batches."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcompress.artifact.manifest import read_manifest
from tcompress.data.examples import Examples, Needs
from tcompress.data.inputs import check_texts, collate, inputs_of
from tcompress.data.labels import order_of
from tcompress.data.sentences import PLAIN, SentenceEncoder
from tcompress.errors import DataError, InputError
from tcompress.evaluation.statistics import Statistic
from tcompress.hf.opening import Head, has_head
from tcompress.models import SourceModel, tell_padding
from tcompress.options import Evaluate

Row = dict[str, Tensor]


@dataclass(frozen=True)
class Runner:
    """Runs a model over examples in batches; `advance` hears of those that are done."""

    model: PreTrainedModel
    batch_size: int
    device: torch.device
    advance: Callable[[int], None]

    def slices(self, count: int) -> Iterator[slice]:
        """Yield the indices of examples that are of one size, a batch at a time."""
        for first in range(0, count, self.batch_size):
            last = min(first + self.batch_size, count)
            yield slice(first, last)
            self.advance(last - first)

    def batches(self, rows: Sequence[Row], pad: int) -> Iterator[tuple[list[int], Row]]:
        """Yield indices of examples and their inputs, longest first, since they pad least so."""
        lengths = [len(row["input_ids"]) for row in rows]
        order = sorted(range(len(rows)), key=lambda index: -lengths[index])
        # Some families mix padding in, or read the last place whatever stands there.
        last = getattr(self.model.config, "summary_type", None) == "last"
        alike = last or any("attention_mask" not in row for row in rows[:1])
        runs = [[*run] for _, run in groupby(order, lengths.__getitem__)] if alike else [order]
        for run in runs:
            for batch_slice in self.slices(len(run)):
                chosen = run[batch_slice]
                batch = collate([rows[index] for index in chosen], pad)
                yield chosen, {name: value.to(self.device) for name, value in batch.items()}

    def outputs(self, rows: Sequence[Row], pad: int, compute: Callable[[Row], Tensor]) -> Tensor:
        """Compute something of each row, in their order, as far as it is finite."""
        values: list[Tensor] = [torch.empty(0)] * len(rows)
        for chosen, batch in self.batches(rows, pad):
            for index, value in zip(chosen, compute(batch).float().cpu(), strict=True):
                values[index] = value
        return checked(torch.stack(values))

    def logits(self, rows: Sequence[Row], pad: int) -> Tensor:
        """Compute the model's logits in the order of the rows.  # (rows, labels)."""
        return self.outputs(rows, pad, lambda batch: self.model(**batch).logits)


def checked(values: Tensor) -> Tensor:
    """Return values that are all finite; others are an error."""
    if not torch.isfinite(values).all():
        hint = "measure in another dtype, such as `--dtype float32`, or repair the model"
        raise InputError("the model gives values that are not finite", hint)
    return values


_READ = ("input_ids", "attention_mask", "token_type_ids")


class TextReader:
    """Texts as a model reads them, with at most `limit` tokens."""

    def __init__(
        self, source: SourceModel, max_length: int | None, sentences: SentenceEncoder
    ) -> None:
        hint = f"add the files of its tokenizer to `{source.folder}`, or choose another task"
        with _hinting(hint):
            inputs = inputs_of(source)
            if not inputs.text or inputs.image or inputs.audio:
                raise DataError(
                    f"`{source.id}` is a `{source.model_class.__name__}`, which does not read "
                    "texts alone"
                )
            self.encoder = sentences.reader(source, inputs, max_length)
        self.sentences, self.tokenizer = sentences, self.encoder.tokenizer
        manifest = read_manifest(source.folder)
        self.vocabulary = None if manifest is None else manifest.plan.vocabulary
        self.limit, self.pad = self.encoder.limit, self.encoder.pad

    def encode(self, *texts: Sequence[str]) -> list[Row]:
        """Write texts, or pairs of texts, or these with a third one, as inputs of the model."""
        with _hinting("put the model's own tokenizer into its folder"):
            rows = self.encoder.encode(*texts)
        # An empty text still needs a place to be read at.
        empty = {"input_ids": torch.tensor([self.pad]), "attention_mask": torch.ones(1).long()}
        if any("token_type_ids" in row for row in rows):
            empty["token_type_ids"] = torch.zeros(1).long()
        # A decoder's inputs are left to the model, which knows how its head reads them.
        return [{name: row[name] for name in _READ if name in row} or empty for row in rows]

    def signature(self, rows: Sequence[Row]) -> str:
        """Hash all tokens; models that read the same ones have the same hash."""
        digest = hashlib.sha256()
        # Where a conversion left tokens out, by their numbers in the dense model.
        numbers = None if self.vocabulary is None else torch.tensor(self.vocabulary.ids)
        for row in rows:
            ids = row["input_ids"] if numbers is None else numbers[row["input_ids"]]
            digest.update(ids.numpy().tobytes() + b"|")
        return digest.hexdigest()

    def truncated(self, rows: Sequence[Row], *texts: Sequence[str]) -> int:
        """Count the texts, or pairs, that were longer than what was read of them."""
        room = self.limit - (self.encoder.third if len(texts) > 2 else 0)
        full = [index for index, row in enumerate(rows) if len(row["input_ids"]) >= room]
        if not full:
            return 0
        columns = ([column[index] for index in full] for column in texts[:2])
        uncut = self.tokenizer(*columns, verbose=False)
        return sum(len(ids) > room for ids in uncut["input_ids"])


@contextmanager
def _hinting(hint: str) -> Iterator[None]:
    """Replace hints on how a conversion does without data."""
    try:
        yield
    except DataError as error:
        raise DataError(error.message, hint) from error


@dataclass(frozen=True, eq=False)
class Prepared:
    """Examples as a model's inputs, and all that is known before it runs.

    Tasks add what they read and compare.
    """

    units: int  # that are resampled
    signature: str = ""  # equal for models that read the same tokens
    facts: Mapping[str, Any] = field(default_factory=dict)  # for a protocol
    notes: tuple[str, ...] = ()  # what the user should know
    rows: Sequence[Row] = ()  # of texts, or of those that are read together

    @property
    def inputs(self) -> int:
        """Number of inputs that the model has to read."""
        return len(self.rows) or self.units


class Measured(NamedTuple):
    """Numbers of one model."""

    statistics: Sequence[Statistic]  # the main number comes first
    predictions: Any = None  # of every example, for agreement with it


class EvaluationTask(ABC):
    """A task with its examples, prepared for one model and measured as often as asked.

    It does not change: what a run computes is what `measure` returns.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs]
    head: ClassVar[Head | None] = None  # that the model must have
    max_length: ClassVar[int | None] = 512  # of texts, in tokens; None without texts
    batch_size: ClassVar[int] = 32
    unit: ClassVar[str] = "examples"  # or `windows`: what is resampled and counted
    answers_texts: ClassVar[bool] = False  # about whole texts, which other tokens may write too
    embeds_texts: ClassVar[bool] = False  # as the folder of a sentence encoder says
    reader: TextReader  # of its texts, if it has any
    prepared: Prepared

    def __init__(
        self, source: SourceModel, examples: Examples, max_length: int | None, options: Evaluate
    ) -> None:
        self.source, self.examples, self.options = source, examples, options
        if self.max_length is not None:
            self.reader = self.reader_of(source, options, max_length)
        self.prepared = self.prepare()

    @abstractmethod
    def prepare(self) -> Prepared:
        """Write the examples as inputs of the model."""

    @classmethod
    def reader_of(
        cls, source: SourceModel, options: Evaluate, max_length: int | None = None
    ) -> TextReader:
        """Open a reader of texts, of a length that suits all models if it is given.

        A sentence encoder reads texts as long as its folder says, unless a length is asked for.
        """
        sentences = SentenceEncoder.of(source) if cls.embeds_texts else PLAIN
        length = options.max_length
        if not sentences.stated:
            length = max_length or length or cls.max_length
        return TextReader(source, length, sentences)

    @classmethod
    def needs_for(cls, sources: Sequence[SourceModel]) -> Needs:
        """Needs of some models; those of all alike, where the models have no say."""
        return cls.needs

    @classmethod
    def check(cls, source: SourceModel, examples: Examples) -> None:
        """Check, from its configuration, that a model can do the task."""
        if examples.texts:
            check_texts(source, len(examples.texts), examples.name)
        if cls.head is not None and not has_head(source, cls.head):
            raise DataError(
                f"`{source.id}` is a `{source.model_class.__name__}`, which has no "
                f"{_HEADS[cls.head]}; the task `{cls.name}` needs one",
                "train one first, or choose another task",
            )

    @property
    def compares_texts(self) -> bool:
        """True where whole texts are answered, and a conversion may have left tokens out."""
        return self.answers_texts and self.reader.vocabulary is not None

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the columns of predictions, where a model names them."""
        return ()

    def aligned(self, predictions: Any, labels: Sequence[str]) -> Any:
        """Return a baseline's predictions with columns in the order of this model's labels."""
        order = order_of(self.labels, labels) if labels and predictions is not None else None
        return predictions if order is None else predictions[:, order]

    @abstractmethod
    def run(self, runner: Runner, reference: Any) -> Measured:
        """Run a model, in evaluation mode, over all examples.

        The `reference` has a baseline's predictions for them; None where there is none.
        """

    @torch.no_grad()
    def measure(
        self,
        model: PreTrainedModel,
        batch_size: int,
        advance: Callable[[int], None],
        reference: Any = None,
    ) -> Measured:
        """Measure a model that was loaded for it; `advance` hears of inputs done."""
        if self.max_length is not None:
            tell_padding(model, self.reader.pad)
        return self.run(Runner(model, batch_size, model.device, advance), reference)


_HEADS: dict[Head, str] = {
    "classification": "head for classifying texts",
    "image-classification": "head for classifying images",
    "masked-lm": "head for masked language modelling",
    "causal-lm": "head for causal language modelling",
    "seq2seq": "head for making texts of others",
    "forecasting": "head for forecasting series",
}
