"""Columns of labels: names, numbers, numbers with names beside them, and several labels a row."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tcompress.data.column_names import plain_name
from tcompress.data.labels import Classes, classes_of_names, classes_of_numbers
from tcompress.data.numbers import is_missing, whole_numbers
from tcompress.data.tables import Table, kinds_of
from tcompress.errors import DataError
from tcompress.progress import tell

LISTS = ("list", "largelist", "sequence")  # kinds of columns
# Names of a class beside its number, in a column of their own.
_NAMED = ("{}_text", "{}_name", "{}_names", "{}_str", "{}_string", "text_{}", "class_name")

Ids = Sequence[int | tuple[int, ...] | None]


@dataclass(frozen=True)
class Labels:
    """Labels of all rows of a table: ids of classes, and None where a row has no label."""

    classes: Classes
    ids: Ids
    partial: bool = False  # whether the data itself says which rows have no label


def read_labels(table: Table, column: str, *, several: bool) -> Labels:
    """Read a column of labels, or several columns of 0 and 1 joined by `+`.

    With `several` a row may have more than one label.
    """
    where = f"column `{column}` of `{table.label}`"
    if column not in table.rows.column_names:
        return _of_columns(table, column.split("+"))
    feature, cells = table.rows.features[column], table.rows[column][:]
    cells = [cell.strip() if isinstance(cell, str) else cell for cell in cells]
    if plain_name(column) == "goldlabel" and any(isinstance(cell, str) for cell in cells):
        return _agreed(cells, where)
    if all(map(is_missing, cells)):
        return Labels(Classes(), [None] * len(cells))
    kind = kinds_of(table)[column]
    inner = getattr(getattr(feature, "feature", None), "names", None)
    lists = as_lists(cells) if several and (kind in LISTS or kind == "text") else None
    if lists is not None:
        return _of_one(_of_lists(lists, inner, where))
    names = getattr(feature, "names", None)
    if names:
        return _of_class_labels(cells, names, where)
    if (labels := _beside(table, column)) is not None:
        return labels
    if any(isinstance(cell, str) and cell for cell in cells):
        return _of_names(cells, where)
    numbers_in = {int(cell) for cell in cells if not is_missing(cell)}
    if numbers_in == {-1}:
        return Labels(Classes(), [None] * len(cells))
    classes = classes_of_numbers(numbers_in, where)
    places = {value: index for index, value in enumerate(classes.numbers)}
    return Labels(classes, [None if is_missing(cell) else places[int(cell)] for cell in cells])


def _of_names(cells: Sequence[Any], where: str) -> Labels:
    names = sorted({str(cell) for cell in cells if not is_missing(cell)})
    alike = {name.casefold(): name for name in names}
    for name in names:
        if alike[name.casefold()] != name:
            variant = alike[name.casefold()]
            tell(f"{where}: `{name}` and `{variant}` are two classes, whose names differ in case")
    ids = {name: index for index, name in enumerate(names)}
    row_ids = [None if is_missing(cell) else ids[str(cell)] for cell in cells]
    return Labels(classes_of_names(names), row_ids)


def _agreed(cells: Sequence[Any], where: str) -> Labels:
    """Read what most of several people say, and a dash where they do not agree."""
    agreed = [None if cell == "-" else cell for cell in cells]
    if missing := agreed.count(None):
        tell(f"{where}: {missing:,} of {len(cells):,} rows have no label that is agreed on")
    return replace(_of_names(agreed, where), partial=True)


def _of_class_labels(cells: Sequence[Any], names: Sequence[str], where: str) -> Labels:
    """Read ids of a column that knows their names; -1 stands for no label."""
    ids = [None if cell is None or cell < 0 else int(cell) for cell in cells]
    missing, present = ids.count(None), {*ids} - {None}
    if not present:
        return Labels(Classes(), ids)
    if missing:
        tell(f"{where}: {missing:,} of {len(ids):,} rows have no label: left out")
    absent = frozenset(range(len(names))) - present
    return Labels(Classes(tuple(names), tuple(range(len(names))), absent), ids, partial=True)


def _beside(table: Table, column: str) -> Labels | None:
    """Read numbers and their names, of a column of one and a column of the other beside it."""
    kinds = kinds_of(table)
    lower = {name.lower(): name for name in kinds}
    pairs = [(column, lower[name]) for name in _names_beside(column) if name in lower]
    pairs += [(name, column) for name in kinds if column.lower() in _names_beside(name)]
    for numeric, textual in pairs:
        if "int" in kinds[numeric] and kinds[textual] == "text":
            numbers = table.rows[numeric][:]
            called = _names_of_numbers(numbers, table.rows[textual][:])
            if called is not None:
                called = dict(sorted(called.items()))
                classes = Classes(tuple(called.values()), tuple(called))
                places = {value: index for index, value in enumerate(called)}
                return Labels(classes, [places[value] for value in numbers])
    return None


def _names_beside(column: str) -> list[str]:
    return [form.format(column.lower()) for form in _NAMED]


def _names_of_numbers(numbers: Sequence[Any], names: Sequence[Any]) -> dict[int, str] | None:
    """Give each number its name, if each has one and no two have the same."""
    called: dict[int, str] = {}
    for value, name in zip(numbers, names, strict=True):
        if value is None or value < 0 or is_missing(name) or called.setdefault(value, name) != name:
            return None
    return called if len({*called.values()}) == len(called) else None


def as_lists(cells: Sequence[Any]) -> list[list[Any] | None] | None:
    """Read cells of several labels, which may be lists written as text; None if others are."""
    lists: list[list[Any] | None] = []
    for cell in cells:
        item = None if is_missing(cell) else cell
        if isinstance(item, str) and item.strip()[:1] in ("[", "("):
            try:
                item = ast.literal_eval(item.strip())
            except (ValueError, SyntaxError):
                return None
        if not isinstance(item, list | tuple | None):
            return None
        lists.append(None if item is None else [*item])
    return lists


def _of_lists(lists: Sequence[list[Any] | None], names: Sequence[str] | None, where: str) -> Labels:
    """Read lists of names or of numbers, or lists of a 0 or 1 for each class."""
    items = [item for cell in lists for item in cell or ()]
    for row, cell in enumerate(lists, 1):
        if any(is_missing(item) for item in cell or ()):
            raise DataError(f"{where} has an empty label in row {row}", "remove it from the list")
    if not items:
        raise DataError(f"{where} has no labels at all", "name another column")
    if all(isinstance(item, str) for item in items):
        classes = replace(classes_of_names(sorted({*items})), several=True)
        keys: Any = classes.names
    else:
        numbers = None if any(isinstance(item, str) for item in items) else whole_numbers(items)
        if numbers is None:
            what = "labels that are neither names nor whole numbers"
            raise DataError(f"{where} has {what}", "write names, or numbers, in all lists")
        rest = iter(numbers)
        lists = [None if cell is None else [next(rest) for _ in cell] for cell in lists]
        widths = {len(cell) for cell in lists if cell is not None}
        if {*numbers} <= {0, 1} and len(widths) == 1 and max(widths) > 1:
            return _of_marks(lists, names)
        classes = classes_of_numbers({int(value) for value in numbers if value is not None}, where)
        if names:
            absent = frozenset(range(len(names))) - {*numbers}
            classes = Classes(tuple(names), tuple(range(len(names))), absent)
        classes = replace(classes, several=True)
        keys = classes.numbers
    ids = {key: index for index, key in enumerate(keys)}
    row_ids = [None if row is None else tuple(sorted({ids[v] for v in row})) for row in lists]
    return Labels(classes, row_ids)


def _of_one(labels: Labels) -> Labels:
    """Take lists as one label each, if every row has one."""
    if any(isinstance(cell, tuple) and len(cell) != 1 for cell in labels.ids):
        return labels
    ids = [cell[0] if isinstance(cell, tuple) else None for cell in labels.ids]
    return Labels(replace(labels.classes, several=False), ids)


def _of_marks(marks: Sequence[Sequence[Any] | None], names: Sequence[str] | None) -> Labels:
    """Read a 0 or 1 for each class, in its place."""
    width = len(next(row for row in marks if row is not None))
    called = tuple(names) if names and len(names) == width else tuple(map(str, range(width)))
    ids = [
        None if row is None else tuple(at for at, value in enumerate(row) if value) for row in marks
    ]
    absent = frozenset(range(width)) - {at for row in ids for at in row or ()}
    return Labels(Classes(called, tuple(range(width)), absent, several=True), ids)


def _of_columns(table: Table, columns: Sequence[str]) -> Labels:
    """Read columns of 0 and 1, one for each class."""
    marks = {name: table.rows[name][:] for name in columns}
    for name, cells in marks.items():
        if not holds_marks(cells):
            raise DataError(
                f"column `{name}` of `{table.label}` does not say with 0 or 1 whether a row has "
                "this label",
                "name columns of 0 and 1, or one column of labels",
            )
    read = _of_marks([*zip(*marks.values(), strict=True)], [*marks])
    return _of_one(Labels(replace(read.classes, numbers=()), read.ids))


def holds_marks(cells: Sequence[Any]) -> bool:
    """Tell whether all cells are 0 or 1."""
    return all(isinstance(cell, bool | int | float) and cell in (0, 1) for cell in cells)


def columns_of_marks(kinds: Mapping[str, str], table: Table) -> list[str]:
    """Columns that may each say with 0 or 1 whether a row has a label."""
    numeric = [name for name, kind in kinds.items() if "int" in kind or kind in ("bool", "float64")]
    return [name for name in numeric if holds_marks(table.rows[name][:])]
