"""Tiny models of every structure and mechanism: their files and their numbers.

Factors may change their signs and order; so weights are compared multiplied out, and what the
loaded model computes from them.
"""

import json
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForMaskedLM

import tcompress  # noqa: F401  # loads converted models
from tests.support.cli import worked
from tests.support.golden import Golden, masked
from tests.support.model_folders import model_folder, sentences, text_file
from tests.support.tiny import TINY

SCRATCH = """\
recipe_version: 1
name: drawn
architecture: {model_type: bert, class: BertForMaskedLM, vocab_size: 100, hidden_size: 32,
  num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 64, max_position_embeddings: 64}
convert: {init: random, method: {name: lprod, p: 4}, positions: harmonic, norm: tensor}
"""
STRUCTURES = {
    "svd": "--method svd --rank 6",
    "lprod-dct": "--method lprod --p 4 --transform dct",
    "lprod-fitted": "--method lprod --p 4 --transform fitted",
    "tt": "--method tt --order 3 --rank 4",
    "tucker": "--method tucker --share model --target 0.4",
    "auto": "--method auto --target 0.4",
    "shallow": "--method lprod --p 4 --residual-rank 2 --keep-layers 1 --keep down "
    "--embeddings svd --embedding-target 0.5",
}
REPLACEMENTS = {
    "tsa": "--method tsa --filter-order 3",
    "hot": "--method hot --fold 4",
    "tam": "--method tam --core tucker --memory gru",
    "multilinear": "--method multilinear --length 12",
}
COMMANDS = {
    name: f"convert ./bert {options} --calib none --device cpu"
    for name, options in (STRUCTURES | REPLACEMENTS).items()
} | {
    "calibrated": "convert ./bert --method auto --target 0.4 --no-trials --calib texts.txt "
    "--calib-samples 1024 --device cpu",
    "scratch": "run scratch.yaml --set convert.device=cpu",
}
WITHIN = {"lprod-fitted": 2e-3, "calibrated": 2e-3}  # searched for in steps, which follow rounding
EVERY = 7  # of the numbers of a tensor, one in so many is stored


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with models, in which commands run."""
    folder = tmp_path_factory.mktemp("models")
    model_folder("bert", folder / "bert", processor=False)
    (folder / "scratch.yaml").write_text(SCRATCH)
    text_file(folder / "texts.txt", sentences(40))
    with chdir(folder):
        yield folder


@cache
def _made(folder: Path, name: str) -> Path:
    worked(*COMMANDS[name].split(), "--quiet", "-o", name)
    return folder / name


def _header(path: Path) -> dict[str, Any]:
    """Shapes and types of tensors, and what else stands before them."""
    with safe_open(path, "pt") as file:
        parts = {name: file.get_slice(name) for name in sorted(file.keys())}
        shapes = {name: f"{part.get_dtype()} {part.get_shape()}" for name, part in parts.items()}
        return {"bytes": path.stat().st_size, "metadata": file.metadata(), "tensors": shapes}


@pytest.mark.often(
    "multilinear", "scratch", "svd", "lprod-dct", "lprod-fitted", "tt", "tucker", "auto", "hot"
)
@pytest.mark.parametrize("name", COMMANDS)
def test_files(name: str, folder: Path, golden: Golden) -> None:
    made = _made(folder, name)
    manifest = json.loads((made / "tcompress.json").read_text())
    found = {
        "command": COMMANDS[name],
        "files": sorted(path.name for path in made.iterdir()),
        "model.safetensors": _header(made / "model.safetensors"),
        "quantization_config": json.loads((made / "config.json").read_text())[
            "quantization_config"
        ],
        "tcompress.json": {**manifest, "digest": "<digest>", "sizes": [*manifest["sizes"]]},
        "README.md": masked((made / "README.md").read_text()).splitlines(),
    }
    within = WITHIN.get(name, 1e-4)
    golden.document(f"artefacts/{name}.json", found, hide={"checksums"}, within=within)


@pytest.mark.often(
    "lprod-dct", "tucker", "svd", "lprod-fitted", "tt", "auto", "hot", "multilinear", "scratch"
)
@pytest.mark.parametrize("name", COMMANDS)
def test_numbers(name: str, folder: Path, golden: Golden) -> None:
    made = _made(folder, name)
    before = load_file("bert/model.safetensors")
    found = load_file(made / "model.safetensors")
    if name not in (*REPLACEMENTS, "scratch"):
        worked("export", made, "-o", f"{name}-dense", "--quiet")
        found = load_file(f"{name}-dense/model.safetensors")
    changed = {key: tensor for key, tensor in found.items() if _is_new(tensor, before.get(key))}
    with torch.no_grad():
        model = AutoModelForMaskedLM.from_pretrained(made)
        changed["logits"] = model(**TINY["bert"].inputs(2, 8, seed=50)).logits
    few = {key: tensor.flatten()[::EVERY] for key, tensor in changed.items()}
    golden.tensors(f"artefacts/{name}.safetensors", few, within=WITHIN.get(name, 1e-4))


def _is_new(tensor: Tensor, before: Tensor | None) -> bool:
    """Whether the conversion made it; empty ones only hold places."""
    return tensor.numel() > 0 and (before is None or not torch.equal(tensor, before))


def test_every_file_is_of_a_row(golden: Golden) -> None:
    golden.only(
        "artefacts", [f"{name}.{kind}" for name in COMMANDS for kind in ("json", "safetensors")]
    )
