"""Batches in pieces that fit into memory: where it runs out, they are cut into smaller ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from tcompress.errors import TrainingError, counted
from tcompress.training.checkpoints import RunState
from tcompress.training.losses import Losses, examples_in, is_out_of_memory
from tcompress.training.objectives import Batch
from tcompress.training.rounded import RoundedWeights
from tcompress.training.schedule import block_steps

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class FittingLosses:
    """Losses of a run at its rounded weights, with as many pieces as its state says.

    Where memory runs out, the state has more of them from then on.
    """

    losses: Losses
    optimizer: Any
    rounded: RoundedWeights
    say: Callable[[str], None]  # tells the user

    def gradients(self, batch: Batch, state: RunState) -> Tensor:
        """Add the gradients of one step, and return its loss."""
        setup, accelerator = self.losses.setup, self.losses.accelerator
        count = examples_in(batch)
        alone = state.step < block_steps(setup.options, state.total)
        while True:
            try:
                with self.rounded.applied(setup.trained, quick=True):
                    return self.losses.gradients(batch, state.parts, alone=alone)
            except RuntimeError as error:
                # Another process would wait for ever for the gradients of this one.
                final = state.parts >= count or accelerator.num_processes > 1
                _check_memory(error, state.step, -(-count // state.parts), final=final)
            self.optimizer.zero_grad(set_to_none=True)
            state.parts *= 2
            clear_device_cache()
            examples = counted(-(-count // state.parts), "example")
            self.say(
                f"memory ran out; going on with {examples} at a time, which changes nothing else"
            )

    def validate(self, state: RunState) -> float:
        """Measure the validated number, with smaller batches where memory runs out."""
        setup = self.losses.setup

        def measure(size: int) -> float:
            with self.rounded.applied(setup.trained):
                return self.losses.validate(size)

        return self.in_batches(state, max(1, setup.options.batch_size // state.parts), measure)

    def in_batches(self, state: RunState, size: int, work: Callable[[int], T]) -> T:
        """Do something with batches of a size, and again with smaller ones if memory runs out."""
        while True:
            try:
                return work(size)
            except RuntimeError as error:
                final = size == 1 or self.losses.accelerator.num_processes > 1
                _check_memory(error, state.step, size, final=final)
            size //= 2
            clear_device_cache(garbage_collection=True)


def _check_memory(error: RuntimeError, step: int, count: int, *, final: bool) -> None:
    """Pass lack of memory with so many examples at a time, unless fewer are impossible."""
    if not is_out_of_memory(error):
        raise error
    if final:
        raise TrainingError(
            f"memory ran out at step {step + 1:,} with {counted(count, 'example')} at a time",
            "shorten texts (`--max-length`), lower `--batch-size`, or compute blocks twice: "
            "`--gradient-checkpointing`",
        ) from error
