"""How long a run is, and the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tcompress.options import Finetune

HEALING_STEPS = 1000
TASK_EPOCHS = 3.0
"""Where neither steps nor epochs are given."""

HEALING_RATE = 1e-3
TASK_RATE = 1e-4
"""Where no learning rate is given; measured in docs/healing.md."""

SCRATCH_RATE = 1e-3
"""Likewise for models that begin at random; measured in docs/scratch.md."""

_FIRST = 5  # steps, or
_EARLY = 0.1  # part of the time, before the pace is taken for known
SURE = 25
"""Steps after which it hardly changes any more."""


def total_steps(options: Finetune, per_epoch: int) -> int:
    """Number of optimizer steps.

    Args:
        options: Settings of the run.
        per_epoch: Steps in a pass over the data.
    """
    if options.steps is not None:
        return options.steps
    if options.epochs is None and options.task is None:
        return HEALING_STEPS
    return max(1, round((options.epochs or TASK_EPOCHS) * per_epoch))


def block_steps(options: Finetune, total: int) -> int:
    """Number of first steps in which each block is trained alone.

    Args:
        options: Settings of the run.
        total: Steps in all.
    """
    if not blocks_first(options):
        return 0
    return total // 4 if options.block_steps is None else options.block_steps


def blocks_first(options: Finetune) -> bool:
    """Whether a run begins with blocks alone; the number of such steps asks for them too."""
    return options.stage == "blocks" or options.block_steps is not None


def highest_rate(options: Finetune, *, untrained: bool = False) -> float:
    """The learning rate after warming up.

    Args:
        options: Settings of the run.
        untrained: Whether the model's weights are as they were drawn at random.
    """
    if options.learning_rate is not None:
        return options.learning_rate
    if untrained:
        return SCRATCH_RATE
    return HEALING_RATE if options.task is None else TASK_RATE


def learning_rate(options: Finetune, step: int, total: int, *, untrained: bool = False) -> float:
    """Learning rate of a step.

    Args:
        options: Settings of the run.
        step: Steps done before.
        total: Steps in all.
        untrained: Whether the model's weights are as they were drawn at random.
    """
    highest = highest_rate(options, untrained=untrained)
    warm = round(options.warmup * total)
    if step < warm:
        return highest * (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, total - warm))
    falling = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "constant": 1.0,
    }[options.schedule]
    return highest * falling


@dataclass
class Pace:
    """Finds out how many steps a time limit allows, so that the schedule comes to its end in time.

    Attributes:
        minutes: The limit; None for none.
        every: Steps between validations.
    """

    minutes: float | None
    every: int = 100
    _times: list[tuple[int, float]] = field(default_factory=list)

    def possible(self, step: int, seconds: float, validation: float = 0.0) -> int | None:
        """Total number of steps that the limit allows at the pace so far.

        Args:
            step: Steps done; the first call comes before those that count.
            seconds: Time spent.
            validation: Time that a validation takes.

        Returns:
            The number, None where there is no limit and while the pace is unknown: for some steps,
            or a tenth of the time where steps take long.
        """
        if self.minutes is None:
            return None
        if len(self._times) < 3:
            self._times.append((step, seconds))
        first, limit = self._times[0][0], 60 * self.minutes
        if step == first or (step - first <= _FIRST and seconds < _EARLY * limit):
            return None
        before, start = self._times[min(1, len(self._times) - 2)]  # the first step is a slow one
        inside = (step - 1) // self.every - max(0, before - 1) // self.every  # validations between
        each = max((seconds - start - inside * validation) / (step - before), 1e-9)
        return step + max(0, int((limit - seconds) / (each + validation / self.every)))

    def left(self, seconds: float) -> float:
        """Returns the seconds that the limit leaves; infinite where there is none."""
        return math.inf if self.minutes is None else 60 * self.minutes - seconds

    def over(self, seconds: float) -> bool:
        """Tells whether time is up."""
        return self.left(seconds) < 0
