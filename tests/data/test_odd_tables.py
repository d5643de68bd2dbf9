"""Odd files that public reports and well-known data sets have, read as what they mean."""

import decimal
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tcompress.data import tables
from tcompress.data.examples import Needs, load_examples
from tcompress.data.tables import opened
from tcompress.errors import DataError
from tcompress.progress import listening
from tests.support.conversions import Told

PAIRS = Needs((2, 2), target="score")
CLASSES = Needs((1, 2), target="class", several=True)
TEXTS = Needs((1, 1))

FIRST = ["A man is eating food", "A woman plays the violin", "Two dogs run"]
SECOND = ["A man eats", "Someone is playing an instrument", "Cats sleep"]
SCORES = [4.5, 3.0, 0.5]
LABELS = ["pos", "neg", "pos"]

Content = str | bytes | Callable[[Path], object]


def _lines(form: str, header: str = "") -> str:
    """Rows of both texts, their score, label and number."""
    rows = zip(FIRST, SECOND, SCORES, LABELS, range(3), strict=True)
    lines = [form.format(a=a, b=b, s=s, l=label, n=n) for a, b, s, label, n in rows]
    return header + "".join(lines)


def _json(row: Callable[[int], Any]) -> str:
    return "\n".join(json.dumps(row(index)) for index in range(3))


def _parquet(**columns: Any) -> Callable[[Path], object]:
    return lambda path: pd.DataFrame(columns).to_parquet(path)


DECIMALS = [decimal.Decimal(str(score)) for score in SCORES]
OF_PAIRS: dict[str, tuple[str, Content]] = {
    "SICK, a table in a txt": (
        "SICK.txt",
        _lines("{n}\t{a}\t{b}\t{s}\tNEUTRAL\n",
               "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"),
    ),
    "letters": ("p.csv", _lines("{a},{b},{s}\n", "Sent A,Sent B,Similarity\n")),
    "numbers": ("p.csv", _lines("{a},{b},{s}\n", "text1,text2,sim\n")),
    "remarks before": ("p.csv", _lines("{a},{b},{s}\n", "# of 2020\n#\ns1,s2,score\n")),
    "a remark that is the header": ("p.tsv", _lines("{a}\t{b}\t{s}\n", "#s1\ts2\tscore\n")),
    "backslashes": ("p.csv", _lines('"{a}","{b}",{s}\n', "s1,s2,score\n").replace(
        "Cats", '\\"Cats, they\\"').replace("food", 'food \\"now\\"')),
    "blanks around numbers": ("p.csv", _lines("{a},{b},  {s} \n", "s1,s2,score\n")),
    "exponents": ("p.csv", _lines("{a},{b},{s:.2e}\n", "s1,s2,score\n")),
    "decimals of parquet": ("p.parquet", _parquet(s1=FIRST, s2=SECOND, score=DECIMALS)),
    "categories": ("p.parquet", _parquet(s1=pd.Categorical(FIRST), s2=SECOND, score=SCORES)),
    "lists of two": ("p.jsonl", _json(
        lambda n: {"set": [FIRST[n], SECOND[n]], "score": SCORES[n]})),
    "lists of cells": ("p.json", json.dumps([["s1", "s2", "score"],
                                             *map(list, zip(FIRST, SECOND, SCORES, strict=True))])),
    "lists of cells in lines": ("p.jsonl", '["s1", "s2", "score"]\n' + _json(
        lambda n: [FIRST[n], SECOND[n], SCORES[n]])),
    "parts of objects": ("p.jsonl", _json(
        lambda n: {"text": {"text1": FIRST[n], "text2": SECOND[n]}, "score": SCORES[n]})),
    "rows as the hub shows them": ("p.json", json.dumps({"features": [{"name": "s1"}], "rows": [
        {"row_idx": n, "row": {"s1": FIRST[n], "s2": SECOND[n], "score": SCORES[n]}}
        for n in range(3)]})),
    "keys in keys": ("p.json", json.dumps({"version": 1, "data": {"rows": [
        {"s1": FIRST[n], "s2": SECOND[n], "score": SCORES[n]} for n in range(3)]}})),
    "lines in a csv": ("p.csv", _json(
        lambda n: {"s1": FIRST[n], "s2": SECOND[n], "score": SCORES[n]})),
    "lines in a txt": ("p.txt", _json(
        lambda n: {"s1": FIRST[n], "s2": SECOND[n], "score": SCORES[n]})),
    "packed without saying so": ("p.csv", gzip.compress(
        _lines("{a},{b},{s}\n", "s1,s2,score\n").encode(), mtime=0)),
    "unpacked without saying so": ("p.csv.gz", _lines("{a},{b},{s}\n", "s1,s2,score\n")),
    "a name twice": ("p.csv", _lines("{a},{b},{s},9\n", "s1,s2,score,score\n")),
}  # fmt: skip


def _written(folder: Path, name: str, content: Content) -> str:
    path = folder / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize("form", OF_PAIRS)
def test_pairs(form: str, tmp_path: Path) -> None:
    columns = {}
    if form == "parts of objects":
        columns = {"text": "text.text1", "pair": "text.text2"}
    read = load_examples(_written(tmp_path, *OF_PAIRS[form]), "train", PAIRS, columns=columns)
    first, second = FIRST, SECOND
    if form == "backslashes":
        first = [FIRST[0].replace("food", 'food "now"'), *FIRST[1:]]
        second = [*SECOND[:2], SECOND[2].replace("Cats", '"Cats, they"')]
    assert read.texts == (first, second)
    assert read.targets == SCORES


def test_two_texts_come_before_lists_of_two(tmp_path: Path) -> None:
    """As questions with two answers have them."""
    lines = _json(lambda n: {"question": FIRST[n], "passage": SECOND[n], "answers": ["a", "b"]})
    read = load_examples(_written(tmp_path, "q.jsonl", lines), "train", Needs((2, 2)))
    assert read.texts == (FIRST, SECOND)


OF_CLASSES: dict[str, tuple[str, Content, list[Any]]] = {
    "MRPC": ("m.tsv", _lines("{n}\t7\t8\t{a}\t{b}\n",
             "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"), ["0", "1", "2"]),
    "QQP": ("q.tsv", _lines("{n}\t1\t2\t{a}\t{b}\t1\n",
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"), ["1"] * 3),
    "fastText": ("f.txt", _lines("__label__{l} {a}\n"), LABELS),
    "blanks around names": ("c.csv", _lines("{a},  {l} \n", "text,label\n"), LABELS),
    "lists of one": ("c.jsonl", _json(lambda n: {"text": FIRST[n], "label": [LABELS[n]]}), LABELS),
    "objects": ("c.jsonl", _json(
        lambda n: {"text": FIRST[n], "label": {"id": n, "name": LABELS[n]}}), LABELS),
    "marks of one": ("c.jsonl", _json(
        lambda n: {"text": FIRST[n], "label": [n == 0, n == 1, n == 2]}), ["0", "1", "2"]),
    "truths": ("c.csv", _lines("{a},{n}\n", "text,label\n").replace(",2", ",TRUE").replace(
        ",1", ",FALSE").replace(",0", ",TRUE"), ["1", "0", "1"]),
    "categories": ("c.parquet", _parquet(text=FIRST, label=pd.Categorical(LABELS)), LABELS),
    "agreed on, in numbers": ("c.csv", _lines("{a},{n}\n", "text,gold_label\n"), ["0", "1", "2"]),
    "columns under numbers of rows": ("c.json", json.dumps(
        {"text": dict(enumerate(FIRST)), "label": {2: LABELS[2], 0: LABELS[0], 1: LABELS[1]}}),
        LABELS),
    "upper case": ("c.csv", _lines("{a},{l}\n", "TEXT,Label\n"), LABELS),
}  # fmt: skip


@pytest.mark.parametrize("form", OF_CLASSES)
def test_classes(form: str, tmp_path: Path) -> None:
    name, content, labels = OF_CLASSES[form]
    read = load_examples(_written(tmp_path, name, content), "train", CLASSES)
    assert read.texts[0] == FIRST
    assert [read.classes[target] for target in read.targets or ()] == labels  # type: ignore[index]
    assert not read.labels.several


def test_labels_without_agreement_are_left_out(tmp_path: Path) -> None:
    """As SNLI and MultiNLI have them."""
    labels = ["neutral", "-", "entailment"]
    lines = _json(
        lambda n: {"gold_label": labels[n], "sentence1": FIRST[n], "sentence2": SECOND[n]}
    )
    with listening(heard := Told()):
        read = load_examples(_written(tmp_path, "s.jsonl", lines), "train", CLASSES)
    assert (read.texts, read.classes) == ((FIRST[::2], SECOND[::2]), ("entailment", "neutral"))
    assert heard.texts[-1].endswith("1 of 3 rows have no label that is agreed on")


@pytest.mark.parametrize(
    ("name", "content", "needs", "message", "hint"),
    [
        ("p.csv", "version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 1\n", TEXTS,
         "`p.csv` is a pointer of Git LFS", "git lfs pull"),
        ("p.csv", b"PK\x03\x04\x14\x00\x06\x00\x08\x00", TEXTS, "a spreadsheet program", "CSV"),
        ("p.xlsx", b"PK\x03\x04", TEXTS, "of no known kind", "save the table as CSV"),
        ("p.pkl", b"x", TEXTS, "of no known kind", "to_parquet"),
        ("p.tokens", b"x", TEXTS, "of no known kind", "called `.txt`"),
        ("p.csv", "<!DOCTYPE html>\n<html>not found</html>\n", TEXTS, "is a web page", "download"),
        ("p.jsonl", "text,label\na,1\n", TEXTS, "is no JSON: it begins with `text,label`", ".csv"),
        ("p.tsv", "a b\tc\t1\nd e\tf\t2\tx\ty\n", PAIRS, "line 2: 5 tab-separated cells",
         "`cut -f1-3 p.tsv > NEW.tsv`"),
        ("p.csv", "text,label\na,1\n\n(1 row)\n", CLASSES, "line 4: 1 comma-separated cell", ""),
        ("p.jsonl", '{"text": "a b", "label": 1}\n{"text": "c d", "label": NaN}\n', CLASSES,
         "rows without a label: 1 of 2, row 2 first", "remove those rows"),
        ("p.csv", "id,text,views,mark\n1,a,5,x\n2,b,6,y\n3,c,6,x\n", CLASSES,
         "needs a column for `label`", "`--columns label=views` (where there is no such option, "),
        ("p.json", '{"a": [{"x": 1}], "b": [{"x": 1}]}', TEXTS, "under the keys `a`, `b`",
         "`--split a`, or where there is no such option `split: a` in a recipe"),
        ("p.csv", "text,label\na b,-1\nc d,1\n", CLASSES, "the label -1", "write names in place"),
        ("p.json", '[["text", "label"], ["a", 1, 2]]', CLASSES, "row 2 has 3 cells, row 1 has", ""),
        ("p.json", '{"text": {"0": "a"}, "label": {"0": 1, "1": 2}}', CLASSES,
         "has row 1 in one of its columns `text` and `label`", "`null` where nothing is"),
    ],
)  # fmt: skip
def test_what_is_refused_says_what_helps(
    name: str, content: str | bytes, needs: Needs, message: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as failed:
        load_examples(_written(tmp_path, name, content), "train", needs)
    assert message in failed.value.message
    assert hint in (failed.value.hint or "")


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("t.txt", "one\u2028two\nthree\x0c words\x85\n", ["one\u2028two", "three\x0c words\x85"]),
        ("t.txt", "a\tb\nc\n", ["a\tb", "c"]),  # not every line has a tab
        ("t.txt", "#one two\nthree, four\n", ["#one two", "three, four"]),
        ("t.csv", "text\n#one, two\nthree, four\n", ["#one, two", "three, four"]),
        ("t.jsonl", '{"text": "one\u2028two"}\n{"text": "three"}\n', ["one\u2028two", "three"]),
        ("t.json", '{"text": "one"}{"text": "two"}', ["one", "two"]),
        ("t.jsonl", '"one"\n"two"\n', ["one", "two"]),
    ],
)  # fmt: skip
def test_texts_stay_what_they_are(
    name: str, content: str, texts: list[str], tmp_path: Path
) -> None:
    with opened(_written(tmp_path, name, content), "train") as table:
        assert table.rows["text"][:] == texts


@pytest.mark.parametrize("block", [1, 4, 128])
def test_cells_are_drawn_in_one_order_however_many_are_read_at_a_time(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_BLOCK", block)
    with opened(_written(tmp_path, "p.parquet", _parquet(a=FIRST, b=SECOND)), "train") as table:
        drawn = [*tables.draw_cells(table, ["a", "b"], 5, seed=3)]
    order = np.random.default_rng(3).permutation(6)[:5]
    assert drawn == [(FIRST, SECOND)[index % 2][index // 2] for index in order]
