"""Spearman on a sentence-similarity split, for a dense encoder and for conversions of it.

    python benchmarks/sts.py MODEL --data stsb/validation.parquet --train stsb/train.parquet

Every conversion is calibrated three ways: on 640 sentences of the training split, on the built-in
text, and not at all. Nothing is trained. Embeddings are mean-pooled and compared by cosine.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.conversion.converter import convert
from tcompress.options import Convert

METHODS: dict[str, dict[str, object]] = {
    "lprod p=4 dct": {"method": {"name": "lprod", "p": 4, "transform": "dct"}},
    "lprod p=4 fitted": {"method": {"name": "lprod", "p": 4, "transform": "fitted"}},
    "svd 25 %": {"method": {"name": "svd"}, "target": 0.25},
    "lprod p=8 fitted + residual 25 %": {"method": {"name": "lprod", "p": 8}, "target": 0.25},
    "lprod p=16 dct + residual 25 %": {
        "method": {"name": "lprod", "p": 16, "transform": "dct"},
        "target": 0.25,
    },
    "auto 25 %": {"method": {"name": "auto"}, "target": 0.25},
    "auto 50 %": {"method": {"name": "auto"}, "target": 0.5},
    "svd 50 %": {"method": {"name": "svd"}, "target": 0.5},
}
CALIBRATIONS = ("train", "builtin", "none")


def embed(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> torch.Tensor:
    """Mean-pooled, normalised embeddings.  # (texts, d)."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    rows = torch.empty(len(texts), model.config.hidden_size)
    for start in range(0, len(order), 64):
        chosen = order[start : start + 64]
        batch = tokenizer(
            [texts[i] for i in chosen],
            padding=True,
            truncation=True,
            max_length=128,
            return_tensors="pt",
        )
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"].unsqueeze(-1)
        rows[chosen] = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(rows, dim=-1)


def spearman(folder: str, pairs: pd.DataFrame) -> float:
    """Spearman correlation between cosine similarity and the human score."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = embed(model, tokenizer, pairs["sentence1"].tolist())
    second = embed(model, tokenizer, pairs["sentence2"].tolist())
    return float(spearmanr((first * second).sum(1).numpy(), pairs["score"]).statistic)


def main() -> None:
    """Converts, measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="sentence encoder: folder or hub id")
    parser.add_argument("--data", required=True, help="parquet with sentence1, sentence2, score")
    parser.add_argument("--train", required=True, help="parquet to draw calibration text from")
    parser.add_argument("--only", nargs="*", help="names of conversions, as in the table")
    parser.add_argument("--calib", nargs="*", default=CALIBRATIONS, choices=CALIBRATIONS)
    parser.add_argument("--extra", type=json.loads, default={}, help="more conversions, as JSON")
    parser.add_argument("--damping", type=float)
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pairs = pd.read_parquet(args.data)
    dense = spearman(args.model, pairs)
    print(f"{args.model}: {len(pairs)} pairs of {args.data}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"dense: {dense:.4f}")
    print(f"{'conversion':<34}{'calibration':<12}{'kept':>7}{'Spearman':>10}{'ratio':>7}{'s':>6}")
    results = [{"conversion": "dense", "spearman": dense}]
    for name, options in (METHODS | args.extra).items():
        if args.only is not None and name not in args.only:
            continue
        for calibration in args.calib:
            row = measure(args, name, options, calibration, pairs, dense)
            results.append(row)
            print(
                f"{name:<34}{calibration:<12}{row['kept']:>7.2%}{row['spearman']:>10.4f}"
                f"{row['ratio']:>7.3f}{row['seconds']:>6.0f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def measure(
    args: argparse.Namespace,
    name: str,
    options: dict[str, object],
    calibration: str,
    pairs: pd.DataFrame,
    dense: float,
) -> dict[str, object]:
    """Converts once and measures the result."""
    source = args.train if calibration == "train" else calibration
    data: dict[str, object] = {"source": source}
    if calibration == "train":
        data |= {"samples": 640, "columns": ["sentence1", "sentence2"]}
    if args.damping is not None:
        data["damping"] = args.damping
    recipe = Convert.model_validate({**options, "calibration": data})
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = convert(args.model, recipe, Path(folder) / "out")
        seconds = time.perf_counter() - start
        value = spearman(str(done.folder), pairs)
    return {
        "conversion": name,
        "calibration": calibration,
        "kept": done.manifest.plan.kept,
        "spearman": value,
        "ratio": value / dense,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
