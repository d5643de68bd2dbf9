"""Classes of data and labels of heads: which is which, and several of them in an example."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoConfig, PvtConfig

from tcompress.data.examples import Needs, load_examples
from tcompress.data.labels import (
    Classes,
    classes_of_names,
    classes_of_numbers,
    label_names,
    matched,
)
from tcompress.errors import DataError
from tcompress.evaluation.measuring import evaluate
from tcompress.models import SourceModel
from tcompress.options import Evaluate
from tcompress.progress import listening
from tcompress.training.objectives import Logits, Observed, Setting
from tcompress.training.setup import Setup, set_up
from tests.support.conversions import Told
from tests.support.evaluation import classifier, encoder, loaded, rows_file
from tests.support.model_folders import sentences
from tests.support.training import settings, train

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = Needs((1, 2), target="class", several=True)
NUMBERED = ["LABEL_0", "LABEL_1", "LABEL_2"]
NLI = ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"]
STARS = ["1 star", "2 stars", "3 stars"]
FROM_1 = ["1", "2", "3"]


def _class_labels(names: Sequence[str], *used: int) -> Classes:
    return Classes(tuple(names), (0, 1, 2), frozenset(range(3)) - {*used})


@pytest.mark.parametrize(
    ("head", "data", "labels", "doubt"),
    [
        (NUMBERED, {0, 1, 2}, (0, 1, 2), None),
        (NUMBERED, {1, 2}, (1, 2), None),
        (NUMBERED, {0, 2}, (0, -1, 2), None),
        (NUMBERED, {1, 2, 3}, (0, 1, 2), "numbers, which count from 1 (1 is `LABEL_0`)"),
        (NUMBERED, ["b", "a", "c"], (0, 1, 2), "by their order: if that is another, name them"),
        (NUMBERED, ["LABEL_2", "LABEL_0"], (2, 0), None),
        (NUMBERED, _class_labels("cab", 0, 1), (0, 1, -1), None),
        (NLI, {0, 1, 2}, (0, 1, 2), "which are taken for ids from 0 (0 is `CONTRADICTION`)"),
        (NLI, {1, 2}, (1, 2), "numbers, which are taken for ids from 0 (1 is `NEUTRAL`)"),
        (NLI, {1, 2, 3}, (0, 1, 2), "numbers, which count from 1 (1 is `CONTRADICTION`)"),
        (NLI, {2}, (2,), "ids from 0 (2 is `ENTAILMENT`)"),
        (NLI, ["entailment", "contradiction"], (2, 0), None),
        (NLI, _class_labels(["entailment", "neutral", "contradiction"], 0, 2), (2, -1, 0), None),
        (NLI, _class_labels("xyz", 0, 2), (0, -1, 2), "by their numbers: if that is another, call"),
        (NLI, ["x", "y", "z"], (0, 1, 2), "by their order: if that is another, call the classes"),
        (STARS, {1, 2}, (0, 1), "matched with those in its names (1 is `1 star`)"),
        (STARS, {0, 1, 2}, (0, 1, 2), "ids from 0 (0 is `1 star`)"),
        (FROM_1, {1, 3}, (-1, 0, -1, 2), None),
        (FROM_1, {2, 3}, (-1, -1, 1, 2), None),
        (FROM_1, {0, 1, 2}, (0, 1, 2), "ids from 0 (0 is `1`)"),
        (["Not_entailment", "ENTAILMENT"], ["entailment", "not-entailment "], (1, 0), None),
        (NLI, ["entailment", "other"], None, "has `entailment`, `other`: not the same names"),
        (NLI, ["x", "y"], None, "has `x`, `y`: not the same names"),
        (NLI, _class_labels(["neutral", "x", "y"], 0, 1), None, "and numbers `neutral` otherwise"),
        (NLI, {3, 4}, None, "has labels up to 4, the model's head has 3 labels"),
        (["01", "1", "2"], ["1", "01"], (1, 0), None),
        (["01", "1", "2"], {1, 2}, (1, 2), "in zeros in front alone (`01`, `1`, `2`), the"),
        (["01", "02"], {1, 2}, (0, 1), None),
        (["01", "2"], ["1", "01"], None, "not the same names"),
        (["x", "X", "y"], ["x"], None, "not the same names"),
        (["x"], ["y", "z"], None, "head has 1 label, but `rows` has 2 classes"),
    ],
)  # fmt: skip
def test_labels_of_a_head(
    head: list[str], data: Any, labels: tuple[int, ...] | None, doubt: str | None
) -> None:
    if isinstance(data, set):
        data = classes_of_numbers(data, "`label`")
    classes = data if isinstance(data, Classes) else classes_of_names(data)
    if labels is None:
        with pytest.raises(DataError) as failed:
            matched(head, classes, "rows")
        assert doubt is not None
        assert doubt in failed.value.message
        return
    match = matched(head, classes, "rows")
    assert match.labels == labels
    assert (doubt or "") in (match.doubt or "")
    assert (doubt is None) == (match.doubt is None)


def test_labels_of_a_head_that_its_config_does_not_name() -> None:
    assert label_names(PvtConfig(num_labels=2)) == ["LABEL_0", "LABEL_1"]


def _accuracy(folder: Path, data: Path) -> tuple[float, tuple[str, ...]]:
    wanted = Evaluate(task="classification", data=(str(data),), max_length=16, bootstrap=0)
    [scores] = evaluate([folder], wanted, save=False)
    return scores.metrics[0].value, scores.notes


TEXTS = sentences(24)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[int]]]:
    """Classifiers, and the labels that they give the texts: all of them occur."""
    made = {}
    for kind, head in (("named", NLI), ("numbered", NUMBERED)):
        folder = classifier(tmp_path_factory.mktemp(kind), head)
        model, tokenizer = loaded(folder, "AutoModelForSequenceClassification")
        with torch.no_grad():
            logits = model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits
            model.classifier.bias -= logits.mean(0)
        model.save_pretrained(folder)
        found = (logits - logits.mean(0)).argmax(-1).tolist()
        assert {*found} == {0, 1, 2}
        made[kind] = folder, found
    return made


# How a column says the labels 0, 1 and 2, what stands beside it, and which heads doubt it.
FORMS: dict[str, tuple[list[Any], dict[str, list[str]], set[str]]] = {
    "from 0": ([0, 1, 2], {}, {"named"}),
    "from 1": ([1, 2, 3], {}, {"named", "numbered"}),
    "decimals": ([0.0, 1.0, 2.0], {}, {"named"}),
    "texts of numbers": (["0", "1", "2"], {}, {"named"}),
    "names in other case": (["contradiction", "Neutral", "entailment"], {}, set()),
    "beside": ([2, 0, 1], {"label_text": ["contradiction", "neutral", "entailment"]}, set()),
    "beside, ids": ([0, 1, 2], {"label_name": ["x", "y", "z"]}, {"named"}),
}


# A head without names knows no names.
PAIRS = [("named", form) for form in FORMS]
PAIRS += [("numbered", form) for form in FORMS if form not in ("names in other case", "beside")]


@pytest.mark.parametrize(("kind", "form"), PAIRS)
def test_a_column_of_labels_says_the_same_in_every_form(
    kind: str, form: str, heads: dict[str, tuple[Path, list[int]]], tmp_path: Path
) -> None:
    (folder, found), (said, beside, doubting) = heads[kind], FORMS[form]
    for part in ({0, 1, 2}, {1, 2}, {0, 2}):
        rows = [(text, label) for text, label in zip(TEXTS, found, strict=True) if label in part]
        columns = {name: [cells[label] for _, label in rows] for name, cells in beside.items()}
        labels = [said[label] for _, label in rows]
        path = tmp_path / "rows.jsonl"
        rows_file(path, text=[text for text, _ in rows], label=labels, **columns)
        accuracy, notes = _accuracy(folder, path)
        assert accuracy == 1.0
        assert bool(notes) == (kind in doubting)


def test_names_beside_numbers(tmp_path: Path) -> None:
    texts, numbers, names = sentences(4), [2, 1, 2, 1], ["good", "bad", "good", "bad"]
    path = rows_file(tmp_path / "a.jsonl", text=texts, label=numbers, label_text=names)
    read = load_examples(str(path), "train", CLASSES)
    assert (read.classes, read.labels.numbers, read.targets) == (
        ("bad", "good"),
        (1, 2),
        [1, 0, 1, 0],
    )
    given = load_examples(str(path), "train", CLASSES, columns={"label": "label_text"})
    assert given.labels == read.labels
    path = rows_file(tmp_path / "b.jsonl", text=texts, label_text=names)
    assert load_examples(str(path), "train", CLASSES).classes == ("bad", "good")
    # A text of its own for each row is no name.
    path = rows_file(tmp_path / "c.jsonl", text=texts, label=numbers, label_text=sentences(8)[4:])
    assert load_examples(str(path), "train", CLASSES).classes == ("1", "2")


def test_numbers_with_gaps(tmp_path: Path) -> None:
    for numbers, classes, said in (
        ([0, 3, 1], ("0", "1", "2", "3"), "has no row with `2`, counted as classes like others"),
        ([1, 2, 10**8], ("1", "2", "100000000"), "has 3 different numbers up to 100,000,000: each"),
        ([100, 200, 300], ("100", "200", "300"), "has 3 different numbers up to 300: each is a"),
    ):
        path = rows_file(tmp_path / "a.jsonl", text=sentences(3), label=numbers)
        with listening(heard := Told()):
            assert load_examples(str(path), "train", CLASSES).classes == classes
        assert said in heard.texts[-1]


def _set_up(folder: Path, teachers: Sequence[SourceModel] = (), **data: Any) -> Setup:
    """Everything that a training on classes needs."""
    teacher = str(folder) if teachers else "none"
    options = settings(task="classification", teacher=teacher, data=data)
    return set_up(SourceModel.open(str(folder)), teachers, options, None)


@pytest.mark.parametrize(
    ("head", "labels", "numbers", "doubt"),
    [
        (NLI, ["entailment", "neutral"], [2, 1], ""),
        (NLI, [1, 3, 2], [0, 2, 1], "which count from 1"),
        (NLI, [2, 0, 1], [2, 0, 1], "ids from 0 (0 is `CONTRADICTION`)"),
        (FROM_1, [1, 3, 2], [0, 2, 1], ""),
        (NLI, [1, 2], None, "has 2 classes, but the model's head has 3 labels"),
        (NLI, ["entailment", "other"], None, "not the same names"),
    ],
)
def test_a_head_that_is_there_learns_its_own_labels(
    head: list[str], labels: list[Any], numbers: list[int] | None, doubt: str, tmp_path: Path
) -> None:
    folder = classifier(tmp_path / "model", head)
    path = rows_file(tmp_path / "rows.jsonl", text=sentences(30), label=(labels * 15)[:30])
    data = {"source": [str(path)], "validation": str(path)}
    if numbers is None:
        with pytest.raises(DataError, match=doubt):
            _set_up(folder, **data)
        return
    data_of = _set_up(folder, **data).data
    assert data_of.train.labels is not None
    assert data_of.train.labels.tolist() == (numbers * 15)[:30]
    assert doubt in " ".join(data_of.notes)


TAGS = [["b"], [], ["a", "c"], ["c"], ["a", "b", "c"], ["a"]]
MARKS = [[int(name in tags) for name in "abc"] for tags in TAGS]
IDS = [[index for index, mark in enumerate(row) if mark] for row in MARKS]
SEVERAL: dict[str, tuple[str, Any]] = {
    "names": ("jsonl", {"labels": TAGS}),
    "ids": ("jsonl", {"labels": IDS}),
    "marks": ("jsonl", {"labels": MARKS}),
    "marks of decimals": ("parquet", {"labels": [[float(mark) for mark in row] for row in MARKS]}),
    "marks of yes and no": ("parquet", {"labels": [[*map(bool, row)] for row in MARKS]}),
    "written as text": ("csv", {"labels": TAGS}),
    "ids written as text": ("csv", {"labels": IDS}),
    "columns": ("csv", dict(zip("abc", zip(*MARKS, strict=True), strict=True))),
}  # fmt: skip


def _several_file(folder: Path, form: str) -> Path:
    kind, columns = SEVERAL[form]
    frame = pd.DataFrame({"text": sentences(len(TAGS)), **columns})
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        (frame.to_parquet if kind == "parquet" else frame.to_csv)(path, index=False)
    return path


@pytest.mark.parametrize("form", SEVERAL)
def test_several_labels_are_read_in_every_form(form: str, tmp_path: Path) -> None:
    columns = {"label": "a+b+c"} if form == "columns" else None
    read = load_examples(str(_several_file(tmp_path, form)), "train", CLASSES, columns=columns)
    assert read.targets == [tuple(ids) for ids in IDS]
    named = form in ("names", "written as text", "columns")
    assert read.classes == (("a", "b", "c") if named else ("0", "1", "2"))
    assert read.labels.several


def test_columns_of_marks_and_of_lists_are_offered(tmp_path: Path) -> None:
    marks = _several_file(tmp_path, "columns")
    lists = rows_file(tmp_path / "lists.jsonl", text=sentences(4), tags=[["a"], ["a", "b"]] * 2)
    for path, columns in ((marks, "a+b+c"), (lists, "tags")):
        with pytest.raises(DataError, match="needs a column for `label`") as failed:
            load_examples(str(path), "train", CLASSES)
        assert f"`--columns label={columns}`" in (failed.value.hint or "")


def test_several_labels_are_measured(tmp_path: Path) -> None:
    """Numbers as scikit-learn has them; labels that nobody has or gives count for nothing."""
    folder = classifier(tmp_path / "model", ["B", "a", "unused", "C"],
                        problem_type="multi_label_classification")  # fmt: skip
    model, tokenizer = loaded(folder, "AutoModelForSequenceClassification")
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([0.0, 0.02, -9.0, -0.02]))
    model.save_pretrained(folder)
    data = _several_file(tmp_path, "names")
    texts = sentences(len(TAGS))
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
    guess = np.stack([row.numpy() > 0 for row in logits])[:, [1, 0, 3]]
    truth = np.array(MARKS, dtype=bool)
    hits, total = (guess & truth).sum(0), guess.sum(0) + truth.sum(0)
    wanted = Evaluate(task="classification", data=(str(data),), bootstrap=0)
    [scores] = evaluate([folder], wanted, save=False)
    assert [metric.name for metric in scores.metrics] == ["micro_f1", "macro_f1", "subset_accuracy"]
    assert [metric.value for metric in scores.metrics] == pytest.approx(
        [2 * hits.sum() / total.sum(), np.mean(2 * hits / total), (guess == truth).all(1).mean()]
    )
    assert scores.notes == ()
    one, two = evaluate([folder, folder], wanted, save=False)
    assert [metric.name for metric in two.metrics][3:] == ["agreement", "kl"]
    assert [metric.value for metric in two.metrics][3:] == [1.0, 0.0]
    assert len(one.metrics) == 3


def test_the_kind_of_a_head_and_that_of_data_are_compared(tmp_path: Path) -> None:
    head = {"several": "multi_label_classification", "one": None}
    folders = {
        name: classifier(tmp_path / name, ["a", "b", "c"], problem_type=kind)
        for name, kind in head.items()
    }
    data = _several_file(tmp_path, "names")
    accuracy, [note] = _accuracy(folders["one"], data)
    assert "does not say `problem_type: multi_label_classification`" in note
    single = rows_file(tmp_path / "single.jsonl", text=sentences(3), label=["a", "b", "c"])
    other, [note] = _accuracy(folders["several"], single)
    assert accuracy != other
    assert "the likeliest label counts" in note


@pytest.mark.parametrize("head", ["none", "several", "one"])
def test_several_labels_are_learnt(head: str, tmp_path: Path) -> None:
    kind = "multi_label_classification" if head == "several" else None
    names = ["c", "B", "a"]
    folder = classifier(tmp_path / "model", names, problem_type=kind)
    if head == "none":
        folder = encoder(tmp_path / "encoder")
    data = {
        "source": [str(_several_file(tmp_path, "names"))],
        "validation": str(tmp_path / "rows.jsonl"),
    }
    setup = _set_up(folder, **data)
    order = [0, 1, 2] if head == "none" else [2, 1, 0]
    marks = torch.tensor(MARKS, dtype=torch.float32)
    assert setup.data.train.labels is not None
    assert torch.equal(setup.data.train.labels[:, order], marks)
    assert any("has several labels" in note for note in setup.data.notes) == (head == "one")
    # The loss is that of Transformers.
    rows = [setup.data.train[place][0] for place in range(2)]
    batch = {name: torch.stack([row[name][:4] for row in rows]) for name in rows[0]}
    batch["labels"] = setup.data.train.labels[:2]
    assert setup.task is not None
    with torch.no_grad():
        lost = setup.model(**batch).loss
        output = setup.model(**{name: batch[name] for name in batch if name != "labels"})
        own = setup.task.loss(Observed(output), batch)
    assert float(lost) == pytest.approx(float(own) / 6)
    done = train(folder, tmp_path / "out", task="classification", teacher="none", data=data,
                 steps=60, learning_rate=0.01, evaluate_every=20)  # fmt: skip
    assert done.facts.validation == "micro_f1"
    assert done.facts.best > 0.9
    config = AutoConfig.from_pretrained(done.folder)
    assert config.problem_type == "multi_label_classification"
    assert config.id2label == dict(enumerate("abc" if head == "none" else names))


def test_one_label_an_example_beside_several(tmp_path: Path) -> None:
    """Part of the data may happen to have one label in each row."""
    folder = encoder(tmp_path / "encoder")
    several = str(_several_file(tmp_path, "names"))
    one = str(rows_file(tmp_path / "one.jsonl", text=sentences(3), labels=["a", "c", "b"]))

    def labels(**data: Any) -> list[Any]:
        found = _set_up(folder, **data).data
        return [part.labels.tolist() for part in (found.train, found.validation)]  # type: ignore[union-attr]

    marks = [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert labels(source=[several], validation=one) == [MARKS, marks]
    both, _ = labels(source=[several, one], validation=one)
    assert both == MARKS + marks
    with pytest.raises(DataError, match=r"has several labels an example, `one.jsonl"):
        labels(source=[one], validation=several)


def test_one_label_of_a_head_for_several(tmp_path: Path) -> None:
    folder = classifier(tmp_path / "model", 3, problem_type="multi_label_classification")
    path = rows_file(tmp_path / "rows.jsonl", text=sentences(12), label=[0, 2, 1] * 4)
    setup = _set_up(folder, source=[str(path)])
    assert setup.data.train.labels is not None
    assert setup.data.train.labels.sum(-1).tolist() == [1.0] * len(setup.data.train)


def test_a_teacher_of_several_labels_is_imitated_label_by_label(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(4, 3, generator=generator) for _ in range(2))
    term = Logits(Setting(temperature=1.0, independent=True))
    found = term.loss(
        {}, *(Observed(type("Output", (), {"logits": x})) for x in (student, teacher))
    )
    target = teacher.sigmoid()
    expected = binary_cross_entropy_with_logits(student, target, reduction="sum")
    expected -= binary_cross_entropy_with_logits(teacher, target, reduction="sum")
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    folder = classifier(tmp_path / "model", 3, problem_type="multi_label_classification")
    teacher_model = SourceModel.open(str(folder))
    setup = _set_up(folder, [teacher_model], source=[str(_several_file(tmp_path, "ids"))])
    terms = {objective.name: objective for objective, _ in setup.objectives}
    assert terms["logits"].setting.independent
    assert json.loads((Path(folder) / "config.json").read_text())["problem_type"]
