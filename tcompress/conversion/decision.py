"""The decision of a conversion: one candidate for every layer, of least loss within the budget.

A pass over the calibration data, done once, tells what every layer may become, what that costs
and what it is predicted to lose, in one unit for all structures. A budget is then one problem over
these candidates. Where predictions are known to mislead, between structures and between numbers of
blocks, the answers are tried: fitted, and judged by the change of the output on data held out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import fsum, inf
from typing import Any

import torch
from torch import Tensor

from tcompress.conversion.candidates import (
    FRACTIONS,
    CalibrationFits,
    LayerCandidates,
    LayerStatistics,
    blocks_to_fit,
    fine_fractions,
    fit_targets_of,
    options_of,
)
from tcompress.conversion.channels import (
    Reduction,
    Seen,
    Widths,
    stored_reductions,
    width_options,
    widths_of,
)
from tcompress.conversion.fit import EvaluationMoments
from tcompress.conversion.output_sampler import sampler_of
from tcompress.conversion.sensitivity import BackwardWalk, Sensitivity, damped_inputs
from tcompress.conversion.state import FitWorkplace
from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError, PlanError, message_of
from tcompress.models import SourceModel, read_finite
from tcompress.options import Convert
from tcompress.options.convert_options import Budget
from tcompress.options.method_options import AutoSpec
from tcompress.planning.channels import couplings
from tcompress.planning.costs import Choice, out_of_reach, plan_terms, size_of, weight_bytes
from tcompress.planning.entries import Form, LayerPlan, Plan
from tcompress.planning.knapsack import (
    DENSE,
    Allocation,
    BudgetSite,
    Option,
    allocate,
    allocate_for_loss,
    joint,
)
from tcompress.planning.knapsack import uniform as allocate_alike
from tcompress.planning.planner import covered, follows_rules, grouped, regrouped, resized, site_of
from tcompress.planning.sites import alone_of, offered_by, roles_of, structure_of
from tcompress.progress import Progress
from tcompress.roles import Block, Layer, Roles
from tcompress.structures import Refusal, Spec
from tcompress.structures.width import WidthSpec

USUAL = 0.25
"""Kept fraction for which structures are offered where a budget limits an error."""

WIDTH = WidthSpec().name

MARGIN = 0.05  # what a mixture has to save, of the loss of the best single method
ATTEMPTS = 8  # each takes away what the last one spent too much, or gives some of it back
UNSPENT = 0.001  # of a budget, not worth another attempt

TIE = 0.02
"""Answers so close to the best one are as good."""

STOP = 0.1
"""With fewer blocks, an answer worse than the best by more than this share ends the search."""


@dataclass(frozen=True)
class _Answer:
    plan: Plan
    loss: float
    size: int  # what a smallest answer is judged by


@dataclass(frozen=True)
class BudgetProblem:
    """One budget, and the layers that it is spent on; `plan` has equal sizes."""

    recipe: Convert
    source: SourceModel
    plan: Plan
    groups: Sequence[Sequence[LayerPlan]]  # those together that read one input
    layers: Sequence[LayerCandidates]
    fixed: frozenset[str] = frozenset()  # weights of layers that have a size of their own
    widths: Sequence[Sequence[Option]] = ()
    """What layers that have channels in common may become, with fewer of them."""

    def best(self, methods: Sequence[str], singles: Sequence[str]) -> Plan:
        """Returns the plan that is predicted to lose least, or for an error to be smallest.

        A mixture of the `methods` has to be clearly better than the best of the `singles`, those
        that can take all layers: predictions compare sizes of one structure more reliably.
        """
        answers: dict[str, _Answer] = {}
        refused: list[PlanError] = []
        for name in ("", *singles) if len(methods) > 1 else singles:
            try:
                answers[name] = self.solve([name] if name else methods)
            except PlanError as error:
                refused.append(error)
        if not answers:
            raise refused[0]
        mixed = answers.pop("", None)
        name = min(answers, key=lambda name: self._rank(answers[name]), default="")
        if mixed is not None and (
            not name or self._rank(mixed)[0] < (1 - MARGIN) * self._rank(answers[name])[0]
        ):
            return self._with_facts(mixed.plan, mixed.loss, singles, answers)
        plan = answers[name].plan
        if len(methods) > 1 and all(item.quick for item in self.layers):
            with suppress(PlanError):  # sized as it would be without others on offer
                layers = [replace(item, offers=item.quick) for item in self.layers]
                plan = replace(self, layers=layers).solve([name]).plan
        single = answers if len(methods) > 1 else {}
        return self._with_facts(plan, answers[name].loss, singles, single)

    def alone(self, name: str) -> Plan:
        """Returns the plan of one method in all layers, with nothing else on offer."""
        layers = [replace(item, offers=item.alone) for item in self.layers]
        return replace(self, layers=layers).best([name], [name])

    def solve(self, methods: Sequence[str]) -> _Answer:
        """Spends the budget on candidates of these methods."""
        if not self._limits_error:
            return self._within(methods)
        limit = self._budget.limit
        sites = self.sites(methods, may_stay=True)
        if self._budget.limits_each:
            left_out = {item.key: item.left_out for item in self.layers}
            most = [limit * fsum(left_out[key] for key in keys) for keys in sites]
            found = within_tolerance([*sites.values()], most)
        else:
            spend = _alike_for_loss if self._alike else allocate_for_loss
            found = spend([*sites.values()], limit * fsum(item.left_out for item in self.layers))
        plan = self._plan(found, sites)
        return _Answer(plan, found.loss, plan.structured_rewritten + self._dense_left(plan))

    def _within(self, methods: Sequence[str]) -> _Answer:
        """Allocates less where layers end up not sharing what was counted once, but not too little.

        Where a layer would then not even shrink, it has to do without that method.
        """
        limit, spent = self._limits()
        room, barred = spent, set[tuple[str, str]]()
        fits, exceeds, best = 0, spent, None
        for _ in range(ATTEMPTS):
            # A rewritten layer makes up for what those before it lost; a dense one does not.
            sites = self.sites(methods, may_stay=False, barred=barred)
            found = self._allocated([*sites.values()], room)
            plan = self._plan(found, sites)
            over = self._measured(plan) - limit
            lost = self._refused(found, plan) if len(methods) > 1 else set()
            if lost:
                barred |= lost
            elif over > 0:
                exceeds = room
                room = room - over if best is None else (fits + room) // 2
            else:
                if best is None or found.loss < best.loss:
                    best = _Answer(plan, found.loss, limit + over)
                if room == spent or -over <= UNSPENT * spent:
                    break
                fits, room = room, (room + exceeds) // 2
        if best is not None:
            return best
        raise PlanError(
            f"`{self.recipe.budget}` could not be met: layers that would not shrink stay dense",
            "allow more, or name one method that may be used everywhere, such as `svd`",
        )

    def _refused(self, found: Allocation, plan: Plan) -> set[tuple[str, str]]:
        """Layers, each with its method, that were to be rewritten and then stayed dense."""
        planned = {entry.key for entry in plan.layers}
        chosen: dict[str, Form] = {}
        for choice in found.choices:
            chosen |= () if choice.label == DENSE else choice.label  # type: ignore[call-overload]
        return {
            (item.key, name)
            for item in self.layers
            if chosen.get(item.key) is not None and item.key not in planned
            for name, options in item.offers.items()
            if any(option.label == chosen[item.key].parts for option in options)
        }

    def sites(
        self,
        methods: Sequence[str],
        *,
        may_stay: bool,
        barred: Collection[tuple[str, str]] = (),
    ) -> dict[tuple[str, ...], BudgetSite]:
        """Lists what a budget chooses from, by the keys of the layers that it is chosen for."""
        own = {
            item.key: item.site(
                [m for m in methods if (item.key, m) not in barred],
                may_stay=may_stay,
            )
            for item in self.layers
        }
        found: dict[tuple[str, ...], BudgetSite] = {}
        for options in self.widths if WIDTH in methods else ():
            keys = tuple(key for key, _ in options[-1].label)  # type: ignore[attr-defined]
            members = [own.pop(key) for key in keys]
            offered = [*options]
            if any(member.options for member in members):
                offered += [_flattened(option, keys) for option in joint(members)]
            dense = sum(member.dense for member in members)
            found[keys] = BudgetSite(keys[0], offered, dense, may_stay)
        return {**{(key,): site for key, site in own.items()}, **found}

    def _allocated(self, sites: Sequence[BudgetSite], room: int) -> Allocation:
        if self._alike:
            return allocate_alike(sites, room / sum(site.dense for site in sites))
        budget = self.recipe.budget
        try:
            return allocate(sites, room)
        except PlanError as error:
            if budget is None or budget.is_fraction:
                raise
            costs = [[option.cost for option in site.options] for site in sites]
            least = sum(
                min(own + [site.dense] * site.may_stay)
                for own, site in zip(costs, sites, strict=True)
            )
            limit, spent = self._limits()
            raise out_of_reach(budget, limit - spent + least) from error

    def _plan(self, found: Allocation, sites: Iterable[tuple[str, ...]]) -> Plan:
        forms: dict[str, Form | None] = {}
        for keys, choice in zip(sites, found.choices, strict=True):
            forms |= dict.fromkeys(keys) if choice.label == DENSE else dict(choice.label)  # type: ignore[call-overload]
        if forms and not any(forms.values()):
            raise PlanError(
                f"`{self.recipe.budget}` leaves every layer dense: no smaller size loses so little",
                "allow a larger error",
            )
        chosen: dict[str, Form | None] = {}
        if self._limits_error:  # of experts no error is known
            chosen = dict.fromkeys({entry.key for entry in self.plan.layers} - self.fixed)
        chosen |= forms
        return resized(self.plan, self.groups, chosen, self.source)

    @property
    def _budget(self) -> Budget:
        assert self.plan.budget is not None
        return self.plan.budget.asked

    @property
    def _limits_error(self) -> bool:
        return not self._budget.is_size

    @property
    def _alike(self) -> bool:
        """Whether all layers keep the same fraction: asked for, or since no data tells better."""
        if self.recipe.allocation == "uniform":
            return True
        return self.recipe.calibration.is_none and not self._limits_error

    def _rank(self, item: _Answer) -> tuple[float, float]:
        return (float(item.size), item.loss) if self._limits_error else (item.loss, 0.0)

    def _limits(self) -> tuple[int, int]:
        """What a plan may measure, and what of it is for the layers that are sized."""
        if self._budget.is_fraction:
            whole = int(self._budget.limit * sum(item.dense * item.unit for item in self.layers))
            return whole, whole
        planned = {entry.key: entry.parameters for entry in self.plan.layers}
        taken = sum(planned.get(item.key, item.dense) * item.unit for item in self.layers)
        limit = int(self._budget.limit)
        return limit, taken + limit - self._measured(self.plan)

    def _measured(self, plan: Plan) -> int:
        if not self._budget.is_fraction:
            return size_of(plan, self.source, self.recipe)
        own = {item.key for item in self.layers}
        kept = sum(entry.parameters for entry in plan.layers if entry.key in own)
        return kept + self._dense_left(plan)

    def _dense_left(self, plan: Plan) -> int:
        planned = {entry.key for entry in plan.layers}
        return sum(item.dense for item in self.layers if item.key not in planned)

    def _with_facts(
        self, plan: Plan, loss: float, singles: Sequence[str], alone: Mapping[str, _Answer]
    ) -> Plan:
        """Adds to a plan what was predicted: its loss, that of equal shares and of each method."""
        everything = fsum(item.left_out for item in self.layers) or 1.0
        alike = []
        for name in () if self._limits_error else singles:
            sites = [*self.sites([name], may_stay=False).values()]
            share = self._limits()[1] / sum(site.dense for site in sites)
            with suppress(PlanError):
                alike.append(allocate_alike(sites, share).loss)
        assert self.plan.budget is not None
        facts = self.plan.budget.model_copy(
            update={
                "chosen": "uniform" if self._alike else "loss",
                "error": loss / everything,
                "uniform_error": min(alike) / everything if alike else None,
                "single_errors": {name: item.loss / everything for name, item in alone.items()},
            }
        )
        return covered(plan.model_copy(update={"budget": facts}), self.source)


def _flattened(option: Option, keys: Sequence[str]) -> Option:
    """Gives an option of several layers their forms as its label."""
    labels: Any = option.label
    forms = [((key, None),) if own == DENSE else own for key, own in zip(keys, labels, strict=True)]
    return replace(option, label=tuple(chain.from_iterable(forms)))


def within_tolerance(sites: Sequence[BudgetSite], most: Sequence[float]) -> Allocation:
    """Chooses for every site the cheapest option that loses no more than its own limit."""
    chosen = []
    for site, limit in zip(sites, most, strict=True):
        fine = [option for option in site.options if option.loss <= limit]
        dense = Option(site.dense, 0.0, DENSE)
        chosen.append(min(fine, key=lambda item: item.cost, default=dense))
    return Allocation(tuple(chosen), sum(c.cost for c in chosen), fsum(c.loss for c in chosen))


def _alike_for_loss(sites: Sequence[BudgetSite], most: float) -> Allocation:
    """The smallest fraction, the same for all sites, whose options lose no more than allowed."""
    shares = sorted({option.cost / site.dense for site in sites for option in site.options} | {1.0})
    low, high = 0, len(shares) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            fits = allocate_alike(sites, shares[middle]).loss <= most
        except PlanError:
            fits = False
        low, high = (low, middle) if fits else (middle + 1, high)
    return allocate_alike(sites, shares[low])


# Moments that fits will need are kept in the working folder. Without data the weights' own energy
# stands in for moments: every layer counts alike, and so does every direction of its inputs and
# outputs.


Measured = Iterator[tuple[Block, dict[str, LayerStatistics]]]
"""What is known of the layers of every block, by name."""


@dataclass
class Decision:
    """Measures all layers once, and answers how a budget is best spent; `plan` has equal sizes."""

    source: SourceModel
    recipe: Convert
    plan: Plan
    data: CalibrationData | None  # what is held out is not looked at
    place: FitWorkplace  # where moments are kept
    device: torch.device

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
        self._measure(progress, several=several)
        if not self._layers:  # as with experts alone
            budget = self.recipe.budget
            if not by_loss or (budget is not None and budget.is_size):
                return {label: self.plan}
            raise PlanError(
                "no error is predicted for any of these layers (experts have none), so that a "
                "largest error gives them no size",
                "give a size instead, such as `--target 0.25`",
            )
        for item in self._layers:
            item.quick = item.offers
            item.offers = {name: self._fits.corrected(item, name) for name in item.offers}
        found = {item.role for item in self._layers}
        names = list(self._offers)
        whole = [name for name in names if all(self._fits.keeps(name, role) for role in found)]
        groups, fixed = grouped(self.plan, self.source), frozenset(self._fixed)
        problem = BudgetProblem(
            self.recipe, self.source, self.plan, groups, self._layers, fixed, self._widths
        )
        answers: dict[str, Plan] = {}
        refused: list[PlanError] = []
        for name in (label, *self._alone):
            try:
                plan = problem.best(names, whole) if name == label else problem.alone(name)
            except PlanError as error:
                refused.append(error)
                continue
            if all(plan.layers != other.layers for other in answers.values()):
                answers[name] = plan
        if not answers:
            raise refused[0]
        return answers

    def _measure(self, progress: Progress, *, several: bool) -> None:
        """Lists the candidates of all layers, from one pass over the calibration data."""
        self._layers: list[LayerCandidates] = []
        self._widths: list[list[Option]] = []
        self._fixed: set[str] = set()
        budget = self.recipe.budget
        by_size = self.plan.budget is not None and budget is not None and budget.is_size
        fraction = self.plan.budget.fraction if by_size and self.plan.budget else USUAL
        method = self.recipe.at(None).method  # a tolerance is no option of any layer
        self._offers: dict[str, tuple[Spec, ...]] = {}  # options in the order of preference
        if isinstance(method, AutoSpec):
            self._offers = offered_by(method, fraction)
        elif method is not None:
            self._offers = {structure_of(method).name: (method,)}
        self._alone = alone_on(self.recipe, self.plan, self.source) if several else {}
        self._narrows = WIDTH in self._offers or any(entry.is_narrow for entry in self.plan.layers)
        self._fits = CalibrationFits(fraction)
        runtime = self.source.keymap.runtime_name
        self._entries = {  # experts have no moments
            runtime(e.name) or e.name: e for e in self.plan.layers if e.kind != "experts"
        }
        roles = roles_of(self.source)
        self._fitted = blocks_to_fit(roles.blocks)
        walk = self._weights if self.data is None else self._walk
        for block, seen in walk(roles, progress):
            widths = self._order_channels(block, seen) if self._narrows else []
            if self.recipe.by_loss:
                self._block(block, seen)
                self._offer_widths(widths)

    def _walk(self, roles: Roles, progress: Progress) -> Measured:
        """Moments of all layers, from a backward pass, the last block first."""
        assert self.data is not None
        holdout = frozenset(self.data.holdout)
        batches = [item for i, item in enumerate(self.data.batches) if i not in holdout]
        sampler = sampler_of(self.source, self.recipe.calibration.seed)
        scratch = self.place.scratch()
        halved = self._fitted if len(self._offers) > 1 else ()
        walk = BackwardWalk(self.source, roles, batches, sampler, scratch, self.device, halved)
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
                seen[entry.name] = LayerStatistics(weight, moment, (moment, moment), mean)
            yield block, seen
            progress.advance(1, block.name)

    def _weight(self, path: str, entry: LayerPlan) -> Tensor:
        return entry.matrix(self._tensor(f"{path}.{entry.parameter}"))

    def _tensor(self, name: str) -> Tensor:
        return read_finite(self.source.store, self.source.keymap, name).to(self.device)

    def _keep(self, block: str, seen: Mapping[str, Sensitivity]) -> None:
        """Keeps what fits will need of a block's moments."""
        if self.recipe.calibration.output_moments is not False:
            items = seen.items()
            found = {self._entries[name].name: own.curvature / own.rows for name, own in items}
            self.place.keep_moments("curvature", block, found)
        shared = damped_inputs(seen, self._entries, self.recipe.calibration.damping)
        if shared:
            self.place.keep_moments("inputs", block, shared)

    def _block(self, block: Block, seen: Mapping[str, LayerStatistics]) -> None:
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
        if len(self._offers) > 1 and block.name in self._fitted:
            exact = [n for n, specs in self._offers.items() if structure_of(specs[0]).exact_losses]
            for name in self._offers.keys() - {WIDTH}:
                if self.data is not None or name not in exact:
                    self._fit(name, block, found, seen)
            self._fits.drop(found.values(), exact)
        self._layers += found.values()

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
        kept: dict[tuple[str, str], Reduction] = {}
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
        self.place.keep_moments("channels", block.name, stored_reductions(kept))
        return found

    def _offer_widths(self, found: Sequence[Sequence[Widths]]) -> None:
        """Offers a budget fewer channels, wherever all layers around them are sized by it."""
        units = {item.key: item.unit for item in self._layers}
        entries = {f"{path}.{entry.parameter}": entry for path, entry in self._entries.items()}
        for own in found if WIDTH in self._offers else ():
            options = width_options(own, entries, units)
            if options:
                self._widths.append(options)

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
            found.unit = weight_bytes(self.source, entry, self.recipe.dtype)
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
        options = {key: self._fits.option(item, name) for key, item in found.items()}
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

    offered = alone_of(recipe.method, plan.budget.fraction).items()
    found = {name: next(filter(suits, specs), None) for name, specs in offered}
    return {name: spec for name, spec in found.items() if spec is not None}


# Answers are tried out, and judged by the change of the output on data held out.
#
# Predictions compare sizes of one structure better than structures. At half of all-MiniLM-L6-v2 low
# rank was predicted to lose half as much as slices beside low rank (0.0053 against 0.0115), and
# changes the embeddings of other sentences by 0.278 of their variance where slices change them by
# 0.264. What blocks cost and what layers cost does not add up either, since the layers that stay
# make up for much of what is gone: in low rank, at a quarter of its size, predictions added up to
# 203, 209 and 264 with no block dropped, one and two, and 151, 148 and 153 were measured.


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
