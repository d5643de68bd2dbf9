"""The offline demonstration: a small language model that ships, made smaller and healed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn.functional import cross_entropy

from tcompress.artifact.workplace import check_output
from tcompress.conversion.converter import Converted, convert
from tcompress.files import write_text
from tcompress.latency.benchmark import bench
from tcompress.options import Bench, Calibration, Convert, Finetune
from tcompress.progress import Progress, Silent
from tcompress.reporting.model_report import report_of
from tcompress.structures.lowrank import LowRankSpec
from tcompress.structures.lprod import LprodSpec
from tcompress.training.finetuning import finetune

PROMPT = "Once upon a time there was"
FITTING_STORIES = 40
"""Held-out stories that calibrate; perplexity is measured on the others."""

WRITTEN_STORIES = 128
"""Stories that the dense model writes, to heal on beside those: healing needs no labels."""

HEALING_STEPS = 80

TIMED = Bench(batch=(8,), length=(256,), repeats=5, dtype="float32", device="cpu", threads=1)
"""The pass that is timed."""

_BATCH = 16
_NEW_TOKENS = 40
_STORY_TOKENS = 220


@dataclass(frozen=True)
class Variant:
    """One way of making the model smaller.

    Attributes:
        folder: Name of the folder.
        label: Name for people.
        options: The conversion, but for its calibration.
        calibrated: Whether the fit looks at stories.
        healed: Whether the result is healed too.
    """

    folder: str
    label: str
    options: dict[str, Any]
    calibrated: bool = True
    healed: bool = False


VARIANTS: tuple[Variant, ...] = (
    Variant(
        "svd-50",
        "svd in 4 of 5 blocks",
        # The blocks that `--drop-layers 1` keeps; below, `--drop-layers 2`.
        {"keep_layers": [0, 2, 3, 4], "method": LowRankSpec(), "target": 0.625},
        healed=True,
    ),
    Variant("blocks-3", "3 of 5 blocks", {"keep_layers": [0, 2, 3]}, healed=True),
    Variant("lprod-p16-50", "lprod p=16 + low rank", {"method": LprodSpec(p=16), "target": 0.5}),
    Variant(
        "lprod-p4-dct",
        "lprod p=4, dct, no data",
        {"method": LprodSpec(p=4, transform="dct")},
        calibrated=False,
    ),
)
"""What is healed, then what is only converted, down to the paper's layer without any data."""


class DemoRow(BaseModel):
    """What came of one model.

    Attributes:
        label: Name of the model.
        healed: Whether it was healed.
        kept: Kept fraction of the blocks' parameters.
        parameters: Parameters of the whole model.
        bytes: Size of the weight files.
        speed: Time of the dense model over that of this one, for 8 x 256 tokens on one thread.
        perplexity: Perplexity per token on stories that nothing was fitted to or trained on.
        error: Mean relative squared output error of the rewritten layers on held-out stories; None
            without data, and once healed.
        seconds: Time of the conversion, or of the healing.
        text: Greedy continuation of the prompt.
    """

    model_config = ConfigDict(frozen=True)

    label: str
    healed: bool
    kept: float
    parameters: int
    bytes: int
    speed: float
    perplexity: float
    error: float | None
    seconds: float
    text: str


class DemoReport(BaseModel):
    """All rows and how they were measured: the dense model, healed ones, converted ones."""

    model_config = ConfigDict(frozen=True)

    prompt: str
    fitting_stories: int
    written_stories: int
    measured_stories: int
    healing_steps: int
    rows: tuple[DemoRow, ...]


@dataclass(frozen=True)
class DemoData:
    """A language model and texts that it was not trained on."""

    model: Path
    texts: tuple[str, ...]


@dataclass
class _Reader:
    """Measures models on one set of texts."""

    tokenizer: Any
    texts: Sequence[str]

    def row(self, label: str, folder: Path, **facts: Any) -> DemoRow:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        weights = folder.glob("model*.safetensors")
        return DemoRow(
            label=label,
            bytes=sum(file.stat().st_size for file in weights),
            perplexity=perplexity(model, self.tokenizer, self.texts),
            text=continuation(model, self.tokenizer, PROMPT),
            **facts,
        )


@contextmanager
def shipped_data() -> Iterator[DemoData]:
    """Gives the model and the stories of the package."""
    with as_file(files("tcompress").joinpath("assets", "demo")) as folder:
        stories = (folder / "heldout.txt").read_text(encoding="utf-8").splitlines()
        yield DemoData(folder / "model", tuple(story for story in stories if story.strip()))


def run_demo(
    data: DemoData,
    output: Path,
    variants: Sequence[Variant] | None = None,
    progress: Progress | None = None,
) -> DemoReport:
    """Makes a language model smaller in several ways, heals some, and compares the results.

    Args:
        data: The model and its held-out texts: the first calibrate and heal, the others measure.
        output: Folder for the models; must be empty.
        variants: What to try; default `VARIANTS`.
        progress: Hears how far it is.

    Raises:
        InputError: The folder is not empty, or cannot be written.
    """
    from transformers import AutoTokenizer

    check_output(output, force=False)
    output.mkdir(parents=True, exist_ok=True)
    progress, variants = progress or Silent(), variants or VARIANTS
    fitting, measured = data.texts[:FITTING_STORIES], data.texts[FITTING_STORIES:]
    reader = _Reader(AutoTokenizer.from_pretrained(data.model), measured)
    progress.stage("models", sum(1 + item.healed for item in variants) + 1, "models")
    stories, lessons = output / "stories.txt", output / "lessons.txt"
    write_text(stories, "\n".join(fitting) + "\n")
    if any(item.healed for item in variants):
        written = written_stories(data.model, reader.tokenizer, WRITTEN_STORIES)
        write_text(lessons, "\n".join((*fitting, *written)) + "\n")
    converted: list[DemoRow] = []
    healed: list[DemoRow] = []
    dense: DemoRow | None = None
    for variant in variants:
        done = _converted(variant, data.model, output, stories)
        if dense is None:
            dense = _dense_row(reader, data.model, done)
            progress.advance(1, dense.label)
        speed = _speed(done.folder, data.model)
        converted.append(_row(reader, variant, done, speed))
        progress.advance(1, variant.label)
        if variant.healed:
            healed.append(_healed_row(reader, converted[-1], done.folder, lessons))
            progress.advance(1, healed[-1].label)
    return DemoReport(
        prompt=PROMPT,
        fitting_stories=len(fitting),
        written_stories=WRITTEN_STORIES if healed else 0,
        measured_stories=len(measured),
        healing_steps=HEALING_STEPS,
        rows=(*([dense] if dense else []), *healed, *converted),
    )


@torch.no_grad()
def written_stories(folder: Path, tokenizer: Any, count: int) -> list[str]:
    """Lets a language model write texts: what it knows, without the data that taught it.

    Args:
        folder: The model.
        tokenizer: Its tokenizer.
        count: Number of texts.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    start = torch.full((count, 1), model.config.bos_token_id)
    room = model.config.max_position_embeddings - 1
    # The state of the caller's random numbers stays as it is.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            top_k=0,
            max_new_tokens=min(_STORY_TOKENS, room),
            max_length=None,
        )
    texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [" ".join(text.split()) for text in texts]


def _converted(variant: Variant, model: Path, output: Path, stories: Path) -> Converted:
    source = str(stories) if variant.calibrated else "none"
    # As the command line does: everything else is a default.
    recipe = Convert(**variant.options, calibration=Calibration(source=source))
    return convert(str(model), recipe, output / variant.folder)


def _speed(folder: Path, dense: Path) -> float:
    # The processor's clock: other work on the machine does not count.
    (timed,) = bench([str(folder)], str(dense), TIMED, clock=time.process_time)
    return timed.speed[0].ratio


def _dense_row(reader: _Reader, model: Path, done: Converted) -> DemoRow:
    facts = {"healed": False, "kept": 1.0, "speed": 1.0, "error": None, "seconds": 0.0}
    return reader.row("dense", model, parameters=done.manifest.plan.parameters, **facts)


def _row(reader: _Reader, variant: Variant, done: Converted, speed: float) -> DemoRow:
    plan = done.manifest.plan
    return reader.row(
        variant.label,
        done.folder,
        healed=False,
        kept=1 - plan.saved_in_blocks / plan.block_parameters,
        parameters=plan.parameters - plan.saved,
        speed=speed,
        error=report_of(done.folder).errors.get("held_out"),
        seconds=done.manifest.seconds,
    )


def _healed_row(reader: _Reader, raw: DemoRow, folder: Path, lessons: Path) -> DemoRow:
    options = Finetune.model_validate(
        {
            "data": {"source": [str(lessons)], "max_length": 256, "validation_samples": 8},
            "steps": HEALING_STEPS,
            "batch_size": 8,
        }
    )
    done = finetune(str(folder), options, folder.with_name(f"{folder.name}-healed"))
    same = {name: getattr(raw, name) for name in ("kept", "parameters", "speed")}
    return reader.row(
        f"{raw.label}, healed",
        done.folder,
        healed=True,
        error=None,
        seconds=done.facts.seconds,
        **same,
    )


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, texts: Sequence[str]) -> float:
    """Measures the perplexity per token, each text on its own; padding does not count.

    Args:
        model: Causal language model.
        tokenizer: Its tokenizer.
        texts: Texts; what exceeds the model's context is cut off.
    """
    loss, count = 0.0, 0
    for first in range(0, len(texts), _BATCH):
        ids, mask = _encoded(model, tokenizer, texts[first : first + _BATCH])
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        losses = cross_entropy(logits.mT.float(), ids[:, 1:], reduction="none")
        loss += float((losses * mask[:, 1:]).sum(dtype=torch.float64))
        count += int(mask[:, 1:].sum())
    return math.exp(loss / count)


def _encoded(model: Any, tokenizer: Any, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Encodes texts.  # (texts, tokens) each."""
    encoded = tokenizer(
        list(texts),
        padding=True,
        padding_side="right",
        truncation=True,
        max_length=model.config.max_position_embeddings,
        return_tensors="pt",
    )
    return encoded["input_ids"], encoded["attention_mask"]


def continuation(model: Any, tokenizer: Any, prompt: str) -> str:
    """Continues a prompt, always with the likeliest token."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=_NEW_TOKENS, max_length=None)
    start = inputs["input_ids"].shape[1]
    text: str = tokenizer.decode(output[0, start:], skip_special_tokens=True)
    return text.rstrip()
