"""`tcompress convert`, its own options, and what it has in common with `run`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tcompress.cli.terminal import (
    Interrupted,
    print_json,
    results,
    say,
    shown_progress,
    silence_libraries,
    typed,
)
from tcompress.options.commands import MODEL, REPORT, Access, Manner, OneModel, Planned, Written
from tcompress.options.commands import Converted as ConvertOptions
from tcompress.options.convert_options import BLOCKS, FIT, GOAL, METHOD, OUTPUT, SCRATCH, Convert
from tcompress.options.read import Given

if TYPE_CHECKING:
    from tcompress.conversion.converter import Converted
    from tcompress.models import SourceModel
    from tcompress.options.steps import Architecture

# What `convert` and `run` have in common: plan, convert, and say what came of it.


@dataclass(frozen=True)
class Job:
    """One conversion as it was asked for.

    Attributes:
        model: Name of the dense model, or for people what a recipe describes.
        convert: What to do.
        output: Folder to write.
        force: Replace the folder.
        access: How to open the model.
        manner: How to talk.
        architecture: The model's configuration, where a recipe describes it in place of a name.
    """

    model: str
    convert: Convert
    output: Path
    force: bool
    access: Access
    manner: Manner
    architecture: Architecture | None = None

    @property
    def seed(self) -> int | None:
        """Seed of the weights, where they are drawn at random."""
        return self.convert.seed if self.convert.init == "random" else None


def default_output(model: str, convert: Convert) -> str:
    """Names the folder to write, such as `bert-base-lprod-p4`."""
    from tcompress.models import default_output_name
    from tcompress.options.schema import short_name

    return default_output_name(model, short_name(convert))


def open_job(job: Job) -> SourceModel:
    """Opens the dense model of a conversion."""
    if job.architecture is None:
        return open_source(job.model, job.access, job.manner, job.seed)
    silence_libraries(verbose=job.manner.verbose)
    from tcompress.own_models.architecture import open_architecture

    return open_architecture(job.architecture, job.convert.seed, job.access.token)


def open_source(name: str, access: Access, manner: Manner, seed: int | None = None) -> SourceModel:
    """Opens a dense model, and says so if that means a download.

    Args:
        name: Folder, short name or hub id.
        access: How to open it.
        manner: How to talk.
        seed: Seed to draw its weights from, in place of reading them.
    """
    from tcompress.models import ALIASES
    from tcompress.models.names import local_folder

    remote = local_folder(name) is None
    bars = remote and not manner.quiet and sys.stderr.isatty()
    silence_libraries(verbose=manner.verbose, downloads=bars)
    from tcompress.models import SourceModel

    if remote and name in ALIASES:
        say(f"`{name}` is `{ALIASES[name]}`", quiet=manner.quiet)
    return SourceModel.open(
        name,
        revision=access.revision,
        token=access.token,
        trust_remote_code=access.allow_remote_code,
        seed=seed,
    )


def show_plan(job: Job) -> None:
    """Prints what a conversion would do, and what it would cost."""
    from tcompress.conversion.estimate import estimate
    from tcompress.data.tables import check_data
    from tcompress.planning.planner import make_plan
    from tcompress.reporting.console import render_plan

    check_data([job.convert.calibration.source])
    source = open_job(job)
    plan = make_plan(job.convert, source)
    costs = estimate(plan, source, job.convert)
    if job.manner.as_json:
        facts = {"plan": plan.model_dump(mode="json"), "estimate": costs.model_dump(mode="json")}
        print_json({"dry_run": True, "output": str(job.output.absolute()), **facts})
        return
    results().print(render_plan(plan, costs, source.store.total_bytes))
    if job.seed is not None:
        text = f"Weights will be drawn at random, with seed {job.seed}; none are read."
        results().print(text, soft_wrap=True)
    results().print(
        f"Nothing was written. Without `--dry-run`, this writes `{job.output}`.", soft_wrap=True
    )


def perform(job: Job) -> None:
    """Converts, and prints the result."""
    silence_libraries(verbose=job.manner.verbose)
    from tcompress.artifact.workplace import check_output
    from tcompress.conversion.converter import convert

    check_output(job.output, force=job.force)  # before a long download
    source = open_job(job)
    with _resumable(job.output), shown_progress(quiet=job.manner.quiet) as progress:
        done = convert(source, job.convert, job.output, force=job.force, progress=progress)
    show_result(done, job)


def show_result(done: Converted, job: Job) -> None:
    """Prints what a conversion made of the model, and what to do next."""
    from tcompress.reporting.console import render
    from tcompress.reporting.model_report import report_of

    report = report_of(done.folder, trust_remote_code=job.access.allow_remote_code)
    name, seconds = relative(done.folder), done.manifest.seconds
    if job.manner.as_json:
        facts = {"resumed": done.resumed, "healed": False, "seconds": seconds}
        print_json({"output": str(done.folder), **facts, "report": report.to_json()})
        return
    screen = results()
    # Before and after; `tcompress report` has the layers.
    screen.print(render([report.model_copy(update={"layers": (), "left": ()})]))
    resumed = ", continuing an interrupted run" if done.resumed else ""
    screen.print(f"Wrote `{name}` in {seconds:.1f} s{resumed}.", soft_wrap=True)
    if done.manifest.source.init == "random":
        screen.print("Not trained yet: all weights are as they were drawn at random.")
        following = f"tcompress finetune {typed(name)} --task ... --data ..."
        screen.print(f"Next: `{following}`", soft_wrap=True)
        return
    screen.print("Not healed yet: imitating the dense model usually wins much of the quality back.")
    screen.print(f"Next: `tcompress finetune {typed(name)} --data FILE`", soft_wrap=True)


@contextmanager
def _resumable(output: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted; `{output}` was not written",
            "run the same command again: it goes on where it stopped",
        ) from error


def relative(folder: Path) -> Path:
    """Shortens a path to what a user would type."""
    try:
        return folder.relative_to(Path.cwd())
    except ValueError:
        return folder


# `tcompress convert`.


EXAMPLES = (
    "tcompress convert bert-base --method lprod --p 4",
    "tcompress convert minilm --method svd --target 0.25 --calib train.csv -o small",
    "tcompress convert minilm --method auto --target 0.25",
    "tcompress convert bert-base --method svd --target 0.5 --drop-layers 6",
    "tcompress convert vit-base --method hot --structure lprod --p 4",
    "tcompress convert ./my-model --recipe encoder/minilm-lprod --calib none",
)

SETTINGS = {"panels": (GOAL, METHOD, "Data", OUTPUT, REPORT, MODEL, BLOCKS, SCRATCH, FIT)}


def convert(
    one: OneModel,
    written: Written,
    said: Given[Convert],
    call: ConvertOptions,
    planned: Planned,
    access: Access,
    manner: Manner,
) -> None:
    """Does what `tcompress convert` says."""
    from tcompress.options import find_recipe, parse_recipe
    from tcompress.options.choose import conversion

    recipe = parse_recipe(*find_recipe(call.recipe)) if call.recipe is not None else None
    settings = conversion(said.values(), recipe, structure=call.structure, typed=said)
    folder = written.output or (recipe and recipe.output)
    job = Job(
        model=one.model,
        convert=settings,
        output=Path(folder or default_output(one.model, settings)),
        force=written.force,
        access=access,
        manner=manner,
    )
    show_plan(job) if planned.dry_run else perform(job)
