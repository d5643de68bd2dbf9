"""The conversion: plan, choose, fit, write, prove, publish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import tcompress
from tcompress import processes
from tcompress.artifact.checksums import is_whole
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
from tcompress.blockwise.output_sampler import OutputComparison
from tcompress.conversion.choosing import choose
from tcompress.conversion.estimate import check_room
from tcompress.conversion.model_fits import Conversion, Fits, fit
from tcompress.conversion.outputs import Outputs, check_written, write_rest
from tcompress.data.calibration import CalibrationData, load_batches, samples_in
from tcompress.errors import InputError
from tcompress.fitting.workdir import FitWorkplace
from tcompress.hf.opening import multiplies_bfloat16, pick_device
from tcompress.latency.benchmark import bench
from tcompress.latency.sizes import RandomInputs
from tcompress.models import SourceModel
from tcompress.models.names import stray_links
from tcompress.options import Bench, Convert
from tcompress.options.steps import PaperRow
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.progress import Progress, Silent, StageTimes
from tcompress.search.search import Statistics
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
    if recipe.vocab is not None:
        source = with_vocabulary(source, recipe, times)
    if recipe.calibration.mixed_precision == "bf16":
        source = replace(source, autocast=torch.bfloat16)
    plan = make_plan(recipe, source)
    times.turn_to("reading data")
    data = _calibration(source, recipe, plan, data)
    device = pick_device(recipe.device, fits=True)
    if source.autocast is not None and device.type == "cpu" and not multiplies_bfloat16():
        times.tell(
            "warning: this processor has no products in bfloat16, and passes take longer in it; "
            "leave `--mixed-precision` out"
        )
    identity = _identity(source, recipe, plan, data, device)
    # Bad input leaves nothing behind, a kill or Ctrl-C does.
    workplace = FitWorkplace(output, identity, device, force=force)
    with times.running(), workplace.working() as workdir:
        if workdir.published and (done := read_manifest(output)) is not None:
            workdir.discard()
            return Converted(output, _timed(source, output, done, recipe), resumed=True)
        times.resume(workdir.seconds(), workdir.keep_seconds)
        parts = (source, recipe.within_blocks, plan, data, workdir, device, times)
        conversion = Conversion(*parts, dense=source, full_recipe=recipe, statistics=statistics)
        processes.first(lambda: check_room(conversion))
        manifest = _fit_and_write(*choose(conversion), paper, times)
        workdir.publish(force=force)
    return Converted(output, _timed(source, output, manifest, recipe), workdir.resumed)


def _calibration(
    source: SourceModel, recipe: Convert, plan: Plan, data: CalibrationData | None
) -> CalibrationData | None:
    """Load the data that a plan reads, unless it is given."""
    if not plan.reads_data:
        return None
    if data is None and not recipe.calibration.is_none:
        widest = max((entry.in_features for entry in plan.layers), default=0)
        data = load_batches(source, recipe.calibration.within(plan.longest), widest)
    return data


def _identity(
    source: SourceModel,
    recipe: Convert,
    plan: Plan,
    data: CalibrationData | None,
    device: torch.device,
) -> str:
    """Render everything that decides what a conversion writes."""
    return identity_of(
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


def _fit_and_write(
    conversion: Conversion, outputs: Outputs, paper: Sequence[PaperRow], times: StageTimes
) -> Manifest:
    """Fit and write what was chosen, of which nothing is held while the result is timed."""
    # Fits are kept until what they yield is written.
    sizes = (it.nbytes * (1 + (it.key in outputs.group_of)) for it in outputs.tensors.values())
    conversion.workdir.need(sum(sizes))
    fits = fit(conversion, outputs)
    return processes.first(lambda: _write_model(conversion, outputs, fits, paper, times))


def _write_model(
    conversion: Conversion,
    outputs: Outputs,
    fits: Fits,
    paper: Sequence[PaperRow],
    times: StageTimes,
) -> Manifest:
    """Write the model in the working folder, and prove that it holds what was fitted."""
    recipe, source, workdir = conversion.full_recipe, conversion.source, conversion.workdir
    checksums = _write(conversion, outputs)
    final = _with_warnings(outputs.plan, conversion, fits.unreached)
    manifest = Manifest(
        format_version=needed_version(
            final.entries,
            final.attention,
            drawn=source.seed is not None,
            rounded=final.storage is not None,
        ),
        source=_source_facts(source, conversion.dense.whole or conversion.dense, final),
        recipe=recipe.model_dump(mode="json"),
        plan=final,
        calibration=_calibration_facts(conversion.data, fits.comparison),
        fit=dict(sorted(fits.errors.items())),
        checksums=checksums,
        seconds=times.total,
        environment=environment(),
        paper=list(paper),
    )
    manifest = write_rest(workdir.model, source, manifest, recipe.dtype)
    times.turn_to("checking")
    check_written(workdir.model, outputs, fits.inputs.factors)
    spent = {"seconds": times.total, "stage_seconds": times.seconds}
    manifest = manifest.model_copy(update=spent)
    write_manifest(workdir.model, manifest)
    return manifest


def _write(conversion: Conversion, outputs: Outputs) -> dict[str, str]:
    """Write all weight files that are not yet written; return their SHA-256 by name."""
    workdir, progress = conversion.workdir, conversion.progress
    shards = plan_shards([*outputs.tensors.values()], conversion.full_recipe.max_shard_size)
    done = {note["file"]: note["sha256"] for note in workdir.notes("shard")}
    total = sum(item.nbytes for shard in shards for item in shard.tensors)
    progress.stage("writing", total, "bytes")
    for shard in shards:
        if is_whole(workdir.model / shard.file, done.get(shard.file)):
            progress.advance(sum(item.nbytes for item in shard.tensors), shard.file)
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
    data: CalibrationData | None, comparison: OutputComparison | None
) -> CalibrationFacts:
    """Say what a fit looked at, and what came of outputs by source."""
    if data is None:
        return CalibrationFacts(name="none")
    return CalibrationFacts(
        name=data.name,
        samples=data.samples,
        held_out_samples=sum(samples_in(data.batches[index]) for index in data.holdout),
        tokens=data.tokens,
        fingerprint=data.fingerprint,
        changes=comparison.changes if comparison else {},
        agreement=comparison.agreement if comparison else {},
    )


def _with_warnings(plan: Plan, conversion: Conversion, unreached: Sequence[str]) -> Plan:
    """Warn of layers without data, of links that lead away, and of answers that were not judged."""
    source, data, recipe = conversion.source, conversion.data, conversion.full_recipe
    if unreached:  # as in towers that read pictures
        plan = plan.warned(
            f"the calibration data does not reach {len(unreached)} of {len(plan.layers)} layers "
            f"(such as `{unreached[0]}`): they are fitted without data; `--keep` leaves them dense"
        )
    if names := stray_links(source.folder, source.trust_remote_code):
        rest = ", ..." if len(names) > 3 else ""
        plan = plan.warned(
            "links out of the model's folder are not carried along: "
            f"{', '.join(f'`{name}`' for name in names[:3])}{rest}; copy the files there"
        )
    compares = recipe.tries_methods or recipe.chooses_depth or recipe.max_loss is not None
    if data is not None and not data.holdout and compares:
        plan = plan.warned(
            f"the calibration data has no sample to hold out ({data.samples} in all): candidates "
            "were compared on what they were fitted to, which favours those that adapt most; give "
            "more data"
        )
    return plan


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
