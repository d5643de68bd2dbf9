"""Agreement of a student's embeddings with those of teachers that read the texts by themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tcompress.blockwise.output_sampler import VARIANTS, rank_correlation
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
        """Add a batch of texts, each followed by its variants.

        Args:
            source: Of the texts.
            taught: The teachers' embeddings: (variants * texts, D).
            output: What the student returned for them.
            batch: What it read.

        Returns:
            What an affine map of the student's cosines, which changes no order, leaves of the
            teachers', squared: the mean of pairs of variants and of pairs of texts.
        """
        student = self._sentences(output.last_hidden_state.float(), batch["attention_mask"])
        both = [item.cpu().double().unflatten(0, (-1, VARIANTS)) for item in (taught, student)]
        self._vectors[source].append((both[0][:, 0], both[1][:, 0]))
        before, after = (normalize(vectors, dim=-1) for vectors in both)
        cosines, weights = _cosines(before)
        fitted, _ = _cosines(after)
        cosines, fitted = (item - weights @ item for item in (cosines, fitted))
        slope = (weights @ (cosines * fitted)) / (weights @ fitted.square()).clamp_min(1e-200)
        return float(weights @ (cosines - slope.clamp_min(0.0) * fitted).square())

    @property
    def agreement(self) -> dict[str, float]:
        """Rank correlation of the cosines of all texts with the teachers', by source."""
        correlations = {name: rank_correlation(pairs) for name, pairs in self._vectors.items()}
        return {name: value for name, value in correlations.items() if not isnan(value)}


def _cosines(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines of variants of one text and of different texts, and weights of both halves."""
    first, second = torch.triu_indices(VARIANTS, VARIANTS, 1)
    of_variants = (vectors[:, first] * vectors[:, second]).sum(-1).flatten()
    rows = torch.triu_indices(len(vectors), len(vectors), 1).unbind()
    of_texts = (vectors[:, 0] @ vectors[:, 0].mT)[rows]
    parts = [part for part in (of_variants, of_texts) if len(part)]
    weights = [torch.full_like(part, 1 / (len(part) * len(parts))) for part in parts]
    return torch.cat(parts), torch.cat(weights)
