"""Fits banks: what many layers share is fitted once, before any of them, to all of them.

The moments are those of the dense model, from the survey where there was one, else from a walk of
their own. Without data the weights alone decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tcompress.anatomy import anatomy_of
from tcompress.calibrate.data import CalibrationData
from tcompress.conversion.backward import Worth
from tcompress.conversion.fit import CURVATURE_DAMPING, WIDER
from tcompress.conversion.inputs import input_moments
from tcompress.conversion.kept import FitWorkplace
from tcompress.conversion.outputs import Outputs
from tcompress.conversion.shared import Banks
from tcompress.errors import FitError, first_line
from tcompress.linalg.curvature import damped_curvature
from tcompress.options import Convert
from tcompress.planning.entries import BankKey, LayerPlan
from tcompress.progress import Progress
from tcompress.source import SourceModel, read_finite
from tcompress.structures import Layout, Target, structure
from tcompress.structures.capabilities import SharesFactors, shared_of
from tcompress.structures.linear import bank_layouts


@dataclass(frozen=True)
class _Use:
    """One weight that uses a bank: a part of a layer."""

    entry: LayerPlan
    layout: Layout
    start: int
    stop: int


@dataclass
class BankFitter:
    """Fits the banks of a plan.

    Args:
        source: The dense model.
        recipe: How to convert it.
        outputs: Knows in which dtype layers are stored.
        layers: The plan's layers.
        data: Calibration data, if there is any; what is held out is not looked at.
        place: Where moments and results are kept.
        device: Where to compute.
    """

    source: SourceModel
    recipe: Convert
    outputs: Outputs
    layers: Sequence[LayerPlan]
    data: CalibrationData | None
    place: FitWorkplace
    device: torch.device

    def run(self, progress: Progress) -> Banks:
        """Returns the tensors of all banks as they are stored, or those of an interrupted run.

        Raises:
            DataError: The model does not run its blocks one after another.
            FitError: A weight or a result is not finite.
        """
        uses = self._uses()
        if not uses:
            return {}
        kept = self.place.banks()
        if kept is not None:
            return kept
        if self.data is not None and not self.recipe.surveys:
            self._walk(self.data, progress)
        progress.stage("fitting what layers share", len(uses), "banks")
        owners = {entry.name: entry for entry in self.layers}
        fitted: dict[BankKey, dict[str, Tensor]] = {}
        for (owner, name), used in uses.items():
            fitted[owner, name] = self._fit(used, self.outputs.dtype_of(owners[owner]))
            progress.advance(1, f"{owner} {name}")
        self.place.keep_banks(fitted)
        return fitted

    def _uses(self) -> dict[BankKey, list[_Use]]:
        """Weights by the bank that they use, owners of banks first."""
        found: dict[BankKey, list[_Use]] = {}
        for entry in self.layers:
            start = 0
            for part in entry.parts:
                stop = start + part.out_features
                for layout in part.terms:
                    shared = shared_of(layout)
                    if shared is not None:
                        key = (entry.bank_of.get(shared.name, entry.name), shared.name)
                        found.setdefault(key, []).append(_Use(entry, layout, start, stop))
                start = stop
        return found

    def _walk(self, data: CalibrationData, progress: Progress) -> None:
        """Keeps the input moments of all layers that use a bank."""
        anatomy = anatomy_of(self.source.meta_model())
        holdout = frozenset(data.holdout)
        batches = [batch for i, batch in enumerate(data.batches) if i not in holdout]
        entries = {
            self.outputs.runtime_name(entry): entry
            for entry in self.layers
            if bank_layouts(entry.parts)
        }
        progress.stage("measuring what layers read", len(anatomy.blocks), "blocks")
        found = input_moments(
            self.source, anatomy, entries, batches, self.device, lambda b: progress.advance(1, b)
        )
        for block, worths in found:
            moments = damped_inputs(worths, entries, self.recipe.calibration.damping)
            self.place.keep_inputs(block, moments)

    def _fit(self, used: Sequence[_Use], dtype: torch.dtype) -> dict[str, Tensor]:
        targets = [self._target(use) for use in used]
        kind = structure(used[0].layout.structure)
        assert isinstance(kind, SharesFactors)
        names = ", ".join(f"`{use.entry.name}`" for use in used[:3])
        where = f"what {names} and {len(used) - 3} more share" if len(used) > 3 else names
        try:
            with torch.no_grad():
                found = kind.fit_shared(targets, [use.layout for use in used])
        except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            raise FitError(
                f"the fit of {where} failed: {first_line(error)}",
                "use more calibration data or a larger `damping`, or share less",
            ) from error
        stored = {name: tensor.to(dtype).contiguous().cpu() for name, tensor in found.items()}
        if not all(bool(torch.isfinite(tensor).all()) for tensor in stored.values()):
            raise FitError(f"the fit of {where} is not finite in {dtype}", WIDER)
        return stored

    def _target(self, use: _Use) -> Target:
        entry = use.entry
        name = f"{self.outputs.runtime_name(entry)}.{entry.parameter}"
        weight = read_finite(self.source.store, self.source.keymap, name).to(self.device)
        weight = entry.matrix(weight)[use.start : use.stop].double()
        block = self.source.keymap.runtime_name(entry.block) or entry.block
        gram = self.place.inputs(block).get(entry.name)
        curvature = self.place.curvature(block).get(entry.name)
        if gram is not None:
            gram = gram.to(self.device).double()
        if curvature is not None:
            own = curvature[use.start : use.stop, use.start : use.stop].to(self.device).double()
            curvature = damped_curvature(own, CURVATURE_DAMPING)
        product = weight if gram is None else weight @ gram
        scale = max(float(product.mul(weight).sum()), torch.finfo(torch.float64).tiny)
        return Target(product, gram, scale, curvature, weight)


def damped_inputs(
    worths: Mapping[str, Worth], entries: Mapping[str, LayerPlan], damping: float
) -> dict[str, Tensor]:
    """Returns damped input moments of the layers that use banks, by planned name.

    Args:
        worths: What was seen, by name of the layer in the model.
        entries: Planned layers, likewise.
        damping: Ridge at one row per input, as a multiple of the mean diagonal.
    """
    return {
        entries[name].name: damped_curvature(
            worth.moment(centred=entries[name].bias),
            damping * entries[name].in_features / worth.rows,
        )
        for name, worth in worths.items()
        if worth.rows and name in entries and bank_layouts(entries[name].parts)
    }
