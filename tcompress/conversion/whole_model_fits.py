"""Fits that no block owns: word embeddings, factors that layers share, weights alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tcompress.blockwise.sensitivity import damped_inputs, input_moments
from tcompress.conversion.outputs import Cluster, Outputs
from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError, message_of
from tcompress.fitting.block_fitter import BlockResult
from tcompress.fitting.channel_orders import Reductions, lift_of, narrowed_rows
from tcompress.fitting.embeddings import read_table
from tcompress.fitting.first_values import start_layer
from tcompress.fitting.layer_fits import (
    CURVATURE_DAMPING,
    WIDER,
    LayerMoments,
    SharedFactors,
    fit_layers,
)
from tcompress.fitting.workdir import FitWorkplace
from tcompress.linalg.fits import damped_curvature
from tcompress.linalg.moments import is_finite
from tcompress.models import SourceModel, read_finite
from tcompress.options import Convert
from tcompress.planning.entries import FactorsKey, LayerPlan
from tcompress.planning.sites import roles_of
from tcompress.progress import Progress
from tcompress.structures import Layout, Target, structure
from tcompress.structures.base import SharesFactors, shared_of
from tcompress.structures.modules.linear import factor_layouts


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
        for (owner, name), used in uses.items():
            fitted[owner, name] = self._fit(used, self.outputs.dtype_of(owners[owner]))
            progress.advance(1, f"{owner} {name}")
        self.place.keep_factors(fitted)
        return fitted

    def _measure(self, data: CalibrationData, progress: Progress) -> None:
        """Keeps the input moments of all layers that use shared factors."""
        roles = roles_of(self.source)
        batches = [batch for i, batch in enumerate(data.batches) if i not in data.holdout]
        own = (entry for entry in self.layers if factor_layouts(entry.parts))
        entries = {self.outputs.runtime_name(entry): entry for entry in own}
        progress.stage("measuring what layers read", len(roles.blocks), "blocks")
        found = input_moments(
            self.source, roles, entries, batches, self.device, lambda b: progress.advance(1, b)
        )
        for block, measured in found:
            moments = damped_inputs(measured, entries, self.recipe.calibration.damping)
            self.moments.keep_moments("inputs", block, moments)

    def _fit(self, used: Uses, dtype: torch.dtype) -> dict[str, Tensor]:
        targets = [self._target(entry, rows) for entry, _, rows in used]
        kind = structure(used[0][1].structure)
        assert isinstance(kind, SharesFactors)
        names = ", ".join(f"`{entry.name}`" for entry, _, _ in used[:3])
        where = f"what {names} and {len(used) - 3} more share" if len(used) > 3 else names
        try:
            with torch.no_grad():
                found = kind.fit_shared(targets, [layout for _, layout, _ in used])
        except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            hint = "use more calibration data or a larger `damping`, or share less"
            raise FitError(f"the fit of {where} failed: {message_of(error)}", hint) from error
        stored = {name: tensor.to(dtype).contiguous().cpu() for name, tensor in found.items()}
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
            own = curvature[rows, rows].double()
            curvature = damped_curvature(own, CURVATURE_DAMPING)
        product = weight if gram is None else weight @ gram
        scale = max(float(product.mul(weight).sum()), torch.finfo(torch.float64).tiny)
        return Target(product, gram, scale, curvature, weight)
