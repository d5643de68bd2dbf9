"""What becomes of a model: blocks first, then forms; answers are tried where data is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import chain

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.conversion.model_fits import Conversion, fit_on_data
from tcompress.conversion.outputs import Outputs
from tcompress.errors import PlanError
from tcompress.fitting.workdir import Distance, FitWorkplace
from tcompress.models.fewer_layers import fixed_blocks
from tcompress.planning.entries import BlockLoss, DepthPlan, Plan
from tcompress.search.depth_search import choose_blocks, depth_without, dropping
from tcompress.search.search import Measurements, answers, within_error
from tcompress.search.trials import STOP, largest_error, simplest, try_out

Chosen = tuple[Conversion, Outputs]
"""A conversion of the blocks that stay, and what it writes."""


def choose(conversion: Conversion, workdir: FitWorkplace) -> Chosen:
    """Choose blocks, structures and sizes."""
    depth = _depth(conversion, workdir)
    if depth is not None:
        conversion = conversion.cut(depth)
    recipe = conversion.recipe
    if recipe.max_loss is not None:
        return _taken(conversion, _within_loss(conversion, workdir, recipe.max_loss), workdir)
    several = recipe.tries_methods and not recipe.chooses_depth
    plans = _plans(conversion, workdir, several=several)
    if several and len(plans) > 1:
        plans = _best(conversion, plans, workdir)
    return _taken(conversion, plans, workdir)


def _depth(conversion: Conversion, workdir: FitWorkplace) -> DepthPlan | None:
    """Choose the blocks that stay; None where all do."""
    planned, data = conversion.plan.depth, conversion.data
    if planned is None or planned.chosen != "later":
        return planned
    depth = workdir.depth()
    if depth is None:
        assert data is not None
        if conversion.recipe.chooses_depth:
            depth = _try_depths(conversion, planned, workdir)
        else:
            rest = (conversion.device, conversion.progress)
            depth = choose_blocks(conversion.dense, planned, data, *rest)
        workdir.keep_depth(depth)
    workdir.adopt(f"{depth.kept}-blocks")
    return depth


def _plans(conversion: Conversion, workdir: FitWorkplace, *, several: bool) -> Mapping[str, Plan]:
    """Spend the budget over the blocks that stay."""
    plans = workdir.answers()
    if plans is None:
        ask = answers if conversion.statistics is None else conversion.statistics.answers
        plans = ask(conversion.inputs(workdir, several=several))
        workdir.keep_answers(plans)
    return plans


def _try_depths(conversion: Conversion, depth: DepthPlan, workdir: FitWorkplace) -> DepthPlan:
    """Try numbers of blocks, each with the budget spent on the blocks that stay."""
    stack, data = depth.stacks[0], conversion.data
    assert data is not None
    largest = stack.blocks - max(1, len(fixed_blocks(conversion.dense, stack.path)))
    blocks = dropping(conversion.dense, {stack.path: largest}, data, conversion.device)
    depths: dict[str, DepthPlan] = {}

    def names() -> Iterator[str]:
        dropped: list[BlockLoss] = []
        for item in chain([None], blocks):
            dropped += [] if item is None else [item]
            shallower = depth_without(depth.stacks, dropped)
            name = f"{shallower.kept}-blocks"
            depths[name] = shallower
            yield name

    def change(name: str) -> float:
        label = f"trying without {depth.blocks - depths[name].kept} of {depth.blocks} blocks"

        def shallower(trial: FitWorkplace) -> Chosen:
            cut = conversion.trial.cut(depths[name])
            return _taken(cut, _plans(cut, trial, several=False), trial)

        return _distance(conversion, name, label, workdir, shallower).change

    best, changes = try_out(names(), change, stop=STOP, prefer_last=True)
    return depths[best].model_copy(update={"weighed": tuple(changes.values())})


def _best(
    conversion: Conversion, plans: Mapping[str, Plan], workdir: FitWorkplace
) -> dict[str, Plan]:
    """Try all answers, and take the best."""

    def change(name: str) -> float:
        return _try_answer(conversion, name, plans[name], workdir).change

    best, changes = try_out(plans, change)
    tried = {name: distance for name, distance in changes.items() if distance is not None}
    method = conversion.recipe.method
    simple = simplest(best, method.name if method else "", tried)
    chosen = {simple: plans[simple].with_facts({"tried": tried, "taken": simple})}
    workdir.keep_answers(chosen)
    return chosen


def _within_loss(
    conversion: Conversion, workdir: FitWorkplace, allowed: float
) -> Mapping[str, Plan]:
    """Look for the cheapest plan that loses no more agreement than is allowed."""
    stored = workdir.answers()
    if stored is not None:
        return stored
    inputs = conversion.inputs(workdir)
    measured = Measurements(inputs)
    plans: dict[float, Plan] = {}
    losses: dict[float, float] = {}

    def lost_at(error: float) -> float | None:
        plan = within_error(inputs, measured, error)
        if plan is None:
            return None
        lost = _try_answer(conversion, f"error-{error:.4g}", plan, workdir).lost
        if lost is None:
            raise PlanError(
                "`max_loss` cannot be measured: the samples held out are too few, or what the "
                "model puts out cannot be compared",
                "use more calibration data, or limit the predicted error: `--max-error 0.02`",
            )
        plans[error], losses[error] = plan, lost
        return lost

    error = largest_error(allowed, lost_at)
    if error is None:
        smallest = f"; those tried lose {min(losses.values()):.2%} and more" if losses else ""
        raise PlanError(
            f"no smaller model was found that loses at most {allowed:.2%} of agreement{smallest}",
            "allow more, use more calibration data, or offer other methods",
        )
    facts = {"kind": "max_loss", "limit": allowed, "lost": losses[error]}
    chosen = {f"error-{error:.4g}": plans[error].with_facts(facts)}
    workdir.keep_answers(chosen)
    return chosen


def _try_answer(conversion: Conversion, name: str, plan: Plan, workdir: FitWorkplace) -> Distance:
    """Fit a plan to some of the data, and compare."""

    def on_part(trial: FitWorkplace) -> Chosen:
        part = replace(conversion.trial, data=conversion.trial_data)
        return _taken(part, {name: plan}, trial)

    return _distance(conversion, name, f"trying {name}", workdir, on_part, measures=False)


def _distance(
    conversion: Conversion,
    name: str,
    label: str,
    workdir: FitWorkplace,
    prepare: Callable[[FitWorkplace], Chosen],
    *,
    measures: bool = True,
) -> Distance:
    """Fit what is prepared in the folder of a trial, and compare its output with the dense one."""
    workdir.note("trial", name=name)
    with closing(workdir.trial(name, measures=measures)) as trial:
        distance = trial.distance()
        if distance is None:
            conversion.progress.stage(label, 1, "trial")
            conversion.progress.advance(1, "")
            fits = fit_on_data(*prepare(trial), trial, sampler_of(conversion.dense))
            assert fits.comparison is not None
            distance = Distance(fits.comparison.change, fits.comparison.lost)
            trial.keep_distance(distance)
    return distance


def _taken(conversion: Conversion, plans: Mapping[str, Plan], workdir: FitWorkplace) -> Chosen:
    """Lay out the one plan that was chosen; what its trial fitted is taken over where it holds."""
    [(name, plan)] = plans.items()
    if conversion.trial_data is conversion.data:
        workdir.adopt(name)
    else:  # fits to a part are of no use any more
        workdir.drop_trials()
    return conversion, conversion.outputs(plan)
