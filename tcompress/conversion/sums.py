"""Moments of layer inputs, of fitted and of held-out rows, and of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from tcompress.conversion.fit import LayerMoments
from tcompress.errors import FitError
from tcompress.linalg.moments import MomentSums
from tcompress.mechanisms.base import QueryKeyMoments


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


class QueryKeySums:
    """Accumulates the moments of one attention's queries and keys.

    Args:
        centred: Whether keys count less their mean over their text.
    """

    def __init__(self, *, centred: bool) -> None:
        self._centred = centred
        self._queries: Tensor | float = 0.0
        self._keys: Tensor | float = 0.0

    def add(self, q: Tensor, k: Tensor, tokens: Tensor | None) -> None:
        """Adds a batch.

        Args:
            q: Queries.  # (batch, heads, tokens, head_dim)
            k: Keys.  # (batch, key_heads, tokens, head_dim)
            tokens: True where a token is no padding, or None.  # (batch | 1, tokens)
        """
        q, k = q.double(), k.double()
        if tokens is None:
            tokens = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device)
        valid = tokens[:, None, :, None].to(q)
        if self._centred:
            k = k - (k * valid).sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)
        q, k = q * valid, k * valid
        self._queries = self._queries + (q.mT @ q).sum(0)
        self._keys = self._keys + (k.mT @ k).sum(0)

    def moments(self) -> QueryKeyMoments:
        """Returns the sums, whose scale does not count.

        Raises:
            FitError: They hold NaN or infinity, or nothing was added.
        """
        queries, keys = torch.as_tensor(self._queries), torch.as_tensor(self._keys)
        if not queries.dim() or not bool(torch.isfinite(queries.sum() + keys.sum())):
            raise FitError(
                "queries or keys on calibration data are missing, NaN or infinite",
                "repair the checkpoint, or convert this model without data: `--calib none`",
            )
        return QueryKeyMoments(queries, keys)
