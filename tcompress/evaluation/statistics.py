"""Numbers that sum up a measurement, and their intervals over resampled examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.special import log_softmax

from tcompress.artifact.averages import AGREEMENT
from tcompress.artifact.manifest import Interval

# A resample is told by how often it drew each example. Nearly all numbers are functions of sums
# over examples, so that one matrix product gives them for many resamples.

DIVERGENCE = "kl"
"""Name of how far distributions are from those of the baseline, labels unread."""

Array = NDArray[np.float64]
Finish = Callable[[Array], Array]


@dataclass(frozen=True)
class Statistic:
    """A number measured on examples."""

    name: str
    units: int  # number of examples
    compute: Finish  # as `resampled`, which lets it divide by zero
    higher_is_better: bool = True
    per_token: bool = False  # so that models with other tokens have another number

    def resampled(self, counts: Array) -> Array:
        """Compute it from how often each resample has each: (resamples, units) -> (resamples,)."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.asarray(self.compute(counts))

    def value(self) -> float:
        """Return the number on all examples."""
        return float(self.resampled(np.ones((1, self.units)))[0])


def of_sums(name: str, columns: Any, finish: Finish, **options: bool) -> Statistic:
    """Make a function of sums over examples, from summands (units, sums), maybe sparse."""
    units = columns.shape[0]
    return Statistic(name, units, lambda counts: finish((columns.T @ counts.T).T), **options)


def spearman(one: ArrayLike, two: ArrayLike) -> Statistic:
    """Make the rank correlation of two columns; equal values share their mean rank."""
    columns = [_Ranks(values) for values in (one, two)]

    def resampled(counts: Array) -> Array:
        middle = (counts.sum(axis=1, keepdims=True) + 1) / 2
        # Halves of whole numbers, so that no sum of them is rounded.
        first, second = (column.of(counts) - middle for column in columns)
        spread = (counts * first**2).sum(axis=1) * (counts * second**2).sum(axis=1)
        return np.asarray((counts * first * second).sum(axis=1) / np.sqrt(spread))

    return Statistic("spearman", columns[0].units, resampled)


def auc(scores: ArrayLike, true: ArrayLike) -> Statistic:
    """Make the area under the ROC curve, by ranks (Mann-Whitney); equal scores count one half.

    Of more than two classes it is the mean over each against all others; every class occurs.
    """
    values, truth = np.asarray(scores, dtype=float), np.asarray(true)
    chosen = [1] if values.shape[1] == 2 else range(values.shape[1])
    columns = {index: _Ranks(values[:, index]) for index in chosen}

    def area(index: int, counts: Array) -> Array:
        positive = counts * (truth == index)
        count = positive.sum(axis=1)
        above = (columns[index].of(counts) * positive).sum(axis=1)
        pairs = count * (counts.sum(axis=1) - count)
        return np.asarray((above - count * (count + 1) / 2) / pairs)

    return Statistic(
        "auc", len(truth), lambda counts: np.mean([area(i, counts) for i in chosen], axis=0)
    )


class _Ranks:
    """Ranks of values in resamples; they are sorted once, and equal values are one group."""

    def __init__(self, values: ArrayLike) -> None:
        column = np.asarray(values, dtype=float)
        self.units = len(column)
        self._order = np.argsort(column, kind="stable")
        ordered = column[self._order]
        begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: self.units]
        self._starts = np.flatnonzero(begins)
        self._group = np.empty(self.units, dtype=np.intp)
        self._group[self._order] = np.cumsum(begins) - 1

    def of(self, counts: Array) -> Array:
        """Mean rank of each value, from 1, as often as it was drawn.  # (resamples, units)."""
        drawn = np.add.reduceat(counts[:, self._order], self._starts, axis=1)
        ranks = drawn.cumsum(axis=1) - (drawn - 1) / 2
        return np.asarray(ranks[:, self._group])


def ratio(
    name: str,
    top: ArrayLike,
    bottom: ArrayLike | None = None,
    *,
    finish: Finish = lambda value: value,
    **options: bool,
) -> Statistic:
    """Make the number `finish(sum(top) / sum(bottom))`; without `bottom` it is a mean."""
    tops = np.asarray(top, dtype=float)
    bottoms = np.ones(len(tops)) if bottom is None else np.asarray(bottom, dtype=float)
    columns = np.stack([tops, bottoms], axis=1)
    return of_sums(name, columns, lambda sums: finish(sums[:, 0] / sums[:, 1]), **options)


def pearson(one: ArrayLike, two: ArrayLike) -> Statistic:
    """Make the linear correlation of two columns."""
    x, y = (np.asarray(values, dtype=float) for values in (one, two))
    # Centred, so that little is lost when squares are subtracted.
    x, y = x - x.mean(), y - y.mean()
    columns = np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=1)

    def finish(sums: Array) -> Array:
        n, sx, sy, sxx, syy, sxy = sums.T
        spread = np.maximum(n * sxx - sx**2, 0) * np.maximum(n * syy - sy**2, 0)
        return np.asarray((n * sxy - sx * sy) / np.sqrt(spread))

    return of_sums("pearson", columns, finish)


def class_statistics(predicted: ArrayLike, true: ArrayLike, classes: int) -> list[Statistic]:
    """Make accuracy, macro F1 and, of two classes, Matthews correlation; -1 is no class."""
    guess, truth = np.asarray(predicted), np.asarray(true)
    hits = guess == truth
    columns = sparse.hstack(
        [_marked(labels, classes) for labels in (np.where(hits, truth, -1), guess, truth)]
    )
    statistics = [ratio("accuracy", hits), of_sums("macro_f1", columns, _macro_f1)]
    if classes == 2:
        statistics.append(of_sums("matthews", columns, _matthews))
    return statistics


def agreement(logits: ArrayLike, reference: ArrayLike) -> list[Statistic]:
    """Make how often two models choose the same class, and KL(reference || model) in nats.

    # (units, labels) each
    """
    q, p = (log_softmax(np.asarray(scores, float), axis=-1) for scores in (logits, reference))
    divergence = (np.exp(p) * (p - q)).sum(axis=-1)
    same = q.argmax(-1) == p.argmax(-1)
    return [ratio(AGREEMENT, same), ratio(DIVERGENCE, divergence, higher_is_better=False)]


def set_statistics(predicted: ArrayLike, true: ArrayLike) -> list[Statistic]:
    """Make micro F1, macro F1 and how often all labels of an example are right.

    # (units, labels) of bool each
    """
    guess, truth = np.asarray(predicted, dtype=bool), np.asarray(true, dtype=bool)
    columns = [marks.astype(float) for marks in (guess & truth, guess, truth)]
    totals = np.stack([marks.sum(axis=1) for marks in columns], axis=1)
    return [
        of_sums("micro_f1", totals, lambda sums: 2 * sums[:, 0] / (sums[:, 1] + sums[:, 2])),
        of_sums("macro_f1", sparse.csr_matrix(np.hstack(columns)), _macro_f1),
        ratio("subset_accuracy", (guess == truth).all(axis=1)),
    ]


def agreement_of_sets(logits: ArrayLike, reference: ArrayLike) -> list[Statistic]:
    """Make how often two models choose the same labels, and KL(reference || model) in nats.

    Every label is a yes or no of its own.  # (units, labels) each
    """
    scores, expected = (np.asarray(values, float) for values in (logits, reference))
    divergence = np.zeros(len(scores))
    for sign in (1, -1):
        q, p = (-np.logaddexp(0, -sign * values) for values in (scores, expected))
        divergence += (np.exp(p) * (p - q)).sum(axis=-1)
    same = ((scores > 0) == (expected > 0)).all(axis=-1)
    return [ratio(AGREEMENT, same), ratio(DIVERGENCE, divergence, higher_is_better=False)]


def _marked(labels: NDArray[Any], classes: int) -> Any:
    """Mark the class of each example; -1 is not marked.  # (units, classes)."""
    indices = (np.arange(len(labels)), np.maximum(labels, 0))
    marks = (labels >= 0).astype(float)
    return sparse.csr_matrix((marks, indices), shape=(len(labels), classes))


def _macro_f1(sums: Array) -> Array:
    hits, guesses, truths = np.split(sums, 3, axis=1)
    total = guesses + truths
    # Classes that neither occur nor are guessed have no score.
    return np.asarray((2 * hits / np.maximum(total, 1)).sum(axis=1) / (total > 0).sum(axis=1))


def _matthews(sums: Array) -> Array:
    hits, guesses, truths = np.split(sums, 3, axis=1)
    n = truths.sum(axis=1)
    above = hits.sum(axis=1) * n - (guesses * truths).sum(axis=1)
    absent = n - guesses.sum(axis=1)  # guesses of classes that the data does not have
    below = (n**2 - (guesses**2).sum(axis=1) - absent**2) * (n**2 - (truths**2).sum(axis=1))
    # Zero, as usual, if all are of one class or all guesses are.
    return np.asarray(above / np.sqrt(np.where(below > 0, below, np.inf)))


def rank_statistics(ranks: ArrayLike, recalls: Sequence[int], gain: bool) -> list[Statistic]:
    """Make numbers from ranks, from 1; with `gain` MRR and nDCG are cut off at 10."""
    rank = np.asarray(ranks, dtype=float)
    statistics = [ratio(f"recall@{cut}", rank <= cut) for cut in recalls]
    if not gain:
        return [*statistics, ratio("mrr", 1 / rank)]
    top = rank <= 10
    return [*statistics, ratio("mrr@10", top / rank), ratio("ndcg@10", top / np.log2(rank + 1))]


_CELLS = 2**20  # of counts that are held at a time
_LEVEL = 0.95


def resampled(statistics: Sequence[Statistic], times: int, seed: int) -> list[Array]:
    """Compute numbers on resamples that depend on seed and size alone: models are paired."""
    units, generator = statistics[0].units, np.random.default_rng(seed)
    limit = max(_CELLS // units, 1)
    parts = [[np.empty(0)] for _ in statistics]
    for first in range(0, times, limit):
        count = min(limit, times - first)
        drawn = generator.integers(units, size=(count, units)) + units * np.arange(count)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=count * units).reshape(count, units)
        for part, statistic in zip(parts, statistics, strict=True):
            part.append(statistic.resampled(counts.astype(float)))
    return [np.concatenate(part) for part in parts]


def interval(values: Array) -> Interval | None:
    """Middle 95 % of resampled values; None if there are none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = np.percentile(finite, [50 * (1 - _LEVEL), 50 * (1 + _LEVEL)])
    return Interval(low=float(low), high=float(high), level=_LEVEL)
