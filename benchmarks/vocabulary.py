"""Half of the pieces gone: what is left round-trips, and texts without lost pieces are the same.

    python benchmarks/vocabulary.py OUT --train wikitext2/train.parquet ag_news/test.parquet \
        --texts stsb/validation.parquet --size 8000

Trains a tokenizer of each kind on the first texts, gives it to a small model with random weights,
and leaves half of its pieces, the most frequent ones of `--train`. Then `--count` texts of
`--texts` are written and read by both tokenizers, as `AutoTokenizer` loads them, and run through
both models. What is compared is equality, of text, tokens and bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from tcompress.api import convert
from tests.support.vocabularies import KINDS

ACCEPTED = ("WordPiece", "byte-level BPE", "BPE with bytes", "Unigram")


def texts_of(path: str) -> list[str]:
    """Reads the columns of a table that hold sentences."""
    frame = pd.read_parquet(path)
    texts = [name for name in frame if frame[name].astype(str).str.len().mean() > 20]
    cells = [cell.strip() for name in texts for cell in frame[name] if isinstance(cell, str)]
    return list(dict.fromkeys(filter(None, cells)))


def main() -> None:
    """Trains, converts, compares and prints a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", nargs="+", required=True, help="to train and count on")
    parser.add_argument("--texts", nargs="+", required=True, help="to compare on")
    parser.add_argument("--size", type=int, default=8000, help="pieces of each tokenizer")
    parser.add_argument("--count", type=int, default=500, help="texts to compare")
    parser.add_argument("--kinds", nargs="+", default=list(ACCEPTED), choices=list(KINDS))
    asked = parser.parse_args()
    train = [text for path in asked.train for text in texts_of(path)]
    texts = [text for path in asked.texts for text in texts_of(path)][: asked.count]
    asked.out.mkdir(parents=True, exist_ok=True)
    data = asked.out / "train.txt"
    data.write_text("".join(f"{' '.join(text.split())}\n" for text in train), encoding="utf-8")
    for kind in asked.kinds:
        found = compared(kind, train, texts, data, asked.size, asked.out)
        print(json.dumps({"kind": kind, **found}), flush=True)


@torch.no_grad()
def compared(
    kind: str, train: list[str], texts: list[str], data: Path, size: int, out: Path
) -> dict[str, Any]:
    """Compares a model of one kind before and after."""
    source = out / kind.replace(" ", "-")
    if not (source / "config.json").exists():
        KINDS[kind].folder(source, KINDS[kind].train(train, size))
    done = convert(
        source,
        vocab=size // 2,
        method="none",
        calibration=str(data),
        output=out / f"{source.name}-half",
        force=True,
    )
    vocabulary = done.manifest.plan.vocabulary
    assert vocabulary is not None
    old, new = (AutoTokenizer.from_pretrained(path) for path in (source, done.folder))
    model = getattr(transformers, KINDS[kind].model)
    dense, small = (model.from_pretrained(path).eval() for path in (source, done.folder))
    numbers = {was: now for now, was in enumerate(vocabulary.ids)}
    rows = torch.tensor(vocabulary.ids)
    counts = dict.fromkeys(
        ("texts", "read_as_before", "without_lost", "same_tokens", "same_bits"), 0
    )
    for text in texts:
        one, two = (tokenizer(text)["input_ids"] for tokenizer in (old, new))
        counts["texts"] += 1
        counts["read_as_before"] += old.decode(one) == new.decode(two)
        if not numbers.keys() >= {*one}:
            continue
        counts["without_lost"] += 1
        counts["same_tokens"] += two == [numbers[token] for token in one]
        before, after = dense(torch.tensor([one[:128]]))[0], small(torch.tensor([two[:128]]))[0]
        before = before if before.shape == after.shape else before[..., rows]
        counts["same_bits"] += torch.equal(before, after)
    facts = {"before": vocabulary.before, "after": vocabulary.rows, "covered": vocabulary.covered}
    return {**facts, "class": type(new).__name__, **counts}


if __name__ == "__main__":
    main()
