"""A weight while it is being fitted, and the moments that it is fitted on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tcompress.linalg.moments import Moments
from tcompress.planning.entries import LayerPlan
from tcompress.structures import Layout, Target
from tcompress.structures.base import Side

Operators = dict[Side, Any]


@dataclass(frozen=True)
class LayerMoments:
    """Moments of one layer input: those to fit on, and those to measure on.

    Attributes:
        train: Moments of the calibration rows, or None for a data-free fit.
        holdout: Moments of rows kept back, if there are any.
    """

    train: Moments | None = None
    holdout: Moments | None = None


@dataclass
class FittedPart:
    """One weight being fitted: a part of a layer, of one expert."""

    entry: LayerPlan
    index: int
    expert: int
    stored: Tensor  # dense weight as the checkpoint has it  # (out, in)
    moments: Moments | None  # damped
    curvature: Tensor | None  # damped
    tensors: list[dict[str, Tensor]] = field(default_factory=list)
    operators: list[Operators] = field(default_factory=list)
    banks: list[dict[str, Tensor]] = field(default_factory=list)
    dense: list[Tensor | None] = field(default_factory=list)

    @property
    def weight(self) -> Tensor:
        """Dense weight in float64; made anew each time, so that large layers are held once."""
        return self.stored.double()

    @property
    def terms(self) -> tuple[Layout, ...]:
        return self.entry.parts[self.index].terms

    @cached_property
    def scale(self) -> float:
        """E||W x||^2, never zero."""
        weight = self.weight
        seen = weight if self.moments is None else weight @ self.moments.dense
        return max(float(seen.mul(weight).sum()), torch.finfo(torch.float64).tiny)

    @cached_property
    def _product(self) -> Tensor:
        """W C, which every round of a sum starts from."""
        assert self.moments is not None
        return self.weight @ self.moments.cross

    def target(self, term: int) -> Target:
        """What is left for one term."""
        m = self.moments
        weight = self.weight
        product = weight if m is None else self._product
        for other, dense in enumerate(self.dense):
            if other != term and dense is not None:
                weight = weight - dense
                product = weight if m is None else product - dense @ m.gram
        gram = None if m is None else m.gram
        last, bank = self._fitted(term), self.banks[term]
        operators = self.operators[term]
        return Target(product, gram, 1.0, self.curvature, weight, last, bank, operators)

    def _fitted(self, term: int) -> dict[str, Tensor]:
        """The term's own tensors of the last round, as they are stored."""
        tensors = self.tensors[term]
        return {name: tensor.double() for name, tensor in tensors.items() if "." not in name}
