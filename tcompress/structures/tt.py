"""Tensor-train matrices: a chain of small cores (methods ``tt`` and ``qtt``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from tcompress import linalg
from tcompress.fields import option, read_modes
from tcompress.structures.base import (
    NO_RANK,
    TOL,
    FitCost,
    Layout,
    LooksUp,
    Refusal,
    Shapes,
    Site,
    Spec,
    Structure,
    Target,
    Tensors,
    clip_note,
    predicted_loss,
    register,
    svd_flops,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Way = Literal["auto", "contract", "rebuild"]
Modes = tuple[PositiveInt, ...]

# What the ways cost, in multiply-adds of one large product; `benchmarks/tokens.py` measures them.
IN_PLACE, GATHERED = 1.4, 2.2  # one of a contraction; with gradients all of it moves data
COPY = 16  # one number that is moved
ONCE = 3e6  # building a weight, however small

# Sweeps without output moments, where others with them follow, and those; the latter take conjugate
# gradients and cost several times as much.
FIRST_SWEEPS, CURVED_SWEEPS = 2, 3
CHAIN_SWEEPS = 2  # over chains that share out the inputs
FITTED_SIZES = 5  # of a chain, to predict all from
PADDED = 0.01  # share of a weight that may be padding: zeros there cost next to nothing to fit


class TTSpec(Spec):
    """Options of `tt` and `qtt`."""

    name: Literal["tt", "qtt"] = "tt"
    order: int | None = option(
        None, "number of cores; default 2, or as many as `modes` says", ge=2, le=16
    )
    modes: dict[PositiveInt, Modes] = option(
        {},
        "factors of a width, such as `768: [24, 32]`; default as even as possible",
        metavar="WIDTH=AxB",
        read=read_modes,
    )
    rank: PositiveInt | Modes | None = option(
        None, "inner ranks: one, or a list; `qtt` has 2 unless a budget says", metavar="N|N,N,..."
    )
    tol: float | None = TOL
    chains: Literal["layer", "heads"] = option(
        "layer",
        "what has a chain of its own: the whole `layer`, or each of the `heads` of a projection of "
        "an attention, as in TSA and TGA; other layers have one",
    )
    apply: Way = option(
        "auto",
        "how cores are applied; `contract` them with the input, `rebuild` the weight in each pass, "
        "or `auto`: what costs less for the tokens at hand",
    )

    @property
    def has_size(self) -> bool:
        return self.rank is not None or self.name == "qtt"

    def clipped(self, layout: Any) -> str | None:
        return clip_note(self.rank, layout.ranks)

    def unused(self, layouts: Sequence[Any]) -> Iterator[str]:
        widths = sorted({width for layout in layouts for width in layout.chain_widths})
        for width, modes in self.modes.items():
            if width not in widths:
                given = f"`modes` {width}={'x'.join(map(str, modes))}"
                have = ", ".join(map(str, widths))
                yield f"{given} does nothing: it needs a width of {width}, and there are {have}"
        if self.chains == "heads" and all(layout.chains == 1 for layout in layouts):
            yield "`chains` heads does nothing: it needs projections of attentions of several heads"

    @model_validator(mode="after")
    def _without_modes_of_its_own(self) -> TTSpec:
        if self.name == "qtt" and (self.order is not None or self.modes):
            raise ValueError("the modes of `qtt` are 2: leave out `order` and `modes`")
        return self


class TTLayout(Layout):
    """Cores (R_n-1, I_n, J_n, R_n), with I_n from the output's width and J_n from the input's.

    Several `chains` of one shape, side by side in a leading dimension of the cores, share out the
    outputs, or the inputs where the layer is `turned`: it adds up what its heads give.
    """

    structure: Literal["tt"] = "tt"
    in_modes: Modes
    out_modes: Modes
    ranks: Modes
    apply: Way = "auto"
    chains: PositiveInt = 1
    turned: bool = False

    @model_serializer(mode="wrap")
    def _with_structure(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what a single chain does not need: so layouts stay as older versions read."""
        written = {"structure": self.structure, **handler(self)}
        several = self.chains > 1
        return {key: v for key, v in written.items() if several or key not in ("chains", "turned")}

    @model_validator(mode="after")
    def _modes_fit(self) -> TTLayout:
        if (self.in_features if self.turned else self.out_features) % self.chains:
            raise ValueError(f"{self.chains} chains do not share a width of the layer evenly")
        sizes = [(self.in_modes, self.chain_widths[0]), (self.out_modes, self.chain_widths[1])]
        lengths = {len(self.in_modes), len(self.out_modes), len(self.ranks) + 1}
        if len(lengths) > 1 or any(prod(modes) < size for modes, size in sizes):
            raise ValueError(
                f"modes {list(self.in_modes)} and {list(self.out_modes)} with ranks "
                f"{list(self.ranks)} do not make {self.in_features} x {self.out_features}"
            )
        return self

    @property
    def shape(self) -> tuple[Modes, Modes, Modes]:
        """Input modes, output modes and inner ranks."""
        return self.in_modes, self.out_modes, self.ranks

    @property
    def chain_widths(self) -> tuple[int, int]:
        """Inputs and outputs of one chain."""
        into, out = self.in_features, self.out_features
        return (into // self.chains, out) if self.turned else (into, out // self.chains)

    @property
    def chain(self) -> TTLayout:
        """The layout of one chain alone."""
        into, out = self.chain_widths
        update = {"in_features": into, "out_features": out, "chains": 1, "turned": False}
        return self.model_copy(update=update)


class TensorTrain(Structure[TTSpec, TTLayout], LooksUp):
    """A chain of cores, started by the TT-SVD and fitted by alternating least squares."""

    name = "tt"
    summary = "tensor-train cores; `qtt` has modes of 2"
    reference = "Oseledets 2011; Novikov et al. 2015, arXiv:1509.06569"
    spec = TTSpec
    layout_type = TTLayout

    def layout(self, spec: TTSpec, site: Site, budget: int | None = None) -> TTLayout:
        count, turned = _chains(spec, site)
        share, whole = (count, 1) if turned else (1, count)
        into, out = _modes(spec, site.in_features // share, site.out_features // whole)
        budget = None if budget is None else budget // count
        ranks = linalg.clip_ranks(_ranks(spec, into, out, budget), into, out)
        how = {"chains": count, "turned": turned, "apply": spec.apply}
        return TTLayout(**site.widths, in_modes=into, out_modes=out, ranks=ranks, **how)

    def tensors(self, layout: TTLayout) -> Shapes:
        bonds = (1, *layout.ranks, 1)
        modes = zip(layout.out_modes, layout.in_modes, strict=True)
        lead = (layout.chains,) if layout.chains > 1 else ()
        return {f"core{n}": (*lead, bonds[n], *pair, bonds[n + 1]) for n, pair in enumerate(modes)}

    def apply(self, x: Tensor, tensors: Tensors, layout: TTLayout) -> Tensor:
        if layout.chains == 1:
            return _multiplied(x, _cores(tensors, layout), layout)
        # Chains stand side by side, as experts do, of each of whom there may be some too.
        cores = _cores(tensors, layout)
        lead = cores[0].dim() - 5
        rows = x.flatten(lead, -2)
        if layout.turned:
            parts = rows.unflatten(-1, (layout.chains, -1)).transpose(-3, -2)
        else:
            parts = rows.unsqueeze(-3).expand(*rows.shape[:-2], layout.chains, -1, -1)
        outputs = _multiplied(parts, cores, layout)  # (..., chains, rows, out)
        mixed = outputs.sum(-3) if layout.turned else outputs.transpose(-3, -2).flatten(-2)
        return mixed.unflatten(lead, x.shape[lead:-1])

    def looks_up(self, layout: TTLayout) -> bool:
        return layout.chains == 1

    def rows(self, index: Tensor, tensors: Tensors, layout: TTLayout) -> Tensor:
        import torch

        cores = _cores(tensors, layout)
        if torch.compiler.is_compiling() or index.is_meta:  # nobody knows how many differ
            return linalg.tt_rows(index, cores)[:, : layout.in_features]
        words, places = index.unique(return_inverse=True)
        if words.device.type == "cpu" and words.numel():  # sorted; elsewhere it would have to wait
            low, high = int(words[0]), int(words[-1])
            if low < 0 or high >= layout.out_features:
                raise IndexError(
                    f"word {low if low < 0 else high} of a table of {layout.out_features} words"
                )
        elif words.device.type == "cuda":  # as dense tables do: without waiting
            torch._assert_async(((words >= 0) & (words < layout.out_features)).all())
        return linalg.tt_rows(words, cores)[:, : layout.in_features][places]

    def dense(self, tensors: Tensors, layout: TTLayout) -> Tensor:
        matrix = _matrix(_cores(tensors, layout), layout)  # ([chains,] out, in)
        if layout.chains == 1:
            return matrix
        return matrix.transpose(-3, -2).flatten(-2) if layout.turned else matrix.flatten(-3, -2)

    def fit(self, target: Target, layout: TTLayout) -> dict[str, Tensor]:
        cores = self._fitted_cores(target, layout, CURVED_SWEEPS)
        return {f"core{n}": core for n, core in enumerate(cores)}

    def _fitted_cores(self, target: Target, layout: TTLayout, curved_sweeps: int) -> list[Tensor]:
        """Fit a chain, or several one after another, each to what the others leave."""
        if layout.chains == 1:
            return self._fitted(target, layout, curved_sweeps)
        import torch

        one = layout.chain
        fits: dict[int, list[Tensor]] = {}
        # Chains that share out the inputs begin with the others at the dense weight.
        matrices = list(_parts(_free_weight(target), layout)) if layout.turned else []
        for index in [*range(layout.chains)] * (CHAIN_SWEEPS if layout.turned else 1):
            own = _target_of(target, layout, index, matrices)
            fits[index] = self._fitted(own, one, curved_sweeps)
            if layout.turned:
                matrices[index] = _matrix(fits[index], one)
        return [torch.stack(cores) for cores in zip(*fits.values(), strict=True)]

    def quick_fit(self, target: Target, layout: TTLayout) -> Tensor:
        """Fit by one sweep with output moments."""
        cores = self._fitted_cores(target, layout, 1)
        return self.dense({f"core{n}": core for n, core in enumerate(cores)}, layout)

    def _fitted(self, target: Target, layout: TTLayout, curved_sweeps: int) -> list[Tensor]:
        product, gram, curvature = target.product, target.gram, target.curvature
        start = cores = linalg.tt_svd(_free_weight(target), *layout.shape)
        near = _starts_at_optimum(layout)
        if gram is not None or not near:
            sweeps = linalg.SWEEPS if curvature is None else FIRST_SWEEPS
            cores = linalg.fit_tt(product, gram, cores, sweeps)
        if gram is not None and target.weight is not None and not near:
            # In the rare case that the fit without data is better, the fit goes on from it.
            free = linalg.fit_tt(target.weight, None, start)
            one, two = (linalg.tt_loss(product, gram, found) for found in (cores, free))
            cores = cores if bool(one <= two) else linalg.fit_tt(product, gram, free)
        if curvature is not None:
            cores = linalg.fit_tt(product, gram, cores, curved_sweeps, curvature)
        return cores

    def losses(self, target: Target, constant: float, layouts: Sequence[TTLayout]) -> list[float]:
        """Fits some sizes, and takes the others from what the SVDs of the chain cut off.

        Those are of the weight in the norm of both moments, where they are no optimum of the
        chain: only their ratios are used, which change with the rank.
        """
        if layouts[0].chains > 1:
            return super().losses(target, constant, layouts)
        import numpy as np

        first = layouts[0]
        tails = linalg.bond_tails(target.whitened, first.in_modes, first.out_modes)
        # What the ranks of each layout cut off, summed over the bonds.
        pairs = [zip(tails, layout.ranks, strict=True) for layout in layouts]
        cut_off = np.array([sum(float(tail[rank]) for tail, rank in bonds) for bonds in pairs])
        places = [place for place in _fitted_sizes(layouts) if cut_off[place] > 0]
        ratios = []
        for place in places:
            fitted = self.quick_fit(target, layouts[place])
            ratios.append(predicted_loss(fitted, target, constant) / cut_off[place])
        scales = np.interp(np.arange(len(layouts)), places, ratios) if places else 0.0 * cut_off
        return [min(constant, float(loss)) for loss in scales * cut_off]

    def fit_cost(self, layout: TTLayout, *, calibrated: bool) -> FitCost:
        if layout.chains > 1:
            one = self.fit_cost(layout.chain, calibrated=calibrated)
            fits = layout.chains * (CHAIN_SWEEPS if layout.turned else 1)
            return FitCost(one.flops * fits, one.bytes)
        sweeps = int(calibrated) + int(not _starts_at_optimum(layout))
        separates = prod(layout.out_modes) == layout.out_features
        start = svd_flops(layout.out_features, layout.in_features)
        flops = start + 2.0 * sweeps * linalg.fit_macs(*layout.shape, separates=separates)
        return FitCost(flops, linalg.fit_bytes(*layout.shape) if sweeps else 0)

    def start(self, layout: TTLayout, generator: torch.Generator) -> dict[str, Tensor]:
        import torch

        shapes = self.tensors(layout).items()
        paths = prod(layout.ranks)  # products that a weight is the sum of
        spread = (layout.in_features * paths) ** (-0.5 / len(shapes))
        return {name: torch.randn(shape, generator=generator) * spread for name, shape in shapes}


def _chains(spec: TTSpec, site: Site) -> tuple[int, bool]:
    """Number of chains, and whether they share out the inputs."""
    role = site.role.removeprefix("cross_")
    if spec.chains == "layer" or role not in ("q", "k", "v", "o"):
        return 1, False
    turned = site.side == "out"
    width = site.in_features if turned else site.out_features
    if site.head is None or width % site.head:
        wide = "not known" if site.head is None else f"{site.head}, which does not divide {width}"
        raise Refusal(f"the width of a head is {wide}", "leave `chains` out")
    return width // site.head, turned


def _parts(weight: Tensor, layout: TTLayout) -> Sequence[Tensor]:
    """Cut a weight into what its chains stand for.  # (out, in) -> chains of (out, in)."""
    return weight.chunk(layout.chains, 1 if layout.turned else 0)


def _target_of(target: Target, layout: TTLayout, index: int, matrices: Sequence[Tensor]) -> Target:
    """Target of one chain, where all others have these matrices.

    Chains that share out the outputs have their part of the product and of the output moment,
    whose products of different heads are left out.
    """
    into, out = layout.chain_widths
    weight = None if target.weight is None else _parts(target.weight, layout)[index]
    gram, curvature = target.gram, target.curvature
    if not layout.turned:
        rows = slice(index * out, (index + 1) * out)
        if curvature is not None:
            curvature = curvature[rows, rows]
        return target.aiming_at(target.product[rows], curvature=curvature, weight=weight)
    columns = slice(index * into, (index + 1) * into)
    product = target.product[:, columns]
    if gram is not None:  # what the others make of inputs that go along with these
        for other, matrix in enumerate(matrices):
            if other != index:
                product = product - matrix @ gram[other * into : (other + 1) * into, columns]
        gram, weight = gram[columns, columns], None
    return target.aiming_at(product, gram=gram, weight=weight)


def _free_weight(target: Target) -> Tensor:
    """The weight that a fit without data and without limits would be."""
    if target.gram is None:
        return target.product
    if (weight := target.dense_weight if target.weight is None else target.weight) is not None:
        return weight
    import torch

    return torch.linalg.solve(target.gram, target.product.mT).mT


def _fitted_sizes(layouts: Sequence[TTLayout]) -> list[int]:
    """Places of the layouts that are fitted to predict all."""
    import numpy as np

    ends = np.linspace(0, len(layouts) - 1, FITTED_SIZES).round().astype(int)
    return [int(place) for place in np.unique(ends)]


def _modes(spec: TTSpec, into: int, out: int) -> tuple[Modes, Modes]:
    if spec.name == "qtt":
        return linalg.quantized_matrix_modes(into, out)
    widths = (into, out)
    given = {width: spec.modes[width] for width in widths if width in spec.modes}
    for width, modes in given.items():
        if len(modes) < 2 or prod(modes) < width:
            raise Refusal(
                f"modes {list(modes)} do not make up {width}, or are fewer than two",
                "give two factors or more, whose product is the width, or a little above",
            )
    order = spec.order or max(map(len, given.values()), default=2)
    pairs = zip(widths, linalg.matrix_modes(into, out, order), strict=True)
    in_modes, out_modes = (given.get(width, modes) for width, modes in pairs)
    if len(in_modes) != len(out_modes):
        raise Refusal(
            f"the input {into} has {len(in_modes)} modes and "
            f"the output {out} has {len(out_modes)}: give both equally many"
        )
    return in_modes, out_modes


def _ranks(spec: TTSpec, in_modes: Modes, out_modes: Modes, budget: int | None) -> Modes:
    bonds = len(in_modes) - 1
    rank = spec.rank
    if rank is None and budget is not None:
        rank = linalg.rank_for_budget(in_modes, out_modes, budget)
        if not rank:
            least = linalg.parameter_count(in_modes, out_modes, (1,) * bonds)
            raise Refusal(
                f"the budget of {budget} parameters does not pay for rank 1, which takes {least}"
            )
    if rank is None and spec.name != "qtt":
        raise Refusal(NO_RANK)
    rank = rank or 2
    ranks = (rank,) * bonds if isinstance(rank, int) else rank
    if len(ranks) != bonds:
        has = "1 inner rank" if bonds == 1 else f"{bonds} inner ranks"
        order = f", or `order` {len(ranks) + 1}" if spec.name == "tt" else ""
        hint = f"give one rank for all{'' if bonds == 1 else f', or {bonds} of them'}{order}"
        raise Refusal(f"{bonds + 1} cores have {has}, not {len(ranks)}", hint)
    return ranks


def _starts_at_optimum(layout: TTLayout) -> bool:
    """Return whether the SVD that a fit starts from is, or nearly is, the optimum without data."""
    whole = prod(layout.in_modes) * prod(layout.out_modes)
    padded = 1 - layout.in_features * layout.out_features / whole
    return len(layout.in_modes) == 2 and padded <= PADDED


def _multiplied(x: Tensor, cores: list[Tensor], layout: TTLayout) -> Tensor:
    """Multiply rows by the weight of a chain, or of each of several."""
    import torch

    lead = cores[0].dim() - 4
    price = GATHERED if lead or torch.is_grad_enabled() else IN_PLACE
    contracts = layout.apply == "contract"
    if layout.apply == "auto":
        # A compiler that traces any number of tokens at once must not have it decide.
        tokens = prod(x.shape[lead:-1])
        count = tokens if isinstance(tokens, int) else inf
        # Compilers look through caches, and warn that they do.
        most = _most_to_contract if torch.compiler.is_compiling() else _remembered
        contracts = count <= most(layout.shape, prod(layout.chain_widths), price)
    if contracts:
        return linalg.tt_apply(x, cores)[..., : layout.chain_widths[1]]
    return x @ _matrix(cores, layout).mT


def _most_to_contract(shape: tuple[Modes, Modes, Modes], dense: int, price: float) -> float:
    """Tokens up to which contracting costs no more than rebuilding."""
    each = price * linalg.contract_macs(*shape) + COPY * linalg.contract_moves(*shape) - dense
    once = linalg.rebuild_macs(*shape) + COPY * dense + ONCE
    return once / each if each > 0 else inf


_remembered = lru_cache(maxsize=1024)(_most_to_contract)  # every pass asks


def _cores(tensors: Tensors, layout: TTLayout) -> list[Tensor]:
    return [tensors[f"core{n}"] for n in range(len(layout.in_modes))]


def _matrix(cores: list[Tensor], layout: TTLayout) -> Tensor:
    into, out = layout.chain_widths
    return linalg.tt_to_matrix(cores)[..., :out, :into]


register(TensorTrain())
