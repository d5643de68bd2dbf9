"""Which blocks of a model stay: what a recipe asks for, in terms of the model's stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tcompress.errors import PlanError, listed
from tcompress.models import SourceModel
from tcompress.models.fewer_layers import cut_blocks, fixed_blocks
from tcompress.options import Convert
from tcompress.planning.costs import size_of
from tcompress.planning.entries import DepthPlan, Plan, StackPlan
from tcompress.roles import Anatomy, anatomy_of


def stacks_of(anatomy: Anatomy) -> tuple[StackPlan, ...]:
    """Lists the stacks of a model, with all their blocks.

    A stack is called by the part of its path that tells it from the others, such as `decoder`.
    """
    members: dict[str, list[str]] = {}
    for block in anatomy.blocks:
        path, _, number = block.name.rpartition(".")
        members.setdefault(path, []).append(number)
    return tuple(
        StackPlan(
            name=_name(path, list(members)),
            path=path,
            blocks=len(numbers),
            kept=tuple(range(len(numbers))),
        )
        for path, numbers in members.items()
    )


def _name(path: str, others: Sequence[str]) -> str:
    steps = path.split(".")
    for index, step in enumerate(steps):
        if any(other.split(".")[index : index + 1] != [step] for other in others):
            return step
    return path


def plan_depth(recipe: Convert, source: SourceModel) -> DepthPlan | None:
    """Plans which blocks stay; no weight is read.

    Blocks that data will choose are stood in for by others at equal distances.

    Args:
        recipe: What to do.
        source: The model.

    Raises:
        PlanError: The model has no such blocks; all problems are in one message.
    """
    if not recipe.cuts:
        return None
    whole = stacks_of(anatomy_of(source.keymap.model))
    if not whole:
        raise PlanError("no blocks were found in this model, so none can be dropped")
    if recipe.append_layers is not None:
        return DepthPlan(stacks=_with_copies(whole, recipe.append_layers), chosen="asked")
    if recipe.weighs_depth:
        return DepthPlan(stacks=_one_stack(whole, source), chosen="later")
    kept = recipe.keep_layers is not None
    asked = _by_stack(recipe.keep_layers if kept else recipe.drop_layers, whole, kept=kept)
    _check(asked, whole, kept=kept)
    stacks = tuple(
        stack
        if stack.name not in asked
        else stack.model_copy(update={"kept": _stay(asked[stack.name], stack, source)})
        for stack in whole
    )
    chosen = "asked" if kept else "spread" if recipe.calibration.source == "none" else "later"
    return DepthPlan(stacks=stacks, chosen=chosen)


def _with_copies(stacks: tuple[StackPlan, ...], count: int) -> tuple[StackPlan, ...]:
    """The last block once more, so many times.

    Raises:
        PlanError: There are several stacks.
    """
    if len(stacks) > 1:
        each = ", ".join(f"`{stack.name}` with {stack.blocks}" for stack in stacks)
        raise PlanError(
            f"`append_layers` puts blocks on top of one stack, and this model has {each}",
            "leave `append_layers` out",
        )
    kept = (*stacks[0].kept, *[stacks[0].kept[-1]] * count)
    return (stacks[0].model_copy(update={"kept": kept}),)


def _one_stack(stacks: tuple[StackPlan, ...], source: SourceModel) -> tuple[StackPlan, ...]:
    """All blocks of a model, of which any number may have to go.

    Raises:
        PlanError: There are several stacks, or blocks cannot be dropped from this model.
    """
    if len(stacks) > 1:
        each = ", ".join(f"`{stack.name}` with {stack.blocks}" for stack in stacks)
        raise PlanError(
            f"`drop_layers: auto` weighs one stack of blocks, and this model has {each}",
            f"say how many blocks go, such as `--drop-layers {stacks[-1].name}:2`",
        )
    path, fixed = stacks[0].path, set(fixed_blocks(source, stacks[0].path))
    free = [index for index in range(stacks[0].blocks) if index not in fixed]
    if stacks[0].blocks < 2 or not free:
        raise PlanError("this model has no blocks that could be dropped: leave `drop_layers` out")
    some = tuple(index for index in range(stacks[0].blocks) if index != free[0])
    cut_blocks(source, {path: some})  # refuses models that lose more than blocks
    return stacks


def within(recipe: Convert, depth: DepthPlan | None, source: SourceModel) -> Convert:
    """What is asked of the blocks that stay.

    Where the number of blocks was weighed, a kept fraction is one of all blocks; layers may then
    stay dense, if dropping blocks has met the budget alone.

    Args:
        recipe: What is asked of the whole model.
        depth: Which blocks stay.
        source: The whole model.
    """
    inner, budget = recipe.within_blocks, recipe.budget
    if recipe.append_layers and recipe.attention and recipe.attention_layers is None:
        assert depth is not None
        inner = inner.model_copy(
            update={"attention_layers": tuple(range(depth.blocks, depth.kept))}
        )
    if depth is None or not recipe.weighs_depth or depth.kept == depth.blocks or budget is None:
        return inner
    cut = cut_to(source, depth)
    if budget.kind == "target":
        fraction = budget.limit * _layer_weights(source) / _layer_weights(cut)
        return inner.without_method if fraction >= 1 else inner.at(fraction)
    dense = Plan(layers=(), parameters=sum(p.numel() for p in cut.keymap.model.parameters()))
    return inner.without_method if size_of(dense, cut, recipe) <= budget.limit else inner


def _layer_weights(source: SourceModel) -> int:
    layers = anatomy_of(source.keymap.model).layers
    return sum(item.in_features * item.out_features * (item.experts or 1) for item in layers)


def cut_to(source: SourceModel, depth: DepthPlan | None) -> SourceModel:
    """Describes the model with the blocks that are planned; the same model where all stay.

    Raises:
        PlanError: Blocks cannot be dropped from this model.
    """
    if depth is None:
        return source
    stacks = (stack for stack in depth.stacks if len(stack.kept) != stack.blocks)
    return cut_blocks(source, {stack.path: stack.kept for stack in stacks})


def with_depth(plan: Plan, depth: DepthPlan | None, source: SourceModel) -> Plan:
    """Completes the plan of a cut model.

    Args:
        plan: The plan, in which the cut model is the dense one.
        depth: Which blocks stay; with None the plan is complete.
        source: The whole model.
    """
    if depth is None:
        return plan
    model = source.keymap.model
    blocks = [block.name for block in anatomy_of(model).blocks]
    inside = sum(item.numel() for name in blocks for item in _parameters(model, name))
    total = sum(item.numel() for item in model.parameters())
    gone = plan.dropped_parameters or total - plan.parameters
    return plan.model_copy(
        update={
            "coverage": plan.coverage and plan.coverage.without(max(0, gone)),
            "depth": depth,
            "parameters": total,
            "block_parameters": inside,
            "dropped_parameters": gone,
        }
    )


def spread(blocks: int, count: int, *, first: bool = True) -> tuple[int, ...]:
    """Chooses blocks at equal distances, the last one among them.

    Args:
        blocks: Number of blocks.
        count: How many to choose.
        first: Whether the first one is among them, if there is more than one.
    """
    if not first or count == 1:
        return tuple((index + 1) * blocks // count - 1 for index in range(count))
    return tuple(index * (blocks - 1) // (count - 1) for index in range(count))


def _stay(asked: Any, stack: StackPlan, source: SourceModel) -> tuple[int, ...]:
    if not isinstance(asked, int):
        return tuple(asked)
    count = stack.blocks - asked
    if fixed_blocks(source, stack.path):
        return (0,) if count == 1 else spread(stack.blocks, count)
    return spread(stack.blocks, count, first=False)


def _by_stack(asked: Any, stacks: Sequence[StackPlan], *, kept: bool) -> dict[str, Any]:
    if isinstance(asked, Mapping):
        return dict(asked)
    if len(stacks) == 1:
        return {stacks[0].name: asked}
    names = [stack.name for stack in stacks]
    option = "--keep-layers" if kept else "--drop-layers"
    numbers = asked if isinstance(asked, int) else ",".join(map(str, asked))
    raise PlanError(
        f"this model has {len(stacks)} stacks of blocks: "
        + ", ".join(f"`{stack.name}` with {stack.blocks}" for stack in stacks),
        f"say which one is meant, such as `{option} {names[-1]}:{numbers}`",
    )


def _check(asked: Mapping[str, Any], stacks: Sequence[StackPlan], *, kept: bool) -> None:
    known = {stack.name: stack for stack in stacks}
    problems = [
        f"there is no stack `{name}`; stacks are {listed(list(known))}"
        for name in asked
        if name not in known
    ]
    for name, wanted in asked.items():
        if name in known:
            problems += (_wrong_list if kept else _wrong_count)(wanted, known[name])
    if problems:
        raise PlanError(
            "; ".join(problems),
            "`tcompress inspect` lists the blocks, which count from 0",
        )


def _wrong_list(wanted: Sequence[int], stack: StackPlan) -> list[str]:
    blocks, where = stack.blocks, f"of the {stack.blocks} blocks of `{stack.name}`"
    if not wanted:
        return [f"`keep_layers` keeps none {where}"]
    text = ", ".join(map(str, wanted))
    problems = []
    outside = sorted({index for index in wanted if not 0 <= index < blocks})
    if outside:
        listed_ = ", ".join(map(str, outside))
        problems.append(f"there is no block {listed_}: `{stack.name}` has 0 to {blocks - 1}")
    if list(wanted) != sorted(set(wanted)):
        problems.append(
            f"`keep_layers` is {text}, expected are different blocks in ascending order"
        )
    if not problems and len(wanted) == blocks:
        problems.append(f"`keep_layers` keeps all {where}")
    return problems


def _wrong_count(wanted: int, stack: StackPlan) -> list[str]:
    if 1 <= wanted < stack.blocks:
        return []
    most = stack.blocks - 1
    return [f"{wanted} blocks of `{stack.name}` are to be dropped, allowed are 1 to {most}"]


def _parameters(model: Any, name: str) -> Any:
    return model.get_submodule(name).parameters()
