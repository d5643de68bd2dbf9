"""The tasks by name, and measuring models on one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import tcompress
from tcompress.artifact.manifest import (
    AttentionMap,
    environment,
    record,
    record_map,
    record_of_file,
)
from tcompress.artifact.reader import open_checked
from tcompress.data.examples import Examples, load_examples
from tcompress.data.tables import check_data
from tcompress.errors import DataError, InputError, Problems, counted
from tcompress.evaluation.embedding_tasks import ResponseSelection, Retrieval, Similarity
from tcompress.evaluation.labelled_tasks import (
    Classification,
    Forecasting,
    ImageClassification,
    VolumeClassification,
)
from tcompress.evaluation.language_modeling import MaskedLM, Perplexity
from tcompress.evaluation.scores import (
    Baseline,
    ModelScores,
    SetScores,
    metrics_of,
    same_measurement,
)
from tcompress.evaluation.sequence_to_sequence import Seq2Seq
from tcompress.evaluation.task_base import EvaluationTask
from tcompress.exports.onnx_folder import RuntimeFiles
from tcompress.fields import RuntimeName
from tcompress.hf.opening import load_model, pick_device, pick_dtype
from tcompress.models import SourceModel
from tcompress.models.names import local_folder, name_of
from tcompress.options import Evaluate
from tcompress.progress import Progress, Silent

TASKS: dict[str, type[EvaluationTask]] = {
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
        Seq2Seq,
    )
}


@dataclass(frozen=True)
class _Measurement:
    """Settings of a measurement, the same for all models."""

    options: Evaluate
    task: type[EvaluationTask]
    sets: dict[str, Examples]  # by the name of the data
    max_length: int | None
    device: torch.device
    progress: Progress
    save: bool
    in_runtime: RuntimeFiles
    stand_in: nn.Module | None  # that runs in the place of what a folder holds

    def of(
        self,
        name: str,
        source: SourceModel,
        against: Sequence[Baseline] = (),
        runtime: RuntimeName = "torch",
    ) -> ModelScores:
        """Measure a model on all sets, beside a baseline's numbers on them if there is one."""
        options = self.options
        with _about(source):
            tasks = [
                self.task(source, examples, self.max_length, options)
                for examples in self.sets.values()
            ]
            model: Any
            if self.stand_in is not None:
                model = self.stand_in
            elif runtime == "torch":
                dtype = pick_dtype(options.dtype)
                model = load_model(source, self.task.head, dtype=dtype, device=self.device)
            else:
                name, model = f"{name} ({runtime})", self.in_runtime(source, runtime)
            baselines: Sequence[Baseline | None] = against or [None] * len(tasks)
            sets = [
                self._on(data, task, model, name, baseline, runtime)
                for data, task, baseline in zip(self.sets, tasks, baselines, strict=True)
            ]
        return ModelScores(name, self.task.unit, tuple(sets))

    def _on(
        self,
        data: str,
        task: EvaluationTask,
        model: PreTrainedModel,
        name: str,
        baseline: Baseline | None,
        runtime: RuntimeName,
    ) -> SetScores:
        """Measure a model on one set."""
        options, stage = self.options, Path(name).name
        same = baseline is not None and baseline.signature == task.prepared.signature
        reference = None
        if baseline is not None and (same or task.compares_texts):
            reference = task.aligned(baseline.predictions, baseline.labels)
        if len(self.sets) > 1:
            stage += f" on {_full_name(data, task.examples).partition(':')[0]}"
        self.progress.stage(stage, task.prepared.inputs, "inputs")
        size, start = options.batch_size or task.batch_size, time.perf_counter()
        try:
            measured = task.measure(model, size, self.progress.advance, reference)
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"memory of {self.device} is too small for batches of {size}",
                f"give a smaller `--batch-size` than {size}, or a smaller `--max-length`",
            ) from error
        seconds = time.perf_counter() - start
        numbers = Baseline.of(name, measured, task)
        protocol = self._protocol(data, task, model)
        if runtime != "torch":
            protocol["runtime"] = runtime
        metrics = metrics_of(measured.statistics, numbers, baseline, protocol)
        notes, folder = [*task.prepared.notes], task.source.folder
        # A folder in the hub's cache is not the user's to change.
        stored = self.save and local_folder(name.removesuffix(f" ({runtime})")) is not None
        if baseline is not None and not same:
            notes.append(f"its tokens are not those of `{baseline.name}`: each reads its own")
        if options.attention_map and runtime == "torch":
            shown = attention_map(model, task)
            if shown is None:
                notes.append("no attention of it returns its weights: there is no map of them")
            elif stored:
                record_map(folder, shown)
        if stored and runtime == "torch":
            stored = record(folder, "metrics", metrics, same_measurement)
        elif stored:
            stored = record_of_file(folder, runtime, metrics, same_measurement)
        return SetScores(
            metrics=tuple(metrics),
            protocol=protocol,
            per_second=task.prepared.units / seconds,
            stored=stored,
            notes=tuple(notes),
            baseline=numbers,
        )

    def _protocol(self, data: str, task: EvaluationTask, model: PreTrainedModel) -> dict[str, Any]:
        """Facts that are needed to measure again."""
        options, examples = self.options, task.examples
        undivided = examples.whole and Path(data).expanduser().is_file()
        return {
            "task": task.name,
            "data": _full_name(data, examples),
            "data_fingerprint": examples.fingerprint,
            "split": None if undivided else options.split,
            "examples": len(examples),
            **({"labels": "none"} if _is_bare(task, examples) else {}),
            "max_length": None if task.max_length is None else task.reader.limit,
            "batch_size": options.batch_size or task.batch_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(self.device),
            "seed": options.seed,
            "bootstrap": options.bootstrap,
            **task.prepared.facts,
            "versions": {"tcompress": tcompress.__version__, **environment()},
        }


def evaluate(
    models: Sequence[str | Path],
    options: Evaluate,
    *,
    baseline: str | Path | Sequence[Baseline] | None = None,
    save: bool = True,
    token: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    stand_in: nn.Module | None = None,
) -> list[ModelScores]:
    """Measure models on the same examples; arguments as `tcompress.evaluate` takes them.

    A baseline that is not among the models is measured first; a `ModelScores.baseline` is taken
    as it is, and an empty one means that models are not compared. A `stand_in` is run in the place
    of what the folders hold, with their tokenizers and pooling; nothing of it may be saved.
    """
    problems = Problems()
    if not models:
        raise InputError("no models to measure", "give the folder or hub id of at least one")
    names = [name_of(name) for name in models]
    measured = None if isinstance(baseline, str | Path | None) else baseline
    first = str(baseline) if isinstance(baseline, str | Path) else names[0]
    names = names if first in names else [first, *names]
    sources: dict[str, SourceModel] = {}
    for name in names:
        with problems.collected():
            sources[name] = open_checked(name, token=token, trust=trust_remote_code)
    with problems.collected():
        check_data(options.data)
    with problems.collected():
        device = pick_device(options.device)
        if options.runtime != ("torch",) and device.type != "cpu":
            text = f"ONNX Runtime runs on the CPU, not on `{device}`"
            raise InputError(text, "give `--device cpu`, or leave `--runtime` out")
    problems.report()
    task = TASKS[options.task]
    compares = measured is not None or len(names) * len(options.runtime) > 1
    sets = _examples(options, task, [*sources.values()], compares=compares)
    if measured:
        _check_baseline(measured, sets)
    length = _common_length(task, sets.values(), sources.values(), options)
    runs = [(name, runtime) for name in names for runtime in options.runtime]
    with RuntimeFiles.opened() as files:
        how = device, progress or Silent(), save, files, stand_in
        run = _Measurement(options, task, sets, length, *how)
        if measured is not None:
            return [run.of(name, sources[name], measured, runtime) for name, runtime in runs]
        base = run.of(first, sources[first], runtime=options.runtime[0])
        reference = runs.index((first, options.runtime[0]))
        return [
            base if index == reference else run.of(name, sources[name], base.baseline, runtime)
            for index, (name, runtime) in enumerate(runs)
        ]


def _check_baseline(measured: Sequence[Baseline], sets: Mapping[str, Examples]) -> None:
    """Refuse numbers of a baseline that are not of these examples."""
    if len(measured) != len(sets):
        sets_of = counted(len(measured), "set")
        text = f"the baseline was measured on {sets_of}, these are {len(sets)}"
        raise InputError(text, "measure it on the same data")
    for numbers, (data, examples) in zip(measured, sets.items(), strict=True):
        if numbers.fingerprint not in (None, examples.fingerprint):
            text = f"the baseline `{numbers.name}` was measured on other examples than `{data}` has"
            hint = "measure it on the same data, with the same split, columns, limit and seed"
            raise InputError(text, hint)


def check_measurement(
    item: Evaluate, source: SourceModel, *, heads: bool, labelled: bool = False
) -> None:
    """Read a measurement's data and, with `heads`, check that the model can do the task.

    Where it has to be `labelled`, agreement alone will not do.
    """
    pick_device(item.device)
    task = TASKS[item.task]
    sets = _examples(item, task, [source], compares=heads and not labelled)
    if heads:
        _common_length(task, sets.values(), [source], item)


def _examples(
    options: Evaluate, task: type[EvaluationTask], sources: Sequence[SourceModel], *, compares: bool
) -> dict[str, Examples]:
    """Read all sets; those without labels only where models can be compared with another."""
    needs = task.needs_for(sources)
    sets: dict[str, Examples] = {}
    if needs.unlabelled and not compares:
        instead = "a `--baseline`: agreement with another model can be measured without labels"
        needs = replace(needs, unlabelled=False, instead=instead)
    for data in options.data:
        examples = load_examples(
            data,
            options.split,
            needs,
            columns=options.columns,
            limit=options.limit,
            seed=options.seed,
        )
        for name, earlier in sets.items():
            if earlier.fingerprint == examples.fingerprint:
                text = f"`{name}` and `{data}` hold the same examples, which would count twice"
                raise DataError(text, "leave one of them out")
        sets[data] = examples
        relative = (options.threshold or "").endswith("x")
        if relative and _is_bare(task, examples):
            raise DataError(
                f"`--threshold {options.threshold}` is a share of the baseline's number, and "
                f"`{examples.name}` has no labels, so that only agreement is measured",
                "give the least agreement, such as `--threshold 0.9`, or name a column of labels",
            )
    return sets


def _full_name(data: str, examples: Examples) -> str:
    """Name data with the folder that it is in: files of several sets often have one name."""
    path = Path(data).expanduser()
    folder = path.parent.name if path.exists() else ""
    return f"{folder}/{examples.name}" if folder.strip(".") else examples.name


def _is_bare(task: EvaluationTask | type[EvaluationTask], examples: Examples) -> bool:
    """True where labels are missing, so that only agreement can be measured."""
    return task.needs.target is not None and examples.targets is None


def _common_length(
    task: type[EvaluationTask],
    sets: Iterable[Examples],
    sources: Iterable[SourceModel],
    options: Evaluate,
) -> int | None:
    """Check all models before work begins, and return the length that suits all.

    Those whose folder says how long texts are have no part in it: each reads its own.
    """
    lengths = []
    for source in sources:
        with _about(source):
            for examples in sets:
                task.check(source, examples)
            if task.max_length is not None:
                reader = task.reader_of(source, options)
                lengths += [] if reader.sentences.stated else [reader.limit]
    return min(lengths, default=None)


@contextmanager
def _about(source: SourceModel) -> Iterator[None]:
    """Name the model in errors that do not."""
    try:
        yield
    except InputError as error:
        if f"`{source.id}`" in error.message or str(source.folder) in error.message:
            raise
        raise type(error)(f"`{source.id}`: {error.message}", error.hint) from error


_MOST = 32  # queries, and keys: more are not readable in a picture
_DIGITS = 4


@torch.no_grad()
def attention_map(model: PreTrainedModel, task: EvaluationTask) -> AttentionMap | None:
    """Weights of the last attention that returns them, a mean over heads, on the first example.

    Of a model that reads three texts, rows are tokens of the query and columns those of memory.
    None where the task reads no rows of tokens, or no attention returns weights.
    """
    rows = task.prepared.rows
    if not rows:
        return None
    inputs = {name: value for name, value in rows[0].items() if name != "labels"}
    batch = {name: value[None].to(model.device) for name, value in inputs.items()}
    returned = getattr(model(**batch, output_attentions=True), "attentions", None) or ()
    shown = [(layer, item) for layer, item in enumerate(returned) if isinstance(item, Tensor)]
    if not shown or shown[-1][1].dim() != 4:
        return None
    layer, weights = shown[-1]
    words = task.reader.tokenizer.convert_ids_to_tokens(rows[0]["input_ids"].tolist())
    queries = keys = range(len(words))
    types = rows[0].get("token_type_ids")
    if types is not None and getattr(model.config, "reads_semantics", False):
        queries, keys = range(int((types == 0).sum())), range(int((types < 2).sum()))
    queries, keys = queries[:_MOST], keys[:_MOST]
    mean = weights[0].float().mean(0).cpu()[: len(queries), : len(keys)]
    return AttentionMap(
        data=task.examples.name,
        layer=layer,
        rows=[words[index] for index in queries],
        columns=[words[index] for index in keys],
        weights=[[float(f"{value:.{_DIGITS}g}") for value in row] for row in mean.tolist()],
    )
