"""Time of structured layers against `F.linear`, forward and with backward, in one run.

    python benchmarks/layers.py [--tokens 4096] [--widths 384 768 1024 4096] [--threads 2]

For every width d the four shapes of a transformer block are timed: d -> d with the transform on
the input (as q, k and v share it), d -> d with it on the output, d -> 4 d and 4 d -> d. `ratio` is
the time of the dense layer over that of the structured one; dense and structured runs alternate.
The `block` rows add up a whole block: three projections that share one input transform, the
output projection, and both FFN layers.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from tcompress.structures import Site, structure
from tcompress.structures.lowrank import LowRankSpec
from tcompress.structures.lprod import LprodSpec
from tcompress.structures.modules.linear import PartLayout, StructuredLinear

P = 4
SHAPES = (("qkv", 1, 1, "in"), ("o", 1, 1, "out"), ("up", 1, 4, "in"), ("down", 4, 1, "out"))


def structured(kind: str, d_in: int, d_out: int, side: str, **options: object) -> StructuredLinear:
    """A layer with random tensors, at one kept fraction for all kinds."""
    site = Site(d_in, d_out, side)
    if kind == "lowrank":
        layout = structure("lowrank").layout(LowRankSpec(), site, d_in * d_out // P)
    else:
        # The configuration of the quality benchmark: two strided stages of the default block.
        layout = structure("lprod").layout(LprodSpec(p=P, transform=kind), site)
    layer = StructuredLinear([PartLayout(name="w", terms=(layout,))], bias=True, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    return layer


class Projections(nn.Module):
    """q, k and v, reading one input."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def make(kind: str, shape: str, d_in: int, d_out: int, side: str) -> nn.Module:
    """The dense or structured module of one shape."""
    if kind == "dense":
        layers = [nn.Linear(d_in, d_out) for _ in range(3 if shape == "qkv" else 1)]
    elif shape == "qkv":
        first = structured(kind, d_in, d_out, side, readers=3)
        layers = [first, *(structured(kind, d_in, d_out, side, input_of=first) for _ in "kv")]
    else:
        layers = [structured(kind, d_in, d_out, side)]
    return Projections(layers) if shape == "qkv" else layers[0]


def runner(module: nn.Module, x: Tensor, backward: bool) -> Callable[[], None]:
    """One forward pass, or one forward and backward pass."""

    def forward() -> None:
        with torch.no_grad():
            module(x)

    def both() -> None:
        module.zero_grad()
        x.grad = None
        out = module(x)
        outs = out if isinstance(out, list) else [out]
        torch.autograd.backward(outs, [torch.ones_like(item) for item in outs])

    return both if backward else forward


def alternate(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median milliseconds of every run; the runs take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repeat >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(width: int, tokens: int, repeats: int, backward: bool) -> list[dict[str, object]]:
    """Times all shapes of one width."""
    kinds = ("dense", "dct", "fitted", "lowrank")
    total = dict.fromkeys(kinds, 0.0)
    rows: list[dict[str, object]] = []
    for shape, scale_in, scale_out, side in SHAPES:
        d_in, d_out = scale_in * width, scale_out * width
        modules = {kind: make(kind, shape, d_in, d_out, side) for kind in kinds}
        x = torch.randn(tokens, d_in, requires_grad=backward)
        runs = {kind: runner(module, x, backward) for kind, module in modules.items()}
        times = alternate(runs, repeats)
        for kind, value in times.items():
            total[kind] += value
        rows.append({"width": width, "shape": shape, "backward": backward, **times})
    rows.append({"width": width, "shape": "block", "backward": backward, **total})
    return rows


def main() -> None:
    """Prints a table of times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--widths", type=int, nargs="*", default=[384, 768, 1024, 4096])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {args.threads} threads, {platform.machine()}, float32")
    print(f"{args.tokens} tokens, p = {P}, median of {args.repeats}; ms, and dense / structured")
    print(
        f"{'d':>5} {'shape':<6}{'pass':<10}{'dense':>8}{'dct':>8}{'':>6}{'fitted':>8}{'':>6}"
        f"{'lowrank':>8}"
    )
    results = []
    for width in args.widths:
        for backward in (False, True):
            for row in measure(width, args.tokens, args.repeats, backward):
                results.append(row)
                dense = float(row["dense"])
                cells = "".join(
                    f"{row[kind]:>8.1f}{dense / float(row[kind]):>5.2f}x"
                    for kind in ("dct", "fitted", "lowrank")
                )
                name = "fwd+bwd" if backward else "forward"
                print(f"{width:>5} {row['shape']:<6}{name:<10}{dense:>8.1f}{cells}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
