"""Measuring models on a task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import tcompress
from tcompress.artifact.manifest import environment
from tcompress.artifact.reader import open_checked
from tcompress.errors import InputError, Problems
from tcompress.evaluation.compare import Baseline, Measured
from tcompress.evaluation.scores import ModelScores, store
from tcompress.evaluation.tasks import Prepared, Task, find_task
from tcompress.integration.devices import pick_device, pick_dtype
from tcompress.integration.models import load_model
from tcompress.progress import Progress, Silent
from tcompress.reading.examples import Examples, load_examples
from tcompress.reading.tables import check_data
from tcompress.recipe.schema import Evaluate
from tcompress.source import SourceModel
from tcompress.source.names import local_folder


@dataclass(frozen=True)
class _Run:
    """What is the same for all models."""

    task: Task
    examples: Examples
    max_length: int | None
    batch_size: int | None
    dtype: torch.dtype | None
    device: torch.device
    seed: int
    bootstrap: int
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
            "batch_size": self.batch_size or prepared.batch_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(self.device),
            "seed": self.seed,
            "bootstrap": self.bootstrap,
            **prepared.facts,
            "versions": {"tcompress": tcompress.__version__, **environment()},
        }


def evaluate(
    models: Sequence[str | Path],
    task: str,
    data: str | Path,
    *,
    split: str = "validation",
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    baseline: str | Path | Baseline | None = None,
    dtype: str | None = None,
    device: str = "auto",
    seed: int = 0,
    bootstrap: int = 1000,
    save: bool = True,
    options: Mapping[str, Any] | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> list[ModelScores]:
    """Measures models on the same examples, and compares them with one of them.

    Args:
        models: Converted or dense models: folders, short names or hub ids.
        task: Name of the task, see `evaluation.tasks.TASKS`.
        data: File, folder or hub id.
        split: Split of a folder or hub data set.
        columns: Columns by role, where they should not be guessed.
        limit: Most examples, drawn by the seed.
        batch_size: Examples in a batch; default by task.
        max_length: Longest text in tokens; default by task. The model with the fewest positions
            decides for all.
        baseline: Model to compare with; default the first one. One that is not among the models is
            measured before them; one that was measured before, as `ModelScores.baseline` has it,
            is not measured again.
        dtype: `float32`, `float16` or `bfloat16`; default as each model is stored.
        device: Where to compute.
        seed: Seed of all random choices.
        bootstrap: Number of resamples, 0 for no intervals.
        save: Write the numbers into the manifests of converted models in local folders.
        options: Options of the task, such as `candidates`.
        token: Access token for the hub.
        trust_remote_code: Whether Python code that comes with a model may run.
        progress: Hears how far it is.

    Returns:
        Numbers of each model, in the order of the models.

    Raises:
        InputError: A model, the data or an option cannot be used; the message says what to do.
    """
    problems = Problems()
    with problems.collected():
        chosen = find_task(task, **(options or {}))
    names = [str(name) for name in models]
    known = baseline if isinstance(baseline, Baseline) else None
    first = names[0] if baseline is None or known else str(baseline)
    names = names if first in names else [first, *names]
    sources: dict[str, SourceModel] = {}
    for name in names:
        with problems.collected():
            sources[name] = open_checked(name, token=token, trust=trust_remote_code)
    with problems.collected():
        check_data([str(data)])
    with problems.collected():
        kind = pick_dtype(dtype)
    with problems.collected():
        where = pick_device(device)
    problems.report()
    needs = chosen.needs_for([*sources.values()])
    examples = load_examples(str(data), split, needs, columns=columns, limit=limit, seed=seed)
    run = _Run(
        task=chosen,
        examples=examples,
        max_length=_common_length(chosen, examples, sources.values(), max_length),
        batch_size=batch_size,
        dtype=kind,
        device=where,
        seed=seed,
        bootstrap=bootstrap,
        split=None if examples.whole and Path(data).expanduser().is_file() else split,
        progress=progress or Silent(),
    )
    if known is not None:
        return [_measure(run, name, sources[name], known, save=save) for name in names]
    return _measure_all(run, names, sources, first, save=save)


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
    task = find_task(item.task, pack=item.pack, candidates=item.candidates)
    needs = task.needs_for([source])
    examples = load_examples(
        item.data, item.split, needs, columns=item.columns, limit=item.limit, seed=item.seed
    )
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
        prepared = run.task.prepare(source, run.examples, run.max_length, run.seed)
        model = load_model(source, dtype=run.dtype, device=run.device)
        run.progress.stage(Path(name).name, prepared.work(model), "inputs")
        start = time.perf_counter()
        statistics = _statistics(run, model, prepared)
        seconds = time.perf_counter() - start
    measured = Measured.of(name, statistics, prepared.signature, run.bootstrap, run.seed)
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
            model, batch_size=run.batch_size, device=run.device, advance=run.progress.advance
        )
    except torch.OutOfMemoryError as error:
        size = run.batch_size or prepared.batch_size
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
