"""The modules that serve every replacement inside a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.attention.replacement import (
    QueryKeyMoments,
    ReplacementLayout,
    replacement_named,
    take_tokens,
)
from tcompress.attention.visibility import Visible, check_alike
from tcompress.errors import DataError, refuse_replica
from tcompress.structures.modules.linear import empty_guard

CHILD = "tc_attn"
"""Name of the replacement below the attention."""


class ReplacementModule(nn.Module):
    """Owns the tensors of a replacement, and mixes tokens; errors tell its `name`."""

    def __init__(self, layout: ReplacementLayout, name: str = "", **place: Any) -> None:
        super().__init__()
        self.layout, self.name = layout, name
        self.kind = replacement_named(layout.mechanism)
        self.segments: Tensor | None = None  # of the pass at work, 0 for the first text
        self.host_config: Any = None  # the model's, which says how masks are made
        for key, shape in self.kind.tensors(layout).items():
            self.register_parameter(key, nn.Parameter(torch.empty(shape, **place)))
        self._constants: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}

    def fill(self, seed: int, *, pretrained: bool, moments: QueryKeyMoments | None = None) -> None:
        """Fill in first values, near a pretrained model's attention or as the paper says."""
        generator = torch.Generator().manual_seed(seed)
        values = self.kind.start(self.layout, generator, pretrained=pretrained)
        if moments is not None:
            values = {**values, **self.kind.adapted(self.layout, moments, values)}
        with torch.no_grad():
            for key, value in values.items():
                getattr(self, key).copy_(value)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        scaling: float | None = None,
        weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Mix tokens, see `Visible.of`, and return what values were weighed with if asked to.

        # (batch, queries, heads, head_dim), and (batch, heads, queries, keys) or None
        """
        usual = self.layout.head_dim**-0.5
        if scaling is not None and scaling != usual:  # some models scale their queries before
            q = q * (scaling / usual)
        try:
            visible = Visible.of(mask, q, k, causal=causal)
            if self.segments is not None:
                first = (self.segments.to(k.device) == 0).expand(len(k), -1)[:, -k.shape[-2] :]
                visible = replace(visible, first=first)
            if not self.kind.pairwise:
                check_alike(mask, visible)
            tensors = {key: t.to(q.dtype) for key, t in self.named_parameters(recurse=False)}
            tensors |= self._fixed(q)
            order = visible.padding_last() if self.kind.ordered(self.layout) else None
            if order is not None:
                q, k, v = (take_tokens(x, order) for x in (q, k, v))
                visible = visible.in_order(order)
            mixed, weighed = self.kind.apply(q, k, v, tensors, self.layout, visible)
        except DataError as error:
            raise DataError(f"attention `{self.name}`: {error.message}", error.hint) from error
        if order is not None:
            order = order.argsort(1)
            mixed = take_tokens(mixed, order)
            if weights and weighed is not None:
                weighed = take_tokens(take_tokens(weighed, order).mT, order).mT
        mixed = mixed.transpose(1, 2).contiguous()
        return (mixed, weighed) if weights else mixed

    def _fixed(self, like: Tensor) -> dict[str, Tensor]:
        key = (like.device, like.dtype)
        if key not in self._constants:
            # They may serve training after a pass in inference mode, and are drawn on the CPU.
            with torch.inference_mode(False), torch.device("cpu"):
                constants = self.kind.constants(self.layout).items()
                self._constants[key] = {name: item.to(*key) for name, item in constants}
        return self._constants[key]

    def __getstate__(self) -> dict[str, Any]:
        """Leave constants behind: copies make their own."""
        return {**self.__dict__, "_constants": {}, "segments": None}

    _replicate_for_data_parallel = refuse_replica

    def extra_repr(self) -> str:
        fields = self.layout.model_dump(exclude_defaults=True)
        return ", ".join(f"{name}={value}" for name, value in fields.items())


class UnusedProjection(nn.Module):
    """Gives zeros, without memory, where a model calls a projection that has no more use."""

    def __init__(self, out_features: int, **place: Any) -> None:
        super().__init__()
        # At an empty tensor under the dense name plain Transformers stops.
        self.register_buffer("weight", empty_guard(**place))
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros.  # (..., in) -> (..., out)."""
        return x.new_zeros(()).expand(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"out={self.out_features}"


class GuardedLinear(nn.Module):
    """A dense layer that stores its weight as `tc_weight`; `bias` is the bias' width."""

    bias: nn.Parameter | None

    def __init__(
        self, shape: tuple[int, ...], bias: int | None, *, transposed: bool = False, **place: Any
    ) -> None:
        super().__init__()
        self.register_buffer("weight", empty_guard(**place))  # as `UnusedProjection`
        self.transposed = transposed
        self.tc_weight = nn.Parameter(torch.empty(shape, **place))
        parameter = None if bias is None else nn.Parameter(torch.empty(bias, **place))
        self.register_parameter("bias", parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.  # (..., in) -> (..., out)."""
        weight = self.tc_weight.mT if self.transposed else self.tc_weight
        return nn.functional.linear(x, weight, self.bias)
