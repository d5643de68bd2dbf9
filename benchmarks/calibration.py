"""What calibration data is worth: sources, numbers of texts and structures, measured on two sets.

    python benchmarks/calibration.py MODEL OUT --sources stsb=stsb/train.parquet \
        sick=sick/train.parquet --data stsb/validation.parquet sick/validation.parquet

Nothing is trained. The mean over the sets decides: a set whose training rows a fit has seen says
nothing of others. Agreement with the dense model is the rank correlation between both models'
similarities of the pairs, labels unread. What is done is not done again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import torch
from rows import recorded
from scipy.stats import spearmanr
from sts import embed
from transformers import AutoModel, AutoTokenizer

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.conversion.converter import convert
from tcompress.options import Convert

METHODS: dict[str, dict[str, Any]] = {
    "svd": {"name": "svd"},
    "lprod": {"name": "lprod", "p": 8},
    "tt": {"name": "tt"},
    "tucker": {"name": "tucker", "share": "none"},
    "auto": {"name": "auto"},
}


def main() -> None:
    """Converts, measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="sentence encoder: folder or hub id")
    parser.add_argument("out", type=Path, help="folder for results.json")
    parser.add_argument("--sources", nargs="*", default=[], help="NAME=FILE, added one by one")
    parser.add_argument("--data", nargs="+", required=True, help="sets to measure on")
    parser.add_argument("--samples", nargs="*", type=int, default=[0], help="0: the default")
    parser.add_argument("--methods", nargs="*", default=["svd"])
    parser.add_argument("--target", type=float, default=0.25)
    args = parser.parse_args()
    record, rows = recorded(args.out)
    pairs = [pd.read_parquet(file) for file in args.data]
    dense = [similarities(args.model, one) for one in pairs]
    whole = [correlation(found, one["score"]) for found, one in zip(dense, pairs, strict=True)]
    print("dense", *(f"{value:.4f}" for value in whole))
    for method, samples, (label, files) in product(args.methods, args.samples, mixtures(args)):
        name = f"{method}, {label}, {samples or 'default'}"
        if name not in rows:
            recipe = recipe_of(METHODS[method], args.target, files, samples)
            with tempfile.TemporaryDirectory() as folder:
                start = time.process_time()
                done = convert(args.model, recipe, Path(folder) / "model").manifest
                seconds = time.process_time() - start
                found = [similarities(f"{folder}/model", one) for one in pairs]
            rows[name] = {
                "samples": done.calibration.samples,
                "tokens": done.calibration.tokens,
                "changes": done.calibration.changes,
                "cpu_seconds": round(seconds, 1),
                "quality": [
                    correlation(own, one["score"]) / value
                    for own, one, value in zip(found, pairs, whole, strict=True)
                ],
                "agreement": [correlation(*both) for both in zip(found, dense, strict=True)],
            }
            record.write_text(json.dumps(rows, indent=1) + "\n")
        print(name, line(rows[name]), flush=True)


def mixtures(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """The built-in text, each source alone, and all of them."""
    named = dict(item.split("=", 1) for item in args.sources)
    found = [("built-in", ["builtin"]), *((name, [file]) for name, file in named.items())]
    return [*found, (" + ".join(named), [*named.values()])] if len(named) > 1 else found


def recipe_of(method: dict[str, Any], target: float, files: list[str], samples: int) -> Convert:
    """One conversion."""
    calibration = {"source": files, "samples": samples or None}
    return Convert.model_validate({"method": method, "target": target, "calibration": calibration})


def similarities(folder: str, pairs: pd.DataFrame) -> Any:
    """Cosines of all pairs.  # (pairs,)."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, second = (embed(model, tokenizer, pairs[f"sentence{n}"].tolist()) for n in (1, 2))
    return (first * second).sum(1).numpy()


def correlation(one: Any, two: Any) -> float:
    """Spearman's rank correlation."""
    return float(spearmanr(one, two).statistic)


def line(found: dict[str, Any]) -> str:
    """One row, for people."""
    quality = " ".join(f"{value:.4f}" for value in found["quality"])
    agreement = " ".join(f"{value:.4f}" for value in found["agreement"])
    return (
        f"{found['samples']:,} texts: {quality} mean {fmean(found['quality']):.4f}, "
        f"agreement {agreement}, {found['cpu_seconds']:.0f} s of CPU"
    )


if __name__ == "__main__":
    main()
