"""A sweep: every cell is converted, trained and measured; what is done is not done again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tcompress.artifact.manifest import Metric, read_manifest
from tcompress.artifact.workplace import check_output, check_place, remove_model
from tcompress.errors import (
    FitError,
    InputError,
    PlanError,
    RecipeError,
    TCompressError,
    TrainingError,
)
from tcompress.evaluation.compare import Baseline
from tcompress.evaluation.threshold import Threshold
from tcompress.files import write_text
from tcompress.options import Evaluate, Recipe
from tcompress.pipeline import data_of, measure, run_recipe, teacher_of, time_passes
from tcompress.progress import Progress, Silent
from tcompress.reading.tables import check_data
from tcompress.reporting.html import check_target
from tcompress.reporting.model import report_of
from tcompress.reporting.tree import ModelReport
from tcompress.source import SourceModel
from tcompress.source.text import first_line
from tcompress.sweeping import records
from tcompress.sweeping.cells import Cell, cells_of
from tcompress.sweeping.outcome import Done, Stopped, Swept, fallback_metric
from tcompress.sweeping.records import Record, Stage
from tcompress.training.setup import check_run

STATE = ".sweep"
"""Folder inside the output with what is known so far."""

Say = Callable[[str], None]


def sweep(
    recipe: Recipe,
    source: SourceModel,
    output: Path,
    *,
    force: bool = False,
    token: str | None = None,
    progress: Progress | None = None,
    say: Say | None = None,
) -> Swept:
    """Converts, trains and measures a model in several ways, and compares the results.

    Every cell is an ordinary recipe with a folder of its own in the output, which holds
    `sweep.json` and `sweep.html` too. Run again, only what depends on changed settings is done
    again. A cell that cannot be done is named with the reason and does not stop the others.

    Args:
        recipe: What to do, with `sweep`.
        source: The dense model.
        output: Folder to write.
        force: Do all cells again, and write into a folder that holds something else.
        token: Access token for the hub.
        progress: Hears how far it is.
        say: Hears of what the user should know.

    Raises:
        InputError: Something in the recipe cannot be used, or no cell can be done.
        KeyboardInterrupt: It was stopped; the same call goes on where it was.
    """
    check_recipe(recipe)
    cells = cells_of(recipe, source)
    folder = Path(output).expanduser().absolute()
    with _claimed(folder, force):
        run = _Sweep(recipe, source, folder, cells, token, progress or Silent(), say or _mute)
        return run.go()


def check_recipe(recipe: Recipe) -> None:
    """Refuses, before any work, what would fail in the end.

    Raises:
        InputError: A threshold is no number, trained models have no task to be compared by, or the
            page cannot be written.
    """
    if recipe.report is not None:
        check_target(Path(recipe.report).expanduser())
    for item in recipe.evaluate:
        if item.threshold is not None:
            Threshold.parse(item.threshold)
    if recipe.finetune is not None and not recipe.evaluate:
        raise RecipeError(
            "trained models cannot be compared without a task: errors of layers are known of the "
            "conversion alone",
            "add `evaluate` to the recipe, or `--task` and `--data`",
        )


@contextmanager
def _claimed(folder: Path, force: bool) -> Iterator[None]:
    """Takes the output for this run; a folder of an earlier sweep may be gone on with.

    Of a run that ends before anything is known, nothing stays.
    """
    state = folder / STATE
    check_place(folder)
    if not state.is_dir() and not force:
        check_output(folder, force=False)
    made = [place for place in (state, *state.parents) if not place.exists()]
    state.mkdir(parents=True, exist_ok=True)
    lock = FileLock(state / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(
            f"another sweep is writing `{folder}`",
            "wait for it, or choose another output with `-o`",
        ) from error
    try:
        if force:
            for record in state.glob("*.json"):
                record.unlink()
        yield
    finally:
        with suppress(OSError):  # a folder that holds something stays, and those around it
            if [item.name for item in state.iterdir()] == ["lock"]:
                (state / "lock").unlink()
            lock.release()
            for place in made:
                place.rmdir()
        lock.release()


class _Unmeasured(TCompressError):
    """A model was made and cannot be measured."""


@dataclass
class _Sweep:
    recipe: Recipe
    source: SourceModel
    folder: Path
    cells: Sequence[Cell]
    token: str | None
    progress: Progress
    say: Say
    done: dict[str, Done] = field(default_factory=dict)
    stopped: dict[str, Stopped] = field(default_factory=dict)

    def go(self) -> Swept:
        self.weights = self.source.store.fingerprint()
        for cell in self.cells:
            if cell.refusal is not None:
                self.stopped[cell.name] = Stopped(cell.name, "refused", cell.refusal)
        work = [cell for cell in self.cells if cell.refusal is None]
        lacking = [cell.name for cell in work if self._lacks(cell)]
        if lacking:
            check_data(data_of(self.recipe))
            if self.recipe.finetune is not None:
                teacher = teacher_of(self.recipe, self.source, self.token)
                check_run(self.source, teacher, self.recipe.finetune)
        self.dense = self._dense()
        for cell in work:
            if cell.name not in lacking:
                self.say(f"`{cell.name}` is already done")
                self._do(cell)
                continue
            self.progress.part(cell.name, lacking.index(cell.name) + 1, len(lacking))
            self._do(cell)
            self._swept()  # so that it can be looked at while the others are in work
        return self._swept()

    # The dense model

    def _dense(self) -> Stage:
        """Measures the dense model, unless that is done."""
        path = self._record_path("dense")
        stage = records.read_record(path, Stage)
        if stage is None or stage.identity != self.weights:
            found = report_of(self.source.folder, trust_remote_code=self.source.trust_remote_code)
            found = found.model_copy(update={"name": self.source.id})
            stage = Stage(identity=self.weights, report=found)
        for item in self.recipe.evaluate:
            key = records.of_evaluation(self.weights, item)
            if key in stage.metrics:
                continue
            scores = measure(item, [self.source.folder], **self._access())
            baseline = scores[0].baseline
            assert baseline is not None
            stage.metrics[key] = scores[0].metrics
            stage.baselines[key] = replace(baseline, name=self.source.id).to_json()
            write_text(path, stage.model_dump_json(indent=1))
        return stage

    def _baseline(self, item: Evaluate) -> Baseline:
        key = records.of_evaluation(self.weights, item)
        return Baseline.of_json(self.dense.baselines[key])

    # Cells

    def _do(self, cell: Cell) -> None:
        """Does what a cell lacks; one that fails does not stop the others."""
        try:
            record = self._record(cell)
            if self._lacks(cell):
                self._make(cell, record)
                self._measure(cell, record)
            self.done[cell.name] = self._finished(cell, record)
        except PlanError as error:
            self.stopped[cell.name] = Stopped(cell.name, "refused", error.message)
        except (InputError, FitError, TrainingError, _Unmeasured) as error:
            self.stopped[cell.name] = Stopped(cell.name, "failed", error.message)
        except RuntimeError as error:  # of torch, such as memory that does not suffice
            self.stopped[cell.name] = Stopped(cell.name, "failed", first_line(error))
        if self.recipe.sweep is not None and not self.recipe.sweep.keep_models:
            for folder in self._folders(cell):
                with suppress(InputError):  # it holds something of the user's
                    remove_model(folder)

    def _record(self, cell: Cell) -> Record:
        """Reads what is known; folders that other settings have made are removed."""
        path, wanted = self._record_path(cell.name), self._wanted(cell)
        record = records.read_record(path, Record)
        folders = self._folders(cell)
        if record is None or record.converted.identity != wanted[0].identity:
            for folder in folders:
                remove_model(folder)
            record = Record(converted=wanted[0])
        trained = record.trained
        if len(wanted) > 1 and (trained is None or trained.identity != wanted[1].identity):
            remove_model(folders[1])
            record.trained = wanted[1]
        self._keep(cell, record)
        return record

    def _wanted(self, cell: Cell) -> list[Stage]:
        """The models of a cell with nothing known of them yet."""
        convert, finetune = cell.recipe.convert, cell.recipe.finetune
        identities = [records.of_conversion(self.weights, convert)]
        if finetune is not None:
            identities.append(records.of_training(identities[0], finetune))
        return [Stage(identity=identity) for identity in identities]

    def _lacks(self, cell: Cell) -> bool:
        """Tells whether there is anything to do."""
        record = records.read_record(self._record_path(cell.name), Record)
        if record is None:
            return True
        stages, wanted = self._stages(cell, record), self._wanted(cell)
        if [stage.identity for stage in stages] != [stage.identity for stage in wanted]:
            return True
        keep = self.recipe.sweep is None or self.recipe.sweep.keep_models
        gone = keep and not all((path / "config.json").is_file() for path in self._folders(cell))
        unmade = any(stage.report is None for stage in stages)
        unmeasured = any(self._unmeasured(stage) for stage in stages)
        return gone or unmade or unmeasured or self._untimed(stages[-1]) is not None

    def _unmeasured(self, stage: Stage) -> list[tuple[Evaluate, str]]:
        keyed = [
            (item, records.of_evaluation(stage.identity, item)) for item in self.recipe.evaluate
        ]
        return [(item, key) for item, key in keyed if key not in stage.metrics]

    def _untimed(self, stage: Stage) -> str | None:
        if self.recipe.bench is None:
            return None
        key = records.of_bench(stage.identity, self.recipe.bench)
        return None if key in stage.speed else key

    def _make(self, cell: Cell, record: Record) -> None:
        """Converts and trains, as far as that is not done."""
        folders = self._folders(cell)
        plain = cell.recipe.model_copy(update={"evaluate": (), "bench": None})
        run_recipe(
            plain,
            self.source,
            folders[-1],
            converted=folders[0],
            force=True,  # the folders are the sweep's own
            token=self.token,
            progress=self.progress,
            say=self.say,
        )
        for stage, folder in zip(self._stages(cell, record), folders, strict=True):
            found = report_of(folder, trust_remote_code=self.source.trust_remote_code)
            stage.report = found.model_copy(update={"metrics": (), "speed": ()})
            manifest = read_manifest(folder)
            assert manifest is not None  # the conversion wrote it
            training = manifest.training
            stage.seconds = training[-1].seconds if training else manifest.seconds
        self._keep(cell, record)

    def _measure(self, cell: Cell, record: Record) -> None:
        """Measures what is not known yet, quality first.

        Raises:
            _Unmeasured: A measurement failed that the dense model has passed.
        """
        try:
            self._measure_stages(cell, record)
        except InputError as error:
            raise _Unmeasured(error.message, error.hint) from error

    def _access(self) -> dict[str, Any]:
        trust = self.source.trust_remote_code
        return {"token": self.token, "trust": trust, "progress": self.progress}

    def _measure_stages(self, cell: Cell, record: Record) -> None:
        stages, folders = self._stages(cell, record), self._folders(cell)
        for stage, folder in zip(stages, folders, strict=True):
            for item, key in self._unmeasured(stage):
                scores = measure(item, [folder], self._baseline(item), **self._access())
                self._tell(cell, scores[0].notes)
                stage.metrics[key] = scores[0].metrics
                self._keep(cell, record)
        untimed = self._untimed(stages[-1])
        if self.recipe.bench is not None and untimed is not None:
            timed = time_passes(self.recipe.bench, folders[-1], self.source, self.progress)
            self._tell(cell, timed.notes)
            stages[-1].speed[untimed] = timed.speed
            self._keep(cell, record)

    def _tell(self, cell: Cell, notes: Sequence[str]) -> None:
        for note in notes:
            self.say(f"`{cell.name}`: {note}")

    def _finished(self, cell: Cell, record: Record) -> Done:
        stages = self._stages(cell, record)
        reports = [self._report(stage) for stage in stages]
        return Done(
            cell=cell,
            reports=tuple(reports),
            seconds=tuple(stage.seconds or 0.0 for stage in stages),
            missed=tuple(self._missed(stages[-1])),
        )

    def _report(self, stage: Stage) -> ModelReport:
        """The report of a model with the numbers that this recipe asks for, and no others."""
        assert stage.report is not None
        keys = [records.of_evaluation(stage.identity, item) for item in self.recipe.evaluate]
        metrics = [metric for key in keys for metric in stage.metrics[key]]
        if not metrics and stage.report.layers:
            metrics = [fallback_metric(stage.report)]
        bench = self.recipe.bench
        times = (
            () if bench is None else stage.speed.get(records.of_bench(stage.identity, bench), ())
        )
        return stage.report.model_copy(update={"metrics": tuple(metrics), "speed": times})

    def _missed(self, stage: Stage) -> Iterator[str]:
        for item in self.recipe.evaluate:
            main: Metric = stage.metrics[records.of_evaluation(stage.identity, item)][0]
            if item.threshold is not None and Threshold.parse(item.threshold).missed(main):
                bound = Threshold.parse(item.threshold)
                yield f"{item.task} {main.name} {main.value:.4f}, not {bound}"

    def _swept(self) -> Swept:
        """Writes what is known so far."""
        done = [self.done[cell.name] for cell in self.cells if cell.name in self.done]
        stopped = [self.stopped[cell.name] for cell in self.cells if cell.name in self.stopped]
        swept = Swept.of(
            self.recipe, self.source, self.folder, self._report(self.dense), done, stopped
        )
        write_text(
            self.folder / "sweep.json",
            json.dumps({"schema": 1, **swept.to_json()}, indent=2, ensure_ascii=False),
        )
        swept.write_page()
        return swept

    # Places

    def _folders(self, cell: Cell) -> list[Path]:
        """Folders of a cell's models: as converted and, if it is trained, as trained."""
        finetune = cell.recipe.finetune
        ends = ["", *([] if finetune is None else [f"-{finetune.task or 'healed'}"])]
        return [self.folder / f"{cell.name}{end}" for end in ends]

    def _stages(self, cell: Cell, record: Record) -> list[Stage]:
        if cell.recipe.finetune is None or record.trained is None:
            return [record.converted]
        return [record.converted, record.trained]

    def _record_path(self, name: str) -> Path:
        return self.folder / STATE / f"{name}.json"

    def _keep(self, cell: Cell, record: Record) -> None:
        write_text(self._record_path(cell.name), record.model_dump_json(indent=1))


def _mute(text: str) -> None:
    pass
