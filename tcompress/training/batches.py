"""Encoded examples, and batches of those that are of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tcompress.data.inputs import collate
from tcompress.errors import DataError

Row = dict[str, Tensor]
Text = tuple[str, ...]
"""Of a row: one text, or a pair that is read together."""

_Read = Callable[[int, int], list[Row]]
BY_EXAMPLE = ("labels", "place")  # what a batch holds beside the model's inputs
_FEWEST = 32
_WINDOW = 50  # batches whose examples are sorted by length together


class Encoded(Dataset[list[Row]]):
    """Examples as a model reads them; each is one row, or two for pairs of sentences.

    `read` makes rows from place and epoch; `lengths` are those of the longest, 0 for pictures.
    """

    def __init__(self, lengths: list[int], read: _Read, labels: Tensor | None = None) -> None:
        self.lengths, self.read, self.labels = lengths, read, labels
        self.epoch = 0
        self.is_fixed = False  # texts of one row each, the same in every epoch
        self.tells_places = False  # whether batches say which examples they are of
        self.texts: list[tuple[Text, ...]] | None = None  # of each example, one for each row

    @classmethod
    def of(
        cls,
        examples: Sequence[tuple[Row, ...]],
        labels: Tensor | None = None,
        texts: list[tuple[Text, ...]] | None = None,
    ) -> Encoded:
        """Takes examples whose rows are tokens, the same in every epoch, and their texts."""
        lengths = [max(len(ids) for row in rows for ids in row.values()) for rows in examples]
        made = cls(lengths, lambda place, _: [{**row} for row in examples[place]], labels)
        made.is_fixed = all(len(rows) == 1 for rows in examples)
        made.texts = texts
        return made

    def first(self, tokens: int) -> Encoded:
        """The first examples of so many tokens, but 32 at least; all where they have none."""
        count = max(_FEWEST, int((np.cumsum(self.lengths) <= tokens).sum()))
        labels = None if self.labels is None else self.labels[:count]
        made = Encoded(self.lengths[:count], self.read, labels)
        made.texts = None if self.texts is None else self.texts[:count]
        return made

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> list[Row]:
        found = self.read(index, self.epoch)
        if self.labels is not None:
            found[0]["labels"] = self.labels[index]
        if self.tells_places:
            found[0]["place"] = torch.tensor(index)
        return found


class LengthBatches(Sampler[list[int]]):
    """Batches of examples of similar length, in an order that seed and epoch determine.

    Processes take one each in a step; they change no order if all their batches have one size. The
    loop sets the epoch: accelerate's `set_epoch` counts from 0 when resumed.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, processes: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        whole = min(batch_size * processes, len(lengths) // processes * processes)
        if not whole:
            hint = "give more data, or start fewer processes"
            raise DataError(f"there are {len(lengths)} examples for {processes} processes", hint)
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


def loader(data: Encoded, pad: int, batches: Any, *, pinned: bool = False) -> DataLoader[list[Row]]:
    """Reads batches of examples, into memory that a GPU copies from by itself if `pinned`."""
    return DataLoader(
        data,
        batch_sampler=batches,
        collate_fn=partial(_collate, pad=pad),
        pin_memory=pinned,
        # Without one, opening a loader draws from torch's generator, which dropout draws from: a
        # resumed run opens more of them.
        generator=torch.Generator(),
    )


def pins(device: torch.device) -> bool:
    """Whether a device copies from pinned memory by itself, while the host goes on."""
    return device.type == "cuda"


def in_order(data: Encoded, size: int) -> list[list[int]]:
    """Batches of all examples, longest first."""
    order = np.argsort(-np.asarray(data.lengths), kind="stable").tolist()
    return [order[first : first + size] for first in range(0, len(order), size)]


def _collate(examples: Sequence[list[Row]], pad: int) -> Row:
    named = [
        {name: rows[0].pop(name) for name in BY_EXAMPLE if name in rows[0]} for rows in examples
    ]
    return {**collate([row for rows in examples for row in rows], pad), **collate(named, pad)}
