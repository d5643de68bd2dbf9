"""What one weight becomes: the terms of a choice, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tcompress.planning.entries import LayerPlan
from tcompress.planning.offers import structure_of
from tcompress.structures import Layout, Refusal, Site, Spec, structure
from tcompress.structures.capabilities import shared_of, transform_shapes
from tcompress.structures.lowrank import LowRankLayout, LowRankSpec


@dataclass(frozen=True)
class Choice:
    """What one layer becomes.

    Attributes:
        method: Options of the method.
        residual_rank: Rank of the low-rank term beside it; 0 leaves it to the target.
        target: Kept fraction that the residual, or the method itself, fills up to; without
            meaning for a method that fixes its size.
    """

    method: Spec
    residual_rank: int = 0
    target: float | None = None


Choices = Mapping[str, Choice | None]
"""By weight name in the checkpoint; None for layers that stay dense."""


def plan_terms(
    choice: Choice, site: Site, readers: int, copies: int = 1, *, calibrated: bool = True
) -> tuple[Layout, ...]:
    """Decides the terms of one weight.

    Args:
        choice: What it becomes.
        site: Where it sits.
        readers: How many weights share its input side.
        copies: How many share its output side: the experts of a layer.
        calibrated: Whether the fit will have data.

    Raises:
        Refusal: A structure cannot take these dimensions, or is larger than the target.
    """
    kind = structure_of(choice.method)
    spec = choice.method.settled(calibrated=calibrated)
    residual = _low_rank(choice.residual_rank, site) if choice.residual_rank else None
    if choice.target is None or spec.fixes_size:
        main = kind.layout(spec, site)
        return (main,) if residual is None else (main, residual)
    dense = site.in_features * site.out_features
    reserved = _reserved(choice.residual_rank, choice.target, site)
    budget = int((choice.target - reserved) * dense)
    main = kind.layout(spec, site, budget)
    if spec.fills:
        return (main,) if residual is None else (main, residual)
    cost = term_cost(main, readers, copies)
    if int(budget - cost) < 0:
        beside = "alone" if residual is None else f"beside a residual of rank {residual.rank}"
        raise Refusal(
            f"{kind.name} {beside} keeps {cost / dense + reserved:.1%}, "
            f"more than the target of {choice.target:.1%}"
        )
    if residual is not None:
        return main, residual
    rank = int(budget - cost) // (site.in_features + site.out_features)
    return (main, _low_rank(rank, site)) if rank else (main,)


def _low_rank(rank: int, site: Site) -> LowRankLayout:
    layout: LowRankLayout = structure("lowrank").layout(LowRankSpec(rank=rank), site)
    return layout


def _reserved(rank: int, target: float, site: Site) -> float:
    """Kept fraction that a residual takes, the same for all that share a bank."""
    if not rank:
        return 0.0
    sites = site.peers or (site,)
    dense = sum(item.in_features * item.out_features for item in sites)
    share = sum(term_cost(_low_rank(rank, item), 1, 1) for item in sites) / dense
    if share >= target:
        raise Refusal(
            f"a residual of rank {rank} alone keeps {share:.1%}, "
            f"no less than the target of {target:.1%}"
        )
    return share


def kept_share(entry: LayerPlan, sharing: int) -> float:
    """Kept fraction of a layer, with its share of an input side and of banks."""
    inputs = sum(
        prod(shape)
        for term in entry.parts[0].terms
        for shape in transform_shapes(term, "in").values()
    )
    terms = [term for part in entry.parts for term in part.terms]
    banks = sum(map(bank_cost, terms)) - sum(map(bank_size, entry.own_banks.values()))
    return (entry.parameters + banks - inputs * (1 - 1 / sharing)) / entry.dense_parameters


def bank_size(layout: Layout) -> int:
    """Parameters of the bank that a term uses."""
    shared = shared_of(layout)
    return 0 if shared is None else sum(map(prod, shared.shapes.values()))


def bank_cost(layout: Layout) -> float:
    """What a term answers for of its bank, in parameters."""
    shared = shared_of(layout)
    return 0.0 if shared is None else bank_size(layout) * shared.share


def term_cost(layout: Layout, readers: int, writers: int) -> float:
    """Parameters of one weight, with its share of sides and banks that others use too."""
    own = sum(map(prod, structure(layout.structure).tensors(layout).values()))
    after = sum(map(prod, transform_shapes(layout, "out").values()))
    before = sum(map(prod, transform_shapes(layout, "in").values()))
    return own + bank_cost(layout) + after / writers + before / readers
