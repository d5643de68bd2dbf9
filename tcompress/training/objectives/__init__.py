"""The terms that a loss can have; one file each."""

from __future__ import annotations

from tcompress.training.objectives.attention import Attention
from tcompress.training.objectives.base import Objective, Setting, Unit
from tcompress.training.objectives.embedding import Embedding
from tcompress.training.objectives.hidden import Hidden
from tcompress.training.objectives.logits import Logits
from tcompress.training.objectives.task import TaskLoss

__all__ = ["OBJECTIVES", "Objective", "Setting", "Unit"]

OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind for kind in (TaskLoss, Logits, Hidden, Embedding, Attention)
}
"""All objectives by name."""
