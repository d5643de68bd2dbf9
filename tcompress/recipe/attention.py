"""What a recipe may say of attention: the options of one mechanism."""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tcompress.mechanisms import mechanism_named, mechanisms
from tcompress.mechanisms.base import spec_names


def mechanism_names() -> tuple[str, ...]:
    """Returns the names that select a mechanism."""
    return tuple(name for item in mechanisms() for name in spec_names(item.spec))


def _by_name(value: Any) -> Any:
    return mechanism_named(value).spec(name=value) if isinstance(value, str) else value


if TYPE_CHECKING:
    AttentionSpec = Any
else:
    # Options of one mechanism; `name` selects it.
    _Options = Annotated[
        reduce(operator.or_, (item.spec for item in mechanisms())), Field(discriminator="name")
    ]
    # A name alone stands for a mechanism with its usual options.
    AttentionSpec = Annotated[_Options | Literal[mechanism_names()], AfterValidator(_by_name)]
