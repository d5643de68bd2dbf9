"""The cells of a sweep: an ordinary recipe for each method and target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from tcompress.conversion.estimate import Estimate, estimate
from tcompress.errors import PlanError
from tcompress.options import Convert, Recipe, Sweep
from tcompress.options.methods import AutoSpec
from tcompress.options.naming import short_name
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.source import SourceModel
from tcompress.structures import structures


@dataclass(frozen=True)
class Cell:
    """One method with one target.

    Attributes:
        name: Short name, such as `svd-25`; also its folder's.
        recipe: What is done.
        plan: What the conversion will do, unless it is refused.
        costs: What that will take.
        refusal: Why it cannot be done, if so.
    """

    name: str
    recipe: Recipe
    plan: Plan | None = None
    costs: Estimate | None = None
    refusal: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns what is planned as plain data."""
        if self.plan is None or self.costs is None:
            return {"name": self.name, "refused": self.refusal}
        return {
            "name": self.name,
            "refused": None,
            "kept": self.plan.kept,
            "rewritten_parameters": self.plan.structured_rewritten,
            "parameters": self.plan.parameters - self.plan.saved,
            "layers": len(self.plan.layers),
            "left": len(self.plan.left),
            "estimate": self.costs.model_dump(mode="json"),
        }


def default_methods() -> tuple[str, ...]:
    """Names one method of each structure: all of them are fitted to data and take a target."""
    names: list[str] = []
    for item in structures():
        names.append(item.spec.model_fields["name"].annotation.__args__[0])
    return tuple(names)


def cells_of(recipe: Recipe, source: SourceModel) -> list[Cell]:
    """Lists the cells of a recipe with `sweep`; what cannot be planned is refused.

    Args:
        recipe: The recipe.
        source: The dense model; its weights are not read.

    Raises:
        PlanError: No cell can be planned.
    """
    cells: list[Cell] = []
    for convert in _conversions(recipe, source):
        if any(cell.recipe.convert == convert for cell in cells):
            continue
        name = _distinct(short_name(convert), [cell.name for cell in cells])
        cells.append(_planned(name, _recipe(recipe, convert, name, source), source))
    if all(cell.refusal is not None for cell in cells):
        lines = "".join(f"\n  - {cell.name}: {cell.refusal}" for cell in cells)
        raise PlanError(
            f"no cell of the sweep can be done:{lines}", "choose other methods or targets"
        )
    return cells


def _conversions(recipe: Recipe, source: SourceModel) -> Iterator[Convert]:
    sweep = recipe.sweep or Sweep()
    for method in sweep.methods or (recipe.convert.method,):
        for target in sorted(sweep.targets, reverse=True):
            spec: Any = method
            if isinstance(method, str):
                spec = _suited(recipe.convert, method, target, source)
            yield recipe.convert.at(target, spec)


def _suited(convert: Convert, name: str, target: float, source: SourceModel) -> Any:
    """Options of a method that leave room in a target, and as few layers dense as they can."""
    spec = Convert.model_validate({"method": {"name": name}}).method
    assert spec is not None
    if isinstance(spec, AutoSpec):
        return spec
    specs = spec.alone(target)
    return min(specs, key=lambda item: _left(convert.at(target, item), source))


def _left(convert: Convert, source: SourceModel) -> float:
    """How many layers stay dense; infinity where it is refused."""
    try:
        return len(make_plan(convert, source).left)
    except PlanError:
        return inf


def _distinct(name: str, taken: list[str]) -> str:
    """Numbers conversions that differ in what short names leave out."""
    names = [name, *(f"{name}-{count}" for count in range(2, len(taken) + 2))]
    return next(name for name in names if name not in taken)


def _recipe(recipe: Recipe, convert: Convert, name: str, source: SourceModel) -> Recipe:
    own = {"convert": convert, "name": name, "description": None, "model": source.id}
    own |= {"revision": source.revision, "output": name, "sweep": None, "report": None}
    return recipe.model_copy(update=own)


def _planned(name: str, recipe: Recipe, source: SourceModel) -> Cell:
    try:
        plan = make_plan(recipe.convert, source)
    except PlanError as error:
        return Cell(name, recipe, refusal=error.message)
    return Cell(name, recipe, plan, estimate(plan, source, recipe.convert))
