"""What a recipe may say of attention: the options of one mechanism."""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from tcompress.mechanisms import mechanisms
from tcompress.mechanisms.base import spec_names


def mechanism_names() -> tuple[str, ...]:
    """Returns the names that select a mechanism."""
    return tuple(name for item in mechanisms() for name in spec_names(item.spec))


if TYPE_CHECKING:
    AttentionSpec = Any
else:
    # Options of one mechanism; `name` selects it.
    AttentionSpec = Annotated[
        reduce(operator.or_, (item.spec for item in mechanisms())), Field(discriminator="name")
    ]
