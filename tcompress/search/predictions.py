"""Candidates of a whole model with their predicted losses, from one pass over the data.

What is measured of layers, block by block, tells what candidates lose; moments that fits will need
are kept in the working folder. Without data the weights' own energy stands in for moments: every
layer counts alike, and so does every direction of its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from math import ceil, log
from typing import Any

import torch
from torch import Tensor

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.blockwise.sensitivity import BackwardWalk, Sensitivity, damped_inputs
from tcompress.fitting.channel_orders import (
    BlockStatistics,
    ChannelOrder,
    LayerStatistics,
    order_by_weights,
    order_channels,
    stored_reductions,
)
from tcompress.fitting.layer_fits import CURVATURE_DAMPING, MORE_DATA, dense_matrix
from tcompress.fitting.workdir import narrowed
from tcompress.linalg.fits import damped_curvature
from tcompress.linalg.moments import condensed_weight, naming, with_ridge
from tcompress.models import SourceModel, read_finite
from tcompress.options import Convert
from tcompress.options.method_options import NARROWING, AutoSpec
from tcompress.planning.costs import Choice, path_of, plan_terms, term_cost, unit_of
from tcompress.planning.entries import LayerForm, LayerPlan, Plan
from tcompress.planning.planner import follows_rules, site_of
from tcompress.planning.sites import couplings, module_path, roles_of, structure_of
from tcompress.roles import Block, Layer
from tcompress.roles.find import attentions_of
from tcompress.search.candidates import (
    BYTES,
    PARAMETERS,
    Candidate,
    Costs,
    SearchInputs,
    Site,
    WidthSite,
    all_couplings,
    condensed_layers,
    names_offered,
    of_one_layer,
    offered_in,
    width_sites,
)
from tcompress.search.corrections import (
    Substitute,
    WeightFits,
    blocks_to_fit,
    channel_substitutes,
    close_to,
    layer_substitutes,
    united,
)
from tcompress.structures import Layout, Refusal, Spec, Target, structure
from tcompress.structures import Site as StructureSite
from tcompress.structures.base import predicted_loss
from tcompress.structures.modules.linear import PartLayout

USUAL = 0.25  # kept fraction for which structures are offered where a budget limits an error

Offers = Mapping[str, tuple[Spec, ...]]  # options of methods by name, in the order of preference


@dataclass(frozen=True)
class Predictions:
    """All that a budget may choose from, and what helps to choose."""

    layers: tuple[Site, ...] = ()  # layers, each by itself
    singly: tuple[Site, ...] = ()
    """With data, what a method offers where all layers take it; without, `layers` uncorrected."""
    widths: tuple[WidthSite, ...] = ()  # layers that have channels in common
    offers: Offers = field(default_factory=dict)  # methods of `layers`, in the order of preference
    singles: tuple[str, ...] = ()  # methods that are answers by themselves, if tried
    complete: tuple[str, ...] = ()  # methods that all layers may take
    fixed: frozenset[str] = frozenset()  # weights of layers that have a size of their own
    substitutes: tuple[Substitute, ...] = ()  # that may be put alone into the dense model

    def mapped(self, change: Callable[[Any], Any]) -> Predictions:
        """Return the same with other sites: of layers by themselves, and of those together."""
        layers, singly = (tuple(map(change, sites)) for sites in (self.layers, self.singly))
        return replace(self, layers=layers, singly=singly, widths=tuple(map(change, self.widths)))

    def costing(self, unit: str, cost: Callable[[Costs], int]) -> Predictions:
        """Add what everything takes of a resource, by its other costs."""

        def priced(site: Site) -> Site:
            costs = (cost(item.costs) for item in site.candidates)
            return site.costing(unit, costs, cost(site.dense) if site.dense else 0)

        return self.mapped(priced)


class Predictor:
    """Measures a model block by block, and predicts what candidates lose."""

    def __init__(self, inputs: SearchInputs) -> None:
        self.inputs = inputs
        recipe, plan, source = inputs.recipe, inputs.plan, inputs.source
        by_size = recipe.budget is not None and recipe.budget.is_size
        self.fraction = plan.budget.fraction if by_size and plan.budget else USUAL
        method = recipe.with_target(None).method  # a tolerance is no option of any layer
        self.offers: Offers = {}
        if isinstance(method, AutoSpec):
            self.offers = offered_in(recipe, source, self.fraction)
        elif method is not None:
            self.offers = {structure_of(method).name: (method,)}
        sized = (entry for entry in plan.layers if entry.kind != "experts")
        self.entries = {module_path(source, entry.name): entry for entry in sized}
        self.narrows = NARROWING in self.offers or any(entry.is_narrow for entry in plan.layers)
        self.singles = alone_on(recipe, plan, source) if inputs.several else {}
        self.fits = WeightFits(self.fraction)  # made where there is no data

    def run(self) -> Predictions:
        """Predict all losses; the model runs once over the calibration data, if there is any."""
        inputs, recipe = self.inputs, self.inputs.recipe
        layers, singly, widths = list[Site](), list[Site](), list[WidthSite]()
        substitutes, fixed = list[Substitute](), set[str]()
        for block, statistics in self._weights() if inputs.data is None else self._walk():
            orders = self._order_channels(block, statistics) if self.narrows else []
            if not recipe.by_loss:
                continue
            sites: dict[str, Site] = {}
            ruled = self._ruled(block)
            for layer in statistics:
                entry = self.entries[layer.name]
                if layer in ruled:
                    fixed.add(entry.key)
                    continue
                with naming(f"what layer `{entry.name}` loses cannot be predicted", MORE_DATA):
                    sites[entry.key], alone = self._sites(block, layer, entry, statistics[layer])
                singly.append(alone)
            offers_width = NARROWING in self.offers  # wherever all layers around are sized
            narrower = [*width_sites(orders, self.entries, sites)] if offers_width else []
            if inputs.data is None:
                self._fit(block, sites, statistics)
            elif sites and recipe.attention is None:
                substitutes += layer_substitutes(block, sites, self.entries, self.fraction)
                substitutes += channel_substitutes(block, narrower, self.entries, self.fraction)
            layers += sites.values()
            widths += narrower
        dropped = {name for name, _ in self.fits.dropped}
        return Predictions(
            layers=tuple(map(self.fits.corrected, layers)),
            singly=tuple(layers if inputs.data is None else singly),
            widths=tuple(widths),
            offers=self.offers,
            singles=tuple(self.singles),
            complete=tuple(name for name in self.offers if name not in dropped),
            fixed=frozenset(fixed),
            substitutes=tuple(substitutes),
        )

    def _walk(self) -> Iterator[tuple[Block, BlockStatistics]]:
        """Measure moments of all layers by a backward pass, the last block first."""
        inputs, source, recipe = self.inputs, self.inputs.source, self.inputs.recipe
        # Random gradients follow the index of a batch: copies have others.
        probes, progress = recipe.calibration.probes, inputs.progress
        batches = inputs.measured_data.fitted_batches * probes
        sampler, scratch = sampler_of(source, recipe.calibration.seed), inputs.workdir.scratch()
        condensed = condensed_layers(recipe, inputs.plan, source)
        walk = BackwardWalk(source, batches, sampler, scratch, inputs.device, condensed)
        passes = 2 * len(roles_of(source).blocks)
        progress.stage("measuring what layers are worth", passes, "passes")
        for block, sums in walk.run(lambda name, way: progress.advance(1, f"{name} {way}")):
            statistics = self._statistics(block, sums, condensed)
            yield block, statistics
            statistics.clear()  # whoever has it: the next block needs the memory

    def _statistics(
        self, block: Block, sums: dict[str, Sensitivity], condensed: Collection[str]
    ) -> dict[Layer, LayerStatistics]:
        """Take what was measured of a block, by name, and keep what fits will need of it."""
        inputs, recipe, source = self.inputs, self.inputs.recipe, self.inputs.source
        planned = [layer for layer in block.layers if layer.name in self.entries]
        reached = [layer for layer in planned if sums[layer.name].rows]
        small = {
            name: self._condensed_weight(self.entries[name], sums[name])
            for name in (layer.name for layer in reached if layer.name in condensed)
        }
        taken = {layer.name: sums[layer.name] for layer in reached}
        self._keep_moments(block.name, taken, small)
        statistics, grams = dict[Layer, LayerStatistics](), dict[tuple[int, bool], Tensor]()
        for layer in reached if recipe.by_loss or self.narrows else ():
            entry, of_layer = self.entries[layer.name], sums.pop(layer.name)
            weight = dense_matrix(source, entry, inputs.device)  # one copy at a time
            read = of_layer.inputs
            last = all(other.inputs is not read for other in sums.values())
            if (key := (id(read), entry.bias)) not in grams:
                with naming(f"layer `{entry.name}`", MORE_DATA):
                    grams[key] = read.moments(centred=entry.bias, last=last).gram
            rows = max(1, of_layer.rows // recipe.calibration.probes)
            curvature = None
            if layer.name not in small:
                curvature = of_layer.curvature.total() / of_layer.rows
            stored = (source.store, source.keymap, f"{layer.name}.bias", inputs.device)
            bias = read_finite(*stored) if entry.bias and self.narrows else None
            of_inputs = grams[key], read.means[0]
            facts = (weight, *of_inputs, curvature, small.get(layer.name), rows, bias)
            statistics[layer] = LayerStatistics(entry, *facts)
        sums.clear()
        return statistics

    def _weights(self) -> Iterator[tuple[Block, BlockStatistics]]:
        """Look at all layers in the norm of their weights."""
        progress, blocks = self.inputs.progress, roles_of(self.inputs.source).blocks
        progress.stage("looking at weights", len(blocks), "blocks")
        for block in reversed(blocks):
            statistics = _of_weights(block, self.entries, self.inputs)
            yield block, statistics
            statistics.clear()
            progress.advance(1, block.name)

    def _condensed_weight(self, entry: LayerPlan, sums: Sensitivity) -> Tensor:
        """Condense the weight of a layer by the moments of gradients that it sends back."""
        weight = dense_matrix(self.inputs.source, entry, self.inputs.device)
        moment = sums.curvature.total() / sums.rows
        with naming(f"layer `{entry.name}`", MORE_DATA):
            return narrowed(condensed_weight(moment, sums.ridge(CURVATURE_DAMPING), weight))

    def _keep_moments(
        self, block: str, sums: dict[str, Sensitivity], condensed: Mapping[str, Tensor]
    ) -> None:
        """Keep what fits will need of a block's moments; `sums` are by name, and given up."""
        data, workdir = self.inputs.measured_data, self.inputs.workdir
        calibration = self.inputs.recipe.calibration
        if calibration.output_moments is not False:
            named = {self.entries[path].name: item for path, item in sums.items()}
            # Plain matrices are fitted by inputs alone.
            by_inputs = names_offered(self.inputs.recipe, self.inputs.source) == (NARROWING,)
            fitted = [p for p in sums if not (by_inputs and self.entries[p].is_plain)]
            curves = {
                self.entries[path].name: narrowed(sums[path].curvature.total() / sums[path].rows)
                for path in fitted
                if path not in condensed
            }
            workdir.keep_moments("curvature", block, curves)
            small = {self.entries[p].name: condensed[p] for p in fitted if p in condensed}
            workdir.keep_moments("condensed", block, small)
            indices, weights = [*map(data.place, data.fitted)], dict[str, Tensor]()
            for name, item in named.items():
                for batch, weight in item.weights.items():  # copies of a batch follow all batches
                    key = f"{name}/{indices[batch % len(indices)]}"
                    others = weights.get(key, torch.zeros_like(weight))
                    weights[key] = weight + others if others.shape == weight.shape else weight
            workdir.keep_moments("tokens", block, weights)
        damping = calibration.damping * calibration.probes  # by tokens, each of which counts once
        if shared := damped_inputs(sums, self.entries, damping):
            workdir.keep_moments("inputs", block, shared)

    def _ruled(self, block: Block) -> set[Layer]:
        """Layers that rules give a size, and those that have fewer channels in common with them."""
        recipe, source = self.inputs.recipe, self.inputs.source
        ruled = {layer for layer in block.layers if follows_rules(recipe, source, layer)}
        for layers in united({*coupling.layers} for coupling in couplings(block) if ruled):
            entries = [self.entries.get(layer.name) for layer in layers]
            if layers & ruled and any(entry is not None and entry.is_narrow for entry in entries):
                ruled |= layers
        return ruled

    def _order_channels(
        self, block: Block, statistics: BlockStatistics
    ) -> list[list[ChannelOrder]]:
        """Order channels that layers of a block have in common; those of one layer together."""
        source, recipe, device = self.inputs.source, self.inputs.recipe, self.inputs.device
        roles = roles_of(source)
        attentions = () if recipe.attention else attentions_of(source.keymap.model, roles)
        if self.inputs.data is None:
            entries = {layer.weight_name: item.entry for layer, item in statistics.items()}
            order = partial(order_by_weights, entries=entries, source=source, device=device)
        else:
            damping = recipe.calibration.damping
            order = partial(order_channels, statistics=statistics, damping=damping)
        coupled = all_couplings(block, attentions)
        orders = [order(item) for item in coupled if statistics.keys() >= {*item.layers}]
        reductions = {key: item for order in orders for key, item in order.reductions.items()}
        self.inputs.workdir.keep_moments("channels", block.name, stored_reductions(reductions))
        parts = [order for order in orders if order.coupling.kind != "heads"]
        together = united({*order.coupling.layers} for order in parts)
        groups = [[o for o in parts if layers.issuperset(o.coupling.layers)] for layers in together]
        return [*groups, *([order] for order in orders if order not in parts)]

    def _sites(
        self, block: Block, layer: Layer, entry: LayerPlan, statistics: LayerStatistics
    ) -> tuple[Site, Site]:
        """List what a layer may become: beside others, and where all take one method."""
        inputs, recipe, budget = self.inputs, self.inputs.recipe, self.inputs.recipe.budget
        gram, curvature, rows = statistics.gram, statistics.curvature, statistics.rows
        if inputs.data is None:  # every layer counts alike
            energy = float(statistics.weight.double().square().sum()) or 1.0
            curvature = torch.eye(entry.out_features).to(gram) / energy
        else:
            damping = recipe.calibration.damping * entry.in_features / rows
            gram = with_ridge(gram, damping * gram.diagonal().mean())
        splits: list[tuple[StructureSite, FitTarget]] = []
        for part in layer.parts:
            span = layer.rows_of(part)
            weight = statistics.weight[span].double()
            # The moments of inputs are damped, those of gradients are not.
            if curvature is None:
                target = Target(None, gram, dense_weight=weight, condensed=statistics.condensed)
            else:
                curve = damped_curvature(curvature[span, span], CURVATURE_DAMPING)
                target = Target.of_weight(weight, gram, curvature=curve)
            # K^T W G L^-T is K^T W L here: its squares add up to what is lost without the layer.
            aim = target, float(target.whitened.square().sum())
            splits.append((site_of(block, layer, part), aim))
        unit = unit_of(recipe, inputs.source, entry, inputs.plan)
        dense = {PARAMETERS: entry.dense_parameters}
        if budget is not None and budget.unit == BYTES:
            dense[BYTES] = round(entry.dense_parameters * unit)
        left_out = sum(constant for _, (_, constant) in splits) * rows
        site = Site((entry.key,), entry.role, dense, (), left_out, unit)
        sharing = next(len(group) for group in block.groups if layer in group)
        of_each = budget is not None and budget.limits_each
        fractions = fine_fractions(entry) if of_each else fractions_for(self.fraction)
        readers = sharing * len(layer.parts)
        offered = partial(layer_candidates, inputs, site, splits, fractions, rows, readers)
        dropped = {name for name, role in self.fits.dropped if role == entry.role}
        names = (name for name in of_one_layer(self.offers) if name not in dropped)
        beside = {name: offered(name, self.offers[name]) for name in names}
        alone = {
            name: beside[name]
            if name in beside and self.offers[name] == (self.singles[name],)
            else offered(name, (self.singles[name],))
            for name in of_one_layer(self.singles)
        }
        first, second = (tuple(chain(*of_methods.values())) for of_methods in (beside, alone))
        return replace(site, candidates=first), replace(site, candidates=second)

    def _fit(self, block: Block, sites: Mapping[str, Site], statistics: BlockStatistics) -> None:
        """Fit layers of some blocks with each method, of sizes close to the budget."""
        blocks = roles_of(self.inputs.source).blocks
        if len(self.offers) < 2 or block.name not in blocks_to_fit(blocks):
            return
        named = {self.entries[layer.name].name: item for layer, item in statistics.items()}
        exact = [n for n, specs in self.offers.items() if structure_of(specs[0]).exact_losses]
        # In one order, since processes fit together.
        for name in (name for name in of_one_layer(self.offers) if name not in exact):
            for group in close_to(self.fraction, name, block, sites, self.entries):
                self.fits.fit(group, sites, named)
        self.fits.drop(sites.values(), exact)


def _of_weights(
    block: Block, entries: Mapping[str, LayerPlan], inputs: SearchInputs
) -> dict[Layer, LayerStatistics]:
    """Statistics of the planned layers of a block whose inputs count as independent and alike."""
    planned = [layer for layer in block.layers if layer.name in entries]
    sizes = {layer.in_features for layer in planned}
    grams = {n: torch.eye(n, dtype=torch.float64, device=inputs.device) for n in sizes}
    statistics = {}
    for layer in planned:
        entry, gram = entries[layer.name], grams[layer.in_features]
        weight = dense_matrix(inputs.source, entry, inputs.device)
        statistics[layer] = LayerStatistics(entry, weight, gram, gram.new_zeros(len(gram)))
    return statistics


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
        (site_of(block, layer, part), len(group) * len(layer.parts), layer.experts or 1)
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
            for site, readers, copies in uses:
                plan_terms(choice, site, readers * copies, copies, calibrated=calibrated)
        except Refusal:
            return False
        return True

    offered = offered_in(recipe, source, fraction, alone=True).items()
    return {name: spec for name, specs in offered if (spec := next(filter(suits, specs), None))}


# Candidates of one layer, and what they are predicted to lose.


_LOWEST, _STEP, _STEPS = 0.01, 1.06, 78  # kept fractions on offer, up to nine tenths

FitTarget = tuple[Target, float]
"""What the fit of one output split of a layer aims at, and what it costs to leave it out."""


def layer_candidates(
    inputs: SearchInputs,
    site: Site,
    splits: Sequence[tuple[StructureSite, FitTarget]],
    fractions: Sequence[float],
    rows: int,
    readers: int,
    method: str,
    specs: Sequence[Spec],
) -> tuple[Candidate, ...]:
    """List what a layer may become with one method; fractions ascend.

    Of the options the first that the layer's dimensions allow counts. Targets of its output splits
    are means over so many rows of data.
    """
    calibrated = inputs.data is not None

    def planned(spec: Spec, fraction: float) -> tuple[PartLayout, ...] | None:
        choice, parts = Choice(spec, inputs.recipe.residual_rank, fraction), []
        for split, _ in splits:
            try:
                terms = plan_terms(choice, split, readers, calibrated=calibrated)
            except Refusal:
                return None
            parts.append(PartLayout(name=split.role, terms=terms))
        return tuple(parts)

    for spec in specs:
        layouts = filter(None, (planned(spec, fraction) for fraction in fractions))
        sized = [
            (parts, sum(term_cost(term, readers, 1) for part in parts for term in part.terms))
            for parts, _ in groupby(layouts)
        ]
        offered = [(parts, size) for parts, size in sized if size < site.dense[PARAMETERS]]
        if offered:
            losses = [
                _split_losses(aim, [parts[index].terms for parts, _ in offered])
                for index, (_, aim) in enumerate(splits)
            ]
            totals = [max(0.0, sum(of_splits)) * rows for of_splits in zip(*losses, strict=True)]
            candidates = []
            for (parts, size), loss in zip(offered, totals, strict=True):
                costs = {name: round(site.taken_by(round(size), name)) for name in site.dense}
                forms = ((site.key, LayerForm(parts)),)
                candidates.append(Candidate(method, forms, loss, costs))
            return tuple(candidates)
    return ()


def fractions_for(budget: float) -> tuple[float, ...]:
    """List kept fractions on offer, down to a quarter of a budget that is a small fraction."""
    lower = max(0, ceil(log(4 * _LOWEST / max(budget, 1e-6)) / log(_STEP)))
    return tuple(_LOWEST * _STEP**n for n in range(-lower, _STEPS))


def fine_fractions(entry: LayerPlan) -> tuple[float, ...]:
    """Kept fractions close enough that no rank is passed over."""
    widths = [part.dense_features for part in entry.parts]
    step = (entry.in_features + min(widths)) / (2.0 * entry.in_features * max(widths))
    return tuple(step * n for n in range(1, int(1 / step) + 1))


def _split_losses(aim: FitTarget, offered: Sequence[tuple[Layout, ...]]) -> list[float]:
    """Predicts the loss of every way to store one weight.

    A low-rank summand beside another one is judged by what the other leaves over, once for all
    ranks. Where the other one differs, one pair is, and the rest by what the others lose alone.
    """
    pairs = [terms for terms in offered if len(terms) > 1]
    mains = [main for main, _ in pairs]
    middle, of_pairs = len(pairs) // 2, list[float]()
    if len({*mains}) > 1:
        of_mains = _losses(aim, mains)
        [both] = _losses(_remainder(aim, mains[middle]), [pairs[middle][1]])
        ratio = both / of_mains[middle] if of_mains[middle] > 0 else 0.0
        of_pairs = [ratio * loss for loss in of_mains]
    elif pairs:
        of_pairs = _losses(_remainder(aim, mains[0]), [residual for _, residual in pairs])
    singles = iter(_losses(aim, [terms[0] for terms in offered if len(terms) == 1]))
    doubles = iter(of_pairs)
    return [next(doubles if len(terms) > 1 else singles) for terms in offered]


def _losses(aim: FitTarget, layouts: Sequence[Layout]) -> list[float]:
    return structure(layouts[0].structure).losses(*aim, layouts) if layouts else []


def _remainder(aim: FitTarget, main: Layout) -> FitTarget:
    """What the first summand leaves to the second."""
    target, constant = aim
    dense = structure(main.structure).quick_fit(target, main)
    remainder = target.aiming_at(target.product - dense @ target.full_gram())
    return remainder, predicted_loss(dense, target, constant)
