"""Finding a query's document among all documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcompress.evaluation.runner import Runner
from tcompress.evaluation.statistics import Statistic, rank_statistics
from tcompress.evaluation.tasks.base import Prepared, Task
from tcompress.evaluation.tasks.pairs import PreparedPairs
from tcompress.reading.examples import Examples, Needs
from tcompress.source import SourceModel

_CHUNK = 1024  # queries that are compared at a time


@dataclass(frozen=True)
class Retrieval(Task):
    """Each row's second text among all distinct second texts, for its first text."""

    name: ClassVar[str] = "retrieval"
    summary: ClassVar[str] = "a query's document among all documents, for sentence encoders"
    needs: ClassVar[Needs] = Needs(texts=(2, 2))
    metrics: ClassVar[tuple[str, ...]] = ("recall@1", "recall@10", "mrr@10", "ndcg@10")
    max_length: ClassVar[int | None] = 256

    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        return _Prepared(source, examples.texts, max_length or self.max_length or 0)


class _Prepared(PreparedPairs):
    def work(self, model: PreTrainedModel) -> int:
        return self.distinct_texts()

    def run(self, runner: Runner) -> Sequence[Statistic]:
        queries, documents = self.embeddings(runner)
        self.facts["documents"] = len(documents)
        right = torch.tensor(self._two.index)
        found = [
            ranks(queries[self._one.index[first : first + _CHUNK]] @ documents.T, own)
            for first, own in zip(range(0, self.units, _CHUNK), right.split(_CHUNK), strict=True)
        ]
        return rank_statistics(torch.cat(found).numpy(), (1, 10), gain=True)


def ranks(scores: Tensor, right: Tensor) -> Tensor:
    """Gives the rank of the right candidate, counted from 1.  # (queries,).

    Candidates that score the same come before it, so that a model which scores all alike, as a
    ruined one may, gets no credit.

    Args:
        scores: Scores of candidates.  # (queries, candidates)
        right: Index of the right one.  # (queries,)
    """
    own = scores.gather(1, right[:, None])
    return (scores >= own).sum(1)
