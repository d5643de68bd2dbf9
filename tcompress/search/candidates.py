"""What flows through a search: what it is about, sites, their candidates, and what these cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import log

import torch

from tcompress.data.calibration import CalibrationData
from tcompress.fitting.channel_orders import ChannelOrder
from tcompress.fitting.workdir import FitWorkplace
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.entries import LayerForm, Plan
from tcompress.progress import Progress

PARAMETERS, BYTES, NANOSECONDS = "parameters", "bytes", "nanoseconds"
"""Resources, by the unit that they are counted in."""

Costs = Mapping[str, int]
"""A whole number for each resource that is counted."""

Forms = tuple[tuple[str, LayerForm | None], ...]
"""What layers become, by weight name in the checkpoint; None for those that stay dense."""


@dataclass(frozen=True, eq=False)
class SearchInputs:
    """A model, and what is asked of it.

    Attributes:
        source: The model.
        recipe: What was asked for.
        plan: A plan of equal sizes.
        data: To measure on; what is held out is for comparisons alone.
        workdir: Where moments are kept.
        device: Where to compute.
        progress: Hears how far it is.
        several: Whether each method that takes all layers may be an answer by itself.
    """

    source: SourceModel
    recipe: Convert
    plan: Plan
    data: CalibrationData | None
    workdir: FitWorkplace
    device: torch.device
    progress: Progress
    several: bool = False

    @property
    def label(self) -> str:
        """Name of the method."""
        return self.recipe.method.name if self.recipe.method else ""


@dataclass(frozen=True)
class Candidate:
    """What could stand at a site.

    Attributes:
        method: Name of the structure; empty where there are several, or none.
        forms: What every layer of the site becomes.
        loss: Predicted loss of the model, in one unit for all sites.
        costs: What it takes.
    """

    method: str
    forms: Forms
    loss: float
    costs: Costs

    @property
    def form(self) -> LayerForm:
        """The form of the one layer that it is for."""
        [(_, form)] = self.forms
        assert form is not None
        return form

    def costing(self, unit: str, cost: int) -> Candidate:
        """Return the same that takes so much of one more resource."""
        return replace(self, costs={**self.costs, unit: cost})

    def scaled(self, factor: float) -> Candidate:
        """Return the same with another loss, in proportion."""
        return replace(self, loss=self.loss * factor)


@dataclass(frozen=True)
class Site:
    """A layer, or layers that are chosen together, and what may stand there.

    Attributes:
        keys: Names of the weights in the checkpoint.
        role: Of the layer in its block.
        dense: What the site takes as it is.
        candidates: In any order; useless ones do no harm.
        left_out: Predicted loss of leaving it out.
        unit: Bytes of one parameter where bytes are limited, else one.
        may_stay: Whether it may stay as it is, at no loss.
    """

    keys: tuple[str, ...]
    role: str
    dense: Costs
    candidates: tuple[Candidate, ...]
    left_out: float = 0.0
    unit: float = 1.0
    may_stay: bool = True

    @property
    def key(self) -> str:
        """Name of its first weight, for messages too."""
        return self.keys[0]

    @property
    def stays(self) -> Candidate:
        """The site as it is."""
        return Candidate("", tuple((key, None) for key in self.keys), 0.0, self.dense)

    @property
    def every(self) -> tuple[Candidate, ...]:
        """All candidates, to stay among them."""
        return (*self.candidates, self.stays) if self.may_stay else self.candidates

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """Methods of its candidates, in their order."""
        return tuple(dict.fromkeys(item.method for item in self.candidates))

    def of(self, method: str) -> tuple[Candidate, ...]:
        """List the candidates of one method."""
        return tuple(item for item in self.candidates if item.method == method)

    def offering(self, methods: Collection[str], *, may_stay: bool) -> Site:
        """Return the same with the candidates of these methods, in their order.

        Where no method has one, the layer stays dense.
        """
        offered = tuple(item for method in methods for item in self.of(method))
        return replace(self, candidates=offered, may_stay=may_stay or not offered)

    def closest(self, method: str, fraction: float) -> Candidate | None:
        """Pick the candidate of a method that is closest to a kept fraction, in proportion."""
        size = log(fraction * self.dense[PARAMETERS])

        def distance(item: Candidate) -> float:
            return abs(log(max(1, item.costs[PARAMETERS])) - size)

        return min(self.of(method), key=distance, default=None)


@dataclass(frozen=True)
class WidthSite(Site):
    """Layers that have channels in common, and the sizes that they may have together."""

    orders: tuple[ChannelOrder, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()  # of each candidate, by order

    @property
    def is_attention(self) -> bool:
        """Whether it is about whole heads, of what other sites tell the parts of."""
        return self.orders[0].coupling.kind == "heads"
