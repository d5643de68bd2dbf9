"""Answers of choosing: what every kind of budget makes of ten tiny models, on a counted clock.

    python -m tests.answers OUT.json [--all] [--only 'bert: *']

writes plans to the last bit, SHA-256 of all files and the texts of refusals: outputs of two trees
on one machine differ by `diff` wherever an answer does. `tests/golden/test_answers.py` compares
what is the same on all processors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# Before huggingface_hub is imported: times that were measured are kept nowhere.
os.environ["HF_ASSETS_CACHE"] = f"{os.devnull}/none"

import torch
from pydantic import ValidationError
from transformers.utils.logging import disable_progress_bar

from tcompress.artifact.manifest import read_manifest
from tcompress.conversion.converter import convert
from tcompress.data.calibration import CalibrationData
from tcompress.errors import TCompressError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.entries import Plan
from tests.support.cli import run
from tests.support.conversions import few_steps
from tests.support.counted_clock import counted_clock, dense_seconds
from tests.support.depth import deep
from tests.support.evaluation import one_thread
from tests.support.golden import masked
from tests.support.model_folders import save_tokenizer, sentences, text_file
from tests.support.sentence_folders import MEAN, base
from tests.support.tiny import TINY, TinyModel

Recipe = dict[str, Any]

# ---------------------------------------------------------------- models
_TEXT = TINY["bert"].options
_SQUEEZED = {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate")}


def _model(family: str, head: str, **options: Any) -> TinyModel:
    """Describe a text model of BERT's sizes."""
    return TinyModel(f"{family}Config", f"{family}{head}", {**_TEXT, **options})


@dataclass(frozen=True)
class Subject:
    """A model to compress, and how its folder is written if not by itself."""

    tiny: TinyModel
    writer: Callable[[Path], object] | None = None

    def write(self, folder: Path) -> None:
        if self.writer is not None:
            self.writer(folder)
            return
        self.tiny.build().save_pretrained(folder)
        if "text" in self.tiny.needs:
            save_tokenizer(folder)

    def data(self) -> CalibrationData:
        """Batches of eight inputs; the last two are held out."""
        batches = [self.tiny.inputs(8, 12, seed) for seed in range(6)]
        return CalibrationData(batches, [4, 5], "tiny", 48, 576, self.tiny.model)


MODELS: Mapping[str, Subject] = {
    "bert": Subject(TINY["bert"]),
    "llama": Subject(deep("llama", 3)),
    "t5": Subject(TINY["t5"]),
    "vit": Subject(TINY["vit"]),
    "experts": Subject(TINY["qwen3_moe"]),  # in the second block
    "fused": Subject(TINY["phi3"]),  # q, k, v, and gate and up
    "tied": Subject(TINY["gpt2"]),  # the head to the word embedding; weights are transposed
    "convolutions": Subject(
        _model("SqueezeBert", "Model", embedding_size=32, output_groups=1, **_SQUEEZED)
    ),
    "shared": Subject(_model("Albert", "ForMaskedLM", embedding_size=16)),  # one block, run twice
    "encoder": Subject(TINY["bert"], lambda folder: base(folder, MEAN, "Normalize")),
}

# ---------------------------------------------------------------- budgets
AUTO, SVD, LPROD, WIDTH = ({"name": name} for name in ("auto", "svd", "lprod", "width"))
PREDICTED = {"name": "auto", "trials": False}
TT, TUCKER = {"name": "tt"}, {"name": "tucker"}
NONE = {"calibration": {"source": "none"}}
AT = "4x8"


def _of(method: Mapping[str, Any], **options: Any) -> Recipe:
    """A recipe of a method."""
    return {"method": method, **options}


@dataclass(frozen=True)
class Share:
    """A share of what the dense model has, for limits that count."""

    of_dense: float

    def of(self, option: str, source: SourceModel, parameters: int) -> int | str:
        """Write the limit as an option takes it."""
        if option == "latency":
            return f"{1e3 * self.of_dense * dense_seconds(source):.6f}ms"
        return round(self.of_dense * parameters * (4 if option == "target_bytes" else 1))


EVERYWHERE: Mapping[str, Recipe] = {
    "auto target": _of(AUTO, target=0.4),
    "svd or lprod target": _of({**AUTO, "offer": ["svd", "lprod"]}, target=0.4),
    "svd target": _of(SVD, target=0.5),
    "lprod target": _of(LPROD, target=0.5),
    "width target": _of(WIDTH, target=0.7),
    "svd uniform": _of(SVD, target=0.5, allocation="uniform"),
    "auto params": _of(AUTO, target_params=Share(0.8)),
    "auto bytes": _of(PREDICTED, target_bytes=Share(0.6)),
    "auto speedup": _of(AUTO, speedup=1.3, at=AT),
    "width speedup": _of(WIDTH, speedup=1.25, at=AT),
    "svd latency": _of(SVD, latency=Share(0.8), at=AT),
    "auto speedup and target": _of(PREDICTED, speedup=1.2, target=0.6, at=AT),
    "auto error": _of(AUTO, max_error=0.3),
    "svd loss": _of(SVD, max_loss=0.3),
    "svd tol": _of({**SVD, "tol": 0.2}),
    "plain target": _of(WIDTH, plain=True, target=0.75),
    "plain speedup": _of(WIDTH, plain=True, speedup=1.15, at=AT),
    "drop auto": _of(SVD, drop_layers="auto", target=0.4),
    "auto target, none": _of(AUTO, target=0.4, **NONE),
    "svd params, none": _of(SVD, target_params=Share(0.8), **NONE),
    "svd error, none": _of(SVD, max_error=0.3, **NONE),
    "svd tol, none": _of({**SVD, "tol": 0.2}, **NONE),
}
"""Asked of all models."""

MORE: Mapping[str, Recipe] = {
    "auto target, predicted": _of(PREDICTED, target=0.3),
    "auto target, offered": _of({**AUTO, "offer": ["svd", "width", "tt"]}, target=0.35),
    "auto target, input moments": _of(PREDICTED, target=0.4, calibration={"output_moments": False}),
    "tt target": _of(TT, target=0.4),
    "tucker target": _of({**TUCKER, "share": "none"}, target=0.4),
    "tucker of the model": _of({**TUCKER, "share": "model"}, target=0.4),
    "svd rank": _of({**SVD, "rank": 4}),
    "svd of fewer channels": _of(SVD, target=0.3, keep_neurons=0.75, head_size=0.5),
    "lprod and a residual": _of(LPROD, target=0.6, residual_rank=2),
    "svd by rules": _of(SVD, target=0.5, keep=["o"], layers=[{"match": "*.0.*", "target": 0.3}]),
    "svd and a table": _of(SVD, target=0.5, embeddings=_of(SVD, target=0.5)),
    "svd params": _of(SVD, target_params=Share(0.8)),
    "width params": _of(WIDTH, target_params=Share(0.85)),
    "svd params out of reach": _of(SVD, target_params=10),
    "svd params for nothing": _of(SVD, target_params=Share(1.5)),
    "svd bytes": _of(SVD, target_bytes=Share(0.7)),
    "svd bytes of float16": _of(SVD, target_bytes=Share(0.4), dtype="float16"),
    "width bytes": _of(WIDTH, target_bytes=Share(0.5)),
    "svd bytes in 8 bits": _of(SVD, target_bytes=Share(0.25), bits=8),
    "svd bytes, uniform": _of(SVD, target_bytes=Share(0.8), allocation="uniform"),
    "auto bytes out of reach": _of(PREDICTED, target_bytes=100),
    "svd speedup": _of(SVD, speedup=1.3, at=AT),
    "lprod speedup": _of(LPROD, speedup=1.2, at=AT),
    "auto speedup, tight": _of(AUTO, speedup=2.2, at=AT),
    "auto speedup out of reach": _of(PREDICTED, speedup=50, at=AT),
    "auto latency": _of(PREDICTED, latency=Share(0.7)),
    "width speedup of decoding": _of(WIDTH, speedup=1.1, at="decode"),
    "svd speedup and target": _of(SVD, speedup=1.1, target=0.6, at=AT),
    "width speedup and params": _of(WIDTH, speedup=1.2, target_params=Share(0.9), at=AT),
    "auto speedup and bytes": _of(PREDICTED, speedup=1.2, target_bytes=Share(0.8), at=AT),
    "svd speedup and target out of reach": _of(SVD, speedup=1.1, target=0.01, at=AT),
    "svd error": _of(SVD, max_error=0.2),
    "width error": _of(WIDTH, max_error=0.3),
    "svd error out of reach": _of(SVD, max_error=1e-9),
    "auto loss": _of(AUTO, max_loss=0.3),
    "width loss of time": _of(WIDTH, max_loss=0.3, at=AT),
    "svd loss out of reach": _of(SVD, max_loss=1e-9),
    "tt tol": _of({**TT, "tol": 0.2}),
    "plain neurons": _of(WIDTH, plain=True, keep_neurons=0.5),
    "plain params": _of(WIDTH, plain=True, target_params=Share(0.85)),
    "plain bytes": _of(WIDTH, plain=True, target_bytes=Share(0.85)),
    "plain bytes out of reach": _of(WIDTH, plain=True, target_bytes=100),
    "plain speedup and target": _of(WIDTH, plain=True, speedup=1.1, target=0.6, at=AT),
    "plain speedup out of reach": _of(WIDTH, plain=True, speedup=50, at=AT),
    "drop auto of params": _of(AUTO, drop_layers="auto", target_params=Share(0.7)),
    "drop auto of bytes": _of(SVD, drop_layers="auto", target_bytes=Share(0.7)),
    "drop one": _of(SVD, drop_layers=1, target=0.5),
    "drop one, in time": _of(WIDTH, drop_layers=1, speedup=1.1, at=AT),
    "keep one of bytes": _of(SVD, keep_layers=[0], target_bytes=Share(0.5)),
    "random, svd target": _of(SVD, init="random", target=0.5),
    "lprod target, none": _of(LPROD, target=0.5, **NONE),
    "width target, none": _of(WIDTH, target=0.7, **NONE),
    "auto params, none": _of(AUTO, target_params=Share(0.8), **NONE),
    "auto bytes, none": _of(AUTO, target_bytes=Share(0.7), **NONE),
    "auto error, none": _of(AUTO, max_error=0.3, **NONE),
    "tt tol, none": _of({**TT, "tol": 0.3}, **NONE),
    "drop one, none": _of(SVD, drop_layers=1, target=0.5, **NONE),
}
"""Asked of some."""

BUDGETS: Mapping[str, Recipe] = {**EVERYWHERE, **MORE}
OF_BYTES = [name for name in MORE if "bytes" in name]
OF_DECODING = [name for name in MORE if "decoding" in name]
OF_TIME = [name for name in MORE if "speedup" in name or "latency" in name]
OF_PLAIN = [name for name in MORE if "plain" in name]
OTHERS: Mapping[str, Sequence[str]] = {
    "bert": [*MORE],
    "llama": [*MORE],
    "t5": [*OF_PLAIN, *OF_TIME, "drop one", "tucker target"],
    "vit": [*OF_PLAIN, "svd error", "auto loss"],
    "experts": [*OF_DECODING, *OF_BYTES, "lprod target, none", "svd error out of reach"],
    "fused": [*OF_DECODING, *OF_PLAIN, "svd of fewer channels"],
    "tied": [*OF_DECODING, *OF_BYTES, "svd and a table"],
    "convolutions": ["tt target", "svd error"],
    "shared": ["tt target", "lprod target, none", "auto params, none", "auto error, none"],
    "encoder": ["auto loss", "width loss of time", "svd bytes", "drop auto of params"],
}
"""Of `MORE`, by model."""

SPEEDS = "auto speedups"
"""Several models of one measurement, by the command."""

CONTRADICTIONS: Mapping[str, Recipe] = {
    "two sizes": _of(SVD, target=0.5, target_params=100),
    "two times": _of(SVD, speedup=2, latency="5ms"),
    "time and error": _of(SVD, speedup=2, max_error=0.1),
    "time without data": _of(SVD, speedup=2, **NONE),
    "time of channels": _of(SVD, speedup=2, keep_neurons=8),
    "time and shared factors": _of({**TUCKER, "share": "model"}, speedup=2),
    "time and depth": _of(SVD, speedup=2, drop_layers="auto"),
    "time at random": _of(SVD, speedup=2, init="random"),
    "pass without time": _of(SVD, target=0.5, at=AT),
    "loss without data": _of(SVD, max_loss=0.1, **NONE),
    "loss and shared factors": _of({**TUCKER, "share": "model"}, max_loss=0.1),
    "error and shared factors": _of({**TUCKER, "share": "model"}, max_error=0.1),
    "rank and target": _of({**SVD, "rank": 4}, target=0.5),
    "tol and target": _of({**SVD, "tol": 0.1}, target=0.5),
    "tol in rules": _of(SVD, layers=[{"match": "*", "method": {**SVD, "tol": 0.1}}]),
    "error at random": _of(SVD, max_error=0.1, init="random"),
    "depth without a size": _of(SVD, drop_layers="auto", max_error=0.1),
    "depth without data": _of(SVD, drop_layers="auto", target=0.5, **NONE),
    "plain and svd": _of(SVD, plain=True, target=0.5),
    "plain and error": _of(WIDTH, plain=True, max_error=0.1),
    "plain, two sizes": _of(WIDTH, plain=True, target=0.5, keep_neurons=8),
    "auto and a residual": _of(AUTO, target=0.5, residual_rank=2),
    "nothing": {"target": 0.5},
}
"""Refused before any model is looked at."""


# ---------------------------------------------------------------- answers
@dataclass(frozen=True)
class Answer:
    """A plan with the folder that came of it, or a refusal."""

    plan: Plan | None = None
    files: Mapping[str, str] | None = None  # SHA-256 by file, of the manifest by section
    refusal: str = ""

    def exact(self) -> dict[str, Any]:
        """Everything, to the last bit."""
        if self.plan is None:
            return {"refusal": self.refusal}
        return {"plan": self.plan.model_dump(mode="json"), "files": self.files}

    def portable(self) -> dict[str, Any]:
        """Facts that processors agree on: choices by a digest, and few numbers."""
        if self.plan is None:
            return {"refusal": self.refusal}
        plan = self.plan
        facts: dict[str, Any] = {"forms": _forms(plan), "kept": plan.structured_rewritten}
        facts["saved"] = plan.saved
        if plan.depth is not None:
            facts["depth"] = {stack.path: list(stack.kept) for stack in plan.depth.stacks}
        if plan.budget is not None:
            given = plan.budget.model_dump(mode="json", exclude_defaults=True)
            facts["budget"] = {key: given[key] for key in given if key not in ("kind", "seconds")}
        dumped = plan.model_dump(mode="json", exclude_defaults=True)
        facts["choices"] = _sha(json.dumps(_without_floats(dumped)).encode())[:12]
        return facts


def _forms(plan: Plan) -> dict[str, int]:
    """Numbers of parts of layers by structure, of tables, and of layers that stay dense."""
    counts = Counter(
        "+".join(term.structure for term in part.terms)
        for entry in plan.layers
        for part in entry.parts
    )
    counts["tables"], counts["dense"] = len(plan.embeddings), len(plan.left)
    return {name: count for name, count in sorted(counts.items()) if count}


def _without_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(_without_floats, value)]
    return "float" if isinstance(value, float) else value


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


VARYING = (
    *("created", "seconds", "stage_seconds", "speed", "tool_version", "environment"),
    *("digest", "checksums", "sizes"),
)
"""Sections of the manifest that differ from run to run, or that follow from other files."""


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of all files; of the manifest, by section."""
    digests: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, content = str(path.relative_to(folder)), path.read_bytes()
        if name == "tcompress.json":
            sections = json.loads(content)
            for key in sorted(sections.keys() - {*VARYING, "plan"}):
                digests[f"{name} {key}"] = _sha(json.dumps(sections[key]).encode())
        elif name == "README.md":
            digests[name] = _sha(masked(content.decode()).encode())
        else:
            digests[name] = _sha(content)
    return digests


@dataclass(frozen=True)
class Case:
    """What is asked of a model; the folder that it works in has the model in a folder."""

    model: str
    budget: str

    def __str__(self) -> str:
        return f"{self.model}: {self.budget}"

    def answers(self) -> dict[str, Answer]:
        """Convert, and say what came of it by name; nothing may stay of what was refused."""
        if self.model != OPTIONS and not Path(self.model).exists():
            MODELS[self.model].write(Path(self.model))
        torch.manual_seed(0)
        before = {*Path().iterdir()}
        try:
            if self.budget == SPEEDS:
                return {f"{self}, {name}": answer for name, answer in self._speeds().items()}
            return {str(self): self._one()}
        except (ValidationError, TCompressError) as error:
            left = sorted(path.name for path in {*Path().iterdir()} - before)
            assert not left, f"{self}: {left} are left of what was refused"
            return {str(self): Answer(refusal=_text(error))}
        finally:
            for path in {*Path().iterdir()} - before:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _one(self) -> Answer:
        if self.model == OPTIONS:
            Convert.model_validate(CONTRADICTIONS[self.budget])
            raise AssertionError(f"`{self.budget}` is not refused")
        recipe = self._recipe(SourceModel.open(self.model))
        data = None if recipe.calibration.is_none else MODELS[self.model].data()
        made = convert(self.model, recipe, "out", data=data)
        return Answer(made.manifest.plan, _digests(made.folder))

    def _recipe(self, source: SourceModel) -> Convert:
        parameters = sum(parameter.numel() for parameter in source.keymap.model.parameters())
        options = {
            key: value.of(key, source, parameters) if isinstance(value, Share) else value
            for key, value in BUDGETS[self.budget].items()
        }
        return Convert.model_validate({"device": "cpu", **options})

    def _speeds(self) -> dict[str, Answer]:
        texts = Path("out", "texts.txt")
        texts.parent.mkdir()
        text_file(texts, sentences(60))
        options = ("--speedup", "1.2,1.6", "--at", AT, "--calib", texts, "--calib-samples", 60)
        done = run("convert", self.model, *options, "--device", "cpu", "-o", "out/models")
        assert done.code == 0, done.err
        found = {}
        for path in sorted(Path("out/models").iterdir()):
            manifest = read_manifest(path) if path.is_dir() else None
            if manifest is not None:
                found[path.name] = Answer(manifest.plan, _digests(path))
        assert len(found) > 1, done.out
        return found


def _text(error: ValidationError | TCompressError) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(str(problem["msg"]) for problem in error.errors())
    return f"{type(error).__name__}: {error}"


OPTIONS = "options"
GRID = [Case(OPTIONS, name) for name in CONTRADICTIONS]
GRID += [
    Case(model, budget)
    for model in MODELS
    for budget in dict.fromkeys((*EVERYWHERE, *OTHERS[model]))
]
GRID += [Case("bert", SPEEDS)]
"""All cases."""

SAMPLE: Mapping[str, Sequence[str]] = {
    "bert": [
        "auto target", "svd or lprod target", "tucker target", "svd bytes", "auto speedup",
        "auto speedup and target", "svd loss", "svd tol, none", "svd params out of reach",
    ],
    "llama": [
        "drop auto", "width target", "auto error", "svd latency", "auto bytes, none",
        "auto speedup out of reach", "svd speedup and target out of reach", "random, svd target",
    ],
    "t5": ["svd tol", "plain target", "width speedup", "drop auto", "width speedup of decoding"],
    "vit": ["svd uniform", "auto params", "svd loss"],
    "experts": ["auto target", "auto bytes", "svd error, none"],  # width turns on last digits
    "fused": ["width target", "plain speedup", "svd of fewer channels"],
    "tied": ["svd and a table", "svd bytes of float16", "auto speedup"],
    "convolutions": ["svd target", "auto error"],
    "shared": ["svd target", "auto target, none"],
    "encoder": ["auto target", "svd loss"],
}  # fmt: skip
"""Budgets of every model that are asked for often."""


def is_often(case: Case) -> bool:
    """Tell whether a case belongs to the sample."""
    return case.model == OPTIONS or case.budget in SAMPLE.get(case.model, ())


@contextmanager
def quiet_machine() -> Iterator[None]:
    """A machine on which answers are the same each time, in an empty folder."""
    disable_progress_bar()
    with ExitStack() as stack:
        stack.enter_context(chdir(stack.enter_context(tempfile.TemporaryDirectory())))
        for context in (one_thread, few_steps, counted_clock):
            stack.enter_context(context())
        yield


def main() -> None:
    """Write exact answers of the sample, or of the whole grid."""
    parser = argparse.ArgumentParser(prog="python -m tests.answers", description=main.__doc__)
    parser.add_argument("output", type=lambda text: Path(text).absolute())
    parser.add_argument("--all", action="store_true", help="the whole grid")
    parser.add_argument("--only", default="*", help="cases of this pattern, such as 'bert: *'")
    given = parser.parse_args()
    answers: dict[str, Any] = {}
    cases = [
        case for case in GRID if (given.all or is_often(case)) and fnmatch(str(case), given.only)
    ]
    try:
        with quiet_machine():
            for case in cases:
                start = time.process_time()
                try:
                    for name, answer in case.answers().items():
                        answers[name] = answer.exact()
                except Exception as error:  # a defect, which ends no comparison
                    answers[str(case)] = {"crash": f"{type(error).__name__}: {error}"}
                sys.stderr.write(f"{time.process_time() - start:6.2f} s  {case}\n")
    finally:
        given.output.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
