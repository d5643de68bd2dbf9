"""The layout of golden documents: what is the same in several blocks of a model stands once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_WIDTH = 100  # columns
_END = r"(?=[.\"]|$)"  # of a part of a name
_BLOCK = re.compile(rf"\.(\d+){_END}")
_BLOCKS = re.compile(rf"\.\{{([\d,]+)\}}{_END}")
_ANY = re.compile(rf"\.\*{_END}")  # stands for the number of a block


def folded(value: Any) -> Any:
    """Write rows and keys that differ in the number of a block alone once, with all numbers.

    `{"a.0.b": 1, "a.1.b": 1}` becomes `{"a.{0,1}.b": 1}`; a list's rows go by their `name`.
    """
    if isinstance(value, list):
        rows = [folded(item) for item in value]
        return [json.loads(text) for text in _once((_named(row), row) for row in rows)]
    if isinstance(value, dict):
        items = {key: folded(item) for key, item in value.items()}
        pairs = _once((key, {key: item}) for key, item in items.items())
        return {key: item for text in pairs for key, item in json.loads(text).items()}
    return value


def unfolded(value: Any) -> Any:
    """Write out what `folded` writes once; rows of one name follow each other."""
    if isinstance(value, list):
        return [row for item in value for row in _each(_named(item), unfolded(item))]
    if isinstance(value, dict):
        pairs = (pair for key, item in value.items() for pair in _each(key, {key: unfolded(item)}))
        return {key: item for pair in pairs for key, item in pair.items()}
    return value


def by_name(rows: list[Any]) -> dict[Any, Any]:
    """Rows by their names, or by their positions where two have the same or one has none."""
    names = [_named(row) for row in rows]
    keys = names if all(names) and len({*names}) == len(rows) else range(len(rows))
    return dict(zip(keys, rows, strict=True))


def dumped(value: Any, indent: str = "", taken: int = 0) -> str:
    """Write JSON with as much on a line as fits; `taken` columns of the first are taken."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + taken + len(line) <= _WIDTH:
        return line
    inner = indent + " "
    if isinstance(value, list):
        rows = [dumped(item, inner) for item in value]
    else:
        keys = [f"{json.dumps(key, ensure_ascii=False)}: " for key in value]
        rows = [
            key + dumped(item, inner, len(key))
            for key, item in zip(keys, value.values(), strict=True)
        ]
    lines: list[str] = []
    for row in rows:
        joined = f"{lines[-1]}, {row}" if lines else row
        if lines and "\n" not in joined and len(inner) + len(joined) < _WIDTH:
            lines[-1] = joined
        else:
            lines.append(row)
    first, last = "[]" if isinstance(value, list) else "{}"
    return f"{first}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{last}"


def _named(row: Any) -> str:
    name = row.get("name") if isinstance(row, dict) else None
    return name if isinstance(name, str) else ""


def _once(rows: Iterator[tuple[str, Any]]) -> Iterator[str]:
    """Give the text of each row, and of those that only differ in the block of their names once."""
    groups: dict[str, tuple[str, list[str]]] = {}
    for position, (name, row) in enumerate(rows):
        text = json.dumps(row)
        block = _BLOCK.search(name)
        if block is None or _ANY.search(text) or _BLOCKS.search(text):
            groups[f"{position} {text}"] = text, []
            continue
        number = re.compile(re.escape(block[0]) + _END)
        pattern = number.sub(".*", text)
        groups.setdefault(pattern, (number.sub(".*", name), []))[1].append(block[1])
    for pattern, (name, blocks) in groups.items():
        if len(blocks) < 2:
            yield _ANY.sub(f".{blocks[0]}", pattern) if blocks else name
        else:
            listed = _ANY.sub(f".{{{','.join(blocks)}}}", name, count=1)
            yield pattern.replace(json.dumps(name), json.dumps(listed), 1)


def _each(name: str, row: Any) -> Iterator[Any]:
    blocks = _BLOCKS.search(name)
    if blocks is None:
        yield row
        return
    pattern = json.dumps(row).replace(blocks[0], ".*")
    for block in blocks[1].split(","):
        yield json.loads(_ANY.sub(f".{block}", pattern))
