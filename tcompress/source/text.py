"""Small pieces of text for messages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_MOST_LISTED = 12


def listed(names: Iterable[str]) -> str:
    """Write names as text for a message: sorted, in backticks, cut after twelve."""
    ordered = sorted(names)
    shown = ", ".join(f"`{name}`" for name in ordered[:_MOST_LISTED])
    more = len(ordered) - _MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown or "nothing"


def folder_content(folder: Path) -> str:
    """Write what a folder holds as text for a message, folders with a slash."""
    return listed(f"{item.name}/" if item.is_dir() else item.name for item in folder.iterdir())


def first_line(error: BaseException) -> str:
    """First line of an error's text, without full stop, and the next one after a colon."""
    text = str(error).strip().splitlines()
    if not text:
        return type(error).__name__
    more = f" {text[1].strip()}" if text[0].endswith(":") and text[1:] else ""
    return (text[0] + more).rstrip(".")
