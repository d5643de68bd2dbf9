"""What a conversion takes that nobody asked for, in words to be said before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tcompress.options.convert_options import Convert
from tcompress.options.method_options import AnyMethod
from tcompress.options.read import Given

_PAGE = "docs/methods.md"


def unasked(settings: Convert, said: dict[str, Any], typed: Given[Any]) -> Iterator[str]:
    """Says which method was taken where none was named, and what its defaults are.

    `said` is what was typed, as a recipe would hold it. Options of a method name it too.
    """
    method = settings.method
    if method is None:
        return
    named = said.get("method") or settings.attention or method.narrows  # by its options
    if not named:
        yield _taken(settings, method, typed)
    if method.name == "lprod" and _is_fitted(settings, method):
        yield (
            "lprod: the transform is fitted to the data, which keeps a little more than 1/p; the "
            f"layer of the paper is {typed.ask('dct', 'method', 'transform')}"
        )


def _taken(settings: Convert, method: AnyMethod, typed: Given[Any]) -> str:
    taken = typed.ask(method.name, "method")
    if settings.budget is not None or method.name != "lprod":
        return f"No method is named: taking {taken}, as fits what is asked for; see {_PAGE}"
    quick = f"{typed.ask('svd', 'method')} {typed.ask('0.5', 'target')}".replace("` `", " ")
    fewer = typed.ask("2", "drop_layers")
    return (
        f"No method or size is named: taking {taken} with p = {getattr(method, 'p', '')}, which "
        f"takes minutes; quicker are {quick} and {fewer}; see {_PAGE}"
    )


def _is_fitted(settings: Convert, method: AnyMethod) -> bool:
    chosen = getattr(method, "transform", None)
    return chosen is None and not settings.calibration.is_none and settings.init != "random"
