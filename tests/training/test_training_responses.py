"""Learning to choose responses: right pairs, wrong pairs, and columns made of others."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tcompress.api import evaluate
from tcompress.data.examples import Examples, Needs, load_examples
from tcompress.errors import DataError
from tcompress.training.tasks import TASKS, WRONG_PAIRS
from tests.support.evaluation import encoder, rows_file
from tests.support.model_folders import sentences
from tests.support.training import data_of, taught

PAIRS = Needs((2, 2))


def _pairs(count: int, answers: int) -> Examples:
    second = [f"answer {index % answers}" for index in range(count)]
    return Examples("pairs", "train", "f", texts=([f"q {i}" for i in range(count)], second))


def test_wrong_pairs_are_never_right_ones() -> None:
    right = _pairs(30, 7)
    expand = TASKS["response-selection"]().expand
    found = expand(right, seed=0)
    assert found.targets == [1] * 30 + [0] * 90
    own = dict(zip(*right.texts, strict=True))
    drawn: dict[str, list[str]] = {}
    for one, two in list(zip(*found.texts, strict=True))[30:]:
        assert two != own[one]
        drawn.setdefault(one, []).append(two)
    assert all(len(set(others)) == 3 for others in drawn.values())
    assert len({two for others in drawn.values() for two in others}) == 7
    assert expand(right, seed=0).texts == found.texts
    assert expand(right, seed=1).texts != found.texts


def test_too_few_responses_to_choose_among() -> None:
    with pytest.raises(DataError, match="has 3 different second texts, too few to draw 3"):
        TASKS["response-selection"]().expand(_pairs(9, 3), seed=0)


def test_held_out_pairs_are_not_among_those_trained_on(tmp_path: Path) -> None:
    encoder(tmp_path / "model")
    texts = sentences(60)
    data = rows_file(tmp_path / "rows.jsonl", context=texts[:30], response=texts[30:])
    found = data_of(tmp_path / "model", "response-selection", source=[str(data)], holdout=0.2)
    assert found.labels.names == ("other response", "right response")
    for part, rows in ((found.train, 22), (found.validation, 8)):
        assert part.labels.tolist() == [1] * rows + [0] * WRONG_PAIRS * rows


@pytest.mark.slow
def test_learns_to_choose(tmp_path: Path) -> None:
    """Responses that repeat their question are told from others, and evaluate says so."""
    encoder(tmp_path / "model")
    texts = sentences(40)
    data = rows_file(tmp_path / "rows.jsonl", context=texts, response=texts)
    options: Any = {"steps": 60, "batch_size": 16, "evaluate_every": 30, "learning_rate": 2e-3}
    read = {"source": [str(data)], "max_length": 48}
    made = taught(tmp_path / "model", "response-selection", read, **options)
    assert made.facts.curve[-1].loss < made.facts.curve[1].loss
    assert made.facts.best > made.facts.curve[0].validation
    score = evaluate([str(tmp_path / "out")], "response-selection", str(data), save=False)[0]
    assert {metric.name for metric in score.metrics} >= {"recall@1", "recall@5"}


def test_calling_all_wrong_is_no_success() -> None:
    """Three in four are wrong: what counts is whether right ones come first."""
    task, labels = TASKS["response-selection"](), torch.tensor([1, 0, 0, 0])
    none_right = torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.8, 0.2], [0.9, 0.1]])
    assert task.validated == "auc"
    assert task.score(none_right, labels) == 1.0
    assert task.score(torch.full((4, 2), 0.5), labels) == 0.5


def test_texts_are_joined_and_lists_count_as_their_first(tmp_path: Path) -> None:
    data = rows_file(
        tmp_path / "rows.jsonl",
        question=["who", "when"],
        tweet=["a tweet", None],
        answers=[["me", "i"], ["now"]],
    )
    columns = {"text": "question+tweet", "pair": "answers"}
    found = load_examples(str(data), "train", PAIRS, columns=columns)
    assert found.texts == (["who a tweet", "when"], ["me", "now"])


@pytest.mark.parametrize("column", ["question+tweets", "+", "question+"])
def test_parts_of_a_joined_column_must_be_there(column: str, tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.jsonl", question=["who"], answer=["me"])
    with pytest.raises(DataError, match="has no column") as error:
        load_examples(str(data), "train", PAIRS, columns={"text": column, "pair": "answer"})
    assert f"`{column}`" in str(error.value)
