"""Encoded examples, sets of them, and batches of those that are of similar length."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tcompress.data.examples import Examples, Needs
from tcompress.data.grids import Volumes, as_input
from tcompress.data.inputs import SERIES, VOLUMES, Inputs, collate, grid_shape, window_of
from tcompress.errors import DataError, listed
from tcompress.models import SourceModel
from tcompress.options import TrainingData

# Encoded examples, and batches of those that are of similar length.


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


# Putting sets of examples together, and taking them apart.


def joined(parts: Sequence[Examples]) -> Examples:
    """Puts several data sets one after another."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.windows is not None:
        raise DataError(
            f"`{first.name}` and `{parts[1].name}` are series, of which one can be trained on",
            hint="give one file with all series",
        )
    for part in parts[1:]:
        if part.classes != first.classes or len(part.texts) != len(first.texts):
            raise DataError(
                f"`{first.name}` and `{part.name}` do not go together: they have "
                f"{len(first.classes)} and {len(part.classes)} classes, and {len(first.texts)} and "
                f"{len(part.texts)} texts in an example",
                hint="give data sets with the same columns and classes",
            )
    targets: Any = None
    if first.targets is not None:
        targets = [target for part in parts for target in part.targets or ()]
    return Examples(
        name=" + ".join(part.name for part in parts),
        split=first.split,
        fingerprint=hashlib.sha256("".join(p.fingerprint for p in parts).encode()).hexdigest(),
        texts=tuple(
            [text for part in parts for text in part.texts[index]]
            for index in range(len(first.texts))
        ),
        images=tuple(image for part in parts for image in part.images),
        targets=targets,
        classes=first.classes,
        volumes=_volumes(parts),
        whole=first.whole,
    )


def with_wrong_pairs(examples: Examples, count: int, seed: int) -> Examples:
    """Adds pairs of a first text with second texts of others, as class 0.

    Args:
        examples: Pairs of texts, all right.
        count: Wrong pairs for each.
        seed: Seed of the choice.

    Raises:
        DataError: There are too few different second texts to choose among.
    """
    first, second = examples.texts
    pool = list(dict.fromkeys(second))
    if len(pool) <= count:
        raise DataError(
            f"`{examples.name}` has {len(pool)} different second texts, too few to draw {count} "
            "wrong ones",
            hint="give more pairs",
        )
    place = {text: index for index, text in enumerate(pool)}
    own = np.array([place[text] for text in second])[:, None]
    rng = np.random.default_rng(seed)
    drawn = np.stack([rng.choice(len(pool) - 1, count, replace=False) for _ in own])
    wrong = drawn + (drawn >= own)  # numbers from the right one on mean the next
    pairs = list(zip(first, second, strict=True))
    pairs += [(one, pool[i]) for one, row in zip(first, wrong.tolist(), strict=True) for i in row]
    return replace(
        examples,
        texts=([one for one, _ in pairs], [two for _, two in pairs]),
        targets=[1] * len(first) + [0] * (count * len(first)),
    )


def _volumes(parts: Sequence[Examples]) -> Volumes | None:
    found = [part.volumes for part in parts if part.volumes is not None]
    if not found:
        return None
    if len({volumes.shape[1:] for volumes in found}) > 1:
        shapes = ", ".join(
            f"`{part.name}` {volumes.shape[1:]}" for part, volumes in zip(parts, found, strict=True)
        )
        raise DataError(
            f"volumes are of different shapes: {shapes}", hint="give volumes of one shape"
        )
    return np.concatenate(found)


def with_classes(held: Examples, train: Examples) -> Examples:
    """Numbers the classes of held-out data as those of the training data."""
    unknown = [name for name in held.classes if name not in train.classes]
    if unknown:
        raise DataError(
            f"`{held.name}` has the classes {listed(unknown)}, which `{train.name}` has not",
            hint="give data sets with the same classes",
        )
    if held.classes == train.classes or held.targets is None:
        return held
    places = [train.classes.index(name) for name in held.classes]
    targets = [places[int(target)] for target in held.targets]
    return replace(held, targets=targets, classes=train.classes)


def split_off(
    examples: Examples, options: TrainingData, seed: int, fewest: int = 1
) -> tuple[Examples, Examples]:
    """Holds examples out at random.

    Args:
        examples: All examples.
        options: What share of them, and how many at most.
        seed: Seed of the choice.
        fewest: How many at least, where they are not half of all.
    """
    order = np.random.default_rng([seed, 1]).permutation(len(examples))
    least = max(1, min(fewest, len(order) // 2))
    count = min(max(round(options.holdout * len(order)), least), options.validation_samples)
    return _chosen(examples, np.sort(order[count:])), _chosen(examples, np.sort(order[:count]))


def _chosen(examples: Examples, indices: np.ndarray[Any, np.dtype[np.int64]]) -> Examples:
    places = indices.tolist()
    targets: Any = examples.targets
    return Examples(
        name=examples.name,
        split=examples.split,
        fingerprint=examples.fingerprint,
        texts=tuple([column[place] for place in places] for column in examples.texts),
        images=tuple(examples.images[place] for place in places) if examples.images else (),
        targets=None if targets is None else [targets[place] for place in places],
        classes=examples.classes,
        volumes=None if examples.volumes is None else examples.volumes[indices],
        windows=None if examples.windows is None else examples.windows.chosen(places),
        whole=examples.whole,
    )


# Volumes and series as a model reads them; batches alone are copied.


class Lazy(Sequence[Any]):
    """Items that are made when they are asked for.

    Args:
        count: How many there are.
        make: Makes one of them.
    """

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._size, self._make = count, make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._make(place) for place in range(self._size)[index]]
        return self._make(range(self._size)[index])


def unlabelled_needs(source: SourceModel, inputs: Inputs) -> Needs:
    """What a model is healed on."""
    if inputs.grid == SERIES:
        return Needs(window=window_of(source))
    return Needs(volume=True)


def check_task(needs: Needs, source: SourceModel, inputs: Inputs) -> None:
    """Checks that a model reads what its task needs.

    Raises:
        DataError: It does not.
    """
    wanted = SERIES if needs.window is not None else VOLUMES if needs.volume else None
    if inputs.grid != wanted:
        what = {VOLUMES: "volumes", SERIES: "series", None: "neither volumes nor series"}
        raise DataError(
            f"`{source.model_class.__name__}` reads {what[inputs.grid]}, its task {what[wanted]}",
            hint="choose another task, or a model for this one",
        )


def grid_rows(
    examples: Examples, source: SourceModel, inputs: Inputs, *, labelled: bool
) -> tuple[Sequence[Any], Tensor | None]:
    """Writes volumes, or windows of a series, as a model's inputs.

    Args:
        examples: The examples.
        source: The model.
        inputs: Its inputs.
        labelled: Whether there is a task.

    Returns:
        Inputs and labels of the examples.

    Raises:
        DataError: They are not of the model's size.
    """
    wanted = grid_shape(source, inputs)
    windows, volumes = examples.windows, examples.volumes
    if windows is not None:
        _check(examples, (windows.context, len(windows.variables)), wanted)
        rows = Lazy(len(windows), lambda index: {SERIES: windows.past(index)})
        return rows, cast(Tensor, Lazy(len(windows), windows.future)) if labelled else None
    assert volumes is not None  # the model reads volumes
    _check(examples, (1, *volumes.shape[1:]), wanted)
    rows = Lazy(len(volumes), lambda index: {VOLUMES: as_input(volumes[index])})
    return rows, None if examples.targets is None else torch.tensor(examples.targets)


def _check(examples: Examples, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise DataError(
            f"`{examples.name}` has inputs of shape {found}, the model takes {wanted}",
            hint="give data of that shape, or a model for this one",
        )
