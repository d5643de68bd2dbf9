"""The conversion: plan, choose, fit, write, prove, publish.

Blocks are chosen first, then forms. Answers are fitted, and judged by the change of the output on
data held out: predictions compare sizes of one structure better than structures, and what single
candidates change says little of what many change together. What blocks cost does not add up either,
since the layers that stay make up for much of what is gone: in low rank, at a quarter of its size,
predictions added up to 203, 209 and 264 with no block dropped, one and two, and 151, 148 and 153
were measured. How much agreement a predicted error costs depends on the model and on what it is
used for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import exp, inf, log
from pathlib import Path

import torch

import tcompress
from tcompress import processes
from tcompress.artifact.checksums import is_whole, stamps_of
from tcompress.artifact.format import needed_version, plan_shards, write_index, write_shard
from tcompress.artifact.manifest import (
    CalibrationFacts,
    Manifest,
    SourceFacts,
    environment,
    read_manifest,
    write_manifest,
)
from tcompress.artifact.workplace import check_apart, check_output, identity_of
from tcompress.blockwise.output_sampler import FEWEST, OutputComparison, sampler_of
from tcompress.conversion.estimate import check_room
from tcompress.conversion.model_fits import Conversion, Fits, fit, fit_on_data
from tcompress.conversion.outputs import check_written, write_rest
from tcompress.data.calibration import CalibrationData, load_batches, samples_in
from tcompress.errors import FitError, InputError, PlanError
from tcompress.fitting.workdir import Distance, FitWorkplace
from tcompress.hf.opening import multiplies_bfloat16, pick_device
from tcompress.latency.benchmark import bench
from tcompress.latency.sizes import RandomInputs
from tcompress.models import SourceModel
from tcompress.models.fewer_layers import fixed_blocks
from tcompress.models.names import stray_links
from tcompress.options import Bench, Convert
from tcompress.options.steps import PaperRow
from tcompress.planning.depth import with_depth
from tcompress.planning.entries import BlockLoss, DepthPlan, Plan
from tcompress.planning.planner import make_plan
from tcompress.progress import Progress, Silent, StageTimes
from tcompress.search.budgets import approach
from tcompress.search.candidates import left_out
from tcompress.search.depth_search import choose_blocks, depth_without, dropping
from tcompress.search.search import Measurements, Statistics, answers, within_error
from tcompress.timing_model.clocks import REPEATS, STEPS, Workload
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
    data: CalibrationData | None = None,
    force: bool = False,
    progress: Progress | None = None,
    paper: Sequence[PaperRow] = (),
    statistics: Statistics | None = None,
) -> Converted:
    """Convert a model and write the result.

    Within `processes.joined` the processes that a launcher has started do it together.

    Args:
        source: The dense model, or its name; with `init: random` its weights do not count.
        recipe: How to convert it.
        output: Folder to write; it appears only when everything is finished.
        data: Calibration batches, instead of those that the recipe names.
        force: Replace a folder that is not empty.
        progress: Hears how far it is.
        paper: Published numbers, to be shown beside those of the result.
        statistics: What other conversions of the model have measured, and this one adds to.

    Raises:
        InputError: The model, the recipe, the data or the output folder cannot be used.
        FitError: A weight or a fit is not finite; the message names the layer.
        WriteError: What was written does not load, or is not what was fitted.
    """
    times = StageTimes(progress or Silent(), "planning")
    output = Path(output).expanduser().absolute()
    processes.first(lambda: check_output(output, force=force))
    seed = recipe.seed if recipe.init == "random" else None
    if isinstance(source, str):
        source = SourceModel.open(source, seed=seed, adapter=recipe.adapter)
    elif seed is not None:
        source = source.at_random(seed)
    check_apart(output, source.origin or source.folder, "the model's own folder")
    if len(recipe.speedups) > 1:
        raise InputError(
            f"`speedup` asks for {len(recipe.speedups)} models, and one is converted at a time",
            "ask for them with `tcompress convert` or `tcompress sweep --speedups`",
        )
    # Before they are read: what is changed while this runs, was not read.
    files = {} if data is not None else stamps_of(recipe.calibration.files)
    if recipe.vocab is not None:
        source = with_vocabulary(source, recipe, times)
    if recipe.calibration.mixed_precision == "bf16":
        source = replace(source, autocast=torch.bfloat16)
    plan = make_plan(recipe, source)
    times.turn_to("reading data")
    if not plan.reads_data:
        data = None
    elif data is None and not recipe.calibration.is_none:
        widest = max((entry.in_features for entry in plan.layers), default=0)
        data = load_batches(source, recipe.calibration.within(plan.longest), widest)
    device = pick_device(recipe.device, fits=True)
    if source.autocast is not None and device.type == "cpu" and not multiplies_bfloat16():
        times.tell(
            "warning: this processor has no products in bfloat16, and passes take longer in it; "
            "leave `--mixed-precision` out"
        )
    if note := left_out(recipe, source):
        times.tell(note)
    identity = identity_of(
        {
            "recipe": recipe.model_dump(mode="json"),
            "plan": plan.model_dump(mode="json"),
            "weights": source.store.fingerprint(),
            "tool": tcompress.__version__,
            "config": source.settings,
            "files": source.store.times(),
            "data": data.fingerprint if data else None,
            "device": str(device),
        }
    )
    # Bad input leaves nothing behind, a kill or Ctrl-C does.
    workplace = FitWorkplace(output, identity, device, force=force)
    with times.running(), workplace.working() as workdir:
        if workdir.published and (done := read_manifest(output)) is not None:
            workdir.discard()
            return Converted(output, _timed(source, output, done, recipe), resumed=True)
        times.resume(workdir.seconds(), workdir.keep_seconds)
        parts = (source, recipe.within_blocks, plan, data, workdir, device)
        conversion = Conversion(
            *parts,
            progress=times,
            dense=source,
            full_recipe=recipe,
            statistics=statistics,
            files=files if plan.reads_data or plan.vocabulary else {},
        )
        processes.first(lambda: check_room(conversion))
        manifest = _fit_and_write(choose(conversion), paper)
        workdir.publish(force=force)
    return Converted(output, _timed(source, output, manifest, recipe), workdir.resumed)


# What becomes of a model: answers are tried where data is there.


def choose(conversion: Conversion) -> Conversion:
    """Choose blocks, structures and sizes: return the conversion of the blocks that stay."""
    depth = _depth(conversion)
    if depth is not None:
        conversion = conversion.cut(depth)
    several = conversion.full_recipe.tries_methods and not conversion.full_recipe.chooses_depth
    plans = _plans(replace(conversion, several=several))
    if several and len(plans) > 1:
        plans = _best(conversion, plans)
    return _taken(conversion, plans)


def _depth(conversion: Conversion) -> DepthPlan | None:
    """Choose the blocks that stay; None where all do."""
    planned, data, workdir = conversion.plan.depth, conversion.data, conversion.workdir
    if planned is None or planned.chosen != "later":
        return planned
    depth = workdir.depth()
    if depth is None:
        assert data is not None
        if conversion.full_recipe.chooses_depth:
            depth = _try_depths(conversion, planned, data)
        else:
            rest = (conversion.device, conversion.progress)
            depth = choose_blocks(conversion.dense, planned, data, *rest)
        workdir.keep_depth(depth)
    if conversion.full_recipe.chooses_depth:
        workdir.adopt(f"{depth.kept}-blocks")
    return depth


def _plans(conversion: Conversion) -> Mapping[str, Plan]:
    """Spend the budget over the blocks that stay, unless an interrupted run has done it."""
    plans = conversion.workdir.answers()
    if plans is None:
        ask = answers if conversion.statistics is None else conversion.statistics.answers
        allowed = conversion.full_recipe.max_loss
        plans = ask(conversion) if allowed is None else _within_loss(conversion, allowed)
        conversion.workdir.keep_answers(plans)
    return plans


def _try_depths(conversion: Conversion, depth: DepthPlan, data: CalibrationData) -> DepthPlan:
    """Try numbers of blocks, each with the budget spent on the blocks that stay."""
    stack = depth.stacks[0]
    largest = stack.blocks - max(1, len(fixed_blocks(conversion.dense, stack.path)))
    blocks = dropping(conversion.dense, {stack.path: largest}, data, conversion.device)
    depths: dict[str, DepthPlan] = {}

    def names() -> Iterator[str]:
        none: tuple[BlockLoss, ...] = ()
        for dropped in accumulate(blocks, lambda gone, loss: (*gone, loss), initial=none):
            shallower = depth_without(depth.stacks, dropped)
            name = f"{shallower.kept}-blocks"
            depths[name] = shallower
            yield name

    best, changes = try_out(
        names(), lambda name: _distance(conversion, name, depths[name]).change, shrinking=True
    )
    return depths[best].model_copy(update={"weighed": tuple(changes.values())})


def _best(conversion: Conversion, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Try all answers, and take the best."""
    best, changes = try_out(plans, lambda name: _distance(conversion, name, plans[name]).change)
    tried = {name: change for name, change in changes.items() if change is not None}
    method = conversion.full_recipe.method
    simple = simplest(best, method.name if method else "", tried)
    chosen = {simple: plans[simple].with_facts({"tried": tried, "taken": simple})}
    conversion.workdir.keep_answers(chosen)
    return chosen


def _within_loss(conversion: Conversion, allowed: float) -> dict[str, Plan]:
    """Look for the cheapest plan that loses no more agreement than is allowed."""
    measured = Measurements(conversion)
    plans: dict[float, Plan] = {}
    losses: dict[float, float] = {}

    def lost_at(error: float) -> float | None:
        plan = within_error(conversion, measured, error)
        if plan is None:
            return None
        name = f"error-{error:.4g}"
        lost = _distance(conversion, name, plan).lost
        if lost is None:
            raise _no_agreement(conversion)
        plans[error], losses[error] = plan, lost
        return lost

    error = largest_error(allowed, lost_at)
    if error is None:
        smallest = f"; those tried lose {min(losses.values()):.2%} and more" if losses else ""
        raise PlanError(
            f"no smaller model was found that loses at most {allowed:.2%} of agreement{smallest}",
            "allow more, use more calibration data, or offer other methods",
        )
    facts = {"kind": "max_loss", "limit": allowed, "lost": losses[error]}
    return {f"error-{error:.4g}": plans[error].with_facts(facts)}


def _no_agreement(conversion: Conversion) -> PlanError:
    """Say why outputs on data held out cannot be compared, whatever they are."""
    data, hint = conversion.data, "limit the predicted error: `--max-error 0.02`"
    assert data is not None
    counts: Counter[str] = Counter()
    for index in data.holdout or data.fitted:
        counts[data.origins.get(index, data.name)] += samples_in(data.batches[index])
    if max(counts.values()) < FEWEST:
        hint = f"use more calibration data, or {hint}"
        reason = f"no source has {FEWEST} samples that are held out"
    else:
        reason = "what the models put out is the same for all samples held out"
    return PlanError(f"`max_loss` cannot be measured: {reason}", hint)


def _distance(conversion: Conversion, name: str, tried: DepthPlan | Plan) -> Distance:
    """Fit a model with these blocks, or a plan to some of the data, in a folder of its own.

    Its output is compared with that of the dense model.
    """
    conversion.workdir.note("trial", name=name)
    with closing(conversion.workdir.trial(name, measures=isinstance(tried, DepthPlan))) as trial:
        distance = trial.distance()
        if distance is None:
            what = name
            if isinstance(tried, DepthPlan):
                what = f"without {tried.blocks - tried.kept} of {tried.blocks} blocks"
            conversion.progress.stage(f"trying {what}", 1, "trial")
            conversion.progress.advance(1, "")
            chosen = replace(conversion, workdir=trial)
            if isinstance(tried, DepthPlan):
                chosen = chosen.cut(tried)
                chosen = _taken(chosen, _plans(chosen))
            else:
                chosen = _taken(replace(chosen, data=chosen.trial_data), {name: tried})
            comparison = fit_on_data(chosen, sampler_of(conversion.dense)).comparison
            assert comparison is not None
            distance = Distance(comparison.change, comparison.lost)
            trial.keep_distance(distance)
    return distance


def _taken(conversion: Conversion, plans: Mapping[str, Plan]) -> Conversion:
    """Take the one plan that was chosen, and what its trial fitted where that holds."""
    [(name, plan)] = plans.items()
    if conversion.trial_data is conversion.data:
        conversion.workdir.adopt(name)
    else:  # fits to a part are of no use any more
        conversion.workdir.drop_trials()
    if conversion.plan.depth is not None:
        plan = with_depth(plan, conversion.plan.depth, conversion.dense)
    return replace(conversion, plan=plan)


# Shares of the change of an answer.
TIE = 0.02  # those so close to the best one are as good
CLEAR = 0.15  # what a mixture has to be better by than the best structure alone
STOP = 0.1  # with fewer blocks, one that is worse than the best by more ends the search

AIM, CLOSE = 0.95, 0.85
"""Of the agreement that is allowed: what is aimed at, and from where on no more is looked for."""

_GUESS = 2.0  # predicted error for each unit of agreement, before anything was tried


def largest_error(allowed: float, lost_at: Callable[[float], float | None]) -> float | None:
    """Try predicted errors, and return the largest that loses no more agreement than is allowed.

    `lost_at` tells what is lost, or nothing where no model is that small; neither does this where
    no try was good enough. What is lost follows a power of the error, so logarithms are tried.
    """
    losses: dict[float, float] = {}
    fine: list[float] = []
    start, aim = min(_GUESS * allowed, 0.5), AIM * allowed
    for number in approach(losses, log(start), log(aim), lambda it: min(it, 0.0), step=log(8)):
        lost = lost_at(exp(number))
        if lost is None:
            break
        losses[number] = log(max(lost, 1e-6))
        fine = [tried for tried, loss in losses.items() if loss <= log(allowed)]
        if fine and (max(fine) >= 0 or losses[max(fine)] >= log(CLOSE * allowed)):
            break
    return exp(max(fine)) if fine else None


def simplest(best: str, mixed: str, changes: Mapping[str, float]) -> str:
    """Return the best answer of one structure in place of a mixture that is not clearly better.

    A change that is a little smaller tells nothing of what a user measures: of all-MiniLM-L6-v2 at
    a quarter a mixture changed likenesses by a tenth less than low rank, agreed with the dense
    model exactly as well, and lost 0.012 more of the rank correlation with labels of 3,000 pairs.
    """
    singles = [name for name in changes if name != mixed]
    if best != mixed or not singles:
        return best
    single = min(singles, key=lambda name: changes[name])
    return single if ties(changes[single], changes[best], CLEAR) else best


def ties(change: float, smallest: float, margin: float = TIE) -> bool:
    """Whether a change is within a margin of the smallest one; that one always is."""
    return change <= smallest + margin * abs(smallest)


def try_out(
    names: Iterable[str], change: Callable[[str], float], *, shrinking: bool = False
) -> tuple[str, dict[str, float | None]]:
    """Try answers one after another; return the best, and the changes of all that were tried.

    Each name is asked for only when those before were tried. Of answers that are as good the first
    is taken. Where they are `shrinking` it is the last, and one that is much worse than the best
    ends the search. A change is None where the budget is out of reach.
    """
    changes: dict[str, float | None] = {}
    fine: dict[str, float] = {}
    refused: list[PlanError | FitError] = []
    for name in names:
        changes[name] = None
        try:
            changes[name] = fine[name] = change(name)
        except (PlanError, FitError) as error:
            refused.append(error)
            continue
        if not ties(fine[name], min(fine.values()), STOP if shrinking else inf):
            break
    taken = -1 if shrinking else 0
    if not fine:
        raise refused[taken]
    smallest = min(fine.values())
    return [name for name in fine if ties(fine[name], smallest)][taken], changes


# What a conversion writes.


def _fit_and_write(conversion: Conversion, paper: Sequence[PaperRow]) -> Manifest:
    """Fit and write what was chosen, of which nothing is held while the result is timed."""
    outputs = conversion.outputs
    # Fits are kept until what they yield is written.
    sizes = (it.nbytes * (1 + (it.key in outputs.group_of)) for it in outputs.tensors.values())
    conversion.workdir.need(sum(sizes) + conversion.workdir.moments_bytes)
    return _write_model(conversion, fit(conversion), paper)


@processes.by_first
def _write_model(conversion: Conversion, fits: Fits, paper: Sequence[PaperRow]) -> Manifest:
    """Write the model in the working folder, and prove that it holds what was fitted."""
    recipe, source, folder = conversion.full_recipe, conversion.source, conversion.workdir.model
    checksums, times = _write_shards(conversion), conversion.progress
    plan = conversion.plan.warned(_warnings(conversion, fits.unreached))
    drawn, rounded = source.seed is not None, plan.storage is not None
    version = needed_version(plan.entries, plan.attention, drawn=drawn, rounded=rounded)
    manifest = Manifest(
        format_version=version,
        source=_source_facts(source, conversion.whole, plan),
        recipe=recipe.model_dump(mode="json"),
        plan=plan,
        calibration=_calibration_facts(conversion, fits.comparison),
        fit=dict(sorted(fits.errors.items())),
        checksums=checksums,
        seconds=times.total,
        environment=environment(),
        paper=list(paper),
    )
    manifest = write_rest(folder, source, manifest, recipe.dtype)
    times.turn_to("checking")
    check_written(folder, conversion.outputs)
    spent = {"seconds": times.total, "stage_seconds": times.seconds}
    manifest = manifest.model_copy(update=spent)
    write_manifest(folder, manifest)
    return manifest


def _write_shards(conversion: Conversion) -> dict[str, str]:
    """Write all weight files that are not yet written; return their SHA-256 by name."""
    workdir, progress, outputs = conversion.workdir, conversion.progress, conversion.outputs
    shards = plan_shards([*outputs.tensors.values()], conversion.full_recipe.max_shard_size)
    done = {note["file"]: note["sha256"] for note in workdir.notes("shard")}
    sizes = {shard.file: sum(item.nbytes for item in shard.tensors) for shard in shards}
    progress.stage("writing", sum(sizes.values()), "bytes")
    for shard in shards:
        if is_whole(workdir.model / shard.file, done.get(shard.file)):
            progress.advance(sizes[shard.file], shard.file)
            continue
        written = partial(progress.advance, note="")
        done[shard.file] = write_shard(workdir.model, shard, outputs.value, written)
        workdir.note("shard", file=shard.file, sha256=done[shard.file])
    write_index(workdir.model, shards)
    return done


def _source_facts(source: SourceModel, dense: SourceModel, plan: Plan) -> SourceFacts:
    """Say what was converted: the dense model without dropped blocks, and with all of them."""
    same = source is dense and plan.plain is None
    return SourceFacts(
        id=source.id,
        revision=source.revision,
        fingerprint=source.store.fingerprint(),
        bytes=dense.store.total_bytes,
        config=None if same else dense.settings,
        init="pretrained" if source.seed is None else "random",
        seed=source.seed,
    )


def _calibration_facts(
    conversion: Conversion, comparison: OutputComparison | None
) -> CalibrationFacts:
    """Say what a fit looked at, and what came of outputs by source."""
    data, files = conversion.data, dict(conversion.files)
    if data is None:
        return CalibrationFacts(name="none", files=files)
    return CalibrationFacts(
        name=data.name,
        samples=data.samples,
        held_out_samples=sum(samples_in(data.batches[index]) for index in data.holdout),
        tokens=data.tokens,
        fingerprint=data.fingerprint,
        files=files,
        changes=comparison.changes if comparison else {},
        agreement=comparison.agreement if comparison else {},
    )


def _warnings(conversion: Conversion, unreached: Sequence[str]) -> Iterator[str]:
    """Warn of layers without data, of links that lead away, and of answers that were not judged."""
    source, data, recipe = conversion.source, conversion.data, conversion.full_recipe
    if unreached:  # as in towers that read pictures
        yield (
            f"the calibration data does not reach {len(unreached)} of "
            f"{len(conversion.plan.layers)} layers (such as `{unreached[0]}`): they are fitted "
            "without data; `--keep` leaves them dense"
        )
    if names := stray_links(source.origin or source.folder, source.trust_remote_code):
        rest = ", ..." if len(names) > 3 else ""
        yield (
            "links out of the model's folder are not carried along: "
            f"{', '.join(f'`{name}`' for name in names[:3])}{rest}; copy the files there"
        )
    compares = recipe.tries_methods or recipe.chooses_depth or recipe.max_loss is not None
    if data is not None and not data.holdout and compares:
        yield (
            f"the calibration data has no sample to hold out ({data.samples} in all): candidates "
            "were compared on what they were fitted to, which favours those that adapt most; give "
            "more data"
        )


LONG, FEWER = 0.5, 5  # seconds of a pass of the dense model, and repeats of such ones


def _timed(source: SourceModel, output: Path, manifest: Manifest, recipe: Convert) -> Manifest:
    """Measure the pass that was asked for, if any, and record it beside what was predicted."""
    if not recipe.counts_time:
        return manifest
    plan = manifest.plan
    is_long = plan.budget is not None and (plan.budget.seconds or 0.0) > LONG
    work, inputs = Workload.read(recipe.at), RandomInputs.of(source, source)
    new = STEPS if work.decodes else None
    length = inputs.fitting([work.length], new or 0) if inputs.has_length else ()
    options = {"batch": (work.batch,), "length": length, "generate": new}
    options["repeats"] = FEWER if is_long else REPEATS
    limits = {"threads": recipe.threads, "dtype": recipe.dtype, "device": recipe.device}
    settings, trust = Bench.model_validate({**options, **limits}), source.trust_remote_code

    def measured() -> Manifest | None:
        bench([str(output)], settings=settings, trust_remote_code=trust)
        return read_manifest(output)

    return processes.first(measured) or manifest
