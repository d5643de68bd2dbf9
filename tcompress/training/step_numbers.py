"""Losses and gradient norms of steps, which stay on the device until they are read together."""

from __future__ import annotations

import math

import torch
from accelerate import Accelerator
from torch import Tensor

from tcompress.errors import TrainingError
from tcompress.training.schedule import highest_rate
from tcompress.training.setup import Setup


class StepNumbers:
    """Numbers of the steps of a run: to read one, the host waits for the device."""

    def __init__(self, setup: Setup, accelerator: Accelerator) -> None:
        self._setup, self._accelerator = setup, accelerator
        self._unread: list[tuple[Tensor, Tensor]] = []  # loss and norm, on the device
        self.last_loss = math.nan  # of the last step that was read

    def add(self, loss: Tensor, norm: Tensor | None) -> None:
        """Note what a step computes; the loss is that of this process."""
        self._unread.append((loss, loss.new_zeros(()) if norm is None else norm.to(loss)))

    def read(self, step: int) -> list[float]:
        """Read the losses of the unread steps, of which the last one is `step`.

        Raises:
            TrainingError: A loss is not finite, or the norm of the gradient.
        """
        if not self._unread:
            return []
        computed = torch.stack([torch.stack(pair) for pair in self._unread], 1)
        first = step - len(self._unread) + 1
        self._unread.clear()
        if self._accelerator.num_processes > 1:
            computed[0] = self._accelerator.reduce(computed[0], "sum")  # type: ignore[index]
        losses, norms = computed.tolist()
        for index, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
            check_finite(self._setup, "the loss", loss, first + index)
            # A scaler of float16 meets infinite gradients at times, and leaves such steps out.
            if self._accelerator.scaler is None:
                check_finite(self._setup, "the gradient's norm", norm, first + index)
        self.last_loss = losses[-1]
        return losses


def check_finite(setup: Setup, what: str, value: float, step: int) -> None:
    """End a run whose numbers are not finite.

    Raises:
        TrainingError: The value is NaN or infinity.
    """
    if math.isfinite(value):
        return
    usual = setup.options.model_copy(update={"learning_rate": None})
    rates = [highest_rate(item, untrained=setup.untrained) for item in (setup.options, usual)]
    raise TrainingError(
        f"{what} is {value} at step {step:,}",
        f"lower the learning rate, such as `--lr {min(rates[0] / 4, rates[1]):g}`, or train in "
        "float32: `--mixed-precision no`",
    )
