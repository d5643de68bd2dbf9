"""Short names of conversions, for folders and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tcompress.options.convert import Convert

_LETTERS = {"p": "p", "tubal_rank": "k", "order": "o", "cores": "c", "rank": "r"}
_NAMED = {*_LETTERS, "name", "share", "tol", "offer"}  # named in other ways
_MECHANISM_LETTERS = {
    "filter_order": "k",
    "grid": "",
    "fold": "f",
    "kernel": "",
    "core": "",
    "length": "t",
}


def short_name(convert: Convert) -> str:
    """Names a conversion shortly, such as `lprod-p4` or `svd-25`."""
    method: Any = convert.method
    words = _attention_words(convert)
    words += [] if method is None else [str(method.name)]
    if method is not None and method.pools:
        words.append(method.share)
    for field, letter in _LETTERS.items():
        value = getattr(method, field, None)
        if value is not None:
            words.append(
                letter + "x".join(map(str, value if isinstance(value, tuple) else [value]))
            )
    words += _other_options(method)
    if convert.residual_rank:
        words.append(f"plus{convert.residual_rank}")
    if getattr(method, "offer", ()):
        words += method.offer
    if convert.target is not None:
        words.append(f"{100 * convert.target:g}")
    for value in (convert.target_params, convert.target_bytes):
        words += [] if value is None else [str(value)]
    for letters, error in (("err", convert.max_error), ("tol", getattr(method, "tol", None))):
        words += [] if error is None else [f"{letters}{error:g}"]
    named = (("keep", convert.keep_layers), ("drop", convert.drop_layers))
    for verb, blocks in (*named, ("append", convert.append_layers)):
        if blocks is not None:
            words.append(f"{verb}{_number_of(blocks)}")
    if convert.embeddings is not None:
        share = convert.embeddings.target
        words.append("words" + ("" if share is None else f"{100 * share:g}"))
    return "-".join(words)


def _other_options(method: Any) -> list[str]:
    """Names what differs from a method's defaults and has no letter, such as `dct` or `block8`."""
    words = []
    for field, info in type(method).model_fields.items() if method is not None else ():
        value = getattr(method, field)
        if field in _NAMED or value in (None, info.default):
            continue
        if isinstance(value, Mapping):
            words += [
                f"{field}{width}x" + "x".join(map(str, part)) for width, part in value.items()
            ]
        elif isinstance(value, str):
            words.append(value)
        elif isinstance(value, bool):
            words.append(field if value else f"no-{field}")
        else:
            words.append(f"{field}{value}")
    return words


def _attention_words(convert: Convert) -> list[str]:
    """Names the mechanism with what differs from its defaults, such as `hot-8x8` or `tsa-k3`."""
    spec: Any = convert.attention
    if spec is None:
        return []
    words = [str(spec.name)]
    for field, letter in _MECHANISM_LETTERS.items():
        value = getattr(spec, field, None)
        if value is not None and value != type(spec).model_fields[field].default:
            words.append(letter + ("x".join(map(str, value)) if field == "grid" else str(value)))
    if convert.attention_layers is not None:
        words.append(f"at{len(convert.attention_layers)}")
    return words


def _number_of(blocks: Any) -> int | str:
    """Counts the blocks that are named, in all stacks."""
    if isinstance(blocks, str):  # `auto`
        return blocks
    if isinstance(blocks, Mapping):
        return sum(int(_number_of(item)) for item in blocks.values())
    return blocks if isinstance(blocks, int) else len(blocks)
