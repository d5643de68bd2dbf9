"""Which blocks of a model stay: what a recipe asks for, in terms of the model's stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tcompress.errors import PlanError, listed
from tcompress.models import SourceModel
from tcompress.models.fewer_layers import cut_blocks, fixed_blocks
from tcompress.options import Convert
from tcompress.planning.costs import size_of
from tcompress.planning.entries import DepthPlan, Plan, StackPlan
from tcompress.planning.sites import roles_of
from tcompress.roles import Roles

Stacks = tuple[StackPlan, ...]


def stacks_of(roles: Roles) -> Stacks:
    """Lists the stacks of a model by the part of their path that tells them apart, as `decoder`."""
    counts = Counter(block.name.rpartition(".")[0] for block in roles.blocks)
    found, others = [], [other.split(".") for other in counts]
    for path, count in counts.items():
        apart = (
            step
            for index, step in enumerate(path.split("."))
            if any(other[index : index + 1] != [step] for other in others)
        )
        kept = tuple(range(count))
        found.append(StackPlan(name=next(apart, path), path=path, blocks=count, kept=kept))
    return tuple(found)


def plan_depth(recipe: Convert, source: SourceModel) -> DepthPlan:
    """Plans which blocks stay; those that data will choose are stood in for by equal distances."""
    whole = stacks_of(roles_of(source))
    if not whole:
        raise PlanError("no blocks were found in this model, so none can be dropped")
    each = _listed(whole)
    if recipe.append_layers is not None:
        if len(whole) > 1:
            text = f"`append_layers` puts blocks on top of one stack, and this model has {each}"
            raise PlanError(text, "leave `append_layers` out")
        kept = (*whole[0].kept, *[whole[0].kept[-1]] * recipe.append_layers)
        copied = whole[0].model_copy(update={"kept": kept})
        return DepthPlan(stacks=(copied,), chosen="asked")
    if recipe.chooses_depth:
        if len(whole) > 1:
            raise PlanError(
                f"`drop_layers: auto` weighs one stack of blocks, and this model has {each}",
                f"say how many blocks go, such as `--drop-layers {whole[-1].name}:2`",
            )
        _check_droppable(whole[0], source)
        return DepthPlan(stacks=whole, chosen="later")
    stacks = _as_asked(recipe, whole, source)
    spread_out = "spread" if recipe.calibration.is_none else "later"
    return DepthPlan(stacks=stacks, chosen=spread_out if recipe.keep_layers is None else "asked")


def _as_asked(recipe: Convert, whole: Stacks, source: SourceModel) -> Stacks:
    """What stays of every stack, where blocks or a number of them are named."""
    keeps = recipe.keep_layers is not None
    asked: Any = recipe.keep_layers if keeps else recipe.drop_layers
    if not isinstance(asked, Mapping):
        if len(whole) > 1:
            option = "--keep-layers" if keeps else "--drop-layers"
            numbers = asked if isinstance(asked, int) else ",".join(map(str, asked))
            hint = f"say which one is meant, such as `{option} {whole[-1].name}:{numbers}`"
            raise PlanError(f"this model has {len(whole)} stacks of blocks: {_listed(whole)}", hint)
        asked = {whole[0].name: asked}
    known = {stack.name: stack for stack in whole}
    problems = [
        f"there is no stack `{name}`; stacks are {listed(list(known))}"
        for name in asked
        if name not in known
    ]
    for name, wanted in asked.items():
        if name in known:
            problems += _problems(wanted, known[name])
    if problems:
        hint = "`tcompress inspect` lists the blocks, which count from 0"
        raise PlanError("; ".join(problems), hint)
    return tuple(_chosen(asked.get(stack.name), stack, source) for stack in whole)


def _listed(stacks: Stacks) -> str:
    return ", ".join(f"`{stack.name}` with {stack.blocks}" for stack in stacks)


def _check_droppable(stack: StackPlan, source: SourceModel) -> None:
    """Makes sure that any number of blocks may have to go."""
    fixed = set(fixed_blocks(source, stack.path))
    free = [index for index in stack.kept if index not in fixed]
    if stack.blocks < 2 or not free:
        raise PlanError("this model has no blocks that could be dropped: leave `drop_layers` out")
    some = tuple(index for index in stack.kept if index != free[0])
    cut_blocks(source, {stack.path: some})  # refuses models that lose more than blocks


def _problems(wanted: Any, stack: StackPlan) -> list[str]:
    """What is wrong with a number of blocks to drop, or with a list of those to keep."""
    blocks = stack.blocks
    if isinstance(wanted, int):
        if 1 <= wanted < blocks:
            return []
        allowed = f"allowed are 1 to {blocks - 1}"
        return [f"{wanted} blocks of `{stack.name}` are to be dropped, {allowed}"]
    where = f"of the {blocks} blocks of `{stack.name}`"
    if not wanted:
        return [f"`keep_layers` keeps none {where}"]
    problems = []
    outside = sorted({index for index in wanted if not 0 <= index < blocks})
    if outside:
        lost = ", ".join(map(str, outside))
        problems.append(f"there is no block {lost}: `{stack.name}` has 0 to {blocks - 1}")
    if list(wanted) != sorted(set(wanted)):
        text = ", ".join(map(str, wanted))
        expected = "expected are different blocks in ascending order"
        problems.append(f"`keep_layers` is {text}, {expected}")
    if not problems and len(wanted) == blocks:
        problems.append(f"`keep_layers` keeps all {where}")
    return problems


def _chosen(asked: Any, stack: StackPlan, source: SourceModel) -> StackPlan:
    """A stack with what stays of it: all of it, the blocks asked for, or so many fewer."""
    if asked is None:
        return stack
    if isinstance(asked, int):
        count = stack.blocks - asked
        first = bool(fixed_blocks(source, stack.path))
        asked = (0,) if first and count == 1 else spread(stack.blocks, count, first=first)
    return stack.model_copy(update={"kept": tuple(asked)})


def spread(blocks: int, count: int, *, first: bool = True) -> tuple[int, ...]:
    """Chooses blocks at equal distances, the last one among them, and the `first` where asked."""
    if not first or count == 1:
        return tuple((index + 1) * blocks // count - 1 for index in range(count))
    return tuple(index * (blocks - 1) // (count - 1) for index in range(count))


def within(recipe: Convert, depth: DepthPlan, source: SourceModel) -> Convert:
    """What is asked of the blocks that stay; where data chose them, a fraction is one of all."""
    inner, budget = recipe.within_blocks, recipe.budget
    if recipe.append_layers and recipe.attention and recipe.attention_layers is None:
        new = tuple(range(depth.blocks, depth.kept))
        inner = inner.model_copy(update={"attention_layers": new})
    if not recipe.chooses_depth or depth.kept == depth.blocks or budget is None:
        return inner
    cut = cut_to(source, depth)
    if budget.is_fraction:
        before, after = (
            sum(i.in_features * i.out_features * (i.experts or 1) for i in roles.layers)
            for roles in (roles_of(source), roles_of(cut))
        )
        fraction = budget.limit * before / after
        return inner.without_method if fraction >= 1 else inner.with_target(fraction)
    dense = Plan(layers=(), parameters=sum(p.numel() for p in cut.keymap.model.parameters()))
    return inner.without_method if size_of(dense, cut, recipe) <= budget.limit else inner


def cut_to(source: SourceModel, depth: DepthPlan) -> SourceModel:
    """Describes the model with the blocks that are planned."""
    stacks = (stack for stack in depth.stacks if len(stack.kept) != stack.blocks)
    return cut_blocks(source, {stack.path: stack.kept for stack in stacks})


def with_depth(plan: Plan, depth: DepthPlan, source: SourceModel) -> Plan:
    """Completes the plan of a model that lost blocks, in which what was left is the dense one."""
    model = source.keymap.model
    blocks = [model.get_submodule(block.name) for block in roles_of(source).blocks]
    total = sum(item.numel() for item in model.parameters()) + source.rows_gone
    gone = plan.dropped_parameters or total - plan.parameters
    return plan.model_copy(
        update={
            "coverage": plan.coverage and plan.coverage.without(max(0, gone)),
            "depth": depth,
            "parameters": total,
            "block_parameters": sum(p.numel() for block in blocks for p in block.parameters()),
            "dropped_parameters": gone,
        }
    )
