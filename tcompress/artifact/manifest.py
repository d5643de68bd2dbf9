"""The manifest `tcompress.json`, and the model card: where a model comes from."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
import yaml
from pydantic import BaseModel, Field

import tcompress
from tcompress.artifact.checksums import ZEROS, damaged, read_sealed
from tcompress.artifact.format import Rebuilt, first_problem
from tcompress.fields import RuntimeName
from tcompress.files import write_text
from tcompress.models.names import CARD, MANIFEST, encodes_sentences
from tcompress.options.steps import PaperRow
from tcompress.planning.entries import Plan
from tcompress.project import INSTALL, REPOSITORY

if TYPE_CHECKING:
    from tcompress.models import SourceModel

Key = Callable[[Any], object]


class _Section(BaseModel, extra="forbid"):
    """Part of a manifest."""


class SourceFacts(_Section):
    """The dense model that was converted."""

    id: str  # hub id, or folder
    revision: str | None = None
    fingerprint: str  # identifies its weights
    bytes: int
    # Its `config.json`, where that of the converted model has other numbers.
    config: dict[str, Any] | None = None
    # What began at random has nothing to imitate.
    init: Literal["pretrained", "random"] = "pretrained"
    seed: int | None = None


class CalibrationFacts(_Section):
    """The data that the fit looked at."""

    name: str
    samples: int = 0
    held_out_samples: int = 0
    tokens: int = 0
    fingerprint: str | None = None
    files: dict[str, str] = {}  # stamps of local files and folders by name; older ones lack them
    # Change of the output per sample held out, by source, where there are several: the squared
    # distance of embeddings or states, or twice the Kullback-Leibler divergence of scores.
    changes: dict[str, float] = {}
    # Share of scores whose best class or token is the dense model's, or rank correlation of the
    # similarities of embeddings, by source.
    agreement: dict[str, float] = {}


class Interval(_Section):
    """A bootstrap interval."""

    low: float
    high: float
    level: float = 0.95


class Difference(_Section):
    """The paired difference between a model and a baseline, on the same examples."""

    baseline: str
    baseline_value: float
    baseline_interval: Interval | None = None  # of the baseline alone; older ones lack it
    value: float
    interval: Interval | None = None


class Metric(_Section):
    """A number and how it was measured."""

    name: str  # what was measured, such as `accuracy`
    value: float
    higher_is_better: bool = True
    interval: Interval | None = None
    difference: Difference | None = None  # to a baseline of the same run
    # Everything needed to measure it again: task, data and its fingerprint, split, examples,
    # length, dtype, seed, device, versions.
    protocol: dict[str, Any]

    @property
    def ratio(self) -> float | None:
        """The number as a multiple of the baseline's; None if there is none above zero."""
        against = self.difference
        if against is None or against.baseline_value <= 0:
            return None
        return self.value / against.baseline_value

    @property
    def label(self) -> str:
        """Name in tables."""
        return self.name


class Speed(_Section):
    """Time and memory of one forward pass, beside a baseline that ran alternately.

    Of generated text: of the pass over a prompt, or of one of the steps after it.
    """

    batch: int  # sequences or pictures
    length: int  # tokens in a sequence, or in a prompt
    mode: str  # `eager` or `compiled` in PyTorch; `onnx`, `onnx-int8`, `onnx-q4` in ONNX Runtime
    phase: str = "forward"  # `prefill` and `decode` fill a cache
    cache: str | None = None  # `dynamic` or `static`
    milliseconds: float  # median
    tokens_per_second: float  # at that time; read, or decoded
    # Memory of the pass, its cache included, without weights, where it is known.
    peak_bytes: int | None = None
    baseline: str
    baseline_milliseconds: float
    baseline_peak_bytes: int | None = None
    ratio: float  # time of the baseline over that of the model; above 1 the model is faster
    # Of the baseline in the runtime of the model, where that is not PyTorch.
    same_runtime_milliseconds: float | None = None
    spread: float | None = None  # distance of the quartiles of its times, relative to the median
    baseline_spread: float | None = None
    weight_bytes: int | None = None  # of all weights in memory, cached ones included
    baseline_weight_bytes: int | None = None
    protocol: dict[str, Any]  # device, threads, dtype, repeats, versions

    @property
    def how(self) -> str:
        """Mode of the pass, such as `eager` or `decode, static, compiled`."""
        if self.cache is None:
            return self.mode
        words = [self.phase, *(["static"] if self.cache == "static" else [])]
        return ", ".join([*words, *([self.mode] if self.mode != "eager" else [])])

    @property
    def is_noisy(self) -> bool:
        """True where the middle half of either's times spans more than a fifth of the median."""
        return max(self.spread or 0.0, self.baseline_spread or 0.0) > 0.2


_RUNTIMES: dict[int, RuntimeName] = {32: "onnx", 8: "onnx-int8", 4: "onnx-q4"}


class ExportedFile(_Section):
    """A file for another runtime, beside the model in PyTorch in float32."""

    file: str  # inside the model's folder
    bits: int  # of most weights: 32, 8 or 4
    bytes: int
    difference: float  # largest absolute difference of an output
    agreement: float  # mean cosine of outputs; 1 is the same
    milliseconds: float  # median of a pass
    baseline_milliseconds: float  # of PyTorch, in turn
    ratio: float  # time of PyTorch over that of the file; above 1 the file is faster
    left: list[str] = []  # larger tensors in float32, where others have fewer bits
    protocol: dict[str, Any]  # batch, length, threads, processor, versions
    metrics: list[Metric] = []  # quality of the file in its runtime; older ones lack it

    @property
    def runtime(self) -> RuntimeName | None:
        """The runtime that reads it, as options name it; None for one that they do not know."""
        return _RUNTIMES[self.bits] if self.file.startswith("onnx/") else None

    @property
    def size(self) -> str:
        """Size of a timed pass, such as `32 x 32`."""
        batch, length = self.protocol["batch"], self.protocol.get("length")
        return f"a batch of {batch}" if length is None else f"{batch} x {length}"


class Alternative(_Section):
    """A model that one would take in the place of this one, as it was measured beside it."""

    name: str  # such as `dense` or `2 of 6 layers, not healed`
    runtime: RuntimeName
    bytes: int  # of what the runtime reads
    ratio: float  # time of the dense model in PyTorch over its own
    value: float | None = None  # of the number that quality is measured by
    interval: Interval | None = None
    agreement: float | None = None  # with the dense model


class CurvePoint(_Section):
    """State of a training run after a step: `loss` is the mean since the point before."""

    step: int
    loss: float | None = None
    validation: float | None = None
    learning_rate: float | None = None
    seconds: float = 0.0


class SourceAgreement(_Section):
    """Agreement of a model with its teacher on held-out samples of one source; 1 is fully."""

    name: str
    start: float | None = None  # before healing
    end: float | None = None  # with the weights that healing came to
    kept: float | None = None  # with those of the model
    harmed: bool = False  # whether outputs are farther from the teacher's than at the start


class TrainingFacts(_Section):
    """One run of fine-tuning."""

    stage: str  # `blocks` or `end-to-end`
    task: str | None = None  # None if it was healed on unlabelled data
    teacher: str | None = None  # the model that was imitated, if any; several as `one + other`
    data: str
    data_fingerprint: str | None = None
    files: dict[str, str] = {}  # stamps of local files and folders by name; older ones lack them
    objectives: dict[str, float]
    settings: dict[str, Any]
    steps: int
    samples: int  # seen, repetitions counted
    tokens: int  # seen, padding not counted
    seconds: float
    validation: str  # name of the validated number
    best_step: int  # its weights are those of the model, as far as `share` says
    best: float  # the validated number of what is written, where `share` is not 0
    curve: list[CurvePoint]
    environment: dict[str, str]
    share: float = 1.0  # of the way from the first weights to those of `best_step`
    sources: list[SourceAgreement] = Field(default_factory=list)

    @property
    def keeps_start(self) -> bool:
        """True where nothing was better than the start, so that the weights are as they were."""
        return self.best_step == 0 or self.share == 0


class AttentionMap(_Section):
    """Weights of an attention on one example, a mean over heads."""

    data: str  # that the example is the first of
    layer: int  # of those that return weights, from 0
    rows: list[str]  # tokens of the queries
    columns: list[str]  # and of the keys
    weights: list[list[float]]  # row by row


class Manifest(_Section):
    """All that is recorded of a model, from its conversion to the last measurement.

    Older ones have no `digest` (SHA-256 of the file with zeros in its place) and no `sizes` (bytes
    by name), and checksums (SHA-256 by name) of weight files only.
    """

    format_version: int = 1
    digest: str | None = None
    tool_version: str = Field(default_factory=lambda: tcompress.__version__)
    created: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    source: SourceFacts
    recipe: dict[str, Any]
    plan: Plan
    calibration: CalibrationFacts
    fit: dict[str, dict[str, float]]
    checksums: dict[str, str]
    sizes: dict[str, int] = Field(default_factory=dict)
    seconds: float  # of the conversion, in all runs that it took
    # Where they went: by stage, and in it by part; older ones lack it.
    stage_seconds: dict[str, dict[str, float]] = Field(default_factory=dict)
    environment: dict[str, str]
    training: list[TrainingFacts] = Field(default_factory=list)
    metrics: list[Metric] = Field(default_factory=list)
    speed: list[Speed] = Field(default_factory=list)
    exports: list[ExportedFile] = Field(default_factory=list)
    paper: list[PaperRow] = Field(default_factory=list)
    alternatives: list[Alternative] = Field(default_factory=list)
    attention_map: AttentionMap | None = None

    @property
    def rebuilt(self) -> Rebuilt:
        """The part of the plan that `config.json` holds too."""
        return Rebuilt(self.plan.entries, self.plan.attention, self.plan.forms)

    @property
    def is_untrained(self) -> bool:
        return self.source.init == "random" and not self.training


def manifest_of_dense(source: SourceModel) -> Manifest:
    """Begin the record of a model that was not converted."""
    return Manifest(
        source=SourceFacts(
            id=source.id,
            revision=source.revision,
            fingerprint=source.store.fingerprint(),
            bytes=source.store.total_bytes,
        ),
        recipe={},
        plan=Plan(layers=(), source=source.id, method="dense"),
        calibration=CalibrationFacts(name="none"),
        fit={},
        checksums={},
        seconds=0.0,
        environment=environment(),
    )


def environment() -> dict[str, str]:
    """Versions that a number may depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, with a digest of itself; a reader finds the old one or the new one."""
    blank = manifest.model_copy(update={"digest": ZEROS}).model_dump_json(indent=1) + "\n"
    digest = hashlib.sha256(blank.encode()).hexdigest()
    write_text(folder / MANIFEST, blank.replace(ZEROS, digest, 1))


def read_manifest(folder: Path) -> Manifest | None:
    """Reads the manifest of a model; None if it was saved again, or by something else."""
    raw = read_sealed(folder)
    try:
        return None if raw is None else Manifest.model_validate(raw)
    except ValueError as error:
        raise damaged(folder, first_problem(error)) from error


def record(folder: Path, kind: Literal["metrics", "speed"], new: Sequence[Any], key: Key) -> bool:
    """Puts numbers into a model's manifest in place of those of equal key; tells if it could."""
    return _changed(folder, lambda facts: {kind: _merged(getattr(facts, kind), new, key)})


def record_of_file(folder: Path, runtime: RuntimeName, new: Sequence[Metric], key: Key) -> bool:
    """Puts numbers of the file for a runtime beside it, as `record` does those of the weights.

    A model without such a file, or with several that only work together, has no place for them.
    """

    def change(manifest: Manifest) -> dict[str, Any] | None:
        exported = one_file(manifest.exports, runtime)
        if exported is None:
            return None
        measured = exported.model_copy(update={"metrics": _merged(exported.metrics, new, key)})
        return {"exports": [measured if file is exported else file for file in manifest.exports]}

    return _changed(folder, change)


def record_map(folder: Path, shown: AttentionMap) -> bool:
    """Puts what an attention looks at into a model's manifest; tells if it could."""
    return _changed(folder, lambda _: {"attention_map": shown})


def one_file(files: Sequence[ExportedFile], runtime: RuntimeName) -> ExportedFile | None:
    """Picks the file for a runtime; None where there is none, or where there are several parts."""
    fitting = [file for file in files if file.runtime == runtime]
    return fitting[0] if len(fitting) == 1 else None


def _merged(before: Sequence[Any], new: Sequence[Any], key: Key) -> list[Any]:
    """Lists numbers, the new ones in place of those of equal key."""
    replaced = {key(item) for item in new}
    return [*(item for item in before if key(item) not in replaced), *new]


def _changed(folder: Path, change: Callable[[Manifest], dict[str, Any] | None]) -> bool:
    """Writes other fields into a model's manifest; tells if it could."""
    manifest = read_manifest(folder)
    fields = None if manifest is None else change(manifest)
    if manifest is None or fields is None:
        return False
    try:
        write_manifest(folder, manifest.model_copy(update=fields))
    except OSError:  # models are often kept where they cannot be changed
        return False
    return True


SAME_OUTPUT = (
    "Texts whose tokens all stay are written with the same tokens and give the output of the dense "
    "model, to the last bit."
)


def model_card(manifest: Manifest, folder: Path, architecture: str | None = None) -> str:
    """Render the card: what was done, what it costs, how to load it.

    Its head is that of the card in the `folder` that the model was made of; the `architecture`, the
    name of the model's class, says how it is loaded.
    """
    plan, source = manifest.plan, manifest.source
    local, random = Path(source.id).exists(), source.init == "random"
    base = None if local or random else source.id
    head, tags = {} if random else head_of(folder), ["tcompress"]
    shown = Path(source.id).name if local else source.id
    loading = ""
    if plan.compresses:
        done = "from scratch" if random else "compressed"
        title, body = f"{shown}, {done} with `{plan.method}`", _conversion(manifest)
        loading = "It loads without tcompress. "
        tags.append(done.replace(" ", "-"))
    elif random:
        title, body = f"{shown} from scratch", _start(manifest) + _trained(manifest)
    else:
        title, body = f"{shown}, trained with tcompress", _trained(manifest)
    if plan.changes_model:
        loading = (
            f"Install tcompress with `{INSTALL}`; without `import tcompress`, "
            "loading stops with an error. "
        )
    written = render_head(head, tags, base_model=base)
    code = loading_code(folder, architecture, plain=not plan.changes_model)
    text = card(title, body, written, code)
    return f"{text}\n{loading}All numbers and the recipe are in `tcompress.json`.\n"


def card(title: str, body: str, head: str, code: str) -> str:
    """Render a card with such a head, and code that loads the model."""
    return f"""{head}

# {title}

{body}

```python
{code}
```
"""


def _conversion(manifest: Manifest) -> str:
    plan = manifest.plan
    rows = [("all parameters", f"{plan.parameters:,}", f"{plan.parameters - plan.saved:,}")]
    done = []
    if plan.layers:
        sizes = f"{plan.dense_rewritten:,}", f"{plan.structured_rewritten:,}"
        count = f"{len(plan.layers)}"
        rows = [("rewritten layers", count, count), ("their parameters", *sizes), *rows]
        done.append(f"{plan.kept:.1%} of the rewritten layers' parameters are kept")
    for item in plan.embeddings:
        dense = plan.whole_table(item)
        rows = [("word embedding", f"{dense:,}", f"{item.parameters:,}"), *rows]
        done.append(f"{item.parameters / dense:.1%} of the word embedding")
    if plan.attention:
        kinds = sorted({entry.layout.mechanism for entry in plan.attention})
        count = f"{len(plan.attention)} block{'s' * (len(plan.attention) > 1)}"
        done.append(f"{' and '.join(kinds)} attention in {count}")
    if plan.depth is not None:
        rows = [("blocks", f"{plan.depth.blocks}", f"{plan.depth.kept}"), *rows]
        done.append(f"{plan.depth.blocks} -> {plan.depth.kept} blocks, from 0: {plan.depth.which}")
    if plan.storage is not None:
        done.append(f"stored in {plan.storage}")
    if (words := plan.vocabulary) is not None:
        rows = [("vocabulary", f"{words.before:,}", f"{words.rows:,}"), *rows]
        done.append(f"vocabulary {words.before:,} -> {words.rows:,} tokens, {words.origin}")
    table = "\n".join(f"| {name} | {before} | {after} |" for name, before, after in rows)
    verb = "Built" if manifest.source.init == "random" else "Converted"
    return f"""{verb} by [tcompress]({REPOSITORY}) \
{manifest.tool_version}: {"; ".join(done)}.

| | dense | compressed |
|---|---|---|
{table}

{_start(manifest)}{_trained(manifest)}"""


def _start(manifest: Manifest) -> str:
    """Weights before any training, and what the rewritten layers lost."""
    if manifest.source.init == "random":
        return f"All weights began at random, with seed {manifest.source.seed}; no teacher. "
    if manifest.plan.cuts_vocabulary_only:
        return f"{SAME_OUTPUT} "
    facts = manifest.calibration
    data = f"Calibration: {facts.name} ({facts.samples} samples). "
    if not manifest.plan.entries:
        return data
    kinds = ("held_out", "calibration", "weight")
    by_layer = ([fit[kind] for kind in kinds if kind in fit] for fit in manifest.fit.values())
    errors = [layer_errors[0] for layer_errors in by_layer if layer_errors]
    mean = f"{sum(errors) / len(errors):.3f}" if errors else "unknown"
    kind = "held-out output error" if facts.name != "none" else "weight error"
    after = " before training" if manifest.training else ""
    return f"{data}Mean relative {kind} of the rewritten layers{after}: {mean}. "


def _trained(manifest: Manifest) -> str:
    if manifest.training:
        return "\n".join(map(_sentence, manifest.training))
    if manifest.source.init == "random":
        return "Not trained: train before use."
    if manifest.plan.cuts_vocabulary_only:
        return "Other texts are written in shorter pieces."
    return "Not healed: compare it with the dense model before use."


def _sentence(facts: TrainingFacts) -> str:
    what = "Healed" if facts.task is None else f"Fine-tuned for {facts.task}"
    teachers = facts.teacher.split(" + ") if facts.teacher else []
    # Folders of one machine mean nothing to others.
    names = [Path(name).name if Path(name).exists() else name for name in teachers]
    by = f", taught by {' + '.join(names)}" if names else ""
    start = next((point.validation for point in facts.curve if point.validation is not None), None)
    before = "" if start is None else f", {start:.4g} at the start"
    if facts.keeps_start:
        return f"Not {what.lower()}: {facts.steps:,} steps on {facts.data} tried, none better{by}."
    return (
        f"{what} for {facts.steps:,} steps on {facts.data} ({facts.samples:,} examples seen){by}; "
        f"{facts.validation} on held-out data {facts.best:.4g}{before}."
    )


_MARK = "---"
# In the order in which heads are written; tags come last.
_CARRIED = ("library_name", "base_model", "license", "license_name", "license_link")


def head_of(folder: Path) -> dict[str, Any]:
    """Read licence, library, base model and tags from a card; what cannot be read is left out."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8-sig")
        lines = [line.rstrip() for line in text.splitlines()]
        end = lines.index(_MARK, 1) if lines[:1] == [_MARK] else 0
        facts = yaml.safe_load("\n".join(lines[1:end]))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    facts = facts if isinstance(facts, dict) else {}
    head = {key: facts[key] for key in (*_CARRIED, "tags") if _is_words(facts.get(key))}
    if isinstance(head.get("tags"), str):
        head["tags"] = [head["tags"]]
    return head


# What follows `AutoModel`. Some classes are found under several names: the first one counts.
_HEADS = (
    "", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice", "ForImageClassification", "ForMaskedLM", "ForCausalLM", "ForSeq2SeqLM",
    "ForImageTextToText", "ForSpeechSeq2Seq", "ForCTC", "ForAudioClassification",
    "ForTimeSeriesPrediction", "ForPreTraining", "ForTextEncoding",
)  # fmt: skip


def loading_code(folder: Path, architecture: str | None, *, plain: bool) -> str:
    """Write the lines of Python that load a model of an architecture, as that in a folder."""
    library, loader = "transformers", loader_of(architecture)
    call = f'{loader}.from_pretrained("PATH")'
    if encodes_sentences(folder):
        library, loader = "sentence_transformers", "SentenceTransformer"
        call = f'{loader}("PATH")'
    first = "" if plain else "import tcompress\n"
    return f"{first}from {library} import {loader}\n\nmodel = {call}"


def loader_of(architecture: str | None) -> str:
    """Name the class of Transformers that loads a model with its head, by its architecture."""
    for head in _HEADS:
        mapping = getattr(getattr(transformers, f"AutoModel{head}", None), "_model_mapping", None)
        if mapping is None:
            continue
        listed = mapping._model_mapping.values()
        registered = {kind.__name__ for kind in mapping._extra_content.values()}
        if architecture in registered or any(
            architecture in ((kinds,) if isinstance(kinds, str) else kinds) for kinds in listed
        ):
            return f"AutoModel{head}"
    return "AutoModel"


def render_head(head: Mapping[str, Any], tags: Iterable[str], base_model: str | None) -> str:
    """Write the head of a card: that of its source, with more tags and what it was made of."""
    base = {} if base_model is None else {"base_model": base_model}
    facts = {"library_name": "transformers", **head, **base}
    ordered = {key: facts[key] for key in _CARRIED if key in facts}
    ordered["tags"] = list(dict.fromkeys((*head.get("tags", ()), *tags)))
    return f"{_MARK}\n{yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)}{_MARK}"


def _is_words(value: Any) -> bool:
    words = value if isinstance(value, list) else [value]
    return bool(words) and all(isinstance(word, str) and word for word in words)
