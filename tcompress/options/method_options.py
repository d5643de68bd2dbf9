"""Methods and attention replacements by name, and the options of `auto`."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from tcompress.attention import ReplacementSpec, replacements
from tcompress.fields import FIT, Options, option
from tcompress.structures import Spec, structures
from tcompress.structures.base import LooksUp
from tcompress.structures.width import WidthSpec

AUTO = "auto"
AUTO_ABOUT = (
    "For every layer the structure and size that save most predicted loss per parameter, under "
    "one budget; one structure for all, where mixing is not predicted to lose clearly less."
)

STRUCTURES: tuple[type[Spec], ...] = tuple(item.spec for item in structures())
"""Options of every structure, in the order of the registry."""
REPLACEMENTS: tuple[type[ReplacementSpec], ...] = tuple(item.spec for item in replacements())
"""Options of every replacement, in the order of the registry."""
_LOOKUPS = tuple(item.spec for item in structures() if isinstance(item, LooksUp))


def _names(specs: Iterable[type[Options]]) -> tuple[str, ...]:
    return tuple(name for spec in specs for name in spec.names())


def lookup_methods() -> tuple[str, ...]:
    """List the names of the methods that a table of embeddings may be stored with."""
    return _names(_LOOKUPS)


def method_names() -> tuple[str, ...]:
    """List the names that select a method."""
    return (*_names(STRUCTURES), AUTO)


def replacement_names() -> tuple[str, ...]:
    """List the names that select a replacement."""
    return _names(REPLACEMENTS)


if TYPE_CHECKING:
    StructureName = str
else:
    StructureName = Literal[_names(STRUCTURES)]


class AutoSpec(Spec):
    """Options of `auto`: every layer gets the structure that its budget does most with."""

    name: Literal["auto"] = "auto"
    offer: tuple[StructureName, ...] = option(
        (),
        "structures to choose among; default those that are usually worthwhile",
        panel=FIT,
        metavar="NAME,...",
    )
    trials: bool = option(
        True,
        "whether structures are tried out too; the mixture that is predicted best and every "
        "structure on its own are converted, and the one that changes the output least is kept; "
        "predictions alone take less time",
        panel=FIT,
    )

    @property
    def has_size(self) -> bool:
        return False


METHODS: tuple[type[Spec], ...] = (*STRUCTURES, AutoSpec)
"""Options of every method."""
NARROWING = WidthSpec.names()[0]
"""The method that makes layers narrower and leaves them plain."""

if TYPE_CHECKING:
    MethodSpec = Any
    TableMethod = Any
    AnyMethod = Any
    AttentionSpec = Any
    MethodName = str
else:
    # Options of one structure, or replacement; `name` selects it.
    MethodSpec = Annotated[reduce(operator.or_, STRUCTURES), Field(discriminator="name")]
    # The same of those that can look words up.
    TableMethod = Annotated[reduce(operator.or_, _LOOKUPS), Field(discriminator="name")]
    AnyMethod = Annotated[reduce(operator.or_, METHODS), Field(discriminator="name")]
    MethodName = Literal[method_names()]
    AttentionSpec = Annotated[reduce(operator.or_, REPLACEMENTS), Field(discriminator="name")]
