"""Memory and time of conversions of a large Llama, measured on its first blocks and as estimated.

    python benchmarks/large.py FOLDER [--shape 1b|7b] [--blocks 2] [--methods svd,lprod,width,auto]
        [--samples 64] [--length 512] [--bf16] [--dry-run]

Writes a sharded bfloat16 checkpoint of random weights into FOLDER (kept for later runs), and
converts it in a process of its own for each method: without data where `--samples 0`, else with
samples of random tokens, of which a tenth is held out (`--bf16`: passes in bfloat16). Printed are
the peak of resident memory above that of an interpreter with all imports, what the estimate of
such a model says, seconds by stage as the manifest has them, and what the estimate says of all
blocks. `--dry-run` only estimates: weights are then a file with nothing in it, so that seven
billion parameters take no space.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from memory import SHAPE, make_checkpoint, peak_of

from tcompress.conversion.converter import convert
from tcompress.conversion.estimate import estimate
from tcompress.data.calibration import CalibrationData, most_tokens
from tcompress.memory import keep_freed_memory, use_huge_pages
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.planner import make_plan

SHAPES = {
    "1b": SHAPE,
    "7b": {
        **SHAPE,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
}
METHODS: dict[str, dict[str, Any]] = {
    "svd": {"method": {"name": "svd"}, "target": 0.25},
    "svd-inputs": {
        "method": {"name": "svd"},
        "target": 0.25,
        "calibration": {"output_moments": False},
    },
    "svd-alike": {
        "method": {"name": "svd"},
        "target": 0.25,
        "allocation": "uniform",
        "calibration": {"output_moments": False},
    },
    "lprod": {"method": {"name": "lprod", "p": 4}},
    "width": {"method": {"name": "width"}, "target": 0.25},
    "auto": {"method": {"name": "auto"}, "target": 0.25},
}
CONVERT = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from large import converted
folder, recipe, output, samples, length = sys.argv[1:]
converted(folder, json.loads(recipe), output, int(samples), int(length))
"""


def converted(
    folder: str, recipe: dict[str, Any], output: str, samples: int, length: int
) -> dict[str, Any]:
    """Convert a model, fitted to texts of random tokens; return the seconds of its stages."""
    keep_freed_memory()  # as commands do
    use_huge_pages()
    source, data = SourceModel.open(folder), None
    if samples:
        config, random = source.config, torch.Generator().manual_seed(0)
        size = max(1, most_tokens(source, config.intermediate_size) // length)
        ids = torch.randint(config.vocab_size, (samples, length), generator=random)
        held = max(1, samples // 10)
        parts = [part.split(size) for part in ids.split([samples - held, held])]
        batches = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in chain(*parts)]
        origins = dict.fromkeys(range(len(parts[0]), len(batches)), "random")
        facts = ("random", samples, ids.numel(), "0", origins)
        data = CalibrationData(batches, [*origins], *facts)
    done = convert(source, Convert.model_validate(recipe), output, data=data, force=True)
    return dict(done.manifest.stage_seconds)


def empty_checkpoint(folder: Path, shape: dict[str, Any]) -> None:
    """Write a checkpoint whose weights are holes in a file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        size = 2 * prod(tensor.shape)
        offsets = [end, end + size]
        header[name] = {"dtype": "BF16", "shape": [*tensor.shape], "data_offsets": offsets}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def recipe_of(method: str, samples: int, length: int, *, bf16: bool = False) -> dict[str, Any]:
    """Options of a conversion; a text counts as a quarter of the longest length allowed."""
    data = {"source": "none"} if not samples else {"source": "builtin", "samples": samples}
    if samples:
        data |= {"source": "random.txt", "max_length": 4 * length}
        data |= {"mixed_precision": "bf16" if bf16 else "no"}
        data |= METHODS[method].get("calibration", {})
    return {**METHODS[method], "calibration": data, "device": "cpu"}


def estimated(folder: Path, recipe: dict[str, Any]) -> Any:
    """Estimate a conversion."""
    source, options = SourceModel.open(str(folder)), Convert.model_validate(recipe)
    return estimate(make_plan(options, source), source, options)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--blocks", type=int, help="of the measured model; default all")
    parser.add_argument("--methods", default="svd,lprod,width,auto")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    whole = args.folder / f"{args.shape}-empty"
    empty_checkpoint(whole, shape)
    blocks = args.blocks or shape["num_hidden_layers"]
    source = args.folder / f"{args.shape}-{blocks}"
    if not args.dry_run and not source.exists():
        make_checkpoint(source, torch.bfloat16, {**shape, "num_hidden_layers": blocks})
    imports = "import tcompress.conversion.converter, transformers.models.llama.modeling_llama"
    loaded = 0.0 if args.dry_run else peak_of(imports)[0]
    for method in args.methods.split(","):
        recipe = recipe_of(method, args.samples, args.length, bf16=args.bf16)
        costs = estimated(whole, recipe)
        print(f"{method}, all blocks as estimated: {_words(costs)}", flush=True)
        if args.dry_run:
            continue
        part, output = estimated(source, recipe), args.folder / "out"
        given = (str(source), json.dumps(recipe), str(output), str(args.samples), str(args.length))
        peak, seconds = peak_of(CONVERT, *given)
        print(f"  {blocks} blocks as estimated: {_words(part)}")
        print(f"  {blocks} blocks measured: {(peak - loaded) / 1e3:.2f} GB, {seconds:.0f} s")
        print(
            f"  {json.loads((output / 'tcompress.json').read_text())['stage_seconds']}", flush=True
        )
        shutil.rmtree(output)


def _words(costs: Any) -> str:
    memory, scratch = costs.memory_bytes / 1e9, costs.scratch_bytes / 1e9
    read, hours = costs.read_bytes / 1e9, costs.seconds / 3600
    return f"{memory:.2f} GB, {hours:.2f} h, {scratch:.1f} GB on disk, {read:.0f} GB read"


if __name__ == "__main__":
    main()
