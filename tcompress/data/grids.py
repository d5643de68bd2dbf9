"""Volumes, and windows of multivariate series: what is read on a grid."""

from __future__ import annotations

import hashlib
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from tcompress.data.column_names import plain_name
from tcompress.data.numbers import decimals, is_missing, number
from tcompress.data.tables import Table, kinds_of
from tcompress.errors import DataError, counted, first_line, listed
from tcompress.progress import tell

ARCHIVE = ".npz"

Volumes = NDArray[np.uint8]  # (volumes, *shape)


def volumes_of(
    cells: Sequence[Any], shapes: Sequence[Any], rows: Sequence[int], label: str
) -> Volumes:
    """Put volumes of a table together: the bytes of each in C order, its shape, and its row.

    Rows count from 0, and in messages from 1.
    """
    first = None if not shapes or shapes[0] is None else tuple(shapes[0])
    for row, cell, shape in zip((row + 1 for row in rows), cells, shapes, strict=True):
        if not isinstance(cell, bytes) or shape is None or len(cell) != prod(shape):
            size = counted(len(cell), "byte") if isinstance(cell, bytes) else "no bytes"
            hint = "give volumes of one byte (uint8) for each element, with their shape"
            raise DataError(f"row {row} of {label} has {size} for a volume of shape {shape}", hint)
        if tuple(shape) != first:
            raise DataError(
                f"row {row} of {label} has a volume of shape {tuple(shape)}, "
                f"row {rows[0] + 1} one of {first}",
                hint="give volumes of one shape",
            )
    flat = np.frombuffer(b"".join(cells), dtype=np.uint8)
    return flat.reshape(len(cells), *(first or ()))


def read_archive(path: Path, split: str) -> tuple[Volumes, NDArray[np.int64]]:
    """Read volumes and labels of one split from an archive as MedMNIST has it."""
    part = {"validation": "val"}.get(split, split)
    arrays = [f"{part}_images", f"{part}_labels"]
    try:
        with np.load(path, allow_pickle=False) as file:
            names = list(file.files)
            contents = [file[name] for name in arrays if name in names]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        text = f"`{path}` cannot be read as an archive of arrays ({first_line(error)})"
        raise DataError(text, "give a file that `numpy.savez` wrote") from error
    if len(contents) < len(arrays):
        hint = "choose one of its splits with `--split`"
        raise DataError(f"`{path}` has no arrays {listed(arrays)}; it has {listed(names)}", hint)
    volumes, labels = contents
    if not len(volumes) or len(volumes) != len(labels):
        counts = f"{counted(len(volumes), 'volume')} and {counted(len(labels), 'label')}"
        raise DataError(f"`{path}` has {counts} in `{part}`", "give each volume one label")
    labels = labels.reshape(len(labels), -1)
    if volumes.dtype != np.uint8 or labels.shape[1] != 1 or labels.dtype.kind not in "iu":
        what = f"{volumes.dtype} volumes and labels {labels.dtype} of shape {labels.shape}"
        raise DataError(f"`{path}` has {what}", "give volumes of uint8, and one class id for each")
    return volumes, labels[:, 0].astype(np.int64)


def as_input(volume: NDArray[np.uint8]) -> Tensor:
    """Scales a volume to 0 to 1 and gives it a channel.  # (*shape) -> (1, *shape)."""
    return torch.from_numpy(volume.astype(np.float32))[None] / 255


# Multivariate series: chronological parts, standardised, in windows that share memory.
#
# The protocol is that of long-term forecasting since Informer and Autoformer: the first part
# trains, the next validates, the last tests; values are standardised by mean and deviation of the
# training part; a context reaches back over a border, a forecast never does.


DATE = "date"
_DATES = {"date", "datetime", "timestamp", "time", "ds", "datehour", "utctimestamp", "datum"}
_DAYS = ("%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%d.%m.%y",
         "%m/%d/%y", "%d %b %Y", "%b %d, %Y")  # fmt: skip
_CLOCKS = ("", " %H:%M", " %H:%M:%S", "T%H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")
_PARTS, _SHARES = ("train", "validation", "test"), (0.7, 0.1, 0.2)
# The series of ETTh and ETTm, which everybody cuts after 12, 4 and 4 months of 30 days.
_ETT = frozenset({"HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"})
_ETT_HOURS = (12 * 30 * 24, 4 * 30 * 24, 4 * 30 * 24)
_NUMBERS = ("int", "float", "double")


@dataclass(frozen=True)
class Windows:
    """Windows of a series: what a model sees, and what came after it."""

    values: NDArray[np.float32]  # the whole series, standardised: (time steps, variables)
    starts: NDArray[np.int64]  # time step at which each window begins
    context: int  # time steps that a model sees
    horizon: int  # time steps that it forecasts
    variables: tuple[str, ...]
    train: int = 0  # time steps of the training part, with which the series begins

    def __len__(self) -> int:
        return len(self.starts)

    def past(self, index: int) -> Tensor:
        """Context of one window, a view.  # (context, variables)."""
        start = self.starts[index]
        return torch.from_numpy(self.values[start : start + self.context])

    def future(self, index: int) -> Tensor:
        """Values after it, a view.  # (horizon, variables)."""
        start = self.starts[index] + self.context
        return torch.from_numpy(self.values[start : start + self.horizon])

    def batch(self, places: slice) -> tuple[Tensor, Tensor]:
        """Contexts and futures of some windows (windows, time, variables), which are copied."""
        size = self.context + self.horizon
        view = sliding_window_view(self.values, size, axis=0)  # (windows, variables, size)
        chosen = torch.from_numpy(view[self.starts[places]]).mT
        return chosen[:, : self.context], chosen[:, self.context :]

    def chosen(self, places: Sequence[int]) -> Windows:
        return replace(self, starts=self.starts[np.asarray(places, dtype=np.int64)])

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.context} {self.horizon} {self.variables}".encode())
        digest.update(self.values.tobytes() + self.starts.tobytes())
        return digest.hexdigest()


def windows_of(table: Table, part: str, window: tuple[int, int]) -> Windows:
    """Cut one part of a table of series into windows, one for each step of time.

    Rows are in order of time; `window` has the time steps that are seen, and those to forecast.
    """
    columns, kinds, label = table.rows.to_dict(), kinds_of(table), table.label
    date, times = _dates(columns, kinds, label)
    hours, backwards = _hours_in_order(times, label)
    if backwards:
        columns = {name: cells[::-1] for name, cells in columns.items()}
        tell(f"{label}: its rows are in falling order of time, and read from the end")
    names = tuple(name for name in columns if name not in date)
    columns |= {name: _as_numbers(columns[name], name, kinds[name], label) for name in names}
    others = [f"`{name}` ({kinds[name]})" for name in names if columns[name] is None]
    if others or not names:
        what = "columns that are no series: " + ", ".join(others)
        what = what if others else f"no column beside `{DATE}`"
        hint = "every column beside `date` must hold numbers: remove the others"
        raise DataError(f"`{label}` has {what}", hint)
    values = np.stack([_numbers(columns[name], name, label) for name in names], axis=1)
    ends = _ends(len(values), names, hours)
    if part not in _PARTS:
        hint = "choose one of them with `--split`"
        raise DataError(f"`{label}` has no part `{part}`; its parts are {listed(_PARTS)}", hint)
    index = _PARTS.index(part)
    first = ends[index - 1] if index else 0
    context, horizon = window
    # A forecast begins in its own part; only the first part has no past to look at.
    starts = np.arange(first - (context if index else 0), ends[index] - context - horizon + 1)
    starts = starts[starts >= 0]
    if not len(starts):
        rows = counted(ends[index] - first, "row")
        what = f"{rows}, too few for windows of {context} + {horizon}"
        hint = "give a longer series, or a model with a shorter horizon"
        raise DataError(f"the part `{part}` of `{label}` has {what}", hint)
    return Windows(_standardised(values, ends[0]), starts, context, horizon, names, ends[0])


def _dates(
    columns: Mapping[str, Sequence[Any]], kinds: Mapping[str, str], label: str
) -> tuple[set[str], NDArray[np.datetime64]]:
    """Find the columns that say when a row was, and these times in seconds."""
    named = [name for name in columns if plain_name(name) in _DATES]
    named.sort(key=lambda name: name != DATE)
    if not named:  # as the index of a table is written
        named = [name for name in columns if name.startswith("Unnamed") and kinds[name] == "text"]
    if not named:
        hint = "give a table with a column `date` and one column for each series"
        raise DataError(f"`{label}` has no column `{DATE}`; it has {listed(columns)}", hint)
    cells, date = columns[named[0]], {named[0]}
    clocks = (name for name in named[1:] if all(map(_CLOCK.fullmatch, map(str, columns[name]))))
    if (clock := next(clocks, None)) is not None:
        cells = [f"{a} {b}" for a, b in zip(cells, columns[clock], strict=True)]
        date.add(clock)
    return date, _times(cells, named[0], label)


def _times(cells: Sequence[Any], name: str, label: str) -> NDArray[np.datetime64]:
    """Read times, as ISO 8601 writes them or with the day or the month first."""
    import pandas

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zones are taken into account
            return np.array(cells, dtype="datetime64[s]")
    except (ValueError, TypeError) as error:
        reason = first_line(error)
    read = []
    for day, clock in product(_DAYS, _CLOCKS):
        with suppress(ValueError, TypeError):
            parsed = pandas.to_datetime(pandas.Series(cells), format=day + clock)
            read.append(parsed.to_numpy().astype("datetime64[s]"))
    if not read:
        text = f"column `{name}` of `{label}` holds no dates ({reason})"
        raise DataError(text, "write dates as `2020-01-31 23:50:00`")
    # Of days and months that may be either, those that rise.
    return min(read, key=lambda times: int((np.diff(times).astype(np.int64) < 0).sum()))


def _hours_in_order(times: NDArray[np.datetime64], label: str) -> tuple[float, bool]:
    """Hours between two rows, and whether they fall; checks that they do the one or the other."""
    steps = np.diff(times).astype(np.int64)
    backwards = len(steps) > 1 and bool((steps < 0).all())
    steps = -steps if backwards else steps
    if (steps < 0).any():
        row = int(np.argmax(steps < 0)) + 1
        hint = "sort the rows by date"
        raise DataError(f"row {row} of `{label}` is earlier than the row before it", hint)
    return (float(np.median(steps)) / 3600 if len(steps) else 0.0), backwards


def _as_numbers(cells: Sequence[Any], name: str, kind: str, label: str) -> Sequence[Any] | None:
    """Read cells as numbers, whatever their type; None if most are something else."""
    if kind.startswith(_NUMBERS) or kind == "bool":
        return cells
    if kind != "text":
        return None
    if (numbers := decimals(cells)) is not None:
        return numbers
    bad = [row for row, cell in enumerate(cells) if number(cell) is None and not is_missing(cell)]
    if bad and 2 * len(bad) < len(cells):
        text = f"column `{name}` of `{label}` has no number in row {bad[0] + 1} (`{cells[bad[0]]}`)"
        raise DataError(text, "fill in what is missing, or remove the column")
    return None


def _numbers(cells: Sequence[Any], name: str, label: str) -> NDArray[np.float64]:
    values = np.array([np.nan if cell is None else cell for cell in cells], dtype=np.float64)
    if count := int((~np.isfinite(values)).sum()):
        text = f"column `{name}` of `{label}` has {counted(count, 'row')} without a finite number"
        raise DataError(text, "fill them in, or remove the column")
    return values


def _ends(rows: int, names: Sequence[str], hours: float) -> tuple[int, int, int]:
    if frozenset(names) == _ETT and hours > 0:
        sizes = [round(size / hours) for size in _ETT_HOURS]
        if sum(sizes) <= rows:
            return sizes[0], sizes[0] + sizes[1], sum(sizes)
    train, test = int(rows * _SHARES[0]), int(rows * _SHARES[2])
    return train, rows - test, rows


def _standardised(values: NDArray[np.float64], train: int) -> NDArray[np.float32]:
    """Subtract mean and divide by deviation of the training part; constants become 0."""
    part = values[:train]
    constant = part.max(axis=0) == part.min(axis=0)  # whose deviation may be 1e-16, by rounding
    mean = np.where(constant, part[0], part.mean(axis=0))
    scaled = (values - mean) / np.where(constant, 1, part.std(axis=0))
    return np.ascontiguousarray(scaled, dtype=np.float32)
