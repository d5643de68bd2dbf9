"""What a conversion learns before it fits: the curvature of every layer, and sizes for a budget.

The pass over the calibration data is kept in the working folder, so that an interrupted conversion
goes on without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tcompress.anatomy import Block, Layer, anatomy_of
from tcompress.calibrate.data import CalibrationData
from tcompress.conversion.allocate import Sized, choose, size_options
from tcompress.conversion.backward import BackwardWalk, Worth
from tcompress.conversion.banks import damped_inputs
from tcompress.conversion.kept import FitWorkplace
from tcompress.conversion.probe import probe_of
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.planning.planner import follows_rules, make_plan
from tcompress.progress import Progress
from tcompress.recipe.schema import Convert
from tcompress.source import SourceModel, read_finite

ATTEMPTS = 5  # each takes away what the last one spent too much


class Survey:
    """One backward pass, and what follows from it.

    Args:
        source: The dense model.
        recipe: How to convert it.
        plan: Its plan, with sizes that are alike for all layers.
        data: Calibration data; what is held out is not looked at.
        place: Where the results are kept.
        device: Where to compute.
    """

    def __init__(
        self,
        source: SourceModel,
        recipe: Convert,
        plan: Plan,
        data: CalibrationData,
        place: FitWorkplace,
        device: torch.device,
    ) -> None:
        self._source = source
        self._recipe = recipe
        self._plan = plan
        self._data = data
        self._place = place
        self._device = device

    def run(self, progress: Progress) -> Plan:
        """Returns the plan with its final sizes.

        Raises:
            DataError: The model has no outputs to judge by, or does not run its blocks in turn.
            FitError: Gradients are not finite.
            PlanError: Even the smallest sizes do not fit the budget.
        """
        kept = self._place.plan()
        if kept is not None:
            return kept
        plan = self._fresh(progress)
        self._place.keep_plan(plan)
        return plan

    def _fresh(self, progress: Progress) -> Plan:
        anatomy = anatomy_of(self._source.meta_model())
        holdout = frozenset(self._data.holdout)
        batches = [item for i, item in enumerate(self._data.batches) if i not in holdout]
        seed = self._recipe.calibration.seed
        walk = BackwardWalk(
            self._source,
            anatomy,
            batches,
            probe_of(self._source, seed),
            self._place.scratch(),
            self._device,
        )
        progress.stage("measuring what layers are worth", 2 * len(anatomy.blocks), "passes")
        sized: list[Sized] = []
        by_name = {block.name: block for block in anatomy.blocks}
        for name, worths in walk.run(lambda block, way: progress.advance(1, f"{block} {way}")):
            sized += self._block(by_name[name], worths)
        if not self._recipe.by_loss:
            return self._plan
        return self._within(sized)

    def _within(self, sized: Sequence[Sized]) -> Plan:
        """Spends the budget: less of it where layers end up not sharing what was counted once."""
        target = fraction = self._recipe.target
        assert target is not None
        assert fraction is not None
        for _ in range(ATTEMPTS):
            choices = choose(sized, fraction)
            plan = make_plan(self._recipe, self._source, self._plan.method, choices)
            own = [item for item in plan.layers if f"{item.name}.{item.parameter}" in choices]
            kept = sum(item.parameters for item in own) / sum(i.dense_parameters for i in own)
            if kept <= target:
                break
            fraction *= target / kept
        return plan

    def _block(self, block: Block, worths: dict[str, Worth]) -> list[Sized]:
        """Keeps the curvature of a block's layers, and lists their sizes."""
        entries = {
            self._source.keymap.runtime_name(entry.name) or entry.name: entry
            for entry in self._plan.layers
            if entry.kind != "experts"
        }
        seen = {name: worth for name, worth in worths.items() if worth.rows and name in entries}
        if self._recipe.calibration.output_moments is not False:
            curvatures = {entries[name].name: w.curvature / w.rows for name, w in seen.items()}
            self._place.keep_curvature(block.name, curvatures)
        shared = damped_inputs(seen, entries, self._recipe.calibration.damping)
        if shared:
            self._place.keep_inputs(block.name, shared)
        if not self._recipe.by_loss:
            return []
        return [
            self._sized(entries[layer.name], layer, seen[layer.name], len(group))
            for group in block.groups
            for layer in group
            if layer.name in seen and not follows_rules(self._recipe, self._source, layer)
        ]

    def _sized(self, entry: LayerPlan, layer: Layer, worth: Worth, sharing: int) -> Sized:
        name = f"{layer.name}.{entry.parameter}"
        weight = read_finite(self._source.store, self._source.keymap, name).to(self._device)
        if entry.kind == "conv1d":
            weight = weight.mT
        damping = self._recipe.calibration.damping * entry.in_features / worth.rows
        return size_options(entry, layer, weight, worth, self._methods(), damping, sharing)

    def _methods(self) -> Sequence[Any]:
        return [self._recipe.method]
