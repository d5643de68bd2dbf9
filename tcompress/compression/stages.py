"""The stages of `compress`, each one that can be run by itself, in a folder beside the output.

A stage that is finished is not done again after an interruption.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from pydantic import TypeAdapter

import tcompress
from tcompress import files
from tcompress.artifact.checksums import stamp_of
from tcompress.artifact.manifest import Manifest, read_manifest
from tcompress.artifact.reader import open_checked
from tcompress.artifact.workplace import (
    Workplace,
    check_apart,
    check_output,
    holds_other_work,
    identity_of,
)
from tcompress.compression import static_row
from tcompress.compression.attempts import Goal, Measured
from tcompress.compression.baselines import SHIPPED, baselines, measurement, row_of
from tcompress.compression.cutting import CONVERTED, EXPORTED, converted
from tcompress.compression.effort import Effort, Needs, minutes_text
from tcompress.compression.forecast import check_healing, check_size, healing, why_unhealed
from tcompress.compression.table import Compressed, Row, usage_of, write_records
from tcompress.compression.working import DENSE, Job, Say, Work, file_of, perform
from tcompress.data.inputs import inputs_of
from tcompress.data.tables import check_data
from tcompress.errors import DataError, InputError, Problems, counted
from tcompress.evaluation.measuring import check_measurement
from tcompress.fields import RuntimeName
from tcompress.hf.opening import multiplies_bfloat16
from tcompress.models import SourceModel
from tcompress.models.names import carry_files, encodes_sentences, name_of
from tcompress.options.compress_options import Compress
from tcompress.processes import Crew
from tcompress.progress import Progress, Silent
from tcompress.runtimes.installed import require

LEAST_MINUTES = 0.2
"""Time of healing below which none is begun: a model is opened, and hardly a step is taken."""
NEAR = 0.98
"""Share of a speed that counts as reached in the end: times of a pass differ so much by chance."""
OVERRUN = 0.1
"""Share of the time by which it may be exceeded before that is said."""
_NO_DATA = "fitted and healed on text that ships: `--data` with texts of your own does better"


def compress(
    model: Path | str,
    output: Path | str,
    settings: Compress,
    *,
    force: bool = False,
    token: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> Compressed:
    """Do what `api.compress` says, with settings in place of options.

    Within `processes.joined` the first of several processes calls it, all others `follow`. `say`
    hears what a user should know.
    """
    output = Path(output).expanduser().absolute()
    crew = Crew[Job](lambda job: perform(source, job, progress, say))
    with crew.led():
        _check(output, settings, force)
        source = open_checked(name_of(model), token, trust_remote_code, converted=False)
        check_apart(output, source.origin or source.folder, "the model's own folder")
        if settings.task is not None:
            _check_test_data(settings, source)
        check_size(source, settings)
        check_healing(source, settings)
        facts = {"compress": settings.model_dump(mode="json"), "tool": tcompress.__version__}
        data = [*map(stamp_of, (*settings.data, *settings.test_data))]
        identity = identity_of({**facts, "weights": source.store.fingerprint(), "data": data})
        if holds_other_work(output, identity):
            name = f"`{output.name}`"
            say(f"What a run with other options or data left unfinished for {name} is not used.")
        place = Workplace(output, identity, force=force)
        with place.working():
            if place.published:  # a kill came after it
                finished = TypeAdapter(Compressed).validate_python(place.result)
                place.discard()
                return finished
            if not place.resumed:  # the model smaller and healed, and both models in the runtime
                copies = 2 if settings.runtime == "torch" else 4
                place.need(copies * source.store.total_bytes)
            work = Work(source, settings, place, progress or Silent(), say, crew)
            work = replace(work, effort=_effort(work))
            work = replace(work, runtime=_runtime(work))
            narrowed = converted(work)
            rows = baselines(work)
            result = _finished(work, *_healed(work, narrowed), rows)
            place.publish(force=force, result=result.to_json())
        return result


def _check(output: Path, settings: Compress, force: bool) -> None:
    """Refuse, before any work, what would fail in the end; name all problems."""
    problems = Problems()
    with problems.collected():
        check_output(output, force=force)
    with problems.collected():
        check_data([*settings.data, *settings.test_data])
    if settings.runtime != "torch":
        with problems.collected():
            require("onnx")
    problems.report()


def _check_test_data(settings: Compress, source: SourceModel) -> None:
    """Refuse data that quality cannot be measured on."""
    try:
        check_measurement(measurement(settings, Effort()), source, heads=True, labelled=True)
    except DataError as error:
        if not any(option in (error.hint or "") for option in ("--columns", "--baseline")):
            raise
        hint = "`compress` has no `--columns`: give `--test-data` whose columns have the names in "
        hint += "docs/healing.md#data-files, or leave it and `--task` out"
        raise DataError(error.message, hint) from error


def _effort(work: Work) -> Effort:
    """Choose how much stages take, once: a run that goes on after a kill does as it began."""
    for note in work.place.notes("effort"):
        return Effort(**note["effort"])
    needs = Needs.of(work.source, work.settings)
    effort = needs.effort(work.settings.most_minutes)
    if work.settings.smoke:
        effort = Effort.least(intervals=False)
    if (text := needs.too_short(work.settings.most_minutes)) is not None:
        work.say(f"{text}.")
    elif effort != Effort() and not work.settings.smoke:
        work.say(f"{minutes_text(work.settings.most_minutes)}: {effort.words}")
    work.place.note("effort", effort=asdict(effort))
    return effort


def _runtime(work: Work) -> RuntimeName:
    """Export the dense model; where no runtime was named and it has no file, take PyTorch."""
    runtime = work.settings.runtime or "onnx-int8"
    if runtime == "torch" or work.place.notes("refused"):
        return "torch"
    try:
        replace(work, runtime=runtime).exported(work.original, DENSE, DENSE)
    except InputError as error:
        if work.settings.runtime is not None:
            raise
        work.say(f"{error.message}: size and speed are those of PyTorch (`--runtime torch`)")
        work.place.note("refused")
        return "torch"
    return runtime


def _healed(work: Work, narrowed: Path) -> tuple[Path, str]:
    """The healed model, in the minutes that are left."""
    folder = work.place.folder / "healed"
    if narrowed == work.original:
        return narrowed, "not needed"
    if (why := why_unhealed(work.source)) is not None:
        return narrowed, f"no ({why})"
    if not (folder / "config.json").is_file():
        measured = (f"Measuring {DENSE} in {runtime}" for runtime in {work.runtime, "torch"})
        following = work.seconds_of(f"Exporting {DENSE}", *measured)
        minutes = work.minutes_left - 1.1 * following / 60
        if work.settings.smoke:  # of every stage a little
            minutes = max(LEAST_MINUTES / 2, minutes)
        elif minutes < LEAST_MINUTES:
            # With so many, healing would have had as long as all that came before it.
            more = math.ceil(2 * max(1.0, work.settings.most_minutes - work.minutes_left))
            return narrowed, f"no (no time was left: `--minutes {more}` leaves some)"
        options: dict[str, Any] = {"minutes": minutes}
        # Half as many steps again in the same time; of accelerators healing asks itself.
        if not torch.accelerator.is_available() and multiplies_bfloat16():
            options["mixed_precision"] = "bf16"
        with work.timed("Healing"):
            work.crew.do(Job(healing(work.settings, **options), folder, narrowed), last=True)
    manifest = read_manifest(folder)
    runs = manifest.training if manifest else []
    steps = sum(run.steps for run in runs)
    work.learn_agreement(_agreements(manifest))
    if all(run.keeps_start for run in runs):
        return folder, f"no ({counted(steps, 'step')} tried, none better)"
    return folder, counted(steps, "step")


def _finished(work: Work, healed: Path, words: str, rows: list[Row]) -> Compressed:
    """Measure what ships, and lay it out as the output."""
    if healed == work.original:  # which is measured already
        shipped = work.dense
        [dense] = (item for item in rows if (item.name, item.runtime) == (DENSE, work.runtime))
        row = replace(dense, name=SHIPPED)
    else:
        # Without healing it is the conversion's export, which is there.
        unhealed = healed.name.startswith(CONVERTED)
        name = healed.name.replace(CONVERTED, EXPORTED) if unhealed else f"{healed.name}-{EXPORTED}"
        shipped = work.exported(healed, name, "what was healed")
        row = row_of(work, SHIPPED, shipped, work.runtime)
        if work.runtime != "torch" and work.effort.other_rows:
            rows = [*rows, row_of(work, SHIPPED, shipped, "torch")]
    row = static_row.compared(work, row, shipped, rows)
    shutil.rmtree(work.place.model)
    # What is finished keeps its name: after a kill the same command finds it. Records replace files
    # and change none; but those of the user are never shared.
    copy = files.second_name if work.is_ours(shipped) else shutil.copy2
    shutil.copytree(shipped, work.place.model, copy_function=copy)
    carry_files(shipped, (), work.place.model)  # what is around a transformer in the old layout
    trust = work.source.trust_remote_code
    beside = [one for one in rows if one.name != SHIPPED]
    write_records(work.place.model, work.place.output.name, beside, trust_remote_code=trust)
    manifest = read_manifest(work.place.model)
    exported = file_of(manifest, work.runtime)
    file = ", ".join(work.store_of(shipped).files) if exported is None else exported.file
    agreements = _agreements(manifest)
    kind = work.source.model_class.__name__
    usage = usage_of(
        work.place.output,
        file,
        kind,
        # A head that was trained on an encoder comes with the files of the encoder.
        sentences="For" not in kind and encodes_sentences(work.place.model),
        pictures=inputs_of(work.source).image,
        writes=work.source.model_class.can_generate(),
    )
    measured = Measured(row.bytes, row.speedup)
    return Compressed(
        folder=work.place.output,
        file=file,
        rows=(*rows, row),
        quality=_quality_name(work),
        healed=words,
        usage=usage,
        agreement=fmean(agreements) if agreements else None,
        missed=measured.missed(work.goal, near=NEAR),
        notes=(*_notes(work, rows), *_overrun(work), *static_row.words(work.goal, row, rows)),
    )


def _agreements(manifest: Manifest | None) -> list[float]:
    """List agreements with the dense model on texts held back from the last healing, by source."""
    runs = manifest.training[-1:] if manifest else []
    return [source.kept for run in runs for source in run.sources if source.kept is not None]


def _quality_name(work: Work) -> str | None:
    if work.settings.task is None:
        return None
    sets = work.place.notes("baseline")[-1]["sets"]
    several = "mean " if len(sets) > 1 else ""
    return several + str(work.place.notes("quality")[-1]["name"])


def _notes(work: Work, rows: list[Row]) -> tuple[str, ...]:
    ships = not work.settings.data and inputs_of(work.source).text
    notes = [_NO_DATA] if ships else []
    if work.goal != Goal() and work.effort.other_rows and not any("layers" in r.name for r in rows):
        notes.append("no number of whole layers reaches the goal without other changes")
    return tuple(notes)


def _overrun(work: Work) -> tuple[str, ...]:
    """Say that all of it took longer than it should, where that is more than a tenth."""
    most = work.settings.most_minutes
    if -work.minutes_left <= OVERRUN * most:
        return ()
    took = minutes_text(most - work.minutes_left)
    text = f"all took about {took} in place of {minutes_text(most)}"
    # Those of runs that were stopped are no part of these minutes.
    stages = [note for note in work.place.notes("seconds") if note.get("began") == work.began]
    if not stages:
        return (text,)
    longest = max(stages, key=lambda note: float(note["seconds"]))
    part = f"{longest['stage'].lower()} took {minutes_text(longest['seconds'] / 60)} of them"
    return (f"{text}; {part}",)
