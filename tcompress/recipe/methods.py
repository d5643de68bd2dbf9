"""Methods by name: the options of every structure, and `auto`, which offers several."""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from tcompress.structures import Spec, Structure, structures
from tcompress.structures.capabilities import LooksUp

AUTO = "auto"
AUTO_ABOUT = (
    "For every layer the structure and size that save most predicted loss per parameter, under "
    "one budget; one structure for all, where mixing is not predicted to lose clearly less."
)


def names_of(item: Structure[Any, Any]) -> tuple[str, ...]:
    """Returns the names that select a structure, its usual one first."""
    names: tuple[str, ...] = item.spec.model_fields["name"].annotation.__args__
    return names


def structure_names() -> tuple[str, ...]:
    """Returns the names that select one structure for all layers."""
    return tuple(name for item in structures() for name in names_of(item))


def lookup_methods() -> tuple[str, ...]:
    """Returns the names of the methods that a table of embeddings may be stored with."""
    able = (item for item in structures() if isinstance(item, LooksUp))
    return tuple(name for item in able for name in names_of(item))


def method_names() -> tuple[str, ...]:
    """Returns the names that select a method."""
    return (*structure_names(), AUTO)


if TYPE_CHECKING:
    StructureName = str
else:
    StructureName = Literal[structure_names()]


class AutoSpec(Spec):
    """Options of `auto`: every layer gets the structure that its budget does most with."""

    name: Literal["auto"] = "auto"
    offer: tuple[StructureName, ...] = Field(
        (), description="structures to choose among; default those that are usually worthwhile"
    )
    trials: bool = Field(
        True,
        description="whether the mixture that is predicted best and every structure on its own are "
        "converted, and the one that changes the output least is kept; predictions alone take less "
        "time",
    )

    @property
    def has_size(self) -> bool:
        return False


if TYPE_CHECKING:
    MethodSpec = Any
    TableMethod = Any
    AnyMethod = Any
    MethodName = str
else:
    # Options of one structure; `name` selects it.
    MethodSpec = Annotated[
        reduce(operator.or_, (item.spec for item in structures())), Field(discriminator="name")
    ]
    # The same of those that can look words up.
    TableMethod = Annotated[
        reduce(operator.or_, (item.spec for item in structures() if isinstance(item, LooksUp))),
        Field(discriminator="name"),
    ]
    AnyMethod = Annotated[
        reduce(operator.or_, (*(item.spec for item in structures()), AutoSpec)),
        Field(discriminator="name"),
    ]
    MethodName = Literal[method_names()]


def structure_of(spec: Spec) -> Structure[Any, Any]:
    """Returns the structure that a method's options belong to."""
    return next(item for item in structures() if isinstance(spec, item.spec))


def offered_by(spec: AutoSpec, target: float) -> dict[str, tuple[Spec, ...]]:
    """Lists what `auto` chooses among.

    Args:
        spec: Its options.
        target: About which kept fraction the budget comes to.

    Returns:
        By the name of each its options in the order of preference: a layer takes the first that
        its dimensions allow.
    """
    names = spec.offer or tuple(names_of(item)[0] for item in structures() if item.in_auto)
    found: dict[str, tuple[Spec, ...]] = {}
    for name in dict.fromkeys(names):
        kind = next(item for item in structures() if name in names_of(item))
        found[name] = kind.spec(name=name).offered(target)
    return found


def alone_of(spec: AutoSpec, target: float) -> dict[str, tuple[Spec, ...]]:
    """Lists methods that are worth trying on their own beside `auto`, as each would be used.

    Those that it has on offer; where nothing was said of these, one of every structure.

    Args:
        spec: Its options.
        target: About which kept fraction the budget comes to.

    Returns:
        By the name of each its options in the order of preference: the first that the dimensions
        of all layers allow is meant.
    """
    names = spec.offer or tuple(names_of(item)[0] for item in structures())
    found: dict[str, tuple[Spec, ...]] = {}
    for name in dict.fromkeys(names):
        kind = next(item for item in structures() if name in names_of(item))
        found[name] = kind.spec(name=name).alone(target)
    return found


def default_method(only_blocks: bool) -> str | None:
    """Returns the method of a conversion that names none.

    Args:
        only_blocks: Whether blocks are dropped, and nothing is said of layers.
    """
    return None if only_blocks else "lprod"
