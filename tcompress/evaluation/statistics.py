"""Numbers that sum up a measurement, and their intervals over resampled examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from tcompress.artifact.manifest import Interval

# Numbers that sum up a measurement, and their values on resampled examples.
#
# A resample is told by how often it drew each example. Nearly all numbers are functions of sums
# over examples, so that one matrix product gives them for many resamples.


Array = NDArray[np.float64]
Finish = Callable[[Array], Array]


class Statistic(ABC):
    """A number measured on examples.

    Args:
        name: What is measured.
        units: Number of examples.
        higher_is_better: Direction.
        per_token: Whether it counts tokens, so that models with other tokens have another number.
    """

    def __init__(
        self, name: str, units: int, *, higher_is_better: bool = True, per_token: bool = False
    ) -> None:
        self.name, self.units = name, units
        self.higher_is_better, self.per_token = higher_is_better, per_token

    def value(self) -> float:
        """Returns the number on all examples."""
        return float(self.resampled(np.ones((1, self.units)))[0])

    @abstractmethod
    def resampled(self, counts: Array) -> Array:
        """Computes the number on resamples.  # (resamples,).

        Args:
            counts: How often each resample has each example.  # (resamples, units)
        """


class OfSums(Statistic):
    """A function of sums over examples.

    Args:
        name: What is measured.
        columns: Summands, dense or a sparse matrix.  # (units, sums)
        finish: Turns sums into numbers.  # (resamples, sums) -> (resamples,)
        **options: As `Statistic` takes them.
    """

    def __init__(self, name: str, columns: Any, finish: Finish, **options: bool) -> None:
        super().__init__(name, columns.shape[0], **options)
        self._columns, self._finish = columns, finish

    def resampled(self, counts: Array) -> Array:
        sums = np.asarray(self._columns.T @ counts.T).T
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self._finish(sums)


class Spearman(Statistic):
    """Rank correlation; equal values share their mean rank.

    Args:
        one: Values.  # (units,)
        two: Values.  # (units,)
    """

    def __init__(self, one: ArrayLike, two: ArrayLike) -> None:
        first, second = np.asarray(one, dtype=float), np.asarray(two, dtype=float)
        super().__init__("spearman", len(first))
        self._one, self._two = _Order(first), _Order(second)

    def resampled(self, counts: Array) -> Array:
        # The ranks' mean is that of 1..n, whichever values are equal.
        middle = (counts.sum(axis=1, keepdims=True) + 1) / 2
        one, two = self._one.ranks(counts) - middle, self._two.ranks(counts) - middle
        both, first, second = (
            np.einsum("ru,ru,ru->r", counts, a, b) for a, b in ((one, two), (one, one), (two, two))
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(both / np.sqrt(first * second))


class Auc(Statistic):
    """Area under the ROC curve, by ranks (Mann-Whitney); equal scores count one half.

    Of more than two classes it is the mean over classes, each against all others.

    Args:
        scores: Score of each class.  # (units, classes)
        true: Class of each example; every class occurs.  # (units,)
    """

    def __init__(self, scores: ArrayLike, true: ArrayLike) -> None:
        values, truth = np.asarray(scores, dtype=float), np.asarray(true)
        super().__init__("auc", len(truth))
        chosen = [1] if values.shape[1] == 2 else range(values.shape[1])
        self._parts = [(_Order(values[:, index]), truth == index) for index in chosen]

    def resampled(self, counts: Array) -> Array:
        total = np.zeros(len(counts))
        for order, own in self._parts:
            inside = counts[:, own].sum(axis=1)
            outside = counts.sum(axis=1) - inside
            ranks = (counts * order.ranks(counts))[:, own].sum(axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                total += (ranks - inside * (inside + 1) / 2) / (inside * outside)
        return np.asarray(total / len(self._parts))


class _Order:
    """The order of values, found once, from which the ranks in every resample follow."""

    def __init__(self, values: Array) -> None:
        self._order = np.argsort(values, kind="stable")
        in_order = values[self._order]
        first = np.concatenate([[True], in_order[1:] != in_order[:-1]])
        self._starts = np.flatnonzero(first)
        self._group = np.empty(len(values), dtype=int)
        self._group[self._order] = np.cumsum(first) - 1

    def ranks(self, counts: Array) -> Array:
        """Returns the mean rank of each value in each resample.  # (resamples, units)."""
        sizes = np.add.reduceat(counts[:, self._order], self._starts, axis=1)
        ranks = np.cumsum(sizes, axis=1) - (sizes - 1) / 2
        return np.asarray(ranks[:, self._group])


def ratio(
    name: str,
    top: ArrayLike,
    bottom: ArrayLike | None = None,
    *,
    finish: Callable[[Array], Array] = lambda value: value,
    **options: bool,
) -> OfSums:
    """Makes the number `finish(sum(top) / sum(bottom))`; without `bottom` it is a mean."""
    tops = np.asarray(top, dtype=float)
    bottoms = np.ones(len(tops)) if bottom is None else np.asarray(bottom, dtype=float)
    columns = np.stack([tops, bottoms], axis=1)
    return OfSums(name, columns, lambda sums: finish(sums[:, 0] / sums[:, 1]), **options)


def pearson(one: ArrayLike, two: ArrayLike) -> OfSums:
    """Makes the linear correlation of two columns."""
    x, y = (np.asarray(values, dtype=float) for values in (one, two))
    # Centred, so that little is lost when squares are subtracted.
    x, y = x - x.mean(), y - y.mean()
    columns = np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=1)

    def finish(sums: Array) -> Array:
        n, sx, sy, sxx, syy, sxy = sums.T
        spread = np.maximum(n * sxx - sx**2, 0) * np.maximum(n * syy - sy**2, 0)
        return np.asarray((n * sxy - sx * sy) / np.sqrt(spread))

    return OfSums("pearson", columns, finish)


def class_statistics(predicted: ArrayLike, true: ArrayLike, classes: int) -> list[OfSums]:
    """Makes accuracy, macro F1 and, of two classes, Matthews correlation.

    Args:
        predicted: Class of each example; -1 for one that the data does not have.  # (units,)
        true: Class of each example.  # (units,)
        classes: Number of classes.
    """
    guess, truth = np.asarray(predicted), np.asarray(true)
    hits = guess == truth
    columns = _one_hot([np.where(hits, truth, -1), guess, truth], classes)
    made = [ratio("accuracy", hits), OfSums("macro_f1", columns, _macro_f1)]
    return [*made, OfSums("matthews", columns, _matthews)] if classes == 2 else made


def _one_hot(labels: Sequence[NDArray[Any]], classes: int) -> Any:
    """Marks the class of each example, for several labels side by side; -1 is not marked."""
    rows, columns = [], []
    for index, label in enumerate(labels):
        marked = np.flatnonzero(label >= 0)
        rows.append(marked)
        columns.append(label[marked] + index * classes)
    places = (np.concatenate(rows), np.concatenate(columns))
    shape = (len(labels[0]), len(labels) * classes)
    return sparse.csr_matrix((np.ones(len(places[0])), places), shape=shape)


def _macro_f1(sums: Array) -> Array:
    hits, guesses, truths = np.split(sums, 3, axis=1)
    total = guesses + truths
    scores = 2 * hits / np.where(total > 0, total, 1)
    # Classes that neither occur nor are guessed have no score.
    return np.asarray(scores.sum(axis=1) / (total > 0).sum(axis=1))


def _matthews(sums: Array) -> Array:
    hits, guesses, truths = np.split(sums, 3, axis=1)
    n = truths.sum(axis=1)
    above = hits.sum(axis=1) * n - (guesses * truths).sum(axis=1)
    other = n - guesses.sum(axis=1)  # guesses of classes that the data does not have
    below = (n**2 - (guesses**2).sum(axis=1) - other**2) * (n**2 - (truths**2).sum(axis=1))
    # Zero, as usual, if all are of one class or all guesses are.
    return np.asarray(above / np.sqrt(np.where(below > 0, below, np.inf)))


def rank_statistics(ranks: ArrayLike, recalls: Sequence[int], gain: bool) -> list[OfSums]:
    """Makes numbers from the rank of the right answer of each query, counted from 1.

    Args:
        ranks: The ranks.  # (units,)
        recalls: Cut-offs of the recalls, the main one first.
        gain: Whether MRR and nDCG are cut off at 10; else only MRR, over all ranks.
    """
    place = np.asarray(ranks, dtype=float)
    made = [ratio(f"recall@{cut}", place <= cut) for cut in recalls]
    if not gain:
        return [*made, ratio("mrr", 1 / place)]
    top = place <= 10
    return [
        *made,
        ratio("mrr@10", top / place),
        ratio("ndcg@10", top / np.log2(place + 1)),
    ]


# Percentile bootstrap over examples.


_CELLS = 2**20  # of counts that are held at a time
_LEVEL = 0.95


def resampled(statistics: Sequence[Statistic], times: int, seed: int) -> list[Array]:
    """Computes numbers on resamples of their examples.

    The resamples depend on the seed and the number of examples alone, so that the numbers of two
    models are paired.

    Args:
        statistics: Numbers on the same examples.
        times: How many resamples.
        seed: Seed of the draw.

    Returns:
        Values of each number.  # (times,) each
    """
    parts: list[list[Array]] = [[] for _ in statistics]
    for counts in _draws(statistics[0].units, times, seed):
        for part, statistic in zip(parts, statistics, strict=True):
            part.append(statistic.resampled(counts))
    return [np.concatenate([np.empty(0), *part]) for part in parts]


def interval(values: Array) -> Interval | None:
    """Gives the middle 95 % of resampled values; None if there are none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = np.percentile(finite, [50 * (1 - _LEVEL), 50 * (1 + _LEVEL)])
    return Interval(low=float(low), high=float(high), level=_LEVEL)


def _draws(units: int, times: int, seed: int) -> Iterator[Array]:
    """Yields how often examples are drawn, for some resamples at a time.  # (some, units)."""
    generator = np.random.default_rng(seed)
    most = max(_CELLS // units, 1)
    for first in range(0, times, most):
        some = min(most, times - first)
        drawn = generator.integers(units, size=(some, units))
        drawn += units * np.arange(some)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=some * units)
        yield counts.reshape(some, units).astype(float)
