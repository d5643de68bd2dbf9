"""Distillation of logits (Hinton et al., arXiv:1503.02531)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from tcompress.errors import InputError
from tcompress.training.objectives.base import Objective, Unit
from tcompress.training.observe import Batch, Observed, token_weights


class Logits(Objective):
    """Kullback-Leibler divergence from the teacher's softened predictions.

    It is scaled by the squared temperature, so that its gradient keeps its size. Heads with one
    output, such as those of cross-encoders, are imitated by the squared difference.
    """

    name: ClassVar[str] = "logits"
    per_token = False

    @property
    def unit(self) -> Unit:
        """Tokens where every token is predicted, else examples."""
        return "tokens" if self.per_token else "examples"

    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        """Sum of the divergence over predictions."""
        if student.logits is None or teacher.logits is None:
            raise InputError(
                "the objective `logits` needs a model with a head", "leave it out of `objectives`"
            )
        if student.logits.shape[-1] == 1:  # a score: a distribution over one class says nothing
            return (student.logits.float() - teacher.logits.float()).square().sum()
        soft = self.setting.temperature
        own = log_softmax(student.logits.float() / soft, -1)
        wanted = log_softmax(teacher.logits.float() / soft, -1)
        lost = kl_div(own, wanted, reduction="none", log_target=True).sum(-1) * soft**2
        if lost.ndim > 1:
            lost = lost * token_weights(batch, lost)
        return lost.sum()
