"""How an attention cuts the features of its projections into heads, read from its code."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, TypeGuard

from tcompress.roles.projections import parsed

HEAD_WIDTHS = ("head_dim", "attention_head_size")
"""Fields of attentions with the width of a head, by which Transformers cuts features into heads."""


@dataclass(frozen=True)
class HeadSplit:
    """The way in which an attention cuts features into as many heads as there are."""

    width: str  # field of the attention with the width of a head
    counts: bool  # whether its forward pass also reads a number of heads


@cache
def head_split(attention: Any) -> HeadSplit | None:
    """Read how the forward pass of a class cuts features into heads.

    Only code such as `view(*shape, -1, self.head_dim)` tells the number of heads from what it
    reads. None where there is no such line, or no source.
    """
    tree = parsed(attention.forward)
    widths = [field for items in _sequences(tree) for field in _open_splits(items)]
    if not widths:
        return None
    first = min(widths, key=lambda field: (field.lineno, field.col_offset))
    return HeadSplit(first.attr, any(map(_is_count, ast.walk(tree))))


def _sequences(tree: ast.AST) -> Iterator[Sequence[ast.expr]]:
    """Yield what may be the sizes of a shape: arguments of calls, and tuples."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.args
        elif isinstance(node, ast.Tuple | ast.List):
            yield node.elts


def _open_splits(items: Sequence[ast.expr]) -> Iterator[ast.Attribute]:
    """Yield the width of a head where any number of them is cut: after a size of -1."""
    for size, width in pairwise(items):
        if _is_field(width) and width.attr in HEAD_WIDTHS and ast.unparse(size) == "-1":
            yield width


def _is_count(node: ast.AST) -> bool:
    """Tell a field such as `self.num_heads` or `self.num_key_value_heads`."""
    return _is_field(node) and node.attr.startswith("num_") and node.attr.endswith("heads")


def _is_field(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
