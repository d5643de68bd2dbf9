"""Healing without harm: the best weights between those that it began with and those it came to.

What a fit had right where healing text says little is forgotten in healing. A mean of the weights
before and after keeps most of both (Wortsman et al., arXiv:2109.01903): points of the line between
them are compared by how far outputs are from the teacher's, on samples held out of every source.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isnan, log
from statistics import fmean, stdev
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from tcompress.artifact.manifest import SourceAgreement
from tcompress.blockwise.output_sampler import (
    VARIANTS,
    OutputComparison,
    change_of_likeness,
    rank_correlation,
    sampler_of,
)
from tcompress.data.sentences import SentenceEncoder
from tcompress.progress import Progress
from tcompress.training.batches import Encoded, in_order
from tcompress.training.losses import Losses
from tcompress.training.objectives import Batch
from tcompress.training.rounded import RoundedWeights
from tcompress.training.setup import Setup
from tcompress.training.sharding import class_of, like

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the way from the start to the end."""

JUDGED = 16
"""Samples that are compared at once; the more such batches, the smaller is a difference seen."""

FEWEST = 8
"""Batches of each source that time is kept for."""

LEAST = 3
"""Batches of each source, however little time is left: fewer tell nothing."""

SURE = 1.96
"""Standard errors that a source has to be worse by to count as harmed."""

LIGHTER = 3.0
"""Times as long as to compare outputs a pass takes in the first validation, which warms up."""

Changes = Mapping[str, Sequence[float]]
"""Distances of outputs from the teacher's, of every batch, by source."""


@dataclass(frozen=True)
class Mix:
    """Weights on the line, and what healing did on each source."""

    share: float
    sources: tuple[SourceAgreement, ...]


def mixing_validations(setup: Setup) -> float:
    """Least time that comparing mixtures takes, in validations; 0 where none is made."""
    teacher = setup.teacher_observer
    alike = teacher is None or class_of(teacher.model).__name__ == class_of(setup.model).__name__
    if not setup.imitates or (setup.kind == "states" and not alike):
        return 0.0  # they put out other things
    count = sum(min(len(part), FEWEST * JUDGED) for part in setup.data.held.values())
    count *= VARIANTS if setup.source.embeds_texts else 1
    # The teacher and each share, where a validation is of the teacher and the student.
    return (len(SHARES) + 1) * count / (2 * len(setup.data.validation)) / LIGHTER


def best_mix(
    losses: Losses,
    start: Mapping[str, Tensor],
    rounded: RoundedWeights,
    progress: Progress,
    seconds: float = inf,
    size: int = JUDGED,
) -> Mix:
    """Give the model the best weights between its first ones and its present ones.

    Where memory runs out, they are the present ones again.

    Args:
        losses: Of the run.
        start: The first weights, by name.
        rounded: The weights as they will be stored.
        progress: Hears of batches.
        seconds: After these a few batches of every source are enough.
        size: Samples that are compared at once.
    """
    setup = losses.setup
    name = "comparing weights between the first and the best ones"
    count = sum(-(-len(part) // size) for part in setup.data.held.values())
    progress.stage(name, count, "batches")
    sampler = sampler_of(setup.source, setup.options.seed)
    line = _Line(setup.changed, start)
    targets = losses.teachers.targets
    texts = targets is not None and targets.kind == "vectors"
    changes: dict[float, dict[str, list[float]]] = {s: {} for s in SHARES}
    comparisons: dict[float, OutputComparison | TextComparison] = {
        share: TextComparison(setup.sentences) if texts else OutputComparison(sampler)
        for share in SHARES
    }
    setup.model.eval()
    begun = time.perf_counter()
    with torch.no_grad(), line.kept():
        for number, (source, batch) in enumerate(_by_turns(losses, setup.data.held, size)):
            if number >= LEAST * len(setup.data.held) and time.perf_counter() - begun > seconds:
                break
            inputs, taught = losses.teachers.of_held_out(setup.data.held[source], batch, sampler)
            for share in SHARES:
                line.go(share)
                with rounded.applied(setup.trained, state=share):
                    output = setup.observer.run(inputs).output
                change = comparisons[share].add(source, taught, output, inputs)
                changes[share].setdefault(source, []).append(change)
            progress.advance()
    agreements = {share: comparisons[share].agreement for share in SHARES}
    share = broadcast_object_list([chosen(changes, agreements)])[0]  # all have to choose alike
    line.go(share)
    return Mix(
        share,
        tuple(
            SourceAgreement(
                name=source,
                start=agreements[0.0].get(source),
                end=agreements[1.0].get(source),
                kept=agreements[share].get(source),
                harmed=source in harmed(changes, agreements, 1.0),
            )
            for source in setup.data.held
        ),
    )


def _by_turns(
    losses: Losses, held: Mapping[str, Encoded], size: int
) -> Iterator[tuple[str, Batch]]:
    """Yield a batch of every source in turn, as long as there are any."""
    for part in held.values():
        part.epoch = 0
    remaining = {
        source: iter(losses.loaded(part, in_order(part, size))) for source, part in held.items()
    }
    while remaining:
        for source, batches in [*remaining.items()]:
            batch = next(batches, None)
            if batch is None:
                del remaining[source]
            else:
                yield source, batch


def harmed(
    changes: Mapping[float, Changes],
    agreements: Mapping[float, Mapping[str, float]],
    share: float,
) -> set[str]:
    """List the sources on which outputs are further from the teacher's than at the start.

    Where the agreement, which does not see a change of scale, has grown, nothing was harmed.
    """
    start, end = agreements.get(0.0, {}), agreements.get(share, {})
    return {
        source
        for source, before in changes[0.0].items()
        if is_worse(before, changes[share][source])
        and not end.get(source, -inf) > start.get(source, inf)
    }


def chosen(
    changes: Mapping[float, Changes], agreements: Mapping[float, Mapping[str, float]] | None = None
) -> float:
    """Choose the share of least change, in the geometric mean of the sources, that harms none.

    Of those that are as near by what differences of batches leave open it is the smallest, as what
    the fit had right is on no held-out sample. The start, share 0, harms none.
    """
    harmless = [share for share in changes if not harmed(changes, agreements or {}, share)]

    def mean(share: float) -> float:
        return fmean(log(max(fmean(values), 1e-300)) for values in changes[share].values())

    best = changes[min(harmless, key=mean)]
    return min(share for share in harmless if _is_as_near(best, changes[share]))


def is_worse(before: Sequence[float], after: Sequence[float]) -> bool:
    """True if batches changed by more than their differences leave open."""
    gap, error = _gap(before, after)
    return gap > SURE * error


def _is_as_near(best: Changes, candidate: Changes) -> bool:
    """True if a share is within one standard error of the best, over all sources."""
    gaps = [
        [value / max(fmean(values), 1e-300) for value in _gap(values, candidate[source])]
        for source, values in best.items()
    ]
    return sum(gap for gap, _ in gaps) <= sum(error**2 for _, error in gaps) ** 0.5


def _gap(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The mean difference of batches, and its standard error."""
    gaps = [new - old for old, new in zip(before, after, strict=True)]
    return fmean(gaps), stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0


class TextComparison:
    """Likeness of texts to teachers that read them by themselves, and to the student, by source."""

    def __init__(self, sentences: SentenceEncoder) -> None:
        self._sentences = sentences
        self._vectors: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def add(self, source: str, taught: Tensor, output: Any, batch: Mapping[str, Tensor]) -> float:
        """Add a batch of texts, each followed by its variants; `taught` is (variants * texts, D).

        Returns what an affine map of the student's cosines, which changes no order, leaves of the
        teachers', squared: the mean of pairs of variants and of pairs of texts.
        """
        student = self._sentences(output.last_hidden_state.float(), batch["attention_mask"])
        dense, new = (
            item.cpu().double().unflatten(0, (-1, VARIANTS)).transpose(0, 1)
            for item in (taught, student)
        )
        self._vectors[source].append((dense[0], new[0]))
        texts = dense.shape[1]
        kinds = min(2, texts)  # of pairs: of variants, and of texts where there are several
        return change_of_likeness(dense.flatten(0, 1), new.flatten(0, 1)) / (texts * kinds)

    @property
    def agreement(self) -> dict[str, float]:
        """Rank correlation of the cosines of all texts with the teachers', by source."""
        correlations = {name: rank_correlation(pairs) for name, pairs in self._vectors.items()}
        return {name: value for name, value in correlations.items() if not isnan(value)}


class _Line:
    """Weights of a model between two of their states."""

    def __init__(self, changed: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
        self._changed = changed
        self._start = {name: like(start[name], value) for name, value in changed.items()}
        self._end = {name: value.detach().clone() for name, value in changed.items()}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give the model its last weights again if an error ends the block."""
        try:
            yield
        except RuntimeError:
            self.go(1.0)
            raise

    def go(self, share: float) -> None:
        """Give the model the weights that are so far on the way."""
        with torch.no_grad():
            for name, value in self._changed.items():
                value.copy_(torch.lerp(self._start[name], self._end[name], share))
