"""Agreement of a student's embeddings with those of teachers that read the texts by themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import isnan
from typing import Any

import numpy as np
from torch import Tensor

from tcompress.blockwise.output_sampler import VARIANTS, change_of_likeness, rank_correlation
from tcompress.data.sentences import SentenceEncoder


def without_words(text: str, share: float) -> str:
    """Leave a share of the words out, which are the same whenever the text is met.

    Texts that have much in common are what embeddings tell apart; of others poor models know as
    much as good ones.
    """
    words = text.split()
    drawn = np.random.default_rng([len(text), round(1000 * share)]).random(len(words))
    remaining = [word for word, chance in zip(words, drawn, strict=True) if chance >= share]
    return " ".join(remaining or words[:1]) or text


class TextComparison:
    """Likeness of texts to the teachers and to the student, summed up by source."""

    def __init__(self, sentences: SentenceEncoder) -> None:
        self._sentences = sentences
        self._vectors: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def add(self, source: str, taught: Tensor, output: Any, batch: Mapping[str, Tensor]) -> float:
        """Add a batch of texts, each followed by its variants; `taught` is (variants * texts, D).

        Returns what an affine map of the student's cosines, which changes no order, leaves of the
        teachers', squared: the mean of pairs of variants and of pairs of texts.
        """
        student = self._sentences(output.last_hidden_state.float(), batch["attention_mask"])
        dense, new = (
            item.cpu().double().unflatten(0, (-1, VARIANTS)).transpose(0, 1)
            for item in (taught, student)
        )
        self._vectors[source].append((dense[0], new[0]))
        texts = dense.shape[1]
        kinds = min(2, texts)  # of pairs: of variants, and of texts where there are several
        return change_of_likeness(dense.flatten(0, 1), new.flatten(0, 1)) / (texts * kinds)

    @property
    def agreement(self) -> dict[str, float]:
        """Rank correlation of the cosines of all texts with the teachers', by source."""
        correlations = {name: rank_correlation(pairs) for name, pairs in self._vectors.items()}
        return {name: value for name, value in correlations.items() if not isnan(value)}
