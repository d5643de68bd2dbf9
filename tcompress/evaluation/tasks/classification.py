"""Classification of texts, and of pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tcompress.evaluation.labels import match_labels
from tcompress.evaluation.runner import Runner
from tcompress.evaluation.statistics import Statistic, class_statistics
from tcompress.evaluation.tasks.base import Prepared, Task
from tcompress.evaluation.texts import TextReader, signature
from tcompress.integration.models import Head
from tcompress.reading.examples import Examples, Needs
from tcompress.source import SourceModel


@dataclass(frozen=True)
class Classification(Task):
    """Class of one text or of two."""

    name: ClassVar[str] = "classification"
    summary: ClassVar[str] = "class of a text, or of a pair of texts"
    needs: ClassVar[Needs] = Needs(texts=(1, 2), target="class")
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "macro_f1", "matthews")
    head: ClassVar[Head | None] = "classification"

    def check(self, source: SourceModel, examples: Examples) -> None:
        super().check(source, examples)
        match_labels(source.config, examples)

    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        return _Prepared(TextReader.open(source, max_length or self.max_length or 0), examples)


class _Prepared(Prepared):
    def __init__(self, reader: TextReader, examples: Examples) -> None:
        super().__init__()
        self._examples, self._pad = examples, reader.pad
        self._rows = reader.encode(*examples.texts)
        self.signature = signature(self._rows)
        self.facts["truncated"] = reader.truncated(self._rows, *examples.texts)

    @property
    def units(self) -> int:
        return len(self._rows)

    def run(self, runner: Runner) -> Sequence[Statistic]:
        labels = match_labels(runner.model.config, self._examples)
        self.facts["labels_matched_by"] = labels.by
        self.notes = [labels.note] if labels.note else []
        logits: Tensor = runner.logits(self._rows, self._pad)
        predicted = labels.class_of[logits.argmax(-1).numpy()]
        truth, classes = self._examples.targets or [], len(self._examples.classes)
        return class_statistics(predicted, truth, classes)
