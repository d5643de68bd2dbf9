"""Block-term attention of the Tensorized Transformer: a tensor of queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from tcompress.attention.replacement import (
    AttentionReplacement,
    BaseAttention,
    ReplacementLayout,
    ReplacementSpec,
    register,
    repeat_heads,
)
from tcompress.errors import DataError
from tcompress.fields import option
from tcompress.structures.base import Refusal, Shapes, Tensors

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from tcompress.attention.visibility import Visible


class MultilinearSpec(ReplacementSpec):
    """Options of `multilinear`."""

    name: Literal["multilinear"] = "multilinear"
    length: int | None = option(
        None, "number of tokens; read from the config of image models", gt=1
    )


class MultilinearLayout(ReplacementLayout):
    """One diagonal core per head, and a projection of all pairs of so many tokens."""

    mechanism: Literal["multilinear"] = "multilinear"
    length: int = Field(gt=1)


class Multilinear(AttentionReplacement[MultilinearSpec, MultilinearLayout]):
    """A three-way tensor of tokens, averaged over heads, whose slices are projected back."""

    name = "multilinear"
    summary = "three-way tensor of queries, keys and values; fixed length, starts at random"
    healing = (
        "multilinear attention takes nothing from the model's own: its output projection starts at "
        "random, so the model has to be trained"
    )
    reference = "Ma et al. 2019, A Tensorized Transformer for Language Modeling"
    spec = MultilinearSpec
    layout_type = MultilinearLayout

    def arrange(self, spec: MultilinearSpec, base: BaseAttention) -> dict[str, Any]:
        length = spec.length or base.tokens
        if length is None:
            raise Refusal("inputs differ in length, and its size is tied to one: give `length`")
        if base.tokens is not None and length != base.tokens:
            raise Refusal(f"`length` is {length}, and inputs have {base.tokens} tokens")
        if base.longest is not None and length > base.longest:
            raise Refusal(f"`length` is {length}, and the model takes {base.longest} at most")
        return {"length": length}

    def tensors(self, layout: MultilinearLayout) -> Shapes:
        heads, width = layout.heads, layout.head_dim
        return {"core": (heads, width), "out": (layout.length**2, heads * width)}

    def ordered(self, layout: MultilinearLayout) -> bool:
        return True

    def longest(self, layout: MultilinearLayout) -> int | None:
        return layout.length

    def start(
        self, layout: MultilinearLayout, generator: Generator, *, pretrained: bool
    ) -> Tensors:
        import torch

        shapes = self.tensors(layout)
        size = shapes["core"]
        core = torch.zeros(size) if pretrained else torch.rand(size, generator=generator)
        spread = (layout.heads * layout.head_dim) ** 0.5 / layout.length
        out = torch.randn(shapes["out"], generator=generator) * spread
        return {"core": core.softmax(-1), "out": out}

    def apply(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Tensors,
        layout: MultilinearLayout,
        visible: Visible,
    ) -> tuple[Tensor, None]:
        tokens, length = q.shape[2], layout.length
        if tokens > length or k.shape[2] != tokens:
            met = f"met {tokens} queries and {k.shape[2]} keys"
            hint = f"cut inputs to {length} tokens"
            raise DataError(f"multilinear attention over {length} tokens {met}", hint)
        k, v = repeat_heads(k, layout.heads), repeat_heads(v, layout.heads)
        valid = visible.tokens
        if valid is not None:
            q, k, v = (x * valid[:, None, :, None].to(x.dtype) for x in (q, k, v))
        weighed = (q * tensors["core"][:, None] / layout.heads).transpose(1, 2).flatten(2)
        # Tokens that are not there are zeros: their rows of `out` weigh nothing. Pairs meet `out`
        # before queries do, so that nothing of the size of (tokens, length, length) is made.
        out = tensors["out"].unflatten(0, (length, length))[:tokens, :tokens].flatten(0, 1)
        pairs = k.mT[..., None] * v.mT[..., None, :]  # (batch, heads, head_dim, tokens, tokens)
        mixed = pairs.flatten(3).flatten(1, 2) @ out  # (batch, heads x head_dim, ...)
        return (weighed @ mixed).unflatten(-1, (layout.heads, -1)).transpose(1, 2), None


register(Multilinear())
