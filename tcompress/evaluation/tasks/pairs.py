"""Pairs of texts that are judged by embeddings, or together by a head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcompress.errors import DataError
from tcompress.evaluation.embed import classifies, embed
from tcompress.evaluation.runner import Row, Runner
from tcompress.evaluation.tasks.base import Prepared
from tcompress.evaluation.texts import TextReader, signature
from tcompress.reading.pooling import Pooling
from tcompress.source import SourceModel


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
