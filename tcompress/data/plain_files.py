"""Plain files in UTF-8 of what is packed, or written in another encoding, and their kinds.

First bytes say the kind of a file where its name says another thing.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tcompress.data.json_forms import first_value
from tcompress.errors import DataError, first_line

PACKED = (".bz2", ".gz", ".xz")
_MARKS = {  # the longer ones first: one of UTF-32 begins as one of UTF-16 does
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_PACKED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_BLOCK = 2**20
_START = 2**16
_POINTER = b"version https://git-lfs.github.com/spec"
_SHEETS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # of office programs, or other archives
_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow"}
_PAGE = re.compile(r"\s*<(!doctype html|html)\b", re.IGNORECASE)
_TAG = "__label__"  # of fastText, before each label of a line


def ending(path: Path) -> str:
    """Give the ending that says what a file holds: `.csv` of `a.csv` and of `a.CSV.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def unpacked(path: Path, cache: Path) -> Path:
    """Give a file itself if it is not packed, and else a copy in `cache` that is not.

    Names may be wrong: programs unpack what they download, or pack what they send.
    """
    with path.open("rb") as file:
        start = file.read(8)
    opener = next((unpacker for mark, unpacker in _PACKED.items() if start.startswith(mark)), None)
    if opener is None:
        return path
    copy = cache / f"data{ending(path)}"
    try:
        with opener(path) as packed, copy.open("wb") as file:
            shutil.copyfileobj(packed, file, _BLOCK)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
        text = f"`{path.name}` cannot be unpacked ({first_line(error)})"
        raise DataError(text, "give the complete file") from error
    return copy


def in_utf8(path: Path, cache: Path, name: str) -> Path:
    """Give a file of text itself if it is in UTF-8, and else a copy in `cache` that is."""
    with path.open("rb") as file:
        encoding = _encoding(file.read(64))
    _check(path, name, encoding)
    if encoding == "utf-8":
        return path
    written = cache / f"utf8-{ending(path)}"
    with (
        path.open(encoding=encoding, newline="") as read,
        written.open("w", encoding="utf-8", newline="") as file,
    ):
        shutil.copyfileobj(read, file, _BLOCK)
    return written


def _encoding(start: bytes) -> str:
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            return name
    # Without a mark: every other byte of letters is zero.
    if len(start) >= 4 and start[1::2].count(0) > len(start) // 4:
        return "utf-16-le"
    if len(start) >= 4 and start[::2].count(0) > len(start) // 4:
        return "utf-16-be"
    return "utf-8"


def _check(path: Path, name: str, encoding: str) -> None:
    """Refuse text that is not in its encoding, by line."""
    decoder, line = codecs.getincrementaldecoder(encoding)(), 1
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK)
            try:
                line += decoder.decode(block, final=not block).count("\n")
            except UnicodeDecodeError as error:
                read, kind = bytes(error.object), error.encoding
                line += read[: error.start].decode(kind, errors="ignore").count("\n")
                what = f"the byte 0x{read[error.start]:02x} does not belong to text in"
                hint = "give the complete file, or write it in UTF-8"
                if kind == "utf-8":
                    convert = f"`iconv -f CP1252 -t UTF-8 {name} > NEW`"
                    hint = f"write it in UTF-8; from an older program: {convert}"
                raise DataError(f"`{name}`, line {line}: {what} {kind.upper()}", hint) from error
            if not block:
                return


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
