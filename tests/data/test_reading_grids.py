"""Reading volumes and series."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tcompress.data.examples import Examples, Needs, load_examples
from tcompress.errors import DataError
from tests.support.grids import archive_file, drawn_series, drawn_volumes, series_file, volume_file
from tests.support.tiny import VOLUME

CLASSES = Needs(volume=True, target="class")
ETT = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")


def _read(
    path: Path, part: str = "train", window: tuple[int, int] = (8, 4), **more: Any
) -> Examples:
    return load_examples(str(path), part, Needs(window=window), **more)


def test_volumes_of_a_table(tmp_path: Path) -> None:
    volumes, labels = drawn_volumes(24)
    path = volume_file(tmp_path / "v.parquet")
    found = load_examples(str(path), "train", CLASSES)
    assert found.name == "v.parquet:volume,shape,label"
    assert (len(found), found.classes, found.whole) == (24, ("0", "1"), True)
    assert found.volumes is not None
    assert np.array_equal(found.volumes, volumes)
    assert found.targets == labels.tolist()
    few = load_examples(str(path), "train", CLASSES, limit=5)
    assert len(few) == 5
    assert few.fingerprint != found.fingerprint
    plain = load_examples(str(path), "train", Needs(volume=True))
    assert (plain.targets, plain.classes) == (None, ())


def test_volumes_of_an_archive(tmp_path: Path) -> None:
    volumes, labels = drawn_volumes(24)
    path = archive_file(tmp_path / "v.npz")
    for start, split in enumerate(("train", "validation", "test")):
        found = load_examples(str(path), split, CLASSES)
        assert found.volumes is not None
        assert np.array_equal(found.volumes, volumes[start:])
        assert found.targets == labels[start:].tolist()
        assert not found.whole
    assert len(load_examples(str(path), "train", CLASSES, limit=5)) == 5
    with pytest.raises(DataError, match="has no arrays `dev_images`, `dev_labels`; it has"):
        load_examples(str(path), "dev", CLASSES)


def test_archives_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "v.npz"
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read as an archive of arrays"):
        load_examples(str(path), "train", CLASSES)
    np.savez(path, train_images=np.zeros((2, 4)), train_labels=np.zeros((2, 3), int))
    with pytest.raises(DataError, match="has float64 volumes and labels int64 of shape"):
        load_examples(str(path), "train", CLASSES)
    for volumes, labels in ((4, 3), (0, 0)):
        arrays = np.zeros((volumes, *VOLUME), np.uint8), np.zeros((labels, 1), int)
        np.savez(path, train_images=arrays[0], train_labels=arrays[1])
        with pytest.raises(DataError, match=f"{volumes} volumes and {labels} labels in `train`"):
            load_examples(str(path), "train", CLASSES)


def test_tables_without_volumes(tmp_path: Path) -> None:
    shapes = [list(VOLUME)] * 23 + [[8, 8, 3]]
    path = volume_file(tmp_path / "v.parquet", shape=shapes)
    with pytest.raises(DataError, match=r"row 24 of `v.parquet` has 256 bytes for a volume"):
        load_examples(str(path), "train", CLASSES, limit=5, seed=3)
    path = volume_file(tmp_path / "v.parquet", shape=[list(VOLUME)] * 23 + [[4, 8, 8]])
    with pytest.raises(DataError, match=r"has a volume of shape \(4, 8, 8\), row 1 one of"):
        load_examples(str(path), "train", CLASSES)
    with pytest.raises(DataError, match="the task needs a column for `shape`, `volume`"):
        load_examples(str(series_file(tmp_path / "s.parquet")), "train", Needs(volume=True))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_parts_of_a_series(suffix: str, tmp_path: Path) -> None:
    path = series_file(tmp_path / f"s.{suffix}")
    values = drawn_series(300)
    train = values[:210]
    scaled = (values - train.mean(0)) / train.std(0)
    firsts = {"train": 0, "validation": 210 - 8, "test": 240 - 8}
    counts = {"train": 210 - 11, "validation": 30 - 3, "test": 60 - 3}
    for part, first in firsts.items():
        found = _read(path, part)
        windows = found.windows
        assert (len(found), windows.variables) == (counts[part], ("a", "b", "c"))
        last = len(found) - 1
        for index in (0, 5, last):
            start = first + index
            rows = np.concatenate([windows.past(index), windows.future(index)])
            np.testing.assert_allclose(rows, scaled[start : start + 12], rtol=1e-5, atol=1e-6)
        past, future = windows.batch(slice(3, 7))
        assert past.shape == (4, 8, 3)
        for place in range(4):
            assert np.array_equal(past[place], windows.past(3 + place))
            assert np.array_equal(future[place], windows.future(3 + place))
        assert not found.whole


def test_windows_share_memory_and_can_be_drawn(tmp_path: Path) -> None:
    path = series_file(tmp_path / "s.csv")
    windows = _read(path).windows
    one, two = windows.past(0).numpy(), windows.future(3).numpy()
    assert np.shares_memory(one, windows.values)
    assert np.shares_memory(two, windows.values)
    few = _read(path, limit=6)
    assert len(few) == 6
    assert sorted(few.windows.starts) == few.windows.starts.tolist()
    assert few.fingerprint != _read(path).fingerprint


@pytest.mark.often("60-1")
@pytest.mark.parametrize(("minutes", "factor"), [(60, 1), (15, 4)])
def test_electricity_transformers_are_cut_after_months(
    minutes: int, factor: int, tmp_path: Path
) -> None:
    path = series_file(tmp_path / "e.parquet", 17420 * factor, ETT, minutes)
    month = 30 * 24 * factor
    sizes = {"train": 12 * month - 191, "validation": 4 * month - 95, "test": 4 * month - 95}
    for part, size in sizes.items():
        assert len(_read(path, part, (96, 96))) == size


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"date": ["2020-01-02"] + ["2020-01-01"] * 299}, "row 1 of `s.csv` is earlier"),
        ({"date": ["yesterday"] * 300}, "column `date` of `s.csv` holds no dates"),
        ({"name": ["x"] * 300}, r"columns that are no series: `name` \(text\)"),
        ({"b": [*map(str, range(299)), "NA"]}, r"column `b` .* no number in row 300 \(`NA`\)"),
        ({"b": [1.0] * 299 + [None]}, "column `b` of `s.csv` has 1 row without a finite number"),
    ],
)
def test_tables_that_are_no_series(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = series_file(tmp_path / "s.csv", **columns)
    with pytest.raises(DataError, match=message):
        _read(path)


def test_what_is_asked_of_a_series(tmp_path: Path) -> None:
    path = series_file(tmp_path / "s.csv")
    with pytest.raises(DataError, match="has no part `dev`; its parts are"):
        _read(path, "dev")
    with pytest.raises(DataError, match=r"part `validation` .* has 30 rows, too few for windows"):
        _read(path, "validation", (8, 31))
    with pytest.raises(DataError, match=r"`v\.parquet` has no column `date`"):
        _read(volume_file(tmp_path / "v.parquet"))


STEPS = pd.date_range("2020-01-28", periods=60, freq="h")
SERIES = pd.DataFrame({"date": STEPS, "a": np.arange(60) ** 2 / 8 - 100, "b": np.arange(60) % 7})


def _numbered(form: Callable[[float], str]) -> pd.DataFrame:
    return SERIES.assign(a=SERIES.a.map(form))


def _swapped(number: float) -> str:
    return f"{number:,.3f}".translate(str.maketrans(",.", ".,"))


FORMS: dict[str, str] = {
    **{name: SERIES.rename(columns={"date": name}).to_csv(index=False) for name in (
        "Date", "timestamp", "ds", "Date Time")},
    "index": SERIES.set_index("date").to_csv()[4:],
    "decimal commas": SERIES.to_csv(index=False, sep=";", decimal=","),
    **{form: SERIES.assign(date=STEPS.strftime(form)).to_csv(index=False) for form in (
        "%d.%m.%Y %H:%M", "%m/%d/%Y %H:%M", "%d/%m/%Y %H:%M:%S", "%Y/%m/%d %H:%M",
        "%Y-%m-%dT%H:%M:%SZ", "%m/%d/%Y %I:%M %p")},
    "two columns": SERIES.assign(date=STEPS.strftime("%Y-%m-%d"), time=STEPS.strftime("%H:%M"))[
        ["date", "time", "a", "b"]].to_csv(index=False),
    "backwards": SERIES[::-1].to_csv(index=False),
    "thousands": _numbered("{:,.3f}".format).to_csv(index=False),
    "thousands, decimal commas": _numbered(_swapped).to_csv(index=False, sep=";"),
    "minus signs": _numbered(lambda x: str(x).replace("-", "\u2212")).to_csv(index=False),
    "exponents": _numbered("{:.9e}".format).to_csv(index=False),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_series_in_every_form(form: str, tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text(FORMS[form])
    windows = _read(tmp_path / "s.csv").windows
    assert windows is not None
    expected = SERIES[["a", "b"]].to_numpy()
    scaled = (expected - expected[:42].mean(0)) / expected[:42].std(0)
    np.testing.assert_allclose(windows.values, scaled, rtol=1e-5, atol=1e-5)
    assert windows.variables == ("a", "b")


def test_constant_series_become_zero(tmp_path: Path) -> None:
    # The mean of 0.1 is another number than 0.1.
    windows = _read(series_file(tmp_path / "s.csv", b=[0.1] * 250 + [1.1] * 50)).windows
    assert windows.values[:, 1].tolist() == [0] * 250 + [1] * 50
