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
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from tcompress.training.checkpoints import RunState
from tcompress.training.losses import is_out_of_memory
from tcompress.training.memory_limits import FittingLosses
from tcompress.training.schedule import blocks_first, highest_rate
from tcompress.training.setup import Setup

EXAMPLES = 64
"""Examples that gradients are of, and as many others that losses are of."""

MOVES = 2.5
"""The rate, in moves of least loss and with one example in a step."""

HALVINGS = 5
"""Halvings of the highest rate, at most."""

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
    rate, lowest = highest / 2**HALVINGS, inf
    for halvings in range(HALVINGS + 1):
        candidate = highest / 2**halvings
        with torch.no_grad():
            for name, value in trained.items():
                if value.grad is not None:
                    # Of float16 it may be no number, as scales are still to be found.
                    value.copy_(start[name] - candidate / moves * value.grad.sign().nan_to_num())
        measured = float(loss())
        if measured > lowest:
            break  # it rises again, towards that of the start
        if isfinite(measured):
            rate, lowest = candidate, measured
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(start[name])
    return rate


def rate_for(steps: int, rate: float, highest: float) -> float:
    """Rate of a run of so many steps, from that of short ones."""
    return min(highest, rate * max(1.0, steps / SHORT) ** 0.5)


def tested_rate(fitting: FittingLosses, state: RunState) -> float | None:
    """Find the rate of short runs where none is set and a teacher is imitated alone."""
    losses = fitting.losses
    setup, options = losses.setup, losses.setup.options
    count = min(EXAMPLES, len(setup.data.train) // 2)
    is_set = options.learning_rate is not None or setup.task is not None
    if is_set or blocks_first(options) or not setup.imitates or setup.untrained or not count:
        return None
    largest = max(1, options.batch_size // state.parts)
    smaller = [(largest >> halvings, False) for halvings in range(largest.bit_length())]
    for size, keeps in ((largest, True), *smaller):
        try:
            return _rate_on(fitting, state, count, size, keeps=keeps)
        except RuntimeError as error:
            # Another process would wait for ever for the sums of this one.
            if not is_out_of_memory(error) or losses.accelerator.num_processes > 1:
                raise
        finally:
            fitting.optimizer.zero_grad(set_to_none=True)
        clear_device_cache(garbage_collection=True)
    return None  # the first step says what to do


def _tested(setup: Setup, count: int) -> Tensor:
    """Choose the examples that gradients are of, and those that losses are of.  # (2, count).

    Of several sources, which stand one after another, they are at equal distances: each has the
    share that it has in training. One alone is in random order.
    """
    if len(setup.options.data.source) == 1:
        return torch.arange(2 * count).unflatten(0, (2, count))
    return (torch.arange(2 * count) * len(setup.data.train) // (2 * count)).unflatten(0, (-1, 2)).T


def _rate_on(
    fitting: FittingLosses, state: RunState, count: int, size: int, *, keeps: bool
) -> float:
    """Find the rate on two times so many examples, of which `size` are read at once."""
    losses, setup = fitting.losses, fitting.losses.setup
    first, second = (
        [part.tolist() for part in examples.split(size)] for examples in _tested(setup, count)
    )
    losses.model.train()
    for batch in losses.on_host(setup.data.train, first):
        fitting.gradients(batch, state)
    losses.model.eval()
    return find_rate(
        setup.trained,
        losses.loss_on(second, keeps=keeps),
        highest=highest_rate(setup.options),
        batch_size=setup.options.batch_size * losses.accelerator.num_processes,
    )
