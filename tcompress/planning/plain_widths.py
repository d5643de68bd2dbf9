"""Plain models: one width for all layers, which the family's own config can say."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache

import torch

from tcompress.errors import PlanError, after_colon
from tcompress.models import SourceModel
from tcompress.models.names import stands_alone
from tcompress.models.narrower import Shape, find_keys
from tcompress.options import Convert
from tcompress.planning.costs import STAND_IN, parameter_names, size_of
from tcompress.planning.entries import BudgetPlan, LayerPlan, Plan
from tcompress.planning.sites import couplings, roles_of
from tcompress.structures.modules.linear import Channels

PlanOf = Callable[[Convert], Plan]  # plan of a recipe that gives the width


def plan_plain(recipe: Convert, source: SourceModel, plan_of: PlanOf) -> Plan:
    """Plan the largest width that a budget allows; one of time is looked at when converting."""
    budget, widths = recipe.budget, possible_widths(source)
    if not widths and (budget or recipe.head_size is None):
        raise _refusal(source, [NO_NEURONS])
    if budget is None:
        return with_keys_of(plan_of(recipe), recipe, source)
    share = _largest(recipe, source, plan_of, widths) if budget.is_size else STAND_IN
    plan = with_keys_of(plan_of(with_width(recipe, share)), recipe, source)
    chosen = "later" if recipe.time_budget else "uniform"
    facts = BudgetPlan(kind=budget.kind, limit=budget.limit, chosen=chosen, fraction=plan.kept)
    return plan.model_copy(update={"budget": facts})


def possible_widths(source: SourceModel) -> range:
    """List numbers of neurons that the widest feed-forward may keep; it stops at all of them."""
    sizes = (
        (coupling.size, coupling.step)
        for block in roles_of(source).blocks
        for coupling in couplings(block)
        if coupling.kind == "neurons"
    )
    widest, step = max(sizes, default=(1, 1))
    return range(step, widest, step)


def width_of(plan: Plan) -> int:
    """Count the neurons that the widest feed-forward keeps."""
    neurons = (item for entry in plan.layers for item in _channels(entry) if not item.padded)
    return max((item.size, item.kept) for item in neurons)[1]


def with_width(recipe: Convert, fraction: float) -> Convert:
    """The same with a share of neurons in place of a budget."""
    return recipe.with_target(None).model_copy(update={"keep_neurons": fraction})


def _largest(recipe: Convert, source: SourceModel, plan_of: PlanOf, widths: range) -> float:
    budget = recipe.budget
    assert budget is not None

    @cache
    def size(width: int) -> float:
        plan = plan_of(with_width(recipe, width / widths.stop))
        return plan.kept if budget.is_fraction else size_of(plan, source, recipe)

    index = bisect_right(widths, budget.limit, key=size)
    if index:
        return widths[index - 1] / widths.stop
    smallest = f"{size(widths[0]):,} {budget.unit}"
    if budget.is_fraction:
        smallest = f"{size(widths[0]):.3g} of the rewritten layers"
    raise PlanError(
        f"`{budget}` is out of reach of a plain model: the smallest possible is {smallest}",
        "what its config has no width for stays as large as it is; allow more, drop blocks too, or "
        "leave `--plain` out",
    )


NO_NEURONS = "no feed-forward of it is known to have neurons that could go"


def with_keys_of(plan: Plan, recipe: Convert, source: SourceModel) -> Plan:
    """Complete a plan by the keys of `config.json` that say it; fails naming all that none can."""
    if not stands_alone(source.settings):
        raise _refusal(source, ["its class comes with tcompress"])
    narrowed = [(channels, entry) for entry in plan.layers for channels in _channels(entry)]
    keys: dict[str, int] = {}
    problems: list[str] = []
    same = "all its feed-forwards would keep their width" if possible_widths(source) else NO_NEURONS
    for heads, requested, nothing in (
        (False, recipe.head_size is None or recipe.keep_neurons is not None, same),
        (True, recipe.head_size is not None, "no attention of it can have smaller heads"),
    ):
        chosen = [(channels, entry) for channels, entry in narrowed if channels.padded == heads]
        shapes = {
            name: shape
            for _, entry in chosen
            for name, shape in shapes_of(entry, source).items()
            if shape != source.keymap.model.get_parameter(name).shape
        }
        if not shapes:
            problems += [nothing] if requested else []
            continue
        sizes = sorted({(channels.size, channels.kept) for channels, _ in chosen})
        new_keys, wrong = find_keys(source, sizes, shapes)
        keys |= new_keys
        changes = ", ".join(f"{before} to {after}" for before, after in sizes)
        what = f"{'heads' if heads else 'feed-forwards'} from {changes}"
        problems += [f"{what}: {text}" for text in wrong]
    if problems:
        raise _refusal(source, problems)
    return plan.model_copy(update={"plain": keys})


def _channels(entry: LayerPlan) -> Iterator[Channels]:
    if not entry.is_plain:
        raise PlanError(
            f"layer `{entry.name}` has a structure, which no plain model has",
            "leave `plain` out, or take the method `width`",
        )
    yield from (part.channels for part in entry.parts if part.channels)
    if entry.reads:
        yield entry.reads


def shapes_of(entry: LayerPlan, source: SourceModel) -> dict[str, Shape]:
    """Shapes of a layer's weight and bias in a plain model, by name in the model."""
    lead = (entry.experts,) if entry.experts else ()
    matrix = torch.empty(*lead, entry.outputs_left, entry.inputs_left, device="meta")
    shapes: tuple[Shape, ...] = (tuple(entry.as_stored(matrix).shape), (entry.outputs_left,))
    return dict(zip(parameter_names(source, entry), shapes, strict=False))


def _refusal(source: SourceModel, problems: list[str]) -> PlanError:
    kind = source.config.model_type
    return PlanError(
        f"a plain `{kind}` model cannot be narrower like this:{after_colon(problems)}",
        "leave `plain` out, for a model that loads with `import tcompress`, or what cannot be "
        "said; `drop_layers` alone makes plain models too",
    )
