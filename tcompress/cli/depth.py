"""Which blocks to keep or drop, as options say it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tcompress.cli.names import DIGITS
from tcompress.errors import RecipeError

_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_MOST_BLOCKS = 1000  # no model has as many; a run to a million would be written out


def kept_blocks(texts: Sequence[str]) -> Any:
    """Reads `1,3,5`, `0-5,11`, or several such as `decoder:0,2`; returns what a recipe would say.

    Raises:
        RecipeError: It is none of these.
    """
    allowed = (
        "are block numbers such as `1,3,5` or `0-5,11`, for one stack of several `STACK:1,3,5`"
    )
    return _by_stack("--keep-layers", texts, _indices, allowed)


def dropped_blocks(texts: Sequence[str]) -> Any:
    """Reads `3`, `auto`, or several such as `decoder:2`; returns what a recipe would say.

    Raises:
        RecipeError: It is none of these.
    """
    if list(texts) == ["auto"]:
        return "auto"
    allowed = (
        "is a number of blocks of 1 or more, `auto`, or `STACK:N` where a model has several stacks"
    )
    return _by_stack("--drop-layers", texts, _count, allowed)


def block_numbers(option: str, text: str) -> tuple[int, ...]:
    """Reads `1,3,5` or `0-5,11`.

    Raises:
        RecipeError: It is neither.
    """
    found = _indices(text)
    if found is None:
        raise RecipeError(
            f"`{option}` is `{text}`, allowed are block numbers such as `1,3,5` or `0-5,11`",
            "see `tcompress convert --help`",
        )
    return found


def _by_stack(option: str, texts: Sequence[str], read: Any, allowed: str) -> Any:
    found: dict[str, Any] = {}
    for text in texts:
        name, colon, numbers = text.rpartition(":")
        value = read(numbers)
        if value is None or (colon and not name):
            raise RecipeError(
                f"`{option}` is `{text}`, allowed {allowed}", "see `tcompress convert --help`"
            )
        if name in found:
            raise RecipeError(f"`{option}` is given twice for one stack", "join them with commas")
        found[name] = value
    if "" not in found:
        return found
    if len(found) > 1:
        raise RecipeError(
            f"`{option}` is given with a stack and without", "name the stack in each: `STACK:...`"
        )
    return found[""]


def _indices(text: str) -> tuple[int, ...] | None:
    found: list[int] = []
    for word in text.split(","):
        match = _RUN.fullmatch(word.strip())
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < _MOST_BLOCKS:
            return None
        found += range(first, last + 1)
    return tuple(found)


def _count(text: str) -> int | None:
    word = text.strip()
    found = int(word) if word.isascii() and word.isdecimal() and len(word) <= DIGITS else 0
    return found or None
