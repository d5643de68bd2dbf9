"""`tcompress convert`, and what it has in common with `run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tcompress.artifact.workplace import check_output
from tcompress.cli import terminal
from tcompress.cli.first_look import Job, first_look
from tcompress.cli.sweep import perform_sweep
from tcompress.errors import InputError, listed
from tcompress.fields import FIT, METHOD_OPTIONS
from tcompress.models.names import MANIFEST, default_output_name
from tcompress.options.commands import COMMON, Access, Manner, OneModel, Planned, Written
from tcompress.options.commands import Converted as ConvertOptions
from tcompress.options.convert_options import BLOCKS, GOAL, METHOD, OUTPUT, Convert
from tcompress.options.read import Given
from tcompress.options.schema import Recipe, Sweep, short_name
from tcompress.processes import is_first, is_launched, joined

if TYPE_CHECKING:
    from tcompress.conversion.converter import Converted
    from tcompress.models import SourceModel
    from tcompress.planning.entries import Plan

EXAMPLES = (
    "tcompress convert bert-base --method lprod --p 4",
    "tcompress convert minilm --method svd --target 0.25 --calib train.csv -o small",
    "tcompress convert minilm --method auto --speedup 2,4,8 -o faster",
    "torchrun --nproc_per_node 2 -m tcompress convert llama-3.2-1b --method svd --target 0.5",
)
DETAIL = ("Options of attention replacements, `tt` and `tucker`: `tcompress methods NAME`.",)
SETTINGS = {"panels": (GOAL, METHOD, "Data", OUTPUT, COMMON, BLOCKS, FIT, METHOD_OPTIONS)}


def default_output(model: str, convert: Convert) -> str:
    """Names the folder to write, such as `bert-base-lprod-p4`."""
    return default_output_name(model, short_name(convert))


def show_plan(job: Job) -> None:
    """Prints what a conversion would do, and what it would cost."""
    with first_look() as look:
        look.data(job.convert.calibration.source)
        job.look_at_model(look)
    source = job.open()
    from tcompress.conversion.estimate import estimate
    from tcompress.planning.planner import make_plan
    from tcompress.reporting.console import render_plan
    from tcompress.vocabulary.choice import with_vocabulary

    dense, source = source, with_vocabulary(source, job.convert)
    plan = make_plan(job.convert, source)
    costs = estimate(plan, source, job.convert)
    if job.manner.as_json:
        facts = {"plan": plan.model_dump(mode="json"), "estimate": costs.model_dump(mode="json")}
        terminal.print_json({"dry_run": True, "output": str(job.output.absolute()), **facts})
        return
    terminal.results().print(render_plan(plan, costs, dense.store.total_bytes))
    _tell_unread(job, plan)
    if job.convert.init == "random":
        terminal.tell(
            f"Weights will be drawn at random, with seed {job.convert.seed}; none are read."
        )
    terminal.tell(f"Nothing was written. Without `--dry-run`, this writes `{job.output}`.")


def perform(job: Job, *, again: bool = True) -> None:
    """Converts, and prints the result; unless `again`, a conversion that is done is kept."""
    folder = job.output
    is_there = not again and not job.force and (folder / MANIFEST).is_file()
    with first_look() as look:
        if not is_there:
            look.check(check_output, folder, force=job.force)
            look.data(job.convert.calibration.source)
        job.look_at_model(look)
    source = job.open()
    if is_there:
        if _show_kept(job, source, folder):
            return
        from tcompress.pipeline import check_free

        check_free(folder, force=False)
    from tcompress.conversion.converter import convert
    from tcompress.hf.opening import pick_device

    what = f"`{job.output}` was not written"
    quiet = job.manner.quiet
    device = pick_device(job.convert.device)
    with terminal.resumable(lambda: what, quiet=quiet, output=job.output) as heard, joined(device):
        progress = heard["progress"]
        done = convert(source, job.convert, job.output, force=job.force, progress=progress)
    if is_first():
        _show_result(done, job)


def _show_kept(job: Job, source: SourceModel, folder: Path) -> bool:
    """Prints the result of an earlier run, and tells whether a folder holds that."""
    from tcompress.artifact.manifest import read_manifest
    from tcompress.conversion.converter import Converted
    from tcompress.pipeline import is_made

    manifest = read_manifest(folder) if is_made(folder, source, job.convert) else None
    if manifest is None:
        return False
    text = f"`{folder.name}` is already converted; `--force` does it again"
    terminal.say(text, quiet=job.manner.quiet)
    _show_result(Converted(folder.absolute(), manifest), job, kept=True)
    return True


def _tell_unread(job: Job, plan: Plan) -> None:
    """Says that data was given for nothing, where nothing is fitted to it."""
    source = job.convert.calibration.source
    if job.convert.calibration.files and not (plan.reads_data or plan.vocabulary):
        terminal.tell(f"Nothing is fitted, so {listed(source)} is not read.")


def _show_result(done: Converted, job: Job, *, kept: bool = False) -> None:
    from tcompress.artifact.manifest import SAME_OUTPUT
    from tcompress.reporting.console import render
    from tcompress.reporting.model_report import report_of

    report = report_of(done.folder, trust_remote_code=job.access.allow_remote_code)
    name, seconds = terminal.relative(done.folder), done.manifest.seconds
    if job.manner.as_json:
        facts = {"resumed": done.resumed, "healed": False, "seconds": seconds}
        terminal.print_json({"output": str(done.folder), **facts, "report": report.to_json()})
        return
    # Before and after; `tcompress report` has the layers.
    terminal.results().print(render([report.model_copy(update={"layers": (), "left": ()})]))
    _tell_unread(job, done.manifest.plan)
    resumed = ", continuing an interrupted run" if done.resumed else ""
    terminal.tell(f"Kept `{name}`." if kept else f"Wrote `{name}` in {seconds:.1f} s{resumed}.")
    following = f"tcompress finetune {terminal.typed(name)}"
    if done.manifest.source.init == "random":
        terminal.tell("Not trained yet: all weights are as they were drawn at random.")
        terminal.tell(f"Next: `{following} --task ... --data ...`")
        return
    if done.manifest.plan.cuts_vocabulary_only:
        terminal.tell(SAME_OUTPUT)
        return
    if done.manifest.plan.only_rounded:
        terminal.tell("Rounded, not healed: measure what that costs, and heal it where it costs.")
        following = f"tcompress evaluate {terminal.typed(name)} --task TASK --data FILE"
        terminal.tell(f"Next: `{following}`")
        return
    terminal.tell(
        "Not healed yet: imitating the dense model usually wins much of the quality back."
    )
    terminal.tell(f"Next: `{following} --data FILE`")


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
    from tcompress.options.choose import conversion, unasked

    recipe = parse_recipe(*find_recipe(call.recipe)) if call.recipe is not None else None
    values = said.values()
    settings = conversion(values, recipe, structure=call.structure, typed=said)
    notes = () if recipe is not None else tuple(unasked(settings, values, said))
    folder = written.output or (recipe and recipe.output)
    output = Path(folder or default_output(one.model, settings)).expanduser()
    job = Job(one.model, settings, output, written.force, access, manner, notes=notes)
    if len(settings.speedups) < 2:
        show_plan(job) if planned.dry_run else perform(job)
        return
    # Several speeds, from one set of statistics: a sweep over them.
    if is_launched():
        raise InputError(
            "several processes convert one model at a time, and `--speedup` asks for "
            f"{len(settings.speedups)}",
            "give one speed, or leave the launcher out",
        )
    cells = Sweep(speedups=settings.speedups)
    family = Recipe(recipe_version=1, convert=settings, sweep=cells)
    perform_sweep(family, job, dry_run=planned.dry_run, timed=True)
