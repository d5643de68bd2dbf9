"""What is timed: batches, lengths and modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from tcompress.errors import InputError

Mode = Literal["eager", "compiled"]
MODES: tuple[Mode, ...] = get_args(Mode)
BATCHES = (1, 8, 32)
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
    """Lists the grid, eager passes first: they cost no compilation."""
    ordered = [mode for mode in MODES if mode in modes]
    return [Cell(batch, length, mode) for mode, length, batch in product(ordered, lengths, batches)]


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Reads numbers with commas between, such as `1,8,32`; repeated ones count once.

    Args:
        text: What was typed.
        option: Name of the option, for the error.

    Raises:
        InputError: Something else was typed, or a number below 1.
    """
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not (_is_size(word) and int(word))]
    if wrong:
        raise InputError(
            f"`{option}` is `{text}`, expected whole numbers of 1 or more with commas between",
            f"such as `{option} 1,8,32`",
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def _is_size(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 9


def modes(text: str, option: str = "--mode") -> tuple[Mode, ...]:
    """Reads modes with commas between.

    Raises:
        InputError: There is no such mode.
    """
    words = [word.strip() for word in text.split(",")]
    if not set(words) <= set(MODES):
        raise InputError(
            f"`{option}` is `{text}`, expected `eager`, `compiled` or both with a comma between",
            f"such as `{option} eager,compiled`",
        )
    return tuple(mode for mode in MODES if mode in words)
