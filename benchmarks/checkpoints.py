"""Small language models and image classifiers before and after conversion, not healed.

    python benchmarks/checkpoints.py lm FOLDER --data stories.parquet
    python benchmarks/checkpoints.py image FOLDER --data cifar10/test.parquet --train train.parquet

For language models: perplexity, and whether generation with a key-value cache equals generation
without. For image classifiers: accuracy. Each method is calibrated on the training data given
(stories: the first half of the file) and on the built-in substitute.
"""

from __future__ import annotations

import argparse
import io
import math
import tempfile
from pathlib import Path

import pandas as pd
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
)
from transformers.utils import logging

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.conversion.converter import convert
from tcompress.options import Convert

METHODS = {
    "svd 50 %": {"method": {"name": "svd"}, "target": 0.5},
    "lprod p=2": {"method": {"name": "lprod", "p": 2}},
    "svd 25 %": {"method": {"name": "svd"}, "target": 0.25},
    "lprod p=4": {"method": {"name": "lprod", "p": 4}},
    "auto 50 %": {"method": {"name": "auto"}, "target": 0.5},
    "auto 25 %": {"method": {"name": "auto"}, "target": 0.25},
}


def stories(path: str) -> list[str]:
    """Texts of a parquet file, joined to stories where one text is one line."""
    text = "\n".join(pd.read_parquet(path)["text"])
    parts = text.replace("<|endoftext|>", "\n\n").split("Once upon a time")
    return ["Once upon a time" + part.replace("\n", " ").strip() for part in parts[1:]]


def perplexity(folder: str, texts: list[str]) -> tuple[float, bool]:
    """Perplexity per token over the first 256 tokens, and whether cached generation agrees."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = count = 0.0
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=256).input_ids
            if ids.shape[1] > 1:
                total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
                count += ids.shape[1] - 1
    prompt = tokenizer(texts[0][:40], return_tensors="pt").input_ids
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(prompt, use_cache=True, **options)
    plain = model.generate(prompt, use_cache=False, **options)
    return math.exp(total / count), bool(torch.equal(cached, plain))


def accuracy(folder: str, frame: pd.DataFrame) -> tuple[float, bool]:
    """Share of images classified right."""
    from PIL import Image

    model = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    right = 0
    for start in range(0, len(frame), 250):
        rows = frame.iloc[start : start + 250]
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in rows["image"]]
        with torch.inference_mode():
            logits = model(**processor(images, return_tensors="pt")).logits
        right += int((logits.argmax(-1).numpy() == rows["label"].to_numpy()).sum())
    return right / len(frame), True


def main() -> None:
    """Prints one row per method and calibration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["lm", "image"])
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--train")
    parser.add_argument("--samples", type=int, default=2000, help="images to classify")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as work:
        if args.kind == "lm":
            texts = stories(args.data)
            half = len(texts) // 2
            train = Path(work) / "train.txt"
            train.write_text("\n".join(texts[:half]))
            run, data = perplexity, texts[half:]
        else:
            run, data, train = accuracy, pd.read_parquet(args.data)[: args.samples], args.train
        print(f"{args.model}: {len(data)} held-out samples")
        value, same = run(args.model, data)
        print(f"{'dense':<12}{'':<10}{'':>8}{value:>10.4f}  cache equal: {same}")
        for name, options in METHODS.items():
            for source in (str(train), "builtin"):
                recipe = Convert.model_validate({**options, "calibration": {"source": source}})
                done = convert(args.model, recipe, Path(work) / "out", force=True)
                value, same = run(str(done.folder), data)
                kept = done.manifest.plan.kept
                label = "own data" if source != "builtin" else "builtin"
                print(f"{name:<12}{label:<10}{kept:>8.1%}{value:>10.4f}  cache equal: {same}")


if __name__ == "__main__":
    main()
