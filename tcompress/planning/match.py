"""Patterns that select layers by name or role."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from tcompress.errors import PlanError


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Tells whether a pattern selects any of a layer's names.

    Args:
        pattern: A name, a name with `*` wildcards, `re:` and a regular expression (searched), or
            the last components of a name, such as `output.dense`.
        names: Names of one layer: in the checkpoint, in the model, its role.

    Raises:
        PlanError: The regular expression is invalid.
    """
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise PlanError(f"`{pattern}` is not a regular expression: {error}") from error
        return any(expression.search(name) for name in names)
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for name in names)


def nearest(pattern: str, names: Iterable[str]) -> str | None:
    """Returns a hint that names the closest known name, if one is close."""
    # Patterns mostly name the end of a path, such as `output.dense`.
    ends = {".".join(name.split(".")[-size:]) for name in names for size in (1, 2, 3)}
    close = difflib.get_close_matches(pattern, sorted(ends), 1, 0.5)
    return f"did you mean `{close[0]}`?" if close else None
