"""What a conversion learns before it fits: the curvature of every layer, and sizes for a budget.

The pass over the calibration data is kept in the working folder, so that an interrupted conversion
goes on without it. Without data the weights' own energy stands in for moments: every layer counts
alike, and so does every direction of its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tcompress.anatomy import Anatomy, Block, Layer, anatomy_of
from tcompress.calibrate.data import CalibrationData
from tcompress.conversion.allocate import FRACTIONS, Sized, aims_of, fine_fractions, options_of
from tcompress.conversion.backward import BackwardWalk, Worth
from tcompress.conversion.banks import damped_inputs
from tcompress.conversion.kept import FitWorkplace
from tcompress.conversion.probe import probe_of
from tcompress.conversion.settle import Settler
from tcompress.conversion.trial import Moment, Seen, Trials, trial_blocks
from tcompress.errors import FitError, PlanError, first_line
from tcompress.options import Convert
from tcompress.options.methods import AutoSpec
from tcompress.planning.disk import weight_bytes
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.planning.offers import offered_by, structure_of
from tcompress.planning.planner import follows_rules, make_plan
from tcompress.planning.terms import Choices
from tcompress.progress import Progress
from tcompress.source import SourceModel, read_finite
from tcompress.structures import Spec

USUAL = 0.25
"""Kept fraction for which structures are offered where a budget limits an error."""


@dataclass
class Survey:
    """One look at all layers, and what follows from it.

    Args:
        source: The dense model.
        recipe: How to convert it.
        plan: Its plan, with sizes that are alike for all layers.
        data: Calibration data; what is held out is not looked at. None for none.
        place: Where the results are kept.
        device: Where to compute.
    """

    source: SourceModel
    recipe: Convert
    plan: Plan
    data: CalibrationData | None
    place: FitWorkplace
    device: torch.device
    _sized: list[Sized] = field(default_factory=list)
    _ruled: set[str] = field(default_factory=set)

    def run(self, progress: Progress) -> Plan:
        """Returns the plan with its final sizes.

        Raises:
            DataError: The model has no outputs to judge by, or does not run its blocks in turn.
            FitError: Gradients are not finite.
            PlanError: Even the smallest sizes do not fit the budget.
        """
        kept = self.place.plan()
        if kept is not None:
            return kept
        plan = self._fresh(progress)
        self.place.keep_plan(plan)
        return plan

    def _fresh(self, progress: Progress) -> Plan:
        anatomy = anatomy_of(self.source.meta_model())
        self._offers = self._methods()
        self._trials = Trials(self._fraction)
        self._tried = trial_blocks(anatomy.blocks)
        walk = self._weights if self.data is None else self._walk
        for block, seen in walk(anatomy, progress):
            if self.recipe.by_loss:
                self._block(block, seen)
        if not self.recipe.by_loss:
            return self.plan
        if not self._sized:
            return self._unsized()
        for item in self._sized:
            item.quick = item.offers
            item.offers = {name: self._trials.corrected(item, name) for name in item.offers}
        roles = {item.role for item in self._sized}
        names = list(self._offers)
        whole = [name for name in names if all(self._trials.keeps(name, role) for role in roles)]
        return Settler(
            self.recipe, self.source, self.plan, self._plan_with, self._sized, names, whole
        ).run()

    def _unsized(self) -> Plan:
        """The plan where no layer has a predicted loss, as with experts alone: all alike."""
        budget = self.recipe.budget
        if budget is not None and budget.is_size:
            return self.plan
        raise PlanError(
            "no error is predicted for any of these layers (experts have none), so that a largest "
            "error gives them no size",
            "give a size instead, such as `--target 0.25`",
        )

    @property
    def _fraction(self) -> float:
        budget = self.recipe.budget
        if self.plan.budget is None or budget is None or not budget.is_size:
            return USUAL
        return self.plan.budget.fraction

    def _methods(self) -> dict[str, tuple[Spec, ...]]:
        """Methods on offer by name, each with its options in the order of preference."""
        method = self.recipe.at(None).method  # a tolerance is no option of any layer
        if isinstance(method, AutoSpec):
            return offered_by(method, self._fraction)
        return {} if method is None else {structure_of(method).name: (method,)}

    def _plan_with(self, choices: Choices) -> Plan:
        fraction = self.plan.budget.fraction if self.plan.budget else None
        budget = self.recipe.budget
        if budget is not None and not budget.is_size:  # of experts no error is known
            keys = {f"{entry.name}.{entry.parameter}" for entry in self.plan.layers}
            choices = {**dict.fromkeys(keys - self._ruled), **choices}
        return make_plan(self.recipe.at(fraction), self.source, self.plan.method, choices)

    def _walk(
        self, anatomy: Anatomy, progress: Progress
    ) -> Iterator[tuple[Block, dict[str, Seen]]]:
        """What all layers see and are worth, from a backward pass, the last block first."""
        assert self.data is not None
        holdout = frozenset(self.data.holdout)
        batches = [item for i, item in enumerate(self.data.batches) if i not in holdout]
        probe = probe_of(self.source, self.recipe.calibration.seed)
        scratch = self.place.scratch()
        halved = self._tried if len(self._offers) > 1 else ()
        walk = BackwardWalk(self.source, anatomy, batches, probe, scratch, self.device, halved)
        progress.stage("measuring what layers are worth", 2 * len(anatomy.blocks), "passes")
        by_name = {block.name: block for block in anatomy.blocks}
        for name, worths in walk.run(lambda block, way: progress.advance(1, f"{block} {way}")):
            entries = self._entries(by_name[name])
            seen = {key: worth for key, worth in worths.items() if worth.rows and key in entries}
            self._keep(name, seen, entries)
            yield (
                by_name[name],
                {
                    entries[key].name: Seen.of(
                        self._weight(key, entries[key]), worth, centred=entries[key].bias
                    )
                    for key, worth in (seen.items() if self.recipe.by_loss else ())
                },
            )

    def _weights(
        self, anatomy: Anatomy, progress: Progress
    ) -> Iterator[tuple[Block, dict[str, Seen]]]:
        """All layers in the norm of their weights."""
        progress.stage("looking at weights", len(anatomy.blocks), "blocks")
        for block in reversed(anatomy.blocks):
            seen = {}
            for key, entry in self._entries(block).items():
                weight = self._weight(key, entry)
                gram = torch.eye(entry.in_features, dtype=torch.float64, device=self.device)
                moment = Moment(gram, None, 1)
                seen[entry.name] = Seen(weight, moment, (moment, moment))
            yield block, seen
            progress.advance(1, block.name)

    def _entries(self, block: Block) -> dict[str, LayerPlan]:
        """Planned layers of a block by their names in the model; experts have no moments."""
        inside = {layer.name for layer in block.layers}
        named = ((self.source.keymap.runtime_name(e.name) or e.name, e) for e in self.plan.layers)
        return {name: e for name, e in named if name in inside and e.kind != "experts"}

    def _weight(self, path: str, entry: LayerPlan) -> Tensor:
        name = f"{path}.{entry.parameter}"
        weight = read_finite(self.source.store, self.source.keymap, name).to(self.device)
        return entry.matrix(weight)

    def _keep(
        self, block: str, seen: Mapping[str, Worth], entries: Mapping[str, LayerPlan]
    ) -> None:
        """Keeps what fits will need of a block's moments."""
        if self.recipe.calibration.output_moments is not False:
            found = {
                entries[name].name: worth.curvature / worth.rows for name, worth in seen.items()
            }
            self.place.keep_curvature(block, found)
        shared = damped_inputs(seen, entries, self.recipe.calibration.damping)
        if shared:
            self.place.keep_inputs(block, shared)

    def _block(self, block: Block, seen: Mapping[str, Seen]) -> None:
        """Lists what the layers of a block may become, and corrects it in some by real fits."""
        entries = {entry.name: key for key, entry in self._entries(block).items()}
        by_key = {key: self.plan_entry(name) for name, key in entries.items()}
        found: dict[str, Sized] = {}
        for group in block.groups:
            for layer in group:
                entry = by_key.get(layer.name)
                if entry is None or entry.name not in seen:
                    continue
                if follows_rules(self.recipe, self.source, layer):
                    self._ruled.add(f"{entry.name}.{entry.parameter}")
                    continue
                try:
                    sized = self._size(entry, layer, seen[entry.name], len(group))
                except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                    raise FitError(
                        f"what layer `{entry.name}` loses cannot be predicted: {first_line(error)}",
                        "use more calibration data or a larger `damping`, or leave the layer out "
                        "with `--keep`",
                    ) from error
                found[sized.key] = sized
        if len(self._offers) > 1 and block.name in self._tried:
            exact = [n for n, specs in self._offers.items() if structure_of(specs[0]).exact_losses]
            for name, specs in self._offers.items():
                if self.data is not None or name not in exact:
                    self._try(name, specs[0], block, found, seen)
            self._trials.drop(found.values(), exact)
        self._sized += found.values()

    def plan_entry(self, name: str) -> LayerPlan:
        """Returns the plan of a layer, of a size that stands in."""
        return next(entry for entry in self.plan.layers if entry.name == name)

    def _size(self, entry: LayerPlan, layer: Layer, seen: Seen, sharing: int) -> Sized:
        gram, curvature, rows = seen.whole.gram, seen.whole.curvature, seen.whole.rows
        damping = self.recipe.calibration.damping * entry.in_features / rows
        if curvature is None:  # every layer counts alike
            energy = float(seen.weight.double().square().sum()) or 1.0
            curvature = torch.eye(entry.out_features).to(gram) / energy
        else:
            gram = gram + damping * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
        aims = aims_of(entry, seen.weight, gram, curvature)
        budget = self.recipe.budget
        sized = Sized(
            key=f"{entry.name}.{entry.parameter}",
            role=entry.role,
            dense=entry.dense_parameters,
            zero=sum(aim.constant for aim in aims) * rows,
        )
        if budget is not None and budget.kind == "target_bytes":
            sized.unit = weight_bytes(self.source, entry, self.recipe.dtype)
        fine = budget is not None and budget.kind == "tol"
        for name, specs in self._offers.items():
            if self._trials.keeps(name, entry.role):
                sized.offers[name] = options_of(
                    entry,
                    layer,
                    aims,
                    specs,
                    fine_fractions(entry) if fine else FRACTIONS,
                    residual_rank=self.recipe.residual_rank,
                    rows=rows,
                    sharing=sharing,
                    calibrated=self.data is not None,
                )
        return sized

    def _try(
        self,
        name: str,
        spec: Spec,
        block: Block,
        found: Mapping[str, Sized],
        seen: Mapping[str, Seen],
    ) -> None:
        """Fits the layers of a block with one method, of sizes close to the budget."""
        options = {key: self._trials.option(item, name) for key, item in found.items()}
        choices = {key: option.label for key, option in options.items() if option is not None}
        if not choices:
            return
        recipe = self.recipe.at(self._fraction, spec)
        plan = make_plan(recipe, self.source, name, choices)  # type: ignore[arg-type]
        own = {e.name: e for e in plan.layers if f"{e.name}.{e.parameter}" in choices}
        for group in block.groups:
            names = [self.source.keymap.checkpoint_prefix(layer.name) for layer in group]
            members = [own[item] for item in names if item in own]
            there = {entry.name for entry in members}  # sides are owned by one of them
            members = [item for item in members if item.input_of is None or item.input_of in there]
            if members:
                damping = 0.0 if self.data is None else self.recipe.calibration.damping
                self._trials.fit(name, members, found, seen, damping)
