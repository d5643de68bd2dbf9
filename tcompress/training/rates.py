"""The default learning rate of healing, by how far weights may move before they do harm.

Adam's first step moves every weight by the rate, against the sign of its gradient. Along this
direction the loss of other examples falls and then rises: soon for a model that is all but its
teacher, late for one that is far from it, and for narrow models later than for wide ones. A run of
some steps does best at about ten times the move at which that loss is least (measured in
docs/healing-measured.md); above it, first steps undo what the fit had right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isfinite

import torch
from torch import Tensor, nn

EXAMPLES = 64
"""That gradients are of, and as many others that losses are of."""

MOVES = 10.0
"""The rate, in moves of least loss."""

HALVINGS = 5
"""Of the highest rate, at most."""


def find_rate(
    trained: Mapping[str, nn.Parameter], loss: Callable[[], Tensor], highest: float
) -> float:
    """Find a rate up to the highest for parameters that have gradients; they stay as they are.

    The `loss` is that of other examples than the gradients are of.
    """
    start = {name: value.detach().clone() for name, value in trained.items()}
    rate, least = highest / 2**HALVINGS, inf
    for halvings in range(HALVINGS + 1):
        tried = highest / 2**halvings
        with torch.no_grad():
            for name, value in trained.items():
                if value.grad is not None:
                    # Of float16 it may be no number, as scales are still to be found.
                    value.copy_(start[name] - tried / MOVES * value.grad.sign().nan_to_num())
        found = float(loss())
        if found > least:
            break  # it rises again, towards that of the start
        if isfinite(found):
            rate, least = tried, found
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(start[name])
    return rate
