"""What a model is used for, as random gradients at its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tcompress.errors import DataError
from tcompress.reading.pooling import Pooling
from tcompress.source import SourceModel

_SCORES = ("logits", "start_logits", "end_logits", "logits_per_text", "prediction_logits")
_MARKS_TOKENS = ("ElectraForPreTraining",)  # one score for each token: whether it was replaced
_STATES = ("last_hidden_state", "text_embeds", "image_embeds", "prediction_outputs")


def probe_of(source: SourceModel, seed: int = 0) -> OutputProbe:
    """Chooses what to draw by what a model is for.

    Raises:
        DataError: The model is a sentence encoder that is pooled in an unknown way.
    """
    reads_text = source.model_class.main_input_name == "input_ids"
    encodes = reads_text and not source.config.is_encoder_decoder
    pooling = Pooling.of(source, last=False) if encodes else None
    several = getattr(source.config, "problem_type", None) == "multi_label_classification"
    per_token = source.model_class.__name__ in _MARKS_TOKENS
    return OutputProbe(pooling, seed, independent=several or per_token)


class OutputProbe:
    """Draws gradients at the output of a model, reproducibly.

    Scores of classes or tokens get the gradient of the likelihood of an outcome drawn from the
    model itself, whose second moment is the Fisher information: exactly the curvature of the
    Kullback-Leibler divergence from the dense model. Sentence encoders get a random direction
    of their embedding, other models one of every vector of theirs.

    Args:
        pooling: How a text encoder makes an embedding, None for other models.
        seed: Seed of all draws.
        independent: Whether every score is a yes or no of its own, as for several labels at once.
    """

    def __init__(
        self, pooling: Pooling | None, seed: int = 0, *, independent: bool = False
    ) -> None:
        self._pooling = pooling
        self._independent = independent
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
        """Gives tensors of the output, and a gradient for each.

        Raises:
            DataError: The output has nothing that could be compared.
        """
        scores, vectors = self._parts(output, batch)
        if scores:
            return [(item, self._outcome(item, batch)) for item in scores]
        return [(item, _masked(self._direction(item), batch)) for item in vectors]

    def change(self, dense: Any, other: Any, batch: Mapping[str, Tensor]) -> float:
        """Measures how far an output is from the dense model's, in the unit of predicted losses.

        That is the mean over drawn gradients of the squared product with the change: twice the
        Kullback-Leibler divergence of scores (to second order), else the squared distance; a sum
        over the batch, padding left out.

        Raises:
            DataError: The output has nothing that could be compared.
        """
        first, second = self._parts(dense, batch), self._parts(other, batch)
        measure = _distance
        if first[0]:
            measure = _binary_divergence if self._independent else _divergence
        pairs = zip(first[0] or first[1], second[0] or second[1], strict=True)
        return sum(float(measure(one, two, batch)) for one, two in pairs)

    def _parts(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Scores of an output; where it has none, the vectors that count."""
        scores = [getattr(output, name, None) for name in _SCORES]
        found = [item for item in scores if item is not None]
        if found:
            return found, []
        states = [getattr(output, name, None) for name in _STATES]
        vectors = [item for item in states if item is not None]
        if not vectors:
            raise DataError(
                f"a `{type(output).__name__}` has no scores and no states",
                "give every layer the same fraction: `--allocation uniform`",
            )
        mask = batch.get("attention_mask")
        if self._pooling is not None and mask is not None:
            return [], [self._pooling(vectors[0], mask)]
        return [], vectors

    def _outcome(self, scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Drawn outcome less probabilities; a single score is taken as it is."""
        if self._independent:
            likely = scores.detach().float().sigmoid().cpu()
            said = torch.bernoulli(likely, generator=self._generator)
            return _masked((said - likely).to(scores), batch)
        if scores.shape[-1] == 1:
            return _masked(self._direction(scores), batch)
        chances = scores.detach().float().softmax(-1)
        flat = chances.reshape(-1, chances.shape[-1]).cpu()
        drawn = torch.multinomial(flat, 1, generator=self._generator).to(chances.device)
        gradient = -chances.reshape(-1, chances.shape[-1])
        gradient.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=gradient.dtype))
        return _masked(gradient.reshape(scores.shape).to(scores.dtype), batch)

    def _direction(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._generator).to(like)


def _divergence(dense: Tensor, other: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    if dense.shape[-1] == 1:
        return _distance(dense, other, batch)
    one, two = dense.float().log_softmax(-1), other.float().log_softmax(-1)
    return _masked(2 * one.exp() * (one - two), batch).sum(dtype=torch.float64)


def _binary_divergence(dense: Tensor, other: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    one, two = dense.float(), other.float()
    yes = one.sigmoid() * (logsigmoid(one) - logsigmoid(two))
    no = (-one).sigmoid() * (logsigmoid(-one) - logsigmoid(-two))
    return _masked(2 * (yes + no), batch).sum(dtype=torch.float64)


def _distance(dense: Tensor, other: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    change = (dense.float() - other.float()).square()
    return _masked(change, batch).sum(dtype=torch.float64)


def _masked(gradient: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Leaves out what padded tokens predict."""
    for name in ("decoder_attention_mask", "attention_mask"):
        mask = batch.get(name)
        if mask is not None and gradient.dim() == 3 and mask.shape == gradient.shape[:2]:
            return gradient * mask.unsqueeze(-1).to(gradient)
        if mask is not None and mask.shape == gradient.shape:  # a score for each token
            return gradient * mask.to(gradient)
    return gradient
