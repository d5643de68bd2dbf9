"""Graph attention: tokens are nodes, keys span the edges, and a graph filter mixes the values."""

from __future__ import annotations

from math import log
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn.functional import logsigmoid

from tcompress.attention.replacement import (
    AttentionReplacement,
    BaseAttention,
    ReplacementLayout,
    Visible,
    past,
    register,
    repeat_heads,
    take_tokens,
)
from tcompress.options.method_options import CONVERTED_DECAY, SCRATCH_DECAY, GraphSpec
from tcompress.structures.base import Refusal, Shapes, Tensors


class GraphLayout(ReplacementLayout):
    """A filter of some order; without `weighted` all its coefficients are one."""

    mechanism: Literal["graph"] = "graph"
    filter_order: int = Field(2, ge=2)
    weighted: bool = False
    decay: float | None = None


class Graph(AttentionReplacement[GraphSpec, GraphLayout]):
    """A filter of the graph that keys span; there are no queries."""

    name = "graph"
    summary = "graph filter of values; edges from keys alone, queries are dropped"
    reference = (
        "Xu et al., Low-Complexity Attention Modelling via Graph Tensor Networks; "
        "A Tensorized Spectral Attention Mechanism for Efficient Natural Language Processing"
    )
    spec = GraphSpec
    layout_type = GraphLayout
    unused = ("q",)
    causal = True
    windows = True
    pairwise = True

    def arrange(self, spec: GraphSpec, base: BaseAttention) -> dict[str, Any]:
        if base.window is not None and spec.filter_order > 2:
            raise Refusal("a filter of order above 2 reaches beyond the window of this attention")
        weighted = spec.name == "tsa"
        return {"filter_order": spec.filter_order, "weighted": weighted, "decay": spec.decay}

    def tensors(self, layout: GraphLayout) -> Shapes:
        shapes: Shapes = {"decay": (layout.heads,)}
        if layout.weighted:
            shapes["coefficients"] = (layout.filter_order, layout.heads)
        return shapes

    def start(
        self, layout: GraphLayout, generator: Generator, *, pretrained: bool
    ) -> dict[str, Tensor]:
        decay = layout.decay or (CONVERTED_DECAY if pretrained else SCRATCH_DECAY)
        values = {"decay": torch.full((layout.heads,), log(decay / (1 - decay)))}
        if layout.weighted:
            values["coefficients"] = torch.ones(layout.filter_order, layout.heads)
        return values

    def note(self, layout: GraphLayout, longest: int | None, *, pretrained: bool) -> str | None:
        said = "graph attention has no queries, so a converted model has to be healed"
        return said if pretrained else None

    def apply(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors, layout: GraphLayout, seen: Visible
    ) -> Tensor:
        k, v = repeat_heads(k, layout.heads), repeat_heads(v, layout.heads)
        keys, order = k.shape[-2], layout.filter_order
        rows = _rows(q.shape[-2], keys, seen, k.device)
        ones = v.new_ones(order, layout.heads)
        coefficients = tensors.get("coefficients", ones)[:, None, :, None, None]
        own = v if rows is None else take_tokens(v, rows)
        if rows is None or order == 2:
            psi = edges(k, tensors["decay"], layout, seen, rows)
            return horner(psi, v, coefficients, own)
        # Powers of the graph need the edges of tokens that were there before.
        tokens = seen.tokens
        pairs = past(keys, keys, k.device)[None, None]
        whole = Visible(pairs if tokens is None else pairs & tokens[:, None, None])
        psi = edges(k, tensors["decay"], layout, whole, None)
        return take_tokens(horner(psi, v, coefficients, v), rows)


def horner(psi: Tensor, v: Tensor, coefficients: Tensor, own: Tensor) -> Tensor:
    """Applies sum_k c_k psi^k to values by Horner's rule; `own` are the values of the queries."""
    y = coefficients[-1] * v
    for coefficient in coefficients[:-1].flip(0):
        y = coefficient * own + psi @ y
    return y


def edges(
    k: Tensor, decay: Tensor, layout: GraphLayout, seen: Visible, rows: Tensor | None
) -> Tensor:
    """Weighs the edges: omega * relu(K K^T / sqrt(d)), without loops from a node to itself.

    `decay` is the logit of what a step of distance multiplies by; `rows` are the queries' places.
    """
    own = k if rows is None else take_tokens(k, rows)
    theta = ((own * layout.head_dim**-0.5) @ k.mT).relu()  # large keys may leave half precision
    columns = torch.arange(k.shape[-2], device=k.device)
    places = columns[None] if rows is None else rows
    steps = (places[..., None] - columns)[:, None]  # (batch | 1, 1, queries, keys)
    allowed = steps > 0 if layout.causal else steps != 0
    if seen.pairs is not None:
        allowed = allowed & seen.pairs
    omega = (steps.abs() * logsigmoid(decay)[:, None, None]).exp()
    omega = omega if layout.causal else omega / 2
    return (omega * theta).masked_fill(~allowed, 0)


def _rows(queries: int, keys: int, seen: Visible, device: torch.device) -> Tensor | None:
    """Finds the queries' tokens among the keys, where there is a cache.  # (batch | 1, queries)."""
    if queries == keys:
        return None
    places = torch.arange(keys, device=device)
    if seen.pairs is None:
        return places[None, -queries:]
    return (seen.pairs[:, 0] * places).amax(-1)  # a causal row ends with its own token


register(Graph())
