"""Sweeps: many conversions of one model, measured alike and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import tcompress
from tcompress.artifact.checksums import digest_of
from tcompress.artifact.manifest import Metric, Speed, read_manifest
from tcompress.artifact.workplace import check_output, check_place, remove_model
from tcompress.conversion.estimate import Estimate, estimate
from tcompress.data.tables import check_data
from tcompress.errors import (
    FitError,
    InputError,
    PlanError,
    RecipeError,
    TCompressError,
    TrainingError,
    first_line,
)
from tcompress.evaluation.scores import Baseline, Threshold
from tcompress.files import write_text
from tcompress.models import SourceModel
from tcompress.options import Bench, Convert, Evaluate, Finetune, Recipe, Sweep
from tcompress.options.load import dump_recipe
from tcompress.options.method_options import AutoSpec
from tcompress.options.schema import short_name
from tcompress.pipeline import data_of, measure, run_recipe, teacher_of, time_passes
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.progress import Progress, Silent
from tcompress.reporting.model_report import report_of
from tcompress.reporting.page import check_target, write_html
from tcompress.reporting.pareto import Candidate, FrontReport, front_of
from tcompress.reporting.tree import ModelReport
from tcompress.structures import structures
from tcompress.training.setup import check_run

# The cells of a sweep: an ordinary recipe for each method and target.


@dataclass(frozen=True)
class Cell:
    """One method with one target.

    Attributes:
        name: Short name, such as `svd-25`; also its folder's.
        recipe: What is done.
        plan: What the conversion will do, unless it is refused.
        costs: What that will take.
        refusal: Why it cannot be done, if so.
    """

    name: str
    recipe: Recipe
    plan: Plan | None = None
    costs: Estimate | None = None
    refusal: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns what is planned as plain data."""
        if self.plan is None or self.costs is None:
            return {"name": self.name, "refused": self.refusal}
        return {
            "name": self.name,
            "refused": None,
            "kept": self.plan.kept,
            "rewritten_parameters": self.plan.structured_rewritten,
            "parameters": self.plan.parameters - self.plan.saved,
            "layers": len(self.plan.layers),
            "left": len(self.plan.left),
            "estimate": self.costs.model_dump(mode="json"),
        }


def default_methods() -> tuple[str, ...]:
    """Names one method of each structure: all of them are fitted to data and take a target."""
    names: list[str] = []
    for item in structures():
        names.append(item.spec.model_fields["name"].annotation.__args__[0])
    return tuple(names)


def cells_of(recipe: Recipe, source: SourceModel) -> list[Cell]:
    """Lists the cells of a recipe with `sweep`; what cannot be planned is refused.

    Args:
        recipe: The recipe.
        source: The dense model; its weights are not read.

    Raises:
        PlanError: No cell can be planned.
    """
    cells: list[Cell] = []
    for convert in _conversions(recipe, source):
        if any(cell.recipe.convert == convert for cell in cells):
            continue
        name = _distinct(short_name(convert), [cell.name for cell in cells])
        cells.append(_planned(name, _recipe(recipe, convert, name, source), source))
    if all(cell.refusal is not None for cell in cells):
        lines = "".join(f"\n  - {cell.name}: {cell.refusal}" for cell in cells)
        raise PlanError(
            f"no cell of the sweep can be done:{lines}", "choose other methods or targets"
        )
    return cells


def _conversions(recipe: Recipe, source: SourceModel) -> Iterator[Convert]:
    sweep = recipe.sweep or Sweep()
    for method in sweep.methods or (recipe.convert.method,):
        for target in sorted(sweep.targets, reverse=True):
            spec: Any = method
            if isinstance(method, str):
                spec = _suited(recipe.convert, method, target, source)
            yield recipe.convert.at(target, spec)


def _suited(convert: Convert, name: str, target: float, source: SourceModel) -> Any:
    """Options of a method that leave room in a target, and as few layers dense as they can."""
    spec = Convert.model_validate({"method": {"name": name}}).method
    assert spec is not None
    if isinstance(spec, AutoSpec):
        return spec
    specs = spec.alone(target)
    return min(specs, key=lambda item: _left(convert.at(target, item), source))


def _left(convert: Convert, source: SourceModel) -> float:
    """How many layers stay dense; infinity where it is refused."""
    try:
        return len(make_plan(convert, source).left)
    except PlanError:
        return inf


def _distinct(name: str, taken: list[str]) -> str:
    """Numbers conversions that differ in what short names leave out."""
    names = [name, *(f"{name}-{count}" for count in range(2, len(taken) + 2))]
    return next(name for name in names if name not in taken)


def _recipe(recipe: Recipe, convert: Convert, name: str, source: SourceModel) -> Recipe:
    own = {"convert": convert, "name": name, "description": None, "model": source.id}
    own |= {"revision": source.revision, "output": name, "sweep": None, "report": None}
    return recipe.model_copy(update=own)


def _planned(name: str, recipe: Recipe, source: SourceModel) -> Cell:
    try:
        plan = make_plan(recipe.convert, source)
    except PlanError as error:
        return Cell(name, recipe, refusal=error.message)
    return Cell(name, recipe, plan, estimate(plan, source, recipe.convert))


# What a sweep has found: the models beside the dense one, and what could not be done.


@dataclass(frozen=True)
class Done:
    """A finished cell.

    Attributes:
        cell: The cell.
        reports: Its models: as converted and, if it was trained, as trained.
        seconds: How long each took.
        missed: Thresholds that it misses, in words.
    """

    cell: Cell
    reports: tuple[ModelReport, ...]
    seconds: tuple[float, ...]
    missed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "name": self.cell.name,
            "status": "done",
            "recipe": _sparse(self.cell.recipe),
            "reports": [report.to_json() for report in self.reports],
            "seconds": list(self.seconds),
            "missed": list(self.missed),
        }


@dataclass(frozen=True)
class Stopped:
    """A cell without a result.

    Attributes:
        name: Its name.
        status: `refused` if the method does not fit the model; `failed` if something went wrong.
        reason: What, in words.
    """

    name: str
    status: Literal["refused", "failed"]
    reason: str


@dataclass(frozen=True)
class Swept:
    """What a sweep has found.

    Attributes:
        folder: Folder with a model for each cell, `sweep.json` and the page.
        page: The HTML report.
        model: Name of the dense model.
        recipe: What was asked for.
        front: All models, the dense one among them, with what each costs.
        dense: Report on the dense model.
        cells: Finished cells.
        stopped: The other ones.
    """

    folder: Path
    page: Path
    model: str
    recipe: Recipe
    front: FrontReport
    dense: ModelReport
    cells: tuple[Done, ...]
    stopped: tuple[Stopped, ...] = field(default=())

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        source: SourceModel,
        folder: Path,
        dense: ModelReport,
        cells: Sequence[Done],
        stopped: Sequence[Stopped],
    ) -> Swept:
        """Compares what was found."""
        dense = _comparable(dense, cells)
        candidates = [
            Candidate(
                name=done.cell.name,
                report=done.reports[-1],
                converted=done.reports[0].metrics[0] if len(done.reports) > 1 else None,
                seconds=sum(done.seconds),
            )
            for done in cells
        ]
        front = front_of([Candidate("dense", dense), *candidates])
        page = folder / "sweep.html" if recipe.report is None else Path(recipe.report).expanduser()
        return cls(folder, page, source.id, recipe, front, dense, tuple(cells), tuple(stopped))

    @property
    def missed(self) -> bool:
        """Whether a threshold was declared, and no cell reaches it."""
        declared = any(item.threshold is not None for item in self.recipe.evaluate)
        return declared and bool(self.cells) and all(done.missed for done in self.cells)

    @property
    def failed(self) -> bool:
        """Whether something went wrong in a cell, or none is left; a refusal is an answer."""
        return not self.cells or any(item.status == "failed" for item in self.stopped)

    def write_page(self) -> Path:
        """Writes the HTML report, the models in the order of the table."""
        reports = {"dense": self.dense} | {item.cell.name: item.reports[-1] for item in self.cells}
        return write_html([reports[row.name] for row in self.front.rows], self.page)

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "tool_version": tcompress.__version__,
            "output": str(self.folder),
            "model": self.model,
            "recipe": _sparse(self.recipe),
            **self.front.model_dump(mode="json"),
            "stopped": [dict(vars(item)) for item in self.stopped],
            "dense": self.dense.to_json(),
            "cells": [done.to_json() for done in self.cells],
            "html": str(self.page),
        }


def fallback_metric(report: ModelReport) -> Metric:
    """What stands for quality where no task is measured: an error of the conversion.

    With calibration data it is that of the last layer, whose input has gone through all others;
    without, the mean over the layers' weights.
    """
    facts = report.calibration
    protocol: dict[str, Any] = {"task": "conversion", "data": facts.name if facts else None}
    if "held_out" in report.errors:
        last = report.layers[-1]
        name, value = "held-out error of the last layer", last.errors["held_out"]
        protocol |= {"layer": last.name}
    else:
        kind = next(iter(report.errors))
        name, value = f"mean {kind} error", report.errors[kind]
    return Metric(name=name, value=value, higher_is_better=False, protocol=protocol)


def _comparable(dense: ModelReport, cells: Sequence[Done]) -> ModelReport:
    """Gives the dense model the error that others are compared by: none."""
    if dense.metrics or not cells:
        return dense
    metric = cells[0].reports[-1].metrics[0].model_copy(update={"value": 0.0})
    return dense.model_copy(update={"metrics": (metric,)})


def _sparse(recipe: Recipe) -> Any:
    """A recipe as plain data that `tcompress run` reads, without values that are defaults."""
    return yaml.safe_load(dump_recipe(recipe))


# What is known of the models of a sweep: kept as files, so that nothing is measured twice.
#
# Identities are chained: that of a model covers the weights and the settings that it comes from,
# that of a measurement the model too. A changed setting changes those behind it, and no others.


_Kept = TypeVar("_Kept", bound=BaseModel)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Stage(_Model):
    """One model.

    Attributes:
        identity: What it comes from.
        report: What is known without running it; None before it is made.
        seconds: How long that took.
        metrics: Numbers, by identity of their measurement.
        speed: Times, likewise.
        baselines: What others are compared with, likewise; of the dense model only.
    """

    identity: str
    report: ModelReport | None = None
    seconds: float | None = None
    metrics: dict[str, tuple[Metric, ...]] = Field(default_factory=dict)
    speed: dict[str, tuple[Speed, ...]] = Field(default_factory=dict)
    baselines: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Record(_Model):
    """A cell: the model as it was converted and, if it was trained, that one too."""

    converted: Stage
    trained: Stage | None = None


def read_record(path: Path, kind: type[_Kept]) -> _Kept | None:
    """Reads a record; one that another version wrote counts as none."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def identity(*parts: Any) -> str:
    """Shortens what determines a result."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def of_conversion(weights: str, settings: Convert) -> str:
    """Identifies a converted model by the dense weights and the settings."""
    data = stamp(settings.calibration.source)
    return identity("convert", weights, settings.model_dump(mode="json"), data)


def of_training(model: str, settings: Finetune) -> str:
    """Identifies a trained model by the one that it was and the settings."""
    named = [*settings.data.source, settings.data.validation or "", settings.teacher]
    return identity("finetune", model, settings.model_dump(mode="json"), [*map(stamp, named)])


def of_evaluation(model: str, item: Evaluate) -> str:
    """Identifies a measurement; a threshold only judges it, and the rest changes no number."""
    settings = item.model_dump(mode="json", exclude={"threshold", "batch_size", "device"})
    return identity("evaluate", model, settings, stamp(item.data))


def of_bench(model: str, settings: Bench) -> str:
    """Identifies times."""
    return identity("bench", model, settings.model_dump(mode="json"))


def stamp(name: str) -> Any:
    """Changes with a local file or folder that is named; of all other names nothing is known."""
    path = Path(name).expanduser()
    if not name:
        return None
    if path.is_file():
        return digest_of(path)
    if path.is_dir():
        files = sorted(item for item in path.rglob("*") if item.is_file())
        return [
            (str(item.relative_to(path)), item.stat().st_size, item.stat().st_mtime_ns)
            for item in files
        ]
    return None


# A sweep: every cell is converted, trained and measured; what is done is not done again.


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
        stage = read_record(path, Stage)
        if stage is None or stage.identity != self.weights:
            found = report_of(self.source.folder, trust_remote_code=self.source.trust_remote_code)
            found = found.model_copy(update={"name": self.source.id})
            stage = Stage(identity=self.weights, report=found)
        for item in self.recipe.evaluate:
            key = of_evaluation(self.weights, item)
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
        key = of_evaluation(self.weights, item)
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
        record = read_record(path, Record)
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
        identities = [of_conversion(self.weights, convert)]
        if finetune is not None:
            identities.append(of_training(identities[0], finetune))
        return [Stage(identity=identity) for identity in identities]

    def _lacks(self, cell: Cell) -> bool:
        """Tells whether there is anything to do."""
        record = read_record(self._record_path(cell.name), Record)
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
        keyed = [(item, of_evaluation(stage.identity, item)) for item in self.recipe.evaluate]
        return [(item, key) for item, key in keyed if key not in stage.metrics]

    def _untimed(self, stage: Stage) -> str | None:
        if self.recipe.bench is None:
            return None
        key = of_bench(stage.identity, self.recipe.bench)
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
        keys = [of_evaluation(stage.identity, item) for item in self.recipe.evaluate]
        metrics = [metric for key in keys for metric in stage.metrics[key]]
        if not metrics and stage.report.layers:
            metrics = [fallback_metric(stage.report)]
        bench = self.recipe.bench
        times = () if bench is None else stage.speed.get(of_bench(stage.identity, bench), ())
        return stage.report.model_copy(update={"metrics": tuple(metrics), "speed": times})

    def _missed(self, stage: Stage) -> Iterator[str]:
        for item in self.recipe.evaluate:
            main: Metric = stage.metrics[of_evaluation(stage.identity, item)][0]
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
