"""A table of token vectors: without any block, a text is embedded as the weighted mean of its rows.

The vectors are what the dense encoder makes of each token alone, as model2vec distils them
(https://github.com/MinishLab/model2vec); the weights are smooth inverse frequencies (Arora et al.,
2017, https://openreview.net/forum?id=SyK00v5xx).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from tcompress.data.sentences import SentenceEncoder

MOST_DIMENSIONS, LEAST_DIMENSIONS = 256, 32
ROW_BYTES = 6
"""Bytes of a row beside its numbers: a scale in float32, a weight in float16."""
BATCH = 256
SMOOTHING, RANK_SMOOTHING = 1e-2, 1e-4
"""Frequency of a token whose weight is one half; as counted, and as guessed from ranks."""


class StaticModule(nn.Module):
    """A table in the place of an encoder, for whatever runs forward passes.

    Every token's state is the weighted mean of the whole text, so that any pooling gives that.

    Args:
        config: The encoder's.
        vectors: One of each token.  # (tokens, width); stored in 8 bits with a scale per row.
        weights: From 0 for tokens that are not read to 1.  # (tokens,)
    """

    values: Tensor
    scales: Tensor
    weights: Tensor
    dtype = torch.float32  # of what is put out
    device = torch.device("cpu")

    def __init__(self, config: Any, vectors: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.config = config
        scales = vectors.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        self.register_buffer("values", (127 * vectors / scales).round().to(torch.int8))
        self.register_buffer("scales", (scales[:, 0] / 127).float())
        self.register_buffer("weights", weights.half())

    @property
    def base_model(self) -> StaticModule:
        """The module itself, which has no head."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and weights."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> ModelOutput:
        """Give `last_hidden_state`, alike for all tokens of a text.  # (batch, length, width)."""
        shares = self.weights[input_ids].float()
        shares = shares if attention_mask is None else shares * attention_mask
        shares = shares / shares.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        scaled = (shares * self.scales[input_ids]).unsqueeze(1)
        mean = scaled @ self.values[input_ids].float()
        return ModelOutput(last_hidden_state=mean.expand(-1, input_ids.shape[1], -1))


def token_vectors(
    dense: PreTrainedModel, tokenizer: Any, sentences: SentenceEncoder, tokens: range
) -> Iterator[Tensor]:
    """Embed each token alone between special tokens; a batch at a time.  # (n, d) each."""
    empty, one = (tokenizer(text)["input_ids"] for text in ("", "a"))
    pairs = zip(empty, one, strict=False)
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    before, after = (torch.tensor(ids).long() for ids in (empty[:shared], empty[shared:]))
    body: Any = dense.base_model
    for first in range(0, len(tokens), BATCH):
        ids = torch.tensor(tokens[first : first + BATCH])[:, None]
        sides = (side.expand(len(ids), -1) for side in (before, after))
        inputs = torch.cat([next(sides), ids, next(sides)], 1)
        mask = torch.ones_like(inputs)
        with torch.inference_mode():
            hidden = body(input_ids=inputs, attention_mask=mask).last_hidden_state
            yield sentences.embed(hidden.float(), mask, 0)


def table(
    config: Any, vectors: Tensor, counts: Tensor | None, silent: list[int], width: int
) -> StaticModule:
    """Make the table of tokens that are embedded each.

    Args:
        config: The encoder's.
        vectors: Of all tokens.  # (tokens, d)
        counts: How often each is in texts; None to guess that from the rank.  # (tokens,)
        silent: Tokens that weigh nothing.
        width: Of the table; principal components of the vectors, around the mean of all texts.
    """
    zipf = counts is None
    counts = 1 / (torch.arange(len(vectors)) + 2.0) if counts is None else counts.clone()
    counts[silent] = 0
    frequencies = counts.double() / counts.sum().clamp_min(1e-9)
    smoothing = RANK_SMOOTHING if zipf else SMOOTHING
    weights = smoothing / (smoothing + frequencies)
    weights[silent] = 0
    parts = frequencies * weights  # of all texts, by token
    centred = vectors.double() - (parts / parts.sum().clamp_min(1e-9)) @ vectors.double()
    _, directions = torch.linalg.eigh(centred.T @ centred)
    return StaticModule(config, centred @ directions[:, -width:].flip(1), weights)
