"""The tasks by name, and measuring models on one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import tcompress
from tcompress.artifact.manifest import environment
from tcompress.artifact.reader import open_checked
from tcompress.data.examples import Examples, load_examples
from tcompress.data.tables import check_data
from tcompress.errors import InputError, Problems
from tcompress.evaluation.embedding_tasks import ResponseSelection, Retrieval, Similarity
from tcompress.evaluation.labelled_tasks import (
    Classification,
    Forecasting,
    ImageClassification,
    VolumeClassification,
)
from tcompress.evaluation.language_modeling import MaskedLM, Perplexity
from tcompress.evaluation.scores import Baseline, Measured, ModelScores, store
from tcompress.evaluation.task_base import Prepared, Task
from tcompress.hf.opening import load_model, pick_device, pick_dtype
from tcompress.models import SourceModel
from tcompress.models.names import local_folder
from tcompress.options import Evaluate
from tcompress.progress import Progress, Silent

# The tasks by name.


TASKS: dict[str, type[Task]] = {
    kind.name: kind
    for kind in (
        Classification,
        Similarity,
        Perplexity,
        MaskedLM,
        ImageClassification,
        VolumeClassification,
        Forecasting,
        Retrieval,
        ResponseSelection,
    )
}


def find_task(name: str, **options: Any) -> Task:
    """Gives a task.

    Args:
        name: Its name.
        **options: Its options; None stands for the default.

    Raises:
        InputError: There is no such task, or it has no such option.
    """
    if name not in TASKS:
        known = ", ".join(f"`{task}`" for task in TASKS)
        close = get_close_matches(name, list(TASKS), 1)
        raise InputError(
            f"unknown task `{name}`; tasks are {known}",
            f"did you mean `{close[0]}`?" if close else "choose one of them",
        )
    kind = TASKS[name]
    given = {option: value for option, value in options.items() if value is not None}
    known_options = {field.name for field in dataclasses.fields(kind)}
    for option in given:
        if option not in known_options:
            raise InputError(
                f"the task `{name}` has no option `--{option}`", f"leave out `--{option}`"
            )
    return kind(**given)


# Measuring models on a task.


@dataclass(frozen=True)
class _Run:
    """What is the same for all models."""

    wanted: Evaluate
    task: Task
    examples: Examples
    max_length: int | None
    dtype: torch.dtype | None
    device: torch.device
    split: str | None
    progress: Progress

    def protocol(self, model: PreTrainedModel, prepared: Prepared) -> dict[str, Any]:
        """Everything needed to measure again."""
        return {
            "task": self.task.name,
            "data": self.examples.name,
            "data_fingerprint": self.examples.fingerprint,
            "split": self.split,
            "examples": len(self.examples),
            "max_length": self.max_length,
            "batch_size": self.wanted.batch_size or prepared.batch_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(self.device),
            "seed": self.wanted.seed,
            "bootstrap": self.wanted.bootstrap,
            **prepared.facts,
            "versions": {"tcompress": tcompress.__version__, **environment()},
        }


def evaluate(
    models: Sequence[str | Path],
    wanted: Evaluate,
    *,
    baseline: str | Path | Baseline | None = None,
    save: bool = True,
    token: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> list[ModelScores]:
    """Measures models on the same examples, and compares them with one of them.

    Args:
        models: Converted or dense models: folders, short names or hub ids.
        wanted: What is measured. Of the longest text the model with the fewest positions decides
            for all.
        baseline: Model to compare with; default the first one. One that is not among the models is
            measured before them; one that was measured before, as `ModelScores.baseline` has it,
            is not measured again.
        save: Write the numbers into the manifests of converted models in local folders.
        token: Access token for the hub.
        trust_remote_code: Whether Python code that comes with a model may run.
        progress: Hears how far it is.

    Returns:
        Numbers of each model, in the order of the models.

    Raises:
        InputError: A model, the data or an option cannot be used; the message says what to do.
    """
    problems = Problems()
    names = [str(name) for name in models]
    known = baseline if isinstance(baseline, Baseline) else None
    first = names[0] if baseline is None or known else str(baseline)
    names = names if first in names else [first, *names]
    sources: dict[str, SourceModel] = {}
    for name in names:
        with problems.collected():
            sources[name] = open_checked(name, token=token, trust=trust_remote_code)
    with problems.collected():
        check_data([wanted.data])
    with problems.collected():
        kind = pick_dtype(wanted.dtype)
    with problems.collected():
        where = pick_device(wanted.device)
    problems.report()
    task = task_of(wanted)
    examples = examples_of(wanted, task, [*sources.values()])
    whole = examples.whole and Path(wanted.data).expanduser().is_file()
    run = _Run(
        wanted=wanted,
        task=task,
        examples=examples,
        max_length=_common_length(task, examples, sources.values(), wanted.max_length),
        dtype=kind,
        device=where,
        split=None if whole else wanted.split,
        progress=progress or Silent(),
    )
    if known is not None:
        return [_measure(run, name, sources[name], known, save=save) for name in names]
    return _measure_all(run, names, sources, first, save=save)


def task_of(wanted: Evaluate) -> Task:
    """Returns the task of a measurement."""
    return find_task(wanted.task, pack=wanted.pack, candidates=wanted.candidates)


def examples_of(wanted: Evaluate, task: Task, sources: Sequence[SourceModel]) -> Examples:
    """Reads the data of a measurement."""
    needs = task.needs_for(sources)
    return load_examples(
        wanted.data,
        wanted.split,
        needs,
        columns=wanted.columns,
        limit=wanted.limit,
        seed=wanted.seed,
    )


def check_measurement(item: Evaluate, source: SourceModel, *, heads: bool) -> None:
    """Reads the data of a measurement and holds it to a model, as measuring does.

    Args:
        item: What is to be measured.
        source: The model, or the one that it will be made from.
        heads: Whether the model must be able to do the task as it is.

    Raises:
        InputError: The data, a device or an option cannot be used.
    """
    pick_device(item.device)
    task = task_of(item)
    examples = examples_of(item, task, [source])
    if heads:
        _common_length(task, examples, [source], item.max_length)


def prepare(
    task: str,
    source: SourceModel,
    examples: Examples,
    max_length: int | None = None,
    *,
    seed: int = 0,
    **options: Any,
) -> Prepared:
    """Writes examples as a model's inputs, to measure it repeatedly with `Prepared.score`.

    Args:
        task: Name of the task.
        source: The model that tokenizer or image processor are taken from.
        examples: Examples with what the task needs.
        max_length: Longest text in tokens; default by task.
        seed: Seed of all random choices.
        **options: Options of the task.

    Raises:
        InputError: The examples cannot be used with the model.
    """
    return find_task(task, **options).prepare(source, examples, max_length, seed)


def score_model(
    model: PreTrainedModel,
    source: SourceModel,
    task_name: str,
    examples: Examples,
    *,
    batch_size: int | None = None,
    max_length: int | None = None,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Measures a model in memory once; gives its numbers by name, the main one first."""
    prepared = prepare(task_name, source, examples, max_length)
    return prepared.score(model, batch_size=batch_size, device=device)


def _common_length(
    task: Task, examples: Examples, sources: Any, max_length: int | None
) -> int | None:
    """Checks all models before work begins, and gives the length that suits all."""
    lengths = []
    for source in sources:
        with _about(source):
            task.check(source, examples)
            lengths.append(task.limit(source, max_length))
    return min((length for length in lengths if length is not None), default=None)


def _measure_all(
    run: _Run, names: list[str], sources: Mapping[str, SourceModel], first: str, *, save: bool
) -> list[ModelScores]:
    base_scores = _measure(run, first, sources[first], None, save=save)
    scores, others = [], list(names)
    others.remove(first)
    for name in others:
        scores.append(_measure(run, name, sources[name], base_scores.baseline, save=save))
    scores.insert(names.index(first), base_scores)
    return scores


def _measure(
    run: _Run, name: str, source: SourceModel, baseline: Baseline | None, *, save: bool
) -> ModelScores:
    with _about(source):
        prepared = run.task.prepare(source, run.examples, run.max_length, run.wanted.seed)
        model = load_model(source, dtype=run.dtype, device=run.device)
        run.progress.stage(Path(name).name, prepared.work(model), "inputs")
        start = time.perf_counter()
        statistics = _statistics(run, model, prepared)
        seconds = time.perf_counter() - start
    measured = Measured.of(
        name, statistics, prepared.signature, run.wanted.bootstrap, run.wanted.seed
    )
    metrics = measured.metrics(baseline, run.protocol(model, prepared))
    notes = list(prepared.notes)
    if baseline is not None and prepared.signature != baseline.signature:
        notes.append(f"its tokens are not those of `{baseline.name}`: each reads its own")
    scores = ModelScores(
        name=name,
        metrics=tuple(metrics),
        unit=prepared.unit,
        per_second=prepared.units / seconds,
        notes=tuple(notes),
        baseline=measured.baseline,
    )
    # A folder in the hub's cache is not the user's to change.
    if save and local_folder(name) is not None:
        scores = replace(scores, stored=store(source.folder, metrics))
    return scores


def _statistics(run: _Run, model: PreTrainedModel, prepared: Prepared) -> Any:
    try:
        return prepared.measure(
            model, batch_size=run.wanted.batch_size, device=run.device, advance=run.progress.advance
        )
    except torch.OutOfMemoryError as error:
        size = run.wanted.batch_size or prepared.batch_size
        raise InputError(
            f"memory of {run.device} is too small for batches of {size}",
            f"give a smaller `--batch-size` than {size}, or a smaller `--max-length`",
        ) from error


@contextmanager
def _about(source: SourceModel) -> Iterator[None]:
    """Names the model in errors that do not."""
    try:
        yield
    except InputError as error:
        if f"`{source.id}`" in error.message or str(source.folder) in error.message:
            raise
        raise type(error)(f"`{source.id}`: {error.message}", error.hint) from error
