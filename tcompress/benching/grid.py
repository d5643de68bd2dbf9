"""What is timed: batches, lengths and modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

Mode = Literal["eager", "compiled"]
MODES: tuple[Mode, ...] = get_args(Mode)
LENGTHS = (32, 128)


@dataclass(frozen=True)
class Cell:
    """One point of the grid.

    Attributes:
        batch: Sequences or pictures in a batch.
        length: Tokens in a sequence.
        mode: How the pass runs.
    """

    batch: int
    length: int
    mode: Mode


def cells(batches: Sequence[int], lengths: Sequence[int], modes: Sequence[Mode]) -> list[Cell]:
    """Lists the grid without repetitions, eager passes first: they cost no compilation."""
    ordered = [mode for mode in MODES if mode in modes]
    grid = product(ordered, dict.fromkeys(lengths), dict.fromkeys(batches))
    return [Cell(batch, length, mode) for mode, length, batch in grid]
