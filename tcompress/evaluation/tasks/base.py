"""What every task is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from tcompress.errors import DataError
from tcompress.evaluation.runner import Runner, measuring
from tcompress.evaluation.statistics import Statistic
from tcompress.evaluation.texts import TextReader
from tcompress.integration.models import Head, has_head
from tcompress.reading.examples import Examples, Needs
from tcompress.source import SourceModel


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
