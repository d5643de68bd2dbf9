"""Tucker form: a weight between two factors, W = U G V^T (method ``tucker``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from tcompress.linalg.curvature import fit_lowrank_curved, lowrank_losses, lowrank_spectrum
from tcompress.linalg.lowrank import best_factors, fit_lowrank
from tcompress.structures.base import (
    Layout,
    Refusal,
    Shapes,
    Side,
    Site,
    Spec,
    Structure,
    Target,
    Tensors,
    register,
    svd_flops,
)


class TuckerSpec(Spec):
    """Options of `tucker`."""

    name: Literal["tucker"] = "tucker"
    rank: PositiveInt | None = Field(None, description="columns of the factors U and V")

    @property
    def has_size(self) -> bool:
        return self.rank is not None


class TuckerLayout(Layout):
    """A weight U G V^T with U (out, rank), G (rank, rank) and V (in, rank)."""

    structure: Literal["tucker"] = "tucker"
    rank: PositiveInt


class TuckerForm(Structure[TuckerSpec, TuckerLayout]):
    """A core between two factors: for one weight, low rank whose factors are orthonormal."""

    name = "tucker"
    summary = "a small core between two factors"
    reference = "Tucker 1966; De Lathauwer et al. 2000"
    spec = TuckerSpec
    layout_type = TuckerLayout

    def layout(self, spec: TuckerSpec, site: Site, budget: int | None = None) -> TuckerLayout:
        rank = spec.rank
        if rank is None and budget is not None:
            rank = _rank_for(site.in_features + site.out_features, budget)
        if rank is None:
            raise Refusal("no rank is given: set `rank` or `target`")
        if rank < 1:
            raise Refusal(f"the budget of {budget} parameters does not pay for rank 1")
        return TuckerLayout(
            in_features=site.in_features,
            out_features=site.out_features,
            rank=min(rank, site.in_features, site.out_features),
        )

    def tensors(self, layout: TuckerLayout) -> Shapes:
        return {
            "u": (layout.out_features, layout.rank),
            "core": (layout.rank, layout.rank),
            "v": (layout.in_features, layout.rank),
        }

    def core_macs(self, layout: TuckerLayout) -> int:
        return layout.rank * (layout.in_features + layout.rank + layout.out_features)

    def core(self, z: Tensor, tensors: Tensors, layout: TuckerLayout) -> Tensor:
        return z @ tensors["v"] @ tensors["core"].mT @ tensors["u"].mT

    def dense(
        self, tensors: Tensors, layout: TuckerLayout, operators: Mapping[Side, Any]
    ) -> Tensor:
        return tensors["u"] @ tensors["core"] @ tensors["v"].mT

    def fills(self, spec: TuckerSpec) -> bool:
        return spec.rank is None

    def fit_flops(self, layout: TuckerLayout, *, calibrated: bool) -> float:
        return svd_flops(layout.out_features, layout.in_features)

    def fit(
        self, target: Target, layout: TuckerLayout, operators: Mapping[Side, Any]
    ) -> dict[str, Tensor]:
        if target.curvature is not None:
            gram = target.full_gram()
            left, right = fit_lowrank_curved(target.product, gram, target.curvature, layout.rank)
        elif target.gram is None:
            left, right = best_factors(target.product, layout.rank)
        else:
            left, right = fit_lowrank(target.product, target.gram, layout.rank)
        u, outer = torch.linalg.qr(left)
        v, inner = torch.linalg.qr(right.mT)
        return {"u": u, "core": outer @ inner.mT, "v": v}

    def losses(
        self, target: Target, constant: float, layouts: Sequence[TuckerLayout]
    ) -> list[float]:
        assert target.curvature is not None
        spectrum = lowrank_spectrum(target.product, target.full_gram(), target.curvature)
        losses = lowrank_losses(spectrum, constant)
        return [float(losses[layout.rank]) for layout in layouts]

    def start(self, layout: TuckerLayout, generator: torch.Generator) -> dict[str, Tensor]:
        widths = {"u": layout.rank, "core": layout.rank, "v": layout.in_features}
        return {
            name: torch.randn(shape, generator=generator) / widths[name] ** 0.5
            for name, shape in self.tensors(layout).items()
        }


def _rank_for(widths: int, budget: int) -> int:
    """The largest r with r widths + r^2 parameters."""
    return (isqrt(widths * widths + 4 * max(0, budget)) - widths) // 2


register(TuckerForm())
