"""Regression of every block on the teacher's hidden states."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tcompress.training.objectives.base import Objective, Unit
from tcompress.training.observe import Batch, Observed, token_weights


class Hidden(Objective):
    """Relative squared error of each block's output, a mean over blocks.

    A converted model keeps the widths of the dense one, so every block has an exact target. The
    error of a token is relative to the norm of the teacher's state, which keeps tokens with huge
    activations, as language models have, from hiding all others.
    """

    name: ClassVar[str] = "hidden"

    @property
    def unit(self) -> Unit:
        """Tokens, padding left out."""
        return "tokens"

    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        """Sum over tokens of the error, averaged over blocks."""
        pairs = list(zip(student.states, teacher.states, strict=True))
        if student.final is not None and teacher.final is not None:
            pairs.append((student.final, teacher.final))
        return torch.stack([relative_error(batch, *pair) for pair in pairs]).mean()


def relative_error(batch: Batch, state: Tensor, target: Tensor) -> Tensor:
    """Sum over tokens of the squared distance, relative to the target's squared norm."""
    state, target = state.float(), target.float()
    error = (state - target).square().sum(-1) / target.square().sum(-1).clamp_min(1e-12)
    return (error * token_weights(batch, error)).sum()
