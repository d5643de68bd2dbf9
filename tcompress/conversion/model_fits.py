"""Fits of a whole model whose forms are chosen: tables, shared factors, blocks, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tcompress.blockwise.comparison import OutputComparison
from tcompress.blockwise.output_sampler import OutputSampler, sampler_of
from tcompress.blockwise.sensitivity import damped_inputs, input_moments
from tcompress.conversion.conversion import Chosen
from tcompress.conversion.outputs import Cluster, Outputs, with_unreached
from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError, message_of
from tcompress.fitting.block_fitter import BlockFitter
from tcompress.fitting.block_rewrite import BlockResult, FitInputs
from tcompress.fitting.channel_orders import (
    Reductions,
    completed,
    lift_of,
    narrowed_rows,
    read_reductions,
)
from tcompress.fitting.embeddings import EMBEDDINGS, fit_embeddings, read_table
from tcompress.fitting.first_values import start_layer, start_shared_factors
from tcompress.fitting.layer_fits import (
    CURVATURE_DAMPING,
    WIDER,
    LayerMoments,
    SharedFactors,
    fit_layers,
)
from tcompress.fitting.workdir import FitWorkplace
from tcompress.hf.build import fill
from tcompress.linalg.fits import damped_curvature
from tcompress.linalg.moments import is_finite
from tcompress.models import SourceModel, read_finite
from tcompress.options import Convert
from tcompress.planning.costs import path_of
from tcompress.planning.entries import FactorsKey, LayerPlan, Plan
from tcompress.planning.sites import roles_of
from tcompress.progress import Progress
from tcompress.roles import Layer
from tcompress.structures import Layout, Target, structure
from tcompress.structures.base import SharesFactors, shared_of
from tcompress.structures.modules.embedding import StructuredEmbedding
from tcompress.structures.modules.linear import factor_layouts


@dataclass(frozen=True, eq=False)
class Fits:
    """What fits found beside the tensors that the working folder keeps.

    Attributes:
        plan: The plan, with notes of layers that no data reached.
        factors: Those that layers share.
        comparison: With what the dense model puts out on data held out, where it was asked for.
        errors: Relative errors of all layers by weight name, as far as they are fitted.
    """

    plan: Plan
    factors: SharedFactors = field(default_factory=dict)
    comparison: OutputComparison | None = None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)


def fit(chosen: Chosen, workdir: FitWorkplace) -> Fits:
    """Fit everything that is rewritten; what no data reaches is fitted to its weights."""
    conversion, outputs = chosen.conversion, chosen.outputs
    data = conversion.data
    several = data is not None and len({*data.origins.values()}) > 1
    several = several or conversion.statistics is not None  # models of a family are compared
    measures = conversion.recipe.measures_sensitivity or chosen.plan.depth is not None
    sampler = sampler_of(conversion.dense) if several and measures else None
    fits = fit_on_data(chosen, workdir, workdir, sampler)
    clusters: dict[str, list[Cluster]] = {}
    for cluster in {id(item): item for item in outputs.made.values()}.values():
        clusters.setdefault(chosen.block_of(cluster), []).append(cluster)
    unfitted = {name: item for name, item in clusters.items() if workdir.errors(name) is None}
    if unfitted:
        conversion.progress.stage("fitting to weights", len(unfitted), "blocks")
    for name, members in unfitted.items():
        result = BlockResult(name, {}, {})
        narrow = any(entry.is_narrow for cluster in members for entry in cluster)
        reductions = _reductions(chosen, workdir, name) if narrow else {}
        for cluster in members:
            parts = (outputs, cluster, fits.factors, reductions, conversion.device)
            fitted = fit_without_data(*parts)
            result.layers.update(fitted.layers)
            result.biases.update(fitted.biases)
        workdir.keep_block(result)
        conversion.progress.advance(1, name)
    errors = {k: e for name in clusters for k, e in (workdir.errors(name) or {}).items()}
    return Fits(fits.plan, fits.factors, fits.comparison, errors)


def fit_on_data(
    chosen: Chosen,
    workdir: FitWorkplace,
    moments: FitWorkplace,
    sampler: OutputSampler | None = None,
) -> Fits:
    """Fit embeddings, what layers share and all blocks, as far as there is data for them.

    Args:
        chosen: The forms.
        workdir: Where fits are kept.
        moments: Where moments are kept.
        sampler: With one, outputs are compared on data held out.
    """
    conversion, plan = chosen.conversion, chosen.plan
    source, device = conversion.source, conversion.device
    tables = _fit_embeddings(chosen, workdir)
    factors: SharedFactors = {}
    if source.seed is not None:
        factors = start_shared_factors(plan.layers, chosen.outputs.dtype_of, source.seed)
    elif any(entry.own_factors for entry in plan.layers):
        parts = (chosen.outputs, plan.layers, conversion.data, workdir, moments, device)
        fitter = SharedFactorsFitter(source, conversion.recipe, *parts)
        factors = fitter.run(conversion.progress)
    if conversion.data is None or not (plan.layers or plan.reads_queries or sampler):
        return Fits(plan, factors)
    groups = sum(len(block.groups) for block in roles_of(source).blocks)
    conversion.progress.stage("fitting blocks", groups, "groups")
    deeper = plan.depth is not None and plan.depth.deeper
    inputs = FitInputs(
        source,
        conversion.recipe.calibration.damping,
        moments.moments,
        reductions=partial(_reductions, chosen, moments),
        dtype_of=chosen.outputs.dtype_of,
        device=device,
        factors=factors,
        roundings=chosen.outputs.roundings,
    )
    blocks = BlockFitter(
        inputs,
        plan,
        conversion.data,
        dense_source=source if deeper else conversion.dense,
        tables=tables,
        sampler=sampler,
    )
    for result in blocks.run(
        workdir.block, lambda block, group: conversion.progress.advance(1, f"{block} {group}")
    ):
        workdir.keep_block(result)
    unreached = {None, *blocks.unreached}  # none: a layer outside of all blocks
    names = chosen.blocks
    blind = [
        entry.name
        for entry in plan.layers
        if names.get(chosen.outputs.runtime_name(entry)) in unreached
    ]
    return Fits(with_unreached(plan, blind), factors, blocks.comparison)


def _fit_embeddings(chosen: Chosen, workdir: FitWorkplace) -> dict[str, StructuredEmbedding]:
    """Fit all tables, and give them to run the model on, by name in the model."""
    conversion, entries = chosen.conversion, chosen.plan.embeddings
    if conversion.data is None or not entries:
        return {}
    result = workdir.block(EMBEDDINGS)
    if result is None:
        conversion.progress.stage("fitting embeddings", len(entries), "tables")
        parts = (conversion.data, chosen.outputs.dtype_of, conversion.device)
        result = fit_embeddings(conversion.source, entries, *parts)
        workdir.keep_block(result)
        conversion.progress.advance(len(entries), "")
    tables = {}
    for entry in entries:
        table = StructuredEmbedding(entry.parts, dtype=torch.float32, device=conversion.device)
        fill(table, entry, result.layers[entry.key].tensors)
        tables[chosen.outputs.runtime_name(entry)] = table.requires_grad_(False).eval()
    return tables


def _reductions(chosen: Chosen, moments: FitWorkplace, block: str) -> Reductions:
    """Tell which channels of a block stay; by the weights alone where no data has told."""
    source, device = chosen.conversion.source, chosen.conversion.device
    measured = read_reductions(moments.moments("channels", block))
    entries = {path_of(source, entry): entry for entry in chosen.plan.layers}
    around = next((item for item in roles_of(source).blocks if item.name == block), None)

    def weight_of(layer: Layer) -> Tensor:
        weight = read_finite(source.store, source.keymap, layer.weight_name, device)
        return entries[layer.weight_name].matrix(weight)

    return measured if around is None else completed(measured, around, entries, weight_of)


def fit_without_data(
    outputs: Outputs,
    cluster: Cluster,
    factors: SharedFactors,
    channels: Reductions,
    device: torch.device,
) -> BlockResult:
    """Fits layers to their weights, or draws them where the model begins at random."""
    source = outputs.source
    weights, biases, lifts = [], {}, {}
    for entry in cluster:
        path = outputs.runtime_name(entry)
        if entry.kind == "embedding":
            weight = read_table(source, entry, device)
        else:
            name = f"{path}.{entry.parameter}"
            weight = read_finite(source.store, source.keymap, name, device)
        weights.append(narrowed_rows(entry, entry.matrix(weight), channels))
        if entry.reads:
            lifts[entry.name] = lift_of(entry, channels, device)
        if entry.bias and entry.kind != "experts":
            bias = read_finite(source.store, source.keymap, f"{path}.bias", device)
            biases[entry.name] = narrowed_rows(entry, bias, channels)
    dtype = outputs.dtype_of(cluster[0])
    if source.seed is not None:
        seed, pairs = source.seed, zip(cluster, weights, strict=True)
        with torch.no_grad():
            fitted = [start_layer(e, w, dtype=dtype, factors=factors, seed=seed) for e, w in pairs]
    else:
        moments = [[LayerMoments()] for _ in cluster]
        fitted = fit_layers(
            cluster, weights, moments, dtype=dtype, damping=0.0, factors=factors, lifts=lifts
        )
    keys = [entry.key for entry in cluster]
    return BlockResult("", dict(zip(keys, fitted, strict=True)), biases)


# Factors that many layers share are fitted once, before any of them, to all of them.
#
# The moments are those of the dense model, from the backward pass where there was one, else from a
# walk of their own. Without data the weights alone decide.


Uses = list[tuple[LayerPlan, Layout, slice]]
"""Weights that use the same factors: layers, and layouts and rows of their output splits."""


@dataclass
class SharedFactorsFitter:
    """Fits the factors that layers of a plan share."""

    source: SourceModel
    recipe: Convert
    outputs: Outputs  # knows in which dtype layers are stored
    layers: Sequence[LayerPlan]
    data: CalibrationData | None  # what is held out is not looked at
    place: FitWorkplace  # where results are kept
    moments: FitWorkplace  # where moments are kept
    device: torch.device

    def run(self, progress: Progress) -> SharedFactors:
        """Returns all shared factors as they are stored, or those of an interrupted run."""
        uses: dict[FactorsKey, Uses] = {}  # owners first
        for entry in self.layers:
            start = 0
            for part in entry.parts:
                rows = slice(start, start + part.out_features)
                start = rows.stop
                for layout in part.terms:
                    shared = shared_of(layout)
                    if shared is not None:
                        key = (entry.bank_of.get(shared.name, entry.name), shared.name)
                        uses.setdefault(key, []).append((entry, layout, rows))
        stored = self.place.factors()
        if stored is not None:
            return stored
        if self.data is not None and not self.recipe.measures_sensitivity:
            self._measure(self.data, progress)
        progress.stage("fitting what layers share", len(uses), "sets")
        owners = {entry.name: entry for entry in self.layers}
        fitted: dict[FactorsKey, dict[str, Tensor]] = {}
        for (owner, name), members in uses.items():
            fitted[owner, name] = self._fit(members, self.outputs.dtype_of(owners[owner]))
            progress.advance(1, f"{owner} {name}")
        self.place.keep_factors(fitted)
        return fitted

    def _measure(self, data: CalibrationData, progress: Progress) -> None:
        """Keeps the input moments of all layers that use shared factors."""
        roles = roles_of(self.source)
        batches = [batch for i, batch in enumerate(data.batches) if i not in data.holdout]
        entries_with_factors = (entry for entry in self.layers if factor_layouts(entry.parts))
        entries = {self.outputs.runtime_name(entry): entry for entry in entries_with_factors}
        progress.stage("measuring what layers read", len(roles.blocks), "blocks")
        walk = input_moments(
            self.source, roles, entries, batches, self.device, lambda b: progress.advance(1, b)
        )
        for block, measured in walk:
            moments = damped_inputs(measured, entries, self.recipe.calibration.damping)
            self.moments.keep_moments("inputs", block, moments)

    def _fit(self, members: Uses, dtype: torch.dtype) -> dict[str, Tensor]:
        targets = [self._target(entry, rows) for entry, _, rows in members]
        kind = structure(members[0][1].structure)
        assert isinstance(kind, SharesFactors)
        names = ", ".join(f"`{entry.name}`" for entry, _, _ in members[:3])
        where = f"what {names} and {len(members) - 3} more share" if len(members) > 3 else names
        try:
            with torch.no_grad():
                factors = kind.fit_shared(targets, [layout for _, layout, _ in members])
        except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            hint = "use more calibration data or a larger `damping`, or share less"
            raise FitError(f"the fit of {where} failed: {message_of(error)}", hint) from error
        stored = {name: tensor.to(dtype).contiguous().cpu() for name, tensor in factors.items()}
        if not all(map(is_finite, stored.values())):
            raise FitError(f"the fit of {where} is not finite in {dtype}", WIDER)
        return stored

    def _target(self, entry: LayerPlan, rows: slice) -> Target:
        name = f"{self.outputs.runtime_name(entry)}.{entry.parameter}"
        weight = read_finite(self.source.store, self.source.keymap, name, self.device)
        weight = entry.matrix(weight)[rows].double()
        block = self.source.keymap.runtime_name(entry.block) or entry.block
        gram = self.moments.moments("inputs", block).get(entry.name)
        curvature = self.moments.moments("curvature", block).get(entry.name)
        if gram is not None:
            gram = gram.double()
        if curvature is not None:
            block_curvature = curvature[rows, rows].double()
            curvature = damped_curvature(block_curvature, CURVATURE_DAMPING)
        product = weight if gram is None else weight @ gram
        scale = max(float(product.mul(weight).sum()), torch.finfo(torch.float64).tiny)
        return Target(product, gram, scale, curvature, weight)
