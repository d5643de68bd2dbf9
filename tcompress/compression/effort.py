"""How much every stage before and after healing takes of its samples and repetitions.

What all stages cost in full, and at the least, is estimated from the size of the model and from how
fast this machine multiplies now. Half of the time is for healing; where the other half is too short
for all, samples, repetitions and rows of the table become fewer.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from tcompress.latency.paired_timing import threads
from tcompress.models import SourceModel
from tcompress.options.compress_options import Compress
from tcompress.planning.sites import roles_of

HEALING = 0.5
"""Share of the time that is for healing, if there is enough."""
ENOUGH = 0.75
"""Share of what stages take in full from which on nothing is left out."""
FEWEST_SAMPLES, MOST_SAMPLES = 64, 1024
"""Texts that a conversion is fitted to: the fewest, and about as many as it takes unasked."""
FEWEST_EXAMPLES, MOST_EXAMPLES = 200, 1500
"""Labelled examples of a set: the fewest, and about as many as sets have."""
FEWEST_REPEATS, MOST_REPEATS = 3, 9
"""Repetitions of a timed pass."""
TIMINGS, ALIKE, REPEATS_OF_SEVERAL = (3, 8), 0.05, 5
"""Timings of a pass that a goal goes by: fewest and most, how far the two fastest of each model may
differ, and the repetitions of each."""
_SIZE, _SECONDS = 1024, 0.2  # of the matrices that are multiplied, and how long that goes on
# Seconds, by eye from runs on MiniLM beside other work, so that they are rather too long: fixed
# ones, for a block that is exported or fitted, and multiples of a dense pass of 1,024 tokens.
_BEGIN, _OPEN, _EXPORT_BLOCK, _FIT_BLOCK = 8.0, 3.0, 1.0, 1.0
_EXPORT_PASSES, _SAMPLE_PASSES, _EXAMPLE_PASSES, _RUNTIMES = 8, 0.12, 0.04, 2.5


@dataclass(frozen=True)
class Effort:
    """Samples and repetitions of the stages; None for as many as there are."""

    samples: int | None = None
    examples: int | None = None
    repeats: int = MOST_REPEATS
    intervals: bool = True
    other_rows: bool = True  # 4 bits of the dense model, fewer layers

    @property
    def words(self) -> str:
        """Say what is done in little, for people."""
        words = [f"fitted to {self.samples:,} samples"] if self.samples else []
        words += [f"measured on {self.examples:,} examples of a set"] if self.examples else []
        words += [f"timed {self.repeats} times"]
        return ", ".join(words) + ("" if self.other_rows else ", beside fewer other models")

    @classmethod
    def least(cls, *, intervals: bool = True) -> Effort:
        """Give the least that tells anything."""
        return cls(FEWEST_SAMPLES, FEWEST_EXAMPLES, FEWEST_REPEATS, intervals, other_rows=False)

    @classmethod
    def part(cls, share: float) -> Effort:
        """Give what lies so far between the least and everything."""
        if share <= 0:
            return cls.least()
        if share >= ENOUGH:
            return cls()
        samples, examples = FEWEST_SAMPLES, FEWEST_EXAMPLES
        return cls(
            samples=round(samples * (MOST_SAMPLES / samples) ** share),
            examples=round(examples * (MOST_EXAMPLES / examples) ** share),
            repeats=round(FEWEST_REPEATS + share * (MOST_REPEATS - FEWEST_REPEATS)),
            other_rows=share > 0.5,
        )


@dataclass(frozen=True)
class Needs:
    """Minutes that all stages but healing take, about."""

    least: float
    full: float

    @classmethod
    def of(cls, source: SourceModel, settings: Compress) -> Needs:
        """Estimate both for a model on this machine as it is now; its weights are not read."""
        blocks = roles_of(source).blocks
        numbers = sum(layer.parameters for block in blocks for layer in block.layers)
        batch, length = settings.batch_and_length
        with threads(settings.threads):
            tokens = 2 * numbers / _products_per_second()  # seconds of one
        least, full = Effort.least(), Effort()
        sets = len(settings.test_data)
        return cls(
            least=_minutes(least, len(blocks), tokens, batch * length, sets, models=3),
            full=_minutes(full, len(blocks), tokens, batch * length, sets, models=5),
        )

    def effort(self, minutes: float) -> Effort:
        """Choose what stages take where all has so many minutes."""
        room = (1 - HEALING) * minutes - self.least
        return Effort.part(room / max(1e-9, self.full - self.least))

    def too_short(self, minutes: float) -> str | None:
        """Say that so many minutes are too few, without a precision that is not there."""
        if self.least <= minutes:
            return None
        number = math.ceil(self.least) if self.least > 0.5 else 0.5
        least = f"at least about {minutes_text(number)}"
        return f"{minutes_text(minutes)} are too few: all takes {least} on this machine, not healed"


def minutes_text(minutes: float) -> str:
    """Write a number of minutes, such as `3 minutes` or `0.2 minutes`."""
    number = round(minutes) if minutes >= 10 else round(minutes, 1)
    return f"{number:g} minute" + ("" if number == 1 else "s")


def _minutes(
    effort: Effort, blocks: int, token: float, timed: int, sets: int, *, models: int
) -> float:
    """Add up the stages of several models that are exported, timed and measured."""
    dense = 1024 * token
    export = _EXPORT_BLOCK * blocks + _EXPORT_PASSES * dense
    timing = _OPEN + (effort.repeats + 2) * _RUNTIMES * timed * token
    timing *= 2 if effort.repeats >= MOST_REPEATS else 1  # some are timed several times
    fit = _FIT_BLOCK * blocks + _SAMPLE_PASSES * (effort.samples or MOST_SAMPLES) * dense
    examples = sets * (effort.examples or MOST_EXAMPLES)
    measuring = _EXAMPLE_PASSES * examples * dense
    return (_BEGIN + models * (export + timing + measuring) + models / 3 * fit) / 60


def _products_per_second() -> float:
    """Measure multiply-adds, twice, of square matrices, beside whatever else is running."""
    matrix = torch.ones(_SIZE, _SIZE)
    matrix @ matrix  # the first one wakes threads
    start, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < _SECONDS or not count:
        matrix @ matrix
        count += 1
    return 2 * _SIZE**3 * count / seconds
