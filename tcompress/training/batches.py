"""Encoded examples, and batches of those that are of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tcompress.data.inputs import collate
from tcompress.errors import DataError
from tcompress.memory import pins

Row = dict[str, Tensor]
Text = tuple[str, ...]
"""Texts of a row: one, or a pair that is read together."""

_Read = Callable[[int, int], list[Row]]
BY_EXAMPLE = ("labels", "words", "place")  # what a batch holds beside the model's inputs
_FEWEST = 32
_WINDOW = 50  # batches whose examples are sorted by length together


@dataclass(eq=False)
class Encoded(Dataset[list[Row]]):
    """Examples as a model reads them; each is one row, or two for pairs of sentences.

    `read` makes rows from index and epoch; `lengths` are those of the longest, 0 for pictures.
    """

    lengths: list[int]
    read: _Read
    labels: Tensor | None = None
    texts: list[tuple[Text, ...]] | None = None  # of each example, one for each row
    is_fixed: bool = False  # texts of one row each, the same in every epoch
    tells_places: bool = False  # whether batches say which examples they are of
    epoch: int = 0

    @classmethod
    def of(
        cls,
        examples: Sequence[tuple[Row, ...]],
        labels: Tensor | None = None,
        texts: list[tuple[Text, ...]] | None = None,
    ) -> Encoded:
        """Take examples whose rows are tokens, the same in every epoch, and their texts."""
        lengths = [max(len(ids) for row in rows for ids in row.values()) for rows in examples]
        is_fixed = all(len(rows) == 1 for rows in examples)
        return cls(
            lengths, lambda index, _: [{**row} for row in examples[index]], labels, texts, is_fixed
        )

    def first(self, tokens: int) -> Encoded:
        """The first examples of so many tokens, but 32 at least; all where they have none."""
        count = max(_FEWEST, int((np.cumsum(self.lengths) <= tokens).sum()))
        labels = None if self.labels is None else self.labels[:count]
        texts = None if self.texts is None else self.texts[:count]
        return Encoded(self.lengths[:count], self.read, labels, texts)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> list[Row]:
        rows = self.read(index, self.epoch)
        if self.labels is not None:
            rows[0]["labels"] = self.labels[index]
        if self.tells_places:
            rows[0]["place"] = torch.tensor(index)
        return rows


class LengthBatches(Sampler[list[int]]):
    """Batches of examples of similar length, in an order that seed and epoch determine.

    Processes take one each in a step; they change no order if all their batches have one size. The
    loop sets the epoch: accelerate's `set_epoch` counts from 0 when resumed.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, processes: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        step_size = min(batch_size * processes, len(lengths) // processes * processes)
        if not step_size:
            hint = "give more data, or start fewer processes"
            raise DataError(f"there are {len(lengths)} examples for {processes} processes", hint)
        self.step_size, self.processes, self.seed, self.epoch = step_size, processes, seed, 0
        # Accelerate reads it to share batches out.
        self.batch_size = step_size // processes
        self.drop_last = True

    def __len__(self) -> int:
        return len(self.lengths) // self.step_size * self.processes

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(len(self.lengths))
        order = order[: len(order) // self.step_size * self.step_size]
        window = _WINDOW * self.step_size
        runs = [order[first : first + window] for first in range(0, len(order), window)]
        ordered = [run[np.argsort(-self.lengths[run], kind="stable")] for run in runs]
        batches = np.concatenate(ordered).reshape(-1, self.step_size)
        for batch in batches[rng.permutation(len(batches))]:
            yield from batch.reshape(self.processes, -1).tolist()


def loader(data: Encoded, pad: int, batches: Any, *, pinned: bool = False) -> DataLoader[list[Row]]:
    """Load batches of examples, into memory that a GPU copies from by itself if `pinned`."""
    return DataLoader(
        data,
        batch_sampler=batches,
        collate_fn=partial(_collate, pad=pad),
        pin_memory=pinned,
        # Without one, opening a loader draws from torch's generator, which dropout draws from: a
        # resumed run opens more of them.
        generator=torch.Generator(),
    )


def on_device(batch: Row, device: torch.device) -> Row:
    """Move a batch without waiting for it; indices of examples stay on the CPU, as caches do."""
    return {
        name: value if name == "place" else value.to(device, non_blocking=pins(device))
        for name, value in batch.items()
    }


def model_inputs(batch: Row) -> Row:
    """Inputs of the model in a batch."""
    return {name: value for name, value in batch.items() if name not in BY_EXAMPLE}


def in_order(data: Encoded, size: int) -> list[list[int]]:
    """Batches of all examples, longest first."""
    order = np.argsort(-np.asarray(data.lengths), kind="stable").tolist()
    return [order[first : first + size] for first in range(0, len(order), size)]


def _collate(examples: Sequence[list[Row]], pad: int) -> Row:
    named = [
        {name: rows[0].pop(name) for name in BY_EXAMPLE if name in rows[0]} for rows in examples
    ]
    return {**collate([row for rows in examples for row in rows], pad), **collate(named, pad)}
