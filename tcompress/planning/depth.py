"""The blocks of a model that stay: what a recipe asks for, in terms of the model's stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import takewhile
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
    """List the stacks of a model by the part of their path that tells them apart, as `decoder`."""
    counts = Counter(block.name.rpartition(".")[0] for block in roles.blocks)
    levels = zip(*(path.split(".") for path in counts), strict=False)
    common = len([*takewhile(lambda steps: len({*steps}) == 1, levels)])
    steps = {path: path.split(".")[common:] for path in counts}

    def name_of(path: str) -> str:
        """Name a stack by as many steps as no other one begins with."""
        lengths = range(1, len(steps[path]) + 1)
        alike = (sum(it[:n] == steps[path][:n] for it in steps.values()) for n in lengths)
        enough = next((n for n, count in zip(lengths, alike, strict=True) if count == 1), None)
        return ".".join(steps[path][:enough]) or path

    return tuple(
        StackPlan(name=name_of(path), path=path, blocks=count, kept=tuple(range(count)))
        for path, count in counts.items()
    )


def plan_depth(recipe: Convert, source: SourceModel) -> DepthPlan:
    """Plan which blocks stay; those that data will choose are stood in for by equal distances."""
    stacks = stacks_of(roles_of(source))
    if not stacks:
        raise PlanError("no blocks were found in this model, so none can be dropped")
    each = _listed(stacks)
    if recipe.append_layers is not None:
        if len(stacks) > 1:
            text = f"`append_layers` puts blocks on top of one stack, and this model has {each}"
            raise PlanError(text, "leave `append_layers` out")
        kept = stacks[0].kept + stacks[0].kept[-1:] * recipe.append_layers
        copied = stacks[0].model_copy(update={"kept": kept})
        return DepthPlan(stacks=(copied,), chosen="asked")
    if recipe.chooses_depth:
        if len(stacks) > 1:
            raise PlanError(
                f"`drop_layers: auto` weighs one stack of blocks, and this model has {each}",
                f"say how many blocks go, such as `--drop-layers {stacks[-1].name}:2`",
            )
        [stack] = stacks
        if stack.blocks < 2:
            text = "this model has no blocks that could be dropped: leave `drop_layers` out"
            raise PlanError(text)
        first = len(fixed_blocks(source, stack.path))  # that may go
        shorter = tuple(index for index in stack.kept if index != first)
        # Any number may have to go: models that lose more than blocks are refused at one.
        cut_blocks(source, {stack.path: shorter})
        return DepthPlan(stacks=stacks, chosen="later")
    dropped = "spread" if recipe.calibration.is_none else "later"
    chosen = dropped if recipe.keep_layers is None else "asked"
    return DepthPlan(stacks=_requested(recipe, stacks, source), chosen=chosen)


def _requested(recipe: Convert, stacks: Stacks, source: SourceModel) -> Stacks:
    """Blocks that stay of every stack, where blocks or a number of them are named."""
    keeps = recipe.keep_layers is not None
    requests: Any = recipe.keep_layers if keeps else recipe.drop_layers
    if not isinstance(requests, Mapping):
        if len(stacks) > 1:
            option = "--keep-layers" if keeps else "--drop-layers"
            single = isinstance(requests, int)
            numbers = requests if single else ",".join(map(str, requests))
            hint = f"say which one is meant, such as `{option} {stacks[-1].name}:{numbers}`"
            text = f"this model has {len(stacks)} stacks of blocks: {_listed(stacks)}"
            raise PlanError(text, hint)
        requests = {stacks[0].name: requests}
    by_name = {stack.name: stack for stack in stacks}
    problems = [
        f"there is no stack `{name}`; stacks are {listed(list(by_name))}"
        for name in requests
        if name not in by_name
    ]
    for name, request in requests.items():
        if name in by_name:
            problems += _problems(request, by_name[name])
    if problems:
        hint = "`tcompress inspect` lists the blocks, which count from 0"
        raise PlanError("; ".join(problems), hint)
    return tuple(_chosen(requests.get(stack.name), stack, source) for stack in stacks)


def _listed(stacks: Stacks) -> str:
    return ", ".join(f"`{stack.name}` with {stack.blocks}" for stack in stacks)


def _problems(request: Any, stack: StackPlan) -> list[str]:
    """Errors of a number of blocks to drop, or of a list of those to keep."""
    blocks, name = stack.blocks, stack.name
    if isinstance(request, int):
        allowed = f"allowed are 1 to {blocks - 1}"
        refusal = f"{request} blocks of `{name}` are to be dropped, {allowed}"
        return [] if 1 <= request < blocks else [refusal]
    problems = []
    missing = sorted({index for index in request if not 0 <= index < blocks})
    if missing:
        numbers = ", ".join(map(str, missing))
        problems.append(f"there is no block {numbers}: `{name}` has 0 to {blocks - 1}")
    if list(request) != sorted(set(request)):
        numbers = ", ".join(map(str, request))
        expected = "expected are different blocks in ascending order"
        problems.append(f"`keep_layers` is {numbers}, {expected}")
    if not problems and len(request) in (0, blocks):
        which = "all" if request else "none"
        problems.append(f"`keep_layers` keeps {which} of the {blocks} blocks of `{name}`")
    return problems


def _chosen(request: Any, stack: StackPlan, source: SourceModel) -> StackPlan:
    """A stack with the blocks that stay: all of them, those asked for, or so many fewer."""
    if request is None:
        return stack
    if isinstance(request, int):
        count = stack.blocks - request
        first = bool(fixed_blocks(source, stack.path))
        request = (0,) if first and count == 1 else spread(stack.blocks, count, first=first)
    return stack.model_copy(update={"kept": tuple(request)})


def spread(blocks: int, count: int, *, first: bool = True) -> tuple[int, ...]:
    """Choose blocks at equal distances, the last one among them, and the `first` where asked."""
    if not first or count == 1:
        return tuple((index + 1) * blocks // count - 1 for index in range(count))
    return tuple(index * (blocks - 1) // (count - 1) for index in range(count))


def within(recipe: Convert, depth: DepthPlan, source: SourceModel) -> Convert:
    """Adapt a recipe to the blocks that stay; where data chose them, a fraction is one of all."""
    inner, budget = recipe.within_blocks, recipe.budget
    if recipe.append_layers and recipe.attention and recipe.attention_layers is None:
        new = tuple(range(depth.blocks, depth.kept))
        inner = inner.model_copy(update={"attention_layers": new})
    if not recipe.chooses_depth or depth.kept == depth.blocks or budget is None:
        return inner
    cut = cut_to(source, depth)
    if not budget.is_fraction:
        dense = Plan(layers=(), parameters=sum(p.numel() for p in cut.keymap.model.parameters()))
        return inner.without_method if size_of(dense, cut, recipe) <= budget.limit else inner
    before, after = (
        sum(layer.parameters for layer in roles_of(model).layers) for model in (source, cut)
    )
    fraction = budget.limit * before / after
    return inner.without_method if fraction >= 1 else inner.with_target(fraction)


def cut_to(source: SourceModel, depth: DepthPlan) -> SourceModel:
    """Describe the model with the blocks that are planned."""
    stacks = (stack for stack in depth.stacks if len(stack.kept) != stack.blocks)
    return cut_blocks(source, {stack.path: stack.kept for stack in stacks})


def with_depth(plan: Plan, depth: DepthPlan, source: SourceModel) -> Plan:
    """Complete the plan of a model that lost blocks, in which what was left is the dense one."""
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
