"""Which columns of a data set hold texts and pictures, and drawing samples from them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tcompress.errors import DataError
from tcompress.reading.tables import Table
from tcompress.source.text import listed

Kind = Literal["text", "image"]

_STRINGS = {"string", "large_string", "string_view"}
_BYTES = {"binary", "large_binary", "binary_view"}
_MAGIC = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
_PROBED_ROWS = 200


def columns_of(
    table: Table, named: Sequence[str], wanted: set[Kind], needed: set[Kind], model: str
) -> dict[Kind, tuple[str, ...]]:
    """Choose the columns to draw from.

    Args:
        table: The data set.
        named: Columns that the user named; empty to guess.
        wanted: Kinds of column that are of use.
        needed: Kinds of which at least one must be there.
        model: Name of the model's class, for errors.

    Returns:
        Columns by kind, possibly none.

    Raises:
        DataError: If a named column is missing or of another kind, or none is of use.
    """
    kinds = kinds_of(table)
    uses = {name: "image" if kind == "bytes" else kind for name, kind in kinds.items()}
    for name in named:
        _check(name, kinds, wanted, table, model)
    usable = named or [name for name, use in uses.items() if use in wanted]
    if not named:
        probe = _probe(table)
        images = [name for name in usable if uses[name] == "image"]
        texts = [name for name in usable if uses[name] == "text"]
        read = [name for name in texts if _reads_like_text(probe[name])]
        usable = [name for name in images if _looks_like_images(probe[name])]
        usable += texts if len(texts) == 1 else read
    chosen: dict[Kind, tuple[str, ...]] = {
        kind: tuple(name for name in usable if uses[name] == kind) for kind in sorted(wanted)
    }
    if not any(chosen.get(kind) for kind in needed):
        found = ", ".join(f"`{name}` ({kind})" for name, kind in kinds.items())
        raise DataError(
            f"`{model}` takes {_words(needed)}, but no column of `{table.label}` looks like that; "
            f"it has {found}",
            hint="name the columns to read, or give other data",
        )
    return chosen


def kinds_of(table: Table) -> dict[str, str]:
    """Columns, and what they hold: `text`, `image`, `bytes`, `classlabel` or the name of a type."""
    return {name: _kind(feature) for name, feature in table.rows.features.items()}


def text_columns(table: Table, names: Sequence[str]) -> list[str]:
    """Those of some string columns that read like text; the only one, whatever it holds."""
    if len(names) == 1:
        return list(names)
    probe = _probe(table)
    return [name for name in names if _reads_like_text(probe[name])]


@dataclass(frozen=True)
class Pool:
    """Everything that samples of one kind can be drawn from: each cell of some columns.

    Attributes:
        table: The data set.
        columns: The columns, all of one kind.
    """

    table: Table
    columns: tuple[str, ...]

    def draw(self, count: int, seed: int) -> Iterator[str | bytes]:
        """Yield up to `count` distinct samples that are not empty, in seeded random order."""
        parts = [self.table.rows.select_columns([name]) for name in self.columns]
        names = self.columns

        def read(index: int) -> str | bytes | None:
            row, column = divmod(index, len(names))
            return content(parts[column][row][names[column]])

        order = np.random.default_rng(seed).permutation(len(self.table.rows) * len(names))
        return _distinct((read(int(index)) for index in order), count)


def draw_texts(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """Draw up to `count` distinct texts that are not empty, in seeded random order."""
    order = np.random.default_rng(seed).permutation(len(texts))
    return [str(text) for text in _distinct((content(texts[index]) for index in order), count)]


def undecoded(table: Table) -> Table:
    """Leave pictures as the bytes of their files until they are drawn."""
    import datasets

    rows = table.rows
    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
    return Table(rows, table.label)


def _distinct(items: Iterator[str | bytes | None], count: int) -> Iterator[str | bytes]:
    seen: set[bytes] = set()
    for item in items:
        if not item:
            continue
        same = item.strip().encode() if isinstance(item, str) else item
        key = hashlib.sha256(same).digest()
        if key in seen:
            continue
        seen.add(key)
        yield item
        if len(seen) == count:
            return


def content(cell: Any) -> str | bytes | None:
    """Give a cell's text or the bytes of its picture; None if it is empty."""
    if isinstance(cell, dict):
        path, cell = cell.get("path"), cell.get("bytes")
        if cell is None and path:
            try:
                return Path(path).read_bytes()
            except OSError as error:
                raise DataError(
                    f"the picture `{path}` cannot be read ({error.strerror})",
                    hint="check that the file is where the data set says",
                ) from error
    if isinstance(cell, str):
        return cell if cell.strip() else None  # blanks within a text belong to it
    return cell or None


def _kind(feature: Any) -> str:
    """Give `text`, `image`, `bytes` (of a picture's file, perhaps), or what else a column holds."""
    import datasets

    dtype = getattr(feature, "dtype", None)
    fields = feature if isinstance(feature, dict) else {}
    if isinstance(feature, datasets.Image) or "bytes" in fields:
        return "image"
    if dtype in _BYTES:
        return "bytes"
    if isinstance(feature, datasets.Value):
        return "text" if dtype in _STRINGS else str(dtype)
    return type(feature).__name__.lower()


def _check(name: str, kinds: dict[str, str], wanted: set[Kind], table: Table, model: str) -> None:
    if name not in kinds:
        near = get_close_matches(name, kinds, n=3)
        raise DataError(
            f"`{table.label}` has no column `{name}`; it has {listed(kinds)}",
            hint=f"did you mean {listed(near)}" if near else "check the names of the columns",
        )
    if kinds[name] not in wanted and not (kinds[name] == "bytes" and "image" in wanted):
        raise DataError(
            f"column `{name}` of `{table.label}` holds {kinds[name]}, "
            f"but `{model}` takes {_words(wanted)}",
            hint=f"name other columns; there are {listed(kinds)}",
        )


def _words(kinds: set[Kind]) -> str:
    names = {"text": "text", "image": "images"}
    return " and ".join(names[kind] for kind in sorted(kinds, reverse=True))


def _probe(table: Table) -> dict[str, list[Any]]:
    step = max(1, len(table.rows) // _PROBED_ROWS)
    indices = range(0, len(table.rows), step)[:_PROBED_ROWS]
    found: dict[str, list[Any]] = table.rows.select(indices).to_dict()
    return found


def _looks_like_images(cells: list[Any]) -> bool:
    for cell in cells:
        if isinstance(cell, dict) and cell.get("path") and not cell.get("bytes"):
            return True
        data = content(cell)
        if data:
            return isinstance(data, bytes) and data.startswith(_MAGIC)
    return False


def _reads_like_text(cells: list[Any]) -> bool:
    """Tell sentences from labels, names, dates, hashes and numbers."""
    texts = [text for cell in cells if isinstance(text := content(cell), str)]
    if not texts:
        return False
    several_words = sum(any(map(str.isspace, text)) or not text.isascii() for text in texts)
    letters = sum(sum(map(str.isalpha, text)) for text in texts)
    length = sum(map(len, texts))
    return (
        length >= 8 * len(texts)
        and 2 * several_words >= len(texts)
        and 2 * letters >= length
        and 4 * len(set(texts)) > len(texts)
    )
