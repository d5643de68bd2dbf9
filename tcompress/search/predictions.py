"""Candidates of a whole model with their predicted losses, from one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

import torch

from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError, message_of
from tcompress.fitting.channel_orders import (
    ChannelOrder,
)
from tcompress.fitting.layer_fits import LayerStatistics
from tcompress.fitting.workdir import FitWorkplace
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.method_options import AutoSpec
from tcompress.planning.costs import Choice, parameter_bytes, plan_terms
from tcompress.planning.entries import Form, LayerPlan, Plan
from tcompress.planning.planner import follows_rules, regrouped, site_of
from tcompress.planning.sites import alone_of, offered_by, roles_of, structure_of
from tcompress.progress import Progress
from tcompress.roles import Block, Layer
from tcompress.roles.find import attentions_of
from tcompress.search.candidates import BYTES, PARAMETERS, Candidate, Costs, Site, WidthSite
from tcompress.search.layer_statistics import Measuring
from tcompress.search.predict import (
    FRACTIONS,
    WeightFits,
    blocks_to_fit,
    fine_fractions,
    fit_targets_of,
    options_of,
)
from tcompress.search.substitution import Substitute, channel_substitutes, layer_substitutes
from tcompress.search.width import is_offered, width_site, without_width
from tcompress.structures import Refusal, Spec

USUAL = 0.25
"""Kept fraction for which structures are offered where a budget limits an error."""

Offers = Mapping[str, tuple[Spec, ...]]
"""Options of methods by their name, in the order of preference."""


@dataclass(frozen=True)
class Predictions:
    """All that a budget may choose from, and what helps to choose.

    Attributes:
        layers: Layers, each by itself.
        alone: The same with what a method offers where all layers take it.
        quick: The same before fits of some layers corrected the losses; empty where none did.
        widths: Layers that have channels in common.
        offers: Methods of `layers`, in the order of preference.
        single: Methods that are answers by themselves, as far as they are tried.
        whole: Methods that all layers may take.
        fixed: Weights of layers that have a size of their own.
        substitutes: Candidates that may be put alone into the dense model.
    """

    layers: tuple[Site, ...] = ()
    alone: tuple[Site, ...] = ()
    quick: tuple[Site, ...] = ()
    widths: tuple[WidthSite, ...] = ()
    offers: Offers | None = None
    single: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    fixed: frozenset[str] = frozenset()
    substitutes: tuple[Substitute, ...] = ()

    @property
    def methods(self) -> list[str]:
        """Names of the methods that are offered."""
        return [*(self.offers or ())]

    def costing(self, unit: str, cost: Callable[[Costs], int]) -> Predictions:
        """Add what everything takes of a resource, by its other costs."""

        def priced(site: Site) -> Site:
            items = (item.costing(unit, cost(item.costs)) for item in site.candidates)
            dense = {**site.dense, unit: cost(site.dense)} if site.dense else site.dense
            return replace(site, candidates=tuple(items), dense=dense)

        tables = (self.layers, self.alone, self.quick)
        layers, alone, quick = (tuple(map(priced, sites)) for sites in tables)
        widths = cast(tuple[WidthSite, ...], tuple(map(priced, self.widths)))
        return replace(self, layers=layers, alone=alone, quick=quick, widths=widths)


@dataclass(frozen=True)
class _BlockSites:
    """What the layers of one block may become, by weight name in the checkpoint."""

    layers: Mapping[str, Site]
    alone: Mapping[str, Site]
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Predictor:
    """Predicts what candidates lose. Use `Predictor.of`."""

    source: SourceModel
    recipe: Convert
    plan: Plan
    measuring: Measuring
    fraction: float  # kept fraction that the budget comes to
    offers: Offers
    single: Mapping[str, Spec]
    fits: WeightFits

    @classmethod
    def of(
        cls,
        source: SourceModel,
        recipe: Convert,
        plan: Plan,
        data: CalibrationData | None,
        workdir: FitWorkplace,
        device: torch.device,
        progress: Progress,
        *,
        several: bool,
    ) -> Predictor:
        """Look up what is offered to which layers.

        With `several` each method that takes all layers is offered alone too.
        """
        by_size = plan.budget is not None and recipe.budget is not None and recipe.budget.is_size
        fraction = plan.budget.fraction if by_size and plan.budget else USUAL
        method = recipe.with_target(None).method  # a tolerance is no option of any layer
        offers: Offers = {}
        if isinstance(method, AutoSpec):
            offers = offered_by(method, fraction, timed=recipe.counts_time)
        elif method is not None:
            offers = {structure_of(method).name: (method,)}
        runtime, roles = source.keymap.runtime_name, roles_of(source)
        entries = {runtime(e.name) or e.name: e for e in plan.layers if e.kind != "experts"}
        replaced = recipe.attention is not None
        attentions = () if replaced else attentions_of(source.keymap.model, roles)
        narrows = is_offered(offers) or any(entry.is_narrow for entry in plan.layers)
        measuring = Measuring(
            source,
            recipe,
            data,
            workdir,
            device,
            progress,
            entries,
            attentions,
            needs_statistics=recipe.by_loss or narrows,
            needs_channels=narrows,
        )
        single = alone_on(recipe, plan, source) if several else {}
        return cls(source, recipe, plan, measuring, fraction, offers, single, WeightFits(fraction))

    @property
    def _calibrated(self) -> bool:
        return self.measuring.data is not None

    @property
    def _entries(self) -> Mapping[str, LayerPlan]:
        return self.measuring.entries

    def run(self) -> Predictions:
        """Predict all losses; the model runs once over the calibration data, if there is any."""
        blocks: list[_BlockSites] = []
        widths: list[WidthSite] = []
        substitutes: list[Substitute] = []
        for block, statistics in self.measuring.blocks():
            orders = self.measuring.order_channels(block, statistics)
            if not self.recipe.by_loss:
                continue
            sites = self._sites(block, statistics)
            narrow = [*self._width_sites(orders, sites.layers)]
            if sites.layers and self._calibrated and self.recipe.attention is None:
                substitutes += self._substitutes(block, sites.layers, narrow)
            blocks.append(sites)
            widths += narrow
        layers = tuple(site for sites in blocks for site in sites.layers.values())
        roles = {site.role for site in layers}
        keeps = self.fits.keeps
        return Predictions(
            layers=layers if self._calibrated else tuple(map(self.fits.corrected, layers)),
            alone=tuple(site for sites in blocks for site in sites.alone.values()),
            quick=layers if not self._calibrated else (),
            widths=tuple(widths),
            offers=self.offers,
            single=tuple(self.single),
            whole=tuple(n for n in self.offers if all(keeps(n, role) for role in roles)),
            fixed=frozenset(key for sites in blocks for key in sites.fixed),
            substitutes=tuple(substitutes),
        )

    def _sites(self, block: Block, statistics: Mapping[str, LayerStatistics]) -> _BlockSites:
        """List what the layers of a block may become, and correct it in some by real fits."""
        layers: dict[str, Site] = {}
        single: dict[str, Site] = {}
        fixed: list[str] = []
        for layer in chain.from_iterable(block.groups):
            entry = self._entries.get(layer.name)
            if entry is None or entry.name not in statistics:
                continue
            if follows_rules(self.recipe, self.source, layer):
                fixed.append(entry.key)
                continue
            try:
                pair = self._candidates(block, layer, entry, statistics[entry.name])
            except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                raise FitError(
                    f"what layer `{entry.name}` loses cannot be predicted: {message_of(error)}",
                    "use more calibration data or a larger `damping`, or leave the layer out "
                    "with `--keep`",
                ) from error
            layers[entry.key], single[entry.key] = pair
        fitted = blocks_to_fit(roles_of(self.source).blocks)
        if not self._calibrated and len(self.offers) > 1 and block.name in fitted:
            exact = [n for n, specs in self.offers.items() if structure_of(specs[0]).exact_losses]
            for name in {*without_width(self.offers)} - {*exact}:
                self._fit(name, block, layers, statistics)
            self.fits.drop(layers.values(), exact)
        return _BlockSites(layers, single, tuple(fixed))

    def _candidates(
        self, block: Block, layer: Layer, entry: LayerPlan, statistics: LayerStatistics
    ) -> tuple[Site, Site]:
        """List what a layer may become: beside others, and where all take one method."""
        moments = statistics.whole
        gram, curvature, rows = moments.gram, moments.curvature, moments.rows
        damping = self.recipe.calibration.damping * entry.in_features / rows
        if curvature is None:  # every layer counts alike
            energy = float(statistics.weight.double().square().sum()) or 1.0
            curvature = torch.eye(entry.out_features).to(gram) / energy
        else:
            gram = gram + damping * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
        aims = fit_targets_of(entry, statistics.weight, gram, curvature)
        budget = self.recipe.budget
        counts_bytes = budget is not None and budget.unit == BYTES
        where = (self.source, entry, self.plan, self.recipe.dtype)
        unit = parameter_bytes(*where) if counts_bytes else 1.0
        fine = budget is not None and budget.limits_each
        sharing = next(len(group) for group in block.groups if layer in group)

        def costs(parameters: int) -> Costs:
            bytes_ = {BYTES: round(parameters * unit)} if counts_bytes else {}
            return {PARAMETERS: parameters, **bytes_}

        def candidates(name: str, specs: Sequence[Spec]) -> tuple[Candidate, ...]:
            offered = options_of(
                entry,
                [site_of(block, layer, part) for part in layer.parts],
                aims,
                specs,
                fine_fractions(entry) if fine else FRACTIONS,
                residual_rank=self.recipe.residual_rank,
                rows=rows,
                sharing=sharing,
                calibrated=self._calibrated,
            )
            return tuple(
                Candidate(name, ((entry.key, Form(parts)),), loss, costs(parameters))
                for parts, parameters, loss in offered
            )

        offered_together = {
            name: candidates(name, self.offers[name])
            for name in without_width(self.offers)
            if self.fits.keeps(name, entry.role)
        }
        offered_alone = {
            name: offered_together[name]
            if self.offers.get(name) == (self.single[name],) and name in offered_together
            else candidates(name, [self.single[name]])
            for name in without_width(self.single)
        }
        left_out = sum(constant for _, constant in aims) * rows

        def site(offered: Mapping[str, tuple[Candidate, ...]]) -> Site:
            every = tuple(chain.from_iterable(offered.values()))
            dense = costs(entry.dense_parameters)
            return Site((entry.key,), entry.role, dense, every, left_out, unit)

        return site(offered_together), site(offered_alone)

    def _fit(
        self,
        name: str,
        block: Block,
        sites: Mapping[str, Site],
        statistics: Mapping[str, LayerStatistics],
    ) -> None:
        """Fit the layers of a block with one method, of sizes close to the budget."""
        closest = {key: site.closest(name, self.fits.fraction) for key, site in sites.items()}
        chosen = {key: item.form for key, item in closest.items() if item is not None}
        damping = 0.0 if not self._calibrated else self.recipe.calibration.damping
        for group in block.groups:
            entries = [self._entries[layer.name] for layer in group if layer.name in self._entries]
            entries = [entry for entry in entries if entry.key in chosen]
            members, _ = regrouped(entries, chosen)
            if members:
                self.fits.fit(name, members, sites, statistics, damping)

    def _width_sites(
        self, groups: Iterable[Sequence[ChannelOrder]], sites: Mapping[str, Site]
    ) -> Iterator[WidthSite]:
        """Offer fewer channels wherever all layers around them are sized by the budget."""
        entries = {f"{path}.{entry.parameter}": entry for path, entry in self._entries.items()}
        for orders in groups if is_offered(self.offers) else ():
            if (site := width_site(orders, entries, sites)) is not None:
                yield site

    def _substitutes(
        self, block: Block, sites: Mapping[str, Site], widths: Iterable[WidthSite]
    ) -> Iterator[Substitute]:
        """List what may be put alone into the dense model."""
        names = (layer.name for layer in block.layers)
        entries = {name: self._entries[name] for name in names if name in self._entries}
        yield from layer_substitutes(block, sites, entries, self.fraction)
        for site in widths:
            yield from channel_substitutes(block, site.orders, entries, self.fraction)


def alone_on(recipe: Convert, plan: Plan, source: SourceModel) -> dict[str, Spec]:
    """List methods that are answers on their own, each with the options that suit all layers.

    A method that cannot take all layers is left out: those that stay dense do not count for a
    target, and would make it the best at everything.
    """
    assert isinstance(recipe.method, AutoSpec)
    assert plan.budget is not None
    fraction = plan.budget.fraction
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
        choice = Choice(spec, recipe.residual_rank, fraction)
        try:
            for site, sharing, parts, copies in places:
                readers = sharing * parts * copies
                plan_terms(choice, site, readers, copies, calibrated=calibrated)
        except Refusal:
            return False
        return True

    offered = alone_of(recipe.method, fraction, timed=recipe.counts_time).items()
    suitable = {name: next(filter(suits, specs), None) for name, specs in offered}
    return {name: spec for name, spec in suitable.items() if spec is not None}
