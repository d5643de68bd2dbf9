"""A conversion as a value, and all its fits: tables, shared factors, blocks, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tcompress import processes
from tcompress.blockwise.output_sampler import OutputComparison, OutputSampler, sampler_of
from tcompress.blockwise.sensitivity import damped_inputs, input_moments
from tcompress.blockwise.streams import (
    Branch,
    PartialModel,
    Readings,
    common_block,
    handed_on,
    runs_twice,
)
from tcompress.conversion.outputs import Outputs
from tcompress.data.calibration import CalibrationData, load_batches
from tcompress.errors import FitError, message_of
from tcompress.fitting.block_rewrite import (
    BlockRewriter,
    FitInputs,
    Group,
    Routing,
    StreamPairs,
    dense_matrix,
    dense_readings,
    fit_group,
)
from tcompress.fitting.channel_orders import Reductions, completed, read_reductions
from tcompress.fitting.embeddings import EMBEDDINGS, fit_embeddings
from tcompress.fitting.first_values import start_shared_factors
from tcompress.fitting.layer_fits import CURVATURE_DAMPING, WIDER, BlockResult, SharedFactors
from tcompress.fitting.workdir import FitWorkplace
from tcompress.hf.build import fill, set_module
from tcompress.hf.opening import pick_device, pick_dtype
from tcompress.linalg.fits import damped_curvature
from tcompress.linalg.moments import is_finite
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.costs import path_of
from tcompress.planning.depth import cut_to, with_depth, within
from tcompress.planning.entries import DepthPlan, FactorsKey, LayerPlan, Plan
from tcompress.planning.planner import make_plan
from tcompress.planning.sites import roles_of, tied_to
from tcompress.progress import Progress
from tcompress.roles import Layer
from tcompress.search.candidates import SearchInputs
from tcompress.search.search import Statistics
from tcompress.structures import Layout, Target, structure
from tcompress.structures.base import SharesFactors, shared_of
from tcompress.structures.modules.embedding import StructuredEmbedding, TiedTable
from tcompress.structures.modules.linear import factor_layouts

TRIAL_SAMPLES = 768  # to fit answers to that are tried: enough to compare them


@dataclass(frozen=True, eq=False)
class Conversion:
    """A model, and what is asked of it. Use `Conversion.of`.

    Attributes:
        dense: The model that outputs are compared with, with all its blocks.
        source: The model with the blocks that stay, as far as they are chosen.
        recipe: What was asked for.
        inner: The same for the blocks that stay.
        plan: A plan of equal sizes.
        data: To fit to, and to measure on.
        statistics: What other conversions of the model have measured.
    """

    dense: SourceModel
    source: SourceModel
    recipe: Convert
    inner: Convert
    plan: Plan
    data: CalibrationData | None
    device: torch.device
    progress: Progress
    statistics: Statistics | None = None

    @classmethod
    def of(
        cls,
        source: SourceModel,
        recipe: Convert,
        plan: Plan,
        progress: Progress,
        data: CalibrationData | None = None,
        statistics: Statistics | None = None,
    ) -> Conversion:
        """Load the calibration data that a plan reads, unless it is given."""
        if not plan.reads_data:
            data = None
        elif data is None and not recipe.calibration.is_none:
            options = recipe.calibration.within(plan.longest)
            widest = max((entry.in_features for entry in plan.layers), default=0)
            data = load_batches(source, options, widest)
        parts = (source, source, recipe, recipe.within_blocks, plan, data)
        return cls(*parts, pick_device(recipe.device, fits=True), progress, statistics)

    def cut(self, depth: DepthPlan) -> Conversion:
        """Return the same of a model with these blocks alone."""
        source = cut_to(self.dense, depth)
        if depth is self.plan.depth:
            return replace(self, source=source)
        inner = within(self.recipe, depth, self.dense)
        plan = with_depth(make_plan(inner, source, self.plan.method), depth, self.dense)
        return replace(self, source=source, inner=inner, plan=plan)

    @property
    def trial_data(self) -> CalibrationData | None:
        """Data that answers are tried on."""
        return self.data and self.data.part(TRIAL_SAMPLES)

    def inputs(self, workdir: FitWorkplace, *, several: bool = False) -> SearchInputs:
        """Ask for the budget of the blocks that stay."""
        parts = (self.source, self.inner, self.plan, self.data, workdir, self.device)
        return SearchInputs(*parts, self.progress, several)

    def outputs(self, plan: Plan) -> Outputs:
        """Lay out what a plan with final sizes writes."""
        if self.plan.depth is not None:
            plan = with_depth(plan, self.plan.depth, self.dense)
        return Outputs.of(self.source, plan, pick_dtype(self.recipe.dtype))


@dataclass(frozen=True, eq=False)
class Fits:
    """What fits found beside the tensors that the working folder keeps.

    Attributes:
        factors: Those that layers share.
        comparison: With what the dense model puts out on data held out, where it was asked for.
        unreached: Names of layers that no data reached.
        errors: Relative errors of all layers by weight name, as far as they are fitted.
    """

    factors: SharedFactors = field(default_factory=dict)
    comparison: OutputComparison | None = None
    unreached: tuple[str, ...] = ()
    errors: Mapping[str, dict[str, float]] = field(default_factory=dict)


def fit(conversion: Conversion, outputs: Outputs, workdir: FitWorkplace) -> Fits:
    """Fit everything that is rewritten; what no data reaches is fitted to its weights."""
    data = conversion.data
    several = data is not None and len({*data.origins.values()}) > 1
    several = several or conversion.statistics is not None  # models of a family are compared
    measures = conversion.recipe.measures_sensitivity or outputs.plan.depth is not None
    sampler = sampler_of(conversion.dense) if several and measures else None
    fits = fit_on_data(conversion, outputs, workdir, sampler)
    blocks: dict[str, list[Group]] = {}
    for group in outputs.groups:
        blocks.setdefault(outputs.block_of(group), []).append(group)
    unfitted = [name for name in blocks if workdir.errors(name) is None]
    if unfitted:
        conversion.progress.stage("fitting to weights", len(unfitted), "blocks")
    inputs = _inputs(conversion, outputs, workdir, fits.factors)

    step = processes.count()  # blocks at a time

    def fit_block(name: str) -> None:
        result = BlockResult(name, {}, {})
        narrow = any(entry.is_narrow for group in blocks[name] for entry in group)
        reductions = inputs.reductions(name) if narrow else {}
        for group in blocks[name]:
            fit_group(inputs, group, result, reductions)
        workdir.keep_block(result)
        conversion.progress.advance(step, name)

    processes.shared_out(fit_block, unfitted, conversion.device)
    errors = {k: e for name in blocks for k, e in (workdir.errors(name) or {}).items()}
    return replace(fits, errors=errors)


def fit_on_data(
    conversion: Conversion,
    outputs: Outputs,
    workdir: FitWorkplace,
    sampler: OutputSampler | None = None,
) -> Fits:
    """Fit embeddings, what layers share and all blocks, as far as there is data for them.

    Args:
        conversion: The model, and what is asked of it.
        outputs: The forms.
        workdir: Where fits are kept, and moments.
        sampler: With one, outputs are compared on data held out.
    """
    source, plan, data = conversion.source, outputs.plan, conversion.data
    tables = _fit_embeddings(conversion, outputs, workdir)
    factors: SharedFactors = {}
    if source.seed is not None:
        factors = start_shared_factors(plan.layers, outputs.dtype_of, source.seed)
    elif any(entry.own_factors for entry in plan.layers):
        factors = _fit_shared_factors(conversion, outputs, workdir)
    if data is None or not (plan.layers or plan.reads_queries or sampler):
        return Fits(factors)
    groups = sum(len(block.groups) for block in roles_of(source).blocks)
    conversion.progress.stage("fitting blocks", groups, "groups")
    deeper = plan.depth is not None and plan.depth.deeper
    blocks = BlockFitter(
        _inputs(conversion, outputs, workdir, factors),
        plan,
        data,
        dense_source=source if deeper else conversion.dense,
        tables=tables,
        sampler=sampler,
    )
    for result in blocks.run(workdir.block, partial(conversion.progress.advance, 1)):
        workdir.keep_block(result)
    comparison = blocks.comparison and blocks.comparison.merged()
    unreached = {None, *blocks.unreached}  # none: a layer outside of all blocks
    names = (e.name for e in plan.layers if outputs.blocks.get(outputs.path(e)) in unreached)
    return Fits(factors, comparison, tuple(names))


def _inputs(
    conversion: Conversion, outputs: Outputs, workdir: FitWorkplace, factors: SharedFactors
) -> FitInputs:
    return FitInputs(
        conversion.source,
        conversion.recipe.calibration.damping,
        workdir.moments,
        reductions=partial(_reductions, conversion, outputs.plan, workdir),
        dtype_of=outputs.dtype_of,
        device=conversion.device,
        factors=factors,
        roundings=outputs.roundings,
    )


def _fit_embeddings(
    conversion: Conversion, outputs: Outputs, workdir: FitWorkplace
) -> dict[str, StructuredEmbedding]:
    """Fit all tables, and give them to run the model on, by name in the model."""
    entries, device = outputs.plan.embeddings, conversion.device
    if conversion.data is None or not entries:
        return {}
    result = workdir.block(EMBEDDINGS)
    if result is None:
        conversion.progress.stage("fitting embeddings", len(entries), "tables")
        parts = (conversion.data, outputs.dtype_of, device)
        result = fit_embeddings(conversion.source, entries, *parts)
        workdir.keep_block(result)
        conversion.progress.advance(len(entries), "")
    tables = {}
    for entry in entries:
        table = StructuredEmbedding(entry.parts, dtype=torch.float32, device=device)
        fill(table, entry, result.layers[entry.key].tensors)
        tables[outputs.path(entry)] = table.requires_grad_(False).eval()
    return tables


def _reductions(
    conversion: Conversion, plan: Plan, workdir: FitWorkplace, block: str
) -> Reductions:
    """Tell which channels of a block stay; by the weights alone where no data has told."""
    source, device = conversion.source, conversion.device
    measured = read_reductions(workdir.moments("channels", block))
    entries = {path_of(source, entry): entry for entry in plan.layers}
    around = next((item for item in roles_of(source).blocks if item.name == block), None)

    def weight_of(layer: Layer) -> Tensor:
        return dense_matrix(source, entries[layer.weight_name], device)

    return measured if around is None else completed(measured, around, entries, weight_of)


# Factors that many layers share are fitted once, before any of them, to all of them.
#
# The moments are those of the dense model, from the backward pass where there was one, else from a
# walk of their own. Without data the weights alone decide.


def _fit_shared_factors(
    conversion: Conversion, outputs: Outputs, workdir: FitWorkplace
) -> SharedFactors:
    """Fit all shared factors, as they are stored; what an interrupted run has fitted is read."""
    stored, progress = workdir.factors(), conversion.progress
    if stored is not None:
        return stored
    entries = {entry.name: entry for entry in outputs.plan.layers}
    uses: dict[FactorsKey, list[tuple[LayerPlan, Layout, slice]]] = {}  # owners first
    for entry in outputs.plan.layers:
        start = 0
        for part in entry.parts:
            rows = slice(start, start + part.out_features)
            start = rows.stop
            for layout in part.terms:
                if (shared := shared_of(layout)) is not None:
                    key = (entry.bank_of.get(shared.name, entry.name), shared.name)
                    uses.setdefault(key, []).append((entry, layout, rows))
    if conversion.data is not None and not conversion.recipe.measures_sensitivity:
        _measure_inputs(conversion, outputs, workdir, conversion.data)
    progress.stage("fitting what layers share", len(uses), "sets")
    fitted: dict[FactorsKey, dict[str, Tensor]] = {}
    for (owner, name), members in uses.items():
        targets = [_factors_target(conversion, workdir, e, rows) for e, _, rows in members]
        layouts = [layout for _, layout, _ in members]
        names = ", ".join(f"`{entry.name}`" for entry, _, _ in members[:3])
        where = f"what {names} and {len(members) - 3} more share" if len(members) > 3 else names
        dtype = outputs.dtype_of(entries[owner])
        fitted[owner, name] = _shared_factors(targets, layouts, where, dtype)
        progress.advance(1, f"{owner} {name}")
    workdir.keep_factors(fitted)
    return fitted


def _measure_inputs(
    conversion: Conversion, outputs: Outputs, workdir: FitWorkplace, data: CalibrationData
) -> None:
    """Keep the input moments of all layers that use shared factors."""
    layers = (entry for entry in outputs.plan.layers if factor_layouts(entry.parts))
    entries = {outputs.path(entry): entry for entry in layers}
    roles, progress = roles_of(conversion.source), conversion.progress
    progress.stage("measuring what layers read", len(roles.blocks), "blocks")
    batches = [data.batches[index] for index in data.fitted]  # what is held out is not looked at
    parts = (conversion.source, roles, entries, batches, conversion.device)
    for block, measured in input_moments(*parts, partial(progress.advance, 1)):
        damped = damped_inputs(measured, entries, conversion.recipe.calibration.damping)
        workdir.keep_moments("inputs", block, damped)


def _factors_target(
    conversion: Conversion, workdir: FitWorkplace, entry: LayerPlan, rows: slice
) -> Target:
    """Target of the factors in one output split of a layer."""
    source = conversion.source
    weight = dense_matrix(source, entry, conversion.device)[rows].double()
    block = source.keymap.runtime_name(entry.block) or entry.block
    gram = workdir.moments("inputs", block).get(entry.name)
    curvature = workdir.moments("curvature", block).get(entry.name)
    if gram is not None:
        gram = gram.double()
    if curvature is not None:
        curvature = damped_curvature(curvature[rows, rows].double(), CURVATURE_DAMPING)
    product = weight if gram is None else weight @ gram
    scale = max(float(product.mul(weight).sum()), torch.finfo(torch.float64).tiny)
    return Target(product, gram, scale, curvature, weight)


def _shared_factors(
    targets: list[Target], layouts: list[Layout], where: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    kind = structure(layouts[0].structure)
    assert isinstance(kind, SharesFactors)
    try:
        with torch.no_grad():
            factors = kind.fit_shared(targets, layouts)
    except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        hint = "use more calibration data or a larger `damping`, or share less"
        raise FitError(f"the fit of {where} failed: {message_of(error)}", hint) from error
    stored = {name: tensor.to(dtype).contiguous().cpu() for name, tensor in factors.items()}
    if not all(map(is_finite, stored.values())):
        raise FitError(f"the fit of {where} is not finite in {dtype}", WIDER)
    return stored


# Blocks are fitted with two streams of activations: the dense one, and that of what is rewritten.


@dataclass
class BlockFitter:
    """A walk of two streams through the model, on which every block is fitted."""

    inputs: FitInputs
    plan: Plan
    data: CalibrationData  # batches held out are only measured on
    _: KW_ONLY
    dense_source: SourceModel
    """The dense model with all its blocks, where `inputs.source` lacks some. Its states are the
    targets, so that the blocks that stay make up for those that are gone."""
    tables: Mapping[str, StructuredEmbedding]
    """Rewritten word embeddings by module path, fitted before."""
    sampler: OutputSampler | None = None
    """Compares what the model puts out before and after, on the batches held out."""

    def __post_init__(self) -> None:
        self.comparison = OutputComparison(self.sampler) if self.sampler else None
        """Outputs of the model before and after, where a sampler tells what counts."""
        source, head = self.inputs.source, self.sampler is not None
        self._blocks = {source.original_name(b.name): b for b in roles_of(source).blocks}
        self.unreached = set(self._blocks)  # blocks that the data has not come to
        names = [block.name for block in roles_of(self.dense_source).blocks]
        self._model = PartialModel(self.dense_source, names, self.inputs.device, head=head)
        for path, table in self.tables.items():
            for name in (path, *tied_to(self.dense_source, path)):
                module = self._model.model.get_submodule(name)
                if isinstance(module, nn.Embedding):  # the output head is never reached
                    branch = Branch(module, TiedTable(table, module))
                    set_module(self._model.model, name, branch)
        judged = self.data.holdout or range(len(self.data.batches))  # one sample is all there is
        every = range(len(self.data.batches))
        self._own = processes.own_batches(len(every))
        # What attentions begin with is learnt from all that reaches them.
        batches = {
            index: (self.sampler.with_variants(self.data.batches[index]), True)
            if self.sampler is not None and index in judged
            else (self.data.batches[index], False)
            for index in (every if self.plan.attention else self._own)
        }
        stream = self._model.stream
        dense = {i: stream(batch, keep=keep) for i, (batch, keep) in batches.items()}
        new = {i: stream(batch, rewritten=True, keep=keep) for i, (batch, keep) in batches.items()}
        self._streams = StreamPairs(self.data, dense, new)

    def run(
        self, done: Callable[[str], BlockResult | None], progress: Callable[[str], None]
    ) -> Iterator[BlockResult]:
        """Fit all blocks in the order in which the model runs them.

        Of a block that an interrupted run finished, `done` returns the stored result.
        """
        rewriter = BlockRewriter(self.inputs, self._streams, self.plan.layers, self.plan.attention)
        pairs, unreached = self._streams, self.unreached
        streams = [*pairs.dense.values(), *pairs.new.values()]
        with self._model.paused(streams):
            while (unreached or self.sampler) and (name := common_block(streams)):
                block = self._blocks.get(name)
                if block is not None and name not in unreached:
                    raise runs_twice(name)
                unreached.discard(name)
                with self._model.loaded(name) as dense:
                    readings = dense_readings(block, dense, self._model.forwards[name])
                    if block is None:  # only the dense model has it
                        self._advance(readings, self._model.forwards[name], None)
                        continue
                    stored = done(block.name)
                    rewritten = rewriter.rewrite(block, dense, readings, stored, progress)
                    if not unreached and self.sampler is None:  # the output head was never loaded
                        self._check_end(readings)
                    else:
                        self._advance(readings, rewritten.forward, rewritten.routing)
                if stored is None:
                    yield rewritten.result

    def _check_end(self, readings: Readings) -> None:
        """Make sure that no block follows the last one, such as one that runs again."""
        stream = next(iter(self._streams.dense.values()), None)
        if stream is None:
            return
        answer = readings.answer(stream)
        try:
            stream.answer(answer)
        except Exception:  # the output head, which holds no weights: the end was reached
            return
        if stream.call is not None and stream.call.block in self._blocks:
            raise runs_twice(stream.call.block)

    def _advance(
        self, readings: Readings, new: Callable[..., Any], routing: Routing | None
    ) -> None:
        """Answer all streams; without routing it is a block that only the dense ones run."""
        for index, dense_stream, new_stream in self._streams:
            if routing is not None:
                routing.current = index
            dense_stream.answer(readings.answer(dense_stream))
            call = new_stream.waiting
            answer = call.run(new)
            new_stream.answer(handed_on(call, answer) if routing is None else answer)
            if self.comparison is not None and dense_stream.output is not None:
                origin = self.data.origins.get(index, self.data.name)
                if index in self._own:
                    outputs = (dense_stream.output, new_stream.output)
                    self.comparison.add(origin, *outputs, dense_stream.batch, index)
                dense_stream.output = new_stream.output = None  # at once: logits are large
