"""What every block is worth to a model, and how many of them it can do without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tcompress.conversion.output_sampler import probe_of
from tcompress.conversion.paused import Skeleton, Stream, common_block, handed_on, intercept_blocks
from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError
from tcompress.models import SourceModel
from tcompress.models.fewer_layers import fixed_blocks
from tcompress.planning.entries import BlockLoss, DepthPlan, StackPlan
from tcompress.progress import Progress, Silent
from tcompress.roles import Anatomy, anatomy_of

# What every block is worth to a model, and which ones it can do without.
#
# A block is left out by handing its input on. The change that this makes to what the model puts out
# is measured on calibration data without labels, in the unit of the losses that a budget predicts
# (`OutputProbe.change`). Blocks are chosen one after another, each the one whose loss, together
# with those chosen before, changes the output least: two blocks that replace each other do not both
# go.
#
# All ways to leave a block out run side by side, in the passes that pause at every block, so that
# only one block holds weights at a time. Until its first missing block a pass is the dense one and
# shares its activations.


SAMPLES = 128
"""Most samples to measure on; losses are scaled to all of them."""

MOST_BYTES = 1 << 30
"""Activations that ways to leave blocks out may hold together."""

Gone = frozenset[str]
"""Module paths of the blocks that are left out."""


def choose_blocks(
    source: SourceModel,
    depth: DepthPlan,
    data: CalibrationData,
    device: torch.device,
    progress: Progress | None = None,
) -> DepthPlan:
    """Chooses the blocks that stay by what the others change.

    Args:
        source: The dense model.
        depth: How many blocks of each stack stay.
        data: Calibration data; what is held out is not looked at.
        device: Where to compute.
        progress: Hears how far it is.

    Raises:
        DataError: The model has no outputs to judge by, or does not run its blocks in turn.
        FitError: Activations are not finite.
    """
    progress = progress or Silent()
    asked = {stack.path: stack.blocks - len(stack.kept) for stack in depth.stacks}
    progress.stage("choosing blocks", sum(asked.values()), "blocks")
    chosen: list[BlockLoss] = []
    for least in dropping(source, asked, data, device):
        chosen.append(least)
        progress.advance(1, least.path)
    return depth_without(depth.stacks, chosen)


def dropping(
    source: SourceModel, asked: Mapping[str, int], data: CalibrationData, device: torch.device
) -> Iterator[BlockLoss]:
    """Chooses blocks to drop, one after another, each only when it is asked for.

    Args:
        source: The dense model.
        asked: How many blocks to choose, by the path of their stack.
        data: Calibration data; what is held out is not looked at.
        device: Where to compute.

    Yields:
        The block whose loss, together with those before, changes the output least.
    """
    anatomy = anatomy_of(source.meta_model())
    walk = DepthWalk(source, anatomy, data, device)
    left = dict(asked)
    fixed = {
        f"{path}.{index}"
        for path, count in left.items()
        if count
        for index in fixed_blocks(source, path)
    }
    gone: Gone = frozenset()
    while any(left.values()):
        names = [
            block.name
            for block in anatomy.blocks
            if block.name not in gone | fixed and left[_stack(block.name)]
        ]
        least = min(walk.losses(names, gone), key=lambda item: item.loss)
        left[_stack(least.path)] -= 1
        gone |= {least.path}
        yield least


def depth_without(stacks: Sequence[StackPlan], dropped: Sequence[BlockLoss]) -> DepthPlan:
    """Plans to drop these blocks.

    Args:
        stacks: All stacks of the dense model.
        dropped: What goes, in the order in which it was chosen.
    """
    gone = frozenset(item.path for item in dropped)
    left = tuple(_without(stack, gone) for stack in stacks)
    return DepthPlan(stacks=left, chosen="measured", dropped=tuple(dropped))


def _stack(block: str) -> str:
    return block.rpartition(".")[0]


def _without(stack: StackPlan, gone: Gone) -> StackPlan:
    kept = [index for index in range(stack.blocks) if f"{stack.path}.{index}" not in gone]
    return stack.model_copy(update={"kept": tuple(kept)})


@dataclass
class _Pass:
    """One way to leave blocks out, on one batch."""

    stream: Stream
    gone: Gone
    output: list[Any] = field(default_factory=list)
    change: float = 0.0  # of the output, from the dense model's


class DepthWalk:
    """Measures ways to leave blocks out, block by block.

    Args:
        source: The dense model.
        anatomy: Its blocks.
        data: Calibration data; what is held out is not looked at.
        device: Where to compute.
    """

    def __init__(
        self,
        source: SourceModel,
        anatomy: Anatomy,
        data: CalibrationData,
        device: torch.device,
    ) -> None:
        blocks = [block.name for block in anatomy.blocks]
        self._skeleton = Skeleton(source, blocks, device)
        self._skeleton.load_rest()
        self._own = intercept_blocks(self._skeleton.model, blocks)
        self._probe = probe_of(source)
        self._sizes = {
            name: sum(
                item.numel() for item in self._skeleton.model.get_submodule(name).parameters()
            )
            for name in blocks
        }
        batches, self._scale = _some_of(data)
        self._batches = [
            {key: value.to(device) for key, value in batch.items()} for batch in batches
        ]

    def losses(self, blocks: Sequence[str], gone: Gone = frozenset()) -> tuple[BlockLoss, ...]:
        """Measures the loss of each of these blocks together with those that are gone."""
        ways = [gone | {name} for name in blocks]
        count = max(1, MOST_BYTES // max(1, self._activations()))
        changes: list[float] = []
        for start in range(0, len(ways), count):
            changes += self._changes(ways[start : start + count])
        return tuple(
            BlockLoss(path=name, loss=change * self._scale, parameters=self._sizes[name])
            for name, change in zip(blocks, changes, strict=True)
        )

    def _activations(self) -> int:
        """Bytes of the hidden states of one pass over all batches."""
        config = self._skeleton.source.config.get_text_config()
        width = int(getattr(config, "hidden_size", 0) or 1024)
        return sum(4 * width * max(map(_rows, batch.values())) for batch in self._batches)

    def _changes(self, ways: Sequence[Gone]) -> list[float]:
        """Runs the dense model beside all these ways, and compares what they put out."""
        passes = [
            [self._pass(batch, way) for way in (frozenset(), *ways)] for batch in self._batches
        ]
        streams = [item.stream for group in passes for item in group]
        try:
            for stream in streams:
                stream.start()
            seen: Gone = frozenset()
            while any(stream.call is not None for stream in streams):
                name = common_block(streams)
                self._skeleton.load_block(name)
                for group in passes:
                    self._answer(group, name, seen)
                self._skeleton.drop_block(name)
                seen |= {name}
        finally:
            for stream in streams:
                stream.close()
        return [sum(item.change for item in way) for way in zip(*passes, strict=True)][1:]

    def _pass(self, batch: Mapping[str, Tensor], gone: Gone) -> _Pass:
        output: list[Any] = []

        def forward(**inputs: Tensor) -> None:
            output.append(self._skeleton.model(**inputs))

        return _Pass(Stream(forward, batch), gone, output)

    def _answer(self, group: Sequence[_Pass], name: str, seen: Gone) -> None:
        """Runs a block once for all passes that read the same: they lack the same blocks so far."""
        made: dict[Gone, Any] = {}
        for item in group:
            call = item.stream.call
            assert call is not None
            before = item.gone & seen
            if before not in made:
                with torch.no_grad():
                    made[before] = self._own[name](*call.args, **call.kwargs)
            answer = made[before]
            item.stream.answer(handed_on(call, answer) if name in item.gone else answer)
            if item.output and item is not group[0]:  # outputs may be large: one at a time
                self._compare(item, group[0].output[0])
        group[0].output.clear()

    def _compare(self, item: _Pass, dense: Any) -> None:
        item.change = self._probe.change(dense, item.output.pop(), item.stream.batch)
        if not item.change < float("inf"):
            raise FitError(
                f"without {', '.join(sorted(item.gone))} the output holds NaN or infinity",
                "repair the checkpoint, or name the blocks to keep: `--keep-layers`",
            )


def _some_of(data: CalibrationData) -> tuple[list[Mapping[str, Tensor]], float]:
    """Enough batches to compare on, and how many times as many samples there are.

    Batches are sorted by length, so they are taken at equal distances.
    """
    holdout = frozenset(data.holdout)
    seen = [batch for index, batch in enumerate(data.batches) if index not in holdout]
    sizes = [len(next(iter(batch.values()))) for batch in seen]
    count = min(len(seen), -(-SAMPLES // max(sizes)))
    chosen = [int((index + 0.5) * len(seen) / count) for index in range(count)]
    scale = sum(sizes) / sum(sizes[index] for index in chosen)
    return [seen[index] for index in chosen], scale


def _rows(value: Tensor) -> int:
    """Tokens of an input; of a picture or a sound a guess."""
    return value.numel() if value.dim() == 2 else 256 * len(value)
