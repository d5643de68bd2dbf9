"""Which rows of a test run by default; the others wait for the full grid."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def tiered(rows: Iterable[Any], often: Callable[[Any], bool]) -> list[Any]:
    """All rows as parameters of a test, those that are not run often marked for the grid."""
    return [row if often(row) else _rare(row) for row in rows]


def _rare(row: Any) -> Any:
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.grid)
