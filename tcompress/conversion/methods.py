"""Which method to use under a budget: what `auto` predicts is tried out beside each on its own.

Predictions compare sizes of one structure better than structures. At half of all-MiniLM-L6-v2 low
rank was predicted to lose half as much as slices beside low rank (0.0053 against 0.0115), and
changes the embeddings of other sentences by 0.278 of their variance where slices change them by
0.264. So every candidate is converted, and judged by the change of the output on data held out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tcompress.conversion.kept import FitWorkplace
from tcompress.conversion.weighing import ties
from tcompress.errors import FitError, PlanError
from tcompress.options import Convert
from tcompress.options.methods import AutoSpec
from tcompress.planning.entries import Plan
from tcompress.planning.offers import alone_of, structure_of
from tcompress.planning.planner import make_plan
from tcompress.source import SourceModel


def candidates_of(recipe: Convert, plan: Plan, source: SourceModel) -> dict[str, Convert]:
    """Lists what is tried, in the order of preference: `auto` itself, then methods on their own.

    A method that cannot take all layers is left out: those that stay dense do not count for a
    target, and would make it the best at everything.

    Args:
        recipe: A recipe with `auto` and a budget.
        plan: Its plan, with sizes that are alike for all layers.
        source: The dense model.
    """
    assert isinstance(recipe.method, AutoSpec)
    assert plan.budget is not None
    found: dict[str, Convert] = {recipe.method.name: recipe}
    for name, specs in alone_of(recipe.method, plan.budget.fraction).items():
        for spec in specs:
            alone = recipe.model_copy(update={"method": spec})
            if _weights_of(alone, source) >= _weights(plan):
                found[name] = alone
                break
    return found


def _weights_of(recipe: Convert, source: SourceModel) -> set[str]:
    """What a recipe rewrites; nothing where it is refused."""
    try:
        return _weights(make_plan(recipe, source))
    except PlanError:
        return set()


def _weights(plan: Plan) -> set[str]:
    return {f"{entry.name}.{entry.parameter}" for entry in plan.layers}


def choose_method(
    candidates: Mapping[str, Convert],
    place: FitWorkplace,
    change: Callable[[Convert, str], float],
) -> str:
    """Tries candidates out, and takes over what was fitted for the best one.

    Of those that are as good as the best, up to a tie, the first is taken.

    Args:
        candidates: By name, in the order of preference.
        place: Where the conversion keeps what it has done.
        change: Converts one in its trial's folder, and measures the change of the output.

    Returns:
        The name of the one that is taken.

    Raises:
        PlanError: The budget is out of reach for all of them.
        FitError: None of them can be fitted.
    """
    changes: dict[str, float] = {}
    refused: list[PlanError | FitError] = []
    for name, recipe in candidates.items():
        if _is_done(recipe, [place.trial_plan(tried) for tried in changes]):
            continue
        place.note("trial", method=name)
        try:
            changes[name] = change(recipe, name)
        except (PlanError, FitError) as error:
            refused.append(error)
    if not changes:
        raise refused[0]
    least = min(changes.values())
    taken = next(name for name, found in changes.items() if ties(found, least))
    trial = place.trial(taken)
    plan = trial.plan()
    if plan is not None and plan.budget is not None:
        facts = plan.budget.model_copy(update={"tried": changes, "taken": taken})
        trial.keep_plan(plan.model_copy(update={"budget": facts}))
    trial.close()
    place.keep_method(taken)
    place.adopt(taken)
    return taken


def _is_done(recipe: Convert, plans: list[Plan | None]) -> bool:
    """Whether one of these plans is nothing but the method of a recipe, sized as it would be."""
    if recipe.method is None or isinstance(recipe.method, AutoSpec):
        return False
    name = structure_of(recipe.method).name
    return any(
        all([t.structure for t in part.terms] == [name] for e in plan.layers for part in e.parts)
        for plan in plans
        if plan is not None
    )
