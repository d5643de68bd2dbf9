"""Numbers out of columns that hold them as text, as decimals or in several types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

_DECIMAL = re.compile(r"[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+")
# Signs of thousands that can be nothing else.
_GROUPED = (
    (re.compile(r"[+-]?\d{1,3}(,\d{3})+\.\d+"), ",", "."),
    (re.compile(r"[+-]?\d{1,3}(\.\d{3})+,\d+"), ".", ","),
    (re.compile(r"[+-]?\d{1,3}([ \u00a0\u202f]\d{3})+(\.\d+)?"), " ", "."),
    (re.compile(r"[+-]?\d{1,3}([ \u00a0\u202f]\d{3})+,\d+"), " ", ","),
)
_WHOLE = re.compile(r"[+-]?\d+[.,]0*")  # with a decimal sign: `1` may be the name of a class


def number(cell: Any) -> float | None:
    """Read one cell as a number; None if it holds another thing."""
    if isinstance(cell, bool | int | float | Decimal):
        return float(cell) if cell == cell else None
    if not isinstance(cell, str):
        return None
    text = cell.strip().replace("\u2212", "-")
    if _DECIMAL.fullmatch(text):
        return float(text.replace(",", "."))
    for form, group, point in _GROUPED:
        if form.fullmatch(text):
            plain = re.sub(r"[ \u00a0\u202f]", "", text) if group == " " else text
            return float(plain.replace(group, "").replace(point, "."))
    return None


def has_doubtful_commas(cells: Sequence[Any]) -> bool:
    """Tell whether commas in numbers may be of thousands, or stand beside decimal points."""
    texts = [cell.strip() for cell in cells if isinstance(cell, str)]
    commas = [text for text in texts if "," in text and _DECIMAL.fullmatch(text)]
    points = any("." in text and number(text) is not None for text in texts)
    return bool(commas) and (points or all(map(_THOUSANDS.fullmatch, commas)))


def decimals(cells: Sequence[Any]) -> list[float | None] | None:
    """Read a column as numbers, and None where nothing is; None if other things are in it.

    Where a cell has signs of thousands and of decimals, all cells have these.
    """
    texts = [cell.strip() for cell in cells if isinstance(cell, str) and not is_missing(cell)]
    forms = _GROUPED[:2]
    signs = {(group, point) for form, group, point in forms if any(map(form.fullmatch, texts))}
    if signs:
        cells = _without_groups(cells, signs) or [""]
    elif has_doubtful_commas(cells):
        return None
    numbers = [number(cell) for cell in cells]
    filled = [value for value, cell in zip(numbers, cells, strict=True) if not is_missing(cell)]
    return None if not filled or None in filled else numbers


def _without_groups(cells: Sequence[Any], signs: set[tuple[str, str]]) -> list[Any] | None:
    """Write numbers without their signs of thousands; None if cells have others."""
    if len(signs) > 1:
        return None
    [(group, point)] = signs
    form = re.compile(rf"[+-]?(\d{{1,3}}(\{group}\d{{3}})+|\d+)(\{point}\d+)?")
    plain: list[Any] = []
    for cell in cells:
        if not isinstance(cell, str) or is_missing(cell):
            plain.append(cell)
        elif form.fullmatch(cell.strip()):
            plain.append(cell.strip().replace(group, "").replace(point, "."))
        else:
            return None
    return plain


def whole_numbers(cells: Sequence[Any]) -> list[int | None] | None:
    """Read a column as whole numbers if it has decimals that are, or numbers in several types."""
    texts = [cell for cell in cells if isinstance(cell, str) and cell.strip()]
    is_text = bool(texts) and len(texts) == sum(not is_missing(cell) for cell in cells)
    if is_text and not any(_WHOLE.fullmatch(text.strip()) for text in texts):
        return None  # names, `01` and `1` among them
    numbers = decimals(cells)
    if numbers is None or any(value is not None and value % 1 for value in numbers):
        return None
    return [None if value is None else int(value) for value in numbers]


def is_missing(cell: Any) -> bool:
    """Tell whether a cell holds nothing."""
    return cell is None or cell != cell or (isinstance(cell, str) and not cell.strip())
