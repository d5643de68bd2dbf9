"""What a model is trained for: terms of the loss, each a small class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from tcompress.reading.pooling import MEAN, Pooling
from tcompress.training.observe import Batch, Observed

Unit = Literal["examples", "tokens", "targets"]


@dataclass(frozen=True)
class Setting:
    """What objectives may depend on.

    Attributes:
        temperature: Softening of the teacher's logits.
        heads: Relation heads of attention.
        causal: Whether tokens see only those before them.
        pooling: How one embedding is made of the tokens of a sentence.
        task: Loss and predictions of the task, if there is one.
    """

    temperature: float = 2.0
    heads: int = 1
    causal: bool = False
    pooling: Pooling = MEAN
    task: Callable[[Observed, Batch], Tensor] | None = None


class Objective(ABC):
    """One term of the loss.

    A term is a sum over units of a batch, which the loop divides by their number in the whole
    step. So it depends neither on how a batch is cut nor on the number of processes.
    """

    name: ClassVar[str]
    needs_teacher: ClassVar[bool] = True
    needs_projections: ClassVar[bool] = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @property
    @abstractmethod
    def unit(self) -> Unit:
        """What `loss` is a sum over."""

    @abstractmethod
    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        """Sum of the term over a batch.

        Args:
            batch: Inputs and, for tasks, `labels`.
            student: What the trained model computed.
            teacher: What the teacher computed; empty without one.

        Returns:
            A scalar with gradient.
        """

    def prepare(self, seen: Iterable[tuple[Batch, Observed]]) -> None:  # noqa: B027 - optional
        """Looks at the teacher on some batches before training begins."""
