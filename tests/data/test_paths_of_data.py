"""Files and folders of data with any name, and which files of a folder are read."""

import base64
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from tcompress.data.tables import check_data, content, opened
from tcompress.errors import DataError
from tcompress.progress import listening
from tests.support.conversions import Told

FRAME = pd.DataFrame({"text": ["a one two", "b three four", "c five six"], "label": [0, 1, 0]})
# What shells, patterns, addresses and readers of paths take for something else.
NAMES = ["$HOME", "**", "~", "a::b", " ${HOME} %20#?[1]*{x,y}~;'\"&|<>:=@\\ünï\n日本 "]


def _arrow() -> bytes:
    file, table = io.BytesIO(), pa.Table.from_pandas(FRAME)
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


CSV = FRAME.to_csv(index=False).encode()
FORMATS: dict[str, Callable[[], bytes]] = {
    ".csv": lambda: CSV,
    ".tsv": lambda: FRAME.to_csv(index=False, sep="\t").encode(),
    ".json": lambda: json.dumps({"data": FRAME.to_dict("records")}).encode(),
    ".jsonl": lambda: FRAME.to_json(orient="records", lines=True).encode(),
    ".parquet": FRAME.to_parquet,
    ".arrow": _arrow,
    ".txt": lambda: "\n".join(FRAME.text).encode(),
    ".csv.gz": lambda: gzip.compress(CSV),
    ".parquet.gz": lambda: gzip.compress(FRAME.to_parquet()),
}


def _texts(path: Path, split: str = "train") -> list[str]:
    with opened(str(path), split) as table:
        return list(table.rows["text"])


@pytest.mark.parametrize("ending", FORMATS)
def test_names_of_files_and_folders_hold_any_character(ending: str, tmp_path: Path) -> None:
    for name in NAMES if ending == ".csv" else NAMES[-1:]:
        file = tmp_path / f"{name}{ending}"
        file.write_bytes(FORMATS[ending]())
        assert _texts(file) == FRAME.text.tolist()
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}{ending}").write_bytes(FORMATS[ending]())
        (tmp_path / "x").mkdir(exist_ok=True)  # which a pattern would find
        (tmp_path / "x" / f"x{ending}").write_bytes(FORMATS[ending]())
        assert _texts(folder) == FRAME.text.tolist()
        file.unlink()


def _picture(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(path)


def test_names_of_pictures_and_of_their_classes_hold_any_character(tmp_path: Path) -> None:
    for index, name in enumerate(NAMES):
        _picture(tmp_path / "$HOME" / name / f"{NAMES[index - 1]}.png", index)
    with opened(str(tmp_path / "$HOME"), "train") as table:
        named = table.rows.features["label"].names
        assert named == sorted(NAMES)
        for row in table.rows:
            pixels = Image.open(io.BytesIO(content(row["image"])))  # type: ignore[arg-type]
            assert NAMES[pixels.getpixel((0, 0))[0]] == named[row["label"]]  # type: ignore[index]


def test_saved_data_sets_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_pandas(FRAME)
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "several")
    for name in ("saved", "several"):
        (tmp_path / name).rename(tmp_path / f"{name}::$HOME")
    assert _texts(tmp_path / "saved::$HOME") == FRAME.text.tolist()
    assert _texts(tmp_path / "several::$HOME", "test") == FRAME.text.tolist()
    # A name that is there means itself, one of nobody's home nothing.
    monkeypatch.chdir(tmp_path)
    Path("~").mkdir()
    Path("~/data.csv").write_bytes(CSV)
    assert _texts(Path("~/data.csv")) == FRAME.text.tolist()
    with pytest.raises(DataError, match=r"there is no file or folder `~nobody"):
        check_data(["~nobody-at-all/data.csv"])


TREES: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "all": (["a.csv", "b/c.csv"], {"train": ["a", "b/c"]}),
    "files": (["train.csv", "dev-1.csv", "x_test.csv", "notes.csv"],
              {"train": ["train"], "validation": ["dev-1"], "test": ["x_test"]}),
    "case": (["Train.csv", "Test.csv"], {"train": ["Train"], "test": ["Test"]}),
    "folders": (["val/a.csv", "training/test.csv"],
                {"train": ["training/test"], "validation": ["val/a"]}),
    "words in folders of a split": (["val/train/a.csv", "val/b.csv", "train/bullet_train/a.csv"],
                                    {"validation": ["val/train/a", "val/b"],
                                     "train": ["train/bullet_train/a"]}),
    "shards": (["data/hard-00000-of-00001.csv", "train.csv"],
               {"hard": ["data/hard-00000-of-00001"]}),
    "hidden": ([".a.csv", "__x/b.csv", ".c/d.csv", "latest.csv"], {"train": ["latest"]}),
}  # fmt: skip


@pytest.mark.parametrize("tree", TREES)
def test_splits_of_folders(tree: str, tmp_path: Path) -> None:
    names, splits = TREES[tree]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text\n{name.removesuffix('.csv')}\n")
    for split in ("train", "validation", "test", "hard"):
        if split in splits:
            assert sorted(_texts(tmp_path, split)) == sorted(splits[split])
        else:
            with pytest.raises(DataError, match=f"has no split `{split}`; it has `"):
                _texts(tmp_path, split)


def test_files_of_a_folder_go_together(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,text,score\n1,one,2\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"text,label,score\ntwo,1,2.5\n"))
    (tmp_path / "notes.txt").write_text("nothing\n")
    with listening(heard := Told()), opened(str(tmp_path), "train") as table:
        assert table.rows.to_dict() == {"label": [1, 1], "text": ["one", "two"], "score": [2, 2.5]}
    assert any("`notes.txt`: of another kind, not read" in text for text in heard.texts)
    (tmp_path / "c.csv").write_text("text,label,score\nthree,x,1\n")
    with pytest.raises(DataError, match=r"column `label` is `\w+` in one of `a.csv` and `c.csv`"):
        _texts(tmp_path)
    (tmp_path / "c.csv").write_text("text,labels,score\nthree,1,1\n")
    with pytest.raises(DataError, match=r"`c.csv` has the columns .*, `a.csv` `label`"):
        _texts(tmp_path)


def _column(path: Path, split: str = "train") -> list[dict[str, Any]]:
    with opened(str(path), split) as table:
        return [{**row, "image": content(row["image"])} for row in table.rows]


def test_tables_name_pictures(tmp_path: Path) -> None:
    for index in range(3):
        _picture(tmp_path / "set" / "pictures" / f"{index}.png", index)
    contents = [path.read_bytes() for path in sorted((tmp_path / "set" / "pictures").iterdir())]
    beside = tmp_path / "set" / "rows.jsonl"
    rows = [{"image": f"pictures/{index}.png", "label": "ab"[index]} for index in (1, 0)]
    beside.write_text("\n".join(map(json.dumps, rows)))
    expected = [{"image": contents[1], "label": "b"}, {"image": contents[0], "label": "a"}]
    assert _column(beside) == expected
    beside.unlink()
    (tmp_path / "set" / "metadata.csv").write_text(
        "file_name,label\npictures/1.png,b\npictures/0.png,a\n"
    )
    with listening(heard := Told()):
        assert _column(tmp_path / "set") == expected
    assert heard.texts[-1] == "metadata.csv: 1 picture is not in it: left out"
    (tmp_path / "set" / "metadata.csv").write_text("file_name,label\npictures/9.png,b\n")
    with pytest.raises(DataError, match=r"`metadata.csv`, row 1: there is no picture `.*9.png`"):
        _column(tmp_path / "set")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("before", ["", "data:image/png;base64,"])
def test_pictures_are_written_out_in_tables(kind: str, before: str, tmp_path: Path) -> None:
    for index in range(2):
        _picture(tmp_path / f"{index}.png", index)
    contents = [(tmp_path / f"{index}.png").read_bytes() for index in range(2)]
    cells = [before + base64.b64encode(item).decode() for item in contents]
    frame = pd.DataFrame({"image": cells, "label": [0, 1]})
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_json(path, orient="records", lines=True)
    assert [row["image"] for row in _column(path)] == contents


@pytest.mark.parametrize("classes", [["invalid", "valid"], ["bus", "car", "train"]])
def test_classes_may_be_called_like_splits(classes: list[str], tmp_path: Path) -> None:
    for name in classes:
        _picture(tmp_path / name / f"{name}_0.png")
    with opened(str(tmp_path), "train") as table:
        assert table.rows.features["label"].names == classes
        assert table.rows["label"][:] == [*range(len(classes))]


def test_one_split_of_pictures_alone(tmp_path: Path) -> None:
    for name in ("train/cat/0.png", "train/dog/0.png", "unused/0.png", "0.png"):
        _picture(tmp_path / name)
    with opened(str(tmp_path), "train") as table:
        assert table.rows["label"][:] == [0, 1]


def test_an_empty_picture_is_named_and_other_files_too(tmp_path: Path) -> None:
    _picture(tmp_path / "a" / "0.png")
    (tmp_path / "a" / "1.heic").write_bytes(b"x")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "0.png").write_bytes(b"")
    with (
        listening(heard := Told()),
        pytest.raises(DataError, match=r"the picture `.*/b/0.png` is empty"),
    ):
        _column(tmp_path)
    assert heard.texts == [f"{tmp_path.name}: 1 other file is not read: `1.heic`"]


def test_documents_in_folders_of_classes(tmp_path: Path) -> None:
    """As the reviews of films come: each file is a text."""
    for split, count in (("train", 3), ("test", 2)):
        for name in ("pos", "neg"):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(count):
                text = f"{name} {split}\nof line {index}\n"
                (tmp_path / split / name / f"{index}_7.txt").write_text(text)
    with opened(str(tmp_path), "test") as table:
        assert table.rows.features["label"].names == ["neg", "pos"]
        assert table.rows["text"][:] == [
            f"{name} test\nof line {index}" for name in ("neg", "pos") for index in range(2)
        ]


def test_documents_are_read_as_single_files_are(tmp_path: Path) -> None:
    for name in ("neg", "pos"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.TXT").write_text("caf\xe9 one", encoding="utf-16")
        (tmp_path / name / "2.txt.gz").write_bytes(gzip.compress("caf\xe9 two\n".encode()))
    with opened(str(tmp_path), "train") as table:
        assert table.rows["text"][:] == ["caf\xe9 one", "caf\xe9 two"] * 2
        assert table.rows["label"][:] == [0, 0, 1, 1]
    (tmp_path / "neg" / "3.txt").write_text("caf\xe9", encoding="cp1252")
    with pytest.raises(DataError, match=r"`neg/3.txt`, line 1: the byte 0xe9"):
        _texts(tmp_path)
