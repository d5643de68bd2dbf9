"""Tucker form over factors that many weights share (``tucker``).

Layers that read one input (`inputs`, the default: q, k and v, gate and up) share the factor V of
that input, and each has a U of its own: W = U V^T, a Tucker decomposition of all of them as one
tensor along the input alone. A layer that reads alone is then what `lowrank` makes of it.

Elsewhere weights are cut into blocks of one shape, and every block is U (sum_k a_k C_k) V^T.
*Shared factors* U, V and cores C_k serve all blocks, and a layer's own are its mixing weights a_k.
They serve one attention (`heads`), all weights of a role (`layers`), or a whole stack of blocks
(`model`). A weight that has none to share with, or shall not (`none`), is U G V^T: low rank with
r^2 parameters more.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt, model_validator

from tcompress import linalg
from tcompress.fields import option
from tcompress.structures.base import (
    NO_RANK,
    TOL,
    FitCost,
    Layout,
    LooksUp,
    Refusal,
    Shapes,
    Shared,
    SharesFactors,
    Site,
    Spec,
    Structure,
    Target,
    Tensors,
    chosen_rank,
    clip_note,
    random_tensors,
    register,
    shared_shapes,
    svd_flops,
)
from tcompress.structures.lowrank import rank_losses

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Share = Literal["none", "inputs", "heads", "layers", "model"]
Edges = tuple[PositiveInt, PositiveInt]


class TuckerSpec(Spec):
    """Options of `tucker`."""

    name: Literal["tucker"] = "tucker"
    share: Share = option(
        "inputs",
        "what shares factors: layers that read one input the factor of their `inputs`, or the "
        "`heads` of an attention, the `layers` of a role or the blocks of the whole `model` all "
        "factors and cores; `none` is `svd` with more parameters",
    )
    rank: PositiveInt | Edges | None = option(
        None, "columns of the factors U and V; one number, or two with cores", metavar="N|N,N"
    )
    tol: float | None = TOL
    cores: PositiveInt | None = option(
        None, "number of shared cores; default as many as blocks, within a `target`"
    )

    @property
    def fixes_size(self) -> bool:
        return self.has_size and not self.mixes_cores  # beside them a low-rank term fills up

    @property
    def fills(self) -> bool:
        return self.rank is None or (self.mixes_cores and self.cores is None)

    @property
    def shares_factors(self) -> bool:
        return self.share != "none"

    @property
    def mixes_cores(self) -> bool:
        """True where weights are mixtures of shared cores."""
        return self.share not in ("none", "inputs")

    def offered(self, target: float) -> tuple[TuckerSpec, ...]:
        """`auto` sizes layers one by one: there they share nothing."""
        return (self.model_copy(update={"share": "none"}),)

    def clipped(self, layout: Any) -> str | None:
        cores = None if layout.bank is None else clip_note(self.cores, (layout.cores,))
        return clip_note(self.rank, layout.ranks) or cores

    @model_validator(mode="after")
    def _without_what_is_shared(self) -> TuckerSpec:
        if not self.mixes_cores and self.cores is not None:
            raise ValueError("`cores` are shared: choose `share` heads, layers or model")
        if not self.mixes_cores and isinstance(self.rank, tuple):
            raise ValueError(
                f"with `share: {self.share}` both factors have one rank: give one number"
            )
        return self


class TuckerLayout(Layout):
    """A weight U G V^T or, with shared inputs, U V^T, or a grid of blocks over shared factors."""

    structure: Literal["tucker"] = "tucker"
    ranks: Edges  # columns of U and V
    share: Share = "none"
    bank: str | None = None  # name of the shared factors, unique within a layer
    cores: PositiveInt = 1
    block: Edges = (1, 1)  # rows and columns of a block
    blocks: PositiveInt = 1  # served by the shared factors
    turned: bool = False  # whether the blocks make up the transposed weight

    @property
    def plain(self) -> bool:
        """True where the weight is U V^T, without a core."""
        return self.share == "inputs"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of blocks, of the transposed weight where `turned`."""
        if self.bank is None:
            return 1, 1
        edges = (self.out_features, self.in_features)
        rows, columns = edges[::-1] if self.turned else edges
        return rows // self.block[0], columns // self.block[1]


class TuckerForm(Structure[TuckerSpec, TuckerLayout], SharesFactors, LooksUp):
    """Cores between two factors, of one weight or of all that share factors."""

    name = "tucker"
    summary = (
        "factors that layers of one input share, or small cores between factors that heads, layers "
        "or the model share"
    )
    reference = "Tucker 1966; De Lathauwer et al. 2000; Wang et al. 2020, arXiv:2004.12104"
    spec = TuckerSpec
    layout_type = TuckerLayout

    def layout(self, spec: TuckerSpec, site: Site, budget: int | None = None) -> TuckerLayout:
        if spec.share == "inputs":
            return _with_shared_input(spec, site, budget)
        block, turned = _cut(spec.share, site)
        blocks = sum(_blocks(spec.share, other) for other in site.sharing_sites)
        if block is None or blocks < 2:
            return _alone(spec, site, budget)
        sizes = (blocks, *block)
        if budget is not None:  # each pays in proportion to its size
            budget = budget * blocks * prod(block) // (site.in_features * site.out_features)
        cores, *ranks = linalg.clip_shared_ranks(*sizes, _shared_ranks(spec, sizes, budget))
        name = site.role if spec.share == "layers" else spec.share
        shared = {"share": spec.share, "bank": name, "cores": cores}
        cut = {"block": block, "blocks": blocks, "turned": turned}
        return TuckerLayout(**site.widths, ranks=tuple(ranks), **shared, **cut)

    def tensors(self, layout: TuckerLayout) -> Shapes:
        left, right = layout.ranks
        u, v = (layout.out_features, left), (layout.in_features, right)
        if layout.plain:
            return {"u": u, "v": v} if layout.bank is None else {"u": u}
        if layout.bank is not None:
            return {"mix": (*layout.grid, layout.cores)}
        return {"u": u, "core": layout.ranks, "v": v}

    def looks_up(self, layout: TuckerLayout) -> bool:
        return layout.bank is None

    def rows(self, index: Tensor, tensors: Tensors, layout: TuckerLayout) -> Tensor:
        from torch.nn.functional import embedding

        rows = embedding(index, tensors["u"])
        return (rows if layout.plain else rows @ tensors["core"]) @ tensors["v"].mT

    def scale_rows(self, tensors: Tensors, scales: Tensor, layout: Any) -> dict[str, Tensor]:
        return {**tensors, "u": tensors["u"] * scales[:, None]}

    def apply(self, x: Tensor, tensors: Tensors, layout: TuckerLayout) -> Tensor:
        u, v = tensors["u"], tensors["v"]
        if layout.plain:
            return x @ v @ u.mT
        if layout.bank is None:
            return x @ v @ tensors["core"].mT @ u.mT
        middles = linalg.mixed_cores(tensors["mix"], tensors["cores"])  # (..., m, q, left, right)
        middle = middles.transpose(-3, -2).flatten(-2).flatten(-3, -2)
        if layout.turned:
            u, v, middle = v, u, middle.mT
        seen = (x.unflatten(-1, (-1, len(v))) @ v).flatten(-2)
        return ((seen @ middle.mT).unflatten(-1, (-1, u.shape[-1])) @ u.mT).flatten(-2)

    def dense(self, tensors: Tensors, layout: TuckerLayout) -> Tensor:
        if layout.plain:
            return tensors["u"] @ tensors["v"].mT
        if layout.bank is None:
            return tensors["u"] @ tensors["core"] @ tensors["v"].mT
        weight = linalg.mixed_weight(tensors["mix"], _factors_of(tensors))
        return weight.mT if layout.turned else weight

    def fit_cost(self, layout: TuckerLayout, *, calibrated: bool) -> FitCost:
        if layout.bank is None:
            return FitCost(svd_flops(layout.out_features, layout.in_features))
        if layout.plain:
            return FitCost(2.0 * layout.ranks[0] * layout.in_features * layout.out_features)
        (rows, columns), middle = layout.grid, prod(layout.ranks)
        each = layout.cores * middle * (sum(layout.ranks) + layout.cores)
        return FitCost(2.0 * each * (rows * columns) ** 2)

    def fit(self, target: Target, layout: TuckerLayout) -> dict[str, Tensor]:
        product, gram, curvature = target.product, target.gram, target.curvature
        if layout.plain and layout.bank is not None:
            return {"u": linalg.fit_left_factor(product, gram, target.factors["v"])}
        if layout.bank is not None:
            factors = _factors_of(target.factors)
            product = product if curvature is None else curvature @ product
            if layout.turned:  # tr(S W G W^T) = tr(G W^T S W): the moments change places
                product, gram, curvature = product.mT, curvature, gram
            return {"mix": linalg.fit_mixing(product, gram, factors, curvature)}
        left, right = linalg.fit_lowrank(product, gram, layout.ranks[0], curvature)
        if layout.plain:
            return {"u": left, "v": right.mT}
        import torch

        u, outer = torch.linalg.qr(left)
        v, inner = torch.linalg.qr(right.mT)
        return {"u": u, "core": outer @ inner.mT, "v": v}

    def losses(self, target: Target, constant: float, layouts: Sequence[Any]) -> list[float]:
        if any(layout.bank is not None for layout in layouts):
            return super().losses(target, constant, layouts)
        return rank_losses(target, constant, [layout.ranks[0] for layout in layouts])

    def start(self, layout: TuckerLayout, generator: torch.Generator) -> dict[str, Tensor]:
        widths = {"u": layout.ranks[0], "core": layout.ranks[1], "v": layout.in_features}
        axis = 0 if layout.turned else 1  # of the blocks, which the input of the layer meets
        read = layout.grid[axis] * layout.block[axis]
        widths["mix"] = layout.cores * read / prod(layout.block) ** 0.5
        return random_tensors(self.tensors(layout), generator, widths)

    def sharing_group(self, spec: TuckerSpec, site: Site) -> Hashable:
        if spec.share == "inputs":
            return (site.block, site.reads) if site.reads else None
        block, _ = _cut(spec.share, site)
        if block is None:
            return None
        if spec.share == "heads":
            return site.block, site.role.startswith("cross_"), block
        stack = re.sub(r"\.\d+", "", site.block)
        return stack, site.role if spec.share == "layers" else None, block

    def shared(self, layout: TuckerLayout) -> Shared | None:
        if layout.bank is None:
            return None
        (a, b), (left, right) = layout.block, layout.ranks
        if layout.plain:
            return Shared(layout.bank, {"v": (b, right)}, prod(layout.grid) / layout.blocks)
        shapes = {"u": (a, left), "cores": (layout.cores, left, right), "v": (b, right)}
        return Shared(layout.bank, shapes, prod(layout.grid) / layout.blocks)

    def fit_shared(
        self, targets: Sequence[Target], layouts: Sequence[TuckerLayout]
    ) -> dict[str, Tensor]:
        users = []
        for target, layout in zip(targets, layouts, strict=True):
            assert target.weight is not None
            scale = 1.0 if target.curvature is not None else target.scale
            user = linalg.User(target.weight, target.gram, target.curvature, scale)
            users.append(user.turned() if layout.turned else user)
        first = layouts[0]
        if first.plain:
            return {"v": linalg.fit_input_factor(users, first.ranks[1])}
        found = linalg.fit_tucker_factors(users, first.block, (first.cores, *first.ranks))
        return {"u": found.left, "cores": found.cores, "v": found.right}

    def shared_cost(self, layout: TuckerLayout, *, calibrated: bool) -> FitCost:
        (a, b), (left, right) = layout.block, layout.ranks
        if layout.plain:
            return FitCost(svd_flops(layout.blocks, b), 8 * b * (layout.blocks + 3 * b))
        middles = left * right * (left + right)
        plain = a * b * (left + right) + middles
        seen = a * a * left + b * b * right + middles
        step = 2 * linalg.SHARED_STEPS * seen if calibrated else 0
        flops = 2.0 * linalg.SHARED_SWEEPS * layout.blocks * (plain + step)
        moments = 4 * (a * a + b * b) if calibrated else 0  # as they are, whitened, and on the way
        return FitCost(flops, 8 * layout.blocks * (6 * a * b + moments))

    def start_shared(self, layout: TuckerLayout, generator: torch.Generator) -> dict[str, Tensor]:
        (a, b), (left, right) = layout.block, layout.ranks
        # Mixing weights know whether rows or columns of their blocks are read.
        widths = {"u": (a * left) ** 0.5, "cores": (left * right) ** 0.5, "v": (b * right) ** 0.5}
        if layout.plain:
            widths = {"v": float(b)}
        return random_tensors(shared_shapes(layout), generator, widths)


def _with_shared_input(spec: TuckerSpec, site: Site, budget: int | None) -> TuckerLayout:
    """U V^T with the V of all that read the same input, each paying in proportion to its size."""
    sites = site.sharing_sites if len(site.sharing_sites) > 1 else (site,)
    rows = sum(other.out_features for other in sites)

    def paid_by(size: int) -> int:
        return size * rows // site.out_features // (rows + site.in_features)

    assert not isinstance(spec.rank, tuple)  # which is for cores
    rank = min(chosen_rank(spec.rank, budget, paid_by), rows, site.in_features)
    return TuckerLayout(
        **site.widths,
        ranks=(rank, rank),
        share="inputs",
        bank="inputs" if len(sites) > 1 else None,
        block=(1, site.in_features),
        blocks=rows,
    )


def _alone(spec: TuckerSpec, site: Site, budget: int | None) -> TuckerLayout:
    """A weight that shares nothing; shared factors have ranks for their own shape only."""
    rank = spec.rank if isinstance(spec.rank, int) and not spec.shares_factors else None
    missing = NO_RANK
    if spec.shares_factors:
        missing = f"`share: {spec.share}` has no factors for it, and no `target` gives it a rank"
    widths = site.widths.values()
    rank = chosen_rank(rank, budget, partial(linalg.largest_rank, sum(widths)), missing)
    return TuckerLayout(**site.widths, ranks=(min(rank, *widths),) * 2)


def _cut(share: Share, site: Site) -> tuple[Edges | None, bool]:
    """The block that a weight is cut into, if one fits its shape and role, and whether turned."""
    out, into = site.out_features, site.in_features
    if share == "layers":
        return (out, into), False
    if share == "heads" and site.head is not None and site.side != "both":
        turned = site.side == "out"
        rows, columns = (into, out) if turned else (out, into)
        return ((site.head, columns) if rows % site.head == 0 else None), turned
    if share == "model" and site.side != "both":
        width = into if site.side == "in" else out
        return ((width, width) if out % width == 0 == into % width else None), False
    return None, False


def _blocks(share: Share, site: Site) -> int:
    block, _ = _cut(share, site)
    return 0 if block is None else site.in_features * site.out_features // prod(block)


def _shared_ranks(
    spec: TuckerSpec, sizes: tuple[int, int, int], budget: int | None
) -> linalg.Ranks:
    """Number of cores and ranks of shared factors, from what is given and what may be spent."""
    blocks, rows, columns = sizes
    most = min(spec.cores or blocks, blocks)
    if spec.rank is not None:
        left, right = (spec.rank, spec.rank) if isinstance(spec.rank, int) else spec.rank
        if budget is not None and spec.cores is None:
            rest = budget - rows * left - columns * right
            most = min(most, max(0, rest // (left * right + blocks)))
            if not most:
                raise Refusal(f"the budget of {budget} parameters does not pay for one core")
        return most, left, right
    if budget is None:
        raise Refusal(NO_RANK)
    ladder = linalg.rank_ladder(most, rows, columns)
    found = [ranks for ranks in ladder if linalg.tucker_parameters(*sizes, ranks) <= budget]
    if not found:
        raise Refusal(f"the budget of {budget} parameters does not pay for factors of rank 1")
    return found[-1]


def _factors_of(tensors: Tensors) -> linalg.TuckerFactors:
    return linalg.TuckerFactors(tensors["u"], tensors["cores"], tensors["v"])


register(TuckerForm())
