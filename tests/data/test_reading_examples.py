"""Examples with texts, pictures, labels and scores out of data sets."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from tcompress.data.encoding import TextEncoder
from tcompress.data.examples import Examples, Needs, load_examples
from tcompress.data.inputs import inputs_of
from tcompress.data.tables import opened
from tcompress.errors import DataError
from tcompress.models import SourceModel
from tests.support.evaluation import classifier, rows_file
from tests.support.model_folders import sentences
from tests.support.training import picture_rows

CLASSES, SCORES = Needs((1, 2), target="class"), Needs((2, 2), target="score")
WORLD = datasets.ClassLabel(names=["world", "sport", "business"])
A, B, C = sentences(3), sentences(6)[3:], sentences(9)[6:]


def _read(
    folder: Path, needs: Needs, columns: dict[str, str] | None = None, **more: Any
) -> Examples:
    """Read a file with the given columns."""
    options = {name: more.pop(name) for name in ("limit", "seed") if name in more}
    path = rows_file(folder / "rows.jsonl", **more)
    return load_examples(str(path), "train", needs, columns=columns, **options)


def _saved(folder: Path, features: dict[str, Any], **columns: Any) -> str:
    """A data set as the library saves it, with types of its own."""
    kinds = datasets.Features({**{name: datasets.Value("string") for name in columns}, **features})
    datasets.Dataset.from_dict(columns, features=kinds).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def test_nobody_hears_of_files_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(datasets.load, "get_session", lambda: asked.append("a server"))
    with opened(str(rows_file(tmp_path / "a.jsonl", text=["one", "two"])), "train") as table:
        assert list(table.rows["text"]) == ["one", "two"]
    assert asked == []
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS


def test_words_of_a_csv_file_stay_words(tmp_path: Path) -> None:
    rows = ["text,label", "a fox,None", "NA,favor", '"  two, blanks  ",against', ",None"]
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n")
    read = load_examples(str(tmp_path / "rows.csv"), "train", CLASSES)
    assert read.texts == (["a fox", "NA", "  two, blanks  ", ""],)
    assert (read.classes, read.targets) == (("None", "against", "favor"), [0, 2, 1, 0])


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("sentence1", "sentence2", "label"), ("sentence1", "sentence2", "label")),
        (("premise", "hypothesis", "label"), ("premise", "hypothesis", "label")),
        (("idx_text", "Text", "Class"), ("Text", None, "Class")),
        (("sentence2", "sentence1", "target"), ("sentence1", "sentence2", "target")),
        (("headline", "body_", "label"), ("headline", None, "label")),  # by content
    ],
)
def test_columns_are_guessed(
    names: tuple[str, str, str], found: tuple[str, str | None, str], tmp_path: Path
) -> None:
    columns = dict(zip(names, (A, B, [0, 1, 1]), strict=True))
    read = _read(tmp_path, CLASSES, **columns)
    texts = [columns[name] for name in found[:2] if name]
    assert read.name == f"rows.jsonl:{','.join(name for name in found if name)}"
    assert list(read.texts) == texts
    assert (read.targets, read.classes) == ([0, 1, 1], ("0", "1"))


def test_roles_that_are_given_come_first(tmp_path: Path) -> None:
    columns = {"text": A, "other": B, "third": C, "label": [0, 1, 0], "stars": [1, 1, 0]}
    read = _read(tmp_path, CLASSES, {"text": "other", "label": "stars"}, **columns)
    assert (list(read.texts), read.targets) == ([B], [1, 1, 0])
    both = _read(tmp_path, CLASSES, {"text": "other", "pair": "third"}, **columns)
    assert (list(both.texts), both.targets) == ([B, C], [0, 1, 0])
    # A column that is given away is no longer guessed for another role.
    rest = _read(tmp_path, SCORES, {"pair": "text", "score": "stars"}, **columns)
    assert rest.texts[1] == A
    assert rest.texts[0] != A


@pytest.mark.parametrize(
    ("needs", "given", "message"),
    [
        (CLASSES, {}, "the task needs a column for `label`, but `rows.jsonl` has `text` (text), "
         "`amount` (float64)"),
        (Needs(image=True, target="class"), {}, "the task needs a column for `image`, `label`"),
        (CLASSES, {"label": "stars"}, "`rows.jsonl` has no column `stars`; it has `amount`"),
        (SCORES, {"score": "text"}, "column `text` of `rows.jsonl` holds text, which is no score"),
        (CLASSES, {"text": "amount"}, "column `amount` of `rows.jsonl` holds float64, which "),
        (CLASSES, {"label": "amount"}, "column `amount` of `rows.jsonl` holds float64, which "),
    ],
)  # fmt: skip
def test_columns_that_do_not_fit(
    needs: Needs, given: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as failed:
        _read(tmp_path, needs, given, text=A, amount=[0.5, 1.5, 2.5])
    assert failed.value.message.startswith(message)
    assert failed.value.hint


@pytest.mark.parametrize(
    ("kind", "labels", "targets", "classes"),
    [
        (None, ["no", "yes", "maybe"], [1, 2, 0], ("maybe", "no", "yes")),
        (None, [0, 2, 2], [0, 2, 2], ("0", "1", "2")),
        (None, [True, False, True], [1, 0, 1], ("0", "1")),
        (WORLD, [2, 0, 2], [2, 0, 2], ("world", "sport", "business")),
    ],
)
def test_labels(
    kind: Any, labels: list[Any], targets: list[int], classes: tuple[str, ...], tmp_path: Path
) -> None:
    path = str(rows_file(tmp_path / "rows.jsonl", text=A, label=labels))
    if kind is not None:
        path = _saved(tmp_path, {"label": kind}, text=A, label=labels)
    read = load_examples(path, "train", CLASSES)
    assert (read.targets, read.classes) == (targets, classes)


@pytest.mark.parametrize("named", [False, True])
def test_labels_that_were_withheld(named: bool, tmp_path: Path) -> None:
    """Test splits of benchmarks have -1; some rows may be without a label only."""
    kind = datasets.ClassLabel(names=["a", "b"]) if named else datasets.Value("int64")
    path = _saved(tmp_path / "all", {"label": kind}, text=A, label=[-1, -1, -1])
    with pytest.raises(DataError, match="rows without a label"):
        load_examples(path, "train", CLASSES)
    path = _saved(tmp_path / "one", {"label": kind}, text=A, label=[-1, 0, 1])
    if named:  # of which the library says that -1 means none
        read = load_examples(path, "train", CLASSES)
        assert (read.texts, read.targets) == ((A[1:],), [0, 1])
        return
    with pytest.raises(DataError, match="has the label -1; labels count from 0"):
        load_examples(path, "train", CLASSES)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_scores_are_finite(bad: float | None, tmp_path: Path) -> None:
    kind = datasets.Value("float64")
    path = _saved(tmp_path, {"score": kind}, sentence1=A, sentence2=B, score=[1.0, bad, 2.0])
    with pytest.raises(DataError, match="column `score` of `saved` has rows without a finite"):
        load_examples(path, "train", SCORES)


def test_scores(tmp_path: Path) -> None:
    read = _read(tmp_path, SCORES, sentence1=A, sentence2=B, similarity=[1, 0, 5])
    assert (read.targets, read.classes, list(read.texts)) == ([1.0, 0.0, 5.0], (), [A, B])


def test_unlabelled_texts(tmp_path: Path) -> None:
    read = _read(tmp_path, Needs((1, 1)), text=A, label=[0, 1, 1])
    assert (read.targets, list(read.texts)) == (None, [A])


def test_pictures(tmp_path: Path) -> None:
    path = picture_rows(tmp_path / "p.parquet", 4)
    read = load_examples(str(path), "train", Needs(image=True, target="class"))
    assert (len(read), read.texts, read.targets) == (4, (), [0, 1, 0, 1])
    assert all(image.startswith(b"\x89PNG") for image in read.images)


def test_limit_keeps_the_order_and_the_classes(tmp_path: Path) -> None:
    texts = sentences(20)
    labels = [f"c{index:02}" for index in range(20)]  # one row each
    whole = _read(tmp_path, CLASSES, text=texts, label=labels)
    parts = [_read(tmp_path, CLASSES, text=texts, label=labels, limit=5, seed=s) for s in range(3)]
    for part in parts:
        assert len(part) == 5
        places = [texts.index(text) for text in part.texts[0]]
        assert places == sorted(places) == part.targets
        assert part.classes == whole.classes
    assert len({part.fingerprint for part in parts}) == 3
    assert _read(tmp_path, CLASSES, text=texts, label=labels, limit=20) == whole


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (["ab C", "d e", "f g"], [0, 1, 1]),
        (["ab c", "d e", "f g"], [1, 1, 1]),
        (["ab c", "f g", "d e"], [0, 1, 1]),
        (["ab", "c d e", "f g"], [0, 1, 1]),  # the same letters in other rows
    ],
)
def test_fingerprint_is_of_the_contents(
    texts: list[str], labels: list[int], tmp_path: Path
) -> None:
    before = _read(tmp_path, CLASSES, text=["ab c", "d e", "f g"], label=[0, 1, 1])
    assert _read(tmp_path, CLASSES, text=texts, label=labels).fingerprint != before.fingerprint
    (tmp_path / "copy").mkdir()
    again = _read(tmp_path / "copy", CLASSES, text=["ab c", "d e", "f g"], label=[0, 1, 1])
    assert again.fingerprint == before.fingerprint


def test_pairs_are_encoded_together(tmp_path: Path) -> None:
    source = SourceModel.open(str(classifier(tmp_path / "bert")))
    encoder = TextEncoder.open(source, inputs_of(source), 12)
    rows = encoder.encode(A, B)
    wanted = encoder.tokenizer(A, B, truncation=True, max_length=12)
    assert [row["input_ids"].tolist() for row in rows] == wanted["input_ids"]
    assert all(len(row["input_ids"]) <= 12 for row in rows)
    assert rows[0]["input_ids"].tolist() != encoder.encode(A)[0]["input_ids"].tolist()
    assert all(row["attention_mask"].all() for row in rows)
