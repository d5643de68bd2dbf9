"""What one weight becomes: the terms of a choice, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tcompress.planning.entries import LayerPlan
from tcompress.recipe.methods import structure_of
from tcompress.structures import Layout, Refusal, Site, Spec, structure
from tcompress.structures.lowrank import LowRankSpec


@dataclass(frozen=True)
class Choice:
    """What one layer becomes.

    Attributes:
        method: Options of the method.
        residual_rank: Rank of the low-rank term beside it.
        target: Kept fraction that the residual, or the method itself, fills up to.
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
    dense = site.in_features * site.out_features
    budget = None if choice.target is None else int(choice.target * dense)
    kind = structure_of(choice.method)
    main = kind.layout(kind.settle(choice.method, calibrated=calibrated), site, budget)
    cost = term_cost(main, readers, copies)
    rank = choice.residual_rank
    if not rank and budget is not None and not kind.fills(choice.method):
        rank = int(budget - cost) // (site.in_features + site.out_features)
        if rank < 0:
            raise Refusal(
                f"{kind.name} alone keeps {cost / dense:.1%}, "
                f"more than the target of {choice.target:.1%}"
            )
    if not rank:
        return (main,)
    residual = structure("lowrank").layout(LowRankSpec(rank=rank), site)
    return (main, residual)


def kept_share(entry: LayerPlan, sharing: int) -> float:
    """Kept fraction of a layer, with its share of an input side and of banks."""
    inputs = sum(
        prod(shape)
        for term in entry.parts[0].terms
        for shape in structure(term.structure).side_tensors(term, "in").values()
    )
    terms = [term for part in entry.parts for term in part.terms]
    banks = sum(map(bank_cost, terms)) - sum(map(bank_size, entry.own_banks.values()))
    return (entry.parameters + banks - inputs * (1 - 1 / sharing)) / entry.dense_parameters


def bank_size(layout: Layout) -> int:
    """Parameters of the bank that a term uses."""
    shapes = structure(layout.structure).bank_tensors(layout)
    return sum(prod(shape) for shape in shapes.values())


def bank_cost(layout: Layout) -> float:
    """What a term answers for of its bank, in parameters."""
    return bank_size(layout) * structure(layout.structure).bank_share(layout)


def term_cost(layout: Layout, readers: int, writers: int) -> float:
    """Parameters of one weight, with its share of sides and banks that others use too."""
    kind = structure(layout.structure)
    own = sum(prod(shape) for shape in kind.tensors(layout).values())
    after = sum(prod(shape) for shape in kind.side_tensors(layout, "out").values())
    before = sum(prod(shape) for shape in kind.side_tensors(layout, "in").values())
    return own + bank_cost(layout) + after / writers + before / readers
