"""Tasks of pairs of texts: similarity, retrieval, and choosing a response."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tcompress.artifact.averages import AGREEMENT
from tcompress.data.examples import Needs, others, places_of
from tcompress.data.sentences import Prompt, SentenceEncoder
from tcompress.errors import DataError, counted
from tcompress.evaluation.statistics import pearson, rank_statistics, spearman
from tcompress.evaluation.task_base import EvaluationTask, Measured, Prepared, Row, Runner

_SKIPPED = "skipped"  # of an input: tokens of a prompt that pooling leaves out


_NONE = torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, eq=False)
class TextPairs(Prepared):
    """Pairs of texts, each with its candidates among the distinct second texts.

    Rows are of the distinct texts, or of pairs that a head reads together, candidate by candidate.
    """

    first: Tensor = _NONE  # rows of first texts: (pairs,)
    documents: Tensor = _NONE  # rows of distinct second texts
    candidates: Tensor = _NONE  # among these: (pairs, candidates)
    skipped: Tensor = _NONE  # tokens that pooling skips, of each row


class _PairTask(EvaluationTask):
    """Pairs of texts, embedded, or scored by heads of at most `most_labels`."""

    needs = Needs(texts=(2, 2))
    max_length = 256
    most_labels: ClassVar[int] = 0
    answers_texts = True
    embeds_texts = True
    prepared: TextPairs

    @property
    def sentences(self) -> SentenceEncoder:
        return self.reader.sentences

    @property
    def prompts(self) -> tuple[Prompt, Prompt]:
        """Prompts before the first texts, and before the second."""
        return self.sentences.query, self.sentences.document

    @property
    def has_head(self) -> bool:
        """True of a model that scores pairs with a head."""
        name = self.source.model_class.__name__
        return bool(self.most_labels) and name.endswith("ForSequenceClassification")

    def prepare(self) -> TextPairs:
        columns = zip(self.prompts, self.examples.texts[:2], strict=True)
        first, second = (prompt.before(list(texts)) for prompt, texts in columns)
        texts, documents = ([*dict.fromkeys(column)] for column in ([*first, *second], second))
        rows = self.reader.encode(texts)
        candidates = self.candidates(torch.from_numpy(places_of(second, documents)), len(documents))
        pairs = TextPairs(len(first), self.reader.signature(rows), candidates=candidates)
        if self.has_head:
            count, repeated = candidates.shape[1], (first, *self.examples.texts[2:])
            one, *thirds = ([text for text in column for _ in range(count)] for column in repeated)
            two = [documents[index] for index in candidates.flatten().tolist()]
            rows = self.reader.encode(one, two, *thirds)
            truncated = self.reader.truncated(rows, one, two, *thirds)
            together = "all three texts" if thirds else "both texts"
            facts = {"truncated": truncated, "scoring": f"{together} read together"}
            return replace(pairs, rows=rows, facts=facts)
        skipped = torch.zeros(len(texts), dtype=torch.long)
        firsts, seconds = (torch.from_numpy(places_of(x, texts)) for x in (first, documents))
        skipped[seconds] = self.prompts[1].tokens
        skipped[firsts] = self.prompts[0].tokens
        facts, (prompt, other) = self.sentences.words, (it.text for it in self.prompts)
        if prompt or other:
            facts["prompt"] = prompt
        if prompt != other:
            facts["prompt_of_second"] = other
        facts["truncated"] = self.reader.truncated(rows, texts)
        return replace(
            pairs, rows=rows, first=firsts, documents=seconds, skipped=skipped, facts=facts
        )

    def candidates(self, second: Tensor, documents: int) -> Tensor:
        """Candidates of each pair, among so many documents, its own second text first.

        # (pairs,) -> (pairs, candidates)
        """
        return second[:, None]

    def embeddings(self, runner: Runner) -> tuple[Tensor, Tensor]:
        """Embed the first texts, and the distinct second texts.  # (texts, d) each."""
        prepared = self.prepared
        model: Any = runner.model
        encodes = model.config.is_encoder_decoder and not self.sentences.stated
        body = model.get_encoder() if encodes else model.base_model
        counts = zip(prepared.rows, prepared.skipped, strict=True)
        rows = [{**row, _SKIPPED: count} for row, count in counts]

        def embedded(batch: Row) -> Tensor:
            skipped = batch.pop(_SKIPPED)
            hidden = body(**batch).last_hidden_state.float()
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
            return self.sentences.compared(hidden, mask, skipped)

        vectors = runner.outputs(rows, self.reader.pad, embedded)
        return vectors[prepared.first], vectors[prepared.documents]

    def head_logits(self, runner: Runner) -> Tensor:
        """Score pairs with the model's head.  # (pairs * candidates, labels)."""
        labels = runner.model.config.num_labels
        if labels > self.most_labels:
            raise DataError(
                f"the model's head has {labels} labels; "
                f"a score for a pair of texts comes from a head with at most {self.most_labels}",
                "give a sentence encoder, or a model that was trained to score pairs",
            )
        return runner.logits(self.prepared.rows, self.reader.pad)


class Similarity(_PairTask):
    """Likeness of two texts, by their embeddings or by a head with one output."""

    name = "sts"
    needs = Needs(texts=(2, 2), target="score", unlabelled=True)
    max_length = 128
    most_labels = 1

    @property
    def prompts(self) -> tuple[Prompt, Prompt]:
        return self.sentences.default, self.sentences.default

    def run(self, runner: Runner, reference: Any) -> Measured:
        if self.has_head:
            similarities = self.head_logits(runner)[:, 0]
        else:
            first, documents = self.embeddings(runner)
            second = documents[self.prepared.candidates[:, 0]]
            similarities = self.sentences.likeness(first.double(), second.double())
        predictions = similarities.numpy()
        statistics = []
        if self.examples.targets is not None:
            scores = np.asarray(self.examples.targets, dtype=float)
            statistics = [spearman(predictions, scores), pearson(predictions, scores)]
        if reference is not None:
            statistics.append(replace(spearman(predictions, reference), name=AGREEMENT))
        return Measured(statistics, predictions)


_CHUNK = 1024  # queries that are compared at a time
_GATHERED = 2**14  # vectors of candidates that are gathered at a time


class Retrieval(_PairTask):
    """Each row's second text among all distinct second texts, for its first text."""

    name = "retrieval"

    def prepare(self) -> TextPairs:
        pairs = super().prepare()
        return replace(pairs, facts={**pairs.facts, "documents": len(pairs.documents)})

    def run(self, runner: Runner, reference: Any) -> Measured:
        queries, documents = self.embeddings(runner)
        answers = self.prepared.candidates[:, 0]
        chunks = zip(queries.split(_CHUNK), answers.split(_CHUNK), strict=True)
        compare = self.sentences.likenesses
        parts = [ranks(compare(chunk, documents), answer) for chunk, answer in chunks]
        return Measured(rank_statistics(torch.cat(parts).numpy(), (1, 10), gain=True))


def ranks(scores: Tensor, right: Tensor) -> Tensor:
    """Rank of the right candidate from 1; ties come first, so a ruined model gets no credit."""
    return (scores >= scores.gather(1, right[:, None])).sum(1)


class ResponseSelection(_PairTask):
    """Each row's second text among some `candidates`, itself counted, for its first text."""

    name = "response-selection"
    needs = Needs(texts=(2, 3))
    most_labels = 2  # wrong and right

    def prepare(self) -> TextPairs:
        pairs = super().prepare()
        return replace(pairs, facts={"candidates": pairs.candidates.shape[1], **pairs.facts})

    def candidates(self, second: Tensor, documents: int) -> Tensor:
        count = self.options.candidates or 10
        if documents < count:
            raise DataError(
                f"`{self.examples.name}` has {counted(documents, 'distinct response')}, too few "
                f"to choose among {count}",
                "give more data, or ask for fewer: `--candidates`",
            )
        wrong = others(second.numpy(), count - 1, documents, self.options.seed)
        return torch.cat([second[:, None], torch.from_numpy(wrong)], 1)

    def run(self, runner: Runner, reference: Any) -> Measured:
        candidates = self.prepared.candidates
        if self.has_head:
            logits = self.head_logits(runner)
            scores = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
            scores = scores.reshape(candidates.shape)
        else:
            queries, responses = self.embeddings(runner)
            size = max(1, _GATHERED // candidates.shape[1])
            chunks = zip(queries.split(size), candidates.split(size), strict=True)
            compare = self.sentences.likeness
            parts = [compare(chunk.unsqueeze(1), responses[chosen]) for chunk, chosen in chunks]
            scores = torch.cat(parts)
        positions = ranks(scores, torch.zeros(len(candidates), dtype=torch.long))
        return Measured(rank_statistics(positions.numpy(), (1, 2, 5), gain=False))
