"""Short names of conversions, for folders and tables."""

from __future__ import annotations

from typing import Any

from tcompress.recipe.schema import Convert


def short_name(convert: Convert) -> str:
    """Names a conversion shortly, such as `lprod-p4` or `svd-25`."""
    method: Any = convert.method
    words = [str(method.name)]
    for field, letter in (("p", "p"), ("tubal_rank", "k"), ("order", "o"), ("rank", "r")):
        value = getattr(method, field, None)
        if value is not None:
            words.append(
                letter + "x".join(map(str, value if isinstance(value, tuple) else [value]))
            )
    if transform := getattr(method, "transform", None):
        words.append(transform)
    if convert.residual_rank:
        words.append(f"plus{convert.residual_rank}")
    if convert.target is not None:
        words.append(f"{100 * convert.target:g}")
    return "-".join(words)
