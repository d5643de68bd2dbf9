"""The conversion: plan, calibrate, fit, write, publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from tcompress.artifact.checksums import is_whole
from tcompress.artifact.format import Stored, needed_version, plan_shards, write_index, write_shard
from tcompress.artifact.manifest import Manifest, environment, read_manifest
from tcompress.artifact.workplace import check_output
from tcompress.blockwise.comparison import OutputComparison
from tcompress.blockwise.output_sampler import OutputSampler, sampler_of
from tcompress.conversion.outputs import (
    Cluster,
    Outputs,
    calibration_facts,
    check_written,
    conversion_identity,
    source_facts,
    with_links,
    with_unheld,
    with_unreached,
    write_rest,
)
from tcompress.conversion.whole_model_fits import SharedFactorsFitter, fit_without_data
from tcompress.data.calibration import CalibrationData, load_batches
from tcompress.errors import InputError, PlanError
from tcompress.fitting.block_fitter import BlockFitter, BlockResult
from tcompress.fitting.channel_orders import Reductions, completed, read_reductions
from tcompress.fitting.embeddings import EMBEDDINGS, fit_embeddings
from tcompress.fitting.first_values import start_shared_factors
from tcompress.fitting.layer_fits import SharedFactors
from tcompress.fitting.workdir import Distance, FitWorkplace
from tcompress.hf.build import fill
from tcompress.hf.opening import pick_device, pick_dtype
from tcompress.latency.benchmark import bench
from tcompress.latency.sizes import RandomInputs
from tcompress.models import SourceModel, read_finite
from tcompress.models.fewer_layers import fixed_blocks
from tcompress.options import Bench, Convert
from tcompress.options.steps import PaperRow
from tcompress.planning.costs import path_of
from tcompress.planning.depth import cut_to, with_depth, within
from tcompress.planning.entries import BlockLoss, DepthPlan, Plan
from tcompress.planning.planner import make_plan
from tcompress.planning.sites import roles_of
from tcompress.progress import Progress, Silent
from tcompress.roles import Layer
from tcompress.search.depth_search import choose_blocks, depth_without, dropping
from tcompress.search.loss_search import largest_error
from tcompress.search.search import STOP, Decision, simplest, try_out
from tcompress.search.shared_statistics import Statistics
from tcompress.structures.modules.embedding import StructuredEmbedding
from tcompress.timing_model.clocks import REPEATS, STEPS, USUAL_PASS, Workload
from tcompress.vocabulary.choice import with_vocabulary


@dataclass(frozen=True)
class Converted:
    """What a conversion produced.

    Attributes:
        folder: The written folder.
        manifest: Its manifest.
        resumed: Whether an interrupted run was continued.
    """

    folder: Path
    manifest: Manifest
    resumed: bool = False


def convert(
    source: SourceModel | str,
    recipe: Convert,
    output: Path | str,
    *,
    plan: Plan | None = None,
    data: CalibrationData | None = None,
    force: bool = False,
    progress: Progress | None = None,
    paper: Sequence[PaperRow] = (),
    statistics: Statistics | None = None,
) -> Converted:
    """Converts a model and writes the result.

    Args:
        source: The dense model, or its name; with `init: random` its weights do not count.
        recipe: How to convert it.
        output: Folder to write; it appears only when everything is finished.
        plan: The plan, if it was already made.
        data: Calibration batches, instead of those that the recipe names.
        force: Replace a folder that is not empty.
        progress: Hears how far it is.
        paper: Published numbers, to be shown beside those of the result.
        statistics: What other conversions of the model have measured, and this one adds to.

    Returns:
        The written folder and its manifest.

    Raises:
        InputError: The model, the recipe, the data or the output folder cannot be used.
        FitError: A weight or a fit is not finite; the message names the layer.
        WriteError: What was written does not load, or is not what was fitted.
    """
    start = time.perf_counter()
    output = Path(output).expanduser().absolute()
    check_output(output, force=force)
    seed = recipe.seed if recipe.init == "random" else None
    if isinstance(source, str):
        source = SourceModel.open(source, seed=seed, adapter=recipe.adapter)
    elif seed is not None:
        source = source.at_random(seed)
    folder = (source.origin or source.folder).resolve()
    if output.resolve() == folder or output.resolve() in folder.parents:
        raise InputError(
            f"output `{output}` is the model's own folder, or contains it",
            "choose another folder with `-o`",
        )
    if len(recipe.speedups) > 1:
        raise InputError(
            f"`speedup` asks for {len(recipe.speedups)} models, and one is converted at a time",
            "ask for them with `tcompress convert` or `tcompress sweep --speedups`",
        )
    source = with_vocabulary(source, recipe, progress)
    plan = plan or make_plan(recipe, source)
    job = _Job(source, recipe, plan, progress or Silent(), data, statistics)
    identity = conversion_identity(source, recipe, plan, job.data, str(job.device))
    # Bad input leaves nothing behind, a kill or Ctrl-C does.
    with FitWorkplace(output, identity, job.device, force=force).working() as place:
        if place.published and (done := read_manifest(output)) is not None:
            place.discard()
            return Converted(output, done, resumed=True)
        job.decide(place)
        made = job.outputs.made  # fits of these are kept until they are written
        place.need(sum(item.nbytes * (1 + (item.key in made)) for item in job.outputs.tensors))
        errors = job.fit(place)
        checksums = job.write(place)
        manifest = Manifest(
            format_version=needed_version(
                job.plan.entries,
                job.plan.attention,
                drawn=source.seed is not None,
                rounded=job.plan.storage is not None,
            ),
            source=source_facts(job.source, source.whole or source, job.plan),
            recipe=recipe.model_dump(mode="json"),
            plan=with_unheld(with_links(job.plan, job.source), recipe, job.data),
            calibration=calibration_facts(job.data, job.comparison),
            fit=dict(sorted(errors.items())),
            checksums={**checksums},
            seconds=round(time.perf_counter() - start, 2),
            environment=environment(),
            paper=list(paper),
        )
        write_rest(place.model, job.source, manifest, recipe.dtype)
        check_written(place.model, job.outputs, job.plan, job.fitted, job.factors)
        place.publish(force=force)
    if recipe.counts_time:
        manifest = _timed(source, output, manifest.plan, recipe) or manifest
    return Converted(output, manifest, place.resumed)


def _timed(source: SourceModel, output: Path, plan: Plan, recipe: Convert) -> Manifest | None:
    """Measures the pass that was asked for, and records it beside what was predicted."""
    is_long = plan.budget is not None and (plan.budget.seconds or 0.0) > LONG
    work, inputs = Workload.read(recipe.at or USUAL_PASS), RandomInputs.of(source, source)
    new = STEPS if work.decodes else None
    length = inputs.fitting([work.length], new or 0) if inputs.has_length else ()
    options = {"batch": (work.batch,), "length": length, "generate": new}
    options["repeats"] = FEWER if is_long else REPEATS
    own = {"threads": recipe.threads, "dtype": recipe.dtype, "device": recipe.device}
    bench([str(output)], settings=Bench.model_validate({**options, **own}))
    return read_manifest(output)


LONG, FEWER = 0.5, 5  # seconds of a pass of the dense model, and repeats of such ones

TRIAL_SAMPLES = 768  # to fit answers to that are tried: enough to compare them


@dataclass
class _Job:
    source: SourceModel
    recipe: Convert
    plan: Plan
    progress: Progress
    data: CalibrationData | None = None
    statistics: Statistics | None = None
    tables: dict[str, StructuredEmbedding] = field(default_factory=dict)
    factors: SharedFactors = field(default_factory=dict)
    comparison: OutputComparison | None = None
    """With what the dense model puts out on data held out."""

    def __post_init__(self) -> None:
        self.device = pick_device(self.recipe.device)
        self.dense = self.source  # with all its blocks
        self.inner = self.recipe.within_blocks  # what is asked of the blocks that stay
        if not self.plan.reads_data:
            self.data = None
        elif self.data is None and not self.recipe.calibration.is_none:
            options = self.recipe.calibration.within(self.plan.longest)
            widest = max((entry.in_features for entry in self.plan.layers), default=0)
            self.data = load_batches(self.source, options, widest)

    def decide(self, place: FitWorkplace) -> None:
        """Chooses blocks, structures and sizes; from then on the source has these blocks."""
        planned = depth = self.plan.depth
        if planned is not None and planned.chosen == "later":
            depth = place.depth()
            if depth is None:
                assert self.data is not None
                if self.recipe.chooses_depth:
                    depth = self._try_depths(planned, place, self.data)
                else:
                    own = (self.dense, planned, self.data, self.device, self.progress)
                    depth = choose_blocks(*own)
                place.keep_depth(depth)
            place.adopt(f"{depth.kept}-blocks")
        if depth is not None:
            self._cut(depth)
        if self.recipe.max_loss is not None:
            self._take(self._within_loss(place, self.recipe.max_loss), place)
            return
        several = self.recipe.tries_methods and not self.recipe.chooses_depth
        answers = self._answers(place, several=several)
        if several and len(answers) > 1:
            answers = self._try_answers(answers, place)
            place.keep_answers(answers)
        self._take(answers, place)

    def _cut(self, depth: DepthPlan) -> None:
        self.source = cut_to(self.dense, depth)
        if depth is not self.plan.depth:
            self.inner = within(self.recipe, depth, self.dense)
            plan = make_plan(self.inner, self.source, self.plan.method)
            self.plan = with_depth(plan, depth, self.dense)

    def _answers(self, place: FitWorkplace, *, several: bool) -> Mapping[str, Plan]:
        """Spends the budget over the blocks that stay."""
        answers = place.answers()
        if answers is None:
            parts = (self.source, self.inner, self.plan, self.data, place, self.device)
            decision = Decision(*parts)
            ask = decision.answers
            if self.statistics is not None:
                ask = partial(self.statistics.answers, decision)
            answers = ask(self.progress, several=several)
            place.keep_answers(answers)
        return answers

    def _try_depths(
        self, depth: DepthPlan, place: FitWorkplace, data: CalibrationData
    ) -> DepthPlan:
        """Tries numbers of blocks, each with the budget spent on the blocks that stay."""
        stack = depth.stacks[0]
        most = stack.blocks - max(1, len(fixed_blocks(self.dense, stack.path)))
        blocks = dropping(self.dense, {stack.path: most}, data, self.device)
        found: dict[str, DepthPlan] = {}

        def names() -> Iterator[str]:
            dropped: list[BlockLoss] = []
            for item in chain([None], blocks):
                dropped += [] if item is None else [item]
                shallower = depth_without(depth.stacks, dropped)
                name = f"{shallower.kept}-blocks"
                found[name] = shallower
                yield name

        def change(name: str) -> float:
            label = f"trying without {depth.blocks - found[name].kept} of {depth.blocks} blocks"

            def prepare(job: _Job, own: FitWorkplace) -> None:
                job.moments = own
                job._cut(found[name])
                job._take(job._answers(own, several=False), own)

            return self._distance(place, name, label, prepare).change

        taken, changes = try_out(names(), change, stop=STOP, prefer_last=True)
        return found[taken].model_copy(update={"weighed": tuple(changes.values())})

    def _try_answers(self, answers: Mapping[str, Plan], place: FitWorkplace) -> dict[str, Plan]:
        def change(name: str) -> float:
            return self._try_answer(name, answers[name], place).change

        best, changes = try_out(answers, change)
        tried = {name: found for name, found in changes.items() if found is not None}
        taken = simplest(best, self.recipe.method.name if self.recipe.method else "", tried)
        plan = answers[taken]
        assert plan.budget is not None
        facts = plan.budget.model_copy(update={"tried": tried, "taken": taken})
        return {taken: plan.model_copy(update={"budget": facts})}

    def _within_loss(self, place: FitWorkplace, allowed: float) -> Mapping[str, Plan]:
        """Looks for the cheapest plan that loses no more agreement than is allowed."""
        known = place.answers()
        if known is not None:
            return known
        parts = (self.source, self.inner, self.plan, self.data, place, self.device)
        decision = Decision(*parts)
        plans: dict[float, Plan] = {}
        losses: dict[float, float] = {}

        def lost_at(error: float) -> float | None:
            plan = decision.within(error, self.progress)
            if plan is None:
                return None
            lost = self._try_answer(f"error-{error:.4g}", plan, place).lost
            if lost is None:
                raise PlanError(
                    "`max_loss` cannot be measured: the samples held out are too few, or what the "
                    "model puts out cannot be compared",
                    "use more calibration data, or limit the predicted error: `--max-error 0.02`",
                )
            plans[error], losses[error] = plan, lost
            return lost

        found = largest_error(allowed, lost_at)
        if found is None:
            least = f"; those tried lose {min(losses.values()):.2%} and more" if losses else ""
            raise PlanError(
                f"no smaller model was found that loses at most {allowed:.2%} of agreement{least}",
                "allow more, use more calibration data, or offer other methods",
            )
        plan = plans[found.error]
        assert plan.budget is not None
        facts = {"kind": "max_loss", "limit": allowed, "lost": losses[found.error]}
        plan = plan.model_copy(update={"budget": plan.budget.model_copy(update=facts)})
        answers = {f"error-{found.error:.4g}": plan}
        place.keep_answers(answers)
        return answers

    def _try_answer(self, name: str, plan: Plan, place: FitWorkplace) -> Distance:
        def prepare(job: _Job, own: FitWorkplace) -> None:
            job.moments, job.data = place, self._trial_data
            job._take({name: plan}, own)

        return self._distance(place, name, f"trying {name}", prepare)

    @property
    def _trial_data(self) -> CalibrationData | None:
        """Data that answers are tried on."""
        return self.data and self.data.part(TRIAL_SAMPLES)

    def _distance(
        self,
        place: FitWorkplace,
        name: str,
        label: str,
        prepare: Callable[[_Job, FitWorkplace], None],
    ) -> Distance:
        """Fits what a fresh job is prepared to be, and compares its output with the dense one."""
        place.note("trial", name=name)
        with closing(place.trial(name)) as own:
            known = own.distance()
            if known is None:
                self.progress.stage(label, 1, "trial")
                self.progress.advance(1, "")
                job = replace(self, tables={}, factors={})
                prepare(job, own)
                job.fit_on_data(own, sampler_of(self.dense))
                assert job.comparison is not None
                known = Distance(job.comparison.change, job.comparison.lost)
                own.keep_distance(known)
        return known

    def _take(self, answers: Mapping[str, Plan], place: FitWorkplace) -> None:
        """Lays out what the one plan that was chosen writes."""
        [(name, plan)] = answers.items()
        if self._trial_data is self.data:
            place.adopt(name)
        else:  # fits to a part are of no use any more
            place.drop_trials()
        depth = self.plan.depth
        self.plan = plan if depth is None else with_depth(plan, depth, self.dense)
        dtype = pick_dtype(self.recipe.dtype)
        parts = (self.plan.entries, dtype, self.plan.attention, self.plan.forms)
        plain, storage = self.plan.plain is not None, self.plan.storage
        self.outputs = Outputs.of(self.source, *parts, plain=plain, storage=storage)
        blocks = roles_of(self.source).blocks
        self.block_of = {layer.name: block.name for block in blocks for layer in block.layers}
        for entry in self.plan.embeddings:
            self.block_of[self.outputs.runtime_name(entry)] = EMBEDDINGS

    def _channels(self, block: str) -> Reductions:
        """Tells which channels of a block stay; by the weights alone where no data has told."""
        known = read_reductions(self.moments.moments("channels", block))
        entries = {path_of(self.source, entry): entry for entry in self.plan.layers}
        found = next((own for own in roles_of(self.source).blocks if own.name == block), None)

        def weight_of(layer: Layer) -> Tensor:
            place = (self.source.store, self.source.keymap, layer.weight_name)
            return entries[layer.weight_name].matrix(read_finite(*place, self.device))

        return known if found is None else completed(known, found, entries, weight_of)

    def fit(self, place: FitWorkplace) -> dict[str, dict[str, float]]:
        """Fits everything that is rewritten; what no data reaches is fitted to its weights.

        Returns the errors of all layers by weight name.
        """
        self.moments = place
        several = self.data is not None and len({*self.data.origins.values()}) > 1
        several = several or self.statistics is not None  # models of a family are compared
        compares = several and (self.recipe.measures_sensitivity or self.plan.depth is not None)
        self.fit_on_data(place, sampler_of(self.dense) if compares else None)
        clusters: dict[str, list[Cluster]] = {}
        for cluster in {id(c): c for c in self.outputs.made.values()}.values():
            clusters.setdefault(self._block(cluster), []).append(cluster)
        left = {name: own for name, own in clusters.items() if place.errors(name) is None}
        if left:
            self.progress.stage("fitting to weights", len(left), "blocks")
        for name, own in left.items():
            result = BlockResult(name, {}, {})
            known = self._channels(name) if any(e.is_narrow for c in own for e in c) else {}
            for cluster in own:
                parts = (self.outputs, cluster, self.factors, known, self.device)
                found = fit_without_data(*parts)
                result.layers.update(found.layers)
                result.biases.update(found.biases)
            place.keep_block(result)
            self.progress.advance(1, name)
        return {k: e for name in clusters for k, e in (place.errors(name) or {}).items()}

    def _block(self, cluster: Cluster) -> str:
        """Name under which the fits of a cluster are kept: its block, or outside of all its own."""
        path = self.outputs.runtime_name(cluster[0])
        return self.block_of.get(path, path)

    def fit_on_data(self, place: FitWorkplace, sampler: OutputSampler | None = None) -> None:
        """Fits embeddings, what layers share and all blocks, as far as there is data for them.

        With a sampler outputs are compared on data held out.
        """
        self._fit_embeddings(place)
        if self.source.seed is not None:
            own = (self.plan.layers, self.outputs.dtype_of, self.source.seed)
            self.factors = start_shared_factors(*own)
        elif any(entry.own_factors for entry in self.plan.layers):
            parts = (self.outputs, self.plan.layers, self.data, place, self.moments, self.device)
            fitter = SharedFactorsFitter(self.source, self.recipe, *parts)
            self.factors = fitter.run(self.progress)
        self._fit_blocks(place, sampler)

    def _fit_embeddings(self, place: FitWorkplace) -> None:
        entries, device = self.plan.embeddings, self.device
        if self.data is None or not entries:
            return
        result = place.block(EMBEDDINGS)
        if result is None:
            self.progress.stage("fitting embeddings", len(entries), "tables")
            dtype_of = self.outputs.dtype_of
            result = fit_embeddings(self.source, entries, self.data, dtype_of, device)
            place.keep_block(result)
            self.progress.advance(len(entries), "")
        for entry in entries:  # to run the model on
            table = StructuredEmbedding(entry.parts, dtype=torch.float32, device=device)
            fill(table, entry, result.layers[entry.key].tensors)
            self.tables[self.outputs.runtime_name(entry)] = table.requires_grad_(False).eval()

    def _fit_blocks(self, place: FitWorkplace, sampler: OutputSampler | None) -> None:
        if self.data is None or not (self.plan.layers or self.plan.reads_queries or sampler):
            return
        depth = self.plan.depth
        groups = sum(len(block.groups) for block in roles_of(self.source).blocks)
        self.progress.stage("fitting blocks", groups, "groups")
        fitter = BlockFitter(
            self.source,
            self.plan,
            self.data,
            damping=self.recipe.calibration.damping,
            curvatures=partial(self.moments.moments, "curvature"),
            tokens=partial(self.moments.moments, "tokens"),
            channels=self._channels,
            factors=self.factors,
            dtype_of=self.outputs.dtype_of,
            device=self.device,
            whole=self.source if depth is not None and depth.deeper else self.dense,
            tables=self.tables,
            roundings=self.outputs.roundings,
            sampler=sampler,
        )
        for result in fitter.run(
            place.block, lambda block, group: self.progress.advance(1, f"{block} {group}")
        ):
            place.keep_block(result)
        unreached = {None, *fitter.unreached}  # none: a layer outside of all blocks
        blocks = {e.name: self.block_of.get(self.outputs.runtime_name(e)) for e in self.plan.layers}
        blind = [entry.name for entry in self.plan.layers if blocks[entry.name] in unreached]
        self.plan = with_unreached(self.plan, blind)
        self.comparison = fitter.comparison

    def write(self, place: FitWorkplace) -> dict[str, str]:
        """Writes all weight files that are not yet written; returns their checksums."""
        self.outputs.take(place.block)
        self.stored = lru_cache(maxsize=1)(place.block)  # tensors of a block follow each other
        shards = plan_shards(self.outputs.tensors, self.recipe.max_shard_size)
        done = {note["file"]: note["sha256"] for note in place.notes("shard")}
        total = sum(item.nbytes for shard in shards for item in shard.tensors)
        self.progress.stage("writing", total, "bytes")
        for shard in shards:
            if is_whole(place.model / shard.file, done.get(shard.file)):
                self.progress.advance(sum(item.nbytes for item in shard.tensors), shard.file)
                continue
            done[shard.file] = write_shard(
                place.model,
                shard,
                self.value,
                lambda size: self.progress.advance(size, ""),
            )
            place.note("shard", file=shard.file, sha256=done[shard.file])
        write_index(place.model, shards)
        return done

    def value(self, item: Stored) -> Tensor:
        """Gives the value of one output tensor: carried over, or as it was fitted."""
        given = self.outputs.given(item)
        if given is not None:
            return given
        return self.outputs.fitted_value(item, self.fitted(self.outputs.made[item.key]))

    def fitted(self, cluster: Cluster) -> BlockResult:
        """Reads the fits of a cluster's block."""
        result = self.stored(self._block(cluster))
        assert result is not None  # all are fitted by now
        return result
