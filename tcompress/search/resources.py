"""What a model takes that has to be measured, and plans that take no more than is allowed.

To add a resource: a subclass of `Resource`, and a field of `Convert` with
`limits=Limit("resource", unit)`; `tests/search/test_resource_contract.py` tries it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import torch

from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.limits import Budget
from tcompress.planning.entries import Plan
from tcompress.search.budgets import TRIES, approach
from tcompress.search.candidates import Site
from tcompress.search.predictions import Predictions

CLOSE = 0.02  # of the ratio asked for: no better plan is looked for
FAR = 0.1  # of the ratio asked for, below it: perhaps it cannot be reached

RESOURCES: dict[str, type[Resource]] = {}
"""By the unit that they are counted in."""


class Resource(ABC):
    """Something that a model takes, and its candidates, in whole numbers of a unit."""

    unit: ClassVar[str]
    """Its name among costs, and in the limit of its option."""
    stage: ClassVar[str] = "measuring layers"
    """What is done while candidates are priced, for people."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        RESOURCES[cls.unit] = cls

    @classmethod
    @abstractmethod
    def of(cls, source: SourceModel, recipe: Convert, plan: Plan, device: torch.device) -> Resource:
        """Measure the dense model."""

    @property
    @abstractmethod
    def dense(self) -> float:
        """What the dense model takes."""

    @property
    def where(self) -> str:
        """What it was measured on, for people."""
        return self.unit

    @abstractmethod
    def priced(self, predictions: Predictions) -> Predictions:
        """Add what they take to the costs of all candidates, and of layers as they are."""

    @abstractmethod
    def ratios(self, *plans: Plan) -> list[float]:
        """Measure how many times less than the dense model such models take."""

    @abstractmethod
    def reduction(self, budget: Budget) -> float:
        """Return how many times less than the dense model a model is to take."""

    def facts(self, ratio: float) -> dict[str, Any]:
        """Name what was measured, for the budget of a plan."""
        return {}

    def out_of_reach(self, budget: Budget, plan: Plan, ratio: float) -> PlanError:
        """Say that a budget is too small, and how small it may be."""
        lowest = budget.limit * self.reduction(budget) / ratio
        return PlanError(
            f"`{budget}` is out of reach: the smallest possible is {lowest:.3g} {self.unit}",
            "allow more, offer `--method width` or `auto`, or drop blocks too",
        )

    def rest(self, layers: Iterable[Site]) -> int:
        """Count what the dense model takes beside these layers.

        None at least: a machine that slowed down after the model was timed tells less than nothing.
        """
        return max(0, round(self.dense) - sum(site.dense[self.unit] for site in layers))


@dataclass(frozen=True)
class Goal:
    """Models are to take so little; what they are predicted to take is corrected by whole ones.

    Attributes:
        resource: What is limited.
        budget: The limit.
        rest: What the model takes beside the layers that are sized.
    """

    resource: Resource
    budget: Budget
    rest: int

    @property
    def ratio(self) -> float:
        """How many times less than the dense model a model is to take."""
        return self.resource.reduction(self.budget)

    @property
    def room(self) -> float:
        """What is left for layers, as far as what they take adds up."""
        return self.resource.dense / self.ratio - self.rest

    def reach(self, solve: Callable[[int], Plan], least: int) -> tuple[Plan, float]:
        """Plan with room for layers until a model takes as little as asked for.

        Args:
            solve: Plans with so much room.
            least: What the smallest candidates take.

        Returns:
            The plan, and how many times less than the dense model it takes.

        Raises:
            PlanError: No plan takes so little.
        """
        dense, tried = self.resource.dense, dict[float, tuple[Plan, float]]()

        def placed(room: float) -> float:
            over = max((ratio / self.ratio - 1 for _, ratio in tried.values()), default=0.0)
            if over < 0 and len(tried) >= (2 if over < -FAR else TRIES - 2):
                room = least  # whether it can be reached at all
            return max(least, round(room))

        taken: dict[float, float] = {}
        for room in approach(taken, self.room, dense / self.ratio / (1 + CLOSE / 2), placed):
            plan = solve(int(room))
            [ratio] = self.resource.ratios(plan)
            tried[room], taken[room] = (plan, ratio), dense / ratio
            # Another try tells less than the last ones where the machine is not at rest.
            most = CLOSE * len(tried) if len(tried) <= TRIES // 2 else inf
            if any(-CLOSE <= ratio / self.ratio - 1 <= most for _, ratio in tried.values()):
                break
        fine = [item for item in tried.values() if item[1] >= self.ratio * (1 - CLOSE)]
        if not fine:
            plan, ratio = max(tried.values(), key=lambda item: item[1])
            raise self.resource.out_of_reach(self.budget, plan, ratio)
        return min(fine, key=lambda item: (item[1] < self.ratio, item[1]))
