"""Moments of what layers read in two streams, and the routing that pairs the rows of experts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tcompress.fitting.layer_fits import LayerMoments
from tcompress.linalg.moments import MomentSums
from tcompress.structures.modules.experts import StructuredExperts, activated, bias_of, up_name


class SplitSums:
    """Moments of one layer input, of rows to fit on and of rows held out."""

    def __init__(self) -> None:
        self._sums: dict[bool, MomentSums] = {}

    def add(
        self, dense: Tensor, new: Tensor, *, holdout: bool, weights: Tensor | None = None
    ) -> None:
        """Add paired rows of both streams, and what they are worth.  # (rows, d), (rows,)."""
        if holdout not in self._sums:
            self._sums[holdout] = MomentSums(dense.shape[-1], new.shape[-1], dense.device)
        self._sums[holdout].add(dense, new, weights)

    def moments(self, *, centred: bool) -> LayerMoments:
        """Return both moments; without rows to fit on there are none (a data-free fit)."""
        train, held = self._sums.get(False), self._sums.get(True)
        if train is None or not train.rows:
            return LayerMoments()
        return LayerMoments(
            train.moments(centred=centred),
            held.moments(centred=centred) if held is not None and held.rows else None,
        )


# Routed experts during calibration: both streams follow the dense stream's routing.


Arguments = tuple[Any, ...]
Routed = tuple[Tensor, Tensor, Tensor]  # hidden states, experts of each token, their weights


def routed_arguments(*args: Tensor, **kwargs: Tensor) -> Routed:
    """Return the arguments of routed experts, whatever the family calls them."""
    hidden, index, weights = (*args, *kwargs.values())
    return hidden, index, weights


class Routing:
    """The dense stream's routing in a block, recorded and replayed in the compressed one.

    Without it the two streams would send a token to different experts, and rows would not pair.
    """

    def __init__(self, dense: nn.Module, paths: Collection[str]) -> None:
        self.paths = tuple(paths)
        self._routes: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.current = 0
        for path in self.paths:
            hook = partial(self._record, path)
            dense.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def replay_in(self, new: nn.Module) -> None:
        """Make the experts of the compressed block follow the recorded routing."""
        for path in self.paths:
            hook = partial(self._replay, path)
            new.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def _record(self, path: str, host: nn.Module, args: Arguments, kwargs: dict[str, Any]) -> None:
        _, index, weights = routed_arguments(*args, **kwargs)
        self._routes[path, self.current] = (index, weights)

    def _replay(
        self, path: str, host: nn.Module, args: Arguments, kwargs: dict[str, Any]
    ) -> tuple[Arguments, dict[str, Any]]:
        hidden, _, _ = routed_arguments(*args, **kwargs)
        return (hidden, *self._routes[path, self.current]), {}


class ExpertSums:
    """Moments of the inputs of all experts' up projections, or of their down projections."""

    def __init__(self, dense: Any, new: Any, *, down: bool) -> None:
        self._dense = dense
        self._down = down
        name = up_name(dense)
        self._bias = bias_of(dense, name)
        weight: Tensor = getattr(dense, name)
        self._weight = weight.mT if dense.is_transposed else weight
        stack = new.stacks.get(name) if down and isinstance(new, StructuredExperts) else None
        self._new_weight = self._weight if stack is None else stack.dense_weight(torch.float32)
        self.sums: Sequence[SplitSums] = [SplitSums() for _ in range(len(weight))]

    def add(self, routed: Routed, hidden: Tensor, mask: Tensor | None, *, holdout: bool) -> None:
        """Add a batch: arguments of the dense experts, tokens of the other stream, and a mask."""
        dense_hidden, index, weights = routed
        # A weight of zero means that a token skips its expert, as in some families.
        counts = weights != 0 if weights.shape == index.shape else torch.ones_like(index).bool()
        for expert, sums in enumerate(self.sums):
            chosen = ((index == expert) & counts).any(-1)
            rows = chosen if mask is None else chosen & mask
            if not bool(rows.any()):
                continue
            dense_rows = self._inputs(dense_hidden[rows], self._weight, expert)
            new_rows = self._inputs(hidden[rows], self._new_weight, expert)
            sums.add(dense_rows, new_rows, holdout=holdout)

    def _inputs(self, tokens: Tensor, weight: Tensor, expert: int) -> Tensor:
        if not self._down:
            return tokens
        bias = None if self._bias is None else self._bias[expert]
        return activated(self._dense, linear(tokens, weight[expert], bias))
