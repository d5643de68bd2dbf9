"""What a conversion will take: memory, disk and time, from shapes alone.

Disk is exact but for the headers of files. Memory counts what comes on top of the interpreter with
its libraries, and is meant to be right within a third. Time is rough: it assumes a speed.

**Memory without data.** One group of layers that share input sides is in memory at a time:

    sum over the group of  elements x (stored + 8 + 8 x terms)     the weight, in float64 too, and
                                                                   the dense form of every term
    + 24 bytes (48 for sums of terms) x elements of the largest weight     temporaries
    + 44 bytes x elements of the group where a transform is fitted         its gradient

    + what the structure itself says, such as the normal matrix of a tensor train's largest core

or, if that is more, the largest tensor that is carried over. All experts of a layer are one group.

**Memory with data.** The same, plus

    float32 parameters outside the blocks (what only the output head uses is not loaded)
    + 2 x the largest block in float32                             dense and rewritten
    + samples x tokens x width x 4 bytes x 2 streams               activations between blocks
    + (28 + 6 per layer that reads it) x width^2 x 8 bytes         moments of the largest input and
                                                                   what is made of them; of every
                                                                   expert

**Memory of a bank** that layers share: what its structure says, if that is more.

**Memory of a backward pass**, where there is one, if it is more:

    float32 parameters outside the blocks, and the largest block in float32
    + 8 bytes x the sum over its layers of  width in^2 + width out^2          moments of both sides
    + 8 bytes x 4 (width in + width out)^2 of its largest layer               one layer's sizes

A sample is taken to be `TOKENS` tokens of the built-in text, or a quarter of the longest length
allowed of other text; pictures and sounds have as many as their model makes of them.

**Memory of choosing blocks**, where data does: everything outside the blocks and the largest one
in float32, and activations of at most 128 samples for every block, up to 1 GiB.

**Time.** Floating-point operations divided by `FLOPS` (per thread, or of a GPU): with data, every
group of a block runs both streams through half of the block, and the block once more at the end;
moments take 3 x 2 x tokens x width^2. A backward pass runs every block twice and back, and takes
2 x tokens x width^2 for the moments of both sides of a layer and an SVD for its sizes. A fit takes
what its structure says (20 s^3 + 4 m n s for an SVD, with s = min(m, n); 2 m n^2 for slices on
data), 4 m n^2 more to measure an error on data, 2 m n x 64 without, and `STEPS` gradient steps of
6 x rows x (transform + slices) where a transform is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from tcompress.conversion.depth_search import MOST_BYTES, SAMPLES
from tcompress.data.calibration import MOST_PICTURES, MOST_SOUNDS
from tcompress.models import SourceModel
from tcompress.options import Calibration, Convert
from tcompress.options.method_options import AutoSpec
from tcompress.planning.costs import STAND_IN, copied_keys, disk_bytes, weight_bytes
from tcompress.planning.depth import cut_to
from tcompress.planning.entries import DepthPlan, LayerPlan, Plan
from tcompress.planning.sites import alone_of
from tcompress.structures.base import Layout, structure
from tcompress.structures.capabilities import (
    SIDES,
    FitCost,
    SharesFactors,
    fit_cost,
    macs_of,
    svd_flops,
    transform_shapes,
)

TOKENS = 20
"""Mean length of a built-in text in tokens."""

FLOPS = {"cpu": 3e10, "cuda": 5e12, "mps": 5e11}
"""Floating-point operations in a second: of one thread of a CPU, of a whole GPU."""

STEPS = 150
ROUNDS = 6
_DISK_SPEED = 3e8  # bytes in a second, read or written and hashed

Group = tuple[LayerPlan, ...]


class Estimate(BaseModel):
    """What a conversion will take.

    Attributes:
        memory_bytes: Peak above the interpreter with its libraries.
        disk_bytes: Tensors of the output.
        seconds: Time, very roughly.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_bytes: int
    disk_bytes: int
    seconds: float


def estimate(plan: Plan, source: SourceModel, recipe: Convert) -> Estimate:
    """Estimates what a conversion will take; no weight is read.

    Args:
        plan: What will be done.
        source: The dense model.
        recipe: Calibration data, dtype of the output and device.
    """
    drawn = 0 if source.seed is None else source.store.total_bytes  # all at once
    whole, source = source, cut_to(source, plan.depth)
    work = _Work.of(plan, source, recipe)
    memory = max([work.largest_copy, *map(work.fit_memory, work.groups)])
    if work.rows and work.groups:
        memory = work.stream_memory() + max(
            work.fit_memory(group) + work.moment_memory(group) for group in work.groups
        )
    memory = max(memory, *work.bank_memory(), *(_table_memory(item) for item in plan.embeddings))
    flops = sum(map(work.fit_flops, work.groups)) + (work.stream_flops() if work.rows else 0)
    flops += work.bank_flops(walks=not recipe.surveys)
    if recipe.surveys and work.groups:
        memory = max(memory, work.survey_memory())
        flops += work.survey_flops()
    if plan.depth is not None and plan.depth.chosen == "later":
        rows = _rows(source, recipe.calibration) * min(1, SAMPLES / recipe.calibration.samples)
        memory = max(memory, _choice_memory(whole, plan.depth, rows))
        flops += _choice_flops(plan, plan.depth, rows)
    if recipe.weighs_depth:  # every number of blocks is a conversion of its own
        flops *= _TRIALS
    elif recipe.weighs_methods and isinstance(recipe.method, AutoSpec):  # and so is every method
        flops *= 1 + len(alone_of(recipe.method, STAND_IN))
    moved = source.store.total_bytes + work.disk
    return Estimate(
        memory_bytes=memory + drawn,
        disk_bytes=work.disk,
        seconds=round(flops / _speed(recipe.device) + moved / _DISK_SPEED, 1),
    )


_TRIALS = 4
"""Conversions that a search for the number of blocks makes, roughly."""


@dataclass(frozen=True)
class _Work:
    groups: tuple[Group, ...]
    itemsize: dict[str, int]  # of the source's weights, by layer name
    model: nn.Module
    blocks: dict[str, tuple[str, list[LayerPlan]]]  # path and layers by block name
    largest_copy: int
    disk: int
    rows: int  # tokens in the calibration data; none without

    @classmethod
    def of(cls, plan: Plan, source: SourceModel, recipe: Convert) -> _Work:
        keymap = source.keymap
        blocks: dict[str, tuple[str, list[LayerPlan]]] = {}
        for entry in plan.layers:
            path = keymap.runtime_name(entry.block) or entry.block
            blocks.setdefault(entry.block, (path, []))[1].append(entry)
        return cls(
            groups=tuple(_groups(plan.layers)),
            itemsize={item.name: weight_bytes(source, item, None) for item in plan.entries},
            model=keymap.model,
            blocks=blocks,
            largest_copy=max(map(source.store.nbytes, copied_keys(source, plan)), default=0),
            disk=disk_bytes(source, plan, recipe.dtype),
            rows=_rows(source, recipe.calibration),
        )

    def fit_memory(self, group: Group) -> int:
        terms = max(len(part.terms) for entry in group for part in entry.parts)
        elements = sum(entry.dense_parameters for entry in group)
        largest = max(entry.in_features * entry.out_features for entry in group)
        total = (24 if terms == 1 else 48) * largest
        total += max(
            fit_cost(layout, calibrated=self.rows > 0).bytes
            for entry in group
            for part in entry.parts
            for layout in part.terms
        )
        total += sum(
            entry.dense_parameters * (self.itemsize[entry.name] + 8 + 8 * terms) for entry in group
        )
        return total + (44 * elements if _fits_side(group) else 0)

    def moment_memory(self, group: Group) -> int:
        first = group[0]
        return (28 + 6 * len(group)) * first.in_features**2 * 8 * first.copies

    def bank_memory(self) -> list[int]:
        """One bank is fitted at a time, with all weights that use it."""
        return [0, *(cost.bytes for cost in self._banks())]

    def bank_flops(self, *, walks: bool) -> float:
        flops = [cost.flops for cost in self._banks()]
        if flops and self.rows and walks:  # for the moments of their inputs
            flops.append(2.0 * _parameters(self.model) * self.rows)
        return sum(flops)

    def _banks(self) -> Iterator[FitCost]:
        for entry in (entry for group in self.groups for entry in group):
            for layout in entry.own_banks.values():
                kind = structure(layout.structure)
                assert isinstance(kind, SharesFactors)
                yield kind.shared_cost(layout, calibrated=self.rows > 0)

    def stream_memory(self) -> int:
        inside = [self.model.get_submodule(path) for path, _ in self.blocks.values()]
        block = max(map(_parameters, inside))
        outside = _parameters(self.model) - sum(map(_parameters, inside)) - self._head()
        return 4 * (outside + 2 * block + 2 * self.rows * self._width())

    def stream_flops(self) -> float:
        """Both streams through all blocks, as often as there are groups, and the moments."""
        flops = 0.0
        for path, entries in self.blocks.values():
            own = list(_groups(entries))
            macs = _parameters(self.model.get_submodule(path))
            flops += 2 * 2 * macs * self.rows * (len(own) / 2 + 1)
            flops += sum(6 * self.rows * group[0].in_features ** 2 for group in own)
        return flops

    def survey_memory(self) -> int:
        inside = [self.model.get_submodule(path) for path, _ in self.blocks.values()]
        outside = _parameters(self.model) - sum(map(_parameters, inside))
        moments = max(
            sum(entry.in_features**2 + entry.out_features**2 for entry in entries)
            for _, entries in self.blocks.values()
        )
        layers = [entry for _, entries in self.blocks.values() for entry in entries]
        largest = max(entry.in_features + entry.out_features for entry in layers)
        return 4 * (outside + max(map(_parameters, inside))) + 8 * (moments + 4 * largest**2)

    def survey_flops(self) -> float:
        flops = 0.0
        for path, entries in self.blocks.values():
            flops += 8 * _parameters(self.model.get_submodule(path)) * self.rows
            for entry in entries:
                rows, columns = entry.out_features, entry.in_features
                flops += 2 * self.rows * (rows**2 + columns**2) + svd_flops(rows, columns)
        return flops

    def fit_flops(self, group: Group) -> float:
        flops = 0.0
        for entry in group:
            for part in entry.parts:
                rounds = 1 if len(part.terms) == 1 else 1 + ROUNDS
                own = sum(_term_flops(layout, self.rows > 0) for layout in part.terms)
                flops += own * rounds * entry.copies
                flops += sum(map(_side_flops, part.terms)) * entry.copies
        return flops

    def _head(self) -> int:
        """Parameters of an output head that is not tied to the embeddings."""
        model: Any = self.model
        find = getattr(model, "get_output_embeddings", lambda: None)
        head, words = find(), model.get_input_embeddings() if find() is not None else None
        weight = getattr(head, "weight", None)
        if weight is None or weight is getattr(words, "weight", None):
            return 0
        return int(weight.numel())

    def _width(self) -> int:
        return max(entry.in_features for entry in self.groups[0])


def _table_memory(entry: LayerPlan) -> int:
    """The table as it is and in float64, weighted, fitted, and what is wrong of it."""
    return 44 * entry.dense_parameters


def _choice_memory(source: SourceModel, depth: DepthPlan, rows: float) -> int:
    """The model but for its blocks, the largest of them, and the activations of all ways."""
    model = source.keymap.model
    names = [f"{item.path}.{index}" for item in depth.stacks for index in range(item.blocks)]
    blocks = [_parameters(model.get_submodule(name)) for name in names]
    width = getattr(source.config.get_text_config(), "hidden_size", 0)
    activations = min(MOST_BYTES, int(4 * rows * width * (len(blocks) + 1)))
    return 4 * (_parameters(model) - sum(blocks) + max(blocks)) + activations


def _choice_flops(plan: Plan, depth: DepthPlan, rows: float) -> float:
    """For each block that is dropped, half of what is left as often as there are blocks left."""
    passes = sum(left / 2 for left in range(depth.kept + 1, depth.blocks + 1))
    return 2 * plan.block_parameters * passes * rows


def _groups(layers: Sequence[LayerPlan]) -> Iterator[Group]:
    """Layers that are fitted together: an owner of input sides and those that share them."""
    members: dict[str, list[LayerPlan]] = {}
    for entry in layers:
        name = f"{entry.input_of}.weight" if entry.input_of else entry.key
        members.setdefault(name, []).append(entry)
    return map(tuple, members.values())


def _fits_side(group: Group) -> bool:
    terms = [layout for entry in group for part in entry.parts for layout in part.terms]
    return any(transform_shapes(layout, side) for layout in terms for side in SIDES)


def _term_flops(layout: Layout, calibrated: bool) -> float:
    """Fit of one term to one weight of m x n."""
    m, n = layout.out_features, layout.in_features
    measured = 4 * m * n * n if calibrated else 2 * m * n * 64
    return measured + fit_cost(layout, calibrated=calibrated).flops


def _side_flops(layout: Layout) -> float:
    """Fit of the transforms of one term."""
    macs, rows = macs_of(layout, 1), layout.out_features
    sides = zip(SIDES, (macs.encode, macs.decode), strict=True)
    turned = sum(own for side, own in sides if transform_shapes(layout, side))
    return STEPS * 6 * (rows * turned + macs.apply**2 / rows) if turned else 0.0


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _rows(source: SourceModel, options: Calibration) -> int:
    """Tokens in the calibration data."""
    if options.source == "none":
        return 0
    config = source.config
    vision = getattr(config, "vision_config", None) or config
    patch, side = getattr(vision, "patch_size", None), getattr(vision, "image_size", None)
    builtin = options.source == "builtin"
    samples, tokens = options.samples, TOKENS if builtin else options.max_length // 4
    if isinstance(patch, int) and isinstance(side, int):
        tokens = (side // patch) ** 2 + 1
        samples = min(samples, MOST_PICTURES) if builtin else samples
    sounds = getattr(config, "max_source_positions", None)
    if isinstance(sounds, int) and hasattr(config, "num_mel_bins"):
        tokens, samples = tokens + sounds, min(samples, MOST_SOUNDS)
    return samples * tokens


def _speed(device: str) -> float:
    kind = device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    speed = FLOPS.get(kind, FLOPS["cpu"])
    return speed * torch.get_num_threads() if kind == "cpu" else speed
