"""How patterns of recipes match names: as they stand, with `*` wildcards, or as `re:EXPRESSION`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from re import _parser as sre_parse  # type: ignore[attr-defined]
from typing import Any

from tcompress.errors import PlanError

_LONGEST = 60  # characters of a layer's name, about
_MOST_WAYS = 2e7  # four times `.*`, for example


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Match a layer's names with a name, `*` wildcards, `re:...` or an end of a name."""
    if pattern.startswith("re:"):
        expression = _compiled(pattern)
        return any(expression.search(name) for name in names)
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for name in names)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    hint = "such as `re:layer\\.[0-3]\\.`; `*` wildcards need no `re:`, as in `*.layer.0.*`"
    try:
        ways = _ways(sre_parse.parse(pattern[3:]))
        expression = re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as error:
        raise PlanError(f"`{pattern}` is not a regular expression: {error}", hint) from error
    if ways > _MOST_WAYS:
        raise PlanError(
            f"`{pattern}` could take for ever, since it repeats what repeats, or repeats too often",
            hint,
        )
    return expression


def _ways(parts: Iterable[Any]) -> float:
    """Bound the number of ways to match a name: backtracking tries all of them."""
    total, unbounded = 1.0, 0
    for kind, content in parts:
        inside = sum(map(_ways, _parts_in(content))) or 1.0
        if "REPEAT" in str(kind):
            low, high = (min(int(count), _LONGEST) for count in content[:2])
            span = high - low + 1.0
            if high == _LONGEST:  # repeats one after another share the characters of a name
                unbounded += 1
                span = (_LONGEST + unbounded) / unbounded
            inside = span * min(inside, 10.0) ** high
        total *= inside
        if total > _MOST_WAYS:
            return math.inf
    return total


def _parts_in(content: Any) -> Iterator[Any]:
    """Yield the expressions in a part of one: of a group one, of a choice several."""
    if isinstance(content, sre_parse.SubPattern):
        yield content
    elif isinstance(content, tuple | list):
        for item in content:
            yield from _parts_in(item)
