"""Moments of fitted and of held-out rows, gathered side by side."""

from __future__ import annotations

from torch import Tensor

from tcompress.conversion.fit import LayerMoments
from tcompress.linalg.moments import MomentSums


class SplitSums:
    """Accumulates the moments of one layer input."""

    def __init__(self) -> None:
        self._sums: dict[bool, MomentSums] = {}

    def add(self, dense: Tensor, new: Tensor, *, holdout: bool) -> None:
        """Adds paired rows of both streams, to fit on or to measure on.  # (rows, d)."""
        if holdout not in self._sums:
            self._sums[holdout] = MomentSums(dense.shape[-1], dense.device)
        self._sums[holdout].add(dense, new)

    def moments(self, *, centred: bool) -> LayerMoments:
        """Returns both moments; without rows to fit on there are none (a data-free fit)."""
        train, held = self._sums.get(False), self._sums.get(True)
        if train is None or not train.rows:
            return LayerMoments()
        return LayerMoments(
            train.moments(centred=centred),
            held.moments(centred=centred) if held is not None and held.rows else None,
        )
