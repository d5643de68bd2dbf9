"""A whole recipe: convert, train, measure, time, report. What is done is not done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from tcompress.artifact.averages import main_of
from tcompress.artifact.checksums import changed_since
from tcompress.artifact.manifest import Manifest, Metric, read_manifest
from tcompress.artifact.reader import open_checked
from tcompress.artifact.workplace import check_output, tidy
from tcompress.conversion.converter import convert
from tcompress.data.tables import check_data
from tcompress.errors import InputError, Problems, listed
from tcompress.evaluation.measuring import check_measurement, evaluate
from tcompress.evaluation.scores import ModelScores, Threshold, document
from tcompress.files import check_page
from tcompress.hf.opening import pick_device
from tcompress.latency.benchmark import Bench, bench
from tcompress.models import SourceModel
from tcompress.models.names import adapter_files
from tcompress.options import Bench as BenchOptions
from tcompress.options import Convert, Evaluate, Finetune, Recipe
from tcompress.options.load import SEED_SUFFIX, repetitions
from tcompress.options.schema import data_of, kept_beside
from tcompress.progress import Progress, Silent
from tcompress.reporting.model_report import reports_of
from tcompress.reporting.over_seeds import seed_groups
from tcompress.reporting.page import write_html
from tcompress.reporting.tree import ModelReport
from tcompress.search.search import Statistics
from tcompress.training.finetuning import finetune
from tcompress.training.setup import check_run
from tcompress.training.teacher import find_teachers

Say = Callable[[str], None]


@dataclass
class Outcome:
    """Models, numbers and reports that a recipe has produced."""

    folder: Path
    converted: Path  # the model before training; the same if nothing was trained
    reports: list[ModelReport] = field(default_factory=list)  # dense, converted, trained
    scores: list[list[ModelScores]] = field(default_factory=list)  # by measurement
    benches: tuple[Bench, ...] = ()
    page: Path | None = None  # the HTML report, if one was asked for
    missed: list[str] = field(default_factory=list)  # thresholds, in words
    skipped: list[str] = field(default_factory=list)  # stages that were already done

    @property
    def kept(self) -> bool:
        """True if the finished model was there before."""
        return ("convert" if self.converted == self.folder else "finetune") in self.skipped

    def to_json(self) -> dict[str, Any]:
        return {
            "output": str(self.folder),
            "converted": str(self.converted),
            "reports": [report.to_json() for report in self.reports],
            "evaluations": [document(scores) for scores in self.scores],
            "benches": [item.model_dump(mode="json") for item in self.benches],
            "html": None if self.page is None else str(self.page),
            "missed": self.missed,
            "skipped": self.skipped,
        }


def run_recipe(
    recipe: Recipe,
    source: SourceModel,
    output: Path,
    *,
    converted: Path | None = None,
    force: bool = False,
    again: bool = False,
    token: str | None = None,
    progress: Progress | None = None,
    say: Say = lambda text: None,
    statistics: Statistics | None = None,
) -> Outcome:
    """Does everything that a recipe says.

    Where something is trained, the converted model is kept beside the result; by default its folder
    has the output's name and `-converted`. Run again, finished stages are not repeated, unless
    `again` says so. With `force`, folders that hold something else are replaced, and models whose
    data has changed since.
    """
    output = Path(output).expanduser().absolute()
    before = output
    if recipe.finetune is not None:
        before = converted or kept_beside(output, "converted")
    outcome = Outcome(output, before)
    heard = (progress or Silent(), say)
    run = _Run(recipe, source, outcome, force, again, token, *heard, statistics)
    run.check()
    run.make()
    run.measure()
    outcome.reports = reports_of(run.models, trust_remote_code=source.trust_remote_code)
    if recipe.report is not None:
        outcome.page = write_html(outcome.reports, Path(recipe.report))
    return outcome


@dataclass(frozen=True)
class Repeated:
    """Results of a recipe with several seeds."""

    outcomes: tuple[Outcome, ...]  # in the order of the seeds
    page: Path | None = None  # the HTML report, if one was asked for

    @property
    def reports(self) -> list[ModelReport]:
        """The dense model, where there is one, and the finished model of each seed."""
        first = self.outcomes[0].reports
        dense = first[:1] if len(first) > 1 else []
        return [*dense, *(outcome.reports[-1] for outcome in self.outcomes)]

    @property
    def missed(self) -> list[str]:
        """Thresholds, in words, each with the folder that misses it."""
        return [f"{item.folder.name}: {text}" for item in self.outcomes for text in item.missed]

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": [outcome.to_json() for outcome in self.outcomes],
            "seeds": [group.to_json() for group in seed_groups(self.reports)],
            "html": None if self.page is None else str(self.page),
            "missed": self.missed,
        }


def run_seeds(
    recipe: Recipe, source: SourceModel, output: Path, count: int, **options: Any
) -> Repeated:
    """Do everything that a recipe says with each of so many seeds, one after another.

    Each seed has folders of its own, named after it, so that run again only what is missing is
    done. `options` are those of `run_recipe`. The page shows the finished models of all seeds.
    """
    output = Path(output).expanduser().absolute()
    progress: Progress = options.get("progress") or Silent()
    outcomes = []
    for number, (seed, said) in enumerate(repetitions(recipe, count), 1):
        progress.part(f"seed {seed}", number, count)
        begun = source if source.seed is None else source.at_random(said.convert.seed)
        folder = output.with_name(f"{output.name}{SEED_SUFFIX}{seed}")
        said = said.model_copy(update={"report": None})
        outcomes.append(run_recipe(said, begun, folder, **options))
    done = Repeated(tuple(outcomes))
    if recipe.report is None:
        return done
    return replace(done, page=write_html(done.reports, Path(recipe.report)))


def teachers_of(training: Finetune, source: SourceModel, token: str | None) -> list[SourceModel]:
    """Opens the models that will be imitated, before there is one that imitates them."""
    dense, trust = source if source.seed is None else None, source.trust_remote_code
    return find_teachers(training.teacher, None, token, trust=trust, dense=dense)


def dense_folder(source: SourceModel) -> Path:
    """The folder that opens as the dense model, by a name that results can keep.

    That is the one that was given; what an adapter was merged into is in its copy alone.
    """
    folder = source.origin or source.folder
    return source.folder if adapter_files(folder) else folder


def missed(item: Evaluate, metrics: Sequence[Metric]) -> str | None:
    """Says how a model's numbers miss the threshold of their measurement, if they do."""
    bound = None if item.threshold is None else Threshold.parse(item.threshold)
    main = main_of(metrics, several=len(item.data) > 1)
    if bound is None or main is None or not bound.missed(main):
        return None
    return f"{item.task} {main.label} {main.value:.4f}, not {bound}"


def time_passes(
    wanted: BenchOptions, folder: Path, source: SourceModel, progress: Progress | None = None
) -> Bench:
    """Times a model beside its dense source, as a recipe says."""
    against = str(dense_folder(source)) if source.seed is None else None
    trust = source.trust_remote_code
    return bench([str(folder)], against, wanted, progress=progress, trust_remote_code=trust)[0]


@dataclass
class _Run:
    recipe: Recipe
    source: SourceModel
    outcome: Outcome
    force: bool
    again: bool
    token: str | None
    progress: Progress
    say: Say
    statistics: Statistics | None = None
    made: dict[Path, bool] = field(default_factory=dict)
    """Whether folders were made before; large data takes seconds to look at."""

    @property
    def models(self) -> list[Path]:
        """All models; of one that began at random only the trained one knows anything."""
        made = list(dict.fromkeys([self.outcome.converted, self.outcome.folder]))
        return made[-1:] if self.source.seed is not None else [dense_folder(self.source), *made]

    @property
    def _pretrained(self) -> Path:
        return kept_beside(self.outcome.folder, "pretrained")

    @property
    def _trainings(self) -> list[Finetune]:
        both = (self.recipe.pretrain, self.recipe.finetune)
        return [training for training in both if training is not None]

    def check(self) -> None:
        """Refuses, before any work, what would fail in the end; names all problems."""
        problems, recipe = Problems(), self.recipe
        converts = not self._is_made(self.outcome.converted)
        trains = recipe.finetune is not None and not self._is_made(self.outcome.folder)
        written = [(self.outcome.converted, converts), (self.outcome.folder, trains)]
        if recipe.pretrain is not None:
            written.append((self._pretrained, trains and not self._is_made(self._pretrained)))
        if recipe.report is not None:
            with problems.collected():
                check_page(Path(recipe.report).expanduser())
        for item in recipe.evaluate:
            with problems.collected():
                bound = None if item.threshold is None else Threshold.parse(item.threshold)
                if bound is not None and bound.relative and self.source.seed is not None:
                    raise InputError(
                        f"`threshold: {item.threshold}` compares with the dense model, but a model "
                        "that begins at random has none",
                        "give a plain number, such as `threshold: 0.8`",
                    )
        with problems.collected():
            check_data(data_of(recipe, converts=converts, trains=trains))
        for folder, lacks in written:
            with problems.collected():
                if lacks:
                    check_free(folder, force=self.force)
        runs: list[tuple[Finetune, list[SourceModel]]] = []
        with problems.collected():
            pick_device(recipe.convert.device)
            for training in self._trainings if trains else ():
                runs.append((training, teachers_of(training, self.source, self.token)))
        problems.report()
        # What takes reading: all of it is there.
        for training, teachers in runs:
            with problems.collected():
                check_run(self.source, teachers, training)
        for item in recipe.evaluate:
            with problems.collected():
                check_measurement(item, self.source, heads=self.source.seed is None)
        problems.report()

    def make(self) -> None:
        """Converts and trains, as far as that is asked for and not done."""
        recipe, outcome, source = self.recipe, self.outcome, self.source
        shared: dict[str, Any] = {"force": self.force, "progress": self.progress}
        if not self._is_done("convert", outcome.converted, "converted"):
            own: dict[str, Any] = {"paper": recipe.paper, "statistics": self.statistics}
            convert(source, recipe.convert, outcome.converted, **own, **shared)
        options, folder = recipe.finetune, outcome.folder
        if options is not None and not self._is_done("finetune", folder, "trained"):
            begun = outcome.converted
            if recipe.pretrain is not None:
                begun = self._pretrained
                if not self._is_done("pretrain", begun, "pretrained"):
                    model = open_checked(str(outcome.converted), trust=source.trust_remote_code)
                    how: dict[str, Any] = {"token": self.token, "say": self.say, **shared}
                    finetune(model, recipe.pretrain, begun, **how)
            model = open_checked(str(begun), trust=source.trust_remote_code)
            finetune(model, options, folder, token=self.token, say=self.say, **shared)

    def measure(self) -> None:
        """Measures all models on all tasks, then their speed."""
        shared: dict[str, Any] = {"token": self.token, "progress": self.progress}
        trust, outcome = self.source.trust_remote_code, self.outcome
        for item in self.recipe.evaluate:
            scores = evaluate(self.models, item, trust_remote_code=trust, **shared)
            outcome.scores.append(scores)
            for note in dict.fromkeys(note for model in scores for note in model.notes):
                self.say(f"warning: {item.task}: {note}")
            for own in scores[-len(item.runtime) :]:  # of the last model, in each runtime
                words = missed(item, own.metrics)
                outcome.missed += [] if words is None else [words]
        if (wanted := self.recipe.bench) is not None:
            found = time_passes(wanted, outcome.folder, self.source, self.progress)
            outcome.benches = (found,)

    def _is_done(self, stage: str, folder: Path, word: str) -> bool:
        """Return whether a model is made, and remove what an interrupted run left beside it."""
        done = self._is_made(folder)
        if done:
            self.outcome.skipped.append(stage)
            tidy(folder)
            self.say(f"`{folder.name}` is already {word}; `--force` does it again")
        return done

    def _is_made(self, folder: Path) -> bool:
        """Return whether a folder holds what this recipe makes there, of the same weights."""
        if folder not in self.made:
            runs = [] if folder == self.outcome.converted else self._trainings
            runs = runs[:1] if folder == self._pretrained else runs
            made = not self.again and is_made(folder, self.source, self.recipe.convert, runs)
            self.made[folder] = made
        return self.made[folder]


def is_made(
    folder: Path, source: SourceModel, recipe: Convert, runs: Sequence[Finetune] = ()
) -> bool:
    """Return whether a folder holds what a conversion and trainings make of a model's weights.

    Local data counts as it is now, where it still is, and where the model says what it was.
    """
    manifest = _manifest(folder)
    if manifest is None:
        return False
    trained = [run.settings for run in manifest.training]
    return (
        # A trained model is no conversion.
        trained == [run.model_dump(mode="json", exclude_defaults=True) for run in runs]
        and manifest.recipe == recipe.model_dump(mode="json")
        and manifest.source.fingerprint == source.store.fingerprint()
        and not _changed_data(manifest)
    )


def check_free(folder: Path, *, force: bool) -> None:
    """Refuse a folder that is not empty, as `check_output`; say so if its data has changed.

    Raises:
        InputError: Something is there, and may not be replaced.
    """
    manifest = None if force else _manifest(folder)
    if manifest is not None and (names := _changed_data(manifest)):
        raise InputError(
            f"{listed(names)} changed after `{folder}` was made of it",
            f"do all of it again with `--force`, remove `{folder.name}` to make that alone, or "
            "choose another folder with `-o`",
        )
    check_output(folder, force=force)


def _manifest(folder: Path) -> Manifest | None:
    """Return what is recorded of a model; None if that is nothing, or damaged."""
    with suppress(InputError):
        return read_manifest(folder)
    return None


def _changed_data(manifest: Manifest) -> list[str]:
    """List the files and folders of data that a model was made of, and that are others now."""
    stages = [manifest.calibration.files, *(run.files for run in manifest.training)]
    return [*dict.fromkeys(chain.from_iterable(map(changed_since, stages)))]
