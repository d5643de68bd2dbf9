"""What every task is made of: examples, a model's inputs, and running it in batches."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcompress.data.encoding import TextEncoder
from tcompress.data.examples import Examples, Needs
from tcompress.data.inputs import collate, inputs_of
from tcompress.errors import DataError, InputError
from tcompress.evaluation.statistics import Statistic
from tcompress.hf.opening import Head, has_head
from tcompress.models import SourceModel

# Running a model over examples in batches.


Row = dict[str, Tensor]


@dataclass(frozen=True)
class Runner:
    """A model and how it is run.

    Attributes:
        model: The model.
        batch_size: Examples in a batch.
        device: Where the model is.
        advance: Hears of examples that are done.
    """

    model: PreTrainedModel
    batch_size: int
    device: torch.device
    advance: Callable[[int], None]

    def batches(self, rows: Sequence[Row], pad: int) -> Iterator[tuple[list[int], Row]]:
        """Yields indices of examples and their inputs, longest first, since they pad least so.

        Args:
            rows: Inputs of each example, sequences not padded.
            pad: Token to pad with.
        """
        order = sorted(range(len(rows)), key=lambda index: -_length(rows[index]))
        for first in range(0, len(order), self.batch_size):
            chosen = order[first : first + self.batch_size]
            batch = collate([rows[index] for index in chosen], pad)
            yield chosen, {name: value.to(self.device) for name, value in batch.items()}
            self.advance(len(chosen))

    def logits(self, rows: Sequence[Row], pad: int) -> Tensor:
        """Computes the model's logits in the order of the rows.  # (rows, labels).

        Raises:
            InputError: Some are not finite.
        """
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        with _padding_known(self.model, pad):
            for chosen, batch in self.batches(rows, pad):
                for index, logits in zip(
                    chosen, self.model(**batch).logits.float().cpu(), strict=True
                ):
                    found[index] = logits
        return checked(torch.stack(found))


def checked(values: Tensor) -> Tensor:
    """Gives values back if all are finite.

    Raises:
        InputError: They are not.
    """
    if not torch.isfinite(values).all():
        raise InputError(
            "the model gives values that are not finite",
            "measure in another dtype, such as `--dtype float32`, or repair the model",
        )
    return values


@contextmanager
def measuring(model: PreTrainedModel) -> Iterator[None]:
    """Puts a model into evaluation mode without gradients, and back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Not inference mode: what a layer caches has to serve training too.
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _padding_known(model: PreTrainedModel, pad: int) -> Iterator[None]:
    """Tells heads that read the last token which tokens are padding, if the config does not."""
    config: Any = model.config.get_text_config()
    had = getattr(config, "pad_token_id", None)
    if had is None:
        config.pad_token_id = pad
    try:
        yield
    finally:
        config.pad_token_id = had


def _length(row: Row) -> int:
    return len(row["input_ids"]) if "input_ids" in row else 0


# From texts to a model's inputs, for measuring.


_READ = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class TextReader:
    """Reads texts for a model. Use `TextReader.open`.

    Attributes:
        encoder: Writes texts as tokens.
    """

    encoder: TextEncoder

    @classmethod
    def open(cls, source: SourceModel, max_length: int) -> TextReader:
        """Loads the tokenizer of a model.

        Args:
            source: The model.
            max_length: Most tokens of a text; fewer if the model has fewer positions.

        Raises:
            DataError: The model has no tokenizer, or reads no texts alone.
        """
        with _hint_for_measuring(source):
            inputs = inputs_of(source)
            if not inputs.text or inputs.image or inputs.audio:
                raise DataError(
                    f"`{source.id}` is a `{source.model_class.__name__}`, which does not read "
                    "texts alone"
                )
            return cls(TextEncoder.open(source, inputs, max_length))

    @property
    def limit(self) -> int:
        """Most tokens of a text."""
        return self.encoder.limit

    @property
    def pad(self) -> int:
        """Token to pad with."""
        return self.encoder.pad

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.encoder.tokenizer

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Row]:
        """Writes texts, or pairs of texts, as inputs of the model.

        Raises:
            DataError: The tokenizer and the model do not belong together.
        """
        try:
            rows = self.encoder.encode(texts, pairs)
        except DataError as error:
            hint = "put the model's own tokenizer into its folder"
            raise DataError(error.message, hint) from error
        typed = any("token_type_ids" in row for row in rows)
        return [self._read(row, typed) for row in rows]

    def truncated(
        self, rows: Sequence[Row], texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> int:
        """Counts the texts that were longer than what was read of them."""
        full = [index for index, row in enumerate(rows) if len(row["input_ids"]) >= self.limit]
        if not full:
            return 0
        second = None if pairs is None else [pairs[index] for index in full]
        whole = self.tokenizer([texts[index] for index in full], second, verbose=False)
        return sum(len(ids) > self.limit for ids in whole["input_ids"])

    def _read(self, row: Row, typed: bool) -> Row:
        # A decoder's inputs are left to the model, which knows how its head reads them.
        kept = {name: row[name] for name in _READ if name in row}
        if not kept:  # an empty text still needs a place to be read at
            kept = {
                "input_ids": torch.tensor([self.pad]),
                "attention_mask": torch.ones(1, dtype=torch.long),
            }
            if typed:
                kept["token_type_ids"] = torch.zeros(1, dtype=torch.long)
        return kept


def signature(rows: Sequence[Row]) -> str:
    """Gives a hash of all tokens, by which models with the same tokens know each other."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row["input_ids"].numpy().tobytes() + b"|")
    return digest.hexdigest()


@contextmanager
def _hint_for_measuring(source: SourceModel) -> Iterator[None]:
    """Replaces hints on how a conversion does without data."""
    try:
        yield
    except DataError as error:
        hint = f"add the files of its tokenizer to `{source.folder}`, or choose another task"
        raise DataError(error.message, hint) from error


# What every task is made of.


class Prepared(ABC):
    """Examples of a task, written as a model's inputs once and measured as often as wanted.

    Attributes:
        batch_size: Examples in a batch, if nothing else is said.
        unit: What is resampled and counted: `examples`, `windows`.
        facts: What a protocol tells of it; complete after the first measurement.
        notes: What the user should know, likewise.
        signature: Equal for models that read the same tokens.
    """

    batch_size: int = 32
    unit: str = "examples"

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []
        self.signature = ""

    def work(self, model: PreTrainedModel) -> int:
        """Counts the inputs that the model has to read."""
        return self.units

    @property
    @abstractmethod
    def units(self) -> int:
        """Number of units that are resampled."""

    @abstractmethod
    def run(self, runner: Runner) -> Sequence[Statistic]:
        """Runs a model, in evaluation mode, over all examples; the main number comes first."""

    def measure(
        self,
        model: PreTrainedModel,
        *,
        batch_size: int | None = None,
        device: torch.device | str | None = None,
        advance: Callable[[int], None] = lambda amount: None,
    ) -> Sequence[Statistic]:
        """Measures a model, which stays in the mode (training or evaluation) that it is in.

        Args:
            model: A model with the tokenizer, or image processor, that the examples are for.
            batch_size: Examples in a batch; default as the task likes.
            device: Where the model is; default as it says.
            advance: Hears of inputs that are done, `work` of them in all.

        Returns:
            The task's numbers, the main one first.
        """
        place = torch.device(device) if device is not None else model.device
        with measuring(model):
            return self.run(Runner(model, batch_size or self.batch_size, place, advance))

    def score(
        self,
        model: PreTrainedModel,
        *,
        batch_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> dict[str, float]:
        """Measures a model; as `measure`, but gives plain numbers by name."""
        measured = self.measure(model, batch_size=batch_size, device=device)
        return {statistic.name: statistic.value() for statistic in measured}


@dataclass(frozen=True)
class Task(ABC):
    """Something that models are measured on. Fields of subclasses are its options.

    Attributes:
        name: Name, in lower case with hyphens.
        summary: One line.
        needs: What it reads.
        metrics: Numbers that it gives, the main one first; some depend on the data.
        head: Head that the model must have, if any.
        max_length: Longest text in tokens, if nothing else is said; None without texts.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    needs: ClassVar[Needs]
    metrics: ClassVar[tuple[str, ...]]
    head: ClassVar[Head | None] = None
    max_length: ClassVar[int | None] = 512

    def needs_for(self, sources: Sequence[SourceModel]) -> Needs:
        """What is read for some models; for all alike, where the models have no say.

        Raises:
            DataError: They cannot be measured on the same examples.
        """
        return self.needs

    def check(self, source: SourceModel, examples: Examples) -> None:
        """Checks, from its configuration, that a model can do the task.

        Raises:
            DataError: It cannot.
        """
        if self.head is not None and not has_head(source, self.head):
            kind = _HEADS[self.head]
            raise DataError(
                f"`{source.id}` is a `{source.model_class.__name__}`, which has no {kind}; "
                f"the task `{self.name}` needs one",
                "train one first, or choose another task",
            )

    def limit(self, source: SourceModel, max_length: int | None) -> int | None:
        """Gives the longest text that a model can be given, in tokens; None without texts.

        Args:
            source: The model.
            max_length: What was asked for; default the task's.

        Raises:
            DataError: The model has no tokenizer.
        """
        wanted = max_length or self.max_length
        return None if self.max_length is None else TextReader.open(source, wanted or 0).limit

    @abstractmethod
    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        """Writes examples as a model's inputs.

        Args:
            source: The model.
            examples: The examples.
            max_length: Longest text, as `limit` gives it.
            seed: Seed of all random choices.

        Raises:
            DataError: The examples cannot be used with the model.
        """


_HEADS: dict[Head, str] = {
    "classification": "head for classifying texts",
    "image-classification": "head for classifying images",
    "masked-lm": "head for masked language modelling",
    "causal-lm": "head for causal language modelling",
    "forecasting": "head for forecasting series",
}
