"""A conversion as a value, and all its fits: tables, shared factors, blocks, and the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor, nn

from tcompress import processes
from tcompress.blockwise.output_sampler import OutputComparison, OutputSampler, sampler_of
from tcompress.blockwise.sensitivity import damped_inputs, input_moments
from tcompress.blockwise.streams import (
    Branch,
    PartialModel,
    Readings,
    Stream,
    handed_on,
    runs_twice,
)
from tcompress.conversion.outputs import Outputs
from tcompress.data.calibration import CalibrationData
from tcompress.data.inputs import Batch
from tcompress.errors import FitError
from tcompress.fitting.block_rewrite import (
    BlockRewriter,
    FitInputs,
    Group,
    RewrittenBlock,
    fit_group,
)
from tcompress.fitting.embeddings import EMBEDDINGS, count_words, fit_table
from tcompress.fitting.first_values import start_shared_factors
from tcompress.fitting.layer_fits import (
    CURVATURE_DAMPING,
    WIDER,
    BlockResult,
    SharedFactors,
    dense_matrix,
)
from tcompress.hf.build import fill, set_module
from tcompress.linalg.fits import damped_curvature
from tcompress.linalg.moments import is_finite, naming
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.depth import cut_to, with_depth, within
from tcompress.planning.entries import DepthPlan, FactorsKey, LayerPlan
from tcompress.planning.planner import make_plan
from tcompress.planning.sites import module_path, roles_of, tied_to
from tcompress.progress import StageTimes
from tcompress.search.candidates import SearchInputs
from tcompress.search.search import Statistics
from tcompress.structures import Layout, Target, structure
from tcompress.structures.base import SharesFactors, shared_of
from tcompress.structures.modules.embedding import StructuredEmbedding, TiedTable
from tcompress.structures.modules.linear import factor_layouts

TRIAL_SAMPLES = 768  # to fit answers to that are tried: enough to compare them


@dataclass(frozen=True, eq=False, kw_only=True)
class Conversion(SearchInputs):
    """A conversion of the blocks that stay, as far as they are chosen, in a working folder."""

    progress: StageTimes
    dense: SourceModel  # what outputs are compared with, with all its blocks
    full_recipe: Convert  # with the choice of blocks, and what is asked of the whole model
    statistics: Statistics | None = None  # what other conversions of the model have measured
    files: Mapping[str, str] = field(default_factory=dict)  # stamps of those that it reads

    @property
    def whole(self) -> SourceModel:
        return self.dense.whole or self.dense

    def cut(self, depth: DepthPlan) -> Conversion:
        """Return the same of a model with these blocks alone."""
        source = cut_to(self.dense, depth)
        if depth is self.plan.depth:
            return replace(self, source=source)
        recipe = within(self.full_recipe, depth, self.dense)
        plan = with_depth(make_plan(recipe, source, self.plan.method), depth, self.dense)
        return replace(self, source=source, recipe=recipe, plan=plan)

    @cached_property
    def outputs(self) -> Outputs:
        """All that it writes, once its plan has final sizes."""
        return Outputs(self.source, self.plan, self.full_recipe.dtype, self.workdir)

    @property
    def trial_data(self) -> CalibrationData | None:
        """Data that answers are tried on."""
        return self.data and self.data.part(TRIAL_SAMPLES)


@dataclass(frozen=True, eq=False)
class Fits:
    """What fits found beside the tensors that the working folder keeps."""

    inputs: FitInputs  # what they read, factors that layers share among them
    comparison: OutputComparison | None = None  # with the dense model, where it was asked for
    unreached: tuple[str, ...] = ()  # names of layers that no data reached
    errors: Mapping[str, dict[str, float]] = field(default_factory=dict)
    """Relative errors of all layers by weight name, once they are fitted."""


def fit(conversion: Conversion) -> Fits:
    """Fit everything that is rewritten; what no data reaches is fitted to its weights."""
    data, workdir, outputs = conversion.data, conversion.workdir, conversion.outputs
    compares = data is not None and len({*data.origins.values()}) > 1  # sources of samples
    compares = compares or conversion.statistics is not None  # models of a family
    measures = conversion.full_recipe.measures_sensitivity or conversion.plan.depth is not None
    fits = fit_on_data(conversion, sampler_of(conversion.dense) if compares and measures else None)
    blocks: dict[str, list[Group]] = {}
    for group in outputs.groups:
        blocks.setdefault(outputs.block_of(group[0]), []).append(group)
    # What is on disk changes as soon as one process is ahead of the others.
    unfitted = processes.agreed([name for name in blocks if workdir.errors(name) is None])
    if unfitted:
        conversion.progress.stage("fitting to weights", len(unfitted), "blocks")
    inputs = fits.inputs
    step = processes.count()  # blocks at a time

    def fit_block(name: str) -> None:
        result = BlockResult(name)
        reductions = inputs.reductions(name, conversion.plan.layers)
        for group in blocks[name]:
            fit_group(inputs, group, result, reductions)
        workdir.keep_block(result)
        conversion.progress.advance(step, name)

    processes.shared_out(fit_block, unfitted, conversion.device)
    errors = {k: e for name in blocks for k, e in (workdir.errors(name) or {}).items()}
    return replace(fits, errors=errors)


def fit_on_data(conversion: Conversion, sampler: OutputSampler | None = None) -> Fits:
    """Fit embeddings, what layers share and all blocks, as far as there is data for them.

    With a sampler, outputs are compared on data held out.
    """
    source, plan, dtype_of = conversion.source, conversion.plan, conversion.outputs.dtype_of
    tables = _fit_embeddings(conversion)
    factors: SharedFactors = {}
    if source.seed is not None:
        factors = start_shared_factors(plan.layers, dtype_of, source.seed)
    elif any(entry.own_factors for entry in plan.layers):
        factors = _fit_shared_factors(conversion)
    inputs = FitInputs(
        source,
        conversion.recipe.calibration.damping,
        conversion.workdir.moments,
        dtype_of=dtype_of,
        device=conversion.device,
        factors=factors,
        roundings=conversion.outputs.roundings,
    )
    if conversion.data is None or not (plan.layers or plan.reads_queries or sampler):
        return Fits(inputs)
    groups = sum(len(block.groups) for block in roles_of(source).blocks)
    conversion.progress.stage("fitting blocks", groups, "groups")
    walk = BlockFitter(conversion, inputs, tables, sampler)
    walk.run()
    block_of = conversion.outputs.block_of
    unreached = (entry.name for entry in plan.layers if block_of(entry) not in walk.reached)
    return Fits(inputs, walk.comparison and walk.comparison.merged(), tuple(unreached))


def _fit_embeddings(conversion: Conversion) -> dict[str, StructuredEmbedding]:
    """Fit all tables, and give them to run the model on, by name in the model."""
    entries, workdir, device = conversion.plan.embeddings, conversion.workdir, conversion.device
    source, data = conversion.source, conversion.data
    if data is None or not entries:
        return {}
    result = workdir.block(EMBEDDINGS)
    if result is None:
        conversion.progress.stage("fitting embeddings", len(entries), "tables")
        result = BlockResult(EMBEDDINGS)
        for entry in entries:
            weight, dtype = dense_matrix(source, entry, device), conversion.outputs.dtype_of(entry)
            counts = (count_words(data, len(weight), held_out=held) for held in (False, True))
            fitted, held_out = (item.to(device) for item in counts)
            result.layers[entry.key] = fit_table(entry, weight, fitted, held_out, dtype)
        workdir.keep_block(result)
        conversion.progress.advance(len(entries), "")
    tables = {}
    for entry in entries:
        table = StructuredEmbedding(entry.parts, dtype=torch.float32, device=device)
        fill(table, entry, result.layers[entry.key].tensors)
        tables[module_path(source, entry.name)] = table.requires_grad_(False).eval()
    return tables


# Factors that many layers share are fitted once, before any of them, to all of them.
#
# The moments are those of the dense model, from the backward pass where there was one, else from a
# walk of their own. Without data the weights alone decide.


def _fit_shared_factors(conversion: Conversion) -> SharedFactors:
    """Fit all shared factors, as they are stored; what an interrupted run has fitted is read."""
    workdir, progress, layers = conversion.workdir, conversion.progress, conversion.plan.layers
    stored = workdir.factors()
    if stored is not None:
        return stored
    uses: dict[FactorsKey, list[tuple[LayerPlan, Layout, slice]]] = {}  # owners first
    for entry in layers:
        start = 0
        for part in entry.parts:
            rows = slice(start, start + part.out_features)
            start = rows.stop
            for layout in part.terms:
                if (shared := shared_of(layout)) is not None:
                    key = (entry.bank_of.get(shared.name, entry.name), shared.name)
                    uses.setdefault(key, []).append((entry, layout, rows))
    if conversion.data is not None and not conversion.full_recipe.measures_sensitivity:
        _measure_inputs(conversion, conversion.data)
    progress.stage("fitting what layers share", len(uses), "sets")
    fitted: dict[FactorsKey, dict[str, Tensor]] = {}
    for (owner, name), members in uses.items():
        fitted[owner, name] = _shared_factors(conversion, members)
        progress.advance(1, f"{owner} {name}")
    workdir.keep_factors(fitted)
    return fitted


def _measure_inputs(conversion: Conversion, data: CalibrationData) -> None:
    """Keep the input moments of all layers that use shared factors."""
    source, progress = conversion.source, conversion.progress
    layers = (entry for entry in conversion.plan.layers if factor_layouts(entry.parts))
    entries = {module_path(source, entry.name): entry for entry in layers}
    progress.stage("measuring what layers read", len(roles_of(source).blocks), "blocks")
    # What is held out is not looked at.
    parts = (source, entries, data.fitted_batches, conversion.device)
    for block, measured in input_moments(*parts, partial(progress.advance, 1)):
        damped = damped_inputs(measured, entries, conversion.recipe.calibration.damping)
        conversion.workdir.keep_moments("inputs", block.name, damped)


def _shared_factors(
    conversion: Conversion, members: Sequence[tuple[LayerPlan, Layout, slice]]
) -> dict[str, Tensor]:
    """Fit factors to all layers that share them; members are their layouts and output splits."""
    names = ", ".join(f"`{entry.name}`" for entry, _, _ in members[:3])
    where = f"what {names} and {len(members) - 3} more share" if len(members) > 3 else names
    targets = [_factors_target(conversion, entry, rows) for entry, _, rows in members]
    layouts = [layout for _, layout, _ in members]
    dtype = conversion.outputs.dtype_of(members[0][0])
    kind = structure(layouts[0].structure)
    assert isinstance(kind, SharesFactors)
    hint = "use more calibration data or a larger `damping`, or share less"
    with naming(f"the fit of {where} failed", hint), torch.no_grad():
        factors = kind.fit_shared(targets, layouts)
    stored = {name: tensor.to(dtype).contiguous().cpu() for name, tensor in factors.items()}
    if not all(map(is_finite, stored.values())):
        raise FitError(f"the fit of {where} is not finite in {dtype}", WIDER)
    return stored


def _factors_target(conversion: Conversion, entry: LayerPlan, rows: slice) -> Target:
    """Target of the factors in one output split of a layer."""
    moments, block = conversion.workdir.moments, module_path(conversion.source, entry.block)
    weight = dense_matrix(conversion.source, entry, conversion.device)[rows].double()
    gram = moments("inputs", block).get(entry.name)
    curvature = moments("curvature", block).get(entry.name)
    if gram is not None:
        gram = gram.double()
    if curvature is not None:
        curvature = damped_curvature(curvature[rows, rows].double(), CURVATURE_DAMPING)
    product = weight if gram is None else weight @ gram
    scale = max(float(product.mul(weight).sum()), torch.finfo(torch.float64).tiny)
    return Target(product, gram, scale, curvature, weight)


# Blocks are fitted with two streams of activations: the dense one, and that of what is rewritten.


class BlockFitter:
    """A walk of two streams through the model, on which every block is fitted.

    Targets are the states of the dense model with all its blocks, so that the blocks that stay make
    up for those that are gone. Batches held out are only measured on: with a sampler, by what the
    model puts out before and after. Word embeddings (`tables`) are rewritten before.
    """

    def __init__(
        self,
        conversion: Conversion,
        inputs: FitInputs,
        tables: Mapping[str, StructuredEmbedding],
        sampler: OutputSampler | None,
    ) -> None:
        source, plan, data = conversion.source, conversion.plan, conversion.data
        assert data is not None
        dense = source if plan.depth is not None and plan.depth.deeper else conversion.dense
        self._conversion, self._data = conversion, data
        self.comparison = OutputComparison(sampler) if sampler else None
        self.reached: set[str] = set()  # blocks that the data has come to
        self._blocks = {source.original_name(b.name): b for b in roles_of(source).blocks}
        self._model = PartialModel(dense, conversion.device, head=sampler is not None)
        for path, table in tables.items():
            for name in (path, *tied_to(dense, path)):
                module = self._model.model.get_submodule(name)
                if isinstance(module, nn.Embedding):  # the output head is never reached
                    branch = Branch(module, TiedTable(table, module))
                    set_module(self._model.model, name, branch)
        every = range(len(data.batches))
        self._own = processes.own_batches(len(every))
        judged = (data.holdout or every) if sampler else ()  # one sample is all there is
        self._streams: dict[int, tuple[Stream, Stream]] = {}
        # What attentions begin with is learnt from all that reaches them.
        for index in every if plan.attention else self._own:
            batch: Batch = data.batches[index]
            keep = index in judged
            if sampler and keep:
                batch = sampler.with_variants(batch)
            new = self._model.stream(batch, rewritten=True, keep=keep)
            self._streams[index] = self._model.stream(batch, keep=keep), new
        of_plan = plan.layers, plan.attention
        self._rewriter = BlockRewriter(inputs, data, self._streams, *of_plan, reads_once=True)

    def run(self) -> None:
        """Fit all blocks in the order in which the model runs them, and keep the fits.

        What an interrupted run has kept is taken as it is.
        """
        streams = [*chain(*zip(*self._streams.values(), strict=True))]  # the dense ones first
        for dense, readings in self._model.walk(streams):
            self._visit(dense.name, readings)
            if self.comparison is None and len(self.reached) == len(self._blocks):
                self._check_end(readings)  # the output head was never loaded
                break

    def _visit(self, name: str, readings: Readings) -> None:
        """Fit a block, or take what was kept of it, and answer all streams.

        Nothing outlives the visit that holds what was read there.
        """
        workdir, block = self._conversion.workdir, self._blocks.get(name)
        if block is None:  # only the dense model has it
            self._advance(readings, None)
            return
        if block.name in self.reached:
            raise runs_twice(name)
        self.reached.add(block.name)
        stored = workdir.block(block.name)
        progress = partial(self._conversion.progress.advance, 1)
        rewritten = self._rewriter.rewrite(block, readings, stored, progress)
        if stored is None:
            workdir.keep_block(rewritten.result)
        if self.comparison is not None or len(self.reached) < len(self._blocks):
            self._advance(readings, rewritten)
        rewritten.routing.close()

    def _check_end(self, readings: Readings) -> None:
        """Make sure that no block follows the last one, such as one that runs again."""
        for stream, _ in [*self._streams.values()][:1]:
            answer = readings.answer(stream)
            with suppress(Exception):  # the output head holds no weights: the end was reached
                stream.answer(answer)
            if stream.call is not None and stream.call.block in self._blocks:
                raise runs_twice(stream.call.block)

    def _advance(self, readings: Readings, rewritten: RewrittenBlock | None) -> None:
        """Answer all streams; nothing is rewritten of a block that only the dense ones run."""
        for index, (dense_stream, new_stream) in self._streams.items():
            if rewritten is not None:
                rewritten.routing.current = index
            dense_stream.answer(readings.answer(dense_stream))
            call = new_stream.waiting
            answer = call.run(readings.forward if rewritten is None else rewritten.forward)
            new_stream.answer(handed_on(call, answer) if rewritten is None else answer)
            if self.comparison is not None and dense_stream.output is not None:
                if index in self._own:
                    origin = self._data.origins.get(index, self._data.name)
                    outputs = (dense_stream.output, new_stream.output)
                    self.comparison.attempt(origin, *outputs, dense_stream.batch, index)
                dense_stream.output = new_stream.output = None  # at once: logits are large
