"""Additive attention: a query and a key meet in a small network instead of a product.

The baseline of TGA and TSA (`ADA` there).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tcompress.attention.replacement import (
    AttentionReplacement,
    ReplacementLayout,
    ReplacementSpec,
    register,
    repeat_heads,
)
from tcompress.structures.base import Shapes, Tensors

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from tcompress.attention.visibility import Visible

_MOST = 2**24  # numbers inside the network at once, where no gradient needs them all


class AdditiveSpec(ReplacementSpec):
    """Options of `additive`."""

    name: Literal["additive"] = "additive"


class AdditiveLayout(ReplacementLayout):
    """One vector of weights per head."""

    mechanism: Literal["additive"] = "additive"


class Additive(AttentionReplacement[AdditiveSpec, AdditiveLayout]):
    """Softmax of w^T tanh(q + k), with a vector w per head."""

    name = "additive"
    summary = "softmax of a small network of query and key; a baseline, to be trained"
    healing = "additive attention takes queries and keys in another way: the model has to be healed"
    reference = "Bahdanau, Cho and Bengio 2015, arXiv:1409.0473"
    spec = AdditiveSpec
    layout_type = AdditiveLayout
    causal = True
    windows = True
    pairwise = True

    def tensors(self, layout: AdditiveLayout) -> Shapes:
        return {"score_weight": (layout.heads, layout.head_dim)}

    def start(self, layout: AdditiveLayout, generator: Generator, *, pretrained: bool) -> Tensors:
        import torch

        bound = (3 / layout.head_dim) ** 0.5  # as Keras does, which the papers used
        weight = torch.empty(layout.heads, layout.head_dim)
        return {"score_weight": weight.uniform_(-bound, bound, generator=generator)}

    def apply(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Tensors,
        layout: AdditiveLayout,
        visible: Visible,
    ) -> tuple[Tensor, Tensor]:
        import torch

        k, v = repeat_heads(k, layout.heads), repeat_heads(v, layout.heads)
        column = tensors["score_weight"][:, None, :, None]  # (heads, 1, width, 1)
        rows = max(1, _MOST // max(1, k.numel()))
        pieces = q.split(rows, 2) if rows < q.shape[2] else (q,)
        parts = [
            ((piece[..., None, :] + k[:, :, None]).tanh() @ column)[..., 0] for piece in pieces
        ]
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, 2)  # (batch, heads, q, k)
        if visible.pairs is not None:
            scores = scores.masked_fill(~visible.pairs, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        return weights @ v, weights


register(Additive())
