"""The same two tables in the dialects and forms that other people's files have."""

import bz2
import errno
import gzip
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pandas as pd
import pytest

from tcompress.data.examples import Needs, load_examples
from tcompress.data.numbers import decimals
from tcompress.data.tables import opened
from tcompress.errors import DataError, counted
from tcompress.progress import Silent, listening
from tests.support.conversions import Told

PAIRS = Needs((2, 2), target="score")
CLASSES = Needs((1, 2), target="class")

FIRST = [
    "A man is eating food",
    '"Go," she said',
    "Well, yes",
    'He wrote "no"',
    "None",
    "Ünder the tree",
    "A dog: it runs",
    "Two; three | four",
]
SECOND = [
    "A man eats",
    "She told us to go",
    '"Yes" indeed',
    "He wrote yes",
    "NA, or not",
    'Over a 5" tree',
    "A cat sleeps",
    "Two and three",
]
SCORES = [4.5, 0.0, 3.25, 1.0, 2.125, 5.0, 0.1, 3.0]
FRAME = pd.DataFrame({"sentence1": FIRST, "sentence2": SECOND, "score": SCORES})
HEADER = [*FRAME.columns]
COLUMNS = {"text": "column1", "pair": "column2", "score": "column3"}


def _csv(**how: Any) -> str:
    return str(FRAME.to_csv(index=how.pop("index", False), **how))


def _joined(separator: str, rows: Sequence[Sequence[Any]] = FRAME.to_numpy().tolist()) -> str:
    """Rows without any quoting."""
    return "".join(separator.join(map(str, row)) + "\n" for row in [HEADER, *rows])


RECORDS = FRAME.to_dict("records")
LINES = "".join(json.dumps({"unused": None, **row}) + "\n" for row in RECORDS)
LATE = LINES * 2 + "".join(json.dumps({"unused": "x", **row}) + "\n" for row in RECORDS)
COMMAS = FRAME.assign(score=[str(score).replace(".", ",") for score in SCORES])
PADDED = _csv().replace("sentence1,sentence2,score", "sentence1 , sentence2 , score")
ENDED = _csv().replace("\n", ",\n")
TEXT_SCORES = json.dumps(FRAME.assign(score=[f" {score}" for score in SCORES]).to_dict("records"))
FORMS: dict[str, tuple[str, str | bytes]] = {
    "plain": ("p.csv", _csv()),
    "bom": ("p.csv", b"\xef\xbb\xbf" + _csv().encode()),
    "crlf": ("p.csv", _csv(lineterminator="\r\n")),
    "old mac": ("p.csv", _csv(lineterminator="\r")),
    "all quoted": ("p.csv", _csv(quoting=1)),
    "tabs without quoting": ("p.tsv", _joined("\t")),
    "tabs without quoting in a csv": ("p.csv", _joined("\t")),
    "tabs with quotes": ("p.tsv", _csv(sep="\t")),
    "tabs, all quoted": ("p.tsv", _csv(sep="\t", quoting=1)),
    "commas in a tsv": ("p.tsv", _csv()),
    "semicolons": ("p.csv", _csv(sep=";")),
    "semicolons, decimal commas": ("p.csv", _csv(sep=";", decimal=",")),
    "decimal commas in quotes": ("p.csv", str(COMMAS.to_csv(index=False))),
    "pipes": ("p.csv", _csv(sep="|")),
    "pipes, by the ending": ("p.psv", _csv(sep="|")),
    "separator declared": ("p.csv", "sep=;\n" + _csv(sep=";")),
    "blanks in the header": ("p.csv", PADDED),
    "index": ("p.csv", _csv(index=True)),
    "index without a name": ("p.csv", _csv(index=True)[1:]),
    "commas at the ends": ("p.csv", ENDED),
    "commas at the ends of rows alone": ("p.csv", ENDED.replace("score,", "score", 1)),
    "empty lines": ("p.csv", "\n" + _csv().replace("\n", "\n\n")),
    "utf-16": ("p.csv", _csv().encode("utf-16")),
    "utf-16 without a mark": ("p.tsv", _csv(sep="\t").encode("utf-16-le")),
    "no header": ("p.csv", _csv(header=False)),
    "no header, tabs": ("p.tsv", _joined("\t").split("\n", 1)[1]),
    "list": ("p.json", json.dumps(RECORDS)),
    "list over lines": ("p.json", "\n " + json.dumps(RECORDS, indent=1)),
    "one key": ("p.json", json.dumps({"data": RECORDS})),
    "one key of several": ("p.json", json.dumps({"version": "1", "rows": RECORDS}, indent=1)),
    "splits": ("p.json", json.dumps({"train": RECORDS, "test": RECORDS[:1]})),
    "columns": ("p.json", json.dumps(FRAME.to_dict("list"))),
    "frame": ("p.json", FRAME.to_json()),
    "frame, split": ("p.json", FRAME.to_json(orient="split")),
    "frame, by index": ("p.json", FRAME.to_json(orient="index")),
    "scores as text": ("p.json", TEXT_SCORES),
    "lines": ("p.jsonl", LINES),
    "lines in a json": ("p.json", LINES),
    "lines with a bom": ("p.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
    "lines in utf-16": ("p.jsonl", LINES.encode("utf-16")),
    "mixed numbers": ("p.jsonl", LINES.replace("4.5", '"4.5"').replace(" 5.0", " 5")),
    "late types": ("p.jsonl", LATE),
    "parquet": ("p.parquet", FRAME.to_parquet()),
    "packed csv": ("p.csv.gz", gzip.compress(_csv().encode())),
    "packed tsv": ("p.tsv.gz", gzip.compress(_joined("\t").encode())),
    "packed lines": ("p.jsonl.gz", gzip.compress(LINES.encode())),
    "packed one key": ("p.json.bz2", bz2.compress(json.dumps({"data": RECORDS}).encode())),
    "packed parquet": ("p.parquet.gz", gzip.compress(FRAME.to_parquet())),
}


def _write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize("form", FORMS)
def test_a_table_is_the_same_in_every_form(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tcompress.data.readers._JSON_PART", 100)
    name, content = FORMS[form]
    path = _write(tmp_path / name, content)
    columns = COLUMNS if form.startswith("no header") else None
    read = load_examples(path, "train", PAIRS, columns=columns)
    times = 3 if form == "late types" else 1
    assert list(read.texts) == [FIRST * times, SECOND * times]
    assert read.targets == SCORES * times


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.csv", "text,label\nyes, no,1\nno,0\nso,0\n",
         "`p.csv`, line 2: 3 comma-separated cells, line 1 has 2"),
        ("p.tsv", "text\tlabel\na\t1\nb\nc\t0\n", "line 3: 1 tab-separated cell, line 1 has 2"),
        ("p.csv", "text,label\na,1\n\"b, c,0\nd,1\n", "line 3: a cell begins with a quote that"),
        ("p.csv", "text,label\na,x\ntext,label\nb,y\n", "line 3: the header stands there again"),
        ("p.csv", b"text,label\na,1\ncaf\xe9,0\n", "`p.csv`, line 3: the byte 0xe9 does not"),
        ("p.csv.gz", gzip.compress(b"text,label\na,1\n", mtime=0)[:-9],
         "`p.csv.gz` cannot be unpacked"),
        ("p.jsonl", '{"text": "a", "label": 1}\n{"text": "b\n', "`p.jsonl`, line 2: it is no JSON"),
        ("p.json", '{"a": [{"x": 1}], "b": [{"x": 1}]}', "lists of rows under the keys `a`, `b`"),
        ("p.json", '{"data": []}', "`p.json` holds no rows"),
        ("p.csv", "text,label\na,0.5\nb,1\n", "`label` has no whole number in row 1 (`0.5`)"),
        ("p.csv", "A remark\ntext,label\na,1\nb,0\n", "line 2: 2 comma-separated cells, line 1"),
        ("p.csv", "text,label\na,1\nb,\n", "has rows without a label"),
        ("p.jsonl", '{"text": "a", "label": ["x", "y"]}\n', "`label` holds lists, and an example"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_line(
    name: str, content: str | bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as failed:
        load_examples(_write(tmp_path / name, content), "train", CLASSES)
    assert message in failed.value.message
    assert failed.value.hint


def test_a_hint_names_the_columns_that_fit(tmp_path: Path) -> None:
    path = _write(tmp_path / "p.csv", _csv(header=False))
    with pytest.raises(DataError) as failed:
        load_examples(path, "train", PAIRS)
    [names] = re.findall(r"`--columns (.*)`", failed.value.hint or "")
    columns = dict(item.split("=") for item in names.split(","))
    assert load_examples(path, "train", PAIRS, columns=columns).targets == SCORES


@pytest.mark.parametrize(
    ("content", "targets", "classes"),
    [
        ("0.0 1.0 1.0", [0, 1, 1], ("0", "1")),
        ("5 1 4 2 3", [4, 0, 3, 1, 2], ("1", "2", "3", "4", "5")),
        ("2 4 1", [2, 4, 1], ("0", "1", "2", "3", "4")),
        ("01 1 1", [0, 1, 1], ("01", "1")),
        ("7 007 10", [2, 0, 1], ("007", "10", "7")),
    ],
)
def test_labels_are_the_numbers_that_they_are(
    content: str, targets: list[int], classes: tuple[str, ...], tmp_path: Path
) -> None:
    labels = content.split()
    rows = [json.dumps({"text": f"t{row}", "label": label}) for row, label in enumerate(labels)]
    texts = load_examples(_write(tmp_path / "p.jsonl", "\n".join(rows)), "train", CLASSES)
    lines = [f"t{row},{label}" for row, label in enumerate(labels)]
    table = "\n".join(["text,label", *lines])
    read = load_examples(_write(tmp_path / "p.csv", table), "train", CLASSES)
    if re.search(r"\b0\d", content):  # names in both
        assert (texts.targets, texts.classes) == (targets, classes)
    assert (read.targets, read.classes) == (targets, classes)


def test_commas_in_numbers() -> None:
    assert decimals(["4,5", "3", None, "2,125"]) == [4.5, 3.0, None, 2.125]
    assert decimals(["1,000", "2,000", 3]) is None  # thousands, perhaps
    assert decimals(["4,5", "4.5"]) is None
    assert decimals(["1,234.5", "1,234", "7", ""]) == [1234.5, 1234.0, 7.0, None]
    assert decimals(["1.234,5", "1.234", "-7"]) == [1234.5, 1234.0, -7.0]
    assert decimals(["1,234.5", "1.234,5"]) is None
    assert decimals(["1 234,5", "1\u202f234", "\u22127"]) == [1234.5, 1234.0, -7.0]


def test_what_a_file_was_taken_for_is_told(tmp_path: Path) -> None:
    path = _write(tmp_path / "p.tsv", _joined("\t", [*FRAME.to_numpy().tolist(), ["a", "", 1.0]]))
    with listening(heard := Told()):
        for _ in range(2):
            assert load_examples(path, "train", PAIRS).targets == SCORES
    with listening(Silent()), listening(heard):  # as with `--json`
        load_examples(path, "train", PAIRS)
    assert heard.texts == [
        "p.tsv: 9 rows, tab-separated, without quoting, columns `sentence1`, `sentence2`, `score`",
        "p.tsv: 1 of 9 pairs has an empty text: left out",
    ]


def test_pairs_of_which_none_is_whole(tmp_path: Path) -> None:
    for rows, message in ((1, "the only pair of `p.tsv` has"), (2, "all 2 pairs of `p.tsv` have")):
        path = _write(tmp_path / "p.tsv", _joined("\t", [["a", " ", 1.0]] * rows))
        with (
            listening(heard := Told()),
            pytest.raises(DataError, match=f"{message} an empty text"),
        ):
            load_examples(path, "train", PAIRS)
        assert heard.texts[0].startswith(f"p.tsv: {counted(rows, 'row')}, tab-separated")
    assert [counted(n, "row") for n in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    assert [counted(n, "file is", "files are") for n in (1, 2)] == ["1 file is", "2 files are"]


def test_a_long_cell_in_quotes(tmp_path: Path) -> None:
    """Longer than a cell may be for Python's reader by itself."""
    text = "word " * 40_000
    path = _write(tmp_path / "p.tsv", f'text\tlabel\n"{text}"\tx\n"short"\ty\n')
    with opened(path, "train") as table:
        assert table.rows["text"][:] == [text, "short"]


def test_tables_of_a_folder_are_read_alike(tmp_path: Path) -> None:
    folder = tmp_path / "data [1]"
    folder.mkdir()
    _write(folder / "train-1.tsv", _joined("\t"))
    _write(folder / "train-2.csv.gz", gzip.compress(_csv(sep=";", decimal=",").encode()))
    _write(folder / "test.csv", _csv())
    (folder / "README.md").write_text("# Pairs\n")
    assert load_examples(str(folder), "train", PAIRS).targets == SCORES * 2
    assert load_examples(str(folder), "test", PAIRS).texts == (FIRST, SECOND)


def test_types_are_those_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcompress.data.dialects.CHUNK", 2)
    content = "text,label,unused,stars\na,x,,1\nb,y,,2\nc,007,z,3.5\nd,08,,\n"
    with opened(_write(tmp_path / "p.csv", content), "train") as table:
        assert table.rows["label"][:] == ["x", "y", "007", "08"]
        assert table.rows["unused"][:] == [None, None, "z", None]
        assert table.rows["stars"][:] == [1, 2, 3.5, None]
    content = "text,label,true\na,1,True\nb,2,False\nc,,\nd,,\n"  # nothing in a whole chunk
    with opened(_write(tmp_path / "q.csv", content), "train") as table:
        assert table.rows["label"][:] == [1, 2, None, None]
        assert table.rows["true"][:] == ["True", "False", None, None]


def test_zeros_in_front_stay_where_two_would_be_one(tmp_path: Path) -> None:
    content = "text,label,hour,score,date\na,01,00,0.01,2020-01-05\nb,1,01,1,2020-01-06\nc,,,,\n"
    with opened(_write(tmp_path / "p.csv", content), "train") as table:
        assert table.rows["label"][:] == ["01", "1", None]
        assert table.rows["hour"][:] == [0, 1, None]  # numbers still
        assert table.rows["score"][:] == [0.01, 1, None]
        assert table.rows["date"][:] == ["2020-01-05", "2020-01-06", None]


@pytest.mark.parametrize("full", [True, False])
def test_a_folder_for_copies_that_is_full_is_named(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path / "p.csv", _csv())
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("copies" if full else "nowhere")))
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=error))
    with pytest.raises(DataError) as failed:
        load_examples(path, "train", PAIRS)
    where = f"is copied to `{tmp_path}/copies` while it is read, and that folder is full"
    assert (where if full else "cannot be copied to a temporary folder") in failed.value.message
    assert "TMPDIR" in (failed.value.hint or "")
