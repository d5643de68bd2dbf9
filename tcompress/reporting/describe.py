"""Short texts that say how a layer is stored."""

from __future__ import annotations

from collections.abc import Sequence

from tcompress.structures.base import Layout
from tcompress.structures.linear import PartLayout
from tcompress.structures.lowrank import LowRankLayout
from tcompress.structures.lprod import LprodLayout


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


def describe_layout(layout: Layout) -> str:
    """Describes one term, such as `lprod p=4 fitted b=32x2`: block size and number of stages."""
    if isinstance(layout, LprodLayout):
        return _describe_lprod(layout)
    if isinstance(layout, LowRankLayout):
        return f"lowrank r={layout.rank}"
    options = layout.model_dump(
        exclude={"structure", "in_features", "out_features"}, exclude_defaults=True
    )
    options.pop("structure", None)
    return " ".join([layout.structure, *(f"{name}={value}" for name, value in options.items())])


def _describe_lprod(layout: LprodLayout) -> str:
    words = ["lprod", f"p={layout.p}", layout.transform]
    if layout.transform == "fitted":
        words.append(f"b={layout.block_in or layout.block_out}x{layout.stages}")
    if layout.tubal_rank is not None:
        words.append(f"r={layout.tubal_rank}")
    return " ".join(words)
