"""What is measured of the layers of a model, block by block, before anything is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.blockwise.sensitivity import BackwardWalk, Sensitivity, damped_inputs
from tcompress.data.calibration import CalibrationData
from tcompress.fitting.channel_orders import ChannelOrder, LayerFacts, stored_reductions
from tcompress.fitting.channel_orders import order_channels as channel_order
from tcompress.fitting.layer_fits import EvaluationMoments, LayerStatistics
from tcompress.fitting.workdir import FitWorkplace
from tcompress.models import SourceModel, read_finite
from tcompress.options import Convert
from tcompress.planning.couplings import couplings, whole_heads
from tcompress.planning.entries import LayerPlan
from tcompress.planning.sites import roles_of
from tcompress.progress import Progress
from tcompress.roles import Attention, Block, Roles

# Moments that fits will need are kept in the working folder. Without data the weights' own energy
# stands in for moments: every layer counts alike, and so does every direction of its inputs and
# outputs.

Statistics = Mapping[str, LayerStatistics]
"""What is measured of the layers of a block, by their name in the checkpoint."""


@dataclass(frozen=True)
class Measuring:
    """Runs a model over calibration data once, or looks at its weights."""

    source: SourceModel
    recipe: Convert
    data: CalibrationData | None  # what is held out is not looked at
    workdir: FitWorkplace  # where moments are kept
    device: torch.device
    progress: Progress
    entries: Mapping[str, LayerPlan]  # by name in the model; experts have no moments
    attentions: Sequence[Attention]
    needs_statistics: bool  # or moments alone
    needs_channels: bool

    def blocks(self) -> Iterator[tuple[Block, Statistics]]:
        """Measure all blocks, the last one first."""
        return self._weights() if self.data is None else self._walk()

    def _walk(self) -> Iterator[tuple[Block, dict[str, LayerStatistics]]]:
        """Measure moments of all layers by a backward pass, the last block first."""
        assert self.data is not None
        roles = roles_of(self.source)
        batches = [self.data.batches[index] for index in self.data.fitted]
        sampler = sampler_of(self.source, self.recipe.calibration.seed)
        scratch = self.workdir.scratch()
        walk = BackwardWalk(self.source, roles, batches, sampler, scratch, self.device)
        self.progress.stage("measuring what layers are worth", 2 * len(roles.blocks), "passes")
        by_name = {block.name: block for block in roles.blocks}
        for name, sums in walk.run(lambda block, way: self.progress.advance(1, f"{block} {way}")):
            reached = {k: s for k, s in sums.items() if s.rows and k in self.entries}
            self._keep_moments(name, reached)
            statistics = {}
            for path, sensitivity in reached.items() if self.needs_statistics else ():
                entry = self.entries[path]
                weight = self._weight(path, entry)
                statistics[entry.name] = LayerStatistics.of(weight, sensitivity, centred=entry.bias)
            yield by_name[name], statistics

    def _weights(self) -> Iterator[tuple[Block, dict[str, LayerStatistics]]]:
        """Look at all layers in the norm of their weights."""
        roles: Roles = roles_of(self.source)
        self.progress.stage("looking at weights", len(roles.blocks), "blocks")
        for block in reversed(roles.blocks):
            statistics = {}
            for layer in block.layers:
                entry = self.entries.get(layer.name)
                if entry is None:
                    continue
                weight = self._weight(layer.name, entry)
                gram = torch.eye(entry.in_features, dtype=torch.float64, device=self.device)
                moments = EvaluationMoments(gram, None)
                mean = gram.new_zeros(len(gram))
                statistics[entry.name] = LayerStatistics(weight, moments, mean)
            yield block, statistics
            self.progress.advance(1, block.name)

    def _weight(self, path: str, entry: LayerPlan) -> Tensor:
        return entry.matrix(self._tensor(f"{path}.{entry.parameter}"))

    def _tensor(self, name: str) -> Tensor:
        return read_finite(self.source.store, self.source.keymap, name, self.device)

    def _keep_moments(self, block: str, sums: Mapping[str, Sensitivity]) -> None:
        """Keep what fits will need of a block's moments."""
        assert self.data is not None
        entries = self.entries
        if self.recipe.calibration.output_moments is not False:
            curvatures = {entries[k].name: item.curvature / item.rows for k, item in sums.items()}
            self.workdir.keep_moments("curvature", block, curvatures)
            weights = {
                f"{entries[path].name}/{self.data.fitted[batch]}": weight
                for path, item in sums.items()
                for batch, weight in item.weights.items()
            }
            self.workdir.keep_moments("tokens", block, weights)
        shared = damped_inputs(sums, entries, self.recipe.calibration.damping)
        if shared:
            self.workdir.keep_moments("inputs", block, shared)

    def order_channels(
        self, block: Block, statistics: Mapping[str, LayerStatistics]
    ) -> list[list[ChannelOrder]]:
        """Order channels that layers of a block have in common; those of one layer together."""
        if not self.needs_channels:
            return []
        facts: dict[str, LayerFacts] = {}
        for layer in block.layers:
            entry = self.entries.get(layer.name)
            if entry is not None and entry.name in statistics:
                bias = self._tensor(f"{layer.name}.bias") if entry.bias else None
                facts[layer.weight_name] = LayerFacts(entry, statistics[entry.name], bias)
        damping = self.recipe.calibration.damping
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
        attentions = [whole_heads(item) for item in self.attentions if item.block == block.name]
        for heads in filter(None, attentions):  # after what they are made of
            if all(layer.weight_name in facts for layer in heads.layers):
                groups.append([channel_order(heads, facts, damping)])
        reductions = {k: r for group in groups for o in group for k, r in o.reductions.items()}
        self.workdir.keep_moments("channels", block.name, stored_reductions(reductions))
        return groups
