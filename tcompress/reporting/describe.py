"""Short texts that say how a layer is stored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tcompress.mechanisms.base import MechanismLayout
from tcompress.planning.entries import AttentionPlan, LayerPlan
from tcompress.structures.base import Layout
from tcompress.structures.linear import PartLayout
from tcompress.structures.lowrank import LowRankLayout
from tcompress.structures.lprod import LprodLayout
from tcompress.structures.tt import TTLayout
from tcompress.structures.tucker import TuckerLayout

_MECHANISM_WORDS = {
    "fold": "rows of ",
    "kernel": "",
    "filter_order": "order ",
    "core": "",
    "length": "up to ",
}


def describe_parts(parts: Sequence[PartLayout]) -> str:
    """Describes a layer, such as `lprod p=16 dct + lowrank r=77`.

    Parts of a fused projection are told apart where their layouts differ.
    """
    names: dict[str, list[str]] = {}
    for part in parts:
        text = " + ".join(describe_layout(term) for term in part.terms)
        names.setdefault(text, []).append(part.name)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{', '.join(group)}: {text}" for text, group in names.items())


def describe_entry(entry: LayerPlan, method: str) -> str:
    """Describes a layer of a plan; `svd` and `lowrank` are one structure, named as asked for.

    Args:
        entry: The layer.
        method: What the conversion was asked for, as the plan says it, such as `svd + depth`.
    """
    words = method.split(" + ")
    own = entry.kind == "embedding" and not {"lowrank", "auto"} & {*words}
    text = describe_parts(entry.parts)
    return text.replace("lowrank", "svd") if own or "svd" in words else text


def describe_layout(layout: Layout) -> str:
    """Describes one term, such as `lprod p=4 fitted b=32x2`: block size and number of stages."""
    if isinstance(layout, LprodLayout):
        return _describe_lprod(layout)
    if isinstance(layout, LowRankLayout):
        return f"lowrank r={layout.rank}"
    if isinstance(layout, TTLayout):
        return _describe_tt(layout)
    if isinstance(layout, TuckerLayout):
        return _describe_tucker(layout)
    options = layout.model_dump(
        exclude={"structure", "in_features", "out_features"}, exclude_defaults=True
    )
    options.pop("structure", None)
    return " ".join([layout.structure, *(f"{name}={value}" for name, value in options.items())])


def describe_attention(entries: Sequence[AttentionPlan]) -> str:
    """Describes the mechanisms of a model, such as `kronecker 8x8 in 4 blocks`."""
    counts: dict[str, int] = {}
    for entry in entries:
        text = describe_mechanism(entry.layout)
        counts[text] = counts.get(text, 0) + 1
    words = (f"{text} in {n} block{'s' if n > 1 else ''}" for text, n in counts.items())
    return "; ".join(words)


def describe_mechanism(layout: MechanismLayout) -> str:
    """Describes a mechanism, such as `kronecker 8x8` or `graph order 3`."""
    words = [layout.mechanism]
    options = layout.model_dump(exclude_defaults=True)
    if grid := options.get("grid"):
        words.append(_modes(grid))
    for field, text in _MECHANISM_WORDS.items():
        if field in options:
            words.append(f"{text}{options[field]}")
    return " ".join(words)


def _describe_lprod(layout: LprodLayout) -> str:
    words = ["lprod", f"p={layout.p}", layout.transform]
    if layout.transform == "fitted":
        words.append(f"b={layout.block_in or layout.block_out}x{layout.stages}")
    if layout.tubal_rank is not None:
        words.append(f"r={layout.tubal_rank}")
    return " ".join(words)


def _describe_tt(layout: TTLayout) -> str:
    """Describes a tensor train, such as `tt 32x24 to 24x32 r=96`: modes and inner ranks."""
    ranks = [str(rank) for rank in layout.ranks]
    words = [f"r={ranks[0] if len(set(ranks)) == 1 else ','.join(ranks)}"]
    words += [] if layout.apply == "auto" else [layout.apply]
    return " ".join(["tt", _modes(layout.in_modes), "to", _modes(layout.out_modes), *words])


def _describe_tucker(layout: TuckerLayout) -> str:
    """Describes a Tucker form, such as `tucker r=45` or `tucker model 72 of 768x768 r=384`."""
    left, right = layout.ranks
    ranks = f"r={left}" if left == right else f"r={left},{right}"
    if layout.bank is None:
        return f"tucker {ranks}"
    rows, columns = layout.block
    return f"tucker {layout.share} {layout.cores} of {rows}x{columns} {ranks}"


def _modes(modes: Sequence[int]) -> str:
    """Writes `24x32`, and `2^10` for what repeats often."""
    runs = [(mode, len(list(same))) for mode, same in groupby(modes)]
    words = [[f"{mode}^{count}"] if count > 2 else [str(mode)] * count for mode, count in runs]
    return "x".join(word for run in words for word in run)
