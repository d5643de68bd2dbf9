"""The offline demonstration: a small language model that ships, converted in several ways."""

from __future__ import annotations

import math
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
from tcompress.conversion.run import Converted, convert
from tcompress.files import write_text
from tcompress.options import Calibration, Convert
from tcompress.progress import Progress, Silent
from tcompress.reporting.model import report_of
from tcompress.structures.lowrank import LowRankSpec
from tcompress.structures.lprod import LprodSpec

PROMPT = "Once upon a time there was"
FITTING_STORIES = 40
"""Held-out stories that calibrate; perplexity is measured on the others."""

_BATCH = 16
_NEW_TOKENS = 40


@dataclass(frozen=True)
class Variant:
    """One way of converting the model.

    Attributes:
        folder: Name of the folder.
        label: Name for people.
        options: The conversion, but for its calibration.
        calibrated: Whether the fit looks at stories.
    """

    folder: str
    label: str
    options: dict[str, Any]
    calibrated: bool = True


VARIANTS: tuple[Variant, ...] = (
    Variant(
        "lprod-p4-dct",
        "lprod p=4, dct, no data",
        {"method": LprodSpec(p=4, transform="dct")},
        calibrated=False,
    ),
    Variant("lprod-p4", "lprod p=4, fitted", {"method": LprodSpec(p=4)}),
    Variant("svd-25", "svd, a quarter", {"method": LowRankSpec(), "target": 0.25}),
    Variant("svd-50", "svd, half", {"method": LowRankSpec(), "target": 0.5}),
    Variant(
        "lprod-p16-50", "lprod p=16 + low rank, half", {"method": LprodSpec(p=16), "target": 0.5}
    ),
)
"""From the paper's layer on pretrained weights, through what data adds, to the best of its size."""


class DemoRow(BaseModel):
    """What came of one model.

    Attributes:
        label: Name of the model.
        kept: Kept fraction of the rewritten layers' parameters.
        parameters: Parameters of the rewritten layers.
        bytes: Size of the weight files.
        perplexity: Perplexity per token on stories that nothing was fitted to.
        error: Mean relative squared output error of the rewritten layers on held-out stories; None
            without data.
        seconds: Time of the conversion.
        text: Greedy continuation of the prompt.
    """

    model_config = ConfigDict(frozen=True)

    label: str
    kept: float
    parameters: int
    bytes: int
    perplexity: float
    error: float | None
    seconds: float
    text: str


class DemoReport(BaseModel):
    """All rows and how they were measured."""

    model_config = ConfigDict(frozen=True)

    prompt: str
    fitting_stories: int
    measured_stories: int
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
    with as_file(files("tcompress").joinpath("data", "demo")) as folder:
        stories = (folder / "heldout.txt").read_text(encoding="utf-8").splitlines()
        yield DemoData(folder / "model", tuple(story for story in stories if story.strip()))


def run_demo(
    data: DemoData,
    output: Path,
    variants: Sequence[Variant] | None = None,
    progress: Progress | None = None,
) -> DemoReport:
    """Converts a language model in several ways and compares the results.

    Args:
        data: The model and its held-out texts: the first calibrate, the others measure.
        output: Folder for the converted models; must be empty.
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
    stories = output / "stories.txt"
    write_text(stories, "\n".join(fitting) + "\n")
    reader = _Reader(AutoTokenizer.from_pretrained(data.model), measured)
    rows: list[DemoRow] = []
    progress.stage("models", len(variants) + 1, "models")
    for variant in variants:
        done = _converted(variant, data.model, output, stories)
        if not rows:
            rows.append(_dense_row(reader, data.model, done))
            progress.advance(1, "dense")
        rows.append(_row(reader, variant, done))
        progress.advance(1, variant.label)
    return DemoReport(
        prompt=PROMPT,
        fitting_stories=len(fitting),
        measured_stories=len(measured),
        rows=tuple(rows),
    )


def _converted(variant: Variant, model: Path, output: Path, stories: Path) -> Converted:
    source = str(stories) if variant.calibrated else "none"
    # As the command line does: everything else is a default.
    recipe = Convert(**variant.options, calibration=Calibration(source=source))
    return convert(str(model), recipe, output / variant.folder)


def _dense_row(reader: _Reader, model: Path, done: Converted) -> DemoRow:
    parameters = done.manifest.plan.dense_rewritten
    return reader.row("dense", model, kept=1.0, parameters=parameters, error=None, seconds=0.0)


def _row(reader: _Reader, variant: Variant, done: Converted) -> DemoRow:
    report = report_of(done.folder)
    return reader.row(
        variant.label,
        done.folder,
        kept=report.parameters.rewritten.kept,
        parameters=report.parameters.rewritten.now,
        error=report.errors.get("held_out"),
        seconds=done.manifest.seconds,
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
