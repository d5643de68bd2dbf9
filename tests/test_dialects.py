"""The same two tables in the dialects and forms that other people's files have."""

import bz2
import gzip
import io
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tcompress.data.examples import Needs, load_examples
from tcompress.errors import DataError

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
    "Over a 5\" tree",
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


def _parquet() -> bytes:
    file = io.BytesIO()
    FRAME.to_parquet(file)
    return file.getvalue()


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
    "tabs, late quotes": ("p.tsv", _csv(sep="\t")),
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
    "parquet": ("p.parquet", _parquet()),
    "packed csv": ("p.csv.gz", gzip.compress(_csv().encode())),
    "packed tsv": ("p.tsv.gz", gzip.compress(_joined("\t").encode())),
    "packed lines": ("p.jsonl.gz", gzip.compress(LINES.encode())),
    "packed one key": ("p.json.bz2", bz2.compress(json.dumps({"data": RECORDS}).encode())),
    "packed parquet": ("p.parquet.gz", gzip.compress(_parquet())),
}


def _write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize("form", FORMS)
def test_a_table_is_the_same_in_every_form(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tcompress.data.tables._JSON_PART", 100)
    name, content = FORMS[form]
    path = _write(tmp_path / name, content)
    columns = COLUMNS if form.startswith("no header") else None
    read = load_examples(path, "train", PAIRS, columns=columns)
    times = 3 if form == "late types" else 1
    assert list(read.texts) == [FIRST * times, SECOND * times]
    assert read.targets == SCORES * times
