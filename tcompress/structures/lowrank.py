"""Low rank: W = A B, the honest baseline that every user knows (method ``svd``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from tcompress.fields import option
from tcompress.structures.base import (
    TOL,
    FitCost,
    Layout,
    LooksUp,
    Roundings,
    RoundsInNorm,
    Shapes,
    Site,
    Spec,
    Structure,
    Target,
    Tensors,
    chosen_rank,
    clip_note,
    register,
)

if TYPE_CHECKING:
    from torch import Tensor


class LowRankSpec(Spec):
    """Options of `svd`: two factors of a chosen rank."""

    name: Literal["svd", "lowrank"] = "svd"
    rank: int | None = option(None, "rank of every weight", metavar="N", gt=0)
    tol: float | None = TOL

    fills: ClassVar[bool] = True

    @property
    def fixes_size(self) -> bool:
        return self.has_size

    def clipped(self, layout: Any) -> str | None:
        return clip_note(self.rank, (layout.rank,))


class LowRankLayout(Layout):
    """A layer A B with A (out, rank) and B (rank, in)."""

    structure: Literal["lowrank"] = "lowrank"
    rank: int = Field(gt=0)


class LowRank(Structure[LowRankSpec, LowRankLayout], LooksUp, RoundsInNorm):
    """Two thin factors, fitted by the whitened truncated SVD."""

    name = "lowrank"
    summary = "two thin factors from a truncated SVD, whitened by the data"
    reference = "Eckart & Young 1936; whitening as in SVD-LLM (arXiv:2403.07378)"
    spec = LowRankSpec
    layout_type = LowRankLayout
    in_auto = True
    saves_time = True
    exact_losses = True
    reads_product = False
    reads_curvature = False
    sized_by_part = True

    def layout(self, spec: LowRankSpec, site: Site, budget: int | None = None) -> LowRankLayout:
        widths = site.widths.values()
        rank = chosen_rank(spec.rank, budget, lambda size: size // sum(widths))
        return LowRankLayout(**site.widths, rank=min(rank, *widths))

    def tensors(self, layout: LowRankLayout) -> Shapes:
        return {"a": (layout.out_features, layout.rank), "b": (layout.rank, layout.in_features)}

    def apply(self, x: Tensor, tensors: Tensors, layout: LowRankLayout) -> Tensor:
        return (x @ tensors["b"].mT) @ tensors["a"].mT

    def dense(self, tensors: Tensors, layout: LowRankLayout) -> Tensor:
        return (tensors["b"].mT @ tensors["a"].mT).mT

    def rows(self, index: Tensor, tensors: Tensors, layout: LowRankLayout) -> Tensor:
        from torch.nn.functional import embedding

        return embedding(index, tensors["a"]) @ tensors["b"]

    def scale_rows(self, tensors: Tensors, scales: Tensor, layout: Any) -> dict[str, Tensor]:
        return {"a": tensors["a"] * scales[:, None], "b": tensors["b"]}

    def fit(self, target: Target, layout: LowRankLayout) -> dict[str, Tensor]:
        from tcompress.linalg.moments import fit_condensed, fit_lowrank

        gram, rank, weight = target.gram, layout.rank, target.dense_weight
        if target.condensed is not None:
            assert gram is not None
            assert weight is not None
            a, b = fit_condensed(target.condensed, target.cross, gram, rank, weight)
        else:
            a, b = fit_lowrank(target.cross_product, gram, rank, target.curvature, weight)
        return {"a": a, "b": b}

    def fit_cost(self, layout: LowRankLayout, *, calibrated: bool) -> FitCost:
        from tcompress.linalg.moments import LARGE

        rows, columns = layout.out_features, layout.in_features
        least = min(rows, columns)
        if least <= LARGE:
            return super().fit_cost(layout, calibrated=calibrated)
        solved, multiplied = (4.0, 3.0) if calibrated else (13.0, 8.0)  # in float32 and float64
        return FitCost(solved * least**3 + multiplied * rows * columns * least)

    def rounded(
        self, target: Target, layout: LowRankLayout, tensors: Tensors, roundings: Roundings
    ) -> dict[str, Tensor]:
        from tcompress.linalg.calibrated import rounded_factors

        factors, widths = (tensors["a"], tensors["b"]), (roundings.get("a"), roundings.get("b"))
        a, b = rounded_factors(target.product, target.full_gram(), factors, widths)
        return {"a": a, "b": b}

    def losses(self, target: Target, constant: float, layouts: Sequence[Any]) -> list[float]:
        return rank_losses(target, constant, [layout.rank for layout in layouts])


def rank_losses(target: Target, constant: float, ranks: Sequence[int]) -> list[float]:
    """Predicts what the best factors of these ranks lose."""
    from tcompress.linalg.fits import lowrank_losses

    losses = lowrank_losses(target.spectrum, constant)
    return [float(losses[rank]) for rank in ranks]


register(LowRank())
