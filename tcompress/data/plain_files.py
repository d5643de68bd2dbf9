"""Plain files in UTF-8 of what is packed, or written in another encoding."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import shutil
from pathlib import Path
from typing import Any

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
