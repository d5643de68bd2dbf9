"""What a conversion will take: memory, disk and time, from shapes alone; whether there is room.

Disk is exact but for the headers of files. Memory counts what comes on top of the interpreter with
its libraries, and is meant to be right within a third. Without data it is what the fit of one group
of layers takes (weights as stored and in float64, dense summands, temporaries, the gradient of a
fitted transform); with data parameters outside the blocks, the largest block, activations of two
streams, what layers read, and the moments of the largest input, or those of all layers of a block
where sensitivity is measured. Time is rough: floating-point operations, those in float64 counted
twice, at a part of the speed at which this processor multiplies matrices. A text has `TOKENS`
tokens in the built-in data, or a quarter of the longest length allowed; pictures and sounds have as
many as their model makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from math import inf, prod
from time import perf_counter

import torch
from torch import nn

from tcompress.blockwise.streams import room_on
from tcompress.conversion.model_fits import TRIAL_SAMPLES, Conversion
from tcompress.conversion.outputs import groups_of
from tcompress.data.calibration import MOST_PICTURES, MOST_SOUNDS, most_tokens, scores_of
from tcompress.errors import DiskError, TCompressError
from tcompress.files import free_bytes
from tcompress.fitting.block_rewrite import Group, outputs_stand_for_input
from tcompress.hf.opening import has_bfloat16_tiles, multiplies_bfloat16, pick_device
from tcompress.linalg.moments import LARGE, ROWS_AT_ONCE, ROWS_KEPT, WIDE
from tcompress.memory import free_memory
from tcompress.models import SourceModel
from tcompress.options import Calibration, Convert
from tcompress.options.method_options import NARROWING, AutoSpec
from tcompress.planning.costs import (
    STAND_IN,
    copied_keys,
    disk_bytes,
    path_of,
    weight_bytes,
    weight_keys,
)
from tcompress.planning.depth import cut_to
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.planning.planner import make_plan
from tcompress.planning.sites import couplings, module_path, offered_by, roles_of
from tcompress.processes import RUNS
from tcompress.roles import Block, Layer
from tcompress.roles.find import attentions_of
from tcompress.search.candidates import (
    SHARE,
    condensed_layers,
    names_offered,
    offered_in,
    sizes_by_part,
)
from tcompress.search.corrections import FITTED, count_of, judged_step, some_of
from tcompress.search.depth_search import MOST_BYTES, SAMPLES
from tcompress.structures.base import (
    SIDES,
    FitCost,
    Frozen,
    Layout,
    SharesFactors,
    structure,
    svd_flops,
    transform_shapes,
)

TOKENS = 20
"""Mean length of a built-in text in tokens."""

FLOPS = {"cpu": 1e11, "cuda": 5e12, "mps": 5e11}
"""Operations in float32 in a second: of one thread of a CPU at most, of a whole GPU."""

REACHED = 0.8  # of the speed of products alone, what a conversion comes to on a CPU

BFLOAT16, EMULATED = 0.4, 3.5
"""Of the time of passes in float32, what they take in bfloat16: with such products, and without."""

TILES = 0.55  # of the time of moments, what they take where tiles (AMX) multiply bfloat16

SCORED = 8000  # operations for each score of a token: exponentials, draws, sums in float64

REFITTED = 0.3  # of a block, what runs again for one of its halves to be fitted

FEWEST_SAMPLES = 32
"""No fewer samples are proposed where room is lacking."""

_STEPS = 100  # of the fit of a transform
_SMALL_PRODUCTS = 80  # operations in a step for each generator and row that it turns, with waiting
_ROUNDS = 7  # over the summands of a sum
_TRIED = 2  # answers that are so near that they are fitted too, beside that which is taken
_TRIALS = 4  # conversions that a search for the number of blocks makes
_DISK_SPEED = 3e8  # bytes in a second, read or written and hashed


class Estimate(Frozen):
    """What a conversion will take."""

    memory_bytes: int  # peak above the interpreter with its libraries
    disk_bytes: int  # tensors of the output
    seconds: float  # very roughly
    scratch_bytes: int = 0  # most that lies beside the output meanwhile, fits included
    read_bytes: int = 0  # of the model's weights, each as often as it is read
    candidates: int = 0  # to be tried, each alone in the dense model


@dataclass(frozen=True, eq=False)
class _Work:
    """A conversion, and the calibration data that it reads. Use `_Work.of`."""

    plan: Plan
    source: SourceModel  # with the blocks that stay
    recipe: Convert
    samples: int
    length: int  # tokens of a sample

    @classmethod
    def of(cls, plan: Plan, source: SourceModel, recipe: Convert) -> _Work:
        source = cut_to(source, plan.depth) if plan.depth else source
        options, config = recipe.calibration, source.config
        if options.is_none:
            return cls(plan, source, recipe, 0, 0)
        widest = max((entry.in_features for entry in plan.layers), default=0)
        length = _tokens(options)  # of a text
        samples = options.enough(length, widest)
        vision = getattr(config, "vision_config", None) or config
        patch, side = getattr(vision, "patch_size", None), getattr(vision, "image_size", None)
        if isinstance(patch, int) and isinstance(side, int):
            length, samples = (side // patch) ** 2 + 1, options.count
            samples = min(samples, MOST_PICTURES) if options.source == ("builtin",) else samples
        sounds = getattr(config, "max_source_positions", None)
        if isinstance(sounds, int) and hasattr(config, "num_mel_bins"):
            length, samples = length + sounds, min(samples, MOST_SOUNDS)
        return cls(plan, source, recipe, samples, length)

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    @property
    def weighs(self) -> bool:
        """True where the sensitivity of layers is measured."""
        return self.tokens > 0 and self.recipe.measures_sensitivity

    @cached_property
    def tried_tokens(self) -> int:
        """Tokens that candidates are fitted to, at most."""
        by_part = sizes_by_part(self.recipe, self.plan, self.source, self.tokens)
        return self.tokens // SHARE if by_part else self.tokens

    @property
    def measured_tokens(self) -> int:
        """Tokens that tell what layers are worth, as often as each is looked at."""
        options = self.recipe.calibration
        tokens = self.tried_tokens if options.output_moments is False else self.tokens
        return tokens * (options.probes if self.weighs else 1)

    @property
    def keeps_gradients(self) -> bool:
        """True where moments of gradients are kept for fits."""
        read = self.recipe.calibration.output_moments is not False
        return self.weighs and read and not self.is_width

    @cached_property
    def is_width(self) -> bool:
        """True where layers become narrower and nothing else, but by rules."""
        return names_offered(self.recipe, self.source) == (NARROWING,)

    @cached_property
    def condensed(self) -> frozenset[str]:
        """Weights of layers with moments of gradients at their inputs, by name in the model."""
        if not self.weighs:
            return frozenset()
        names = condensed_layers(self.recipe, self.plan, self.source)
        return frozenset(f"{name}.weight" for name in names)

    @cached_property
    def alone(self) -> list[list[tuple[Group, FitCost]]]:
        """Fits of all layers by each method on offer; where one cannot take them, as planned."""
        recipe, plans = self.recipe, [self.plan]
        if isinstance(recipe.method, AutoSpec):
            offered = offered_in(recipe, self.source, STAND_IN, alone=True)
            plans *= len(offered)
            for index, (spec, *_) in enumerate(offered.values() if self.plan.depth is None else ()):
                with suppress(TCompressError):
                    sized = recipe.with_target(STAND_IN, spec)
                    plans[index] = make_plan(sized, self.source)
        return [
            [(group, _fit_cost(group, self)) for group in groups_of(plan.layers)] for plan in plans
        ]

    def rows_of(self, entry: LayerPlan) -> int:
        """Outputs of a layer, or as many as its weight is condensed to."""
        small = path_of(self.source, entry) in self.condensed
        return entry.in_features if small else entry.out_features

    @cached_property
    def block_sizes(self) -> dict[str, int]:
        """Parameters of every block with planned layers, by path."""
        paths = dict.fromkeys(module_path(self.source, entry.block) for entry in self.plan.layers)
        model = self.source.keymap.model
        return {path: _parameters(model.get_submodule(path)) for path in paths}

    @property
    def blocks(self) -> list[Block]:
        """Those of them that are no layers outside of all blocks."""
        return [block for block in roles_of(self.source).blocks if block.name in self.block_sizes]

    @property
    def shapes(self) -> list[list[tuple[int, int]]]:
        """Widths of the moments of the layers of every block; of experts nothing is summed up.

        Tokens of a model with an output head all count alike: layers that read the same have one
        sum, which the first of them stands for.
        """
        alike = self.head_parameters > 0

        def outputs(layer: Layer) -> int:
            is_condensed = layer.weight_name in self.condensed
            return layer.in_features if is_condensed else layer.out_features

        return [
            [
                (0 if alike and layer is not group[0] else layer.in_features, outputs(layer))
                for group in block.groups
                for layer in group
                if layer.kind != "experts"
            ]
            for block in self.blocks
        ]

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, which passes run through to the end."""
        head = self.source.keymap.model.get_output_embeddings()  # type: ignore[operator]
        return 0 if head is None else _parameters(head)

    def scored(self, tokens: float) -> float:
        """Operations of outcomes that are drawn by the scores of tokens, or compared by them."""
        return SCORED * tokens * scores_of(self.source)

    @property
    def bytes_in_passes(self) -> int:
        """Bytes of a number of a block that passes run through."""
        lowered = self.recipe.calibration.mixed_precision == "bf16"
        keys = (weight_keys(self.source, entry)[0] for entry in self.plan.layers)
        stored = {self.source.store.dtype(key) for key in keys}
        return 2 if lowered and stored == {torch.bfloat16} else 4

    @property
    def pass_share(self) -> float:
        """What a pass takes, of one in float32."""
        if self.recipe.calibration.mixed_precision == "no":
            return 1.0
        slow = pick_device(self.recipe.device).type == "cpu" and not multiplies_bfloat16()
        return EMULATED if slow else BFLOAT16

    @property
    def sum_share(self) -> float:
        """What moments take, of those of passes in float32."""
        lowered = self.recipe.calibration.mixed_precision == "bf16"
        on_tiles = pick_device(self.recipe.device).type == "cpu" and has_bfloat16_tiles()
        return TILES if lowered and on_tiles else 1.0


def estimate(plan: Plan, source: SourceModel, recipe: Convert) -> Estimate:
    """Estimate what a conversion will take; no weight is read."""
    random = 0 if source.seed is None else source.store.total_bytes  # all at once
    work = _Work.of(plan, source, recipe)
    source, groups = work.source, groups_of(plan.layers)
    fits, orders = [_fit_cost(group, work) for group in groups], [*_orders(work)]
    shared, tables = [*_shared(work)], (44 * entry.dense_parameters for entry in plan.embeddings)
    beside = [*shared, _dropping(work), *(FitCost(0.0, size) for size in tables)]
    copied = max(map(source.store.nbytes, copied_keys(source, plan)), default=0)
    memory = max([copied, *(cost.bytes for cost in (*fits, *orders, *beside))])
    flops = sum(cost.flops for cost in fits) + sum(cost.flops for cost in orders)
    walks = 0  # through the whole model
    if work.tokens and groups:
        walk, statistics = _walk(work)
        pairs = zip(fits, groups, strict=True)
        fitting = max(fit.bytes + _moments_memory(group, work) for fit, group in pairs)
        memory = max(memory, walk.bytes + fitting)
        walks = 1
        if work.weighs:
            memory = max(memory, statistics.bytes)
            walks = 3 + recipe.by_loss
        if recipe.tries_methods and isinstance(recipe.method, AutoSpec):  # on a part of the data
            part = min(1.0, TRIAL_SAMPLES / max(1, work.samples))
            tried = [[*zip(groups, fits, strict=True)]] * (part < 1)  # else it is taken as it is
            tried += work.alone[:_TRIED]
            flops += sum(fit.flops for of_plan in tried for _, fit in of_plan)
            flops += len(tried) * part * walk.flops
        flops += walk.flops
        if work.weighs or shared:
            flops += statistics.flops
            flops += sum(_predicted_flops(entry, work) for entry in plan.layers)
    flops += sum(cost.flops for cost in beside)
    if recipe.chooses_depth:  # every number of blocks is a conversion of its own
        flops *= _TRIALS
    candidates, flops_alone = _tried_alone(work)
    disk, scratch = disk_bytes(source, plan, recipe.dtype), _scratch(work)
    read = source.store.total_bytes * (1 + walks)
    moved = (read + 2 * scratch + disk) / _DISK_SPEED
    return Estimate(
        memory_bytes=memory + random,
        disk_bytes=disk,
        seconds=round((flops + flops_alone) / _speed(recipe.device) + moved, 1),
        scratch_bytes=scratch,
        read_bytes=read,
        candidates=candidates,
    )


def _tried_alone(work: _Work) -> tuple[int, float]:
    """Number of candidates that are tried in the dense model, and their operations.

    They are fitted to some samples, whose moments are summed up for each, and all that comes after
    the block runs on some others. What fits cost is by the layers that they are of.
    """
    recipe, source, data = work.recipe, work.source, work.recipe.calibration
    candidates, flops = 0, 0.0
    method = recipe.method
    if not work.tokens or not recipe.by_loss or recipe.attention is not None or method is None:
        return candidates, flops
    budget = work.plan.budget
    fraction = budget.fraction if budget and budget.asked.is_size else STAND_IN
    names: Collection[str] = [method.name]
    if isinstance(method, AutoSpec):
        names = offered_in(recipe, source, fraction)
    roles, model = roles_of(source), source.keymap.model
    attentions = attentions_of(model, roles)
    text = _tokens(data)
    fitted = min(work.tried_tokens, text * min(FITTED, round(work.samples * (1 - data.holdout))))
    some = some_of([block.name for block in reversed(work.blocks)])
    tried = [block for block in reversed(roles.blocks) if block.name in some]
    counts = {block.name: count_of(block, names, fraction, attentions) for block in tried}
    candidates, samples = sum(counts.values()), max(1, round(work.samples * data.holdout))
    judged = text * samples / judged_step(source, samples, text * samples, candidates + 1)
    flops += 2.0 * work.pass_share * fitted * sum(work.block_sizes.values())  # as it is, once
    after = 0  # parameters of the blocks behind
    for block in reversed(roles.blocks):
        size = _parameters(model.get_submodule(block.name))
        if count := counts.get(block.name, 0):
            passed = work.pass_share * (REFITTED * size * fitted + (size + after) * judged)
            flops += count * (2.0 * (passed + work.head_parameters * judged) + work.scored(judged))
            for [first, *_], fit in chain(*work.alone):
                if module_path(source, first.block) == block.name:
                    flops += work.sum_share * fitted * float(first.in_features) ** 2 + fit.flops
        after += size
    return candidates, flops


def _fit_cost(group: Group, work: _Work) -> FitCost:
    """Cost of the fits of a group, with roots of moments, products with them, and errors."""
    parts = [(entry, part) for entry in group for part in entry.parts]
    layouts = [layout for _, part in parts for layout in part.terms]
    terms = max(len(part.terms) for _, part in parts)
    size = (24 if terms == 1 else 48) * max(e.in_features * e.out_features for e in group)
    for entry in group:
        stored = weight_bytes(work.source, entry, None)
        size += entry.dense_parameters * (stored + 8 + 8 * terms)
    if any(transform_shapes(layout, side) for layout in layouts for side in SIDES):
        size += 44 * sum(entry.dense_parameters for entry in group)
    flops, most = 0.0, 0
    for entry, part in parts:
        rounds = 1 if len(part.terms) == 1 else _ROUNDS
        for layout in part.terms:
            m, n = layout.out_features, layout.in_features
            fit = structure(layout.structure).fit_cost(layout, calibrated=work.tokens > 0)
            measured = (
                _fitted_flops(entry, layout, group, work) if work.tokens else 2.0 * m * n * 64
            )
            most = max(most, fit.bytes)
            fitted = (measured + fit.flops) * rounds
            shapes = (transform_shapes(layout, side).values() for side in SIDES)
            generators = sum(map(prod, chain.from_iterable(shapes)))
            turned = float(_STEPS * _SMALL_PRODUCTS * generators * (m + n))
            flops += (fitted + turned) * entry.copies
    return FitCost(flops, size + most)


def _fitted_flops(entry: LayerPlan, layout: Layout, group: Group, work: _Work) -> float:
    """Operations of roots of moments that a layer is fitted by, of products with them, and errors.

    Of a condensed weight W C is not computed, but what is left of it.
    """
    m, n = layout.out_features, layout.in_features
    products, rows = 4.0 if outputs_stand_for_input(group) else 6.0, m
    if work.keeps_gradients and not layout.is_plain:
        rows = min(m, work.rows_of(entry))
    roots = _root_flops(m, n) if work.keeps_gradients and rows == m else 0.0
    return products * rows * n * n + n**3 + _error_flops(m, n, work) + roots


def _root_flops(outputs: int, inputs: int) -> float:
    """Operations of a root of the moments of gradients, and of the product with it."""
    if outputs <= LARGE:
        return 4.0 * outputs**2 * inputs + outputs**3
    exact = outputs**3 if outputs < inputs else 0.0  # what else is in float32 has a large ridge
    return outputs**2 * inputs + outputs**3 / 3 + exact


def _predicted_flops(entry: LayerPlan, work: _Work) -> float:
    """Operations of the spectrum that tells what every rank of a layer loses."""
    outputs, inputs = work.rows_of(entry), entry.in_features
    least = min(outputs, inputs)
    if least <= LARGE:
        return svd_flops(outputs, inputs)
    flops = (inputs**3 + outputs**3) / 2 + outputs * inputs * (inputs + outputs)
    if not work.is_width:  # all singular values
        flops += 10.0 * least**3 + outputs * inputs * least
    if outputs < entry.out_features:  # it is condensed, in float64
        flops += entry.out_features * inputs**2 + inputs**3
    return flops


def _error_flops(outputs: int, inputs: int, work: _Work) -> float:
    """Operations of errors on the data: by some rows of a wide input, by its moments else."""
    return (
        4.0 * outputs * inputs * _rows_kept(work) if inputs >= WIDE else 8.0 * outputs * inputs**2
    )


def _rows_kept(work: _Work) -> float:
    """Rows of a wide input that errors are told by."""
    return work.tokens * (1 / ROWS_KEPT + work.recipe.calibration.holdout)


def _orders(work: _Work) -> Iterator[FitCost]:
    """Costs, in float64, of ordering the channels of blocks that may become narrower."""
    method = work.recipe.method
    auto = isinstance(method, AutoSpec) and NARROWING in offered_by(method, STAND_IN)
    narrow = (e for e in work.plan.layers if e.is_narrow or (auto and work.tokens))
    paths = {module_path(work.source, entry.block) for entry in narrow}
    for block in (block for block in work.blocks if block.name in paths):
        for coupling in couplings(block):
            if (reader := coupling.reader) is None:
                continue
            channels, outputs = reader.in_features, reader.out_features
            # All that is left is corrected after every few, and what it tells of the target.
            flops = 2.0 * channels**3 + 10.0 * outputs * channels**2
            # G as measured or guessed, damped, and some of its rows.
            size = 16 * channels**2 + 16 * outputs * channels
            if not work.tokens:  # moments are guessed from weights
                inputs = sum(layer.in_features for layer, _ in coupling.writers)
                flops += 16.0 * inputs * channels**2
                size += 8 * (inputs + outputs) * channels
            yield FitCost(flops * max(1, reader.experts or 1), size)


def _shared(work: _Work) -> Iterator[FitCost]:
    """Costs of factors that layers share: one group is fitted at a time."""
    for layout in (item for entry in work.plan.layers for item in entry.own_factors.values()):
        kind = structure(layout.structure)
        assert isinstance(kind, SharesFactors)
        yield kind.shared_cost(layout, calibrated=work.tokens > 0)


def _dropping(work: _Work) -> FitCost:
    """Cost of the passes that tell which blocks go, if any do."""
    plan, depth = work.plan, work.plan.depth
    if depth is None or depth.chosen != "later":
        return FitCost(0.0)
    blocks, tokens = depth.blocks, work.tokens * min(1, SAMPLES / max(1, work.samples))
    width = getattr(work.source.config.get_text_config(), "hidden_size", 0)
    weights = 4 * (plan.parameters - plan.block_parameters * (blocks - 1) // blocks)
    # For each block that is dropped, half of what is left as often as there are blocks left.
    passes = sum(left / 2 for left in range(depth.kept + 1, blocks + 1))
    states = min(MOST_BYTES, int(4 * tokens * width * (blocks + 1)))
    return FitCost(2 * plan.block_parameters * passes * tokens, weights + states)


def _moments_memory(group: Group, work: _Work) -> int:
    """Bytes of the moments that a group is fitted by, with what is computed from them.

    G and C in float64, and where the input is not wide D and those of what is held out too, else
    some rows of both streams; then G damped, its root and C damped. Where outputs stand for the
    input C is small. Moments of gradients are read one by one.
    """
    first, widest = group[0], max(map(work.rows_of, group))
    is_wide = first.in_features >= WIDE
    rows, sums = int(8 * _rows_kept(work)) if is_wide else 0, 16 if is_wide else 48
    damped = 24
    if outputs_stand_for_input(group):
        sums, damped = 8 + 8 * first.out_features // first.in_features, 16
    curvature = sum(4 * work.rows_of(entry) ** 2 for entry in group) + 24 * widest**2
    curvature *= work.keeps_gradients
    size = (sums + damped) * first.in_features + rows
    return size * first.in_features * first.copies + curvature


def _walk(work: _Work) -> tuple[FitCost, FitCost]:
    """Costs of walks of samples through all blocks: of both streams, and for statistics."""
    plan, source, recipe, tokens = work.plan, work.source, work.recipe, work.tokens
    parameters, share = [*work.block_sizes.values()], work.pass_share
    widest = max(entry.in_features for entry in plan.layers)
    batch = work.length * min(work.samples, recipe.calibration.batch_size)
    together = max(work.length, min(batch, most_tokens(source, widest)))
    reads = (sum(group[0].in_features for group in block.groups) for block in work.blocks)
    readings = 4 * tokens * max(reads, default=widest)
    # Weights outside the blocks, those of a block, and activations.
    outside = _parameters(source.keymap.model) - sum(parameters)
    state, measured = 4 * plan.layers[0].in_features, work.measured_tokens  # bytes of a token
    running = 4 * outside + work.bytes_in_passes * max(parameters) + 16 * together * widest
    # The dense stream runs once, the other one once for every group, up to it, with what is fitted
    # by then in place of the rest; G and, unless rows stand for it, D by halves, and C or W C.
    streams = sum(4.0 * share * size * tokens for size in parameters)
    planned = {path_of(source, entry) for entry in plan.layers}
    read = chain.from_iterable(block.groups for block in work.blocks)
    groups = [group for group in read if planned & {layer.weight_name for layer in group}]
    moments = work.sum_share * tokens * sum(map(_paired_flops, groups))
    room = int(room_on(pick_device(recipe.device)))
    # Each stream has its state, and the model keeps what it began with.
    fitting = FitCost(streams + moments, running + 4 * tokens * state + min(readings, room))
    # Passes forward, again, and backward, and moments of all layers of a block.
    scores = 12 * together * scores_of(source) if recipe.measures_sensitivity else 0
    sums = work.sum_share * sum(float(x * x + y * y) for x, y in chain(*work.shapes))
    passed = 6.0 * share * sum(parameters) + 4.0 * work.head_parameters + work.scored(1)
    of_blocks = max((_statistics_memory(shapes, measured) for shapes in work.shapes), default=0)
    memory = running + 2 * measured * state + scores + of_blocks
    return fitting, FitCost(measured * (passed + sums), memory)


def _paired_flops(group: Sequence[Layer]) -> float:
    """Operations on a token that layers read, of moments of both streams."""
    width = float(group[0].in_features)
    if outputs_stand_for_input(group):
        return width**2 + 4.0 * width * group[0].out_features
    return (3.0 if width >= WIDE else 4.0) * width**2


def _scratch(work: _Work) -> int:
    """Most bytes that lie beside the output: fits and moments, or the inputs of all blocks."""
    layers, source = work.plan.layers, work.source
    fits = sum(entry.parameters * weight_bytes(source, entry, None) for entry in layers)
    if not (layers and work.weighs):
        return fits
    moments = sum(4 * y * y for _, y in chain(*work.shapes)) if work.keeps_gradients else 0
    inputs = 4 * work.measured_tokens * layers[0].in_features * len(work.block_sizes)
    return max(fits + moments, inputs)


def _statistics_memory(shapes: Collection[tuple[int, int]], tokens: int) -> int:
    """Bytes of the moments of all layers of a block, with those of a run, or what one yields."""
    rows = -(-tokens // RUNS)

    def of_run(size: int) -> int:
        if size > LARGE and rows <= 2 * size:  # they wait
            return 4 * rows * size
        return 8 * size**2 + 4 * min(rows, 2 * ROWS_AT_ONCE) * size

    sums = sum(8 * (x * x + y * y) for x, y in shapes)
    of_runs = sum(of_run(x) + of_run(y) for x, y in shapes)
    # Sums of many rows begin with as many that wait, one after another.
    of_runs += max((8 * n**2 for n in chain(*shapes) if LARGE < n < rows / 2), default=0)
    return sums + max([of_runs, *(20 * max(x, y) ** 2 + 32 * x * y for x, y in shapes)])


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _tokens(options: Calibration) -> int:
    """Guess how many tokens a text has."""
    return TOKENS if options.source == ("builtin",) else max(1, options.max_length // 4)


def _speed(device: str) -> float:
    kind = pick_device(device).type if device == "auto" else device.partition(":")[0]
    most = FLOPS.get(kind, FLOPS["cpu"])
    if kind == "cpu":
        return min(most * torch.get_num_threads(), REACHED * product_speed())
    return most


@cache
def product_speed() -> float:
    """Time products of matrices in float32 on the CPU, which takes some tenths of a second.

    Returns operations in a second, of all threads.
    """
    size, seconds = 1024, inf
    matrix = torch.ones(size, size)
    for _ in range(16):  # the first one starts threads, and other programs interrupt some
        start = perf_counter()
        matrix @ matrix
        seconds = min(seconds, perf_counter() - start)
    return 2.0 * size**3 / seconds


# Free memory and disk against what a conversion will take, before any work. A disk that is too
# small stops it, since nothing but an error can come of it. Memory is estimated to a third, systems
# swap, and other programs end: too little of it is said, with what takes less.


def check_room(conversion: Conversion) -> None:
    """Refuse a disk that is too small, and warn of too little memory; say what takes less."""
    workdir = conversion.workdir
    costs = estimate(conversion.plan, conversion.source, conversion.full_recipe)

    def on_disk(costs: Estimate) -> int:
        return costs.disk_bytes + costs.scratch_bytes

    room = free_bytes(workdir.output) + workdir.written_bytes
    if on_disk(costs) > room:
        less = _that_fit(conversion, on_disk, room)
        raise DiskError(
            f"there is no space for `{workdir.output}`: about {_size(on_disk(costs))} are needed "
            f"beside it meanwhile and for it, and {_size(room)} are free on its disk",
            " or ".join(["free some disk space, choose another folder with `-o`", *less]),
        )
    device, free = conversion.device, free_memory(conversion.device)
    if free is not None and costs.memory_bytes > free:
        less = _that_fit(conversion, lambda costs: costs.memory_bytes, free)
        where = "memory" if device.type == "cpu" else f"memory of `{device}`"
        text = (
            f"warning: about {_size(costs.memory_bytes)} of {where} will be needed, and "
            f"{_size(free)} are free; should the system end this run, the same command goes on "
            "with what was done"
        )
        conversion.progress.tell(f"{text}. Less takes {' or '.join(less)}" if less else text)


def _that_fit(conversion: Conversion, size: Callable[[Estimate], int], room: float) -> list[str]:
    """List what to type that fits: the most samples, and no data at all."""
    recipe, data = conversion.full_recipe, conversion.full_recipe.calibration
    if data.is_none:
        return []

    def needed(**changes: object) -> int:
        less = recipe.model_copy(update={"calibration": data.model_copy(update=changes)})
        return size(estimate(conversion.plan, conversion.source, less))

    ways: dict[str, int] = {}  # what to type, and what it takes
    if data.probes > 1:
        ways["--probes 1"] = needed(probes=1)
    samples = _Work.of(conversion.plan, conversion.source, recipe).samples
    while samples > FEWEST_SAMPLES and not any(taken <= room for taken in ways.values()):
        samples //= 2
        ways[f"--calib-samples {samples}"] = needed(samples=samples)
    compares = recipe.resource_budget or recipe.max_loss or recipe.chooses_depth
    if not compares and recipe.vocab != "data":
        ways["--calib none"] = needed(source=("none",))
    return [f"`{way}` (about {_size(taken)})" for way, taken in ways.items() if taken <= room]


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
