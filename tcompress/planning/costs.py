"""What choices cost in parameters and bytes, and what a budget asks of all layers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.convert_options import Budget
from tcompress.planning.entries import BudgetPlan, LayerPlan, Plan
from tcompress.planning.sites import structure_of, tied_to
from tcompress.structures import Layout, Refusal, Site, Spec, structure
from tcompress.structures.base import Shapes, shared_of, shared_shapes, transform_shapes
from tcompress.structures.lowrank import LowRankLayout, LowRankSpec


@dataclass(frozen=True)
class Choice:
    """What one layer becomes."""

    method: Spec
    residual_rank: int = 0  # of the low-rank summand beside it; 0 leaves it to the target
    target: float | None = None
    """Kept fraction that the residual, or the method, fills up to, unless it fixes its size."""


def plan_terms(
    choice: Choice, site: Site, readers: int, copies: int = 1, *, calibrated: bool = True
) -> tuple[Layout, ...]:
    """Decides the summands of one weight whose input transform so many others read; may refuse."""
    kind = structure_of(choice.method)
    spec = choice.method.settled(calibrated=calibrated)
    residual = _low_rank(choice.residual_rank, site) if choice.residual_rank else None
    beside = () if residual is None else (residual,)
    if choice.target is None or spec.fixes_size:
        return (kind.layout(spec, site), *beside)
    dense = site.in_features * site.out_features
    reserved = 0.0
    if residual is not None:  # the same for all that share factors
        sites = site.sharing_sites or (site,)
        rank = choice.residual_rank
        weights = sum(item.in_features * item.out_features for item in sites)
        reserved = sum(term_cost(_low_rank(rank, item), 1, 1) for item in sites) / weights
        if reserved >= choice.target:
            raise Refusal(
                f"a residual of rank {rank} alone keeps {reserved:.1%}, "
                f"no less than the target of {choice.target:.1%}"
            )
    budget = int((choice.target - reserved) * dense)
    main = kind.layout(spec, site, budget)
    if spec.fills:
        return (main, *beside)
    cost = term_cost(main, readers, copies)
    if int(budget - cost) < 0:
        where = "alone" if residual is None else f"beside a residual of rank {residual.rank}"
        raise Refusal(
            f"{kind.name} {where} keeps {cost / dense + reserved:.1%}, "
            f"more than the target of {choice.target:.1%}"
        )
    if beside:
        return (main, *beside)
    rank = int(budget - cost) // (site.in_features + site.out_features)
    return (main, _low_rank(rank, site)) if rank else (main,)


def _low_rank(rank: int, site: Site) -> LowRankLayout:
    layout: LowRankLayout = structure("lowrank").layout(LowRankSpec(rank=rank), site)
    return layout


def kept_share(entry: LayerPlan, sharing: int) -> float:
    """Kept fraction of a layer, with its share of an input transform and of shared factors."""
    inputs = sum(_size(transform_shapes(term, "in")) for term in entry.parts[0].terms)
    terms = [term for part in entry.parts for term in part.terms]
    stored = sum(_size(shared_shapes(layout)) for layout in entry.own_factors.values())
    factors = sum(map(_shared_cost, terms)) - stored
    return (entry.parameters + factors - inputs * (1 - 1 / sharing)) / entry.dense_parameters


def _size(shapes: Shapes) -> int:
    return sum(map(prod, shapes.values()))


def _shared_cost(layout: Layout) -> float:
    """What a summand answers for of its shared factors, in parameters."""
    shared = shared_of(layout)
    return 0.0 if shared is None else _size(shared.shapes) * shared.share


def term_cost(layout: Layout, readers: int, writers: int) -> float:
    """Parameters of one summand, with its share of transforms and factors that others use too."""
    own = _size(structure(layout.structure).tensors(layout)) + _shared_cost(layout)
    after, before = (_size(transform_shapes(layout, side)) for side in ("out", "in"))
    return own + after / writers + before / readers


def path_of(source: SourceModel, entry: LayerPlan) -> str:
    """Name in the model of the parameter that a rewritten weight is."""
    return f"{source.keymap.runtime_name(entry.name) or entry.name}.{entry.parameter}"


def weight_keys(source: SourceModel, entry: LayerPlan) -> tuple[str, ...]:
    """Names in the checkpoint of the tensors that a rewritten weight is read from."""
    return source.keymap.sources(path_of(source, entry)).keys


def rewritten_names(source: SourceModel, layers: Sequence[LayerPlan]) -> list[str]:
    """Lists the model's parameters in whose place structures are stored."""
    weights = {path_of(source, entry): entry for entry in layers}
    biased = (name for name, own in weights.items() if own.bias and own.kind != "experts")
    return [*weights, *(f"{name.rpartition('.')[0]}.bias" for name in biased)]


def copied_keys(source: SourceModel, plan: Plan) -> list[str]:
    """Names of the tensors that are carried over as they are."""
    replaced = {key for entry in plan.entries for key in weight_keys(source, entry)}
    for entry in plan.embeddings:
        for name in tied_to(source, source.keymap.runtime_name(entry.name) or entry.name):
            replaced.update(source.keymap.sources(f"{name}.weight").keys)
    for other in plan.attention:  # queries that an attention does not need
        for layer in other.unused:
            path = source.keymap.runtime_name(layer.name) or layer.name
            leaves = ("weight", "bias") if layer.bias else ("weight",)
            replaced.update(source.keymap.sources(f"{path}.{leaf}").keys[0] for leaf in leaves)
    replaced |= {*source.keymap.stale, *source.keymap.unmatched}  # no model reads them
    return [key for key in source.store.keys() if key not in replaced]  # noqa: SIM118


def disk_bytes(source: SourceModel, plan: Plan, dtype: str | None) -> int:
    """Counts the bytes of all tensors, but for headers, of a model without dropped blocks."""
    store, keymap = source.store, source.keymap
    keys = copied_keys(source, plan)
    total = sum(prod(store.shape(key)) * _itemsize(store.dtype(key), dtype) for key in keys)
    for path in keymap.apart(rewritten_names(source, plan.entries)).values():
        own = store.dtype(keymap.sources(path).keys[0])
        total += keymap.model.get_parameter_or_buffer(path).numel() * _itemsize(own, dtype)
    for entry in plan.entries:
        kept = entry.parameters - entry.biases_saved
        total += kept * weight_bytes(source, entry, dtype)
    for other in plan.attention:
        path = keymap.runtime_name(other.like) or other.like
        own = store.dtype(keymap.sources(f"{path}.weight").keys[0])
        total += other.parameters * _itemsize(own, dtype)
    return total


def weight_bytes(source: SourceModel, entry: LayerPlan, dtype: str | None) -> int:
    """Bytes of one number of a rewritten weight."""
    return _itemsize(source.store.dtype(weight_keys(source, entry)[0]), dtype)


def _itemsize(own: torch.dtype, asked: str | None) -> int:
    if asked is None or not own.is_floating_point:
        return own.itemsize
    return getattr(torch, asked).itemsize


STAND_IN = 0.5
"""Kept fraction of layers whose sizes nothing but data can tell."""

_MOST, _STEP, _STEPS = 0.99, 0.8, 30  # down to a thousandth
_UNSPENT = 0.001  # of a budget, not worth another plan
_SHARES = tuple(round(n / 10**k, k) for k in (4, 3, 2) for n in range(10, 100))
"""Targets of two digits, from a thousandth on."""


def size_of(plan: Plan, source: SourceModel, recipe: Convert) -> int:
    """Measures a plan in its budget's unit; rewritten weights count for a fraction, else all."""
    budget = recipe.budget
    if budget is None or budget.is_fraction or not budget.is_size:
        return plan.structured_rewritten
    if budget.unit == "bytes":
        return disk_bytes(source, plan, recipe.dtype)
    return plan.parameters - plan.saved


PlanOf = Callable[[float | None], Plan]
"""Plans with a kept fraction; with None as large as the methods themselves say."""


def plan_within(recipe: Convert, source: SourceModel, plan_of: PlanOf) -> Plan:
    """Plans the same kept fraction for all layers: the largest that a budget allows."""
    budget = recipe.budget
    if budget is None:
        return plan_of(None)
    if not budget.is_size or budget.is_fraction:
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


def _smallest(fraction: float, plan_of: PlanOf) -> str | None:
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
    recipe: Convert, budget: Budget, source: SourceModel, plan_of: PlanOf
) -> tuple[float, Plan]:
    """Finds the fraction that comes close to an amount, in three plans where nothing refuses."""
    # A first plan tells which layers are rewritten, and so what the rest of the model takes. Sizes
    # are rounded down, so that a second keeps within the budget; a third spends what that left.
    empty = Plan(layers=(), parameters=sum(p.numel() for p in source.keymap.model.parameters()))
    whole, limit = size_of(empty, source, recipe), int(budget.limit)
    if whole <= limit:
        left = " with the tokens that stay" if source.vocabulary else ""
        text = f"`{budget}` asks for nothing: the dense model{left} has {whole:,} {budget.unit}"
        raise PlanError(text, "give a smaller number")
    fits: dict[float, Plan] = {}
    fraction = STAND_IN
    for _ in range(3):
        try:
            plan = plan_of(fraction)
        except PlanError:
            break
        over = size_of(plan, source, recipe) - limit
        counts_bytes = budget.unit == "bytes"
        pairs = [
            (entry, weight_bytes(source, entry, recipe.dtype) if counts_bytes else 1)
            for entry in plan.layers
        ]
        own = sum(entry.parameters * unit for entry, unit in pairs)
        dense = sum(entry.dense_parameters * unit for entry, unit in pairs)
        if over <= 0:
            fits[fraction] = plan
        if -_UNSPENT * limit <= over <= 0 or own <= over:
            break
        fraction = (own - over) / dense if over > 0 else min(fraction - over / dense, _MOST)
    if fits:
        best = max(fits)
        return best, fits[best]
    fraction, sizes = STAND_IN, []  # layers refuse to become as small as the others
    for _ in range(_STEPS):
        with suppress(PlanError):
            plan = plan_of(fraction)
            sizes.append(size_of(plan, source, recipe))
            if sizes[-1] <= limit:
                return fraction, plan
        fraction *= _STEP
    raise out_of_reach(budget, min(sizes, default=0))


def out_of_reach(budget: Budget, smallest: int) -> PlanError:
    """Says that a budget is too small, and how small it may be."""
    return PlanError(
        f"`{budget}` is out of reach: the smallest possible is {smallest:,} {budget.unit}",
        "embeddings and norms count and stay as they are; allow more, offer a method with "
        "smaller sizes, keep fewer layers dense, or drop blocks too",
    )
