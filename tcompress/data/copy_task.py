"""A task that ships: random words that are to be written again, for models with a decoder.

A model can only do it by looking at its source: no word says which one is next.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from tcompress.errors import DataError, listed

COPY = "builtin:copy"
"""Name of the data, with columns `source` and `target`."""

WORDS = (
    "alfa", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett",
    "kilo", "lima", "mike", "november", "oscar", "papa", "quebec", "romeo", "sierra", "tango",
    "uniform", "victor", "whiskey", "xray", "yankee", "zulu",
)  # fmt: skip
"""The words that texts are made of."""

LENGTHS = (4, 6)
"""Fewest and most words of a text."""

_ROWS = {"test": 1000, "validation": 1000, "train": 40_000}


def copy_rows(split: str) -> Any:
    """Make the rows of a split; no text is in two of them.

    Raises:
        DataError: There is no such split.
    """
    import datasets

    if split not in _ROWS:
        text = f"`{COPY}` has no split `{split}`; it has {listed(_ROWS)}"
        raise DataError(text, "name one of its splits")
    rng, (fewest, most) = np.random.default_rng(0), LENGTHS
    count = 2 * sum(_ROWS.values())
    lengths = rng.integers(fewest, most + 1, count)
    drawn = rng.integers(0, len(WORDS), (count, most))
    pairs = zip(drawn.tolist(), lengths.tolist(), strict=True)
    texts = iter(dict.fromkeys(" ".join(WORDS[i] for i in row[:length]) for row, length in pairs))
    chosen = {name: [*islice(texts, rows)] for name, rows in _ROWS.items()}[split]
    return datasets.Dataset.from_dict({"source": chosen, "target": chosen})
