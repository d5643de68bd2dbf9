"""Multiply-adds of a structure, counted on the meta device."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tcompress.structures.base import (
    SIDES,
    Layout,
    LooksUp,
    Shapes,
    decoded,
    encoded,
    shared_shapes,
    structure,
    transform_of,
)


class Macs(NamedTuple):
    """Multiply-adds of one term in a pass, as torch counts them on the meta device."""

    encode: int  # of the transform of the input
    apply: int  # of the term's own tensors, with what is done once in a pass
    decode: int  # of the transform of the output


@lru_cache(maxsize=4096)
def macs_of(layout: Layout, tokens: int) -> Macs:
    """Counts one term in a pass over so many tokens; building its transforms counts nothing."""
    x = torch.empty(tokens, layout.in_features, device="meta")
    transforms = (transform_of(layout, side) for side in SIDES)
    into, out = (None if t is None else t.build(_empty(t.shapes), x) for t in transforms)
    tensors = _all_tensors(layout)
    # With gradients a structure may take another way.
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        z = encoded(layout, x, into)
        encode = counter.get_total_flops()
        u = structure(layout.structure).apply(z, tensors, layout)
        apply = counter.get_total_flops() - encode
        decoded(layout, u, out)
        decode = counter.get_total_flops() - apply - encode
    return Macs(encode // 2, apply // 2, decode // 2)


@lru_cache(maxsize=1024)
def lookup_macs(layout: Layout) -> int:
    """Counts looking up one row of a term."""
    kind = structure(layout.structure)
    if not isinstance(kind, LooksUp):
        return 0
    index = torch.empty(1, dtype=torch.long, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        kind.rows(index, _all_tensors(layout), layout)
    return counter.get_total_flops() // 2


def _all_tensors(layout: Layout) -> dict[str, Tensor]:
    """Empty tensors of a term, those that it shares among them."""
    return _empty({**structure(layout.structure).tensors(layout), **shared_shapes(layout)})


def _empty(shapes: Shapes) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
