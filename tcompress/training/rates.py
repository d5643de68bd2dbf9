"""The default learning rate of healing, by how far weights may move before they do harm.

When every weight moves as far against the sign of its gradient, as in Adam's first step, the loss
of other examples falls and then rises: soon for a model that is all but its teacher, late for one
that is far from it, and for narrow models later than for wide ones. Runs of up to a hundred steps
of 16 examples do best at about ten times the move at which that loss is least; above it, steps undo
what the fit had right, which longer runs win back (docs/healing-measured.md). With larger batches
the rate grows as their root (Malladi et al., arXiv:2205.10287).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isfinite

import torch
from torch import Tensor, nn

EXAMPLES = 64
"""That gradients are of, and as many others that losses are of."""

MOVES = 2.5
"""The rate, in moves of least loss and with one example in a step."""

HALVINGS = 5
"""Of the highest rate, at most."""

SHORT = 100
"""Steps of a run to which that rate applies; it grows as the root of them in longer ones."""


def find_rate(
    trained: Mapping[str, nn.Parameter],
    loss: Callable[[], Tensor],
    *,
    highest: float,
    batch_size: int,
) -> float:
    """Find a rate up to the highest for parameters that have gradients; they stay as they are.

    The `loss` is that of other examples than the gradients are of; `batch_size` counts the examples
    of a step in all processes.
    """
    moves = MOVES * batch_size**0.5
    start = {name: value.detach().clone() for name, value in trained.items()}
    rate, least = highest / 2**HALVINGS, inf
    for halvings in range(HALVINGS + 1):
        tried = highest / 2**halvings
        with torch.no_grad():
            for name, value in trained.items():
                if value.grad is not None:
                    # Of float16 it may be no number, as scales are still to be found.
                    value.copy_(start[name] - tried / moves * value.grad.sign().nan_to_num())
        found = float(loss())
        if found > least:
            break  # it rises again, towards that of the start
        if isfinite(found):
            rate, least = tried, found
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(start[name])
    return rate


def rate_for(steps: int, rate: float, highest: float) -> float:
    """Give the rate of a run of so many steps, of what was found for short ones."""
    return min(highest, rate * max(1.0, steps / SHORT) ** 0.5)
