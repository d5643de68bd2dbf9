"""Distillation of the geometry of sentence embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from tcompress.training.objectives.base import Objective, Unit
from tcompress.training.observe import Batch, Observed, token_mask

ANCHORS = 256
"""Sentences whose teacher embeddings the others are compared with."""


class Embedding(Objective):
    """Distance of an embedding from the teacher's, and of its similarities to fixed anchors.

    Similarities to the teacher's embeddings of some training sentences are compared, rather than
    those within a batch, so that the term does not depend on how batches are cut.
    """

    name: ClassVar[str] = "embedding"

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.anchors: Tensor | None = None

    @property
    def unit(self) -> Unit:
        """Sentences."""
        return "examples"

    def prepare(self, seen: Iterable[tuple[Batch, Observed]]) -> None:
        """Takes the anchors from the first batches."""
        rows: list[Tensor] = []
        for batch, teacher in seen:
            rows.append(self._embed(batch, teacher))
            if sum(map(len, rows)) >= ANCHORS:
                break
        if rows:
            self.anchors = torch.cat(rows)[:ANCHORS]

    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        """Sum over sentences."""
        own, wanted = self._embed(batch, student), self._embed(batch, teacher)
        lost = (own - wanted).square().sum(-1)
        if self.anchors is not None:
            lost = lost + ((own - wanted) @ self.anchors.mT).square().mean(-1) * own.shape[-1]
        return lost.sum()

    def _embed(self, batch: Batch, seen: Observed) -> Tensor:
        states = seen.final if seen.final is not None else seen.states[-1]
        return self.setting.pooling(states.float(), token_mask(batch, states))
