"""Candidates of a whole model with their predicted losses, from one pass over the data.

What is measured of layers, block by block, tells what candidates lose; moments that fits will need
are kept in the working folder. Without data the weights' own energy stands in for moments: every
layer counts alike, and so does every direction of its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.blockwise.sensitivity import BackwardWalk, Sensitivity, damped_inputs
from tcompress.errors import FitError, message_of
from tcompress.fitting.block_rewrite import dense_matrix
from tcompress.fitting.channel_orders import ChannelOrder, LayerFacts, stored_reductions
from tcompress.fitting.channel_orders import order_channels as channel_order
from tcompress.fitting.layer_fits import MORE_DATA, LayerStatistics
from tcompress.fitting.workdir import narrowed
from tcompress.models import SourceModel, read_finite
from tcompress.options import Convert
from tcompress.options.method_options import NARROWING, AutoSpec
from tcompress.planning.costs import Choice, path_of, plan_terms, unit_of
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.planning.planner import follows_rules, regrouped, site_of
from tcompress.planning.sites import (
    couplings,
    module_path,
    offered_by,
    roles_of,
    structure_of,
    whole_heads,
)
from tcompress.roles import Block, Layer
from tcompress.roles.find import attentions_of
from tcompress.search.candidates import (
    BYTES,
    FRACTIONS,
    PARAMETERS,
    Costs,
    SearchInputs,
    Site,
    WidthSite,
    fine_fractions,
    fit_targets_of,
    layer_candidates,
    of_one_layer,
)
from tcompress.search.joint_width import width_site
from tcompress.search.substitution import Substitute, channel_substitutes, layer_substitutes
from tcompress.search.weight_fits import WeightFits, blocks_to_fit
from tcompress.structures import Refusal, Spec

USUAL = 0.25  # kept fraction for which structures are offered where a budget limits an error

Offers = Mapping[str, tuple[Spec, ...]]
"""Options of methods by their name, in the order of preference."""

BlockStatistics = Mapping[str, LayerStatistics]
"""What is measured of the layers of a block, by their name in the checkpoint."""


AnySite = TypeVar("AnySite", bound=Site)


@dataclass(frozen=True)
class Predictions:
    """All that a budget may choose from, and what helps to choose."""

    layers: tuple[Site, ...] = ()  # layers, each by itself
    singly: tuple[Site, ...] = ()  # the same with what a method offers where all layers take it
    uncorrected: tuple[Site, ...] = ()  # before fits corrected the losses, if some did
    widths: tuple[WidthSite, ...] = ()  # layers that have channels in common
    offers: Offers = field(default_factory=dict)  # methods of `layers`, in the order of preference
    singles: tuple[str, ...] = ()  # methods that are answers by themselves, if tried
    complete: tuple[str, ...] = ()  # methods that all layers may take
    fixed: frozenset[str] = frozenset()  # weights of layers that have a size of their own
    substitutes: tuple[Substitute, ...] = ()  # that may be put alone into the dense model

    def mapped(
        self,
        layer: Callable[[Site], Site],
        width: Callable[[WidthSite], WidthSite] = lambda site: site,
    ) -> Predictions:
        """Return the same with other sites: of layers by themselves, and of those together."""
        tables = (self.layers, self.singly, self.uncorrected)
        layers, singly, uncorrected = (tuple(map(layer, sites)) for sites in tables)
        widths = tuple(map(width, self.widths))
        return replace(self, layers=layers, singly=singly, uncorrected=uncorrected, widths=widths)

    def costing(self, unit: str, cost: Callable[[Costs], int]) -> Predictions:
        """Add what everything takes of a resource, by its other costs."""

        def priced(site: AnySite) -> AnySite:
            items = (item.costing(unit, cost(item.costs)) for item in site.candidates)
            dense = {**site.dense, unit: cost(site.dense)} if site.dense else site.dense
            return replace(site, candidates=tuple(items), dense=dense)

        return self.mapped(priced, priced)


@dataclass(frozen=True, eq=False)
class _Measuring:
    """Runs a model over calibration data once, or looks at its weights."""

    inputs: SearchInputs
    entries: Mapping[str, LayerPlan]  # by name in the model; experts have no moments
    narrows: bool  # whether channels are put in order

    def blocks(self) -> Iterator[tuple[Block, BlockStatistics]]:
        """Measure all blocks, the last one first."""
        return self._weights() if self.inputs.data is None else self._walk()

    def _walk(self) -> Iterator[tuple[Block, BlockStatistics]]:
        """Measure moments of all layers by a backward pass, the last block first."""
        source, recipe, progress = self.inputs.source, self.inputs.recipe, self.inputs.progress
        assert self.inputs.data is not None
        roles, batches = roles_of(source), self.inputs.data.fitted_batches
        sampler = sampler_of(source, recipe.calibration.seed)
        scratch = self.inputs.workdir.scratch()
        walk = BackwardWalk(source, roles, batches, sampler, scratch, self.inputs.device)
        progress.stage("measuring what layers are worth", 2 * len(roles.blocks), "passes")
        by_name = {block.name: block for block in roles.blocks}
        for name, sums in walk.run(lambda block, way: progress.advance(1, f"{block} {way}")):
            reached = [path for path in sums if sums[path].rows and path in self.entries]
            self._keep_moments(name, {path: sums[path] for path in reached})
            statistics = {}
            for path in reached if recipe.by_loss or self.narrows else ():
                entry, layer_sums = self.entries[path], sums.pop(path)  # one copy at a time
                weight = dense_matrix(self.inputs.source, entry, self.inputs.device)
                statistics[entry.name] = LayerStatistics.of(weight, layer_sums, centred=entry.bias)
            sums.clear()
            yield by_name[name], statistics

    def _weights(self) -> Iterator[tuple[Block, BlockStatistics]]:
        """Look at all layers in the norm of their weights."""
        blocks = roles_of(self.inputs.source).blocks
        self.inputs.progress.stage("looking at weights", len(blocks), "blocks")
        for block in reversed(blocks):
            statistics, grams = {}, dict[int, Tensor]()
            for layer in block.layers:
                if (entry := self.entries.get(layer.name)) is None:
                    continue
                weight = dense_matrix(self.inputs.source, entry, self.inputs.device)
                size = entry.in_features
                if size not in grams:
                    grams[size] = torch.eye(size, dtype=torch.float64, device=self.inputs.device)
                gram = grams[size]
                mean = gram.new_zeros(len(gram))
                statistics[entry.name] = LayerStatistics(weight, gram, mean)
            yield block, statistics
            self.inputs.progress.advance(1, block.name)

    def _keep_moments(self, block: str, sums: Mapping[str, Sensitivity]) -> None:
        """Keep what fits will need of a block's moments."""
        data, entries, workdir = self.inputs.data, self.entries, self.inputs.workdir
        calibration = self.inputs.recipe.calibration
        assert data is not None
        if calibration.output_moments is not False:
            curvatures = {
                entries[path].name: narrowed(item.curvature / item.rows)
                for path, item in sums.items()
            }
            workdir.keep_moments("curvature", block, curvatures)
            weights = {
                f"{entries[path].name}/{data.fitted[batch]}": weight
                for path, item in sums.items()
                for batch, weight in item.weights.items()
            }
            workdir.keep_moments("tokens", block, weights)
        shared = damped_inputs(sums, entries, calibration.damping)
        if shared:
            workdir.keep_moments("inputs", block, shared)

    def order_channels(self, block: Block, statistics: BlockStatistics) -> list[list[ChannelOrder]]:
        """Order channels that layers of a block have in common; those of one layer together."""
        if not self.narrows:
            return []
        source, recipe, device = self.inputs.source, self.inputs.recipe, self.inputs.device
        facts: dict[str, LayerFacts] = {}
        for layer in block.layers:
            entry = self.entries.get(layer.name)
            if entry is not None and entry.name in statistics:
                stored = source.store, source.keymap, f"{layer.name}.bias", device
                bias = read_finite(*stored) if entry.bias else None
                facts[layer.weight_name] = LayerFacts(entry, statistics[entry.name], bias)
        damping = recipe.calibration.damping
        groups: list[list[ChannelOrder]] = []
        for coupling in couplings(block):
            if any(layer.weight_name not in facts for layer in coupling.layers):
                continue
            layers = {*coupling.layers}
            shared = [
                group for group in groups if any(layers & {*o.coupling.layers} for o in group)
            ]
            groups = [group for group in groups if group not in shared]
            order = channel_order(coupling, facts, damping)
            groups.append([*chain.from_iterable(shared), order])
        attentions = (
            () if recipe.attention else attentions_of(source.keymap.model, roles_of(source))
        )
        heads_of = [whole_heads(item) for item in attentions if item.block == block.name]
        for heads in filter(None, heads_of):  # after what they are made of
            if all(layer.weight_name in facts for layer in heads.layers):
                groups.append([channel_order(heads, facts, damping)])
        reductions = {k: r for group in groups for o in group for k, r in o.reductions.items()}
        self.inputs.workdir.keep_moments("channels", block.name, stored_reductions(reductions))
        return groups


def predictor(inputs: SearchInputs) -> Predictor:
    """Look up what is offered to which layers."""
    recipe, plan, source = inputs.recipe, inputs.plan, inputs.source
    by_size = plan.budget is not None and recipe.budget is not None and recipe.budget.is_size
    fraction = plan.budget.fraction if by_size and plan.budget else USUAL
    method = recipe.with_target(None).method  # a tolerance is no option of any layer
    offers: Offers = {}
    if isinstance(method, AutoSpec):
        offers = offered_by(method, fraction, timed=recipe.counts_time)
    elif method is not None:
        offers = {structure_of(method).name: (method,)}
    sized = (entry for entry in plan.layers if entry.kind != "experts")
    entries = {module_path(source, entry.name): entry for entry in sized}
    singles = alone_on(recipe, plan, source) if inputs.several else {}
    fits = WeightFits(fraction) if inputs.data is None else None
    return Predictor(inputs, entries, fraction, offers, singles, fits)


@dataclass(frozen=True, eq=False)
class Predictor:
    """Predicts what candidates lose. Use `predictor`."""

    inputs: SearchInputs
    entries: Mapping[str, LayerPlan]  # by name in the model; experts have no moments
    fraction: float  # kept fraction that the budget comes to
    offers: Offers
    singles: Mapping[str, Spec]
    fits: WeightFits | None  # where there is no data

    def _keeps(self, method: str, role: str) -> bool:
        return self.fits is None or self.fits.keeps(method, role)

    def run(self) -> Predictions:
        """Predict all losses; the model runs once over the calibration data, if there is any."""
        recipe, source = self.inputs.recipe, self.inputs.source
        layers: dict[str, Site] = {}
        singly: dict[str, Site] = {}
        fixed: set[str] = set()
        widths: list[WidthSite] = []
        substitutes: list[Substitute] = []
        weights = {f"{path}.{entry.parameter}": entry for path, entry in self.entries.items()}
        offers_width = NARROWING in self.offers  # wherever all layers around channels are sized
        narrows = offers_width or any(entry.is_narrow for entry in self.inputs.plan.layers)
        measuring = _Measuring(self.inputs, self.entries, narrows)
        for block, statistics in measuring.blocks():
            orders = measuring.order_channels(block, statistics)
            if not recipe.by_loss:
                continue
            planned = [layer for group in block.groups for layer in group]
            entries = {
                layer: self.entries[layer.name] for layer in planned if layer.name in self.entries
            }
            measured = {layer: e for layer, e in entries.items() if e.name in statistics}
            ruled = [layer for layer in measured if follows_rules(recipe, source, layer)]
            fixed |= {measured.pop(layer).key for layer in ruled}
            sites, single = self._sites(block, measured, statistics)
            narrow = [width_site(group, weights, sites) for group in orders if offers_width]
            new = [site for site in narrow if site is not None]
            if sites and self.fits is None and recipe.attention is None:
                substitutes += layer_substitutes(block, sites, self.entries, self.fraction)
                for site in new:
                    substitutes += channel_substitutes(block, site.orders, weights, self.fraction)
            layers |= sites
            singly |= single
            widths += new
        sized, roles = tuple(layers.values()), {site.role for site in layers.values()}
        return Predictions(
            layers=tuple(map(self.fits.corrected, sized)) if self.fits else sized,
            singly=tuple(singly.values()),
            uncorrected=sized if self.fits else (),
            widths=tuple(widths),
            offers=self.offers,
            singles=tuple(self.singles),
            complete=tuple(n for n in self.offers if all(self._keeps(n, role) for role in roles)),
            fixed=frozenset(fixed),
            substitutes=tuple(substitutes),
        )

    def _sites(
        self, block: Block, entries: Mapping[Layer, LayerPlan], statistics: BlockStatistics
    ) -> tuple[dict[str, Site], dict[str, Site]]:
        """List what layers of a block may become, by weight name in the checkpoint.

        That is beside others, and where all take one method. Without data predictions are corrected
        by real fits of some layers.
        """
        layers: dict[str, Site] = {}
        singly: dict[str, Site] = {}
        for layer, entry in entries.items():
            try:
                pair = self._candidates(block, layer, entry, statistics[entry.name])
            except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                raise FitError(
                    f"what layer `{entry.name}` loses cannot be predicted: {message_of(error)}",
                    MORE_DATA,
                ) from error
            layers[entry.key], singly[entry.key] = pair
        fits, blocks = self.fits, roles_of(self.inputs.source).blocks
        if fits and len(self.offers) > 1 and block.name in blocks_to_fit(blocks):
            self._fit(fits, block, layers, statistics)
        return layers, singly

    def _candidates(
        self, block: Block, layer: Layer, entry: LayerPlan, statistics: LayerStatistics
    ) -> tuple[Site, Site]:
        """List what a layer may become: beside others, and where all take one method."""
        inputs, recipe, budget = self.inputs, self.inputs.recipe, self.inputs.recipe.budget
        gram, curvature, rows = statistics.gram, statistics.curvature, statistics.rows
        if curvature is None:  # every layer counts alike
            energy = float(statistics.weight.double().square().sum()) or 1.0
            curvature = torch.eye(entry.out_features).to(gram) / energy
        else:
            damping = recipe.calibration.damping * entry.in_features / rows
            gram = gram + damping * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
        aims = fit_targets_of(entry, statistics.weight, gram, curvature)
        counts_bytes = budget is not None and budget.unit == BYTES
        unit = unit_of(recipe, inputs.source, entry, inputs.plan)
        fine = budget is not None and budget.limits_each

        def costs(parameters: int) -> Costs:
            bytes_ = {BYTES: round(parameters * unit)} if counts_bytes else {}
            return {PARAMETERS: parameters, **bytes_}

        candidates = partial(
            layer_candidates,
            entry=entry,
            sites=[site_of(block, layer, part) for part in layer.parts],
            aims=aims,
            fractions=fine_fractions(entry) if fine else FRACTIONS,
            costs=costs,
            residual_rank=recipe.residual_rank,
            rows=rows,
            sharing=next(len(group) for group in block.groups if layer in group),
            calibrated=self.fits is None,
        )
        together = {
            name: candidates(name, self.offers[name])
            for name in of_one_layer(self.offers)
            if self._keeps(name, entry.role)
        }
        singly = {
            name: together[name]
            if self.offers.get(name) == (self.singles[name],) and name in together
            else candidates(name, [self.singles[name]])
            for name in of_one_layer(self.singles)
        }
        left_out = sum(constant for _, constant in aims) * rows
        dense = costs(entry.dense_parameters)
        first, second = (
            Site((entry.key,), entry.role, dense, (*chain(*offered.values()),), left_out, unit)
            for offered in (together, singly)
        )
        return first, second

    def _fit(
        self, fits: WeightFits, block: Block, sites: Mapping[str, Site], statistics: BlockStatistics
    ) -> None:
        """Fit the layers of a block with each method, of sizes close to the budget."""
        exact = [n for n, specs in self.offers.items() if structure_of(specs[0]).exact_losses]
        for name in {*of_one_layer(self.offers)} - {*exact}:
            closest = {key: site.closest(name, self.fraction) for key, site in sites.items()}
            chosen = {key: item.form for key, item in closest.items() if item is not None}
            for group in block.groups:
                entries = [
                    self.entries[layer.name] for layer in group if layer.name in self.entries
                ]
                entries = [entry for entry in entries if entry.key in chosen]
                members, _ = regrouped(entries, chosen)
                if members:
                    fits.fit(name, members, sites, statistics)
        fits.drop(sites.values(), exact)


def alone_on(recipe: Convert, plan: Plan, source: SourceModel) -> dict[str, Spec]:
    """List methods that are answers on their own, each with the options that suit all layers.

    A method that cannot take all layers is left out: those that stay dense do not count for a
    target, and would make it the best at everything.
    """
    assert isinstance(recipe.method, AutoSpec)
    assert plan.budget is not None
    fraction = plan.budget.fraction
    planned = {path_of(source, entry) for entry in plan.layers}
    uses = {
        (site_of(block, layer, part), len(group), len(layer.parts), layer.experts or 1)
        for block in roles_of(source).blocks
        for group in block.groups
        for layer in group
        if layer.weight_name in planned and not follows_rules(recipe, source, layer)
        for part in layer.parts
    }
    calibrated = not recipe.calibration.is_none

    def suits(spec: Spec) -> bool:
        choice = Choice(spec, recipe.residual_rank, fraction)
        try:
            for site, sharing, parts, copies in uses:
                readers = sharing * parts * copies
                plan_terms(choice, site, readers, copies, calibrated=calibrated)
        except Refusal:
            return False
        return True

    offered = offered_by(recipe.method, fraction, timed=recipe.counts_time, alone=True).items()
    suitable = {name: next(filter(suits, specs), None) for name, specs in offered}
    return {name: spec for name, spec in suitable.items() if spec is not None}
