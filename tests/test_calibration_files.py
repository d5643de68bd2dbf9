"""Calibration data from files, folders and the hub."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

from tcompress.data.calibration import load_batches
from tcompress.errors import DataError
from tcompress.models import SourceModel
from tcompress.options import Calibration
from tests.support.model_folders import WORDS, model_folder, sentences, text_file


@pytest.fixture
def bert(tmp_path: Path) -> SourceModel:
    return SourceModel.open(str(model_folder("bert", tmp_path / "bert")))


# Files


def write_arrow(path: Path, frame: pd.DataFrame) -> None:
    with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
        for row in frame.to_dict("records"):
            writer.write(row)
        writer.finalize()


WRITERS: dict[str, Callable[[Path, pd.DataFrame], Any]] = {
    "csv": lambda path, frame: frame.to_csv(path, index=False),
    "tsv": lambda path, frame: frame.to_csv(path, index=False, sep="\t"),
    "json": lambda path, frame: frame.to_json(path, orient="records"),
    "jsonl": lambda path, frame: frame.to_json(path, orient="records", lines=True),
    "parquet": lambda path, frame: frame.to_parquet(path),
    "arrow": write_arrow,
}


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_every_format_gives_the_same(kind: str, bert: SourceModel, tmp_path: Path) -> None:
    texts = sentences(12)
    frame = pd.DataFrame({"id": range(12), "text": texts, "label": ["good", "bad"] * 6})
    file = tmp_path / f"data [1].{kind}"
    WRITERS[kind](file, frame)
    data = load_batches(bert, Calibration(source=str(file)))
    plain = load_batches(bert, Calibration(source=text_file(tmp_path / "texts.txt", texts)))
    assert data.name == f"data [1].{kind}:text"
    assert plain.name == "texts.txt"
    assert data.fingerprint == plain.fingerprint


def test_both_sentences_of_a_pair_are_samples(bert: SourceModel, tmp_path: Path) -> None:
    texts = sentences(40)
    frame = pd.DataFrame(
        {
            "key": [f"{index:032x}" for index in range(20)],
            "premise": texts[:20],
            "date": ["2016-07-01 00:00:00"] * 20,
            "hypothesis": texts[20:],
            "label": ["not entailed at all", "clearly entailed"] * 10,
            "score": np.linspace(0, 5, 20),
        }
    )
    frame.to_parquet(tmp_path / "pairs.parquet")
    data = load_batches(bert, Calibration(source=str(tmp_path / "pairs.parquet")))
    assert data.name == "pairs.parquet:premise,hypothesis"
    assert data.samples == 40


def test_named_columns_are_used_whatever_they_hold(bert: SourceModel, tmp_path: Path) -> None:
    frame = pd.DataFrame({"text": sentences(6), "word": WORDS[:6]})
    frame.to_csv(tmp_path / "words.csv", index=False)
    options = Calibration(source=str(tmp_path / "words.csv"), columns=("word",))
    data = load_batches(bert, options)
    assert data.name == "words.csv:word"
    assert data.tokens == 6 * 3


def test_a_folder_is_read_by_split(bert: SourceModel, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "README.md").write_text("# Data\n")
    pd.DataFrame({"text": sentences(9)}).to_parquet(folder / "train.parquet")
    pd.DataFrame({"text": sentences(4)}).to_parquet(folder / "test.parquet")
    assert load_batches(bert, Calibration(source=str(folder))).samples == 9
    assert load_batches(bert, Calibration(source=str(folder), split="test")).samples == 4
    with pytest.raises(DataError, match=r"no such split .*'train', 'test'"):
        load_batches(bert, Calibration(source=str(folder), split="dev"))


def test_a_data_set_saved_to_disk_is_read(bert: SourceModel, tmp_path: Path) -> None:
    found = datasets.Dataset.from_dict({"text": sentences(9)})
    found.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"dev": found}).save_to_disk(str(tmp_path / "more"))
    one = load_batches(bert, Calibration(source=str(tmp_path / "one")))
    more = load_batches(bert, Calibration(source=str(tmp_path / "more"), split="dev"))
    assert one.fingerprint == more.fingerprint
    with pytest.raises(DataError, match="no such split"):
        load_batches(bert, Calibration(source=str(tmp_path / "more")))


def test_nothing_is_left_behind(
    bert: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("temporary", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    file = text_file(tmp_path / "texts.txt", sentences(9))
    before = datasets.logging.get_verbosity()
    load_batches(bert, Calibration(source=file))
    assert [*(tmp_path / "temporary").iterdir(), *(tmp_path / "cache").iterdir()] == []
    assert datasets.logging.get_verbosity() == before
    assert not datasets.utils.are_progress_bars_disabled()


# Files that cannot be used


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "holds no rows"),
        ("blank.txt", b"\n \n\n", "all 3 rows of `blank.txt` are empty in the columns `text`"),
        ("header.csv", b"text,label\n", "holds no rows"),
        ("list.json", b"[]", "holds no rows|cannot be read"),
        ("cut.json", b'{"text": "a b"', "cannot be read as data"),
        ("cut.parquet", b"PAR1", "cannot be read as data"),
        ("other.txt", b"\xff\xfe\x00", "cannot be read as data .UnicodeDecodeError"),
        ("numbers.csv", b"a,b\n1,2.5\n", r"it has `a` \(int64\), `b` \(float64\)"),
        ("notes.docx", b"PK", "is of no known kind; data files end in `.arrow`, `.csv`"),
    ],
)
def test_unusable_files_are_explained(
    name: str, content: bytes, message: str, bert: SourceModel, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_batches(bert, Calibration(source=str(tmp_path / name)))
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_a_missing_file_lists_what_is_there(
    bert: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    text_file(tmp_path / "sub" / "train.txt", ["a"])
    monkeypatch.chdir(tmp_path)
    for name in ("sub/trian.txt", str(tmp_path / "sub" / "tran.txt"), "sub/train.text"):
        with pytest.raises(DataError, match=r"holds `train\.txt`") as caught:
            load_batches(bert, Calibration(source=name))
        assert caught.value.hint == "did you mean `train.txt`"
    for name in ("texts.csv", ""):
        with pytest.raises(DataError, match=r"there is no file|name .* is empty"):
            load_batches(bert, Calibration(source=name))


def test_a_folder_without_data_is_refused(bert: SourceModel, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes.md").touch()
    with pytest.raises(DataError, match=r"has no data files; it holds `notes\.md`"):
        load_batches(bert, Calibration(source=str(tmp_path / "docs")))


def test_named_columns_are_checked(bert: SourceModel, tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    pd.DataFrame({"sentence": sentences(3), "label": [0, 1, 0]}).to_csv(file, index=False)
    with pytest.raises(DataError, match="has no column `sentense`") as caught:
        load_batches(bert, Calibration(source=str(file), columns=("sentense",)))
    assert caught.value.hint == "did you mean `sentence`"
    with pytest.raises(DataError, match="holds int64, but `BertForMaskedLM` takes text"):
        load_batches(bert, Calibration(source=str(file), columns=("label",)))


# Data of the hub


def test_a_hub_data_set_is_asked_for_split_and_configuration(
    bert: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any, **options: Any) -> datasets.Dataset:
        calls.append((*args, options))
        return datasets.Dataset.from_dict({"text": sentences(5)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load_batches(bert, Calibration(source="owner/name", split="train[:5]"))
    load_batches(bert, Calibration(source="name:config"))
    assert data.name == "owner/name:text"
    assert calls == [
        ("owner/name", None, {"split": "train[:5]"}),
        ("name", "config", {"split": "train"}),
    ]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("Couldn't reach it"), "the hub gives no such data set"),
        (datasets.exceptions.DatasetNotFoundError("gone"), "the hub gives no such data set"),
        (ValueError("Config name is missing.\nPick one: ['a']"), r"several .* Pick one: \['a'\]"),
        (RuntimeError("odd.\nmore"), "cannot be read as data .RuntimeError: odd"),
    ],
)
def test_failures_of_the_hub_are_explained(
    error: Exception, message: str, bert: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=message) as caught:
        load_batches(bert, Calibration(source="owner/name"))
    assert caught.value.hint
    assert "\n" not in caught.value.message
