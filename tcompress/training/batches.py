"""Encoded examples, and batches of those that are of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tcompress.errors import DataError
from tcompress.reading.collate import collate

Row = dict[str, Tensor]

_WINDOW = 50  # batches whose examples are sorted by length together


class Encoded(Dataset[list[Row]]):
    """Examples as a model reads them; each is one row, or two for pairs of sentences.

    Args:
        rows: Inputs of each row; pictures are still the bytes of their files.
        labels: Labels of the examples, if there are any.
        per_example: Rows in an example.
        read: Turns the bytes of a picture into `pixel_values`.
        mask: Masks tokens, given a row and a seed.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        labels: Tensor | None = None,
        per_example: int = 1,
        read: Any = None,
        mask: Any = None,
    ) -> None:
        self.rows, self.labels, self.per_example = rows, labels, per_example
        self.read, self.mask = read, mask
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.rows) // self.per_example

    def __getitem__(self, index: int) -> list[Row]:
        first = index * self.per_example
        found = [self._row(place) for place in range(first, first + self.per_example)]
        if self.labels is not None:
            found[0]["labels"] = self.labels[index]
        return found

    def _row(self, place: int) -> Row:
        row = self.rows[place]
        if self.read is not None:
            return {"pixel_values": self.read(row)}
        return dict(row) if self.mask is None else self.mask(row, [self.epoch, place])

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of the longest row of each example; 0 for pictures."""
        sizes = [0 if self.read is not None else _size(row) for row in self.rows]
        step = self.per_example
        return [max(sizes[first : first + step]) for first in range(0, len(sizes), step)]


class LengthBatches(Sampler[list[int]]):
    """Batches of examples of similar length, in an order that seed and epoch determine.

    The order does not depend on the number of processes, if all their batches together stay of
    one size.

    Args:
        lengths: Lengths of the examples.
        batch_size: Examples in a batch of one process.
        processes: Processes that each take one batch in a step.
        seed: Seed.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, processes: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        whole = min(batch_size * processes, len(lengths) // processes * processes)
        if not whole:
            raise DataError(
                f"there are {len(lengths)} examples for {processes} processes",
                hint="give more data, or start fewer processes",
            )
        self.whole, self.processes, self.seed, self.epoch = whole, processes, seed, 0
        # Accelerate reads it to share batches out.
        self.batch_size = whole // processes
        self.drop_last = True

    def __len__(self) -> int:
        return len(self.lengths) // self.whole * self.processes

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(len(self.lengths))
        order = order[: len(order) // self.whole * self.whole]
        window = _WINDOW * self.whole
        runs = [order[first : first + window] for first in range(0, len(order), window)]
        ordered = [run[np.argsort(-self.lengths[run], kind="stable")] for run in runs]
        batches = np.concatenate(ordered).reshape(-1, self.whole)
        for batch in batches[rng.permutation(len(batches))]:
            yield from batch.reshape(self.processes, -1).tolist()

    def turn_to(self, epoch: int) -> None:
        """Chooses the order of another epoch.

        Not named `set_epoch`, which accelerate calls with its own count; that one starts again
        from 0 when a run is resumed.
        """
        self.epoch = epoch


def loader(data: Encoded, pad: int, batches: Any, workers: int = 0) -> DataLoader[list[Row]]:
    """Reads batches of examples."""
    return DataLoader(
        data,
        batch_sampler=batches,
        collate_fn=partial(_collate, pad=pad),
        num_workers=workers,
        # Without one, opening a loader draws from torch's generator, which dropout draws from: a
        # resumed run opens more of them.
        generator=torch.Generator(),
    )


def in_order(data: Encoded, size: int) -> list[list[int]]:
    """Batches of all examples, longest first."""
    order = np.argsort(-np.asarray(data.lengths), kind="stable").tolist()
    return [order[first : first + size] for first in range(0, len(order), size)]


def _collate(examples: Sequence[list[Row]], pad: int) -> Row:
    labels = [rows[0].pop("labels") for rows in examples if "labels" in rows[0]]
    batch = collate([row for rows in examples for row in rows], pad)
    if labels:
        batch |= collate([{"labels": label} for label in labels], pad)
    return batch


def _size(row: Row) -> int:
    ids = row.get("input_ids", row.get("decoder_input_ids"))
    return 0 if ids is None else len(ids)
