"""From examples to batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100
"""Label of tokens that are not predicted."""


def collate(rows: Sequence[Mapping[str, Tensor]], pad: int) -> dict[str, Tensor]:
    """Puts examples with the same inputs together.

    Args:
        rows: Inputs of each example; 1-D ones are sequences and are padded on the right.
        pad: Token to pad with; `labels` are padded with `IGNORED`,
            everything else with 0.
    """
    return {name: _joined(name, [row[name] for row in rows], pad) for name in rows[0]}


def _joined(name: str, values: list[Tensor], pad: int) -> Tensor:
    if values[0].ndim != 1:
        return torch.stack(values)
    filler = pad if name.endswith("input_ids") else IGNORED if name == "labels" else 0
    return pad_sequence(values, batch_first=True, padding_value=filler)
