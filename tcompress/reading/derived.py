"""Text columns made of others: several joined, and the first of several answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tcompress.reading.columns import content
from tcompress.reading.tables import Table

JOIN = "+"


def with_derived(table: Table, named: Iterable[str]) -> Table:
    """Adds the columns that a user names and that have to be made of others.

    `question+passage` is the text of both with a space between; a list of texts counts as its
    first one. What cannot be made is left out, and is then reported as any missing column.

    Args:
        table: The data set.
        named: Columns that were named.
    """
    rows = table.rows
    for name in dict.fromkeys(named):
        parts = name.split(JOIN)
        if any(part not in rows.column_names for part in parts) or name == "":
            continue
        if len(parts) > 1 and name not in rows.column_names:
            columns = [[_text(cell) for cell in rows[part]] for part in parts]
            made = [" ".join(filter(None, cells)) for cells in zip(*columns, strict=True)]
            rows = rows.add_column(name, made)
        elif _holds_lists(rows, name):
            made = [_text(cell) for cell in rows[name]]
            rows = rows.remove_columns([name]).add_column(name, made)
    return replace(table, rows=rows)


def _holds_lists(rows: Any, name: str) -> bool:
    cells = rows[:50][name]
    found = [cell for cell in cells if cell is not None]
    return bool(found) and all(
        isinstance(cell, list) and all(isinstance(item, str) for item in cell) for cell in found
    )


def _text(cell: Any) -> str:
    if isinstance(cell, list):
        cell = cell[0] if cell else None
    return str(content(cell) or "").strip()
