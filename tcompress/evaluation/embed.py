"""Sentence embeddings, pooled as the model's folder says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcompress.evaluation.runner import Row, Runner, checked
from tcompress.reading.pooling import Pooling


def embed(runner: Runner, rows: Sequence[Row], pad: int, pooling: Pooling) -> Tensor:
    """Computes embeddings of length 1 in the order of the rows.  # (rows, d).

    Raises:
        InputError: Some are not finite.
    """
    body = backbone(runner.model)
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    for chosen, batch in runner.batches(rows, pad):
        hidden = body(**batch).last_hidden_state.float()
        vectors = pooling(hidden, batch["attention_mask"]).cpu()
        for index, vector in zip(chosen, vectors, strict=True):
            found[index] = vector
    return checked(torch.stack(found))


def backbone(model: PreTrainedModel) -> Any:
    """Gives the part of a model that turns texts into vectors of tokens."""
    if getattr(model.config, "is_encoder_decoder", False):
        return model.get_encoder()  # type: ignore[operator]
    return model.base_model


def classifies(model: PreTrainedModel) -> bool:
    """Tells whether a model classifies sequences, and so can judge pairs of texts."""
    return type(model).__name__.endswith("ForSequenceClassification")
