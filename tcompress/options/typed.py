"""From what was typed to plain data, as a recipe would hold it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin

from tcompress.options.fields import DIGITS, Typed, members

_WHOLE = re.compile(rf"[-+]?[0-9]{{1,{DIGITS}}}")
_DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MODES = re.compile(r"([0-9]{1,9})=([0-9]{1,9}(?:x[0-9]{1,9}){1,63})")
_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_MOST_BLOCKS = 1000  # no model has as many; a run to a million would be written out


def plain(item: Typed, texts: Sequence[str]) -> Any:
    """Reads what was typed for an option; what it cannot read stays text, for validation to refuse.

    Args:
        item: The option.
        texts: What was typed, one by one.

    Raises:
        ValueError: It cannot be meant; says what is allowed.
    """
    if item.flag.read is not None:
        return item.flag.read(list(texts))
    parts = members(item.annotation)
    words = [word.strip() for text in texts for word in text.split(",")]
    words = words if item.flag.splits else list(texts)
    for part in parts:
        if get_origin(part) is dict:
            inner = members(get_args(part)[1])
            pairs = [_pair(word, item.flag.metavar or "NAME=VALUE") for word in words]
            return {name: number(text, inner) for name, text in pairs}
    lists = [part for part in parts if get_origin(part) is tuple]
    if lists and (len(lists) == len(parts) or len(words) > 1):
        inner = members(get_args(lists[0])[0])
        return [number(word, inner) for word in words if word or inner != [str]]
    return number(texts[-1].strip(), parts) if texts else None


def number(text: str, parts: Sequence[Any]) -> Any:
    """Reads a number where one is allowed, by the rules of recipes; a percentage is a fraction."""
    if int in parts or float in parts:
        if _WHOLE.fullmatch(text):
            return int(text)
        if _DECIMAL.fullmatch(text) and math.isfinite(float(text)) and not text.isdecimal():
            return float(text)
        if float in parts and text.endswith("%") and _DECIMAL.fullmatch(text[:-1].strip()):
            return float(text[:-1]) / 100
    return text


def _pair(word: str, form: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise ValueError(f"expected pairs `{form}`")
    return name.strip(), value.strip()


def read_modes(texts: Sequence[str]) -> dict[str, list[int]]:
    """Reads the factors of widths, such as `64=8x8,172=4x43`."""
    found = [_MODES.fullmatch(word.strip()) for word in ",".join(texts).split(",")]
    if not all(found):
        raise ValueError("allowed are widths with factors, such as `64=8x8,172=4x43`")
    return {item[1]: [*map(int, item[2].split("x"))] for item in found if item}


def read_sizes(texts: Sequence[str]) -> list[int]:
    """Reads sizes such as `14,14` or `14x14`."""
    words = [word.strip() for word in ",".join(texts).replace("x", ",").split(",")]
    if not all(re.fullmatch(rf"[0-9]{{1,{DIGITS}}}", word) for word in words):
        raise ValueError("allowed are whole numbers with commas between, such as `14,14`")
    return [int(word) for word in words]


def read_blocks(texts: Sequence[str]) -> list[int]:
    """Reads `1,3,5` or `0-5,11`."""
    found = _indices(",".join(texts))
    if found is None:
        raise ValueError("allowed are block numbers such as `1,3,5` or `0-5,11`")
    return found


def read_kept(texts: Sequence[str]) -> Any:
    """Reads `1,3,5`, `0-5,11`, or several such as `decoder:0,2`."""
    return _by_stack(
        texts,
        _indices,
        "allowed are block numbers such as `1,3,5` or `0-5,11`, for one stack of several "
        "`STACK:1,3,5`",
    )


def read_dropped(texts: Sequence[str]) -> Any:
    """Reads `3`, `auto`, or several such as `decoder:2`."""
    if list(texts) == ["auto"]:
        return "auto"
    return _by_stack(
        texts,
        _count,
        "allowed is a number of blocks of 1 or more, `auto`, or `STACK:N` where a model has "
        "several stacks",
    )


def _by_stack(texts: Sequence[str], read: Callable[[str], Any], allowed: str) -> Any:
    found: dict[str, Any] = {}
    for text in texts:
        name, colon, numbers = text.rpartition(":")
        value = read(numbers)
        if value is None or (colon and not name):
            raise ValueError(allowed)
        if name in found:
            raise ValueError("given twice for one stack: join them with commas")
        found[name] = value
    if "" not in found:
        return found
    if len(found) > 1:
        raise ValueError("given with a stack and without: name the stack in each, `STACK:...`")
    return found[""]


def _indices(text: str) -> list[int] | None:
    found: list[int] = []
    for word in text.split(","):
        match = _RUN.fullmatch(word.strip())
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < _MOST_BLOCKS:
            return None
        found += range(first, last + 1)
    return found


def _count(text: str) -> int | None:
    word = text.strip()
    found = int(word) if re.fullmatch(rf"[0-9]{{1,{DIGITS}}}", word) else 0
    return found or None
