"""Sweeps: many conversions of one model, measured alike and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count
from math import inf
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field

import tcompress
from tcompress.artifact.averages import AGREEMENT
from tcompress.artifact.checksums import stamp_of
from tcompress.artifact.disk_cache import read_record
from tcompress.artifact.manifest import Metric, Speed, read_manifest
from tcompress.artifact.workplace import SWEEP, check_sweep, remove_model
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
    listed,
)
from tcompress.evaluation.measuring import evaluate
from tcompress.evaluation.scores import Baseline
from tcompress.files import check_page, remove, write_text
from tcompress.models import SourceModel
from tcompress.options import Bench, Convert, Evaluate, Recipe, Sweep
from tcompress.options.load import SEED_SUFFIX, repetitions, sparse
from tcompress.options.method_options import AutoSpec
from tcompress.options.read import read
from tcompress.options.schema import data_of, short_name
from tcompress.pipeline import Say, missed, run_recipe, teachers_of, time_passes
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.planning.sites import roles_of
from tcompress.progress import Progress, Silent
from tcompress.reporting.formatting import grouped
from tcompress.reporting.model_report import report_of
from tcompress.reporting.page import write_html
from tcompress.reporting.pareto import DENSE, Candidate, FrontReport, front_of, mean_of
from tcompress.reporting.tree import ModelReport, main_metrics
from tcompress.search.search import Statistics
from tcompress.timing_model.clocks import REPEATS, Workload
from tcompress.training.setup import check_run
from tcompress.vocabulary.choice import with_vocabulary


@dataclass(frozen=True)
class Cell:
    """One method with one target: what is done and what that will take, or why it is refused."""

    name: str  # such as `svd-25`; also its folder's
    recipe: Recipe
    plan: Plan | None = None
    costs: Estimate | None = None
    refusal: str | None = None
    repeats: str | None = None  # the name that it shares with cells of other seeds

    def to_json(self) -> dict[str, Any]:
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


def cells_of(recipe: Recipe, source: SourceModel, seeds: int | None = None) -> list[Cell]:
    """Lists the cells of a recipe with `sweep`, each with so many seeds.

    Raises:
        PlanError: None can be planned.
        RecipeError: There are to be several seeds, and nothing depends on them.
    """
    cells = _single_cells(recipe, source)
    if seeds is None:
        return cells
    return [
        replace(cell, name=f"{cell.name}{SEED_SUFFIX}{seed}", recipe=repeated, repeats=cell.name)
        for cell in cells
        for seed, repeated in repetitions(cell.recipe, seeds)
    ]


def _single_cells(recipe: Recipe, source: SourceModel) -> list[Cell]:
    cells: list[Cell] = []
    source = with_vocabulary(source, recipe.convert)
    for convert in _conversions(recipe, source):
        if any(cell.recipe.convert == convert for cell in cells):
            continue
        short, taken = short_name(convert), {cell.name for cell in cells}
        # Conversions may differ in what short names leave out.
        names = chain([short], (f"{short}-{number}" for number in count(2)))
        name = next(name for name in names if name not in taken)
        own = {"convert": convert, "name": name, "description": None, "model": source.id}
        own |= {"revision": source.revision, "output": name, "sweep": None, "report": None}
        said = recipe.model_copy(update=own)
        try:
            if convert.speedup is not None:  # beside options that nobody gave together
                read(Convert, convert.model_dump(mode="json"))
            plan = make_plan(convert, source)
        except (PlanError, RecipeError) as error:
            cells.append(Cell(name, said, refusal=error.message))
        else:
            cells.append(Cell(name, said, plan, estimate(plan, source, convert)))
    if all(cell.refusal is not None for cell in cells):
        lines = "".join(f"\n  - {cell.name}: {cell.refusal}" for cell in cells)
        text = f"no cell of the sweep can be done:{lines}"
        raise PlanError(text, "choose other methods or targets")
    return cells


def _conversions(recipe: Recipe, source: SourceModel) -> Iterator[Convert]:
    sweep = recipe.sweep or Sweep()
    if sweep.speedups:
        yield from _at_speeds(recipe.convert, sweep, source)
        return
    for method in sweep.methods or (recipe.convert.method,):
        for target in sorted(sweep.targets, reverse=True):
            spec: Any = method
            if isinstance(method, str):
                spec = _suited(recipe.convert, method, target, source)
            yield recipe.convert.with_target(target, spec)


def bench_of(convert: Convert) -> Bench | None:
    """Timing of models of a conversion to some speed; decoding is timed by `bench` alone."""
    work = Workload.read(convert.at)
    if work.decodes:
        return None
    options: dict[str, Any] = {"batch": (work.batch,), "repeats": REPEATS}
    options |= {name: getattr(convert, name) for name in ("threads", "dtype", "device")}
    named = {"length": (work.length,)} if convert.at else {}
    return Bench.model_validate({**options, **named})


def _at_speeds(convert: Convert, sweep: Sweep, source: SourceModel) -> Iterator[Convert]:
    """One conversion for each method and speed, and fewer blocks beside them."""
    for method in sweep.methods or (convert.method,):
        spec: Any = method
        if isinstance(method, str):
            spec = Convert.model_validate({"method": {"name": method}}).method
        for speed in sorted(sweep.speedups):
            yield convert.model_copy(update={"method": spec, "speedup": speed})
    blocks = len(roles_of(source).blocks)
    fewer = {round(blocks * (1 - 1 / speed)) for speed in sweep.speedups}
    if not convert.changes_depth:
        for count in sorted(min(count, blocks - 1) for count in fewer if count and blocks > 1):
            fewer_blocks = {"drop_layers": count, "at": None, "threads": None}  # without a speed
            yield convert.without_method.model_copy(update=fewer_blocks)


def _suited(convert: Convert, name: str, target: float, source: SourceModel) -> Any:
    """Options of a method that leave room in a target, and as few layers dense as they can."""
    spec = Convert.model_validate({"method": {"name": name}}).method
    assert spec is not None
    if isinstance(spec, AutoSpec):
        return spec

    def dense_layers(item: Any) -> float:
        try:
            return len(make_plan(convert.with_target(target, item), source).left)
        except PlanError:
            return inf

    return min(spec.alone(target), key=dense_layers)


@dataclass(frozen=True)
class Done:
    """A finished cell: its model as converted and, if it was trained, as trained."""

    cell: Cell
    reports: tuple[ModelReport, ...]
    seconds: tuple[float, ...]  # that each model took
    missed: tuple[str, ...] = ()  # thresholds, in words

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.cell.name,
            "status": "done",
            "recipe": sparse(self.cell.recipe),
            "reports": [report.to_json() for report in self.reports],
            "seconds": list(self.seconds),
            "missed": list(self.missed),
        }


@dataclass(frozen=True)
class Stopped:
    """A cell without a result: `refused` by the model, or `failed`; and why, in words."""

    name: str
    status: Literal["refused", "failed"]
    reason: str


@dataclass(frozen=True)
class Swept:
    """Results of a sweep."""

    folder: Path  # with a model for each cell, `sweep.json` and the page
    page: Path  # the HTML report
    model: str  # name of the dense model
    recipe: Recipe  # what was asked for
    front: FrontReport  # all models, the dense one among them, with what each costs
    dense: ModelReport
    cells: tuple[Done, ...]  # finished ones
    stopped: tuple[Stopped, ...] = ()  # the other ones

    @property
    def missed(self) -> bool:
        """True if a threshold was declared, and no cell reaches it."""
        declared = any(item.threshold is not None for item in self.recipe.evaluate)
        return declared and bool(self.cells) and all(done.missed for done in self.cells)

    @property
    def failed(self) -> bool:
        """True if a cell failed, or none is left; a refusal is an answer."""
        return not self.cells or any(item.status == "failed" for item in self.stopped)

    def to_json(self) -> dict[str, Any]:
        return {
            "tool_version": tcompress.__version__,
            "output": str(self.folder),
            "model": self.model,
            "recipe": sparse(self.recipe),
            **self.front.model_dump(mode="json"),
            "stopped": [dict(vars(item)) for item in self.stopped],
            "dense": self.dense.to_json(),
            "cells": [done.to_json() for done in self.cells],
            "html": str(self.page),
        }


def fallback_metric(report: ModelReport) -> Metric:
    """Make the number for quality where no task is measured: an error of the conversion.

    With calibration data it is agreement with the dense model, where that was measured, or the
    error of the last layer, whose input has gone through all others; without, the mean over the
    layers' weights.
    """
    facts = report.calibration
    if facts is not None and facts.agreement:
        protocol: dict[str, Any] = {"task": "agreement", "data": f"{facts.name}, held out"}
        return Metric(name=AGREEMENT, value=fmean(facts.agreement.values()), protocol=protocol)
    protocol = {"task": "conversion", "data": facts.name if facts else None}
    if "held_out" in report.errors:
        last = next(layer for layer in reversed(report.layers) if "held_out" in layer.errors)
        name, value = "held-out error of the last layer", last.errors["held_out"]
        protocol |= {"layer": last.name}
    else:
        kind = next(iter(report.errors))
        name, value = f"mean {kind} error", report.errors[kind]
    return Metric(name=name, value=value, higher_is_better=False, protocol=protocol)


class Model(BaseModel):
    """State of one model of a sweep: kept as a file, so that nothing is measured twice.

    Identities are chained: that of a model covers the weights and the settings that it comes from,
    that of a measurement the model too. A changed setting changes those behind it, and no others.
    """

    model_config = ConfigDict(extra="forbid")

    identity: str  # what it comes from
    report: ModelReport | None = None  # what is known without running it; None before it is made
    seconds: float | None = None  # that making it took
    metrics: dict[str, tuple[Metric, ...]] = Field(default_factory=dict)  # by their key
    speed: dict[str, tuple[Speed, ...]] = Field(default_factory=dict)
    baselines: dict[str, list[dict[str, Any]]] = Field(default_factory=dict)  # the dense model's
    folder: Path = Field(Path(), exclude=True)  # the model's
    path: Path = Field(Path(), exclude=True)  # of the file
    is_new: bool = Field(True, exclude=True)

    @classmethod
    def at(cls, folder: Path, path: Path, identity: str) -> Model:
        """Read what is known; of other settings or by another version it counts as nothing."""
        paths: dict[str, Any] = {"folder": folder, "path": path}
        record = read_record(path, cls.model_validate_json)
        if record is None or record.identity != identity:
            return cls(identity=identity, **paths)
        return record.model_copy(update={**paths, "is_new": False})

    def keep(self) -> None:
        write_text(self.path, self.model_dump_json(indent=1))

    def key(self, settings: BaseModel, *data: str) -> str:
        """Identifies a measurement of this model."""
        return identity_of(self.identity, settings, *data)


def identity_of(origin: str, settings: BaseModel, *data: str) -> str:
    """Identifies a result by the model or weights, the settings and the data that they name."""
    # A threshold only judges a number, and the rest does not change it.
    unseen = {"threshold", "batch_size", "device"} if isinstance(settings, Evaluate) else None
    said = settings.model_dump(mode="json", exclude=unseen)
    parts = (type(settings).__name__, origin, said, [*map(stamp_of, data)])
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def sweep(
    recipe: Recipe,
    source: SourceModel,
    output: Path,
    *,
    force: bool = False,
    token: str | None = None,
    progress: Progress | None = None,
    say: Say = lambda text: None,
    seeds: int | None = None,
) -> Swept:
    """Converts, trains and measures a model in several ways, and compares the results.

    Every cell is an ordinary recipe with a folder of its own in the output, which holds
    `sweep.json` and `sweep.html` too. Run again, only what depends on changed settings is done
    again, and a run that was stopped goes on where it was. A cell that cannot be done is named with
    the reason and does not stop the others; an `InputError` says that none can be done. With
    `force`, all cells are done again, also in a folder that holds something else. With `seeds`
    every cell is done so many times, and the comparison is of means.
    """
    check_recipe(recipe)
    cells = cells_of(recipe, source, seeds)
    folder = Path(output).expanduser().absolute()
    with _claimed(folder, force), TemporaryDirectory(dir=folder / SWEEP) as scratch:
        shared = Statistics(Path(scratch))
        return _Sweep(recipe, source, folder, cells, token, progress or Silent(), say, shared).go()


def check_recipe(recipe: Recipe) -> None:
    """Refuses, before any work, what would fail in the end."""
    if recipe.report is not None:
        check_page(Path(recipe.report).expanduser())
    for item in recipe.evaluate:
        if len(item.runtime) > 1:
            text = f"a sweep measures in one runtime, and `runtime` names {listed(item.runtime)}"
            raise RecipeError(text, "leave one; `tcompress evaluate` takes several")
    if recipe.finetune is not None and not recipe.evaluate:
        raise RecipeError(
            "trained models cannot be compared without a task: errors of layers are known of the "
            "conversion alone",
            "add `evaluate` to the recipe, or `--task` and `--data`",
        )


@contextmanager
def _claimed(folder: Path, force: bool) -> Iterator[None]:
    """Lock the output for this run; if it ends before anything is measured, nothing stays."""
    state = folder / SWEEP
    check_sweep(folder, force=force)
    made = [place for place in (state, *state.parents) if not place.exists()]
    state.mkdir(parents=True, exist_ok=True)
    lock = FileLock(state / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        hint = "wait for it, or choose another output with `-o`"
        raise InputError(f"another sweep is writing `{folder}`", hint) from error
    try:
        for scratch in state.glob("tmp*/"):  # of a sweep that was killed
            remove(scratch)
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


@dataclass
class _Sweep:
    recipe: Recipe
    source: SourceModel
    folder: Path
    cells: Sequence[Cell]
    token: str | None
    progress: Progress
    say: Callable[[str], None]
    statistics: Statistics | None = None
    done: dict[str, Done] = field(default_factory=dict)
    stopped: dict[str, Stopped] = field(default_factory=dict)

    def go(self) -> Swept:
        for cell in self.cells:
            if cell.refusal is not None:
                self.stopped[cell.name] = Stopped(cell.name, "refused", cell.refusal)
        self.dense = self._model(DENSE, self.source.store.fingerprint())
        work = [cell for cell in self.cells if cell.refusal is None]
        lacking = [cell.name for cell in work if self._lacks(self._models(cell))]
        if lacking:
            check_data(data_of(self.recipe))
            if self.recipe.finetune is not None:
                teachers = teachers_of(self.recipe.finetune, self.source, self.token)
                check_run(self.source, teachers, self.recipe.finetune)
        if self.dense.report is None:
            trust = self.source.trust_remote_code
            report = report_of(self.source.folder, trust_remote_code=trust)
            self.dense.report = report.model_copy(update={"name": self.source.id})
        self._measure(self.dense, self.source.folder, DENSE)
        for cell in work:
            if cell.name in lacking:
                self.progress.part(cell.name, lacking.index(cell.name) + 1, len(lacking))
            else:
                self.say(f"`{cell.name}` is already done")
            self._do(cell)
            if cell.name in lacking:
                self._write()  # so that it can be looked at while the others are in work
        return self._write()

    def _model(self, name: str, identity: str) -> Model:
        return Model.at(self.folder / name, self.folder / SWEEP / f"{name}.json", identity)

    def _models(self, cell: Cell) -> list[Model]:
        """The models of a cell: as converted and, if it is trained, as trained."""
        convert, finetune = cell.recipe.convert, cell.recipe.finetune
        weights, data = self.dense.identity, convert.calibration.source
        identity = identity_of(weights, convert, *data)
        models = [self._model(cell.name, identity)]
        if finetune is not None:
            named = [*finetune.data.source, finetune.data.validation or "", *finetune.teacher]
            name = f"{cell.name}-{finetune.task or 'healed'}"
            models.append(self._model(name, identity_of(identity, finetune, *named)))
        return models

    def _do(self, cell: Cell) -> None:
        """Does what a cell lacks; one that fails does not stop the others."""
        models = self._models(cell)
        try:
            for model in models:
                if model.is_new:  # its folder may hold what other settings have made
                    remove_model(model.folder)
                    model.keep()
            if self._lacks(models):
                self._make(cell, models)
                for model in models:
                    self._measure(model, model.folder, cell.name)
                self._time(models[-1], cell.name)
            wanted, last = self.recipe.evaluate, models[-1]
            found = [last.metrics[last.key(item, *item.data)] for item in wanted]
            words = tuple(text for text in map(missed, wanted, found) if text)
            seconds = tuple(model.seconds or 0.0 for model in models)
            self.done[cell.name] = Done(cell, tuple(map(self._report, models)), seconds, words)
        except (InputError, FitError, TrainingError, RuntimeError) as error:
            # A `RuntimeError` is of torch, such as memory that does not suffice.
            why = error.message if isinstance(error, TCompressError) else first_line(error)
            status: Any = "refused" if isinstance(error, PlanError) else "failed"
            self.stopped[cell.name] = Stopped(cell.name, status, why)
        if self.recipe.sweep is not None and not self.recipe.sweep.keep_models:
            for model in models:
                with suppress(InputError):  # it holds something of the user's
                    remove_model(model.folder)

    def _lacks(self, models: Sequence[Model]) -> bool:
        keep = self.recipe.sweep is None or self.recipe.sweep.keep_models
        gone = keep and not all((model.folder / "config.json").is_file() for model in models)
        known = all(m.report is not None and not self._unmeasured(m) for m in models)
        return gone or not known or self._untimed(models[-1]) is not None

    def _unmeasured(self, model: Model) -> list[tuple[Evaluate, str]]:
        keyed = [(item, model.key(item, *item.data)) for item in self.recipe.evaluate]
        return [(item, key) for item, key in keyed if key not in model.metrics]

    def _untimed(self, model: Model) -> str | None:
        key = None if self.recipe.bench is None else model.key(self.recipe.bench)
        return None if key in model.speed else key

    def _make(self, cell: Cell, models: Sequence[Model]) -> None:
        """Converts and trains, as far as that is not done; the folders are the sweep's own."""
        said = cell.recipe.model_copy(update={"evaluate": (), "bench": None})
        place: dict[str, Any] = {"converted": models[0].folder, "force": True}
        heard: dict[str, Any] = {"progress": self.progress, "say": self.say}
        known: dict[str, Any] = {"token": self.token, "statistics": self.statistics}
        run_recipe(said, self.source, models[-1].folder, **known, **place, **heard)
        for model in models:
            found = report_of(model.folder, trust_remote_code=self.source.trust_remote_code)
            model.report = found.model_copy(update={"metrics": (), "speed": ()})
            manifest = read_manifest(model.folder)
            assert manifest is not None  # the conversion wrote it
            model.seconds = [manifest.seconds, *(run.seconds for run in found.training)][-1]
            model.keep()

    def _measure(self, model: Model, folder: Path, name: str) -> None:
        """Measures what is not known of a model, beside the numbers of the dense one."""
        how: dict[str, Any] = {"token": self.token, "progress": self.progress}
        how["trust_remote_code"] = self.source.trust_remote_code
        for item, key in self._unmeasured(model):
            is_dense = model is self.dense  # which is compared with nothing
            dense = () if is_dense else self.dense.baselines[self.dense.key(item, *item.data)]
            scores = evaluate([folder], item, baseline=[*map(Baseline.of_json, dense)], **how)[0]
            if is_dense:
                named = [replace(own, name=self.source.id) for own in scores.baseline]
                model.baselines[key] = [own.to_json() for own in named]
            else:
                self._tell(name, scores.notes)
            model.metrics[key] = scores.metrics
            model.keep()

    def _time(self, model: Model, name: str) -> None:
        untimed = self._untimed(model)
        if self.recipe.bench is not None and untimed is not None:
            timed = time_passes(self.recipe.bench, model.folder, self.source, self.progress)
            self._tell(name, timed.notes)
            model.speed[untimed] = timed.speed
            model.keep()

    def _tell(self, name: str, notes: Sequence[str]) -> None:
        for note in notes:
            self.say(f"`{name}`: {note}")

    def _report(self, model: Model) -> ModelReport:
        """The report of a model with the numbers that this recipe asks for, and no others."""
        report, bench = model.report, self.recipe.bench
        assert report is not None
        keys = [model.key(item, *item.data) for item in self.recipe.evaluate]
        metrics = [metric for key in keys for metric in model.metrics[key]]
        if not metrics and (report.layers or (report.calibration and report.calibration.agreement)):
            metrics = [fallback_metric(report)]
        times = () if bench is None else model.speed.get(model.key(bench), ())
        return report.model_copy(update={"metrics": tuple(metrics), "speed": times})

    def _write(self) -> Swept:
        done, names = tuple(self.done.values()), [cell.name for cell in self.cells]
        stopped = tuple(self.stopped[name] for name in names if name in self.stopped)
        dense = self._report(self.dense)
        if done and not dense.metrics:  # others have an error, or agreement: it loses nothing
            best = [
                metric.model_copy(update={"value": float(metric.higher_is_better)})
                for metric in done[0].reports[-1].metrics
            ]
            dense = dense.model_copy(update={"metrics": tuple(best)})
        candidates = [Candidate(DENSE, dense), *_candidates(done)]
        front = front_of(candidates)
        page = Path(self.recipe.report or self.folder / "sweep.html").expanduser()
        found = Swept(self.folder, page, self.source.id, self.recipe, front, dense, done, stopped)
        text = json.dumps({"schema": 1, **found.to_json()}, indent=2, ensure_ascii=False)
        write_text(self.folder / "sweep.json", text)
        reports = {item.name: (item.report, *item.repeats) for item in candidates}
        write_html([report for row in front.rows for report in reports[row.name]], page)
        return found


def _candidates(done: Sequence[Done]) -> Iterator[Candidate]:
    """Finished cells; those of several seeds are one."""
    alike = grouped(done, lambda item: item.cell.repeats or item.cell.name)
    for name, items in alike.items():
        before = [main_metrics(item.reports)[0] for item in items if len(item.reports) > 1]
        first, *repeats = (item.reports[-1] for item in items)
        seconds = sum(sum(item.seconds) for item in items)
        yield Candidate(name, first, mean_of(before), seconds, tuple(repeats))
