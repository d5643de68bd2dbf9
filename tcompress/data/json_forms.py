"""JSON in other forms than a list or lines of objects, written as lines of objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tcompress.data.column_names import is_usual, numbered_names
from tcompress.errors import DataError, counted, listed

_START = 2**16
_OBJECTS = re.compile(r"\s*\[\s*\{")
_MESSAGE = (("role", "content"), ("from", "value"))  # keys of a message of a chat


def first_value(text: str) -> Any:
    """Parse the first line of a text by itself; None if that is no JSON."""
    with suppress(ValueError):
        return json.loads(text.lstrip().partition("\n")[0])
    return None


def as_lines(path: Path, copy: Path, name: str, split: str) -> tuple[Path, str]:
    """Give a file of lines, or of one list, as it is, and else a copy that is one of lines.

    Also says in words where the rows were, if that was not plain.
    """
    with path.open(encoding="utf-8-sig") as file:
        start = file.read(_START)
    if (_OBJECTS.match(start) and not _begins_with_list(start)) or _is_lines(start):
        return path, ""
    text = path.read_text(encoding="utf-8-sig")
    try:
        document = json.loads(text)
    except ValueError:
        try:
            document = [json.loads(line) for line in text.split("\n") if line.strip()]
        except ValueError:
            return path, ""  # which whoever reads it explains
    rows, where = _items(document) if isinstance(document, list) else _rows(document, name, split)
    with copy.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row if isinstance(row, dict) else {"text": row}) + "\n")
    return copy, where


def _items(document: list[Any]) -> tuple[Iterable[Any], str]:
    """Find the rows of a list: objects, texts, chats, or lists of cells below one of names."""
    if not document or not all(isinstance(item, list) for item in document):
        return document, ""
    if all(map(_is_chat, filter(None, document))):
        return ({"messages": item} for item in document), "chats"
    first, width = document[0], len(document[0])
    named = all(isinstance(cell, str) for cell in first) and len({*first}) == width
    named = named and (
        any(is_usual(cell) for cell in first)
        or any(type(cell) is not str for row in document[1:] for cell in row)
    )
    names = first if named else numbered_names(width)
    for number, row in enumerate(document, 1):
        if len(row) != width:
            text = f"row {number} has {counted(len(row), 'cell')}, row 1 has {width}"
            raise DataError(f"the list of lists does not fit: {text}", "give all as many")
    return _with_names(names, document[named:]), "lists of cells"


def _begins_with_list(start: str) -> bool:
    """Tell whether each line is a list, such as a chat."""
    rest = start.lstrip().partition("\n")[2].lstrip()
    return rest.startswith("[") and isinstance(first_value(start), list)


def _is_lines(start: str) -> bool:
    """Tell whether the first line is an object by itself and has another one after it."""
    lines = start.lstrip().split("\n")
    if len(start) >= _START and len(lines) < 2:
        return False
    first = first_value(start)
    if not isinstance(first, dict):
        return False
    rest = any(line.strip() for line in lines[1:])
    return rest or not any(isinstance(value, dict | list) for value in first.values())


def _rows(document: Any, name: str, split: str) -> tuple[Iterable[Any], str]:
    """Find the rows of one object that is a whole file."""
    if not isinstance(document, dict) or not any(document.values()):
        raise DataError(f"`{name}` holds no rows", hint="give other data")
    if {*document} >= {"columns", "data"} and isinstance(document["columns"], list):
        return _with_names(document["columns"], document["data"]), "key `data`"
    values = [*document.values()]
    if any(isinstance(value, list) and value and _is_chat(value) for value in values):
        return [document], ""
    rows = document.get("rows")
    if isinstance(rows, list) and _is_table(rows):
        inner_rows = [row["row"] for row in rows if isinstance(row.get("row"), dict)]
        if len(inner_rows) == len(rows):  # as the hub shows data
            return inner_rows, "key `rows`"
    lists = {key: value for key, value in document.items() if _is_table(value)}
    if len(lists) > 1:
        if split in lists:
            return lists[split], f"key `{split}`"
        first = next(iter(lists))
        hint = f"choose one, such as `--split {first}`, or where there is no such option "
        hint += f"`split: {first}` in a recipe, or a file with one of them"
        raise DataError(f"`{name}` holds lists of rows under the keys {listed(lists)}", hint)
    if lists:
        [(key, rows)] = lists.items()
        return rows, f"key `{key}`"
    if all(isinstance(value, list) for value in values) and len({*map(len, values)}) == 1:
        if len(values) == 1 and all(isinstance(item, str) for item in values[0]):
            return ({next(iter(document)): text} for text in values[0]), "one list"
        return _with_names(document, zip(*values, strict=True)), "columns"
    if all(isinstance(value, dict) for value in values):
        if all(str(key).isdigit() for value in values for key in value):
            return _of_columns(document, name), "columns"
        if len(values) > 1 and len({tuple(value) for value in values}) == 1:
            return values, "rows under keys of their own"
    inner = [(key, value) for key, value in document.items() if isinstance(value, dict)]
    if len(inner) == 1 and any(isinstance(value, list | dict) for value in inner[0][1].values()):
        key, value = inner[0]
        read_rows, where = _rows(value, name, split)
        return read_rows, f"key `{key}`, {where}" if where else f"key `{key}`"
    return [document], ""


def _of_columns(columns: dict[str, dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Make rows of columns that have the cells of the same rows under their numbers."""
    first, keys = next((column, [*cells]) for column, cells in columns.items())
    for column, cells in columns.items():
        if odd := {*cells} ^ {*keys}:
            text = f"`{name}` has row {min(odd)} in one of its columns `{first}` and `{column}`"
            raise DataError(text, "give all columns the same rows, with `null` where nothing is")
    return [{column: cells[key] for column, cells in columns.items()} for key in keys]


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _is_chat(value: list[Any]) -> bool:
    """Tell whether a list is one chat, and no table with columns such as `author` and `text`."""
    return all(
        isinstance(row, dict) and any({*keys} <= {*row} for keys in _MESSAGE) for row in value
    )


def _with_names(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(names, row, strict=True)) for row in rows)


def first_bad_line(path: Path) -> tuple[int, str] | None:
    """Give the first line that is no JSON by itself, and why; None if the file is no lines."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.lstrip()[:1] == "[":
                return None
            try:
                if line.strip():
                    json.loads(line)
            except ValueError as error:
                return (number, str(error).split(":")[0]) if number > 1 else None
    return None
