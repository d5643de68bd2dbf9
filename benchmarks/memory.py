"""Peak memory and time of a data-free conversion of a synthetic 1.1-billion-parameter Llama.

    python benchmarks/memory.py FOLDER [--method lprod|svd] [--dtype bfloat16]

Writes a sharded checkpoint of random weights into FOLDER/source (kept for later runs), converts
it in a process of its own, and compares that process's peak resident memory with that of an
interpreter that has only loaded torch. The time is compared with that of copying the files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
CONVERT = """
import sys
from tcompress.conversion.converter import convert
from tcompress.options import Convert
import json
convert(sys.argv[1], Convert.model_validate(json.loads(sys.argv[2])), sys.argv[3], force=True)
"""


def make_checkpoint(folder: Path, dtype: torch.dtype, shape: Mapping[str, Any] = SHAPE) -> None:
    """Writes random weights, shard by shard."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tcompress.artifact.format import Stored, plan_shards, write_index, write_shard

    folder.mkdir(parents=True)
    config = {**shape, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tensors = [Stored(k, tuple(v.shape), dtype) for k, v in model.state_dict().items()]
    shards = plan_shards(tensors, "500MB")
    generator = torch.Generator().manual_seed(0)
    for shard in shards:
        write_shard(
            folder,
            shard,
            lambda item: torch.randn(item.shape, generator=generator).mul_(0.02).to(item.dtype),
            lambda size: None,
        )
    write_index(folder, shards)


def peak_of(code: str, *arguments: str) -> tuple[float, float]:
    """Runs Python code in a process; returns its peak resident megabytes and its seconds."""
    # VmHWM starts afresh with the program; getrusage would count the parent's memory at the fork.
    wrapped = f"""{code}
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])"""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", wrapped, *arguments], check=True, capture_output=True, text=True
    )
    return int(done.stdout.split()[-1]) / 1024, time.perf_counter() - start


def main() -> None:
    """Prints what the conversion needed and the bound it has to keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", default="lprod", choices=["lprod", "svd"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--shard", default="500MB", help="largest output shard")
    args = parser.parse_args()
    source = args.folder / f"source-{args.dtype}"
    if not source.exists():
        make_checkpoint(source, getattr(torch, args.dtype))
    method = {"name": "lprod", "p": 4} if args.method == "lprod" else {"name": "svd"}
    recipe = {
        "method": method,
        "calibration": {"source": "none"},
        "device": "cpu",
        "max_shard_size": args.shard,
    }
    if args.method == "svd":
        recipe["target"] = 0.25
    bare, _ = peak_of("import torch")
    loaded, _ = peak_of(
        "import tcompress.conversion.converter, transformers.models.llama.modeling_llama"
    )
    output = args.folder / "out"
    peak, seconds = peak_of(CONVERT, str(source), json.dumps(recipe), str(output))
    start = time.perf_counter()
    shutil.copytree(source, args.folder / "copy")
    copied = time.perf_counter() - start
    shutil.rmtree(args.folder / "copy")
    largest = SHAPE["vocab_size"] * SHAPE["hidden_size"] * getattr(torch, args.dtype).itemsize
    shard = max(path.stat().st_size for path in output.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    print(f"source {size / 1e9:.2f} GB {args.dtype}, largest tensor {largest / 2**20:.0f} MiB")
    print(f"interpreter with torch {bare:.0f} MiB, with all imports {loaded:.0f} MiB")
    print(f"conversion ({args.method}) peak {peak:.0f} MiB: {peak - bare:.0f} MiB above torch")
    print(f"bound: 3 x largest + one output shard = {3 * largest / 2**20 + shard / 2**20:.0f} MiB")
    print(f"time {seconds:.1f} s, copying the files {copied:.1f} s")
    shutil.rmtree(output)


if __name__ == "__main__":
    main()
