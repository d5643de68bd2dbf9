"""Tasks of pairs of texts: similarity, retrieval, and choosing a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcompress.artifact.averages import AGREEMENT
from tcompress.data.examples import Needs, others, places_of
from tcompress.data.sentences import Prompt, SentenceEncoder
from tcompress.errors import DataError
from tcompress.evaluation.statistics import Statistic, pearson, rank_statistics, spearman
from tcompress.evaluation.task_base import Row, Runner, Task
from tcompress.models import SourceModel

_SKIPPED = "skipped"  # of an input: tokens of a prompt that pooling leaves out


class _PairTask(Task):
    """Pairs of texts, embedded, or scored by heads of at most `most_labels`."""

    needs = Needs(texts=(2, 2))
    max_length = 256
    most_labels: ClassVar[int] = 0

    @classmethod
    def sentences_of(cls, source: SourceModel) -> SentenceEncoder:
        return SentenceEncoder.of(source)

    @property
    def prompts(self) -> tuple[Prompt, Prompt]:
        """What is put before the first texts, and before the second."""
        return self.sentences.query, self.sentences.document

    def prepare(self) -> None:
        pairs = zip(self.prompts, self.examples.texts, strict=True)
        first, second = (prompt.before(list(texts)) for prompt, texts in pairs)
        self._texts = list(dict.fromkeys([*first, *second]))
        self._documents = list(dict.fromkeys(second))
        self._one = torch.from_numpy(places_of(first, self._texts))
        self._two = torch.from_numpy(places_of(second, self._documents))
        self._rows = self.reader.encode(self._texts)
        self.signature = self.reader.signature(self._rows)
        self.pairs = self.units

    @property
    def compares_texts(self) -> bool:
        return self.reader.vocabulary is not None

    def work(self, model: PreTrainedModel) -> int:
        return self.pairs if self.has_head(model) else len(self._rows)

    def has_head(self, model: PreTrainedModel) -> bool:
        """Tells whether a model scores pairs with a head; fails if that has too many labels."""
        kind = self.source.model_class.__name__
        if not self.most_labels or not kind.endswith("ForSequenceClassification"):
            return False
        if model.config.num_labels > self.most_labels:
            raise DataError(
                f"the model's head has {model.config.num_labels} labels; "
                f"a score for a pair of texts comes from a head with at most {self.most_labels}",
                "give a sentence encoder, or a model that was trained to score pairs",
            )
        return True

    def embeddings(self, runner: Runner) -> tuple[Tensor, Tensor]:
        """Embeds the first texts, and the distinct second texts.  # (texts, d) each."""
        truncated = self.reader.truncated(self._rows, self._texts)
        self.facts |= {**self.sentences.words, **self._said(), "truncated": truncated}
        model: Any = runner.model
        encodes = model.config.is_encoder_decoder and not self.sentences.stated
        body = model.get_encoder() if encodes else model.base_model
        two = places_of(self._documents, self._texts)
        skipped = torch.zeros(len(self._rows), dtype=torch.long)
        skipped[two] = self.prompts[1].tokens
        skipped[self._one] = self.prompts[0].tokens
        rows = [{**row, _SKIPPED: count} for row, count in zip(self._rows, skipped, strict=True)]

        def embedded(batch: Row) -> Tensor:
            left_out = batch.pop(_SKIPPED)
            hidden = body(**batch).last_hidden_state.float()
            return self.sentences.compared(hidden, batch["attention_mask"], left_out)

        vectors = runner.outputs(rows, self.reader.pad, embedded)
        return vectors[self._one], vectors[two]

    def _said(self) -> dict[str, str]:
        """What was put before texts, if anything was."""
        one, two = (prompt.text for prompt in self.prompts)
        if one == two:
            return {"prompt": one} if one else {}
        return {"prompt": one, "prompt_of_second": two}

    def head_logits(self, runner: Runner, one: Sequence[str], two: Sequence[str]) -> Tensor:
        """Lets a head read pairs of texts.  # (pairs, labels)."""
        rows = self.reader.encode(one, two)
        self.facts["truncated"] = self.reader.truncated(rows, one, two)
        self.facts["scoring"] = "both texts read together"
        return runner.logits(rows, self.reader.pad)


class Similarity(_PairTask):
    """How alike two texts are, by their embeddings or by a head with one output."""

    name = "sts"
    needs = Needs(texts=(2, 2), target="score", unlabelled=True)
    max_length = 128
    most_labels = 1

    @property
    def prompts(self) -> tuple[Prompt, Prompt]:
        return self.sentences.default, self.sentences.default

    def run(self, runner: Runner) -> Sequence[Statistic]:
        if self.has_head(runner.model):
            found = self.head_logits(runner, *self.examples.texts)[:, 0]
        else:
            one, two = self.embeddings(runner)
            found = self.sentences.likeness(one.double(), two[self._two].double())
        self.predictions = found.numpy()
        made = []
        if self.examples.targets is not None:
            scores = np.asarray(self.examples.targets, dtype=float)
            made = [spearman(self.predictions, scores), pearson(self.predictions, scores)]
        if self.reference is not None:
            made.append(replace(spearman(self.predictions, self.reference), name=AGREEMENT))
        return made


_CHUNK = 1024  # queries that are compared at a time


class Retrieval(_PairTask):
    """Each row's second text among all distinct second texts, for its first text."""

    name = "retrieval"

    def run(self, runner: Runner) -> Sequence[Statistic]:
        queries, documents = self.embeddings(runner)
        self.facts["documents"] = len(documents)
        chunks = zip(queries.split(_CHUNK), self._two.split(_CHUNK), strict=True)
        alike = self.sentences.likenesses
        found = [ranks(alike(some, documents), right) for some, right in chunks]
        return rank_statistics(torch.cat(found).numpy(), (1, 10), gain=True)


def ranks(scores: Tensor, right: Tensor) -> Tensor:
    """Rank of the right candidate from 1; ties come first, so a ruined model gets no credit."""
    own = scores.gather(1, right[:, None])
    return (scores >= own).sum(1)


class ResponseSelection(_PairTask):
    """Each row's second text among some `candidates`, itself counted, for its first text."""

    name = "response-selection"
    most_labels = 2  # wrong and right

    def prepare(self) -> None:
        super().prepare()
        self.facts["candidates"] = candidates = self.wanted.candidates or 10
        count = len(self._documents)
        if count < candidates:
            raise DataError(
                f"`{self.examples.name}` has {count} distinct responses, too few to choose among "
                f"{candidates}",
                "give more data, or ask for fewer: `--candidates`",
            )
        wrong = torch.from_numpy(others(self._two.numpy(), candidates - 1, count, self.wanted.seed))
        self._chosen = torch.cat([self._two[:, None], wrong], 1)  # of each row, the right one first
        self.pairs = self._chosen.numel()

    def run(self, runner: Runner) -> Sequence[Statistic]:
        if self.has_head(runner.model):
            one = [text for text in self.examples.texts[0] for _ in range(self._chosen.shape[1])]
            two = [self._documents[index] for index in self._chosen.flatten().tolist()]
            logits = self.head_logits(runner, one, two)
            found = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
            scores = found.reshape(self._chosen.shape)
        else:
            queries, responses = self.embeddings(runner)
            scores = self.sentences.likeness(queries.unsqueeze(1), responses[self._chosen])
        place = ranks(scores, torch.zeros(self.units, dtype=torch.long))
        return rank_statistics(place.numpy(), (1, 2, 5), gain=False)
