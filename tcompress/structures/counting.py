"""Multiply-adds of structures, as torch counts them in a pass on the meta device."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tcompress.structures.base import structure
from tcompress.structures.capabilities import (
    LooksUp,
    decoded,
    encoded,
    shared_of,
    transform_of,
)
from tcompress.structures.terms import Layout, Shapes, Side


class Macs(NamedTuple):
    """Multiply-adds of one term in a pass.

    Attributes:
        encode: Of the transform of the input.
        apply: Of the term's own tensors, with what is done once in a pass.
        decode: Of the transform of the output.
    """

    encode: int
    apply: int
    decode: int


@lru_cache(maxsize=4096)
@torch.no_grad()  # with gradients a structure may take another way
def macs_of(layout: Layout, tokens: int) -> Macs:
    """Counts one term in a pass over so many tokens; building its transforms counts nothing."""
    x = torch.empty(tokens, layout.in_features, device="meta")
    into, out = (_operator(layout, side, x) for side in ("in", "out"))
    tensors = _own(layout)
    with FlopCounterMode(display=False) as counter:
        z = encoded(layout, x, into)
        encode = counter.get_total_flops()
        u = structure(layout.structure).apply(z, tensors, layout)
        apply = counter.get_total_flops() - encode
        decoded(layout, u, out)
        decode = counter.get_total_flops() - apply - encode
    return Macs(encode // 2, apply // 2, decode // 2)


@lru_cache(maxsize=1024)
@torch.no_grad()
def lookup_macs(layout: Layout) -> int:
    """Counts looking up one row of a term."""
    kind = structure(layout.structure)
    if not isinstance(kind, LooksUp):
        return 0
    index, tensors = torch.empty(1, dtype=torch.long, device="meta"), _own(layout)
    with FlopCounterMode(display=False) as counter:
        kind.rows(index, tensors, layout)
    return counter.get_total_flops() // 2


def _own(layout: Layout) -> dict[str, Tensor]:
    """Empty tensors of a term, those that it shares among them."""
    shared = shared_of(layout)
    own = structure(layout.structure).tensors(layout)
    return _empty({**own, **(shared.shapes if shared else {})})


def _empty(shapes: Shapes) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def _operator(layout: Layout, side: Side, like: Tensor) -> object:
    transform = transform_of(layout, side)
    return None if transform is None else transform.build(_empty(transform.shapes), like)
