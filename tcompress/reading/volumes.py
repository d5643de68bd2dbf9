"""Volumes: arrays of bytes, from columns of a table or from arrays of a NumPy archive."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcompress.errors import DataError
from tcompress.source.text import first_line, listed

ARCHIVE = ".npz"

Volumes = NDArray[np.uint8]  # (volumes, *shape)


def volumes_of(cells: Sequence[Any], shapes: Sequence[Any], place: str) -> Volumes:
    """Puts volumes of a table together.

    Args:
        cells: The bytes of each volume, in C order.
        shapes: The shape of each volume.
        place: Where they come from, for errors.

    Returns:
        All volumes.

    Raises:
        DataError: A row has no volume or another number of bytes than its shape says, or the
            shapes differ.
    """
    first = None if not shapes or shapes[0] is None else tuple(shapes[0])
    for row, (cell, shape) in enumerate(zip(cells, shapes, strict=True)):
        if not isinstance(cell, bytes) or shape is None or len(cell) != prod(shape):
            size = f"{len(cell):,} bytes" if isinstance(cell, bytes) else "no bytes"
            raise DataError(
                f"row {row} of {place} has {size} for a volume of shape {shape}",
                hint="give volumes of one byte (uint8) for each element, with their shape",
            )
        if tuple(shape) != first:
            raise DataError(
                f"row {row} of {place} has a volume of shape {tuple(shape)}, row 0 one of {first}",
                hint="give volumes of one shape",
            )
    whole = np.frombuffer(b"".join(cells), dtype=np.uint8)
    return whole.reshape(len(cells), *(first or ()))


def read_archive(path: Path, split: str) -> tuple[Volumes, NDArray[np.int64]]:
    """Reads volumes and labels of one split from an archive as MedMNIST has it.

    Args:
        path: File with arrays such as `train_images` and `train_labels`.
        split: `train`, `validation` (stored as `val`) or `test`.

    Returns:
        Volumes, and a label for each.

    Raises:
        DataError: It is no such file, or lacks the split.
    """
    part = {"validation": "val"}.get(split, split)
    wanted = [f"{part}_images", f"{part}_labels"]
    try:
        with np.load(path, allow_pickle=False) as file:
            names = list(file.files)
            found = [file[name] for name in wanted if name in names]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"`{path}` cannot be read as an archive of arrays ({first_line(error)})",
            hint="give a file that `numpy.savez` wrote",
        ) from error
    if len(found) < len(wanted):
        raise DataError(
            f"`{path}` has no arrays {listed(wanted)}; it has {listed(names)}",
            hint="choose one of its splits with `--split`",
        )
    volumes, labels = found
    labels = labels.reshape(len(labels), -1)
    if volumes.dtype != np.uint8 or labels.shape[1] != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"`{path}` has {volumes.dtype} volumes and labels {labels.dtype} of shape "
            f"{labels.shape}",
            hint="give volumes of uint8, and one class id for each",
        )
    return volumes, labels[:, 0].astype(np.int64)


def as_input(volume: NDArray[np.uint8]) -> Tensor:
    """Scales a volume to 0 to 1 and gives it a channel.  # (*shape) -> (1, *shape)."""
    return torch.from_numpy(volume.astype(np.float32))[None] / 255
