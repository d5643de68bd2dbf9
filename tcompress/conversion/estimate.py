"""What a conversion will take: memory, disk and time, from shapes alone.

Disk is exact but for the headers of files. Memory counts what comes on top of the interpreter with
its libraries, and is meant to be right within a third. Without data it is what the fit of one group
of layers takes (weights as stored and in float64, dense summands, temporaries, the gradient of a
fitted transform); with data parameters outside the blocks, the largest block, activations of two
streams, what layers read, and the moments of the largest input, or those of all layers of a block
where sensitivity is measured. Time is rough: floating-point operations at an assumed speed, those
in float64 counted twice. A text has `TOKENS` tokens in the built-in data, or a quarter of the
longest length allowed; pictures and sounds have as many as their model makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from tcompress.blockwise.streams import room_on
from tcompress.conversion.model_fits import TRIAL_SAMPLES
from tcompress.conversion.outputs import groups_of
from tcompress.data.calibration import MOST_PICTURES, MOST_SOUNDS, most_tokens, scores_of
from tcompress.fitting.block_rewrite import Group
from tcompress.hf.opening import multiplies_bfloat16, pick_device
from tcompress.linalg.moments import ROWS_AT_ONCE, WIDE
from tcompress.models import SourceModel
from tcompress.options import Calibration, Convert
from tcompress.options.method_options import NARROWING, AutoSpec
from tcompress.planning.costs import STAND_IN, copied_keys, disk_bytes, weight_bytes
from tcompress.planning.depth import cut_to
from tcompress.planning.entries import Plan
from tcompress.planning.sites import couplings, offered_by, roles_of
from tcompress.roles import Block
from tcompress.roles.find import attentions_of
from tcompress.search.depth_search import MOST_BYTES, SAMPLES
from tcompress.search.substitution import FITTED, JUDGED, JUDGED_TOKENS, count_of, some_of
from tcompress.structures.base import (
    SIDES,
    SharesFactors,
    structure,
    transform_shapes,
)
from tcompress.structures.flops import FitCost, fit_cost, svd_flops

TOKENS = 20
"""Mean length of a built-in text in tokens."""

FLOPS = {"cpu": 5e10, "cuda": 5e12, "mps": 5e11}
"""Operations in float32 in a second: of one thread of a CPU, of a whole GPU."""

BFLOAT16 = 0.4
"""Of the time of passes in float32, what they take in bfloat16, where it is multiplied fast."""
EMULATED = 3.5
"""The same on processors that have no such products."""

_STEPS = 100  # of the fit of a transform
_SMALL_PRODUCTS = 60  # operations in a step for each generator and row that it turns, with waiting
_ROUNDS = 7  # over the summands of a sum
_TRIED = 2  # answers that are so near that they are fitted too, beside that which is taken
_TRIALS = 4  # conversions that a search for the number of blocks makes
_DISK_SPEED = 3e8  # bytes in a second, read or written and hashed


class Estimate(BaseModel):
    """What a conversion will take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_bytes: int  # peak above the interpreter with its libraries
    disk_bytes: int  # tensors of the output
    seconds: float  # very roughly
    scratch_bytes: int = 0  # most that lies beside the output meanwhile, fits included
    read_bytes: int = 0  # of the model's weights, each as often as it is read
    candidates: int = 0  # to be tried, each alone in the dense model


def estimate(plan: Plan, source: SourceModel, recipe: Convert) -> Estimate:
    """Estimates what a conversion will take; no weight is read."""
    random = 0 if source.seed is None else source.store.total_bytes  # all at once
    source = cut_to(source, plan.depth) if plan.depth else source
    widest = max((entry.in_features for entry in plan.layers), default=0)
    samples, length = _data(source, recipe.calibration, widest)
    tokens = samples * length
    groups = groups_of(plan.layers)
    fits = [_fit_memory(group, source, calibrated=tokens > 0) for group in groups]
    copied = max(map(source.store.nbytes, copied_keys(source, plan)), default=0)
    shared = _shared_costs(plan, calibrated=tokens > 0)
    orders = _orders(plan, source, recipe, calibrated=tokens > 0)
    memory = max([copied, *fits, *(cost.bytes for cost in orders)])
    weighs = tokens > 0 and recipe.measures_sensitivity
    flops = sum(_fit_flops(group, calibrated=tokens > 0, curved=weighs) for group in groups)
    flops += sum(cost.flops for cost in orders)
    scratch = sum(entry.parameters * (weight_bytes(source, entry, None)) for entry in plan.layers)
    walks = 0  # through the whole model
    if tokens and groups:
        size = _walk(plan, source, recipe, samples, length)
        moments = [_moments_memory(group, curved=weighs) for group in groups]
        memory = size.fitting + max(map(sum, zip(fits, moments, strict=True)))
        walk_flops = _walk_flops(plan, source, groups, tokens, _pass_share(recipe))
        walks = 3 if weighs else 1
        if weighs:
            memory = max(memory, size.statistics)
            scratch = max(scratch + size.kept, size.inputs)
            walks += recipe.by_loss
        if recipe.tries_methods and isinstance(recipe.method, AutoSpec):  # on a part of the data
            singles = offered_by(recipe.method, STAND_IN, timed=recipe.counts_time, alone=True)
            part = min(1.0, TRIAL_SAMPLES / recipe.calibration.count)
            flops += min(len(singles), _TRIED) * part * (flops + walk_flops)
        flops += walk_flops
        if weighs or shared:
            flops += size.statistics_flops
            flops += sum(svd_flops(entry.out_features, entry.in_features) for entry in plan.layers)
    tables = [44 * entry.dense_parameters for entry in plan.embeddings]
    memory = max([memory, *tables, *(cost.bytes for cost in shared)])
    flops += sum(cost.flops for cost in shared)
    if plan.depth is not None and plan.depth.chosen == "later":
        blocks = plan.depth.blocks
        differs = tokens * min(1, SAMPLES / recipe.calibration.count)
        width = getattr(source.config.get_text_config(), "hidden_size", 0)
        weights = 4 * (plan.parameters - plan.block_parameters * (blocks - 1) // blocks)
        memory = max(memory, weights + min(MOST_BYTES, int(4 * differs * width * (blocks + 1))))
        # For each block that is dropped, half of what is left as often as there are blocks left.
        passes = sum(left / 2 for left in range(plan.depth.kept + 1, blocks + 1))
        flops += 2 * plan.block_parameters * passes * differs
    if recipe.chooses_depth:  # every number of blocks is a conversion of its own
        flops *= _TRIALS
    tried = _tried_alone(source, recipe, plan) if tokens else []
    flops += sum(flops for _, flops in tried)
    disk = disk_bytes(source, plan, recipe.dtype)
    read = source.store.total_bytes * (1 + walks)
    moved = (read + 2 * scratch + disk) / _DISK_SPEED
    return Estimate(
        memory_bytes=memory + random,
        disk_bytes=disk,
        seconds=round(flops / _speed(recipe.device) + moved, 1),
        scratch_bytes=scratch,
        read_bytes=read,
        candidates=sum(count for count, _ in tried),
    )


def _tried_alone(source: SourceModel, recipe: Convert, plan: Plan) -> list[tuple[int, float]]:
    """Candidates of every block that are tried in the dense model, and their operations.

    They are fitted to some samples, whose moments are summed up for each, and all that comes after
    the block runs on some others.
    """
    if not recipe.by_loss or recipe.attention is not None or recipe.method is None:
        return []
    budget, method = plan.budget, recipe.method
    fraction = budget.fraction if budget and budget.asked.is_size else STAND_IN
    timed = recipe.counts_time
    names = [method.name]
    if isinstance(method, AutoSpec):
        names = [*offered_by(method, fraction, timed=timed)]
    roles, keymap = roles_of(source), source.keymap
    attentions = attentions_of(keymap.model, roles)
    own = recipe.calibration
    text = _tokens(own)
    count = own.count
    fitted = text * min(FITTED, round(count * (1 - own.holdout)))
    judged = min(JUDGED_TOKENS, text * min(JUDGED, max(1, round(count * own.holdout))))
    planned = {keymap.runtime_name(entry.block) or entry.block for entry in plan.layers}
    some = some_of([own.name for own in reversed(roles.blocks) if own.name in planned])
    found, after = list[tuple[int, float]](), 0
    head, share = _head_parameters(source), _pass_share(recipe)
    for block in reversed(roles.blocks):
        size = _parameters(keymap.model.get_submodule(block.name))
        if block.name in some:
            count = count_of(block, names, fraction, attentions)
            passed = share * (size * fitted + (size + after) * judged) + head * judged
            found.append((count, 2.0 * count * passed))
        after += size
    return found


def _fit_memory(group: Group, source: SourceModel, *, calibrated: bool) -> int:
    layouts = [layout for entry in group for part in entry.parts for layout in part.terms]
    terms = max(len(part.terms) for entry in group for part in entry.parts)
    total = (24 if terms == 1 else 48) * max(e.in_features * e.out_features for e in group)
    total += max(fit_cost(layout, calibrated=calibrated).bytes for layout in layouts)
    for entry in group:
        stored = weight_bytes(source, entry, None)
        total += entry.dense_parameters * (stored + 8 + 8 * terms)
    if any(transform_shapes(layout, side) for layout in layouts for side in SIDES):
        total += 44 * sum(entry.dense_parameters for entry in group)
    return total


def _fit_flops(group: Group, *, calibrated: bool, curved: bool) -> float:
    """Operations of the fits of a group, with roots of moments, products with them, and errors."""
    flops = 0.0
    for entry in group:
        for part in entry.parts:
            rounds = 1 if len(part.terms) == 1 else _ROUNDS
            for layout in part.terms:
                m, n = layout.out_features, layout.in_features
                measured = 14.0 * m * n * n + n**3 if calibrated else 2.0 * m * n * 64
                measured += 4.0 * m * m * n + m**3 if curved else 0.0
                own = (measured + fit_cost(layout, calibrated=calibrated).flops) * rounds
                shapes = (transform_shapes(layout, side).values() for side in SIDES)
                generators = sum(map(prod, chain.from_iterable(shapes)))
                turned = float(_STEPS * _SMALL_PRODUCTS * generators * (m + n))
                flops += (own + turned) * entry.copies
    return flops


def _orders(plan: Plan, source: SourceModel, recipe: Convert, *, calibrated: bool) -> list[FitCost]:
    """Costs, in float64, of ordering the channels of blocks that may become narrower."""
    auto = isinstance(recipe.method, AutoSpec) and NARROWING in offered_by(recipe.method, STAND_IN)
    narrow = [entry for entry in plan.layers if entry.is_narrow or (auto and calibrated)]
    paths = {source.keymap.runtime_name(entry.block) or entry.block for entry in narrow}
    costs = []
    for block in (block for block in roles_of(source).blocks if block.name in paths):
        for coupling in couplings(block):
            if (reader := coupling.reader) is None:
                continue
            channels, outputs = reader.in_features, reader.out_features
            # All that is left is corrected after every few, and what it tells of the target.
            flops = 2.0 * channels**3 + 10.0 * outputs * channels**2
            # G as measured or guessed and damped, with those of channels that are left.
            size = 28 * channels**2 + 16 * outputs * channels
            if not calibrated:  # moments are guessed from weights
                inputs = sum(layer.in_features for layer, _ in coupling.writers)
                flops += 4.0 * inputs * channels**2
                size += 8 * (inputs + outputs) * channels
            costs.append(FitCost(flops * max(1, reader.experts or 1), size))
    return costs


def _shared_costs(plan: Plan, *, calibrated: bool) -> list[FitCost]:
    """What factors that layers share take: one group is fitted at a time."""
    costs = []
    for layout in (layout for entry in plan.layers for layout in entry.own_factors.values()):
        kind = structure(layout.structure)
        assert isinstance(kind, SharesFactors)
        costs.append(kind.shared_cost(layout, calibrated=calibrated))
    return costs


def _moments_memory(group: Group, *, curved: bool) -> int:
    """Bytes of the moments that a group is fitted by, with what is computed from them.

    G and C in float64, and where the input is not wide D and those of what is held out too; then G
    damped, and two more while it is factored. Moments of gradients are read one by one.
    """
    first, widest = group[0], max(entry.out_features for entry in group)
    sums = 20 if first.in_features >= WIDE else 48
    curvature = sum(4 * e.out_features**2 for e in group) + 24 * widest**2 if curved else 0
    return (sums + 24) * first.in_features**2 * first.copies + curvature


@dataclass(frozen=True)
class _WalkSize:
    """Bytes of a walk through all blocks."""

    fitting: int  # weights outside the blocks, those of a block, activations, what layers read
    statistics: int  # the same without what they read, and moments of all layers of a block
    statistics_flops: float  # operations of passes forward, again, and backward, and of moments
    inputs: int  # of all blocks, on disk
    kept: int  # moments of all layers, on disk


def _walk(plan: Plan, source: SourceModel, recipe: Convert, samples: int, length: int) -> _WalkSize:
    """Size up both streams of samples of some length through all blocks."""
    keymap, tokens = source.keymap, samples * length
    paths = {keymap.runtime_name(entry.block) or entry.block for entry in plan.layers}
    parameters = [_parameters(keymap.model.get_submodule(path)) for path in paths]
    blocks = [block for block in roles_of(source).blocks if block.name in paths]
    width = plan.layers[0].in_features
    widest = max(entry.in_features for entry in plan.layers)
    batch = length * min(samples, recipe.calibration.batch_size)
    together = max(length, min(batch, most_tokens(source, widest)))
    reads = max((sum(group[0].in_features for group in b.groups) for b in blocks), default=widest)
    readings = min(4 * tokens * reads, int(room_on(pick_device(recipe.device))))
    outside = _parameters(keymap.model) - sum(parameters)
    both = 4 * (outside + max(parameters) + 2 * tokens * width) + 16 * together * widest
    scores = 12 * together * scores_of(source) if recipe.measures_sensitivity else 0
    shapes = [_shapes(block) for block in blocks]
    statistics = max((_statistics_memory(of_block, tokens) for of_block in shapes), default=0)
    sums = sum(float(x * x + y * y) for of_block in shapes for x, y in of_block)
    kept = sum(4 * y * y for of_block in shapes for _, y in of_block)
    passed = 6.0 * _pass_share(recipe) * sum(parameters) + 4.0 * _head_parameters(source)
    return _WalkSize(
        fitting=both + readings,
        statistics=both + scores + statistics,
        statistics_flops=tokens * (passed + sums),
        inputs=4 * tokens * width * len(paths),
        kept=kept if recipe.calibration.output_moments is not False else 0,
    )


def _shapes(block: Block) -> list[tuple[int, int]]:
    """Inputs and outputs of the layers of a block; of experts nothing is summed up."""
    layers = (layer for layer in block.layers if layer.kind != "experts")
    return [(layer.in_features, sum(part.size for part in layer.parts)) for layer in layers]


def _statistics_memory(shapes: Sequence[tuple[int, int]], tokens: int) -> int:
    """Bytes of the moments of all layers of a block, with those of a run, or what one yields."""
    if not shapes:
        return 0
    rows = min(tokens, 2 * ROWS_AT_ONCE)
    sums = sum(8 * (x * x + y * y) for x, y in shapes)
    summing = sums + sum(4 * rows * (x + y) for x, y in shapes)
    return sums + max(summing, *(24 * max(x, y) ** 2 + 32 * x * y for x, y in shapes))


def _walk_flops(
    plan: Plan, source: SourceModel, groups: Sequence[Group], tokens: int, share: float
) -> float:
    """Operations of both streams through all blocks, and of their moments.

    The dense stream runs once, the other one once for every group, up to it, with what is fitted
    by then in place of the rest.
    """
    keymap = source.keymap
    flops = 0.0
    for block in dict.fromkeys(entry.block for entry in plan.layers):
        path = keymap.runtime_name(block) or block
        flops += 2.0 * 2 * share * _parameters(keymap.model.get_submodule(path)) * tokens
    for group in groups:
        flops += 4.0 * tokens * group[0].in_features ** 2  # G and D by halves, and C
    return flops


def _head_parameters(source: SourceModel) -> int:
    """Parameters of the output head, which passes run through to the end."""
    head = source.keymap.model.get_output_embeddings()  # type: ignore[operator]
    return 0 if head is None else _parameters(head)


def _pass_share(recipe: Convert) -> float:
    """What a pass takes, of one in float32."""
    if recipe.calibration.mixed_precision == "no":
        return 1.0
    slow = pick_device(recipe.device).type == "cpu" and not multiplies_bfloat16()
    return EMULATED if slow else BFLOAT16


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _data(source: SourceModel, options: Calibration, widest: int) -> tuple[int, int]:
    """Samples of the calibration data of a model, whose widest layer has so many inputs.

    Returns:
        Their number, and the tokens of one.
    """
    if options.is_none:
        return 0, 0
    config = source.config
    vision = getattr(config, "vision_config", None) or config
    patch, side = getattr(vision, "patch_size", None), getattr(vision, "image_size", None)
    builtin = options.source == ("builtin",)
    tokens = _tokens(options)
    samples = options.enough(tokens, widest)
    if isinstance(patch, int) and isinstance(side, int):
        tokens, samples = (side // patch) ** 2 + 1, options.count
        samples = min(samples, MOST_PICTURES) if builtin else samples
    sounds = getattr(config, "max_source_positions", None)
    if isinstance(sounds, int) and hasattr(config, "num_mel_bins"):
        tokens, samples = tokens + sounds, min(samples, MOST_SOUNDS)
    return samples, tokens


def _tokens(options: Calibration) -> int:
    """Guess how many tokens a text has."""
    return TOKENS if options.source == ("builtin",) else max(1, options.max_length // 4)


def _speed(device: str) -> float:
    kind = device.partition(":")[0]
    if kind == "auto":
        kind = pick_device(device).type
    speed = FLOPS.get(kind, FLOPS["cpu"])
    return speed * torch.get_num_threads() if kind == "cpu" else speed
