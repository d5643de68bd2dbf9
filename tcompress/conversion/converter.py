"""The conversion: plan, choose, fit, write, prove, publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from tcompress.artifact.checksums import is_whole
from tcompress.artifact.format import Stored, needed_version, plan_shards, write_index, write_shard
from tcompress.artifact.manifest import Manifest, environment, read_manifest
from tcompress.artifact.workplace import check_output
from tcompress.conversion.choosing import choose
from tcompress.conversion.conversion import Chosen, Conversion
from tcompress.conversion.model_fits import fit
from tcompress.conversion.outputs import (
    calibration_facts,
    check_written,
    conversion_identity,
    source_facts,
    with_links,
    with_unheld,
    write_rest,
)
from tcompress.data.calibration import CalibrationData
from tcompress.errors import InputError
from tcompress.fitting.block_rewrite import BlockResult
from tcompress.fitting.workdir import FitWorkplace
from tcompress.latency.benchmark import bench
from tcompress.latency.sizes import RandomInputs
from tcompress.models import SourceModel
from tcompress.options import Bench, Convert
from tcompress.options.steps import PaperRow
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.progress import Progress, Silent
from tcompress.search.search import Statistics
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
    conversion = Conversion.of(source, recipe, plan, progress or Silent(), data, statistics)
    identity = conversion_identity(source, recipe, plan, conversion.data, str(conversion.device))
    # Bad input leaves nothing behind, a kill or Ctrl-C does.
    with FitWorkplace(output, identity, conversion.device, force=force).working() as workdir:
        if workdir.published and (done := read_manifest(output)) is not None:
            workdir.discard()
            return Converted(output, done, resumed=True)
        chosen = choose(conversion, workdir)
        outputs = chosen.outputs
        fitted_clusters = outputs.made  # fits of these are kept until they are written
        workdir.need(
            sum(item.nbytes * (1 + (item.key in fitted_clusters)) for item in outputs.tensors)
        )
        fits = fit(chosen, workdir)

        @lru_cache(maxsize=1)  # tensors of a block follow each other
        def result(block: str) -> BlockResult:
            fitted = workdir.block(block)
            assert fitted is not None  # all are by now
            return fitted

        checksums = _write(chosen, result, workdir)
        final = fits.plan
        cut = chosen.conversion.source
        manifest = Manifest(
            format_version=needed_version(
                final.entries,
                final.attention,
                drawn=source.seed is not None,
                rounded=final.storage is not None,
            ),
            source=source_facts(cut, source.whole or source, final),
            recipe=recipe.model_dump(mode="json"),
            plan=with_unheld(with_links(final, cut), recipe, conversion.data),
            calibration=calibration_facts(conversion.data, fits.comparison),
            fit=dict(sorted(fits.errors.items())),
            checksums={**checksums},
            seconds=round(time.perf_counter() - start, 2),
            environment=environment(),
            paper=list(paper),
        )
        write_rest(workdir.model, cut, manifest, recipe.dtype)
        fitted = lambda cluster: result(chosen.block_of(cluster))  # noqa: E731
        check_written(workdir.model, outputs, final, fitted, fits.factors)
        workdir.publish(force=force)
    if recipe.counts_time:
        manifest = _timed(source, output, manifest.plan, recipe) or manifest
    return Converted(output, manifest, workdir.resumed)


def _timed(source: SourceModel, output: Path, plan: Plan, recipe: Convert) -> Manifest | None:
    """Measures the pass that was asked for, and records it beside what was predicted."""
    is_long = plan.budget is not None and (plan.budget.seconds or 0.0) > LONG
    work, inputs = Workload.read(recipe.at or USUAL_PASS), RandomInputs.of(source, source)
    new = STEPS if work.decodes else None
    length = inputs.fitting([work.length], new or 0) if inputs.has_length else ()
    options = {"batch": (work.batch,), "length": length, "generate": new}
    options["repeats"] = FEWER if is_long else REPEATS
    limits = {"threads": recipe.threads, "dtype": recipe.dtype, "device": recipe.device}
    bench([str(output)], settings=Bench.model_validate({**options, **limits}))
    return read_manifest(output)


def _write(
    chosen: Chosen, result: Callable[[str], BlockResult], workdir: FitWorkplace
) -> dict[str, str]:
    """Write all weight files that are not yet written.

    Args:
        chosen: What is written.
        result: Reads the fits of a block.
        workdir: Where it is written.

    Returns:
        SHA-256 of the files by name.
    """
    outputs, progress = chosen.outputs, chosen.conversion.progress
    outputs.take(workdir.block)

    def value(item: Stored) -> Tensor:
        carried = outputs.given(item)
        if carried is not None:
            return carried
        return outputs.fitted_value(item, result(chosen.block_of(outputs.made[item.key])))

    shards = plan_shards(outputs.tensors, chosen.conversion.recipe.max_shard_size)
    done = {note["file"]: note["sha256"] for note in workdir.notes("shard")}
    total = sum(item.nbytes for shard in shards for item in shard.tensors)
    progress.stage("writing", total, "bytes")
    for shard in shards:
        if is_whole(workdir.model / shard.file, done.get(shard.file)):
            progress.advance(sum(item.nbytes for item in shard.tensors), shard.file)
            continue
        done[shard.file] = write_shard(
            workdir.model, shard, value, lambda size: progress.advance(size, "")
        )
        workdir.note("shard", file=shard.file, sha256=done[shard.file])
    write_index(workdir.model, shards)
    return done


LONG, FEWER = 0.5, 5  # seconds of a pass of the dense model, and repeats of such ones
