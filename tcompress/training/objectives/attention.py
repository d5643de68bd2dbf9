"""Distillation of attention relations (MiniLMv2, arXiv:2012.15828)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from tcompress.errors import InputError
from tcompress.training.objectives.base import Objective, Unit
from tcompress.training.observe import Batch, Observed, token_mask, token_weights


class Attention(Objective):
    """Divergence of the query-query, key-key and value-value relations of the last block.

    Relations are softmaxed scaled products of one kind of projection with itself, head by head.
    They are read off the projections, so any implementation of attention will do.
    """

    name: ClassVar[str] = "attention"
    needs_projections: ClassVar[bool] = True

    @property
    def unit(self) -> Unit:
        """Tokens, padding left out."""
        return "tokens"

    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        """Sum over tokens, averaged over kinds and heads."""
        kinds = [kind for kind in teacher.projections if kind in student.projections]
        if not kinds:
            raise InputError(
                "the objective `attention` needs queries, keys or values, and the last block has "
                "none",
                "leave it out of `objectives`",
            )
        losses = [
            self._divergence(batch, student.projections[kind], teacher.projections[kind])
            for kind in kinds
        ]
        return torch.stack(losses).mean()

    def _divergence(self, batch: Batch, student: Tensor, teacher: Tensor) -> Tensor:
        mask = token_mask(batch, student)
        seen = mask[:, None, None, :]
        if self.setting.causal:
            seen = seen & torch.ones_like(mask[0]).expand(mask.shape[1], -1).tril()
        own, wanted = self._relations(student, seen), self._relations(teacher, seen)
        lost = kl_div(own, wanted, reduction="none", log_target=True)
        lost = lost.masked_fill(~seen, 0.0).sum(-1).mean(1)
        return (lost * token_weights(batch, lost)).sum()

    def _relations(self, rows: Tensor, seen: Tensor) -> Tensor:
        heads = self.setting.heads if rows.shape[-1] % self.setting.heads == 0 else 1
        split = rows.float().unflatten(-1, (heads, -1)).transpose(1, 2)
        scores = split @ split.mT / split.shape[-1] ** 0.5
        # A finite floor: rows of padding would give NaN, whose gradient no mask takes away.
        return log_softmax(scores.masked_fill(~seen, -1e4), -1)
