"""Random gradients at the output of a model, by what it is used for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum, inf, isnan
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import DataError, FitError
from tcompress.linalg import in_float64
from tcompress.models import SourceModel

_SCORES = ("logits", "start_logits", "end_logits", "logits_per_text", "prediction_logits")
_OF_TOKENS = ("start_logits", "end_logits")  # one score for each token
_MARKS_TOKENS = ("ElectraForPreTraining", "FunnelForPreTraining")  # whether it was replaced
_STATES = ("last_hidden_state", "text_embeds", "image_embeds", "prediction_outputs")

LEFT_OUT = (0.2, 0.45)  # shares of the tokens that variants of a text lack
VARIANTS = 1 + len(LEFT_OUT)  # of a text, itself among them

_APART = 1_000_003  # seeds of batches; of such generators the lowest 32 bits count

Kind = Literal["scores", "embeddings", "states"]

Part = tuple[Tensor, Tensor | None]  # what a model puts out, and the mask of its tokens


def sampler_of(source: SourceModel, seed: int = 0) -> OutputSampler:
    """Choose what to draw by what a model is for."""
    sentences = SentenceEncoder.of(source, last=False) if source.embeds_texts else None
    several = getattr(source.config, "problem_type", None) == "multi_label_classification"
    per_token = source.model_class.__name__ in _MARKS_TOKENS
    how = {"independent": several or per_token, "per_token": per_token}
    measures = getattr(source.config, "problem_type", None) == "regression"
    return OutputSampler(sentences, seed, measures=measures, **how)


class OutputSampler:
    """Random gradients at the output of a model, reproducible.

    Scores of classes or tokens get the gradient of the likelihood of an outcome drawn from the
    model itself, whose second moment is the Fisher information: exactly the curvature of the
    Kullback-Leibler divergence from the dense model. Embeddings of texts (`sentences`) get that of
    their cosines with the other samples, which are what they are used for: changes across all that
    tells texts apart cost nothing. Other models get a random direction of every vector of theirs.

    Scores are `independent` where each is a yes or no of its own, as for several labels at once;
    they count as vectors where a model `measures` with them, as in regression.
    `logits` are `per_token` where they hold one for each token: a matrix of scores looks the same,
    of classes or of tokens, where there are as many classes as tokens.
    """

    def __init__(
        self,
        sentences: SentenceEncoder | None,
        seed: int = 0,
        *,
        measures: bool = False,
        independent: bool = False,
        per_token: bool = False,
    ) -> None:
        self.weighs_tokens = False
        """Whether gradients of the last output tell what tokens are worth: those of scores do not.

        Where a model is sure, its scores hardly have gradients, but a large change costs as much
        as anywhere; and what a drawn outcome says of a single token is mostly chance.
        """
        self._sentences = sentences
        self._measures, self._independent = measures, independent
        self._of_tokens = (*_OF_TOKENS, "logits") if per_token else _OF_TOKENS
        self._seed, self._generator = seed, torch.Generator()

    def __call__(
        self, output: Any, batch: Mapping[str, Tensor], index: int = 0
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """Return tensors of the output, and a gradient for each.

        What is drawn for a batch, by its index, does not depend on those before.
        """
        self._generator.manual_seed(self._seed + _APART * index)
        kind, parts = self._parts(output, batch)
        _require_numbers(parts)
        self.weighs_tokens = kind != "scores"
        draw = {
            "scores": self._outcome,
            "embeddings": self._likeness,
            "states": self._direction,
        }[kind]
        return [(item, _masked(draw(item), mask)) for item, mask in parts]

    def change(self, dense: Any, new: Any, batch: Mapping[str, Tensor]) -> float:
        """Measure how far an output is from the dense model's, in the unit of predicted losses.

        That is twice the Kullback-Leibler divergence of scores (to second order), of embeddings the
        squared change of the cosines of texts with their variants (`with_variants`) and with each
        other, less what an affine map of all of them does, which changes no order; else the squared
        distance: a sum over the batch without padding, in float64, of terms that are not negative.
        """
        (kind, first), (_, second) = self._parts(dense, batch), self._parts(new, batch)
        _require_numbers([*first, *second])
        measure = _distance
        if kind == "scores":
            measure = _binary_divergence if self._independent else _divergence
        if kind == "embeddings":
            change = _change_of_likeness(first[0][0], second[0][0])
        else:
            change = fsum(
                float(_masked(measure(exact, changed), tokens).sum())
                for (outputs, mask), (new_outputs, _) in zip(first, second, strict=True)
                for exact, changed, tokens in _examples(outputs, new_outputs, mask)
            )
        if isnan(change) or (change == inf and measure is _distance):
            raise _not_finite()
        return change

    def with_variants(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Add what outputs are compared by: texts to be embedded, without some of their words.

        How alike texts are that have much in common is what an embedding is used for; of others
        even poor models know as much. Other batches stay as they are.
        """
        mask = batch.get("attention_mask")
        if self._sentences is None or mask is None:
            return batch
        extended = {name: torch.cat([item] * VARIANTS) for name, item in batch.items()}
        extended["attention_mask"] = torch.cat([mask, *(_without_some(mask, s) for s in LEFT_OUT)])
        return extended

    def pairs(
        self, dense: Any, new: Any, batch: Mapping[str, Tensor]
    ) -> tuple[bool, list[tuple[Tensor, Tensor, Tensor | None]]]:
        """Pair scores of two outputs (true), or else their vectors, with masks of tokens.

        Scores of a yes or no each are given those of a no; of texts the variants are left out.
        """
        (kind, first), (_, second) = self._parts(dense, batch), self._parts(new, batch)
        scored = kind == "scores"

        def vectors(item: Tensor) -> Tensor:
            if kind == "embeddings":
                return item[: len(item) // VARIANTS]
            no = torch.zeros_like(item)
            return torch.stack([no, item], -1) if scored and self._independent else item

        pairs = zip(first, second, strict=True)
        return scored, [(vectors(one), vectors(two), mask) for (one, mask), (two, _) in pairs]

    def _parts(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Kind, list[Part]]:
        """Kind of an output, and its scores or vectors, with masks of tokens."""
        scores: list[Part] = []
        for name in _SCORES:
            if (item := getattr(output, name, None)) is not None:
                if item.dim() == 4:  # classes of every place of a picture
                    item = item.movedim(1, -1)
                scores.append((item, _mask_of(item, batch, per_token=name in self._of_tokens)))
        if scores:
            return "states" if self._measures else "scores", scores
        states = [getattr(output, name, None) for name in _STATES]
        vectors = [item for item in states if item is not None]
        if not vectors:
            raise DataError(
                f"a `{type(output).__name__}` has no scores and no states",
                "give every layer the same fraction: `--allocation uniform`",
            )
        mask = batch.get("attention_mask")
        if self._sentences is not None and mask is not None:
            return "embeddings", [(self._sentences(vectors[0], mask), None)]
        return "states", [(item, _mask_of(item, batch)) for item in vectors]

    def _outcome(self, scores: Tensor) -> Tensor:
        """Drawn outcome less probabilities; a single score is taken as it is."""
        if self._independent:
            likely = scores.detach().float().sigmoid().cpu()
            outcomes = torch.bernoulli(likely, generator=self._generator)
            return (outcomes - likely).to(scores)
        if scores.shape[-1] == 1:
            return self._direction(scores)
        chances = scores.detach().float().softmax(-1).flatten(0, -2)
        drawn = torch.multinomial(chances.cpu(), 1, generator=self._generator).to(chances.device)
        gradient = chances.neg_()  # in its place: scores of many tokens are large
        gradient.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=gradient.dtype))
        return gradient.reshape(scores.shape).to(scores.dtype)

    def _likeness(self, vectors: Tensor) -> Tensor:
        """Gradient of a random sum of the cosines with the other samples.

        Of one sample by itself it is that of the cosine with any vector: as long, on average.
        """
        states = vectors.detach().float()
        count, unit = len(states), normalize(states, dim=-1)
        if count > 1:
            drawn = torch.randn(count, count, generator=self._generator).to(unit)
            direction = drawn.fill_diagonal_(0) @ unit / (count - 1) ** 0.5
        else:
            direction = self._direction(unit) / unit.shape[-1] ** 0.5
        across = direction - (direction * unit).sum(-1, keepdim=True) * unit
        size = states.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(states.dtype).tiny)
        return (across / size).to(vectors)

    def _direction(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._generator).to(like)


def _without_some(mask: Tensor, share: float) -> Tensor:
    """Leave a share of the tokens out, but for the first and the last one: they mark the text.

    (texts, tokens), which are the same for every mask of this shape.
    """
    before, after = (flags.cumsum(-1) for flags in (mask, mask.flip(-1)))
    inner = (before > 1) & (after.flip(-1) > 1)
    generator = torch.Generator().manual_seed(round(1000 * share))
    drawn = torch.rand(mask.shape, generator=generator).to(mask.device)
    return mask.masked_fill(inner & (drawn < share), 0)


def _require_numbers(outputs: Iterable[Part]) -> None:
    """Refuse NaN and infinity; minus infinity rules outcomes out."""
    for item, _ in outputs:
        if not float(item.detach().amax()) < inf:
            raise _not_finite()


def _not_finite() -> FitError:
    return FitError(
        "what the model puts out on the calibration data holds NaN or infinity",
        "repair the checkpoint, or convert this model without data: `--calib none`",
    )


def _examples(
    dense: Tensor, new: Tensor, mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Both outputs in float64 and the mask, some tokens of an example at a time."""
    length = dense.shape[1] if dense.dim() == 3 else 1
    step = max(1, _RUN // dense.shape[-1])
    for index in range(len(dense)):
        for first in range(0, length, step):
            part: Any = slice(index, index + 1)
            if dense.dim() == 3:
                part = part, slice(first, first + step)
            both = in_float64(dense[part]), in_float64(new[part])
            yield *both, None if mask is None else mask[part].to(both[0].device)


def _divergence(dense: Tensor, new: Tensor) -> Tensor:
    if dense.shape[-1] == 1:
        return _distance(dense, new)
    return 2 * _surprise(dense.log_softmax(-1), new.log_softmax(-1))


def _binary_divergence(dense: Tensor, new: Tensor) -> Tensor:
    yes = _surprise(logsigmoid(dense), logsigmoid(new))
    return 2 * (yes + _surprise(logsigmoid(-dense), logsigmoid(-new)))


def _surprise(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Terms p ln(p / q) - p + q, none of which is negative; p and q each add up to one.

    ln p is minus infinity for what is ruled out.
    """
    p, q = log_p.exp(), log_q.exp()
    gap = torch.where(p > 0, log_p - log_q, 0.0)
    # Close to each other the terms are differences of numbers that are nearly equal.
    terms = p * (gap + torch.expm1(-gap.clamp_min(-1)))
    distant = gap <= -1
    terms[distant] = p[distant] * (gap[distant] - 1) + q[distant]
    return terms.clamp_min_(0).add_(torch.where(p > 0, 0.0, q))


def _change_of_likeness(dense: Tensor, new: Tensor) -> float:
    """Change of the cosines of texts with their variants and with each other, as much of both.

    It is what an affine map of the new model's cosines leaves of the dense model's, so that one
    whose texts are all alike is not near.  (variants * texts, d) for both; summed over texts
    """
    exact, changed = _cosines(dense), _cosines(new)
    weights = torch.cat([torch.full_like(values, 1 / max(1, len(values))) for values in exact])
    before, after = (_centred(torch.cat(values), weights) for values in (exact, changed))
    slope = weights @ (before * after) / (weights @ after.square()).clamp_min(1e-200)
    rest = before - slope.clamp_min(0.0) * after  # the other way round is no order that is kept
    return float(weights @ rest.square()) * len(dense) / VARIANTS


def _centred(values: Tensor, weights: Tensor) -> Tensor:
    return values - weights @ values / weights.sum()


def _cosines(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines of the variants of every text with each other, and of all texts."""
    unit = normalize(in_float64(vectors), dim=-1).unflatten(0, (VARIANTS, -1))
    first, second = torch.triu_indices(VARIANTS, VARIANTS, 1, device=unit.device)
    rows, columns = torch.triu_indices(unit.shape[1], unit.shape[1], 1, device=unit.device)
    variants = (unit[first] * unit[second]).sum(-1)
    return variants.flatten(), (unit[0] @ unit[0].mT)[rows, columns]


def _distance(dense: Tensor, new: Tensor) -> Tensor:
    return (dense - new).square()


_RUN = 2**22  # numbers of an output that are compared at a time: logits are large
_MASKS = ("decoder_attention_mask", "attention_mask")


def _mask_of(
    item: Tensor, batch: Mapping[str, Tensor], *, per_token: bool = False
) -> Tensor | None:
    """Find the mask of an output's tokens, if these stand along its second axis."""
    if item.dim() != 3 and not per_token:
        return None
    masks = (batch.get(name) for name in _MASKS)
    return next((it for it in masks if it is not None and it.shape == item.shape[:2]), None)


def _masked(gradient: Tensor, mask: Tensor | None) -> Tensor:
    """Leave out what padded tokens predict."""
    if mask is None:
        return gradient
    return gradient * mask.reshape(*mask.shape, *[1] * (gradient.dim() - 2)).to(gradient)
