"""How an attention cuts the features of its projections into heads, read from its code."""

from __future__ import annotations

import ast
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from tcompress.roles.projections import parsed

HEAD_WIDTHS = ("head_dim", "attention_head_size")
"""Fields of attentions with the width of a head, by which Transformers cuts features into heads."""


class HeadSplit(NamedTuple):
    """The way in which an attention cuts features into as many heads as there are."""

    width: str  # field of the attention with the width of a head
    counts: bool  # whether its forward pass also reads a number of heads


@cache
def head_split(attention: Any) -> HeadSplit | None:
    """Read how the forward pass of a class cuts features into heads.

    Only code such as `view(*shape, -1, self.head_dim)` tells the number of heads from what it
    reads. None where there is no such line, or no source.
    """
    nodes = [*ast.walk(parsed(attention.forward))]
    # What may be the sizes of a shape: arguments of calls, and tuples.
    shapes: list[list[ast.expr]] = [
        node.args if isinstance(node, ast.Call) else node.elts
        for node in nodes
        if isinstance(node, ast.Call | ast.Tuple | ast.List)
    ]
    fields: dict[ast.AST, str] = {
        node: node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    # After a size of -1 any number of heads is cut.
    widths = [
        width
        for sizes in shapes
        for size, width in pairwise(sizes)
        if fields.get(width) in HEAD_WIDTHS and ast.unparse(size) == "-1"
    ]
    if not widths:
        return None
    first = min(widths, key=lambda width: (width.lineno, width.col_offset))
    # Such as `self.num_heads` or `self.num_key_value_heads`.
    counts = any(name.startswith("num_") and name.endswith("heads") for name in fields.values())
    return HeadSplit(fields[first], counts)
