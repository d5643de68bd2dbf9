"""Choosing the right response among some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcompress.errors import DataError
from tcompress.evaluation.runner import Runner
from tcompress.evaluation.statistics import Statistic, rank_statistics
from tcompress.evaluation.tasks.base import Prepared, Task
from tcompress.evaluation.tasks.pairs import PreparedPairs, judges
from tcompress.evaluation.tasks.retrieval import ranks
from tcompress.reading.examples import Examples, Needs
from tcompress.source import SourceModel

_LABELS = 2  # of a head that says whether a response is right


@dataclass(frozen=True)
class ResponseSelection(Task):
    """Each row's second text among distractors of other rows, for its first text.

    Attributes:
        candidates: Number of responses to choose from, the right one counted.
    """

    candidates: int = 10

    name: ClassVar[str] = "response-selection"
    summary: ClassVar[str] = "the right response among some; encoders, or heads that judge pairs"
    needs: ClassVar[Needs] = Needs(texts=(2, 2))
    metrics: ClassVar[tuple[str, ...]] = ("recall@1", "recall@2", "recall@5", "mrr")
    max_length: ClassVar[int | None] = 256

    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        return _Prepared(source, examples, max_length or self.max_length or 0, self, seed)


class _Prepared(PreparedPairs):
    def __init__(
        self,
        source: SourceModel,
        examples: Examples,
        length: int,
        task: ResponseSelection,
        seed: int,
    ) -> None:
        super().__init__(source, examples.texts, length)
        self.facts["candidates"] = task.candidates
        self._chosen = self._draw(task.candidates, seed, examples.name)

    def work(self, model: PreTrainedModel) -> int:
        return self._chosen.numel() if judges(model, _LABELS) else self.distinct_texts()

    def run(self, runner: Runner) -> Sequence[Statistic]:
        if judges(runner.model, _LABELS):
            scores = self._judged(runner)
        else:
            one, two = self.embeddings(runner)
            scores = (one[self._one.index].unsqueeze(1) * two[self._chosen]).sum(-1)
        place = ranks(scores, torch.zeros(self.units, dtype=torch.long))
        return rank_statistics(place.numpy(), (1, 2, 5), gain=False)

    def _judged(self, runner: Runner) -> Tensor:
        """Scores all candidates with the model's head.  # (rows, candidates)."""
        count = self._chosen.shape[1]
        one = [self._one.texts[index] for index in self._one.index for _ in range(count)]
        two = [self._two.texts[index] for index in self._chosen.flatten().tolist()]
        logits = self.judged(runner, one, two)
        scores = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
        return scores.reshape(self._chosen.shape)

    def _draw(self, candidates: int, seed: int, name: str) -> Tensor:
        """Draws candidates of each row among the distinct responses, the right one first."""
        pool = len(self._two.texts)
        if pool < candidates:
            raise DataError(
                f"`{name}` has {pool} distinct responses, too few to choose among {candidates}",
                "give more data, or ask for fewer: `--candidates`",
            )
        generator = np.random.default_rng(seed)
        right = np.array(self._two.index)[:, None]
        others = np.stack(
            [generator.choice(pool - 1, candidates - 1, replace=False) for _ in right]
        )
        # Numbers from the right one on mean the next response, which leaves it out.
        return torch.from_numpy(np.concatenate([right, others + (others >= right)], axis=1))
