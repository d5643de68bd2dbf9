"""What becomes of a model: blocks first, then forms; answers are tried where data is there.

Answers are fitted, and judged by the change of the output on data held out: predictions compare
sizes of one structure better than structures, and what single candidates change says little of what
many change together. What blocks cost does not add up either, since the layers that stay make up
for much of what is gone: in low rank, at a quarter of its size, predictions added up to 203, 209
and 264 with no block dropped, one and two, and 151, 148 and 153 were measured. How much agreement a
predicted error costs depends on the model and on what it is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from math import exp, inf, log

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.conversion.model_fits import Conversion, fit_on_data
from tcompress.conversion.outputs import Outputs
from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError, PlanError
from tcompress.fitting.workdir import Distance
from tcompress.hf.opening import pick_dtype
from tcompress.models.fewer_layers import fixed_blocks
from tcompress.planning.depth import with_depth
from tcompress.planning.entries import BlockLoss, DepthPlan, Plan
from tcompress.search.budgets import approach
from tcompress.search.depth_search import choose_blocks, depth_without, dropping
from tcompress.search.search import Measurements, answers, within_error

Chosen = tuple[Conversion, Outputs]  # a conversion of the blocks that stay, and what it writes


def choose(conversion: Conversion) -> Chosen:
    """Choose blocks, structures and sizes."""
    depth = _depth(conversion)
    if depth is not None:
        conversion = conversion.cut(depth)
    several = conversion.full_recipe.tries_methods and not conversion.full_recipe.chooses_depth
    plans = _plans(replace(conversion, several=several))
    if several and len(plans) > 1:
        plans = _best(conversion, plans)
    return _taken(conversion, plans)


def _depth(conversion: Conversion) -> DepthPlan | None:
    """Choose the blocks that stay; None where all do."""
    planned, data, workdir = conversion.plan.depth, conversion.data, conversion.workdir
    if planned is None or planned.chosen != "later":
        return planned
    depth = workdir.depth()
    if depth is None:
        assert data is not None
        if conversion.full_recipe.chooses_depth:
            depth = _try_depths(conversion, planned, data)
        else:
            rest = (conversion.device, conversion.progress)
            depth = choose_blocks(conversion.dense, planned, data, *rest)
        workdir.keep_depth(depth)
    workdir.adopt(f"{depth.kept}-blocks")
    return depth


def _plans(conversion: Conversion) -> Mapping[str, Plan]:
    """Spend the budget over the blocks that stay, unless an interrupted run has done it."""
    plans = conversion.workdir.answers()
    if plans is None:
        ask = answers if conversion.statistics is None else conversion.statistics.answers
        allowed = conversion.full_recipe.max_loss
        plans = ask(conversion) if allowed is None else _within_loss(conversion, allowed)
        conversion.workdir.keep_answers(plans)
    return plans


def _try_depths(conversion: Conversion, depth: DepthPlan, data: CalibrationData) -> DepthPlan:
    """Try numbers of blocks, each with the budget spent on the blocks that stay."""
    stack = depth.stacks[0]
    largest = stack.blocks - max(1, len(fixed_blocks(conversion.dense, stack.path)))
    blocks = dropping(conversion.dense, {stack.path: largest}, data, conversion.device)
    depths: dict[str, DepthPlan] = {}

    def names() -> Iterator[str]:
        none: tuple[BlockLoss, ...] = ()
        for dropped in accumulate(blocks, lambda gone, loss: (*gone, loss), initial=none):
            shallower = depth_without(depth.stacks, dropped)
            name = f"{shallower.kept}-blocks"
            depths[name] = shallower
            yield name

    def change(name: str) -> float:
        label = f"trying without {depth.blocks - depths[name].kept} of {depth.blocks} blocks"

        def shallower(trial: Conversion) -> Chosen:
            cut = trial.cut(depths[name])
            return _taken(cut, _plans(cut))

        return _distance(conversion, name, label, shallower).change

    best, changes = try_out(names(), change, shrinking=True)
    return depths[best].model_copy(update={"weighed": tuple(changes.values())})


def _best(conversion: Conversion, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Try all answers, and take the best."""

    def change(name: str) -> float:
        return _try_answer(conversion, name, plans[name]).change

    best, changes = try_out(plans, change)
    tried = {name: distance for name, distance in changes.items() if distance is not None}
    method = conversion.full_recipe.method
    simple = simplest(best, method.name if method else "", tried)
    chosen = {simple: plans[simple].with_facts({"tried": tried, "taken": simple})}
    conversion.workdir.keep_answers(chosen)
    return chosen


def _within_loss(conversion: Conversion, allowed: float) -> dict[str, Plan]:
    """Look for the cheapest plan that loses no more agreement than is allowed."""
    measured = Measurements(conversion)
    plans: dict[float, Plan] = {}
    losses: dict[float, float] = {}

    def lost_at(error: float) -> float | None:
        plan = within_error(conversion, measured, error)
        if plan is None:
            return None
        lost = _try_answer(conversion, f"error-{error:.4g}", plan).lost
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
    return {f"error-{error:.4g}": plans[error].with_facts(facts)}


def _try_answer(conversion: Conversion, name: str, plan: Plan) -> Distance:
    """Fit a plan to some of the data, and compare."""

    def on_part(trial: Conversion) -> Chosen:
        return _taken(replace(trial, data=trial.trial_data), {name: plan})

    return _distance(conversion, name, f"trying {name}", on_part, measures=False)


def _distance(
    conversion: Conversion,
    name: str,
    label: str,
    prepare: Callable[[Conversion], Chosen],
    *,
    measures: bool = True,
) -> Distance:
    """Fit what is prepared in the folder of a trial, and compare its output with the dense one."""
    conversion.workdir.note("trial", name=name)
    with closing(conversion.workdir.trial(name, measures=measures)) as trial:
        distance = trial.distance()
        if distance is None:
            conversion.progress.stage(label, 1, "trial")
            conversion.progress.advance(1, "")
            chosen = prepare(replace(conversion, workdir=trial))
            comparison = fit_on_data(*chosen, sampler_of(conversion.dense)).comparison
            assert comparison is not None
            distance = Distance(comparison.change, comparison.lost)
            trial.keep_distance(distance)
    return distance


def _taken(conversion: Conversion, plans: Mapping[str, Plan]) -> Chosen:
    """Lay out the one plan that was chosen; what its trial fitted is taken over where it holds."""
    [(name, plan)] = plans.items()
    if conversion.trial_data is conversion.data:
        conversion.workdir.adopt(name)
    else:  # fits to a part are of no use any more
        conversion.workdir.drop_trials()
    if conversion.plan.depth is not None:
        plan = with_depth(plan, conversion.plan.depth, conversion.dense)
    dtype = pick_dtype(conversion.full_recipe.dtype)
    return conversion, Outputs(conversion.source, plan, dtype, conversion.workdir)


# Shares of the change of an answer.
TIE = 0.02  # those so close to the best one are as good
CLEAR = 0.15  # what a mixture has to be better by than the best structure alone
STOP = 0.1  # with fewer blocks, one that is worse than the best by more ends the search

AIM, CLOSE = 0.95, 0.85
"""Of the agreement that is allowed: what is aimed at, and from where on no more is looked for."""

_GUESS = 2.0  # predicted error for each unit of agreement, before anything was tried


def largest_error(allowed: float, lost_at: Callable[[float], float | None]) -> float | None:
    """Try predicted errors, and return the largest that loses no more agreement than is allowed.

    `lost_at` tells what is lost, or nothing where no model is that small; neither does this where
    no try was good enough. What is lost follows a power of the error, so logarithms are tried.
    """
    losses: dict[float, float] = {}
    fine: list[float] = []
    start, aim = min(_GUESS * allowed, 0.5), AIM * allowed
    for number in approach(losses, log(start), log(aim), lambda it: min(it, 0.0), step=log(8)):
        lost = lost_at(exp(number))
        if lost is None:
            break
        losses[number] = log(max(lost, 1e-6))
        fine = [tried for tried, loss in losses.items() if loss <= log(allowed)]
        if fine and (max(fine) >= 0 or losses[max(fine)] >= log(CLOSE * allowed)):
            break
    return exp(max(fine)) if fine else None


def simplest(best: str, mixed: str, changes: Mapping[str, float]) -> str:
    """Return the best answer of one structure in place of a mixture that is not clearly better.

    A change that is a little smaller tells nothing of what a user measures: of all-MiniLM-L6-v2 at
    a quarter a mixture changed likenesses by a tenth less than low rank, agreed with the dense
    model exactly as well, and lost 0.012 more of the rank correlation with labels of 3,000 pairs.
    """
    singles = [name for name in changes if name != mixed]
    if best != mixed or not singles:
        return best
    single = min(singles, key=lambda name: changes[name])
    return single if ties(changes[single], changes[best], CLEAR) else best


def ties(change: float, smallest: float, margin: float = TIE) -> bool:
    """Whether a change is within a margin of the smallest one; that one always is."""
    return change <= smallest + margin * abs(smallest)


def try_out(
    names: Iterable[str], change: Callable[[str], float], *, shrinking: bool = False
) -> tuple[str, dict[str, float | None]]:
    """Try answers one after another; return the best, and the changes of all that were tried.

    Each name is asked for only when those before were tried. Of answers that are as good the first
    is taken. Where they are `shrinking` it is the last, and one that is much worse than the best
    ends the search. A change is None where the budget is out of reach.
    """
    changes: dict[str, float | None] = {}
    fine: dict[str, float] = {}
    refused: list[PlanError | FitError] = []
    for name in names:
        changes[name] = None
        try:
            changes[name] = fine[name] = change(name)
        except (PlanError, FitError) as error:
            refused.append(error)
            continue
        if not ties(fine[name], min(fine.values()), STOP if shrinking else inf):
            break
    taken = -1 if shrinking else 0
    if not fine:
        raise refused[taken]
    smallest = min(fine.values())
    return [name for name in fine if ties(fine[name], smallest)][taken], changes
