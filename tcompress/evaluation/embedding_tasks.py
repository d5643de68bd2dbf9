"""Tasks of pairs of texts: similarity, retrieval, and choosing a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcompress.data.examples import Examples, Needs
from tcompress.data.inputs import Pooling
from tcompress.errors import DataError
from tcompress.evaluation.statistics import Spearman, Statistic, pearson, rank_statistics
from tcompress.evaluation.task_base import (
    Prepared,
    Row,
    Runner,
    Task,
    TextReader,
    checked,
    signature,
)
from tcompress.models import SourceModel

# Sentence embeddings, pooled as the model's folder says.


def embed(runner: Runner, rows: Sequence[Row], pad: int, pooling: Pooling) -> Tensor:
    """Computes embeddings of length 1 in the order of the rows.  # (rows, d).

    Raises:
        InputError: Some are not finite.
    """
    body = backbone(runner.model)
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    for chosen, batch in runner.batches(rows, pad):
        hidden = body(**batch).last_hidden_state.float()
        vectors = pooling(hidden, batch["attention_mask"]).cpu()
        for index, vector in zip(chosen, vectors, strict=True):
            found[index] = vector
    return checked(torch.stack(found))


def backbone(model: PreTrainedModel) -> Any:
    """Gives the part of a model that turns texts into vectors of tokens."""
    if getattr(model.config, "is_encoder_decoder", False):
        return model.get_encoder()  # type: ignore[operator]
    return model.base_model


def classifies(model: PreTrainedModel) -> bool:
    """Tells whether a model classifies sequences, and so can judge pairs of texts."""
    return type(model).__name__.endswith("ForSequenceClassification")


# Pairs of texts that are judged by embeddings, or together by a head.


class Distinct:
    """Texts of which each is encoded once, however often it occurs.

    Attributes:
        texts: The distinct ones.
        index: Where each of the texts is among them.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        places: dict[str, int] = {}
        self.index = [places.setdefault(text, len(places)) for text in texts]
        self.texts = list(places)


class PreparedPairs(Prepared):
    """Pairs of texts: what embeddings need is encoded at once, what a head needs when it is asked.

    Args:
        source: The model.
        texts: First texts and second texts.
        max_length: Longest text in tokens.
    """

    def __init__(
        self, source: SourceModel, texts: Sequence[Sequence[str]], max_length: int
    ) -> None:
        super().__init__()
        self._source = source
        self._reader = TextReader.open(source, max_length)
        self._one, self._two = (Distinct(column) for column in texts)
        self._single = Distinct([*self._one.texts, *self._two.texts])
        self._rows = self._reader.encode(self._single.texts)
        self._pair_rows: list[Row] | None = None
        self.signature = signature(self._rows)

    @property
    def units(self) -> int:
        return len(self._one.index)

    def embeddings(self, runner: Runner) -> tuple[Tensor, Tensor]:
        """Embeds the distinct first and the distinct second texts.  # (texts, d) each."""
        pooling = Pooling.of(self._source)
        self.facts["scoring"] = "cosine of embeddings"
        self.facts["pooling"] = pooling.words
        self.facts["truncated"] = self._reader.truncated(self._rows, self._single.texts)
        vectors = embed(runner, self._rows, self._reader.pad, pooling)
        index = torch.tensor(self._single.index)
        return vectors[index[: len(self._one.texts)]], vectors[index[len(self._one.texts) :]]

    def judged(self, runner: Runner, one: Sequence[str], two: Sequence[str]) -> Tensor:
        """Lets a head read pairs of texts, always the same ones.  # (pairs, labels)."""
        if self._pair_rows is None:
            self._pair_rows = self._reader.encode(one, two)
            self.facts["truncated"] = self._reader.truncated(self._pair_rows, one, two)
        self.facts["scoring"] = "both texts read together"
        return runner.logits(self._pair_rows, self._reader.pad)

    def distinct_texts(self) -> int:
        """Counts the texts that are embedded."""
        return len(self._rows)


def judges(model: PreTrainedModel, most: int) -> bool:
    """Tells whether a model judges pairs with a head, of at most so many labels.

    Raises:
        DataError: Its head has more labels.
    """
    if not classifies(model):
        return False
    if model.config.num_labels > most:
        raise DataError(
            f"the model's head has {model.config.num_labels} labels; "
            f"a score for a pair of texts comes from a head with at most {most}",
            "give a sentence encoder, or a model that was trained to score pairs",
        )
    return True


# Similarity of sentences.


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


# Finding a query's document among all documents.


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
        return _PreparedQueries(source, examples.texts, max_length or self.max_length or 0)


class _PreparedQueries(PreparedPairs):
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


# Choosing the right response among some.


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
        return _PreparedResponses(source, examples, max_length or self.max_length or 0, self, seed)


class _PreparedResponses(PreparedPairs):
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
