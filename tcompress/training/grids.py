"""Volumes and series as a model reads them; batches alone are copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor

from tcompress.errors import DataError
from tcompress.reading.examples import Examples, Needs
from tcompress.reading.inputs import SERIES, VOLUMES, Inputs, grid_shape, window_of
from tcompress.reading.volumes import as_input
from tcompress.source import SourceModel


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
