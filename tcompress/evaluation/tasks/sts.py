"""Similarity of sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from transformers import PreTrainedModel

from tcompress.evaluation.runner import Runner
from tcompress.evaluation.statistics import Spearman, Statistic, pearson
from tcompress.evaluation.tasks.base import Prepared, Task
from tcompress.evaluation.tasks.pairs import PreparedPairs, judges
from tcompress.reading.examples import Examples, Needs
from tcompress.source import SourceModel


@dataclass(frozen=True)
class Similarity(Task):
    """How alike two texts are, by the cosine of embeddings or by a head with one output."""

    name: ClassVar[str] = "sts"
    summary: ClassVar[str] = "how alike two texts are, for sentence encoders"
    needs: ClassVar[Needs] = Needs(texts=(2, 2), target="score")
    metrics: ClassVar[tuple[str, ...]] = ("spearman", "pearson")
    max_length: ClassVar[int | None] = 128

    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        return _Prepared(source, examples, max_length or self.max_length or 0)


class _Prepared(PreparedPairs):
    def __init__(self, source: SourceModel, examples: Examples, max_length: int) -> None:
        super().__init__(source, examples.texts, max_length)
        self._examples = examples

    def work(self, model: PreTrainedModel) -> int:
        return self.units if judges(model, most=1) else self.distinct_texts()

    def run(self, runner: Runner) -> Sequence[Statistic]:
        if judges(runner.model, most=1):
            found = self.judged(runner, *self._examples.texts)[:, 0]
        else:
            one, two = self.embeddings(runner)
            found = (one[self._one.index].double() * two[self._two.index]).sum(-1)
        scores = np.asarray(self._examples.targets, dtype=float)
        return [Spearman(found.numpy(), scores), pearson(found.numpy(), scores)]
