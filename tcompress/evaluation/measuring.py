"""The tasks by name, and measuring models on one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import tcompress
from tcompress.artifact.manifest import environment, record
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
from tcompress.evaluation.scores import Baseline, ModelScores, metrics_of, same_measurement
from tcompress.evaluation.task_base import Task, TextReader
from tcompress.hf.opening import load_model, pick_device, pick_dtype
from tcompress.models import SourceModel
from tcompress.models.names import local_folder
from tcompress.options import Evaluate
from tcompress.progress import Progress, Silent

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


@dataclass(frozen=True)
class _Measurement:
    """What is the same for all models."""

    wanted: Evaluate
    task: type[Task]
    examples: Examples
    max_length: int | None
    device: torch.device
    progress: Progress
    save: bool

    def of(self, name: str, source: SourceModel, baseline: Baseline | None) -> ModelScores:
        """Measures a model."""
        wanted = self.wanted
        with _about(source):
            task = self.task(source, self.examples, self.max_length, wanted)
            if baseline is not None and baseline.signature == task.signature:
                task.reference = baseline.predictions
            model = load_model(source, dtype=pick_dtype(wanted.dtype), device=self.device)
            self.progress.stage(Path(name).name, task.work(model), "inputs")
            size, start = wanted.batch_size or task.batch_size, time.perf_counter()
            try:
                statistics = task.measure(model, size, self.progress.advance)
            except torch.OutOfMemoryError as error:
                raise InputError(
                    f"memory of {self.device} is too small for batches of {size}",
                    f"give a smaller `--batch-size` than {size}, or a smaller `--max-length`",
                ) from error
            seconds = time.perf_counter() - start
        options = (task.signature, wanted.bootstrap, wanted.seed, task.predictions)
        own = Baseline.of(name, statistics, *options)
        metrics = metrics_of(statistics, own, baseline, self._protocol(task, model))
        notes = list(task.notes)
        if baseline is not None and own.signature != baseline.signature:
            notes.append(f"its tokens are not those of `{baseline.name}`: each reads its own")
        # A folder in the hub's cache is not the user's to change.
        stores = self.save and local_folder(name) is not None
        return ModelScores(
            name=name,
            metrics=tuple(metrics),
            unit=task.unit,
            per_second=task.units / seconds,
            stored=stores and record(source.folder, "metrics", metrics, same_measurement),
            notes=tuple(notes),
            baseline=own,
        )

    def _protocol(self, task: Task, model: PreTrainedModel) -> dict[str, Any]:
        """Everything needed to measure again."""
        wanted, examples = self.wanted, self.examples
        whole = examples.whole and Path(wanted.data).expanduser().is_file()
        return {
            "task": task.name,
            "data": examples.name,
            "data_fingerprint": examples.fingerprint,
            "split": None if whole else wanted.split,
            "examples": len(examples),
            "max_length": self.max_length,
            "batch_size": wanted.batch_size or task.batch_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(self.device),
            "seed": wanted.seed,
            "bootstrap": wanted.bootstrap,
            **task.facts,
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
    """Measures models on the same examples; arguments as `tcompress.evaluate` takes them.

    A baseline that is not among the models is measured first; a `ModelScores.baseline` is known.
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
        device = pick_device(wanted.device)
    problems.report()
    task = TASKS[wanted.task]
    examples = _examples(wanted, task, [*sources.values()])
    length = _common_length(task, examples, sources.values(), wanted.max_length)
    heard = progress or Silent()
    run = _Measurement(wanted, task, examples, length, device, heard, save)
    if known is not None:
        return [run.of(name, sources[name], known) for name in names]
    base, own = run.of(first, sources[first], None), names.index(first)
    return [
        base if place == own else run.of(name, sources[name], base.baseline)
        for place, name in enumerate(names)
    ]


def check_measurement(item: Evaluate, source: SourceModel, *, heads: bool) -> None:
    """Reads a measurement's data and, with `heads`, checks that the model can do the task."""
    pick_device(item.device)
    task = TASKS[item.task]
    examples = _examples(item, task, [source])
    if heads:
        _common_length(task, examples, [source], item.max_length)


def _examples(wanted: Evaluate, task: type[Task], sources: Sequence[SourceModel]) -> Examples:
    return load_examples(
        wanted.data,
        wanted.split,
        task.needs_for(sources),
        columns=wanted.columns,
        limit=wanted.limit,
        seed=wanted.seed,
    )


def _common_length(
    task: type[Task], examples: Examples, sources: Iterable[SourceModel], max_length: int | None
) -> int | None:
    """Checks all models before work begins, and gives the length that suits all."""
    lengths = []
    for source in sources:
        with _about(source):
            task.check(source, examples)
            if task.max_length is not None:
                lengths.append(TextReader(source, max_length or task.max_length).limit)
    return min(lengths, default=None)


@contextmanager
def _about(source: SourceModel) -> Iterator[None]:
    """Names the model in errors that do not."""
    try:
        yield
    except InputError as error:
        if f"`{source.id}`" in error.message or str(source.folder) in error.message:
            raise
        raise type(error)(f"`{source.id}`: {error.message}", error.hint) from error
