"""What structures speak of: options, layouts, places of weights, and what a fit aims at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from torch import Tensor

from tcompress.linalg.curvature import curved_loss
from tcompress.options.methods import Spec as Spec

Side = Literal["in", "out"]
Shapes = dict[str, tuple[int, ...]]
Tensors = Mapping[str, Tensor]


class Refusal(Exception):
    """A structure cannot take these dimensions; the message says why.

    Args:
        message: Why.
        hint: What to do about it, where that is not said by the message.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Layout(BaseModel):
    """All that is needed to build one term of a layer: it is stored in the artefact.

    Attributes:
        structure: Name of the structure.
        in_features: Width of the input.
        out_features: Width of the output.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    structure: str
    in_features: int = Field(gt=0)
    out_features: int = Field(gt=0)

    @property
    def regressors(self) -> int:
        """How many inputs every output sees: what calibration rows must suffice for."""
        return self.in_features

    @model_serializer(mode="wrap")
    def _with_structure(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keeps the name in dumps without defaults: it selects the class on reading."""
        return {"structure": self.structure, **handler(self)}


@dataclass(frozen=True)
class Site:
    """Where a term will sit.

    Attributes:
        in_features: Width of the input.
        out_features: Width of the output.
        side: `in` for projections that read the residual stream, `out` for those that write it,
            `both` where the role is unknown.
        role: What the weight does, such as `q` or `down`.
        block: Name of its block.
        head: Width of one head, for projections of an attention.
        peers: All sites that share a bank with this one, itself included; none without a bank.
    """

    in_features: int
    out_features: int
    side: Literal["in", "out", "both"]
    role: str = ""
    block: str = ""
    head: int | None = None
    peers: tuple[Site, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Target:
    """What a term is fitted to, in the moment norm.

    Attributes:
        product: W C, less what other terms of the sum contribute.  # (out, in)
        gram: G, damped; None stands for the identity (data-free).  # (in, in)
        scale: E||W x||^2, which makes layers comparable where several share a side.
        curvature: S, damped; None stands for the identity.  # (out, out)
        weight: What a data-free fit would aim at, for fits that only find a local optimum and
            have to be no worse; None if it is not known, or is the product itself.  # (out, in)
        start: Tensors of an earlier fit to nearly the same target, which a fit in steps goes on
            from; it then ends no worse. Empty for a first fit.
        bank: Tensors of the bank, float64, fitted before; none for terms without one.
        operators: Built transforms of its sides; none for structures without.
    """

    product: Tensor
    gram: Tensor | None
    scale: float = 1.0
    curvature: Tensor | None = None
    weight: Tensor | None = None
    start: Tensors = field(default_factory=dict)
    bank: Tensors = field(default_factory=dict)
    operators: Mapping[Side, Any] = field(default_factory=dict)

    def full_gram(self) -> Tensor:
        """Returns G, as a matrix in any case."""
        if self.gram is not None:
            return self.gram
        return torch.eye(self.product.shape[1], dtype=self.product.dtype).to(self.product)


def predicted_loss(fitted: Tensor, target: Target, constant: float) -> float:
    """Returns what a weight costs the model, to second order.

    Args:
        fitted: The weight.  # (out, in)
        target: What it approximates, with curvature.
        constant: Predicted loss of a weight of zeros.
    """
    assert target.curvature is not None
    gram = target.full_gram()
    return constant + float(curved_loss(fitted, target.product, gram, target.curvature))
