"""Cutting a batch into pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tcompress.training.observe import Batch


def examples_in(batch: Batch) -> int:
    """Number of examples; pairs of sentences are two rows each."""
    labels = batch.get("labels")
    return len(labels if labels is not None else next(iter(batch.values())))


def pieces(batch: Batch, parts: int) -> Iterator[Batch]:
    """Cuts a batch along its examples.

    Args:
        batch: The batch.
        parts: Number of pieces, if there are so many examples.
    """
    count = examples_in(batch)
    size = -(-count // parts)
    for first in range(0, count, size):
        last = min(first + size, count)
        yield {name: _cut(value, count, first, last) for name, value in batch.items()}


def _cut(value: torch.Tensor, count: int, first: int, last: int) -> torch.Tensor:
    rows = len(value) // count
    return value[first * rows : last * rows]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tells whether a device, or this machine, has run out of memory."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in text for words in ("out of memory", "not enough memory", "can't allocate memory")
    )
