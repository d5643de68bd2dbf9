"""Graph attention: tokens are nodes, keys span the edges, and a graph filter mixes the values."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from tcompress.attention.replacement import (
    AttentionReplacement,
    BaseAttention,
    ReplacementLayout,
    ReplacementSpec,
    register,
    repeat_heads,
    take_tokens,
)
from tcompress.fields import option
from tcompress.structures.base import Refusal, Shapes, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor

    from tcompress.attention.visibility import Visible

SCRATCH_DECAY = 0.9
"""First decay of models from scratch; the papers have a constant less than 1 without its value."""
CONVERTED_DECAY = 0.05
"""First decay of trained weights: their keys are long, and sums over neighbours are no averages, so
that edges that reach far would drown each token's own values (docs/attention.md)."""


class GraphSpec(ReplacementSpec):
    """Options of `tga` and `tsa`."""

    structure = "tt"
    only = ("re:^(k|v|qkv)$",)

    name: Literal["tga", "tsa"] = "tga"
    filter_order: int = option(
        2, "terms of the graph filter; powers 0 to this less one", ge=2, le=16
    )
    decay: float | None = option(
        None,
        "what a step of distance multiplies edges by; at first; default "
        f"{SCRATCH_DECAY} from scratch and {CONVERTED_DECAY} in converted models",
        gt=0,
        lt=1,
    )

    @model_validator(mode="after")
    def _check_order(self) -> GraphSpec:
        if self.name == "tga" and self.filter_order != 2:
            raise ValueError("`tga` has a filter of order 2; `tsa` takes `filter_order`")
        return self


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
    healing = "graph attention has no queries, so a converted model has to be healed"
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

    def start(self, layout: GraphLayout, generator: Generator, *, pretrained: bool) -> Tensors:
        import torch

        decay = layout.decay or (CONVERTED_DECAY if pretrained else SCRATCH_DECAY)
        values = {"decay": torch.full((layout.heads,), log(decay / (1 - decay)))}
        if layout.weighted:
            values["coefficients"] = torch.ones(layout.filter_order, layout.heads)
        return values

    def apply(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Tensors,
        layout: GraphLayout,
        visible: Visible,
    ) -> tuple[Tensor, None]:
        from tcompress.attention import visibility

        k, v = repeat_heads(k, layout.heads), repeat_heads(v, layout.heads)
        keys, order = k.shape[-2], layout.filter_order
        rows = _rows(q.shape[-2], keys, visible, k.device)
        ones = v.new_ones(order, layout.heads)
        coefficients = tensors.get("coefficients", ones)[:, None, :, None, None]
        of_queries = v if rows is None else take_tokens(v, rows)
        if rows is None or order == 2:
            psi = edges(k, tensors["decay"], layout, visible, rows)
            return horner(psi, v, coefficients, of_queries), None
        # Powers of the graph need the edges of tokens that were there before.
        tokens = visible.tokens
        pairs = visibility.past(keys, keys, k.device)[None, None]
        all_edges = visibility.Visible(pairs if tokens is None else pairs & tokens[:, None, None])
        psi = edges(k, tensors["decay"], layout, all_edges, None)
        return take_tokens(horner(psi, v, coefficients, v), rows), None


def horner(psi: Tensor, v: Tensor, coefficients: Tensor, of_queries: Tensor) -> Tensor:
    """Apply sum_k c_k psi^k to values, some `of_queries`, by Horner's rule."""
    y = coefficients[-1] * v
    for coefficient in coefficients[:-1].flip(0):
        y = coefficient * of_queries + psi @ y
    return y


def edges(
    k: Tensor, decay: Tensor, layout: GraphLayout, visible: Visible, rows: Tensor | None
) -> Tensor:
    """Weigh the edges: omega * relu(K K^T / sqrt(d)), without loops from a node to itself.

    `decay` is the logit of what a step of distance multiplies by; `rows` are the queries' places.
    """
    import torch
    from torch.nn.functional import logsigmoid

    of_queries = k if rows is None else take_tokens(k, rows)
    scaled = of_queries * layout.head_dim**-0.5  # large keys may leave half precision
    theta = (scaled @ k.mT).relu()
    columns = torch.arange(k.shape[-2], device=k.device)
    places = columns[None] if rows is None else rows
    steps = (places[..., None] - columns)[:, None]  # (batch | 1, 1, queries, keys)
    allowed = steps > 0 if layout.causal else steps != 0
    if visible.pairs is not None:
        allowed = allowed & visible.pairs
    omega = (steps.abs() * logsigmoid(decay)[:, None, None]).exp()
    omega = omega if layout.causal else omega / 2
    return (omega * theta).masked_fill(~allowed, 0)


def _rows(queries: int, keys: int, visible: Visible, device: torch.device) -> Tensor | None:
    """Find the queries' tokens among the keys, where there is a cache.  # (batch | 1, queries)."""
    import torch

    if queries == keys:
        return None
    places = torch.arange(keys, device=device)
    if visible.pairs is None:
        return places[None, -queries:]
    return (visible.pairs[:, 0] * places).amax(-1)  # a causal row ends with its own token


register(Graph())
