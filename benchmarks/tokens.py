"""Time of a layer by the number of tokens: tensor trains, low rank and Tucker form against dense.

    python benchmarks/tokens.py [--widths 384 768 1024] [--tokens 1 16 256] [--threads 2]

For every width d the shapes d -> d, d -> 4 d and 4 d -> d are timed at 25 % kept, forward, without
gradients. All ways and the dense layer take turns; every number is the median time of `F.linear`
over that of the way, so 1 is as fast as dense. `choice` is the time of the better of `contract` and
`rebuild` over that of the way which `auto` takes: 1 where the choice is right. `kept` is the same
layer with `keep_weights`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import tcompress
from tcompress.structures import Site, structure
from tcompress.structures.flops import macs_of
from tcompress.structures.modules.linear import PartLayout, StructuredLinear

KEPT = 4  # one in so many parameters
TOKENS = [2**power for power in range(15)]
SHAPES = ((1, 1), (1, 4), (4, 1))
WAYS: dict[str, tuple[str, dict[str, object]]] = {
    "contract": ("tt", {"apply": "contract"}),
    "rebuild": ("tt", {"apply": "rebuild"}),
    "auto": ("tt", {}),
    "kept": ("tt", {}),
    "lowrank": ("lowrank", {}),
    "tucker": ("tucker", {}),
}


def make(way: str, d_in: int, d_out: int, order: int) -> nn.Module:
    """A layer with random tensors."""
    if way == "dense":
        return nn.Linear(d_in, d_out).eval()
    name, options = WAYS[way]
    kind = structure(name)
    if name == "tt":
        options = {**options, "order": order}
    layout = kind.layout(kind.spec(**options), Site(d_in, d_out, "in"), d_in * d_out // KEPT)
    layer = StructuredLinear([PartLayout(name="w", terms=(layout,))], bias=True).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    if way == "kept":
        tcompress.keep_weights(layer)
    return layer


def chosen(layer: nn.Module, tokens: int) -> str:
    """The way that `auto` takes."""
    auto = layer.parts[0].terms[0]
    rebuild = auto.model_copy(update={"apply": "rebuild"})
    return "rebuild" if macs_of(auto, tokens) == macs_of(rebuild, tokens) else "contract"


def alternate(
    runs: dict[str, Callable[[Tensor], Tensor]], x: Tensor, repeats: int, seconds: float
) -> dict[str, float]:
    """Median milliseconds of every way; each repeat has an order of its own, as caches matter."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, start = list(runs), time.perf_counter()
    shuffle = random.Random(0).shuffle
    for repeat in range(repeats + 2):
        shuffle(order)
        for name in order:
            begun = time.perf_counter()
            runs[name](x)
            if repeat >= 2:
                times[name].append((time.perf_counter() - begun) * 1e3)
        if repeat >= 8 and time.perf_counter() - start > seconds:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def measure(
    d_in: int, d_out: int, counts: list[int], order: int, repeats: int, seconds: float
) -> list[dict[str, object]]:
    """Times all ways at all counts of tokens."""
    modules = {way: make(way, d_in, d_out, order) for way in ("dense", *WAYS)}
    rows = []
    for tokens in counts:
        # Minutes, and gigabytes, where a contraction is hopeless anyway.
        ways = {w: m for w, m in modules.items() if w != "contract" or tokens <= 1024}
        with torch.inference_mode():
            times = alternate(dict(ways), torch.randn(tokens, d_in), repeats, seconds)
        sizes = {"in": d_in, "out": d_out, "order": order, "tokens": tokens}
        rows.append({**sizes, "chosen": chosen(modules["auto"], tokens), **times})
    return rows


def main() -> None:
    """Prints times relative to dense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--widths", type=int, nargs="*", default=[384, 768, 1024])
    parser.add_argument("--order", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=201)
    parser.add_argument("--seconds", type=float, default=4.0, help="time per row, about")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {args.threads} threads, {platform.machine()}, float32")
    print(
        f"25 % kept, {args.order} cores; dense in ms, then dense / way; choice: better / chosen way"
    )
    head = "".join(f"{way:>10}" for way in WAYS)
    print(f"{'in':>5}{'out':>6}{'tokens':>7}{'dense':>9}{head}{'choice':>8}")
    results = []
    for width in args.widths:
        for scale_in, scale_out in SHAPES:
            sizes = (scale_in * width, scale_out * width)
            options = (args.tokens, args.order, args.repeats, args.seconds)
            for row in measure(*sizes, *options):
                results.append(row)
                print(line(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def line(row: dict[str, object]) -> str:
    """One row of the table."""
    dense = float(row["dense"])
    cells = "".join(f"{dense / float(row[way]) if way in row else 0:>10.2f}" for way in WAYS)
    better = min(float(row[way]) for way in ("contract", "rebuild") if way in row)
    choice = better / float(row[row["chosen"]])  # not `auto` itself, which has noise of its own
    return f"{row['in']:>5}{row['out']:>6}{row['tokens']:>7}{dense:>9.3f}{cells}{choice:>8.2f}"


if __name__ == "__main__":
    main()
