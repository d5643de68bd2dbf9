"""Numbers against independent computations, and their bootstrap."""

from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch

from tcompress.evaluation.embedding_tasks import ranks
from tcompress.evaluation.statistics import (
    Statistic,
    class_statistics,
    interval,
    pearson,
    rank_statistics,
    ratio,
    resampled,
    spearman,
)

UNITS = 60


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    one = generator.integers(8, size=UNITS).astype(float)  # with ties
    return one, one + generator.normal(scale=4, size=UNITS).round(1)


def scores(rows: np.ndarray) -> list[Statistic]:
    one, two = (column[rows] for column in data())
    return [spearman(one, two), pearson(one, two), ratio("r", one, two + 20, finish=np.exp)]


def classes(rows: np.ndarray) -> list[Statistic]:
    one, two = (column[rows].astype(int) % 3 for column in data())
    return [*class_statistics(one, two, 3), *class_statistics(one % 2, two % 2, 2)]


def places(rows: np.ndarray) -> list[Statistic]:
    return [*rank_statistics(data()[0][rows] * 2 + 1, (1, 10), gain=True)]


def test_correlations_are_those_of_scipy() -> None:
    one, two = data()
    by_rank, linear, _ = scores(np.arange(UNITS))
    assert by_rank.value() == pytest.approx(scipy.stats.spearmanr(one, two).statistic, abs=1e-12)
    assert linear.value() == pytest.approx(scipy.stats.pearsonr(one, two).statistic, abs=1e-12)


@pytest.mark.parametrize("make", [scores, classes, places])
def test_a_resample_counts_as_its_examples_repeated(
    make: Callable[[np.ndarray], list[Statistic]],
) -> None:
    drawn = np.random.default_rng(1).integers(UNITS, size=(5, UNITS))
    counts = np.stack([np.bincount(rows, minlength=UNITS) for rows in drawn]).astype(float)
    together = [statistic.resampled(counts) for statistic in make(np.arange(UNITS))]
    for index, rows in enumerate(drawn):
        alone = [statistic.value() for statistic in make(rows)]
        assert [values[index] for values in together] == pytest.approx(alone, abs=1e-12)


def test_class_numbers_by_hand() -> None:
    # Class 0: 2 hits of 3 guesses and 3 cases; class 1: 1 hit of 2 guesses and 2 cases.
    accuracy, macro, matthews = class_statistics([0, 0, 0, 1, 1], [0, 0, 1, 1, 0], 2)
    assert accuracy.value() == pytest.approx(3 / 5)
    assert macro.value() == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert matthews.value() == pytest.approx((1 * 2 - 1 * 1) / np.sqrt(2 * 2 * 3 * 3))


def test_guesses_outside_the_classes_are_wrong() -> None:
    accuracy, macro = class_statistics([0, -1, 2], [0, 1, 2], 3)
    assert accuracy.value() == pytest.approx(2 / 3)
    assert macro.value() == pytest.approx(2 / 3)


def test_matthews_correlation_counts_guesses_outside_the_classes() -> None:
    """As over three classes, of which the data has two."""
    guessed, true = [0, 0, 1, 2, 1, 0], [0, 0, 1, 1, 0, 1]
    *_, found = class_statistics([-1 if guess == 2 else guess for guess in guessed], true, 2)
    sums = [np.bincount(labels, minlength=3) for labels in (guessed, true)]
    above = 3 * 6 - sums[0] @ sums[1]
    below = np.sqrt((36 - sums[0] @ sums[0]) * (36 - sums[1] @ sums[1]))
    assert found.value() == pytest.approx(above / below)
    *_, found = class_statistics([1, 1, 1], [0, 1, 1], 2)
    assert found.value() == 0.0  # with one class there is no correlation


def test_ranks_of_the_right_answer() -> None:
    found = {item.name: item.value() for item in rank_statistics([1, 2, 20], (1, 10), gain=True)}
    assert found["recall@1"] == pytest.approx(1 / 3)
    assert found["recall@10"] == pytest.approx(2 / 3)
    assert found["mrr@10"] == pytest.approx(1.5 / 3)
    assert found["ndcg@10"] == pytest.approx((1 + 1 / np.log2(3)) / 3)
    *_, mrr = rank_statistics([1, 2, 20], (1,), gain=False)
    assert mrr.value() == pytest.approx((1 + 1 / 2 + 1 / 20) / 3)


def test_equal_scores_come_before_the_right_answer() -> None:
    table = torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.5, 0.1]])
    assert ranks(table, torch.tensor([0, 0])).tolist() == [3, 1]


def test_the_interval_of_a_mean_is_the_usual_one() -> None:
    hits = np.arange(400) % 10 < 7
    (draws,) = resampled([ratio("accuracy", hits)], 4000, seed=0)
    found = interval(draws)
    half = 1.96 * np.sqrt(0.7 * 0.3 / 400)
    assert (found.low, found.high) == pytest.approx((0.7 - half, 0.7 + half), abs=0.006)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    generator = np.random.default_rng(3)
    held = 0
    for seed in range(200):
        one = generator.normal(size=50)
        two = 0.6 * one + 0.8 * generator.normal(size=50)
        (draws,) = resampled([pearson(one, two)], 300, seed)
        found = interval(draws)
        held += found.low <= 0.6 <= found.high
    assert 0.87 <= held / 200 <= 0.99


def test_resamples_depend_on_the_seed_alone() -> None:
    hits = np.arange(50) % 3 == 0
    (one,), (two,), (other,) = (resampled([ratio("a", hits)], 40, seed) for seed in (1, 1, 2))
    assert (one == two).all()
    assert (one != other).any()


def test_nothing_drawn_gives_no_interval() -> None:
    (draws,) = resampled([ratio("a", [1.0, 0.0])], 0, seed=0)
    assert interval(draws) is None
