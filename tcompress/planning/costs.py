"""What choices cost in parameters and bytes, and what a budget asks of all layers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.method_options import Budget
from tcompress.planning.entries import BudgetPlan, LayerPlan, Plan
from tcompress.planning.sites import structure_of, tied_to
from tcompress.structures import Layout, Refusal, Site, Spec, structure
from tcompress.structures.capabilities import shared_of, transform_shapes
from tcompress.structures.lowrank import LowRankLayout, LowRankSpec

# What one weight becomes: the terms of a choice, and what they cost.


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


# Bytes that the tensors of an output take; exact, but for the headers of files.


def weight_keys(source: SourceModel, entry: LayerPlan) -> tuple[str, ...]:
    """Names in the checkpoint of the tensors that a rewritten weight is read from."""
    path = source.keymap.runtime_name(entry.name) or entry.name
    return tuple(source.keymap.sources(f"{path}.{entry.parameter}").keys)


def rewritten_names(source: SourceModel, layers: Sequence[LayerPlan]) -> list[str]:
    """Lists the model's parameters in whose place structures are stored."""
    found = []
    for entry in layers:
        path = source.keymap.runtime_name(entry.name) or entry.name
        found.append(f"{path}.{entry.parameter}")
        if entry.bias and entry.kind != "experts":
            found.append(f"{path}.bias")
    return found


def copied_keys(source: SourceModel, plan: Plan) -> list[str]:
    """Names of the tensors that are carried over as they are."""
    replaced = {key for entry in plan.entries for key in weight_keys(source, entry)}
    for entry in plan.embeddings:
        for name in tied_to(source, source.keymap.runtime_name(entry.name) or entry.name):
            replaced.update(source.keymap.sources(f"{name}.weight").keys)
    for other in plan.attention:  # queries that a mechanism does not need
        for layer in other.unused:
            path = source.keymap.runtime_name(layer.name) or layer.name
            leaves = ("weight", "bias") if layer.bias else ("weight",)
            replaced.update(source.keymap.sources(f"{path}.{leaf}").keys[0] for leaf in leaves)
    replaced |= {*source.keymap.stale, *source.keymap.unmatched}  # no model reads them
    return [key for key in source.store.keys() if key not in replaced]  # noqa: SIM118


def disk_bytes(source: SourceModel, plan: Plan, dtype: str | None) -> int:
    """Counts the bytes of all tensors of an output.

    Args:
        source: The dense model, without blocks that are dropped.
        plan: What is done to it.
        dtype: Dtype of the output; None for that of the source.
    """
    store = source.store
    asked = None if dtype is None else getattr(torch, dtype)
    total = sum(
        prod(store.shape(k)) * _itemsize(store.dtype(k), asked) for k in copied_keys(source, plan)
    )
    keymap = source.keymap
    for path in keymap.apart(rewritten_names(source, plan.entries)).values():
        own = store.dtype(keymap.sources(path).keys[0])
        total += keymap.model.get_parameter_or_buffer(path).numel() * _itemsize(own, asked)
    for entry in plan.entries:
        total += entry.parameters * weight_bytes(source, entry, dtype)
    for other in plan.attention:
        path = source.keymap.runtime_name(other.like) or other.like
        own = store.dtype(source.keymap.sources(f"{path}.weight").keys[0])
        total += other.parameters * _itemsize(own, asked)
    return total


def weight_bytes(source: SourceModel, entry: LayerPlan, dtype: str | None) -> int:
    """Bytes of one number of a rewritten weight."""
    own = source.store.dtype(weight_keys(source, entry)[0])
    return _itemsize(own, None if dtype is None else getattr(torch, dtype))


def _itemsize(own: torch.dtype, asked: torch.dtype | None) -> int:
    return (own if asked is None or not own.is_floating_point else asked).itemsize


# From a budget to one kept fraction of all layers: what shapes alone can say of it.


STAND_IN = 0.5
"""Kept fraction of layers whose sizes nothing but data can tell."""

_LARGEST, _STEP, _STEPS = 0.99, 0.8, 30  # down to a thousandth
_HALVINGS = 14
_SHARES = tuple(round(n / 10**k, k) for k in (4, 3, 2) for n in range(10, 100))
"""Targets of two digits, from a thousandth on."""


def size_of(plan: Plan, source: SourceModel, recipe: Convert) -> int:
    """Measures a plan in the unit of its recipe's budget: parameters or bytes.

    Args:
        plan: What is done; for a fraction the rewritten weights count, else the whole model.
        source: The dense model, without blocks that are dropped.
        recipe: What was asked for.
    """
    kind = recipe.budget.kind if recipe.budget else "target"
    if kind == "target_bytes":
        return disk_bytes(source, plan, recipe.dtype)
    if kind == "target_params":
        return plan.parameters - plan.saved
    return plan.structured_rewritten


def plan_within(
    recipe: Convert, source: SourceModel, plan_of: Callable[[float | None], Plan]
) -> Plan:
    """Plans the same kept fraction for all layers: the largest that a budget allows.

    Args:
        recipe: What was asked for.
        source: The dense model, without blocks that are dropped.
        plan_of: Plans with a kept fraction; with None as large as the methods themselves say.

    Raises:
        PlanError: The budget is below what the smallest sizes take, or the model is within it.
    """
    budget = recipe.budget
    if budget is None:
        return plan_of(None)
    if not budget.is_size or budget.kind == "target":
        fraction = budget.limit if budget.is_size else STAND_IN
        try:
            plan = plan_of(fraction)
        except PlanError as error:
            hint = _smallest(fraction, plan_of) if budget.is_size else None
            raise PlanError(error.message, hint or error.hint) from error
    else:
        fraction, plan = _largest(recipe, budget, source, plan_of)
    chosen = "later" if recipe.by_loss else "uniform"
    facts = BudgetPlan(kind=budget.kind, limit=budget.limit, chosen=chosen, fraction=fraction)
    return plan.model_copy(update={"budget": facts})


def _smallest(fraction: float, plan_of: Callable[[float | None], Plan]) -> str | None:
    """Says from which target on layers are rewritten, if a larger one than this helps at all."""

    @cache
    def rewritten(share: float) -> int:
        try:
            return len(plan_of(share).layers)
        except PlanError:
            return 0

    shares = [share for share in _SHARES if share > fraction]
    most = rewritten(shares[-1]) if shares else 0
    if not most:
        return None
    first, last = (
        shares[bisect_left(shares, True, key=lambda share: rewritten(share) >= count)]
        for count in (1, most)
    )
    more = f" that rewrites a layer, and {last:g} rewrites {most}" if last > first else ""
    return f"{first:g} is the smallest target{more}"


def _largest(
    recipe: Convert, budget: Budget, source: SourceModel, plan_of: Callable[[float | None], Plan]
) -> tuple[float, Plan]:
    def tried(fraction: float) -> tuple[int, Plan] | None:
        try:
            plan = plan_of(fraction)
        except PlanError:
            return None
        return size_of(plan, source, recipe), plan

    high, sizes = _LARGEST, []
    _check_below_dense(plan_of, budget, source, recipe)
    for _ in range(_STEPS):
        found = tried(high)
        if found is not None and found[0] <= budget.limit:
            break
        sizes += [] if found is None else [found[0]]
        high *= _STEP
    else:
        raise out_of_reach(budget, min(sizes, default=0))
    low, plan, high = high, found[1], min(1.0, high / _STEP)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = tried(middle)
        if found is not None and found[0] <= budget.limit:
            low, plan = middle, found[1]
        else:
            high = middle
    return low, plan


def out_of_reach(budget: Budget, smallest: int) -> PlanError:
    """Says that a budget is too small, and how small it may be."""
    unit = "bytes" if budget.kind == "target_bytes" else "parameters"
    return PlanError(
        f"`{budget}` is out of reach: the smallest possible is {smallest:,} {unit}",
        "embeddings and norms count and stay as they are; allow more, offer a method with "
        "smaller sizes, keep fewer layers dense, or drop blocks too",
    )


def _check_below_dense(
    plan_of: Callable[[float | None], Plan], budget: Budget, source: SourceModel, recipe: Convert
) -> None:
    plan = Plan(layers=(), parameters=sum(p.numel() for p in source.keymap.model.parameters()))
    dense = size_of(plan, source, recipe)
    if dense <= budget.limit:
        unit = "bytes" if budget.kind == "target_bytes" else "parameters"
        raise PlanError(
            f"`{budget}` asks for nothing: the dense model has {dense:,} {unit}",
            "give a smaller number",
        )
