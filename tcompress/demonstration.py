"""The offline demonstration: a small language model that ships, made smaller and healed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tcompress.artifact.manifest import Manifest, read_manifest
from tcompress.artifact.workplace import check_empty
from tcompress.compression import compress
from tcompress.conversion.converter import convert
from tcompress.data.generated_text import written_texts
from tcompress.files import write_text
from tcompress.latency.benchmark import bench
from tcompress.latency.paired_timing import threads
from tcompress.options import Bench, Calibration, Convert, Finetune
from tcompress.options.compress_options import Compress
from tcompress.progress import Progress, Silent
from tcompress.reporting.model_report import report_of
from tcompress.structures.lowrank import LowRankSpec
from tcompress.structures.lprod import LprodSpec
from tcompress.training.finetuning import finetune

PROMPT = "Once upon a time there was"
FITTING_STORIES = 24  # held-out ones that calibrate
MEASURED_STORIES = 64  # others, that perplexity is measured on
WRITTEN_STORIES = 64  # by the dense model, to heal on beside those: healing needs no labels
HEALING_STEPS = 80
# Few and short batches: more of them win little here, and cost most of the time that all takes.
HEALING = {"batch_size": 4, "learning_rate": 2e-3}
TIMED = Bench(batch=(8,), length=(256,), repeats=3, dtype="float32", device="cpu", threads=1)
_BATCH = 16
_NEW_TOKENS = 40
_STORY_TOKENS = 220


class Variant(NamedTuple):
    """One way of making the model smaller: its folder, its name for people, its options."""

    folder: str
    label: str
    options: dict[str, Any]
    calibrated: bool = True
    healed: bool = False


# A transform that is fitted, as by default, loses less, and takes as long as all else here.
_SLICES = LprodSpec(p=16, transform="dct")
_PAPER = LprodSpec(p=4, transform="dct")

VARIANTS: tuple[Variant, ...] = (
    Variant(
        "svd-50",
        "svd in 4 of 5 blocks",
        # The blocks that `--drop-layers 1` keeps; below, `--drop-layers 2`.
        {"keep_layers": [0, 2, 3, 4], "method": LowRankSpec(), "target": 0.625},
        healed=True,
    ),
    Variant("blocks-3", "3 of 5 blocks", {"keep_layers": [0, 2, 3]}, healed=True),
    Variant("lprod-p16-50", "lprod p=16, dct + low rank", {"method": _SLICES, "target": 0.5}),
    # The paper's layer.
    Variant("lprod-p4-dct", "lprod p=4, dct, no data", {"method": _PAPER}, calibrated=False),
)


# One command for all of it: `tcompress compress`, in the time that the others leave.
COMPRESS: Compress | None = Compress(
    size="1.3MB", runtime="torch", minutes=0.3, at="8x256", threads=1
)


class DemoRow(BaseModel, frozen=True):
    """Size, speed and quality of one model."""

    label: str
    healed: bool = False
    kept: float  # of the blocks' parameters
    parameters: int  # of the whole model
    bytes: int  # of the weight files
    speed: float  # dense time over its own, for 8 x 256 tokens on one thread
    perplexity: float  # per token, on stories that nothing was fitted to or trained on
    error: float | None = None  # of outputs on held-out stories; None without data and once healed
    seconds: float  # of the conversion, or of the healing
    text: str  # greedy continuation of the prompt


class DemoReport(BaseModel, frozen=True):
    """All rows and how they were measured: the dense model, healed ones, converted ones."""

    prompt: str
    fitting_stories: int
    written_stories: int
    measured_stories: int
    healing_steps: int
    rows: tuple[DemoRow, ...]


class DemoData(NamedTuple):
    """A language model and texts that it was not trained on."""

    model: Path
    texts: tuple[str, ...]


@contextmanager
def shipped_data() -> Iterator[DemoData]:
    """Unpack the model and the stories of the package while they are used."""
    with as_file(files("tcompress").joinpath("assets", "demo")) as folder:
        stories = (folder / "heldout.txt").read_text(encoding="utf-8").splitlines()
        yield DemoData(folder / "model", tuple(story for story in stories if story.strip()))


def run_demo(data: DemoData, output: Path, progress: Progress | None = None) -> DemoReport:
    """Makes a language model smaller in several ways, heals some, and compares the results.

    The first of the held-out texts calibrate and heal, the others measure.
    """
    check_empty(output)
    output.mkdir(parents=True, exist_ok=True)
    # In a model of this size several threads wait for each other more than they compute.
    with threads(1):
        return _run(data, output, progress or Silent())


def _run(data: DemoData, output: Path, progress: Progress) -> DemoReport:
    fitting = data.texts[:FITTING_STORIES]
    measured = data.texts[FITTING_STORIES:][:MEASURED_STORIES]
    tokenizer = AutoTokenizer.from_pretrained(data.model)

    def row(label: str, folder: Path, **facts: Any) -> DemoRow:
        found = DemoRow(label=label, **_measured(folder, tokenizer, measured), **facts)
        progress.advance(1, label)
        return found

    heals = sum(item.healed for item in VARIANTS) + (COMPRESS is not None)
    progress.stage("models", len(VARIANTS) + heals + 1, "models")
    stories, lessons = output / "stories.txt", output / "lessons.txt"
    write_text(stories, "\n".join(fitting) + "\n")
    if heals:
        written = written_stories(data.model, tokenizer, WRITTEN_STORIES)
        write_text(lessons, "\n".join((*fitting, *written)) + "\n")
    rows: list[DemoRow] = []
    for variant in VARIANTS:
        texts = (str(stories),) if variant.calibrated else ("none",)
        calibration = Calibration(source=texts, samples=len(fitting))
        recipe = Convert(**variant.options, calibration=calibration)
        done = convert(str(data.model), recipe, output / variant.folder)
        if not rows:
            whole = {"kept": 1.0, "parameters": done.manifest.plan.parameters, "speed": 1.0}
            rows.append(row("dense", data.model, seconds=0.0, **whole))
        costs = _costs(done.folder, done.manifest, data.model)  # which healing does not change
        error, seconds = report_of(done.folder).errors.get("held_out"), done.manifest.seconds
        rows.append(row(variant.label, done.folder, error=error, seconds=seconds, **costs))
        if variant.healed:
            trained = {"source": [str(lessons)], "max_length": 256, "validation_samples": 4}
            said = {"data": trained, **HEALING, "steps": HEALING_STEPS}
            place, label = f"{done.folder}-healed", f"{variant.label}, healed"
            better = finetune(str(done.folder), Finetune.model_validate(said), place)
            seconds = better.facts.seconds
            rows.append(row(label, better.folder, healed=True, seconds=seconds, **costs))
    if COMPRESS is not None:
        start, goal = time.perf_counter(), COMPRESS.model_copy(update={"data": (str(lessons),)})
        folder = compress(data.model, output / "compress", goal).folder
        seconds, manifest = time.perf_counter() - start, read_manifest(folder)
        assert manifest is not None  # every conversion has one
        label, costs = f"compress --size {goal.size}", _costs(folder, manifest, data.model)
        rows.insert(1, row(label, folder, healed=True, seconds=seconds, **costs))
    return DemoReport(
        prompt=PROMPT,
        fitting_stories=len(fitting),
        written_stories=WRITTEN_STORIES if heals else 0,
        measured_stories=len(measured),
        healing_steps=HEALING_STEPS,
        rows=(rows[0], *sorted(rows[1:], key=lambda row: not row.healed)),
    )


def _costs(folder: Path, manifest: Manifest, dense: Path) -> dict[str, Any]:
    plan = manifest.plan
    # The processor's clock: other work on the machine does not count.
    (timed,) = bench([str(folder)], str(dense), TIMED, clock=time.process_time)
    return {
        "kept": 1 - plan.saved_in_blocks / plan.block_parameters,
        "parameters": plan.parameters - plan.saved,
        "speed": timed.speed[0].ratio,
    }


def _measured(folder: Path, tokenizer: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Size, perplexity and text of a model, which always continues with the likeliest token."""
    model = _language_model(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=_NEW_TOKENS, max_length=None)
    start = inputs["input_ids"].shape[1]
    return {
        "bytes": sum(file.stat().st_size for file in folder.glob("model*.safetensors")),
        "perplexity": perplexity(model, tokenizer, texts),
        "text": tokenizer.decode(output[0, start:], skip_special_tokens=True).rstrip(),
    }


def _language_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def written_stories(folder: Path, tokenizer: Any, count: int) -> list[str]:
    """Generate texts with a language model."""
    return written_texts(_language_model(folder), tokenizer, count, _STORY_TOKENS + 1)


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, texts: Sequence[str]) -> float:
    """Measures a causal model's perplexity per token; what exceeds its context is cut off."""
    loss, count = 0.0, 0
    shape: dict[str, Any] = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
    longest = model.config.max_position_embeddings
    for first in range(0, len(texts), _BATCH):
        batch = list(texts[first : first + _BATCH])
        encoded = tokenizer(batch, truncation=True, max_length=longest, **shape)
        ids, mask = encoded["input_ids"], encoded["attention_mask"]  # (texts, tokens)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        losses = cross_entropy(logits.mT.float(), ids[:, 1:], reduction="none")
        loss += float((losses * mask[:, 1:]).sum(dtype=torch.float64))
        count += int(mask[:, 1:].sum())
    return math.exp(loss / count)
