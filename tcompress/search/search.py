"""The decision of a conversion: one candidate for every layer, of least loss within the budget.

A pass over the calibration data, done once, tells what every layer may become, what that costs
and what it is predicted to lose, in one unit for all structures. A budget is then one problem over
these candidates. Where predictions are known to mislead, between structures and between numbers of
blocks, the answers are tried: fitted, and judged by the change of the output on data held out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import inf
from typing import Any

import torch
from torch import Tensor

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.blockwise.sensitivity import BackwardWalk, Sensitivity, damped_inputs
from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError, PlanError, message_of
from tcompress.fitting.channel_orders import (
    Place,
    Reduction,
    Seen,
    Widths,
    read_reductions,
    stored_reductions,
    widths_of,
)
from tcompress.fitting.layer_fits import EvaluationMoments, LayerStatistics
from tcompress.fitting.workdir import FitWorkplace
from tcompress.latency.paired_timing import threads
from tcompress.models import SourceModel, read_finite
from tcompress.options import Convert
from tcompress.options.method_options import AutoSpec
from tcompress.planning.costs import Choice, parameter_bytes, plan_terms
from tcompress.planning.couplings import couplings, whole_heads
from tcompress.planning.entries import Form, LayerPlan, Plan
from tcompress.planning.planner import follows_rules, grouped, regrouped, site_of
from tcompress.planning.sites import alone_of, offered_by, roles_of, structure_of
from tcompress.progress import Progress
from tcompress.roles import Block, Layer, Roles
from tcompress.roles.find import attentions_of
from tcompress.search.bits import TableSite, table_candidates, table_site
from tcompress.search.budgets import WIDTH, BudgetProblem
from tcompress.search.knapsack import Option
from tcompress.search.layer_times import Prices, TimeGoal, clock_of
from tcompress.search.plain_width import plan_in_time
from tcompress.search.predict import (
    FRACTIONS,
    LayerCandidates,
    WeightFits,
    blocks_to_fit,
    fine_fractions,
    fit_targets_of,
    options_of,
)
from tcompress.search.substitution import (
    Substitute,
    Substitutions,
    SubstitutionWalk,
    judged_batches,
)
from tcompress.search.width import WidthSite, width_site
from tcompress.structures import Refusal, Spec
from tcompress.timing_model.clocks import ModelClock

USUAL = 0.25
"""Kept fraction for which structures are offered where a budget limits an error."""

FAR = 1.5
"""Answers predicted to lose so many times as much as the best are not tried."""

HOPELESS = 2.5
"""The same before candidates are tried, which changes predictions."""

TIE = 0.02
"""Answers so close to the best one are as good."""

CLEAR = 0.15
"""What a mixture has to be better by than the best structure alone, as a share of its change."""

STOP = 0.1
"""With fewer blocks, an answer worse than the best by more than this share ends the search."""


# Moments that fits will need are kept in the working folder. Without data the weights' own energy
# stands in for moments: every layer counts alike, and so does every direction of its inputs and
# outputs.


Measured = Iterator[tuple[Block, dict[str, LayerStatistics]]]
"""What is known of the layers of every block, by name."""


@dataclass(frozen=True)
class _Predicted:
    """Candidates before their losses were corrected, so that another budget begins with them."""

    layers: tuple[tuple[LayerCandidates, dict[str, dict[str, list[Option]]]], ...]
    sites: tuple[tuple[WidthSite, list[Option], tuple[Tensor, ...]], ...]

    @classmethod
    def of(cls, layers: Sequence[LayerCandidates], sites: Sequence[WidthSite]) -> _Predicted:
        """Keep what is there; corrections replace lists and tensors, and change none."""
        kinds = ("offers", "quick", "alone")
        return cls(
            tuple((item, {kind: dict(getattr(item, kind)) for kind in kinds}) for item in layers),
            tuple((site, site.options, tuple(own.losses for own in site.found)) for site in sites),
        )

    def restore(self) -> None:
        """Give all candidates their predicted losses."""
        for item, offers in self.layers:
            for kind, options in offers.items():
                setattr(item, kind, dict(options))
        for site, choices, losses in self.sites:
            site.options = choices
            for own, predicted in zip(site.found, losses, strict=True):
                own.losses = predicted


@dataclass
class Decision:
    """Measures all layers once, and answers how a budget is best spent; `plan` has equal sizes."""

    source: SourceModel
    recipe: Convert
    plan: Plan
    data: CalibrationData | None  # what is held out is not looked at
    place: FitWorkplace  # where moments are kept
    device: torch.device
    _layers: list[LayerCandidates] | None = field(default=None, init=False)
    _clock: ModelClock | None = field(default=None, init=False)
    _tables: TableSite | None = field(default=None, init=False)
    _predicted: _Predicted | None = field(default=None, init=False)

    def within(self, error: float, progress: Progress) -> Plan | None:
        """Returns the cheapest plan of so small a predicted error; None if all layers stay."""
        assert self.plan.budget is not None
        budget = self.plan.budget.model_copy(update={"kind": "max_error", "limit": error})
        self.plan = self.plan.model_copy(update={"budget": budget})
        try:
            [plan] = self.answers(progress, several=False).values()
        except PlanError:
            if not self._layers:
                raise
            return None
        if self._clock is None or plan.budget is None:
            return plan
        with threads(self.recipe.threads):
            [speed] = self._clock.speedups(plan)
        facts = self._speed(self._clock, speed)
        return plan.model_copy(update={"budget": plan.budget.model_copy(update=facts)})

    def about(self, recipe: Convert, plan: Plan, place: FitWorkplace) -> Decision:
        """The same for another budget: what was measured is known, and losses are as predicted."""
        other = copy.copy(self)
        if self._predicted is not None:
            self._predicted.restore()
            self._substitutions.begin_again()
        other.recipe, other.plan, other.place = recipe, plan, place
        return other

    def answers(self, progress: Progress, *, several: bool) -> dict[str, Plan]:
        """Returns plans with final sizes, in the order of preference, none of them twice.

        With `several` each method that takes all layers is an answer too, beside what `auto` makes
        of all of them.
        """
        label = self.recipe.method.name if self.recipe.method else ""
        by_loss = self.recipe.by_loss
        measured = by_loss if self.data is None else self.recipe.measures_sensitivity
        if not self.plan.layers or not measured:
            return {label: self.plan}
        if self._layers is None:
            self._layers = self._measure(progress, several=several)
        if self.recipe.plain and self.recipe.time_budget:
            progress.stage("timing widths", 1, "")
            return {label: plan_in_time(self.source, self.recipe, self.plan, self.device)}
        if not self._layers:  # as with experts alone
            budget = self.recipe.budget
            if not by_loss or (budget is not None and budget.is_size):
                return {label: self.plan}
            raise PlanError(
                "no error is predicted for any of these layers (experts have none), so that a "
                "largest error gives them no size",
                "give a size instead, such as `--target 0.25`",
            )
        found = {item.role for item in self._layers}
        names = list(self._offers)
        whole = [name for name in names if all(self._fits.keeps(name, role) for role in found)]
        groups, fixed = grouped(self.plan, self.source), frozenset(self._fixed)
        problem = BudgetProblem(
            self.recipe, self.source, self.plan, groups, self._layers, fixed, self._widths
        )
        goal = self._time_goal(problem, progress)
        room = None if goal is None else round(goal.room(self._rest))
        if room is not None:
            names = self._worth_trying(replace(problem, room=room), names)
            whole = [name for name in whole if name in names]
        self._try_alone(names, progress)
        storage = self.plan.storage
        if self.recipe.chooses_table and storage is not None and storage.embeddings is not None:
            problem = replace(problem, table=self._table(progress))
        answers: dict[str, Plan] = {}
        refused: list[PlanError] = []

        def answer(name: str, room: int | None = None) -> Plan:
            own = replace(problem, room=room)
            return own.best(names, whole) if name == label else own.of_alone().best([name], [name])

        def least(name: str) -> int:
            own = problem if name == label else problem.of_alone()
            return own.least_time(names if name == label else [name])

        for name in (label, *(name for name in self._alone if name in names)):
            try:
                plan = answer(name, room)
            except PlanError as error:
                refused.append(error)
                continue
            if all(plan.layers != other.layers for other in answers.values()):
                answers[name] = plan
        answers = dict(_in_question(answers))
        if goal is not None:  # whole models are timed for those in question alone
            answers, untimed = {}, answers or {label: self.plan}
            for name in untimed:
                try:
                    answers[name] = self._in_time(goal, partial(answer, name), least(name))
                except PlanError as error:
                    refused.append(error)
        if not answers:
            raise refused[-1]
        return answers

    def _worth_trying(self, problem: BudgetProblem, names: Sequence[str]) -> list[str]:
        """Lists methods that a goal of time may use.

        Others are too slow whatever they lose, or are predicted to lose many times as much as all
        methods together, which use nothing of them.
        """
        assert problem.room is not None
        fast = [n for n in names if problem.least_time([n]) <= problem.room] or [*names]
        try:
            together = problem.solve(fast)
        except PlanError:
            return fast
        used = _structures(together.plan)

        def hopeless(name: str) -> bool:
            try:
                return problem.solve([name]).loss > HOPELESS * together.loss
            except PlanError:
                return True

        kinds = {name: structure_of(self._offers[name][0]).name for name in fast}
        return [name for name in fast if kinds[name] in used or not hopeless(name)]

    def _time_goal(self, problem: BudgetProblem, progress: Progress) -> TimeGoal | None:
        """Times what candidates take, where time is limited."""
        if not self.recipe.counts_time:
            return None
        if self._clock is None:
            progress.stage("timing layers", 1, "")
            with threads(self.recipe.threads):
                self._clock = self._timed(problem)
            progress.advance(1, str(self._clock.work))
        budget = self.recipe.time_budget
        return None if budget is None else TimeGoal(budget, self._clock)

    def _timed(self, problem: BudgetProblem) -> ModelClock:
        """Times the dense model, and gives all candidates their time."""
        clock = clock_of(self.source, self.recipe, self.device)
        entries = {item.key: item for item in self._entries.values()}
        width = min(entry.in_features for entry in entries.values())
        prices = Prices(clock, clock.layer_times(width), entries)
        prices.price(problem.layers, problem.widths)
        self._rest = prices.rest(problem.layers)
        return clock

    def _in_time(self, goal: TimeGoal, answer: Callable[[int], Plan], least: int) -> Plan:
        with threads(self.recipe.threads):
            plan, speed = goal.reach(answer, self._rest, least)
        assert plan.budget is not None
        facts = self._speed(goal.clock, speed)
        return plan.model_copy(update={"budget": plan.budget.model_copy(update=facts)})

    def _speed(self, clock: ModelClock, speedup: float) -> dict[str, Any]:
        return {"speedup": speedup, "at": str(clock.work), "seconds": clock.seconds}

    def _measure(self, progress: Progress, *, several: bool) -> list[LayerCandidates]:
        """Lists the candidates of all layers, from one pass over the calibration data."""
        layers: list[LayerCandidates] = []
        self._widths: list[WidthSite] = []
        self._fixed: set[str] = set()
        budget = self.recipe.budget
        by_size = self.plan.budget is not None and budget is not None and budget.is_size
        fraction = self.plan.budget.fraction if by_size and self.plan.budget else USUAL
        method = self.recipe.with_target(None).method  # a tolerance is no option of any layer
        self._offers: dict[str, tuple[Spec, ...]] = {}  # options in the order of preference
        if isinstance(method, AutoSpec):
            self._offers = offered_by(method, fraction, timed=self.recipe.counts_time)
        elif method is not None:
            self._offers = {structure_of(method).name: (method,)}
        self._alone = alone_on(self.recipe, self.plan, self.source) if several else {}
        self._narrows = WIDTH in self._offers or any(entry.is_narrow for entry in self.plan.layers)
        self._fits = WeightFits(fraction)
        runtime = self.source.keymap.runtime_name
        self._entries = {  # experts have no moments
            runtime(e.name) or e.name: e for e in self.plan.layers if e.kind != "experts"
        }
        roles = roles_of(self.source)
        replaced = self.recipe.attention is not None
        self._attentions = () if replaced else attentions_of(self.source.keymap.model, roles)
        self._fitted = blocks_to_fit(roles.blocks)
        if self.data is None:
            for block, seen in self._weights(roles, progress):
                layers += self._of_block(block, seen).values()
            for item in layers:
                item.quick = item.offers
                item.offers = {name: self._fits.corrected(item, name) for name in item.offers}
            return layers
        self._substitutions = Substitutions(self._fits.fraction)
        for block, seen in self._walk(roles, progress):
            widths, own = len(self._widths), self._of_block(block, seen)
            layers += own.values()
            if own and not replaced:
                entries = {
                    layer.name: self._entries[layer.name]
                    for layer in block.layers
                    if layer.name in self._entries
                }
                self._substitutions.of_layers(block, own, entries)
                for site in self._widths[widths:]:
                    self._substitutions.of_channels(block, site.found, entries)
        return layers

    def _try_alone(self, methods: Collection[str], progress: Progress) -> None:
        """Corrects what candidates are predicted to lose by some of them in the dense model."""
        if self.data is not None:
            if self._predicted is None:
                self._predicted = _Predicted.of(self._layers or (), self._widths)
            self._substitutions.correct(methods, self._substitution, progress)
            for site in self._widths:
                site.lose_as_found()

    def _table(self, progress: Progress) -> TableSite:
        """Measures what the word embedding may become, once."""
        if self._tables is None:
            assert self.data is not None
            count = len(table_candidates(self.source, self.recipe))
            progress.stage("trying word embeddings", count, "tables")
            sampler = sampler_of(self.source)
            width = getattr(self.source.config.get_text_config(), "hidden_size", 0) or 1
            fitted = [self.data.batches[index] for index in self.data.fitted]
            samples = sum(len(next(iter(batch.values()))) for batch in fitted)
            self._tables = table_site(
                self.source,
                self.recipe,
                self.plan,
                self.data,
                sampler,
                judged_batches(self.data, sampler.with_variants, 8 * width),
                self._substitutions.usual or 1 / samples,
                self.device,
                lambda name: progress.advance(1, name),
            )
        return self._tables

    def _of_block(
        self, block: Block, seen: Mapping[str, LayerStatistics]
    ) -> Mapping[str, LayerCandidates]:
        widths = self._order_channels(block, seen) if self._narrows else []
        if not self.recipe.by_loss:
            return {}
        found = self._block(block, seen)
        self._offer_widths(widths, found.values())
        return found

    def _substitution(self, substitutes: Sequence[Substitute]) -> SubstitutionWalk:
        assert self.data is not None
        return SubstitutionWalk(
            self.source,
            self.plan,
            self.data,
            damping=self.recipe.calibration.damping,
            curvatures=partial(self.place.moments, "curvature"),
            tokens=partial(self.place.moments, "tokens"),
            channels=lambda block: read_reductions(self.place.moments("channels", block)),
            factors={},
            dtype_of=lambda _: torch.float32,
            device=self.device,
            whole=self.source,
            tables={},
            sampler=sampler_of(self.source),
            substitutes=substitutes,
        )

    def _walk(self, roles: Roles, progress: Progress) -> Measured:
        """Moments of all layers, from a backward pass, the last block first."""
        assert self.data is not None
        batches = [self.data.batches[index] for index in self.data.fitted]
        sampler = sampler_of(self.source, self.recipe.calibration.seed)
        scratch = self.place.scratch()
        walk = BackwardWalk(self.source, roles, batches, sampler, scratch, self.device)
        progress.stage("measuring what layers are worth", 2 * len(roles.blocks), "passes")
        by_name = {block.name: block for block in roles.blocks}
        for name, worths in walk.run(lambda block, way: progress.advance(1, f"{block} {way}")):
            found = {k: worth for k, worth in worths.items() if worth.rows and k in self._entries}
            self._keep(name, found)
            seen = {}
            for key, worth in found.items() if self.recipe.by_loss or self._narrows else ():
                entry = self._entries[key]
                weight = self._weight(key, entry)
                seen[entry.name] = LayerStatistics.of(weight, worth, centred=entry.bias)
            yield by_name[name], seen

    def _weights(self, roles: Roles, progress: Progress) -> Measured:
        """All layers in the norm of their weights."""
        progress.stage("looking at weights", len(roles.blocks), "blocks")
        for block in reversed(roles.blocks):
            seen = {}
            for layer in block.layers:
                entry = self._entries.get(layer.name)
                if entry is None:
                    continue
                weight = self._weight(layer.name, entry)
                gram = torch.eye(entry.in_features, dtype=torch.float64, device=self.device)
                moment = EvaluationMoments(gram, None)
                mean = gram.new_zeros(len(gram))
                seen[entry.name] = LayerStatistics(weight, moment, mean)
            yield block, seen
            progress.advance(1, block.name)

    def _weight(self, path: str, entry: LayerPlan) -> Tensor:
        return entry.matrix(self._tensor(f"{path}.{entry.parameter}"))

    def _tensor(self, name: str) -> Tensor:
        return read_finite(self.source.store, self.source.keymap, name, self.device)

    def _keep(self, block: str, seen: Mapping[str, Sensitivity]) -> None:
        """Keeps what fits will need of a block's moments."""
        assert self.data is not None
        if self.recipe.calibration.output_moments is not False:
            items = seen.items()
            found = {self._entries[name].name: own.curvature / own.rows for name, own in items}
            self.place.keep_moments("curvature", block, found)
            weights = {
                f"{self._entries[name].name}/{self.data.fitted[batch]}": own
                for name, worth in items
                for batch, own in worth.weights.items()
            }
            self.place.keep_moments("tokens", block, weights)
        shared = damped_inputs(seen, self._entries, self.recipe.calibration.damping)
        if shared:
            self.place.keep_moments("inputs", block, shared)

    def _block(
        self, block: Block, seen: Mapping[str, LayerStatistics]
    ) -> dict[str, LayerCandidates]:
        """Lists what the layers of a block may become, and corrects it in some by real fits."""
        found: dict[str, LayerCandidates] = {}
        for group in block.groups:
            for layer in group:
                entry = self._entries.get(layer.name)
                if entry is None or entry.name not in seen:
                    continue
                if follows_rules(self.recipe, self.source, layer):
                    self._fixed.add(entry.key)
                    continue
                try:
                    found[entry.key] = self._candidates(block, layer, entry, seen[entry.name])
                except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                    raise FitError(
                        f"what layer `{entry.name}` loses cannot be predicted: {message_of(error)}",
                        "use more calibration data or a larger `damping`, or leave the layer out "
                        "with `--keep`",
                    ) from error
        if self.data is None and len(self._offers) > 1 and block.name in self._fitted:
            exact = [n for n, specs in self._offers.items() if structure_of(specs[0]).exact_losses]
            for name in self._offers.keys() - {WIDTH} - {*exact}:
                self._fit(name, block, found, seen)
            self._fits.drop(found.values(), exact)
        return found

    def _order_channels(
        self, block: Block, seen: Mapping[str, LayerStatistics]
    ) -> list[list[Widths]]:
        """Orders channels that layers of a block have in common; those of one layer together."""
        known: dict[str, Seen] = {}
        for layer in block.layers:
            entry = self._entries.get(layer.name)
            if entry is not None and entry.name in seen:
                bias = f"{layer.name}.bias" if entry.bias else None
                known[layer.weight_name] = Seen(
                    entry,
                    seen[entry.name],
                    None if bias is None else self._tensor(bias),
                )
        found: list[list[Widths]] = []
        kept: dict[Place, Reduction] = {}
        for coupling in couplings(block):
            if any(layer.weight_name not in known for layer in coupling.layers):
                continue
            own = widths_of(coupling, known, self.recipe.calibration.damping)
            kept |= own.reductions
            shared = [
                group
                for group in found
                if any({*coupling.layers} & {*other.coupling.layers} for other in group)
            ]
            found = [group for group in found if group not in shared]
            found.append([*chain.from_iterable(shared), own])
        whole = [whole_heads(item) for item in self._attentions if item.block == block.name]
        for heads in filter(None, whole):  # after what they are made of
            if all(layer.weight_name in known for layer in heads.layers):
                own = widths_of(heads, known, self.recipe.calibration.damping)
                kept |= own.reductions
                found.append([own])
        self.place.keep_moments("channels", block.name, stored_reductions(kept))
        return found

    def _offer_widths(
        self, found: Sequence[Sequence[Widths]], layers: Iterable[LayerCandidates]
    ) -> None:
        """Offers a budget fewer channels, wherever all layers around them are sized by it."""
        units = {item.key: item.unit for item in layers}
        entries = {f"{path}.{entry.parameter}": entry for path, entry in self._entries.items()}
        for own in found if WIDTH in self._offers else ():
            site = width_site(own, entries, units)
            if site is not None:
                self._widths.append(site)

    def _candidates(
        self, block: Block, layer: Layer, entry: LayerPlan, seen: LayerStatistics
    ) -> LayerCandidates:
        gram, curvature, rows = seen.whole.gram, seen.whole.curvature, seen.whole.rows
        damping = self.recipe.calibration.damping * entry.in_features / rows
        if curvature is None:  # every layer counts alike
            energy = float(seen.weight.double().square().sum()) or 1.0
            curvature = torch.eye(entry.out_features).to(gram) / energy
        else:
            gram = gram + damping * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
        aims = fit_targets_of(entry, seen.weight, gram, curvature)
        budget = self.recipe.budget
        found = LayerCandidates(
            key=entry.key,
            role=entry.role,
            dense=entry.dense_parameters,
            left_out=sum(constant for _, constant in aims) * rows,
        )
        if budget is not None and budget.unit == "bytes":
            found.unit = parameter_bytes(self.source, entry, self.plan, self.recipe.dtype)
        fine = budget is not None and budget.limits_each
        sharing = next(len(group) for group in block.groups if layer in group)

        def options(specs: Sequence[Spec]) -> list[Option]:
            return options_of(
                entry,
                [site_of(block, layer, part) for part in layer.parts],
                aims,
                specs,
                fine_fractions(entry) if fine else FRACTIONS,
                residual_rank=self.recipe.residual_rank,
                rows=rows,
                sharing=sharing,
                calibrated=self.data is not None,
            )

        for name, specs in self._offers.items():
            if name != WIDTH and self._fits.keeps(name, entry.role):
                found.offers[name] = options(specs)
        for name, spec in self._alone.items():
            if name == WIDTH:
                continue
            same = self._offers.get(name) == (spec,) and name in found.offers
            found.alone[name] = found.offers[name] if same else options([spec])
        return found

    def _fit(
        self,
        name: str,
        block: Block,
        found: Mapping[str, LayerCandidates],
        seen: Mapping[str, LayerStatistics],
    ) -> None:
        """Fits the layers of a block with one method, of sizes close to the budget."""
        options = {key: item.closest(name, self._fits.fraction) for key, item in found.items()}
        chosen = {
            key: Form(option.label)  # type: ignore[arg-type]
            for key, option in options.items()
            if option is not None
        }
        damping = 0.0 if self.data is None else self.recipe.calibration.damping
        for group in block.groups:
            own = [self._entries[it.name] for it in group if it.name in self._entries]
            own = [entry for entry in own if entry.key in chosen]
            members, _ = regrouped(own, chosen)
            if members:
                self._fits.fit(name, members, found, seen, damping)


def _in_question(answers: Mapping[str, Plan]) -> Iterator[tuple[str, Plan]]:
    """Leaves out answers predicted to lose far more than the first, or of the same structure."""
    first = next(iter(answers.values()), None)
    if first is None:
        return
    kinds = _structures(first)
    for name, plan in answers.items():
        known = first.budget, plan.budget
        errors = [own.error for own in known if own is not None and own.error is not None]
        hopeless = len(errors) == 2 and errors[1] > FAR * errors[0]
        if plan is first or not (hopeless or (len(kinds) == 1 and _structures(plan) == kinds)):
            yield name, plan


def simplest(best: str, mixed: str, changes: Mapping[str, float]) -> str:
    """Gives the best answer of one structure in place of a mixture that is not clearly better.

    A change that is a little smaller tells nothing of what a user measures: of all-MiniLM-L6-v2 at
    a quarter a mixture changed likenesses by a tenth less than low rank, agreed with the dense
    model exactly as well, and lost 0.012 more of the rank correlation with labels of 3,000 pairs.
    """
    alone = [name for name in changes if name != mixed]
    if best != mixed or not alone:
        return best
    other = min(alone, key=lambda name: changes[name])
    return other if ties(changes[other], changes[best], CLEAR) else best


def _structures(plan: Plan) -> set[str]:
    parts = (part for entry in plan.layers for part in entry.parts)
    return {term.structure for part in parts for term in part.terms}


def alone_on(recipe: Convert, plan: Plan, source: SourceModel) -> dict[str, Spec]:
    """Lists methods that are answers on their own, each with the options that suit all layers.

    A method that cannot take all layers is left out: those that stay dense do not count for a
    target, and would make it the best at everything.
    """
    assert isinstance(recipe.method, AutoSpec)
    assert plan.budget is not None
    planned = {(source.keymap.runtime_name(e.name) or e.name, e.parameter) for e in plan.layers}
    places = {
        (site_of(block, layer, part), len(group), len(layer.parts), layer.experts or 1)
        for block in roles_of(source).blocks
        for group in block.groups
        for layer in group
        if (layer.name, layer.parameter) in planned
        if not follows_rules(recipe, source, layer)
        for part in layer.parts
    }
    calibrated = not recipe.calibration.is_none

    def suits(spec: Spec) -> bool:
        choice = Choice(spec, recipe.residual_rank, plan.budget.fraction)  # type: ignore[union-attr]
        try:
            for site, sharing, parts, copies in places:
                readers = sharing * parts * copies
                plan_terms(choice, site, readers, copies, calibrated=calibrated)
        except Refusal:
            return False
        return True

    offered = alone_of(recipe.method, plan.budget.fraction, timed=recipe.counts_time).items()
    found = {name: next(filter(suits, specs), None) for name, specs in offered}
    return {name: spec for name, spec in found.items() if spec is not None}


# Answers are tried out, and judged by the change of the output on data held out.
#
# Predictions compare sizes of one structure better than structures: what single candidates change
# says little of what many of them change together. What blocks cost does not add up either, since
# the layers that stay make up for much of what is gone: in low rank, at a quarter of its size,
# predictions added up to 203, 209 and 264 with no block dropped, one and two, and 151, 148 and 153
# were measured.


def ties(found: float, least: float, margin: float = TIE) -> bool:
    """Whether a change is within a margin of the smallest one; that one always is."""
    return found <= least + margin * abs(least)


def try_out(
    names: Iterable[str],
    change: Callable[[str], float],
    *,
    stop: float = inf,
    prefer_last: bool = False,
) -> tuple[str, dict[str, float | None]]:
    """Tries answers one after another, and takes the best one.

    Each name is asked for only when those before were tried; an answer that is worse than the best
    by more than the share `stop` ends the search. Of answers that are as good the first is taken.
    Gives its name, and the changes of all that were tried; None where the budget is out of reach.
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
        if not ties(fine[name], min(fine.values()), stop):
            break
    if not fine:
        raise refused[-1 if prefer_last else 0]
    least = min(fine.values())
    order = [name for name in fine if ties(fine[name], least)]
    return order[-1 if prefer_last else 0], changes
