"""Low rank of a language model from very few tokens, by what is measured of gradients.

    python benchmarks/scarce.py MODEL OUT --data text.parquet [--samples 20] [--length 64]
        [--targets 0.35 0.5 0.7] [--seeds 6]

Where data has fewer than four tokens for each input of the widest layer, candidates are fitted to a
quarter of the samples, which with `--input-moments` tells all that layers are worth. Here this
holds of any number of tokens, or of none, so that one sees what it is worth. Printed are
perplexities in bits (the logarithm to the base of two), and their means over samples drawn with
several seeds. What is done is not done again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from math import inf, log2
from pathlib import Path
from statistics import mean
from typing import Any

from rows import recorded

from tcompress.api import evaluate
from tcompress.conversion.converter import convert
from tcompress.options import Convert
from tcompress.search import candidates

WAYS: dict[str, tuple[dict[str, Any], int]] = {  # options, and one sample in so many
    "all samples": ({}, 1),
    "candidates by a quarter": ({}, 4),
    "the same, four probes": ({"probes": 4}, 4),
    "inputs alone, all samples": ({"output_moments": False}, 1),
    "inputs alone, a quarter": ({"output_moments": False}, 4),
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", type=Path, help="folder for results.json")
    parser.add_argument("--data", required=True, help="texts to calibrate with, and to measure on")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--length", type=int, default=64, help="of a sample, in tokens")
    parser.add_argument("--targets", nargs="*", type=float, default=[0.35, 0.5, 0.7])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--limit", type=int, default=500, help="texts to measure on")
    args = parser.parse_args()
    record, rows = recorded(args.out)
    for target, way, seed in product(args.targets, WAYS, range(args.seeds)):
        name = f"{target:.0%}, {way}, seed {seed}"
        if name not in rows:
            rows[name] = row(args, target, way, seed)
            record.write_text(json.dumps(rows, indent=1) + "\n")
        if seed == args.seeds - 1:
            names = [f"{target:.0%}, {way}, seed {index}" for index in range(args.seeds)]
            bits = [rows[item]["bits"] for item in names]
            tokens = mean(rows[item]["tokens"] for item in names)
            values = " ".join(f"{value:.3f}" for value in bits)
            print(f"{target:.0%}, {way}: {mean(bits):.3f} ({values}), {tokens:.0f} tokens")


def row(args: argparse.Namespace, target: float, way: str, seed: int) -> dict[str, Any]:
    """Convert one way, and measure the result."""
    options, share = WAYS[way]
    vars(candidates).update(SCARCE=inf, SHARE=share)
    calibration = {"source": args.data, "samples": args.samples, "seed": seed, "batch_size": 1}
    calibration |= {"max_length": args.length, **options}
    recipe = Convert.model_validate(
        {"method": {"name": "svd"}, "target": target, "calibration": calibration}
    )
    with tempfile.TemporaryDirectory() as folder:
        manifest = convert(args.model, recipe, Path(folder) / "model").manifest
        model = str(Path(folder) / "model")
        scores = evaluate(
            [model], "perplexity", args.data, limit=args.limit, bootstrap=0, save=False
        )
    facts = manifest.calibration
    return {"bits": log2(scores[0].metrics[0].value), "tokens": facts.tokens if facts else 0}


if __name__ == "__main__":
    main()
