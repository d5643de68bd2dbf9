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
    resampled: Finish  # from how often each resample has each: (resamples, units) -> (resamples,)
    higher_is_better: bool = True
    per_token: bool = False  # so that models with other tokens have another number

    def value(self) -> float:
        """Returns the number on all examples."""
        return float(self.resampled(np.ones((1, self.units)))[0])


def of_sums(name: str, columns: Any, finish: Finish, **options: bool) -> Statistic:
    """Makes a function of sums over examples, from summands (units, sums), maybe sparse."""

    def resampled(counts: Array) -> Array:
        sums = np.asarray(columns.T @ counts.T).T
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return finish(sums)

    return Statistic(name, columns.shape[0], resampled, **options)


def spearman(one: ArrayLike, two: ArrayLike) -> Statistic:
    """Makes the rank correlation of two columns; equal values share their mean rank."""
    columns = [_Ranks(values) for values in (one, two)]

    def resampled(counts: Array) -> Array:
        middle = (counts.sum(axis=1, keepdims=True) + 1) / 2
        # Halves of whole numbers, so that no sum of them is rounded.
        first, second = (column.of(counts) - middle for column in columns)
        spread = (counts * first**2).sum(axis=1) * (counts * second**2).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray((counts * first * second).sum(axis=1) / np.sqrt(spread))

    return Statistic("spearman", columns[0].units, resampled)


def auc(scores: ArrayLike, true: ArrayLike) -> Statistic:
    """Makes the area under the ROC curve, by ranks (Mann-Whitney); equal scores count one half.

    Of more than two classes it is the mean over each against all others; every class occurs.
    """
    values, truth = np.asarray(scores, dtype=float), np.asarray(true)
    chosen = [1] if values.shape[1] == 2 else range(values.shape[1])
    columns = {index: _Ranks(values[:, index]) for index in chosen}

    def area(index: int, counts: Array) -> Array:
        own = counts * (truth == index)
        inside = own.sum(axis=1)
        above = (columns[index].of(counts) * own).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            pairs = inside * (counts.sum(axis=1) - inside)
            return np.asarray((above - inside * (inside + 1) / 2) / pairs)

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
    finish: Callable[[Array], Array] = lambda value: value,
    **options: bool,
) -> Statistic:
    """Makes the number `finish(sum(top) / sum(bottom))`; without `bottom` it is a mean."""
    tops = np.asarray(top, dtype=float)
    bottoms = np.ones(len(tops)) if bottom is None else np.asarray(bottom, dtype=float)
    columns = np.stack([tops, bottoms], axis=1)
    return of_sums(name, columns, lambda sums: finish(sums[:, 0] / sums[:, 1]), **options)


def pearson(one: ArrayLike, two: ArrayLike) -> Statistic:
    """Makes the linear correlation of two columns."""
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
    """Makes accuracy, macro F1 and, of two classes, Matthews correlation; -1 is no class."""
    guess, truth = np.asarray(predicted), np.asarray(true)
    hits = guess == truth
    columns = sparse.hstack(
        [_marked(labels, classes) for labels in (np.where(hits, truth, -1), guess, truth)]
    )
    made = [ratio("accuracy", hits), of_sums("macro_f1", columns, _macro_f1)]
    return [*made, of_sums("matthews", columns, _matthews)] if classes == 2 else made


def agreement(logits: ArrayLike, reference: ArrayLike) -> list[Statistic]:
    """Makes how often two models choose the same class, and KL(reference || model) in nats.

    # (units, labels) each
    """
    own, other = (log_softmax(np.asarray(found, float), axis=-1) for found in (logits, reference))
    apart = (np.exp(other) * (other - own)).sum(axis=-1)
    same = own.argmax(-1) == other.argmax(-1)
    return [ratio(AGREEMENT, same), ratio(DIVERGENCE, apart, higher_is_better=False)]


def set_statistics(predicted: ArrayLike, true: ArrayLike) -> list[Statistic]:
    """Makes micro F1, macro F1 and how often all labels of an example are right.

    # (units, labels) of bool each
    """
    guess, truth = np.asarray(predicted, dtype=bool), np.asarray(true, dtype=bool)
    columns = [marks.astype(float) for marks in (guess & truth, guess, truth)]
    totals = np.stack([marks.sum(axis=1) for marks in columns], axis=1)

    def micro(sums: Array) -> Array:
        return np.asarray(2 * sums[:, 0] / (sums[:, 1] + sums[:, 2]))

    return [
        of_sums("micro_f1", totals, micro),
        of_sums("macro_f1", sparse.csr_matrix(np.hstack(columns)), _macro_f1),
        ratio("subset_accuracy", (guess == truth).all(axis=1)),
    ]


def agreement_of_sets(logits: ArrayLike, reference: ArrayLike) -> list[Statistic]:
    """Makes how often two models choose the same labels, and KL(reference || model) in nats.

    Every label is a yes or no of its own.  # (units, labels) each
    """
    own, other = (np.asarray(found, float) for found in (logits, reference))
    apart = np.zeros(len(own))
    for sign in (1, -1):
        one, two = (-np.logaddexp(0, -sign * found) for found in (own, other))
        apart += (np.exp(two) * (two - one)).sum(axis=-1)
    same = ((own > 0) == (other > 0)).all(axis=-1)
    return [ratio(AGREEMENT, same), ratio(DIVERGENCE, apart, higher_is_better=False)]


def _marked(labels: NDArray[Any], classes: int) -> Any:
    """Marks the class of each example; -1 is not marked.  # (units, classes)."""
    places = (np.arange(len(labels)), np.maximum(labels, 0))
    marks = (labels >= 0).astype(float)
    return sparse.csr_matrix((marks, places), shape=(len(labels), classes))


def _macro_f1(sums: Array) -> Array:
    hits, guesses, truths = np.split(sums, 3, axis=1)
    total = guesses + truths
    # Classes that neither occur nor are guessed have no score.
    return np.asarray((2 * hits / np.maximum(total, 1)).sum(axis=1) / (total > 0).sum(axis=1))


def _matthews(sums: Array) -> Array:
    hits, guesses, truths = np.split(sums, 3, axis=1)
    n = truths.sum(axis=1)
    above = hits.sum(axis=1) * n - (guesses * truths).sum(axis=1)
    other = n - guesses.sum(axis=1)  # guesses of classes that the data does not have
    below = (n**2 - (guesses**2).sum(axis=1) - other**2) * (n**2 - (truths**2).sum(axis=1))
    # Zero, as usual, if all are of one class or all guesses are.
    return np.asarray(above / np.sqrt(np.where(below > 0, below, np.inf)))


def rank_statistics(ranks: ArrayLike, recalls: Sequence[int], gain: bool) -> list[Statistic]:
    """Makes numbers from ranks, from 1; with `gain` MRR and nDCG are cut off at 10."""
    place = np.asarray(ranks, dtype=float)
    made = [ratio(f"recall@{cut}", place <= cut) for cut in recalls]
    if not gain:
        return [*made, ratio("mrr", 1 / place)]
    top = place <= 10
    return [*made, ratio("mrr@10", top / place), ratio("ndcg@10", top / np.log2(place + 1))]


_CELLS = 2**20  # of counts that are held at a time
_LEVEL = 0.95


def resampled(statistics: Sequence[Statistic], times: int, seed: int) -> list[Array]:
    """Computes numbers on resamples that depend on seed and size alone: models are paired."""
    units, generator = statistics[0].units, np.random.default_rng(seed)
    most = max(_CELLS // units, 1)
    parts = [[np.empty(0)] for _ in statistics]
    for first in range(0, times, most):
        some = min(most, times - first)
        drawn = generator.integers(units, size=(some, units)) + units * np.arange(some)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=some * units).reshape(some, units)
        for part, statistic in zip(parts, statistics, strict=True):
            part.append(statistic.resampled(counts.astype(float)))
    return [np.concatenate(part) for part in parts]


def interval(values: Array) -> Interval | None:
    """Gives the middle 95 % of resampled values; None if there are none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = np.percentile(finite, [50 * (1 - _LEVEL), 50 * (1 + _LEVEL)])
    return Interval(low=float(low), high=float(high), level=_LEVEL)
