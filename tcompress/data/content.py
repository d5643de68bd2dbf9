"""Kinds of files by their first bytes, where names say another thing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tcompress.data.json_forms import first_value
from tcompress.errors import DataError

_START = 2**16
_POINTER = b"version https://git-lfs.github.com/spec"
_SHEETS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # of office programs, or other archives
_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow"}
_PAGE = re.compile(r"\s*<(!doctype html|html)\b", re.IGNORECASE)
_TAG = "__label__"  # of fastText, before each label of a line


def kind_of_bytes(path: Path, kind: str, name: str) -> str:
    """Give the kind of a file that is not packed: the one that its name says, unless it is binary.

    What is no data at all is refused.
    """
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(_POINTER):
        raise DataError(f"`{name}` is a pointer of Git LFS to the data", "fetch it: `git lfs pull`")
    if start.startswith(_SHEETS):
        text = f"`{name}` is a file of a spreadsheet program, or another archive"
        raise DataError(text, "save the table as CSV in UTF-8, or unpack it")
    return next((packed for mark, packed in _MAGIC.items() if start.startswith(mark)), kind)


def kind_of_text(path: Path, kind: str, name: str) -> str:
    """Give the kind of a file of text in UTF-8: the one that its name says, unless it is another.

    Beside the kinds of the library these are `tabs`, a table in a file of texts, and `tagged`,
    lines of text that begin with labels.
    """
    with path.open("rb") as file:
        start = file.read(_START)
    text = start.decode("utf-8-sig", errors="ignore")
    if _PAGE.match(text):
        raise DataError(f"`{name}` is a web page", "download the file itself")
    may_be_object = kind in ("csv", "text") and text.lstrip().startswith("{")
    if may_be_object and isinstance(first_value(text), dict):
        return "json"
    if kind == "json" and text.strip() and text.lstrip()[0] not in '[{"':
        first = text.strip().partition("\n")[0][:40].rstrip()
        text = f"`{name}` is no JSON: it begins with `{first}`"
        raise DataError(text, "give it the ending of what it holds, such as `.csv` or `.txt`")
    if kind == "text" and text.startswith(_TAG):
        return "tagged"
    if kind == "text" and _has_tabs(text, cut=len(start) == _START):
        return "tabs"
    return kind


def _has_tabs(text: str, *, cut: bool) -> bool:
    """Tell whether all of several lines have the same number of tabs."""
    lines = [line for line in text.split("\n") if line.strip()]
    lines = lines[:-1] if cut else lines
    counts = {line.count("\t") for line in lines}
    return len(lines) > 1 and len(counts) == 1 and counts != {0}


def tagged_rows(path: Path) -> Iterator[dict[str, str | list[str]]]:
    """Read lines such as `__label__2 A text`; a line may have several labels."""
    with path.open(encoding="utf-8-sig") as file:
        for line in file:
            words = line.split()
            labels = [word for word in words if word.startswith(_TAG)]
            if words:
                text = " ".join(word for word in words if not word.startswith(_TAG))
                yield {"text": text, "label": [label.removeprefix(_TAG) for label in labels]}
