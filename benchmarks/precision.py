"""Times of training steps in float32 and bfloat16: the teacher, dense and converted students.

    python benchmarks/precision.py MODEL CONVERTED... --batch 64 --length 32

A step is a pass with gradients through all hidden states; the teacher's is one without. bfloat16 is
measured with PyTorch's own attention and with attention in float32, as `finetune` trains on a CPU.
Every model is timed in all precisions in turn, and the smallest of several times counts.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.utils import logging

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.training.finetuning import FloatAttention

WAYS: dict[str, tuple[bool, Callable[[], AbstractContextManager[Any]]]] = {
    "float32": (False, nullcontext),
    "bfloat16": (True, nullcontext),
    "bfloat16, attention in float32": (True, FloatAttention),
}


def main() -> None:
    """Prints milliseconds of passes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="folders of text encoders, the teacher first")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {kind}")
    for name in args.models:
        model = AutoModel.from_pretrained(name, dtype=torch.float32).eval().to(device)
        inputs = random_inputs(model, args.batch, args.length)
        for way, (low, context) in WAYS.items():
            autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=low)
            with autocast, context():
                taught, trained = times(model, inputs, args.runs)
            print(
                f"{Path(name).name}: {way}: pass {taught:,.0f} ms, step {trained:,.0f} ms",
                flush=True,
            )


def random_inputs(model: nn.Module, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids and a mask with padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[::3, 2 * length // 3 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    return {name: value.to(model.device) for name, value in inputs.items()}


def times(model: nn.Module, inputs: dict[str, torch.Tensor], runs: int) -> tuple[float, float]:
    """Milliseconds of a pass without gradients, and of a training step."""

    def taught() -> None:
        with torch.no_grad():
            model(**inputs)

    def trained() -> None:
        states = model(**inputs, output_hidden_states=True).hidden_states[1:]
        with torch.autocast(model.device.type, enabled=False):
            sum(state.float().square().mean() for state in states).backward()
        model.zero_grad()

    return best(taught, runs), best(trained, runs)


def best(run: Callable[[], None], runs: int) -> float:
    """The smallest of several times, in milliseconds."""
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return 1000 * min(found)


if __name__ == "__main__":
    main()
