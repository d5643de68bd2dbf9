"""Time and memory of attention mechanisms against SDPA, forward and with backward, in one run.

    python benchmarks/attention.py [--sides 8 16 32 64] [--lengths 128 512] [--threads 2] [--json F]

Images of side x side tokens, without a class token, for `hot`, and texts of so many tokens for the
others; 12 heads of width 64 in batches of one. Queries, keys and values are laid out as hosts hand
them over, (batch, tokens, heads, width) with two axes exchanged. `ratio` is the time of SDPA over
that of the mechanism: above 1 the mechanism is faster. Runs alternate, and medians count; with
`--clock cpu`, and one thread, time is that of the processor, for machines that are busy. Memory is
what a pass allocates beyond its inputs; SDPA on a CPU is a fused kernel, which keeps no scores.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tcompress.attention import BaseAttention, ReplacementSpec, replacement_of
from tcompress.attention.graph import GraphSpec
from tcompress.attention.kronecker import KroneckerSpec
from tcompress.attention.module import ReplacementModule
from tcompress.attention.multilinear import MultilinearSpec
from tcompress.attention.tam import TamSpec
from tcompress.latency.passes import Pass

HEADS, WIDTH = 12, 64
TEXTS: dict[str, ReplacementSpec] = {
    "hot --fold 32": KroneckerSpec(fold=32),
    "tga": GraphSpec(),
    "tsa, order 3": GraphSpec(name="tsa", filter_order=3),
    "tam, cp": TamSpec(),
    "tam, tucker": TamSpec(core="tucker"),
}
IMAGES: dict[str, ReplacementSpec] = {
    "hot": KroneckerSpec(),
    "hot, favor": KroneckerSpec(kernel="favor"),
}
LONGEST_TENSOR = 128  # multilinear attention holds length^2 times the width twice


class Softmax(nn.Module):
    """What hosts run without a mechanism."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def build(spec: ReplacementSpec, host: BaseAttention) -> ReplacementModule:
    module = ReplacementModule(replacement_of(spec).layout(spec, host))
    module.fill(0, pretrained=True)
    return module


def cases(sides: list[int], lengths: list[int]) -> Iterator[tuple[str, int, nn.Module]]:
    """Names, numbers of tokens and modules."""
    for side in sides:
        host = BaseAttention(HEADS, HEADS, WIDTH, tokens=side * side, grid=(side, side))
        for name, spec in IMAGES.items():
            yield f"{name}, {side} x {side}", side * side, build(spec, host)
    text = BaseAttention(HEADS, HEADS, WIDTH)
    for length in lengths:
        for name, spec in TEXTS.items():
            yield f"{name}, {length} tokens", length, build(spec, text)
        if length <= LONGEST_TENSOR:
            spec = MultilinearSpec(length=length)
            yield f"multilinear, {length} tokens", length, build(spec, text)


def runner(module: nn.Module, inputs: list[Tensor], backward: bool) -> Callable[[], None]:
    """One forward pass, or one forward and backward pass."""

    def forward() -> None:
        with torch.no_grad():
            module(*inputs)

    def both() -> None:
        module(*inputs).sum().backward()
        module.zero_grad()
        for tensor in inputs:
            tensor.grad = None

    return both if backward else forward


def drawn(tokens: int) -> list[Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, tokens, HEADS, WIDTH)
    flat = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
    return [tensor.transpose(1, 2).detach().requires_grad_() for tensor in flat]


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(run: Callable[[], None], clock: str) -> float:
    start = CLOCKS[clock]()
    run()
    return CLOCKS[clock]() - start


def measure(
    name: str, tokens: int, module: nn.Module, repeats: int, clock: str = "wall"
) -> dict[str, Any]:
    """Times and memory of one case beside SDPA."""
    row: dict[str, Any] = {"case": name, "tokens": tokens}
    inputs, softmax = drawn(tokens), Softmax()
    for mode in ("forward", "training"):
        runs = [runner(item, inputs, mode == "training") for item in (softmax, module)]
        for run in runs:
            run()
        times = [[seconds(run, clock) for run in runs] for _ in range(repeats)]
        dense, own = (statistics.median(column) for column in zip(*times, strict=True))
        memory = [
            Pass(lambda _, run=run: run()).peak_bytes(torch.device("cpu")) or 0 for run in runs
        ]
        row[mode] = {
            "sdpa_ms": 1000 * dense,
            "ms": 1000 * own,
            "ratio": dense / own,
            "sdpa_bytes": memory[0],
            "bytes": memory[1],
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    threads = f"{options.threads} threads, {options.clock} time"
    print(f"torch {torch.__version__}, {platform.machine()}, {threads}")
    print(f"{'':28}{'forward':>28}{'training':>37}")
    print(f"{'':28}" + 2 * f"{'sdpa ms':>9}{'ms':>8}{'ratio':>7}{'sdpa MB':>8}{'MB':>6}")
    rows = []
    for name, tokens, module in cases(options.sides, options.lengths):
        row = measure(name, tokens, module, options.repeats, options.clock)
        rows.append(row)
        line = f"{name:28}"
        for mode in ("forward", "training"):
            at = row[mode]
            line += f"{at['sdpa_ms']:9.1f}{at['ms']:8.1f}{at['ratio']:7.2f}"
            line += f"{at['sdpa_bytes'] / 1e6:8.1f}{at['bytes'] / 1e6:6.1f}"
        print(line, flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
