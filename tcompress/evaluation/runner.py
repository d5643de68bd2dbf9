"""Running a model over examples in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcompress.errors import InputError
from tcompress.reading.collate import collate

Row = dict[str, Tensor]


@dataclass(frozen=True)
class Runner:
    """A model and how it is run.

    Attributes:
        model: The model.
        batch_size: Examples in a batch.
        device: Where the model is.
        advance: Hears of examples that are done.
    """

    model: PreTrainedModel
    batch_size: int
    device: torch.device
    advance: Callable[[int], None]

    def batches(self, rows: Sequence[Row], pad: int) -> Iterator[tuple[list[int], Row]]:
        """Yields indices of examples and their inputs, longest first, since they pad least so.

        Args:
            rows: Inputs of each example, sequences not padded.
            pad: Token to pad with.
        """
        order = sorted(range(len(rows)), key=lambda index: -_length(rows[index]))
        for first in range(0, len(order), self.batch_size):
            chosen = order[first : first + self.batch_size]
            batch = collate([rows[index] for index in chosen], pad)
            yield chosen, {name: value.to(self.device) for name, value in batch.items()}
            self.advance(len(chosen))

    def logits(self, rows: Sequence[Row], pad: int) -> Tensor:
        """Computes the model's logits in the order of the rows.  # (rows, labels).

        Raises:
            InputError: Some are not finite.
        """
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        with _padding_known(self.model, pad):
            for chosen, batch in self.batches(rows, pad):
                for index, logits in zip(
                    chosen, self.model(**batch).logits.float().cpu(), strict=True
                ):
                    found[index] = logits
        return checked(torch.stack(found))


def checked(values: Tensor) -> Tensor:
    """Gives values back if all are finite.

    Raises:
        InputError: They are not.
    """
    if not torch.isfinite(values).all():
        raise InputError(
            "the model gives values that are not finite",
            "measure in another dtype, such as `--dtype float32`, or repair the model",
        )
    return values


@contextmanager
def measuring(model: PreTrainedModel) -> Iterator[None]:
    """Puts a model into evaluation mode without gradients, and back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Not inference mode: what a layer caches has to serve training too.
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _padding_known(model: PreTrainedModel, pad: int) -> Iterator[None]:
    """Tells heads that read the last token which tokens are padding, if the config does not."""
    config: Any = model.config.get_text_config()
    had = getattr(config, "pad_token_id", None)
    if had is None:
        config.pad_token_id = pad
    try:
        yield
    finally:
        config.pad_token_id = had


def _length(row: Row) -> int:
    return len(row["input_ids"]) if "input_ids" in row else 0
