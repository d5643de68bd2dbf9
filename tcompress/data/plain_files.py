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

_OPENERS: dict[str, Any] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
PACKED = tuple(_OPENERS)
_MARKS = {  # the longer ones first: one of UTF-32 begins as one of UTF-16 does
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_BLOCK = 2**20


def ending(path: Path) -> str:
    """Give the ending that says what a file holds: `.csv` of `a.csv` and of `a.CSV.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] and suffixes[-1] in _OPENERS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def plain_file(path: Path, cache: Path, *, text: bool) -> Path:
    """Give a file itself if it is plain, and else a copy in `cache` that is; text is UTF-8."""
    copy = cache / "copies" / f"data{ending(path)}"
    copy.parent.mkdir(exist_ok=True)
    opener = _OPENERS.get(path.suffix.lower())
    if opener is not None:
        try:
            with opener(path) as packed, copy.open("wb") as file:
                shutil.copyfileobj(packed, file, _BLOCK)
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
            text_of = f"`{path.name}` cannot be unpacked ({first_line(error)})"
            raise DataError(text_of, "give the complete file") from error
        plain = copy
    else:
        plain = path
    if not text:
        return plain
    with plain.open("rb") as file:
        encoding = _encoding(file.read(64))
    _check(plain, path.name, encoding)
    if encoding == "utf-8":
        return plain
    written = copy.with_name(f"utf8-{copy.name}")
    with (
        plain.open(encoding=encoding, newline="") as read,
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
                line += _lines(error)
                raise _undecoded(name, line, error) from error
            if not block:
                return


def _lines(error: UnicodeDecodeError) -> int:
    before = bytes(error.object)[: error.start]
    return before.decode(error.encoding, errors="ignore").count("\n")


def _undecoded(name: str, line: int, error: UnicodeDecodeError) -> DataError:
    byte, kind = bytes(error.object)[error.start], error.encoding.upper()
    return DataError(
        f"`{name}`, line {line}: the byte 0x{byte:02x} does not belong to text in {kind}",
        f"write it in UTF-8; from an older program: `iconv -f CP1252 -t UTF-8 {name} > NEW`"
        if kind == "UTF-8"
        else "give the complete file, or write it in UTF-8",
    )
