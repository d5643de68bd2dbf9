"""Tensor-train matrices: a chain of small cores (methods ``tt`` and ``qtt``)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from tcompress.linalg.tensortrain import (
    contract_macs,
    rebuild_macs,
    tt_apply,
    tt_svd,
    tt_to_matrix,
)
from tcompress.linalg.ttfit import fit_tt
from tcompress.linalg.ttmodes import (
    clip_ranks,
    matrix_modes,
    parameter_count,
    quantized_matrix_modes,
    rank_for_budget,
)
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
)

Modes = tuple[int, ...]
Way = Literal["auto", "contract", "rebuild"]

SLOWER = 4
"""A multiply-add of a contraction costs about so many of one large product: it moves more data."""


class TTSpec(Spec):
    """Options of `tt` and `qtt`."""

    name: Literal["tt", "qtt"] = "tt"
    order: int = Field(2, ge=2, le=16, description="number of cores")
    modes: dict[int, Modes] = Field(
        {}, description="factors of a width, such as `768: [24, 32]`; default as even as possible"
    )
    rank: int | tuple[int, ...] | None = Field(
        None, description="inner ranks: one for all, or a list; `qtt` has 2 unless `target` says"
    )
    apply: Way = Field(
        "auto",
        description="`contract` the cores with the input, `rebuild` the weight for each pass, or "
        "`auto`: what costs less for the tokens at hand",
    )


class TTLayout(Layout):
    """Cores (R_n-1, I_n, J_n, R_n), with I_n from the output's width and J_n from the input's."""

    structure: Literal["tt"] = "tt"
    in_modes: Modes
    out_modes: Modes
    ranks: Modes
    apply: Way = "auto"

    @property
    def shape(self) -> tuple[Modes, Modes, Modes]:
        """Input modes, output modes and inner ranks."""
        return self.in_modes, self.out_modes, self.ranks


class TensorTrain(Structure[TTSpec, TTLayout]):
    """A chain of cores, started by the TT-SVD and fitted by alternating least squares."""

    name = "tt"
    summary = "tensor-train cores; `qtt` has modes of 2"
    reference = "Oseledets 2011; Novikov et al. 2015, arXiv:1509.06569; TGA, TSA papers"
    fills_budget = True
    spec = TTSpec
    layout_type = TTLayout

    def layout(self, spec: TTSpec, site: Site, budget: int | None = None) -> TTLayout:
        in_modes, out_modes = _modes(spec, site)
        ranks = _ranks(spec, in_modes, out_modes, budget)
        return TTLayout(
            in_features=site.in_features,
            out_features=site.out_features,
            in_modes=in_modes,
            out_modes=out_modes,
            ranks=clip_ranks(ranks, in_modes, out_modes),
            apply=spec.apply,
        )

    def tensors(self, layout: TTLayout) -> Shapes:
        bonds = (1, *layout.ranks, 1)
        modes = zip(layout.out_modes, layout.in_modes, strict=True)
        return {f"core{n}": (bonds[n], *pair, bonds[n + 1]) for n, pair in enumerate(modes)}

    def core_macs(self, layout: TTLayout) -> int:
        if _contracts(layout, None):
            return contract_macs(*layout.shape)
        return layout.in_features * layout.out_features

    def core(self, z: Tensor, tensors: Tensors, layout: TTLayout) -> Tensor:
        cores = _cores(tensors, layout)
        lead = cores[0].dim() - 4
        if _contracts(layout, prod(z.shape[lead:-1])):
            return tt_apply(z, cores)[..., : layout.out_features]
        return z @ _matrix(cores, layout).mT

    def dense(self, tensors: Tensors, layout: TTLayout, operators: Mapping[Side, Any]) -> Tensor:
        return _matrix(_cores(tensors, layout), layout)

    def fit(
        self, target: Target, layout: TTLayout, operators: Mapping[Side, Any]
    ) -> dict[str, Tensor]:
        start = target.product
        if target.gram is not None:  # what a fit without limits would be
            start = torch.linalg.solve(target.gram, start.mT).mT
        cores = tt_svd(start, *layout.shape)
        # Two cores are one SVD, which is the optimum where nothing is weighed or padded.
        plain = target.gram is None and target.curvature is None
        settled = len(cores) == 2 and plain and not _is_padded(layout)
        if not settled:
            cores = fit_tt(target.product, target.gram, cores, curvature=target.curvature)
        return {f"core{n}": core for n, core in enumerate(cores)}

    def start(self, layout: TTLayout, generator: torch.Generator) -> dict[str, Tensor]:
        shapes = self.tensors(layout)
        paths = prod(layout.ranks)  # products that a weight is the sum of
        spread = (layout.in_features * paths) ** (-0.5 / len(shapes))
        return {
            name: torch.randn(shape, generator=generator) * spread for name, shape in shapes.items()
        }


def _modes(spec: TTSpec, site: Site) -> tuple[Modes, Modes]:
    if spec.name == "qtt":
        return quantized_matrix_modes(site.in_features, site.out_features)
    in_modes, out_modes = matrix_modes(site.in_features, site.out_features, spec.order)
    in_modes = _given(spec, site.in_features, in_modes)
    out_modes = _given(spec, site.out_features, out_modes)
    if len(in_modes) != len(out_modes):
        raise Refusal(
            f"the input {site.in_features} has {len(in_modes)} modes, "
            f"the output {site.out_features} {len(out_modes)}: give both equally many"
        )
    return in_modes, out_modes


def _given(spec: TTSpec, size: int, default: Modes) -> Modes:
    modes = spec.modes.get(size, default)
    if prod(modes) < size or min(modes, default=0) < 1 or len(modes) < 2:
        raise Refusal(f"modes {list(modes)} do not make up {size}")
    return modes


def _ranks(spec: TTSpec, in_modes: Modes, out_modes: Modes, budget: int | None) -> Modes:
    bonds = len(in_modes) - 1
    rank = spec.rank
    if rank is None and budget is not None:
        rank = rank_for_budget(in_modes, out_modes, budget)
        if not rank:
            least = parameter_count(in_modes, out_modes, (1,) * bonds)
            raise Refusal(f"the budget of {budget} parameters does not pay for rank 1 ({least})")
    if rank is None and spec.name == "qtt":
        rank = 2
    if rank is None:
        raise Refusal("no rank is given: set `rank` or `target`")
    ranks = (rank,) * bonds if isinstance(rank, int) else rank
    if len(ranks) != bonds or min(ranks, default=1) < 1:
        raise Refusal(f"{bonds + 1} cores have {bonds} ranks of at least 1, not {list(ranks)}")
    return ranks


def _contracts(layout: TTLayout, tokens: int | None) -> bool:
    """Whether to contract rather than rebuild, for so many tokens; None for very many."""
    if layout.apply != "auto":
        return layout.apply == "contract"
    dense = layout.in_features * layout.out_features
    saved = dense - SLOWER * contract_macs(*layout.shape)
    if tokens is None:
        return saved > 0
    return tokens * saved + SLOWER * rebuild_macs(*layout.shape) > 0


def _cores(tensors: Tensors, layout: TTLayout) -> list[Tensor]:
    return [tensors[f"core{n}"] for n in range(len(layout.in_modes))]


def _matrix(cores: list[Tensor], layout: TTLayout) -> Tensor:
    return tt_to_matrix(cores)[..., : layout.out_features, : layout.in_features]


def _is_padded(layout: TTLayout) -> bool:
    sizes = prod(layout.in_modes), prod(layout.out_modes)
    return sizes != (layout.in_features, layout.out_features)


register(TensorTrain())
