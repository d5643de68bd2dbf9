"""Tiny models on grids, and files of volumes and series."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.tiny import SERIES, TINY, VOLUME, TinyModel


def grid_folder(name: str, folder: Path, seed: int = 0, **options: Any) -> Path:
    """Write a tiny host, `tcompress_grid` or `tcompress_grid-series`, with other options."""
    tiny = TINY[name]
    TinyModel(tiny.config, tiny.model, {**tiny.options, **options}).build(seed).save_pretrained(
        folder
    )
    return folder


def drawn_volumes(count: int, classes: int = 2) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Volumes whose brightness tells their class, and labels."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) * 5 % 7 % classes
    noise = rng.integers(0, 100, (count, *VOLUME))
    return (noise + 50 * labels[:, None, None, None]).astype(np.uint8), labels


def volume_file(path: Path, count: int = 24, classes: int = 2, **columns: Sequence[Any]) -> Path:
    """Write volumes as a table of bytes, shapes and labels."""
    import pandas as pd

    volumes, labels = drawn_volumes(count, classes)
    shapes = [list(VOLUME)] * count
    cells = {"volume": [item.tobytes() for item in volumes], "shape": shapes, "label": labels}
    pd.DataFrame({**cells, **columns}).to_parquet(path)
    return path


def archive_file(path: Path, count: int = 24, classes: int = 2) -> Path:
    """Write volumes as MedMNIST does; each split begins elsewhere."""
    volumes, labels = drawn_volumes(count, classes)
    arrays = {}
    for start, part in enumerate(("train", "val", "test")):
        arrays[f"{part}_images"] = volumes[start:]
        arrays[f"{part}_labels"] = labels[start:, None].astype(np.uint8)
    np.savez(path, **arrays)
    return path


def drawn_series(rows: int, variables: int = SERIES[0]) -> NDArray[np.float64]:
    """Cycles of different length, with some noise.  # (rows, variables)."""
    rng = np.random.default_rng(0)
    steps = np.arange(rows)[:, None] / np.array([7, 11, 19, 23, 5, 13, 17])[:variables]
    return 10 * np.sin(2 * np.pi * steps) + rng.normal(0, 0.3, (rows, variables)) + 100


def series_file(
    path: Path,
    rows: int = 300,
    names: Sequence[str] = ("a", "b", "c"),
    minutes: int = 60,
    **columns: Sequence[Any],
) -> Path:
    """Write series with a date as csv or parquet."""
    import pandas as pd

    dates = pd.date_range("2020-01-01", periods=rows, freq=f"{minutes}min")
    frame = pd.DataFrame(drawn_series(rows, len(names)), columns=list(names))
    frame.insert(0, "date", dates)
    for name, values in columns.items():
        frame[name] = values
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return path
