"""A whole recipe: convert, train, measure, time, report. What is done is not done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tcompress.artifact.manifest import Manifest, read_manifest
from tcompress.artifact.reader import open_checked
from tcompress.artifact.workplace import check_output, tidy
from tcompress.conversion.converter import convert
from tcompress.data.tables import check_data
from tcompress.errors import InputError, Problems
from tcompress.evaluation.measuring import check_measurement, evaluate
from tcompress.evaluation.scores import Baseline, ModelScores, Threshold
from tcompress.hf.opening import pick_device
from tcompress.latency.benchmark import Bench, bench
from tcompress.models import SourceModel
from tcompress.options import Bench as BenchOptions
from tcompress.options import Evaluate, Recipe
from tcompress.progress import Progress, Silent
from tcompress.reporting.model_report import reports_of
from tcompress.reporting.page import check_target, write_html
from tcompress.reporting.tree import ModelReport
from tcompress.training.finetuning import finetune
from tcompress.training.setup import check_run
from tcompress.training.teacher import find_teacher

Say = Callable[[str], None]

_AGAIN = "; `--force` does it again"


@dataclass
class Outcome:
    """What a recipe has produced.

    Attributes:
        folder: The finished model.
        converted: The model before training; the same if nothing was trained.
        reports: Reports on the dense model, the converted one, and the trained one.
        scores: Numbers by measurement, in the order of the recipe.
        benches: Times.
        page: The HTML report, if one was asked for.
        missed: Measurements whose threshold was missed, in words.
        skipped: Stages that were already done.
    """

    folder: Path
    converted: Path
    reports: list[ModelReport] = field(default_factory=list)
    scores: list[list[ModelScores]] = field(default_factory=list)
    benches: tuple[Bench, ...] = ()
    page: Path | None = None
    missed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether the finished model was there before."""
        return ("convert" if self.converted == self.folder else "finetune") in self.skipped

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        from tcompress.evaluation.scores import document

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
    say: Say | None = None,
) -> Outcome:
    """Does everything that a recipe says.

    Where something is trained, the converted model is kept beside the result. Run again, finished
    stages are not repeated.

    Args:
        recipe: What to do.
        source: The dense model.
        output: Folder of the finished model.
        converted: Folder of the model before training; default the output's name and `-converted`.
        force: Replace folders that hold something else.
        again: Do finished stages again.
        token: Access token for the hub.
        progress: Hears how far it is.
        say: Hears of what the user should know.

    Raises:
        InputError: Something in the recipe cannot be used; the message says what to do.
    """
    output = Path(output).expanduser().absolute()
    before = output
    if recipe.finetune is not None:
        before = converted or output.with_name(f"{output.name}-converted")
    outcome = Outcome(output, before)
    run = _Run(recipe, source, outcome, force, again, token, progress or Silent(), say or _mute)
    run.check()
    run.convert()
    run.finetune()
    run.measure()
    trained = [] if outcome.converted == outcome.folder else [outcome.folder]
    models = [str(source.folder), str(outcome.converted), *map(str, trained)]
    if source.seed is not None:  # there was nothing before the training
        models = models[-1:]
    outcome.reports = reports_of(models, trust_remote_code=source.trust_remote_code)
    if recipe.report is not None:
        outcome.page = write_html(outcome.reports, Path(recipe.report))
    return outcome


def data_of(recipe: Recipe, *, converts: bool = True, trains: bool = True) -> list[str]:
    """Lists the names of all data that a recipe reads.

    Args:
        recipe: The recipe.
        converts: Whether the conversion is still to be done.
        trains: Whether the training is.
    """
    names = [recipe.convert.calibration.source] if converts else []
    if recipe.finetune is not None and trains:
        data = recipe.finetune.data
        names += [*data.source, *([] if data.validation is None else [data.validation])]
    return [*names, *(item.data for item in recipe.evaluate)]


def teacher_of(recipe: Recipe, source: SourceModel, token: str | None) -> SourceModel | None:
    """Opens the model that will be imitated, before there is one that imitates it.

    Args:
        recipe: What will be done.
        source: The dense model.
        token: Access token for the hub.

    Raises:
        SourceError: There is no such model.
    """
    name = recipe.finetune.teacher if recipe.finetune is not None else "none"
    if name == "source":
        return source if source.seed is None else None
    return find_teacher(name, None, token, trust=source.trust_remote_code)


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

    def check(self) -> None:
        """Refuses, before any work, what would fail in the end; names all problems."""
        problems, recipe = Problems(), self.recipe
        converted = self._is_converted()
        trains = recipe.finetune is not None and not self._is_trained()
        if recipe.report is not None:
            with problems.collected():
                check_target(Path(recipe.report).expanduser())
        for item in recipe.evaluate:
            with problems.collected():
                if item.threshold is not None:
                    self._check_bound(Threshold.parse(item.threshold), item.threshold)
        with problems.collected():
            check_data(data_of(recipe, converts=not converted, trains=trains))
        for folder, wanted in (
            (self.outcome.converted, not converted),
            (self.outcome.folder, trains),
        ):
            with problems.collected():
                if wanted:
                    check_output(folder, force=self.force)
        teacher = None
        with problems.collected():
            pick_device(recipe.convert.device)
            teacher = teacher_of(recipe, self.source, self.token) if trains else None
        problems.report()
        # What takes reading: all of it is there.
        with problems.collected():
            if trains and recipe.finetune is not None:
                check_run(self.source, teacher, recipe.finetune)
        for item in recipe.evaluate:
            with problems.collected():
                check_measurement(item, self.source, heads=self.source.seed is None)
        problems.report()

    def _check_bound(self, bound: Threshold, text: str) -> None:
        if bound.relative and self.source.seed is not None:
            raise InputError(
                f"`threshold: {text}` compares with the dense model, but a model that begins at "
                "random has none",
                "give a plain number, such as `threshold: 0.8`",
            )

    def convert(self) -> None:
        """Converts, unless that is done."""
        if self._is_converted():
            self.outcome.skipped.append("convert")
            tidy(self.outcome.converted)
            self.say(f"`{self.outcome.converted.name}` is already converted{_AGAIN}")
            return
        convert(
            self.source,
            self.recipe.convert,
            self.outcome.converted,
            force=self.force,
            progress=self.progress,
            paper=self.recipe.paper,
        )

    def finetune(self) -> None:
        """Trains, unless that is done or not asked for."""
        options = self.recipe.finetune
        if options is None:
            return
        if self._is_trained():
            self.outcome.skipped.append("finetune")
            tidy(self.outcome.folder)
            self.say(f"`{self.outcome.folder.name}` is already trained{_AGAIN}")
            return
        finetune(
            self._open(self.outcome.converted),
            options,
            self.outcome.folder,
            force=self.force,
            token=self.token,
            progress=self.progress,
            say=self.say,
        )

    def measure(self) -> None:
        """Measures all models on all tasks, then their speed."""
        made = list(dict.fromkeys([self.outcome.converted, self.outcome.folder]))
        # Of a model that began at random only the trained one knows anything.
        models = made[-1:] if self.source.seed is not None else [self.source.folder, *made]
        for item in self.recipe.evaluate:
            scores = measure(
                item, models, token=self.token, trust=self._trusts, progress=self.progress
            )
            self.outcome.scores.append(scores)
            self._check_threshold(item, scores[-1])
        if self.recipe.bench is not None:
            folder = self.outcome.folder
            found = time_passes(self.recipe.bench, folder, self.source, self.progress)
            self.outcome.benches = (found,)

    def _check_threshold(self, item: Evaluate, scores: ModelScores) -> None:
        if item.threshold is None:
            return
        bound, main = Threshold.parse(item.threshold), scores.metrics[0]
        if bound.missed(main):
            self.outcome.missed.append(f"{item.task} {main.name} {main.value:.4f}, not {bound}")

    @property
    def _trusts(self) -> bool:
        return self.source.trust_remote_code

    def _open(self, folder: Path) -> SourceModel:
        return open_checked(str(folder), trust=self._trusts)

    def _is_converted(self) -> bool:
        manifest = None if self.again else _manifest(self.outcome.converted)
        return (
            manifest is not None
            and not manifest.training  # a trained model is no conversion
            and manifest.recipe == self.recipe.convert.model_dump(mode="json")
            and manifest.source.fingerprint == self.source.store.fingerprint()
        )

    def _is_trained(self) -> bool:
        options = self.recipe.finetune
        manifest = None if self.again else _manifest(self.outcome.folder)
        if options is None or manifest is None or not manifest.training:
            return False
        wanted = options.model_dump(mode="json", exclude_defaults=True)
        return (
            manifest.training[-1].settings == wanted
            and manifest.recipe == self.recipe.convert.model_dump(mode="json")
            and manifest.source.fingerprint == self.source.store.fingerprint()
        )


def measure(
    item: Evaluate,
    models: Sequence[Path],
    baseline: Baseline | None = None,
    *,
    token: str | None = None,
    trust: bool = False,
    progress: Progress | None = None,
) -> list[ModelScores]:
    """Does one measurement of a recipe.

    Args:
        item: What is measured.
        models: Folders; the first one is what others are compared with.
        baseline: What they are compared with instead, if it was measured before.
        token: Access token for the hub.
        trust: Whether code that comes with a model may run.
        progress: Hears how far it is.
    """
    return evaluate(
        models,
        item,
        baseline=baseline,
        token=token,
        trust_remote_code=trust,
        progress=progress,
    )


def time_passes(
    wanted: BenchOptions, folder: Path, source: SourceModel, progress: Progress | None = None
) -> Bench:
    """Times a model beside its dense source, as a recipe says."""
    against = str(source.folder) if source.seed is None else None
    trust = source.trust_remote_code
    found = bench([str(folder)], against, wanted, progress=progress, trust_remote_code=trust)
    return found[0]


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except InputError:
        return None


def _mute(text: str) -> None:
    pass
