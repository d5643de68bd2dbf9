"""The loss of the task itself, from labels."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from tcompress.training.objectives.base import Objective, Unit
from tcompress.training.observe import Batch, Observed


class TaskLoss(Objective):
    """The task's own loss, against labels."""

    name: ClassVar[str] = "task"
    needs_teacher: ClassVar[bool] = False

    @property
    def unit(self) -> Unit:
        """Labels."""
        return "targets"

    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        """Sum over labels."""
        assert self.setting.task is not None
        return self.setting.task(student, batch)
