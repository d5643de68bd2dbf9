"""Routed experts during calibration: both streams follow the dense stream's routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tcompress.conversion.sums import SplitSums
from tcompress.structures.experts import CHILD_OF

Routed = tuple[Tensor, Tensor, Tensor]  # hidden states, experts of each token, their weights


def routed_arguments(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Routed:
    """Names the arguments of an experts module."""
    return hidden_states, top_k_index, top_k_weights


class Routing:
    """Records the dense stream's routing in a block and replays it in the compressed one.

    Without it the two streams would send a token to different experts, and rows would not pair.

    Args:
        dense: The dense block.
        inside: Path of the experts module below the block, or None where it has none.
    """

    def __init__(self, dense: nn.Module, inside: str | None) -> None:
        self._inside = inside
        self._routes: dict[int, tuple[Tensor, Tensor]] = {}
        self.current = 0
        if inside is not None:
            host = dense.get_submodule(inside)
            host.register_forward_pre_hook(self._record, with_kwargs=True)

    def replay_in(self, new: nn.Module) -> None:
        """Makes the experts of the compressed block follow the recorded routing."""
        if self._inside is not None:
            module = new.get_submodule(self._inside)
            module.register_forward_pre_hook(self._replay, with_kwargs=True)

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, index, weights = routed_arguments(*args, **kwargs)
        self._routes[self.current] = (index, weights)

    def _replay(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, _, _ = routed_arguments(*args, **kwargs)
        return (hidden, *self._routes[self.current]), {}


class ExpertSums:
    """Moments of the inputs of all experts' up or down projections.

    Args:
        dense: The dense experts module.
        new: The one being rewritten; None while nothing of it is.
        down: True for the input of the down projections.
    """

    def __init__(self, dense: Any, new: Any, *, down: bool) -> None:
        self._dense = dense
        self._down = down
        stack = new._modules.get(CHILD_OF["gate_up_proj"]) if down else None
        self._new_weight: Tensor = (
            self._dense.gate_up_proj if stack is None else stack.dense_weight(torch.float32)
        )
        self.sums: Sequence[SplitSums] = [SplitSums() for _ in range(len(self._new_weight))]

    def add(self, routed: Routed, hidden: Tensor, mask: Tensor | None, *, holdout: bool) -> None:
        """Adds one batch.

        Args:
            routed: Arguments of the dense experts.
            hidden: Tokens of the compressed stream.  # (tokens, d)
            mask: Tokens that are not padding.  # (tokens,)
            holdout: Whether the batch is only measured on.
        """
        dense_hidden, index, _ = routed
        for expert, sums in enumerate(self.sums):
            chosen = (index == expert).any(-1)
            rows = chosen if mask is None else chosen & mask
            if not bool(rows.any()):
                continue
            one = self._inputs(dense_hidden[rows], self._dense.gate_up_proj[expert])
            two = self._inputs(hidden[rows], self._new_weight[expert])
            sums.add(one, two, holdout=holdout)

    def _inputs(self, tokens: Tensor, weight: Tensor) -> Tensor:
        if not self._down:
            return tokens
        gate, up = linear(tokens, weight).chunk(2, -1)
        return self._dense.act_fn(gate) * up  # type: ignore[no-any-return]
