"""Steps and rates of a run: how many there are, how fast each learns, and what a limit allows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tcompress.options import Finetune
from tcompress.training.training_data import BESIDE

HEALING_STEPS, TASK_EPOCHS = 1000, 3.0  # where neither steps nor epochs are given
HEALING_RATE, TASK_RATE = 1e-3, 1e-4  # where no rate is given; measured in docs/healing-measured.md
SCRATCH_RATE = 1e-3  # likewise for models that begin at random; measured in docs/scratch.md

_FIRST = 5  # steps, or
_EARLY = 0.1  # part of the time, before the pace is sure
SURE = 25  # steps after which it hardly changes any more
_FEWEST_BESIDE = 32  # texts: two batches of them show a difference
_ENDLESS = 10**9  # steps that only a limit of time ends


def total_steps(options: Finetune, per_epoch: int) -> int:
    """Number of optimizer steps, from those in a pass over the data."""
    if options.steps is not None:
        return options.steps
    if options.epochs is None and options.task is None:
        return HEALING_STEPS if options.minutes is None else _ENDLESS
    return max(1, round((options.epochs or TASK_EPOCHS) * per_epoch))


def texts_beside(options: Finetune) -> int:
    """Number of texts that ship to compare mixtures on: a short run is not judged for longer."""
    if options.steps is None:
        return BESIDE
    return min(BESIDE, max(_FEWEST_BESIDE, options.steps * options.batch_size // 8))


def block_steps(options: Finetune, total: int) -> int:
    """Number of first steps in which each block is trained alone, of so many in all."""
    if not blocks_first(options):
        return 0
    return total // 4 if options.block_steps is None else options.block_steps


def blocks_first(options: Finetune) -> bool:
    """True if a run begins with blocks alone; the number of such steps asks for them too."""
    return options.stage == "blocks" or options.block_steps is not None


def highest_rate(options: Finetune, *, untrained: bool = False) -> float:
    """The learning rate after warming up; `untrained` weights are as they began at random."""
    if options.learning_rate is not None:
        return options.learning_rate
    if untrained:
        return SCRATCH_RATE
    return HEALING_RATE if options.task is None else TASK_RATE


def learning_rate(options: Finetune, step: int, total: int, highest: float) -> float:
    """Learning rate after so many steps of all; the `highest` is that after warming up."""
    warm = round(options.warmup * total)
    if step < warm:
        return highest * (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, total - warm))
    if options.schedule == "cosine":
        return highest * (0.5 * (1 + math.cos(math.pi * done)))
    return highest * (1 - done) if options.schedule == "linear" else highest


@dataclass
class Pace:
    """Time of steps, with a validation `every` so many, and how many steps a limit allows."""

    minutes: float | None
    every: int = 100
    spent: float = 0.0  # seconds of the limit that went by before time is told
    _after: float = 0.0
    _times: list[tuple[int, float]] = field(default_factory=list)
    _last: tuple[int, float] = (0, 0.0)

    def reserve(self, seconds: float) -> None:
        """Keep time for what follows the last step; it gets a half at most."""
        self._after = 0.0 if self.minutes is None else min(seconds, 30 * self.minutes)

    def note(self, step: int, seconds: float) -> None:
        """Take the time after a step; the first call comes before the steps that count."""
        if len(self._times) < 3:
            self._times.append((step, seconds))
        self._last = step, seconds

    def each(self, validation: float = 0.0) -> float | None:
        """Seconds of a step, apart from those of validations in between; None while unknown."""
        step, seconds = self._last
        if len(self._times) < 2:
            return None
        before, start = self._times[min(1, len(self._times) - 2)]  # the first step is a slow one
        validations = (step - 1) // self.every - max(0, before - 1) // self.every
        return max((seconds - start - validations * validation) / (step - before), 1e-9)

    def possible(self, validation: float = 0.0) -> int | None:
        """Steps in all that the limit allows; None without one and while the pace is unknown."""
        each, (step, seconds) = self.each(validation), self._last
        if self.minutes is None or each is None:
            return None
        if step - self._times[0][0] <= _FIRST and seconds < _EARLY * 60 * self.minutes:
            return None
        return step + max(0, int(self.left(seconds) / (each + validation / self.every)))

    def ahead(self, total: int, validation: float = 0.0) -> float | None:
        """Seconds that the steps up to so many will take; None while the pace is unknown."""
        each, (step, seconds) = self.each(validation), self._last
        if each is None:
            return None
        validations = -(-total // self.every) - step // self.every
        return min((total - step) * each + validations * validation, self.left(seconds))

    def left(self, seconds: float) -> float:
        """Return the seconds that the limit leaves for steps; infinite where there is none."""
        if self.minutes is None:
            return math.inf
        return 60 * self.minutes - self.spent - self._after - seconds
