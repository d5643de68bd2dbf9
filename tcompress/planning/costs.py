"""Sizes of layers and plans in parameters and bytes, and equal shares of a budget for all layers.

Where weights are stored in few bits, those of two and more axes are, structures' factors among
them; biases, norms, buffers and tiny tensors stay as they are. A word embedding, and a head that is
tied to it, has a width of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from tcompress.errors import PlanError
from tcompress.linalg.rounding import GROUP, Rounding, matrix_shape
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.limits import Budget
from tcompress.planning.entries import BudgetPlan, LayerPlan, Plan, Storage
from tcompress.planning.sites import low_rank_tables, module_path, roles_of, structure_of, tied_to
from tcompress.structures import Layout, Refusal, Site, Spec, structure
from tcompress.structures.base import Shapes, shared_of, transform_shapes
from tcompress.structures.lowrank import LowRankLayout, LowRankSpec


@dataclass(frozen=True)
class Choice:
    """Method and sizes of one layer."""

    method: Spec
    residual_rank: int = 0  # of the low-rank summand beside it; 0 leaves it to the target
    target: float | None = None
    """Kept fraction that the residual, or the method, fills up to, unless it fixes its size."""


def plan_terms(
    choice: Choice, site: Site, readers: int, copies: int = 1, *, calibrated: bool = True
) -> tuple[Layout, ...]:
    """Decide the summands of one weight whose input transform so many others read; may refuse."""
    kind = structure_of(choice.method)
    spec = choice.method.settled(calibrated=calibrated)
    rank = choice.residual_rank
    beside = (_low_rank(rank, site),) if rank else ()
    if choice.target is None or spec.fixes_size:
        return (kind.layout(spec, site), *beside)
    dense = site.in_features * site.out_features
    reserved = 0.0
    if beside:  # the same for all that share factors
        sites = site.sharing_sites or (site,)
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
        where = f"beside a residual of rank {beside[0].rank}" if beside else "alone"
        raise Refusal(
            f"{kind.name} {where} keeps {cost / dense + reserved:.1%}, "
            f"more than the target of {choice.target:.1%}"
        )
    if not beside and (rank := int(budget - cost) // (site.in_features + site.out_features)):
        beside = (_low_rank(rank, site),)
    return (main, *beside)


def _low_rank(rank: int, site: Site) -> LowRankLayout:
    layout: LowRankLayout = structure("lowrank").layout(LowRankSpec(rank=rank), site)
    return layout


def kept_share(entry: LayerPlan, sharing: int) -> float:
    """Kept fraction of a layer, with its share of an input transform and of shared factors."""
    readers = sharing * len(entry.parts) * entry.copies
    terms = (term for part in entry.parts for term in part.terms)
    each = sum(term_cost(term, readers, entry.copies) for term in terms)
    return each * entry.copies / entry.dense_parameters


def _size(shapes: Shapes) -> int:
    return sum(map(prod, shapes.values()))


def term_cost(layout: Layout, readers: int, writers: int) -> float:
    """Parameters of one summand, with its share of transforms and factors that others use too."""
    stored, shared = _size(structure(layout.structure).tensors(layout)), shared_of(layout)
    factors = _size(shared.shapes) * shared.share if shared else 0.0
    after, before = (_size(transform_shapes(layout, side)) for side in ("out", "in"))
    return stored + factors + after / writers + before / readers


def path_of(source: SourceModel, entry: LayerPlan) -> str:
    """Name in the model of the parameter that a rewritten weight is."""
    return f"{module_path(source, entry.name)}.{entry.parameter}"


def stored_key(source: SourceModel, name: str, leaf: str = "weight") -> str:
    """Name in the checkpoint of the first tensor behind a parameter of a planned module."""
    return source.keymap.sources(f"{module_path(source, name)}.{leaf}").keys[0]


def weight_keys(source: SourceModel, entry: LayerPlan) -> tuple[str, ...]:
    """Names in the checkpoint of the tensors that a rewritten weight is read from."""
    return source.keymap.sources(path_of(source, entry)).keys


def parameter_names(source: SourceModel, entry: LayerPlan) -> list[str]:
    """Names in the model of a rewritten weight and, where it has one, of its bias.

    Those of a table are the table and the heads that are tied to it.
    """
    path = path_of(source, entry)
    if entry.kind == "embedding":  # a tied head may have been stored a second time
        ties = tied_to(source, module_path(source, entry.name))
        return [path, *(f"{name}.weight" for name in ties)]
    has_bias = entry.bias and entry.kind != "experts"
    return [path, f"{path.rpartition('.')[0]}.bias"] if has_bias else [path]


def copied_keys(source: SourceModel, plan: Plan) -> list[str]:
    """Names of the tensors that are carried over as they are."""
    names = [name for entry in plan.embeddings for name in parameter_names(source, entry)]
    names += [path_of(source, entry) for entry in plan.layers]
    replaced = {key for name in names for key in source.keymap.sources(name).keys}
    for attention in plan.attention:  # queries that an attention does not need
        for layer in attention.unused:
            leaves = ("weight", "bias") if layer.bias else ("weight",)
            replaced.update(stored_key(source, layer.name, leaf) for leaf in leaves)
    replaced |= source.unread
    return [key for key in source.store.keys() if key not in replaced]  # noqa: SIM118


def disk_bytes(source: SourceModel, plan: Plan, dtype: str | None) -> int:
    """Count the bytes of all tensors, but for headers, of a model without dropped blocks."""
    store, keymap = source.store, source.keymap
    rounding_of = roundings(source, plan.storage, plan.entries)

    def size(key: str, shape: Sequence[int], like: str) -> int:
        stored = stored_dtype(source, like, dtype)
        rounding = rounding_of(key, shape, stored)
        return prod(shape) * stored.itemsize if rounding is None else rounding.nbytes(shape)

    total = sum(size(key, store.shape(key), key) for key in copied_keys(source, plan))
    names = (name for entry in plan.entries for name in parameter_names(source, entry))
    for name, path in keymap.apart(names).items():
        shape = keymap.model.get_parameter_or_buffer(path).shape
        total += size(name, shape, keymap.sources(path).keys[0])
    rewritten = [(item.stored_shapes, weight_keys(source, item)[0]) for item in plan.entries]
    rewritten += [(item.tensor_shapes, stored_key(source, item.like)) for item in plan.attention]
    for shapes, like in rewritten:
        total += sum(size(name, shape, like) for name, shape in shapes.items())
    saved = (entry.biases_saved * weight_bytes(source, entry, dtype) for entry in plan.entries)
    return total - sum(saved)


def weight_bytes(source: SourceModel, entry: LayerPlan, dtype: str | None) -> int:
    """Bytes of one number of a rewritten weight."""
    return stored_dtype(source, weight_keys(source, entry)[0], dtype).itemsize


def unit_of(recipe: Convert, source: SourceModel, entry: LayerPlan, plan: Plan) -> float:
    """What one number of a rewritten weight counts in a budget; bytes have a share of a scale."""
    if recipe.budget is None or recipe.budget.unit != "bytes":
        return 1.0
    rounding = None if plan.storage is None else plan.storage.weights
    if rounding is None:
        return weight_bytes(source, entry, recipe.dtype)
    return rounding.bits / 8 + 2 / (rounding.group or entry.in_features)


def stored_dtype(source: SourceModel, key: str, dtype: str | None) -> torch.dtype:
    """Dtype in which what is made of a tensor is stored; without one asked for, the tensor's."""
    stored = source.store.dtype(key)
    target: torch.dtype = getattr(torch, dtype) if dtype and stored.is_floating_point else stored
    return target


SMALLEST = 2048  # numbers of a tensor that is rounded: fewer are not worth their scales
TRANSFORM_BITS = 8  # least of a transform's generators: an angle turns all that a layer reads
STAND_IN_BITS = 4  # bits of a word embedding until data tells what a budget of bytes makes of it
TABLE_RANKS = (0.5, 0.25, 0.125)
"""Kept fractions of a word embedding of low rank that a budget of bytes chooses from, in few bits:
wider factors lose as much as fewer bits do."""


def planned_storage(recipe: Convert, source: SourceModel) -> Storage | None:
    """Plan the widths that a recipe asks for; None where nothing is rounded.

    A `PlanError` says that bits are asked for a word embedding, and the model has none.
    """
    if not (recipe.rounds or recipe.chooses_table):
        return None
    has_table = bool(roles_of(source).embeddings)
    if recipe.embedding_bits is not None and not has_table:
        raise PlanError(
            "`embedding_bits` is about a word embedding, and the model has none",
            "leave it out; `bits` is for all other weights",
        )
    table: Any = STAND_IN_BITS if recipe.chooses_table else recipe.embedding_bits or recipe.bits
    weights, embeddings = (
        None if bits in (None, "none") else Rounding.usual(bits, recipe.group_size)
        for bits in (recipe.bits, table if has_table else None)
    )
    return Storage(weights=weights, embeddings=embeddings) if weights or embeddings else None


RoundingOf = Callable[[str, Sequence[int], torch.dtype], Rounding | None]
"""Rounding of a tensor by its name, shape and dtype; None for one that is stored as it is."""


def roundings(
    source: SourceModel, storage: Storage | None, entries: Sequence[LayerPlan]
) -> RoundingOf:
    """Look up what in a checkpoint, and of a plan's entries, has a width of its own."""
    keymap, tables = source.keymap, roles_of(source).embeddings
    if storage is None:
        return lambda *_: None
    weights = [f"{name}.weight" for path in tables for name in (path, *tied_to(source, path))]
    buffers = [name for name, _ in keymap.model.named_buffers()]
    table_keys, buffer_keys = (
        {key for name in names if keymap.has(name) for key in keymap.sources(name).keys}
        for names in (weights, buffers)
    )
    factors = tuple(f"{entry.name}.tc_" for entry in entries if entry.kind == "embedding")
    transforms = {entry.stored_name(name) for entry in entries for name in entry.transform_shapes}

    def rounding_of(key: str, shape: Sequence[int], dtype: torch.dtype) -> Rounding | None:
        if not dtype.is_floating_point or key in buffer_keys:
            return None
        if len(shape) < 2 or prod(shape) < SMALLEST or matrix_shape(shape)[1] < GROUP:
            return None
        is_table = key in table_keys or key.startswith(factors)
        rounding = storage.embeddings if is_table else storage.weights
        if rounding is not None and key in transforms:
            return Rounding.usual(max(rounding.bits, TRANSFORM_BITS), rounding.group)
        return rounding

    return rounding_of


STAND_IN = 0.5  # kept fraction of layers whose sizes nothing but data can tell
_MOST, _STEP, _STEPS = 0.99, 0.8, 30  # down to a thousandth
UNSPENT = 0.001  # of a budget, not worth another plan, or another try
_TABLE_SHARE = 0.25  # of a word embedding, where its low rank is pointed to
_SHARES = tuple(round(n / 10**k, k) for k in (4, 3, 2) for n in range(10, 100))
"""Targets of two digits, from a thousandth on."""


def size_of(plan: Plan, source: SourceModel, recipe: Convert) -> int:
    """Measure a plan in its budget's unit; rewritten weights count for a fraction, else all."""
    budget = recipe.budget
    if budget is None or budget.is_fraction or not budget.is_size:
        return plan.structured_rewritten
    if budget.unit == "bytes":
        return disk_bytes(source, plan, recipe.dtype)
    return plan.parameters - plan.saved


PlanOf = Callable[[float | None], Plan]
"""Plans with a kept fraction; with None as large as the methods themselves say."""


def plan_within(recipe: Convert, source: SourceModel, plan_of: PlanOf) -> Plan:
    """Plan the same kept fraction for all layers: the largest that a budget allows."""
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
    """Say from which target on layers are rewritten, if a larger one than this helps at all."""

    @cache
    def rewritten(share: float) -> int:
        try:
            return len(plan_of(share).layers)
        except PlanError:
            return 0

    shares = [share for share in _SHARES if share > fraction]
    reachable = rewritten(shares[-1]) if shares else 0
    if not reachable:
        return None
    first, last = (shares[bisect_left(shares, n, key=rewritten)] for n in (1, reachable))
    rest = f" that rewrites a layer, and {last:g} rewrites {reachable}" if last > first else ""
    return f"{first:g} is the smallest target{rest}"


def _largest(
    recipe: Convert, budget: Budget, source: SourceModel, plan_of: PlanOf
) -> tuple[float, Plan]:
    """Find the fraction that comes close to an amount, in three plans where nothing refuses."""
    # A first plan tells which layers are rewritten, and so what the rest of the model takes. Sizes
    # are rounded down, so that a second keeps within the budget; a third spends what that left.
    empty = Plan(layers=(), parameters=sum(p.numel() for p in source.keymap.model.parameters()))
    dense_size, limit = size_of(empty, source, recipe), int(budget.limit)
    if dense_size <= limit:
        which = " with the tokens that stay" if source.vocabulary else ""
        has = f"the dense model{which} has {dense_size:,} {budget.unit}"
        raise PlanError(f"`{budget}` asks for nothing: {has}", "give a smaller number")
    fits: dict[float, Plan] = {}
    fraction = STAND_IN
    for _ in range(3):
        try:
            plan = plan_of(fraction)
        except PlanError:
            break
        over = size_of(plan, source, recipe) - limit
        units = [unit_of(recipe, source, entry, plan) for entry in plan.layers]
        structured = sum(e.parameters * unit for e, unit in zip(plan.layers, units, strict=True))
        dense = sum(e.dense_parameters * unit for e, unit in zip(plan.layers, units, strict=True))
        if over <= 0:
            fits[fraction] = plan
        if -UNSPENT * limit <= over <= 0 or structured <= over:
            break
        fraction = (structured - over) / dense if over > 0 else min(fraction - over / dense, _MOST)
    if fits:
        return max(fits), fits[max(fits)]
    fraction, sizes = STAND_IN, dict[int, Plan]()  # layers refuse to become as small as the others
    for _ in range(_STEPS):
        with suppress(PlanError):
            plan = plan_of(fraction)
            size = size_of(plan, source, recipe)
            sizes.setdefault(size, plan)
            if size <= limit:
                return fraction, plan
        fraction *= _STEP
    smallest = sizes[min(sizes)] if sizes else plan_of(None)
    may_shrink = recipe.chooses_table and not smallest.embeddings
    if may_shrink and (tables := low_rank_tables(source, min(TABLE_RANKS))):
        # What data will tell may be as small as this: it is the stand-in in place of few bits.
        changed = {"embeddings": tables}
        return _largest(recipe, budget, source, lambda s: plan_of(s).model_copy(update=changed))
    raise out_of_reach(budget, source, recipe, smallest)


def out_of_reach(
    budget: Budget, source: SourceModel, recipe: Convert, smallest: Plan, size: int | None = None
) -> PlanError:
    """Say that a budget is too small, how small it may be, and what else would make it smaller.

    The `smallest` plan has the smallest sizes that layers take; candidates may have a smaller size.
    """
    size = size_of(smallest, source, recipe) if size is None else size
    if budget.unit != "bytes":
        return PlanError(
            f"`{budget}` is out of reach: the smallest possible is {size:,} {budget.unit}",
            "embeddings and norms count and stay as they are; allow more, offer a method with "
            "smaller sizes, keep fewer layers dense, or drop blocks too",
        )
    fixed = size - disk_bytes(source, smallest, recipe.dtype)
    smaller = {
        options: fixed + disk_bytes(source, smallest.model_copy(update=changes), dtype)
        for options, dtype, changes in _other_options(source, recipe, smallest)
    }
    ways = sorted(smaller.items(), key=lambda way: way[1])
    others = ", ".join(f"`{options}` {_megabytes(it)}" for options, it in ways if it < size)
    return PlanError(
        f"`{budget}` is out of reach: the smallest possible is {_megabytes(size)}",
        (f"the smallest with each of these added: {others}; " if others else "")
        + "or allow more, keep fewer layers dense, or drop blocks too",
    )


def _megabytes(bytes_: int) -> str:
    """Write bytes so that what is read off is enough: rounded up, to a hundredth."""
    return f"{-(-bytes_ // 10**4) / 100:.2f} MB"


def _other_options(
    source: SourceModel, recipe: Convert, plan: Plan
) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """List options that make a model smaller, the dtype, and what they change in a plan."""
    current = plan.storage or Storage()
    for bits in (8, 4):
        rounding = Rounding.usual(bits, recipe.group_size)
        storage = current.model_copy(update={"embeddings": rounding})
        yield f"--embedding-bits {bits}", recipe.dtype, {"storage": storage}
        both = Storage(weights=rounding, embeddings=rounding)
        table = f" --embedding-bits {bits}" if recipe.embedding_bits else ""
        yield f"--bits {bits}{table}", recipe.dtype, {"storage": both}
    if recipe.embeddings is None and (tables := low_rank_tables(source, _TABLE_SHARE)):
        text = f"--embeddings svd --embedding-target {_TABLE_SHARE:g}"
        if recipe.chooses_table and current.embeddings is not None:
            text = f"--embedding-bits {current.embeddings.bits} {text}"
        yield text, recipe.dtype, {"embeddings": tables}
    if recipe.dtype is None:
        yield "--dtype bfloat16", "bfloat16", {}
