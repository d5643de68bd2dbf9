"""Word embeddings whose table is structured, and output heads that are tied to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tcompress.structures.base import LooksUp, structure
from tcompress.structures.modules.linear import PartLayout, StructuredLinear

_SCALED = "ScaledWordEmbedding"  # how all families of Transformers call one that does only this


@dataclass(frozen=True)
class LookupScale:
    """Factor that a base model multiplies the looked-up vectors by; an output head does not."""

    value: float = 1.0
    rounded: bool = False  # to the dtype of the vectors first, as Gemma's is

    @classmethod
    def of(cls, host: nn.Module) -> LookupScale | None:
        """Reads the factor of an embedding; None if it computes something else, or cannot tell."""
        if type(host) is nn.Embedding:
            return cls()
        if not isinstance(host, nn.Embedding) or not type(host).__name__.endswith(_SCALED):
            return None
        rounded = isinstance(getattr(host, "embed_scale", None), Tensor)
        # A buffer has no value on the meta device.
        scale: Any = getattr(host, "scalar_embed_scale" if rounded else "embed_scale", None)
        return cls(float(scale), rounded) if isinstance(scale, float | int) else None

    def __call__(self, vectors: Tensor) -> Tensor:
        if self.value == 1:
            return vectors
        factor = torch.tensor(self.value, dtype=vectors.dtype) if self.rounded else self.value
        return vectors * factor


class StructuredEmbedding(StructuredLinear):
    """A table of word vectors, stored as a structure.

    The table is the weight (words, width) of a layer from vectors to scores: that is how an output
    head which is tied to it applies it. Looking words up reads rows of it, of which only those
    asked for are built. `padding_idx` is there for base models that ask.
    """

    def __init__(
        self,
        parts: Sequence[PartLayout],
        *,
        padding_idx: int | None = None,
        scale: LookupScale | None = None,
        **options: Any,
    ) -> None:
        super().__init__(parts, **options)
        self.num_embeddings, self.embedding_dim = self.out_features, self.in_features
        self.padding_idx = padding_idx
        self.scale = scale or LookupScale()

    def forward(self, x: Tensor, scale: LookupScale | None = None) -> Tensor:
        """Looks words up, or scores vectors as a tied output head does."""
        if x.is_floating_point():
            return super().forward(x)
        scale = scale or self.scale
        weight = self.cached_weight()
        if weight is not None:
            return scale(functional.embedding(x, weight))
        found = []
        for term, layout in enumerate(self.parts[0].terms):
            kind = structure(layout.structure)
            assert isinstance(kind, LooksUp)  # no other is planned for a table
            found.append(kind.rows(x.flatten(), self._tensors(0, term), layout))
        rows = reduce(torch.add, found).to(self.stored_dtype)  # autocast may have lowered it
        return scale(rows.view(*x.shape, self.in_features))


class TiedTable(nn.Module):
    """An embedding or an output head that uses a structured embedding of the same model."""

    def __init__(self, owner: StructuredEmbedding, host: nn.Module) -> None:
        super().__init__()
        # A tuple keeps the owner out of the children: its tensors are stored once.
        self._owner = (owner,)
        self._scale = LookupScale.of(host)
        self.register_parameter("bias", getattr(host, "bias", None))

    @property
    def weight(self) -> Tensor:
        """An empty tensor, for models that read the dtype, the device or the number of words."""
        owner = self._owner[0]
        return owner.weight.new_empty((owner.num_embeddings, 0))

    def forward(self, x: Tensor) -> Tensor:
        """Looks words up, or scores vectors.  # as in `StructuredEmbedding`."""
        # Called as a module, so that hooks which bring offloaded tensors to the device run.
        y = self._owner[0](x, self._scale)
        return y if self.bias is None else y + self.bias.to(y)
