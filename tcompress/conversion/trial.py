"""A few real fits, which tell how far quick predictions of a method's losses are off.

Quick predictions leave out what takes long: fitted transforms, terms of a sum that make room for
each other. They also know only the rows that were looked at, to which structures adapt more or
less. Both depend on the method and on the role of a layer far more than on its depth; so the layers
of one or two blocks are fitted as the conversion will, on half of the rows, and judged by the other
half. The ratio of both losses corrects the predictions for all layers of a role.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, fsum, log

import torch
from torch import Tensor

from tcompress.anatomy import Block
from tcompress.conversion.allocate import Sized
from tcompress.conversion.backward import Worth
from tcompress.conversion.fit import LayerMoments, fit_layers
from tcompress.conversion.quality import Judge
from tcompress.linalg.moments import Moments
from tcompress.planning.budget import Option
from tcompress.planning.entries import LayerPlan

MARGIN = 1.15
"""A method stays in question for a role while it is at most so much worse than the best one."""

AROUND = 4.0
"""Kept fractions that count for that: up to so many times less or more than the budget's."""

LEAST, MOST = 0.02, 5.0  # bounds of a ratio that is believed


def trial_blocks(blocks: Sequence[Block], *, several: int = 4) -> frozenset[str]:
    """Names the blocks to fit: of all that have the same layers the last and one in the middle.

    Args:
        blocks: Blocks of a model, in its order.
        several: How many of a kind there have to be for a second one.
    """
    kinds: dict[frozenset[str], list[str]] = defaultdict(list)
    for block in blocks:
        kinds[frozenset(layer.role for layer in block.layers)].append(block.name)
    found = []
    for names in kinds.values():
        found += [names[-1], *([names[len(names) // 2]] if len(names) >= several else [])]
    return frozenset(found)


@dataclass(frozen=True)
class Moment:
    """Moments of one layer, per row and not damped.

    Attributes:
        gram: G.  # (in, in)
        curvature: S, or None where only the inputs count.  # (out, out)
        rows: Number of rows.
    """

    gram: Tensor
    curvature: Tensor | None
    rows: int

    @classmethod
    def of(cls, worth: Worth, *, centred: bool) -> Moment:
        """Takes the moments of what was seen."""
        return cls(worth.moment(centred=centred), worth.curvature / worth.rows, worth.rows)


@dataclass(frozen=True)
class Seen:
    """One layer and what is known of it.

    Attributes:
        weight: Dense weight.  # (out, in)
        whole: Moments of all rows.
        halves: Those that a trial fits on, and those of other rows that it is judged by.
    """

    weight: Tensor
    whole: Moment
    halves: tuple[Moment, Moment]

    @classmethod
    def of(cls, weight: Tensor, worth: Worth, *, centred: bool) -> Seen:
        """Makes it of what was seen in a backward pass."""
        whole = Moment.of(worth, centred=centred)
        half = worth.half
        if half is None or not 0 < half.rows < worth.rows:
            return cls(weight, whole, (whole, whole))
        first = Moment.of(worth.include(half, -1), centred=centred)
        return cls(weight, whole, (first, Moment.of(half, centred=centred)))


@dataclass
class Trials:
    """What real fits gain over predictions, by method and role.

    Attributes:
        fraction: Kept fraction that the budget comes to.
    """

    fraction: float
    _ratios: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _dropped: set[tuple[str, str]] = field(default_factory=set)

    def option(self, sized: Sized, method: str) -> Option | None:
        """Picks the size to try: the one closest to the budget."""
        wanted = log(self.fraction * sized.dense)
        options = sized.offers.get(method, ())
        return min(options, key=lambda item: abs(log(max(1, item.cost)) - wanted), default=None)

    def fit(
        self,
        method: str,
        group: Sequence[LayerPlan],
        sized: Mapping[str, Sized],
        seen: Mapping[str, Seen],
        damping: float,
    ) -> None:
        """Fits layers that read one input, and notes how much less than predicted they lose.

        Args:
            method: Name of the method.
            group: Their plans, of the sizes that `option` picked.
            sized: The layers as the allocator sees them, by weight name.
            seen: Their moments, by layer name.
            damping: As for the conversion.
        """
        halves = {entry.name: seen[entry.name].halves for entry in group}
        fitted = fit_layers(
            group,
            [seen[entry.name].weight for entry in group],
            [[_moments(halves[entry.name][0])] for entry in group],
            dtype=torch.float32,
            damping=damping,
            curvatures={
                name: first.curvature
                for name, (first, _) in halves.items()
                if first.curvature is not None
            },
            judges={
                name: Judge(second.gram, second.curvature) for name, (_, second) in halves.items()
            },
        )
        for entry, layer in zip(group, fitted, strict=True):
            own = sized[f"{entry.name}.{entry.parameter}"]
            option = self.option(own, method)
            if option is not None and option.loss > 0 and layer.loss is not None:
                ratio = layer.loss * own.zero / option.loss
                self._ratios[method, own.role].append(min(MOST, max(LEAST, ratio)))

    def drop(self, sized: Iterable[Sized], spared: Collection[str] = ()) -> None:
        """Drops methods that lose clearly more than others for a role, at all sizes that count.

        Args:
            sized: Layers that trials were made on.
            spared: Methods that stay in any case.
        """
        for item in sized:
            curves = {name: self.corrected(item, name) for name in item.offers}
            for name in curves.keys() - set(spared):
                others = [o for other, options in curves.items() if other != name for o in options]
                if others and not self._competes(item, curves[name], others):
                    self._dropped.add((name, item.role))

    def keeps(self, method: str, role: str) -> bool:
        """Tells whether a method is still in question for a role."""
        return (method, role) not in self._dropped

    def corrected(self, sized: Sized, method: str) -> list[Option]:
        """Returns the options of one method with losses as real fits would have them."""
        ratio = self.ratio(method, sized.role)
        return [
            replace(option, loss=min(option.loss * ratio, max(option.loss, sized.zero)))
            for option in sized.offers.get(method, ())
        ]

    def ratio(self, method: str, role: str) -> float:
        """Returns the factor for predicted losses: of the role, of all roles, or one."""
        found = self._ratios.get((method, role)) or [
            ratio
            for (name, _), ratios in self._ratios.items()
            if name == method
            for ratio in ratios
        ]
        return exp(fsum(map(log, found)) / len(found)) if found else 1.0

    def _competes(self, item: Sized, own: Sequence[Option], others: Sequence[Option]) -> bool:
        low, high = (self.fraction * item.dense * by for by in (1 / AROUND, AROUND))
        for option in own:
            if low <= option.cost <= high:
                rivals = [other.loss for other in others if other.cost <= option.cost]
                if not rivals or option.loss <= MARGIN * min(rivals):
                    return True
        return False


def _moments(seen: Moment) -> LayerMoments:
    """Moments of an input that is still that of the dense model."""
    zero = torch.zeros_like(seen.gram[0])
    return LayerMoments(Moments(seen.gram, seen.gram, seen.gram, zero, zero, seen.rows))
