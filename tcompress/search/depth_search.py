"""Which blocks a model can do without, by what leaving them out changes.

A block is left out by handing its input on. The change that this makes to what the model puts out
is measured on calibration data without labels, in the unit of the losses that a budget predicts
(`OutputSampler.change`). Blocks are chosen one after another, each the one whose loss together with
those chosen before is least: two blocks that replace each other do not both go.

All ways to leave a block out run side by side, in passes that pause at every block, so that only
one block holds weights at a time. Until its first missing block a pass is the dense one and shares
its activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from typing import Any

import torch

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.blockwise.streams import PartialModel, Stream, handed_on
from tcompress.data.calibration import CalibrationData, samples_in
from tcompress.errors import FitError
from tcompress.models import SourceModel
from tcompress.models.fewer_layers import fixed_blocks
from tcompress.planning.entries import BlockLoss, DepthPlan, StackPlan
from tcompress.planning.sites import roles_of
from tcompress.progress import Progress
from tcompress.search.corrections import tokens_of

SAMPLES = 128  # most samples to measure on; losses are scaled to all of them
MOST_BYTES = 1 << 30  # activations that ways to leave blocks out may hold together
Gone = frozenset[str]  # module paths of the blocks that are left out
DENSE: Gone = frozenset()


def choose_blocks(
    source: SourceModel,
    depth: DepthPlan,
    data: CalibrationData,
    device: torch.device,
    progress: Progress,
) -> DepthPlan:
    """Choose the blocks that stay by what the others change."""
    counts = {stack.path: stack.blocks - len(stack.kept) for stack in depth.stacks}
    progress.stage("choosing blocks", sum(counts.values()), "blocks")
    chosen: list[BlockLoss] = []
    for loss in dropping(source, counts, data, device):
        chosen.append(loss)
        progress.advance(1, loss.path)
    return depth_without(depth.stacks, chosen)


def dropping(
    source: SourceModel, drops: Mapping[str, int], data: CalibrationData, device: torch.device
) -> Iterator[BlockLoss]:
    """Choose blocks to drop, so many by the path of their stack, each only when it is asked for."""
    walk, counts = DepthWalk(source, data, device), dict(drops)
    fixed = {f"{path}.{i}" for path, n in counts.items() if n for i in fixed_blocks(source, path)}
    gone = DENSE
    while any(counts.values()):
        names = [
            block.name
            for block in roles_of(source).blocks
            if block.name not in gone | fixed and counts[block.name.rpartition(".")[0]]
        ]
        cheapest = min(walk.losses(names, gone), key=lambda item: item.loss)
        counts[cheapest.path.rpartition(".")[0]] -= 1
        gone |= {cheapest.path}
        yield cheapest


def depth_without(stacks: Sequence[StackPlan], dropped: Sequence[BlockLoss]) -> DepthPlan:
    """Plan to drop these blocks, in the order in which they were chosen."""
    gone = {item.path for item in dropped}
    shallower = []
    for stack in stacks:
        indices = (index for index in range(stack.blocks) if f"{stack.path}.{index}" not in gone)
        shallower.append(stack.model_copy(update={"kept": tuple(indices)}))
    return DepthPlan(stacks=tuple(shallower), chosen="measured", dropped=tuple(dropped))


class DepthWalk:
    """Measure ways to leave blocks out, block by block; what is held out is not looked at."""

    def __init__(self, source: SourceModel, data: CalibrationData, device: torch.device) -> None:
        self._model = PartialModel(source, device, head=True)
        self._sampler = sampler_of(source)
        # Batches are sorted by length, so they are taken at equal distances.
        fitted = data.fitted_batches
        sizes = [*map(samples_in, fitted)]
        count = min(len(fitted), -(-SAMPLES // max(sizes)))
        chosen = [int((index + 0.5) * len(fitted) / count) for index in range(count)]
        self._scale = sum(sizes) / sum(sizes[index] for index in chosen)
        self._batches = [self._sampler.with_variants(fitted[index]) for index in chosen]

    def losses(self, blocks: Sequence[str], gone: Gone) -> Iterator[BlockLoss]:
        """Measure the loss of each of these blocks together with those that are gone."""
        width = getattr(self._model.source.config.get_text_config(), "hidden_size", 0) or 1024
        tokens = sum(max(map(tokens_of, batch.values())) for batch in self._batches)
        count = max(1, MOST_BYTES // max(1, 4 * width * tokens))
        ways = [gone | {name} for name in blocks]
        parts = (ways[start : start + count] for start in range(0, len(ways), count))
        changes = chain.from_iterable(map(self._changes, parts))
        for name, change in zip(blocks, changes, strict=True):
            size = sum(item.numel() for item in self._model.model.get_submodule(name).parameters())
            yield BlockLoss(path=name, loss=change * self._scale, parameters=size)

    def _changes(self, ways: Sequence[Gone]) -> list[float]:
        """Run the dense model beside all these ways, and compare what they put out."""
        passes = [
            {way: self._model.stream(batch, keep=True) for way in (DENSE, *ways)}
            for batch in self._batches
        ]
        streams = [*chain.from_iterable(group.values() for group in passes)]
        changes = dict.fromkeys(ways, 0.0)
        passed = DENSE
        for block, _ in self._model.walk(streams):
            for group in passes:
                for way, change in self._answer(group, block.name, passed):
                    changes[way] += change
            passed |= {block.name}
        return [*changes.values()]

    def _answer(
        self, streams: Mapping[Gone, Stream], name: str, passed: Gone
    ) -> Iterator[tuple[Gone, float]]:
        """Run a block once for passes that lack the same blocks so far; yield final changes."""
        answers: dict[Gone, Any] = {}
        for way, stream in streams.items():
            if way & passed not in answers:
                answers[way & passed] = self._model.answer_of(stream)
            answer = answers[way & passed]
            stream.answer(handed_on(stream.waiting, answer) if name in way else answer)
            if stream.output is None or way == DENSE:
                continue
            change = self._sampler.change(streams[DENSE].output, stream.output, stream.batch)
            stream.output = None  # outputs may be large: one at a time
            if not change < inf:
                raise FitError(
                    f"without {', '.join(sorted(way))} the output holds NaN or infinity",
                    "repair the checkpoint, or name the blocks to keep: `--keep-layers`",
                )
            yield way, change
        streams[DENSE].output = None
