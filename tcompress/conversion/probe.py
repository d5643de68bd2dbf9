"""What a model is used for, as random gradients at its output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum, inf, isnan
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tcompress.errors import DataError, FitError
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
            FitError: The output holds NaN or infinity.
        """
        scores, vectors = self._parts(output, batch)
        _require_numbers(scores or vectors)
        if scores:
            return [(item, self._outcome(item, batch)) for item in scores]
        return [(item, _masked(self._direction(item), batch)) for item in vectors]

    def change(self, dense: Any, other: Any, batch: Mapping[str, Tensor]) -> float:
        """Measures how far an output is from the dense model's, in the unit of predicted losses.

        That is the mean over drawn gradients of the squared product with the change: twice the
        Kullback-Leibler divergence of scores (to second order), else the squared distance; a sum
        over the batch, padding left out. It is a sum of terms in float64 none of which is negative.

        Raises:
            DataError: The output has nothing that could be compared.
            FitError: One of both holds NaN or infinity.
        """
        first, second = self._parts(dense, batch), self._parts(other, batch)
        for scores, vectors in (first, second):
            _require_numbers(scores or vectors)
        measure = _distance
        if first[0]:
            measure = _binary_divergence if self._independent else _divergence
        pairs = zip(first[0] or first[1], second[0] or second[1], strict=True)
        change = fsum(
            float(_masked(measure(one, two), part).sum())
            for pair in pairs
            for one, two, part in _examples(*pair, batch)
        )
        if isnan(change) or (change == inf and measure is _distance):
            raise _not_finite()
        return change

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


def _require_numbers(outputs: Iterable[Tensor]) -> None:
    """Refuses NaN and infinity; minus infinity rules outcomes out."""
    for item in outputs:
        if not float(item.detach().amax()) < inf:
            raise _not_finite()


def _not_finite() -> FitError:
    return FitError(
        "what the model puts out on the calibration data holds NaN or infinity",
        "repair the checkpoint, or convert this model without data: `--calib none`",
    )


def _examples(
    one: Tensor, two: Tensor, batch: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor, Mapping[str, Tensor]]]:
    """Both outputs in float64 and the masks, some tokens of an example at a time."""
    masks = {name: mask for name in _MASKS if (mask := batch.get(name)) is not None}
    length = one.shape[1] if one.dim() == 3 else 1
    if one.dim() == 3:  # others say nothing of these tokens
        masks = {name: mask for name, mask in masks.items() if mask.shape == one.shape[:2]}
    step = max(1, _RUN // one.shape[-1])
    for index in range(len(one)):
        for first in range(0, length, step):
            own: Any = slice(index, index + 1)
            if one.dim() == 3:
                own = own, slice(first, first + step)
            yield one[own].double(), two[own].double(), {k: mask[own] for k, mask in masks.items()}


def _divergence(dense: Tensor, other: Tensor) -> Tensor:
    if dense.shape[-1] == 1:
        return _distance(dense, other)
    return 2 * _surprise(dense.log_softmax(-1), other.log_softmax(-1))


def _binary_divergence(dense: Tensor, other: Tensor) -> Tensor:
    yes = _surprise(logsigmoid(dense), logsigmoid(other))
    return 2 * (yes + _surprise(logsigmoid(-dense), logsigmoid(-other)))


def _surprise(one: Tensor, two: Tensor) -> Tensor:
    """Terms p ln(p / q) - p + q, none of which is negative; p and q each add up to one.

    Args:
        one: ln p; minus infinity for what is ruled out.
        two: ln q.
    """
    p, q = one.exp(), two.exp()
    gap = torch.where(p > 0, one - two, 0.0)
    # Close to each other the terms are differences of numbers that are nearly equal.
    terms = p * (gap + torch.expm1(-gap.clamp_min(-1)))
    far = gap <= -1
    terms[far] = p[far] * (gap[far] - 1) + q[far]
    return terms.clamp_min_(0).add_(torch.where(p > 0, 0.0, q))


def _distance(dense: Tensor, other: Tensor) -> Tensor:
    return (dense - other).square()


_RUN = 2**22
"""Numbers of an output that are compared at a time: logits are large."""

_MASKS = ("decoder_attention_mask", "attention_mask")


def _masked(gradient: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Leaves out what padded tokens predict."""
    for name in _MASKS:
        mask = batch.get(name)
        if mask is not None and gradient.dim() == 3 and mask.shape == gradient.shape[:2]:
            return gradient * mask.unsqueeze(-1).to(gradient)
        if mask is not None and mask.shape == gradient.shape:  # a score for each token
            return gradient * mask.to(gradient)
    return gradient
