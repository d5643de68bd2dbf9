"""The structures that methods' options select, and those that `auto` has on offer."""

from __future__ import annotations

from typing import Any

from tcompress.options.methods import AutoSpec, Spec
from tcompress.structures import Structure, structures


def names_of(item: Structure[Any, Any]) -> tuple[str, ...]:
    """Returns the names that select a structure, its usual one first."""
    return item.spec.names()


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
