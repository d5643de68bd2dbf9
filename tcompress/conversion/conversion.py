"""One conversion as values: what was asked, and what was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tcompress.conversion.outputs import Cluster, Outputs
from tcompress.data.calibration import CalibrationData, load_batches
from tcompress.fitting.embeddings import EMBEDDINGS
from tcompress.fitting.workdir import FitWorkplace
from tcompress.hf.opening import pick_device, pick_dtype
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.depth import cut_to, with_depth, within
from tcompress.planning.entries import DepthPlan, Plan
from tcompress.planning.planner import make_plan
from tcompress.planning.sites import roles_of
from tcompress.progress import Progress
from tcompress.search.candidates import SearchInputs
from tcompress.search.search import Statistics

TRIAL_SAMPLES = 768  # to fit answers to that are tried: enough to compare them


@dataclass(frozen=True, eq=False)
class Conversion:
    """A model, and what is asked of it. Use `Conversion.of`.

    Attributes:
        dense: The model that outputs are compared with, with all its blocks.
        source: The model with the blocks that stay, as far as they are chosen.
        recipe: What was asked for.
        inner: The same for the blocks that stay.
        plan: A plan of equal sizes.
        data: To fit to, and to measure on.
        statistics: What other conversions of the model have measured.
    """

    dense: SourceModel
    source: SourceModel
    recipe: Convert
    inner: Convert
    plan: Plan
    data: CalibrationData | None
    device: torch.device
    progress: Progress
    statistics: Statistics | None = None

    @classmethod
    def of(
        cls,
        source: SourceModel,
        recipe: Convert,
        plan: Plan,
        progress: Progress,
        data: CalibrationData | None = None,
        statistics: Statistics | None = None,
    ) -> Conversion:
        """Load the calibration data that a plan reads, unless it is given."""
        if not plan.reads_data:
            data = None
        elif data is None and not recipe.calibration.is_none:
            options = recipe.calibration.within(plan.longest)
            widest = max((entry.in_features for entry in plan.layers), default=0)
            data = load_batches(source, options, widest)
        parts = (source, source, recipe, recipe.within_blocks, plan, data)
        return cls(*parts, pick_device(recipe.device), progress, statistics)

    def cut(self, depth: DepthPlan) -> Conversion:
        """Return the same of a model with these blocks alone."""
        source = cut_to(self.dense, depth)
        if depth is self.plan.depth:
            return replace(self, source=source)
        inner = within(self.recipe, depth, self.dense)
        plan = with_depth(make_plan(inner, source, self.plan.method), depth, self.dense)
        return replace(self, source=source, inner=inner, plan=plan)

    @property
    def trial(self) -> Conversion:
        """The same to try something out: compared with the blocks that stay by now."""
        return replace(self, dense=self.source, inner=self.recipe.within_blocks)

    @property
    def trial_data(self) -> CalibrationData | None:
        """Data that answers are tried on."""
        return self.data and self.data.part(TRIAL_SAMPLES)

    def inputs(self, workdir: FitWorkplace, *, several: bool = False) -> SearchInputs:
        """Ask for the budget of the blocks that stay."""
        parts = (self.source, self.inner, self.plan, self.data, workdir, self.device)
        return SearchInputs(*parts, self.progress, several)

    def chosen(self, plan: Plan) -> Chosen:
        """Lay out what a plan with final sizes writes."""
        depth = self.plan.depth
        plan = plan if depth is None else with_depth(plan, depth, self.dense)
        parts = (plan.entries, pick_dtype(self.recipe.dtype), plan.attention, plan.forms)
        options: dict[str, Any] = {"plain": plan.plain is not None, "storage": plan.storage}
        return Chosen(self, plan, Outputs.of(self.source, *parts, **options))


@dataclass(frozen=True, eq=False)
class Chosen:
    """What a conversion has chosen.

    Attributes:
        conversion: What was asked.
        plan: The plan, with final sizes.
        outputs: All tensors that it writes.
    """

    conversion: Conversion
    plan: Plan
    outputs: Outputs

    @cached_property
    def blocks(self) -> Mapping[str, str]:
        """Names under which fits are kept, by the layer's name in the model."""
        blocks = roles_of(self.conversion.source).blocks
        by_layer = {layer.name: block.name for block in blocks for layer in block.layers}
        runtime_name = self.outputs.runtime_name
        return by_layer | {runtime_name(entry): EMBEDDINGS for entry in self.plan.embeddings}

    def block_of(self, cluster: Cluster) -> str:
        """Name under which the fits of a cluster are kept; outside of all blocks its own."""
        path = self.outputs.runtime_name(cluster[0])
        return self.blocks.get(path, path)
