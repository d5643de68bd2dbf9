"""What a conversion learns before it fits: curvature, sizes for a budget, which method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tcompress.conversion.candidates import (
    FRACTIONS,
    Moment,
    Seen,
    Sized,
    Trials,
    aims_of,
    fine_fractions,
    options_of,
    trial_blocks,
)
from tcompress.conversion.depth_search import ties
from tcompress.conversion.goal import Settler
from tcompress.conversion.output_sampler import probe_of
from tcompress.conversion.sensitivity import BackwardWalk, Worth
from tcompress.conversion.state import FitWorkplace
from tcompress.conversion.whole_model_fits import damped_inputs
from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError, PlanError, message_of
from tcompress.models import SourceModel, read_finite
from tcompress.options import Convert
from tcompress.options.method_options import AutoSpec
from tcompress.planning.costs import Choices, weight_bytes
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.planning.planner import follows_rules, make_plan
from tcompress.planning.sites import alone_of, offered_by, structure_of
from tcompress.progress import Progress
from tcompress.roles import Anatomy, Block, Layer, anatomy_of
from tcompress.structures import Spec

# The pass over the calibration data is kept in the working folder, so that an interrupted
# conversion goes on without it. Without data the weights' own energy stands in for moments: every
# layer counts alike, and so does every direction of its inputs and outputs.


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
                        f"what layer `{entry.name}` loses cannot be predicted: {message_of(error)}",
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


# Which method to use under a budget: what `auto` predicts is tried out beside each on its own.
#
# Predictions compare sizes of one structure better than structures. At half of all-MiniLM-L6-v2 low
# rank was predicted to lose half as much as slices beside low rank (0.0053 against 0.0115), and
# changes the embeddings of other sentences by 0.278 of their variance where slices change them by
# 0.264. So every candidate is converted, and judged by the change of the output on data held out.


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
