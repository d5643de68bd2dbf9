"""Short texts that say how a layer is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # plans in files are described without the seconds that importing torch takes
    from tcompress.mechanisms.base import MechanismLayout
    from tcompress.planning.entries import AttentionPlan, LayerPlan
    from tcompress.structures.base import Layout
    from tcompress.structures.linear import PartLayout

Stored = Mapping[str, Any]
"""An entry, part or layout as `config.json` holds it: without what has its default."""

_MECHANISM_WORDS = {
    "fold": "rows of ",
    "kernel": "",
    "filter_order": "order ",
    "core": "",
    "length": "up to ",
}


def _stored(item: Any) -> Stored:
    found: Stored = (
        item if isinstance(item, Mapping) else item.model_dump(mode="json", exclude_defaults=True)
    )
    return found


def describe_parts(parts: Sequence[PartLayout] | Sequence[Stored]) -> str:
    """Describes a layer, such as `lprod p=16 dct + lowrank r=77`.

    Parts of a fused projection are told apart where their layouts differ.
    """
    names: dict[str, list[str]] = {}
    for part in map(_stored, parts):
        text = " + ".join(describe_layout(term) for term in part["terms"])
        names.setdefault(text, []).append(part["name"])
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{', '.join(group)}: {text}" for text, group in names.items())


def describe_entry(entry: LayerPlan | Stored, method: str) -> str:
    """Describes a layer of a plan; `svd` and `lowrank` are one structure, named as asked for.

    Args:
        entry: The layer.
        method: What the conversion was asked for, as the plan says it, such as `svd + depth`.
    """
    words = method.split(" + ")
    if isinstance(entry, Mapping):
        kind, parts = entry["kind"], entry["parts"]
    else:
        kind, parts = entry.kind, entry.parts
    own = kind == "embedding" and not {"lowrank", "auto"} & {*words}
    text = describe_parts(parts)
    return text.replace("lowrank", "svd") if own or "svd" in words else text


def describe_layout(layout: Layout | Stored) -> str:
    """Describes one term, such as `lprod p=4 fitted b=32x2`: block size and number of stages."""
    options = _stored(layout)
    known = _KNOWN.get(options["structure"])
    if known is not None:
        return known(options)
    left_out = ("structure", "in_features", "out_features")
    rest = [f"{name}={value}" for name, value in options.items() if name not in left_out]
    return " ".join([options["structure"], *rest])


def describe_attention(entries: Sequence[AttentionPlan] | Sequence[Stored]) -> str:
    """Describes the mechanisms of a model, such as `kronecker 8x8 in 4 blocks`."""
    counts: dict[str, int] = {}
    for entry in map(_stored, entries):
        text = describe_mechanism(entry["layout"])
        counts[text] = counts.get(text, 0) + 1
    words = (f"{text} in {n} block{'s' if n > 1 else ''}" for text, n in counts.items())
    return "; ".join(words)


def describe_mechanism(layout: MechanismLayout | Stored) -> str:
    """Describes a mechanism, such as `kronecker 8x8` or `graph order 3`."""
    options = _stored(layout)
    words = [options["mechanism"]]
    if grid := options.get("grid"):
        words.append(_modes(grid))
    for field, text in _MECHANISM_WORDS.items():
        if field in options:
            words.append(f"{text}{options[field]}")
    return " ".join(words)


def _describe_lprod(layout: Stored) -> str:
    words = ["lprod", f"p={layout['p']}", layout["transform"]]
    if layout["transform"] == "fitted":
        block = layout.get("block_in") or layout.get("block_out", 0)
        words.append(f"b={block}x{layout.get('stages', 0)}")
    if layout.get("tubal_rank") is not None:
        words.append(f"r={layout['tubal_rank']}")
    return " ".join(words)


def _describe_lowrank(layout: Stored) -> str:
    return f"lowrank r={layout['rank']}"


def _describe_tt(layout: Stored) -> str:
    """Describes a tensor train, such as `tt 32x24 to 24x32 r=96`: modes and inner ranks."""
    ranks = [str(rank) for rank in layout["ranks"]]
    words = [f"r={ranks[0] if len(set(ranks)) == 1 else ','.join(ranks)}"]
    words += [layout["apply"]] if layout.get("apply", "auto") != "auto" else []
    return " ".join(["tt", _modes(layout["in_modes"]), "to", _modes(layout["out_modes"]), *words])


def _describe_tucker(layout: Stored) -> str:
    """Describes a Tucker form, such as `tucker r=45` or `tucker model 72 of 768x768 r=384`."""
    left, right = layout["ranks"]
    ranks = f"r={left}" if left == right else f"r={left},{right}"
    if layout.get("bank") is None:
        return f"tucker {ranks}"
    rows, columns = layout.get("block", (1, 1))
    return f"tucker {layout['share']} {layout.get('cores', 1)} of {rows}x{columns} {ranks}"


_KNOWN = {
    "lprod": _describe_lprod,
    "lowrank": _describe_lowrank,
    "tt": _describe_tt,
    "tucker": _describe_tucker,
}


def _modes(modes: Sequence[int]) -> str:
    """Writes `24x32`, and `2^10` for what repeats often."""
    runs = [(mode, len(list(same))) for mode, same in groupby(modes)]
    words = [[f"{mode}^{count}"] if count > 2 else [str(mode)] * count for mode, count in runs]
    return "x".join(word for run in words for word in run)
