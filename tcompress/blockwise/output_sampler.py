"""Outputs of a model by what it is used for: random gradients there, and how far two are apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from math import exp, fsum, inf, isnan, log, nan
from statistics import fmean
from typing import Any, Literal

import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tcompress import processes
from tcompress.data.inputs import Batch
from tcompress.data.sentences import Pooling, SentenceEncoder
from tcompress.errors import REPAIR, DataError, FitError
from tcompress.linalg.fits import in_float64
from tcompress.models import SourceModel

_SCORES = ("logits", "start_logits", "end_logits", "logits_per_text", "prediction_logits")
_OF_TOKENS = ("start_logits", "end_logits")  # one score for each token
_MARKS_TOKENS = ("ElectraForPreTraining", "FunnelForPreTraining")  # whether it was replaced
_STATES = ("last_hidden_state", "text_embeds", "image_embeds", "prediction_outputs")
_MASKS = ("decoder_attention_mask", "attention_mask")

LEFT_OUT = (0.2, 0.45)  # shares of the tokens that variants of a text lack
VARIANTS = 1 + len(LEFT_OUT)  # of a text, itself among them

_APART = 1_000_003  # seeds of batches; of such generators the lowest 32 bits count
_RUN = 2**22  # numbers of an output that are compared at a time: logits are large

Kind = Literal["scores", "embeddings", "states"]

_Part = tuple[Tensor, Tensor | None]  # what a model puts out, and the mask of its tokens
_Pair = tuple[Tensor, Tensor, Tensor | None]  # the same of two models


def sampler_of(source: SourceModel, seed: int = 0) -> OutputSampler:
    """Choose what to draw by what a model is for."""
    problem = getattr(source.config, "problem_type", None)
    per_token = source.model_class.__name__ in _MARKS_TOKENS
    return OutputSampler(
        SentenceEncoder.of(source, last=False) if source.embeds_texts else None,
        seed,
        measures=problem == "regression",
        independent=per_token or problem == "multi_label_classification",
        per_token=per_token,
    )


@dataclass(eq=False)
class OutputSampler:
    """Random gradients at the output of a model, reproducible.

    Scores of classes or tokens get the gradient of the likelihood of an outcome drawn from the
    model itself, whose second moment is the Fisher information: exactly the curvature of the
    Kullback-Leibler divergence from the dense model. Embeddings of texts get that of their cosines
    with the other samples, which are what they are used for: changes across all that tells texts
    apart cost nothing. Other models get a random direction of every vector of theirs.
    """

    sentences: SentenceEncoder | None  # makes embeddings of texts
    seed: int = 0
    _: KW_ONLY
    measures: bool = False  # with its scores, as in regression: they count as vectors
    independent: bool = False  # each score is a yes or no, as for several labels at once
    per_token: bool = False
    """Whether `logits` hold a score for each token: a matrix of scores looks the same, of classes
    or of tokens, where there are as many classes as tokens."""
    weighs_tokens: bool = field(default=False, init=False)
    """Whether gradients of the last output tell what tokens are worth: those of scores do not.

    Where a model is sure, its scores hardly have gradients, but a large change costs as much as
    anywhere; and what a drawn outcome says of a single token is mostly chance.
    """
    _generator: torch.Generator = field(default_factory=torch.Generator, init=False)

    def __call__(self, output: Any, batch: Batch, index: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return tensors of the output, and a gradient for each.

        What is drawn for a batch, by its index, does not depend on those before.
        """
        self._generator.manual_seed(self.seed + _APART * index)
        kind, parts = self._parts(output, batch)
        _require_numbers(*(item for item, _ in parts))
        self.weighs_tokens = kind != "scores"
        draw = {"scores": self._outcome, "embeddings": self._likeness}.get(kind, self._direction)
        return [(item, _masked(draw(item), mask)) for item, mask in parts]

    def change(self, dense: Any, new: Any, batch: Batch) -> float:
        """Measure how far an output is from the dense model's, in the unit of predicted losses.

        That is twice the Kullback-Leibler divergence of scores (to second order), of embeddings the
        squared change of the cosines of texts with their variants (`with_variants`) and with each
        other, less what an affine map of all of them does, which changes no order; else the squared
        distance: a sum over the batch without padding, in float64, of terms that are not negative.
        """
        kind, pairs = self.pairs(dense, new, batch)
        for exact, changed, _ in pairs:
            _require_numbers(exact, changed)
        if kind == "embeddings":
            change = change_of_likeness(*pairs[0][:2])
        else:
            divergence = _binary_divergence if self.independent else _divergence
            measure = divergence if kind == "scores" else _distance
            change = fsum(
                float(_masked(measure(exact, changed), mask).sum())
                for pair in pairs
                for exact, changed, mask in _examples(*pair)
            )
        if isnan(change) or (change == inf and kind != "scores"):
            raise _not_finite()
        return change

    def with_variants(self, batch: Batch) -> Batch:
        """Add what outputs are compared by: texts to be embedded, without some of their words.

        How alike texts are that have much in common is what an embedding is used for; of others
        even poor models know as much. Other batches stay as they are.
        """
        if not self._compares_variants(batch):
            return batch
        mask = batch["attention_mask"]
        extended = {name: torch.cat([item] * VARIANTS) for name, item in batch.items()}
        extended["attention_mask"] = torch.cat([mask, *(_without_some(mask, s) for s in LEFT_OUT)])
        return extended

    def samples_in(self, batch: Batch) -> int:
        """Count the samples of a batch `with_variants`, which are no samples of their own."""
        rows = len(next(iter(batch.values())))
        return rows // VARIANTS if self._compares_variants(batch) else rows

    def _compares_variants(self, batch: Batch) -> bool:
        return self.sentences is not None and batch.get("attention_mask") is not None

    def pairs(self, dense: Any, new: Any, batch: Batch) -> tuple[Kind, list[_Pair]]:
        """Kind of two outputs, and the scores or vectors of both, with masks of tokens."""
        (kind, first), (_, second) = self._parts(dense, batch), self._parts(new, batch)
        both = zip(first, second, strict=True)
        return kind, [(exact, changed, mask) for (exact, mask), (changed, _) in both]

    def agreements(self, exact: Tensor, changed: Tensor, mask: Tensor | None) -> Tensor:
        """True where the best class or token of scores is the same, or whether it is a yes.

        One flag for each choice that counts.  # (choices,)
        """
        if self.independent:
            alike = (exact > 0) == (changed > 0)
        elif mask is not None and mask.shape == exact.shape:  # a token of each example is chosen
            padding = ~mask.bool()
            choices = (scores.masked_fill(padding, -inf).argmax(-1) for scores in (exact, changed))
            return torch.eq(*choices)
        else:
            alike = exact.argmax(-1) == changed.argmax(-1)
        return alike.flatten() if mask is None else alike[mask.bool()].flatten()

    def _parts(self, output: Any, batch: Batch) -> tuple[Kind, list[_Part]]:
        """Kind of an output, and its scores or vectors, with masks of tokens."""
        scores = _present(output, _SCORES)
        if scores:
            of_tokens = (*_OF_TOKENS, "logits") if self.per_token else _OF_TOKENS
            masks = [_mask_of(item, batch, per_token=name in of_tokens) for name, item in scores]
            # Of pictures the second axis has the classes of every place.
            items = [item.movedim(1, -1) if item.dim() == 4 else item for _, item in scores]
            return "states" if self.measures else "scores", [*zip(items, masks, strict=True)]
        vectors = [item for _, item in _present(output, _STATES)]
        if not vectors:
            raise DataError(
                f"a `{type(output).__name__}` has no scores and no states",
                "give every layer the same fraction: `--allocation uniform`",
            )
        mask = batch.get("attention_mask")
        if self.sentences is not None and mask is not None:
            return "embeddings", [(self.sentences(vectors[0], mask), None)]
        return "states", [(item, _mask_of(item, batch)) for item in vectors]

    def _outcome(self, scores: Tensor) -> Tensor:
        """Drawn outcome less probabilities; a single score is taken as it is."""
        if self.independent:
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


def _present(output: Any, names: Iterable[str]) -> list[tuple[str, Tensor]]:
    items = ((name, getattr(output, name, None)) for name in names)
    return [(name, item) for name, item in items if item is not None]


def _without_some(mask: Tensor, share: float) -> Tensor:
    """Leave a share of the tokens out, but for the first and the last one: they mark the text.

    (texts, tokens), which are the same for every mask of this shape.
    """
    before, after = (flags.cumsum(-1) for flags in (mask, mask.flip(-1)))
    inner = (before > 1) & (after.flip(-1) > 1)
    generator = torch.Generator().manual_seed(round(1000 * share))
    drawn = torch.rand(mask.shape, generator=generator).to(mask.device)
    return mask.masked_fill(inner & (drawn < share), 0)


def _require_numbers(*outputs: Tensor) -> None:
    """Refuse NaN and infinity; minus infinity rules outcomes out."""
    if not all(float(item.detach().amax()) < inf for item in outputs):
        raise _not_finite()


def _not_finite() -> FitError:
    text = "what the model puts out on the calibration data holds NaN or infinity"
    return FitError(text, REPAIR)


def _examples(dense: Tensor, new: Tensor, mask: Tensor | None) -> Iterator[_Pair]:
    """Both outputs in float64 and the mask, some tokens of an example at a time."""
    tensors = [item for item in (dense, new, mask) if item is not None]
    axis, step = 1 if dense.dim() == 3 else 0, max(1, _RUN // dense.shape[-1])
    for example in zip(*(item.split(1) for item in tensors), strict=True):
        pieces = (item.split(step, axis) for item in example)
        for exact, changed, *tokens in zip(*pieces, strict=True):
            yield in_float64(exact), in_float64(changed), tokens[0] if tokens else None


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


def change_of_likeness(dense: Tensor, new: Tensor) -> float:
    """Change of the cosines of texts with their variants and with each other, as much of both.

    It is what an affine map of the new model's cosines leaves of the dense model's, so that one
    whose texts are all alike is not near.  (variants * texts, d) for both; summed over texts
    """
    exact, changed = _cosines(dense), _cosines(new)
    weights = torch.cat([torch.full_like(values, 1 / max(1, len(values))) for values in exact])
    both = map(torch.cat, (exact, changed))
    before, after = (values - weights @ values / weights.sum() for values in both)
    slope = weights @ (before * after) / (weights @ after.square()).clamp_min(1e-200)
    rest = before - slope.clamp_min(0.0) * after  # the other way round is no order that is kept
    return float(weights @ rest.square()) * len(dense) / VARIANTS


def _cosines(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines of the variants of every text with each other, and of all texts."""
    unit = normalize(in_float64(vectors), dim=-1).unflatten(0, (VARIANTS, -1))
    first, second = torch.triu_indices(VARIANTS, VARIANTS, 1, device=unit.device)
    rows, columns = torch.triu_indices(unit.shape[1], unit.shape[1], 1, device=unit.device)
    variants = (unit[first] * unit[second]).sum(-1)
    return variants.flatten(), (unit[0] @ unit[0].mT)[rows, columns]


def _distance(dense: Tensor, new: Tensor) -> Tensor:
    return (dense - new).square()


def _mask_of(item: Tensor, batch: Batch, *, per_token: bool = False) -> Tensor | None:
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


@dataclass(frozen=True)
class _Difference:
    """Differences of both models' outputs for one batch."""

    index: int  # of the batch
    source: str
    samples: int
    change: float
    same: int  # scores whose best class or token stays the best
    scored: int
    vectors: list[tuple[Tensor, Tensor]]


@dataclass
class OutputComparison:
    """Differences of both models' outputs, by source of the samples."""

    sampler: OutputSampler
    differences: list[_Difference] = field(default_factory=list)
    errors: list[FitError] = field(default_factory=list)  # that one process may have met alone

    def add(self, source: str, dense: Any, new: Any, batch: Batch, index: int = 0) -> float:
        """Add what both put out for a batch `with_variants`; return its change per sample."""
        change, samples = self.sampler.change(dense, new, batch), self.sampler.samples_in(batch)
        kind, pairs = self.sampler.pairs(dense, new, batch)
        same = scored = 0
        vectors: list[tuple[Tensor, Tensor]] = []
        for exact, changed, mask in pairs:
            single = exact.shape[-1] == 1 and not self.sampler.independent
            if kind != "scores" or single:
                count = len(exact) // (VARIANTS if kind == "embeddings" else 1)
                vectors.append((_mean(exact[:count], mask), _mean(changed[:count], mask)))
            else:
                alike = self.sampler.agreements(exact, changed, mask)
                same += int(alike.sum())
                scored += alike.numel()
        difference = _Difference(index, source, samples, change, same, scored, vectors)
        self.differences.append(difference)
        return change / samples

    def attempt(self, *batch: Any) -> None:
        """Add a batch; of several processes one that cannot says so when all have (`merged`)."""
        try:
            self.add(*batch)
        except FitError as error:
            if processes.count() == 1:
                raise
            self.errors.append(error)

    def merged(self) -> OutputComparison:
        """Return the comparison of all batches, of which every process has seen its own."""
        for error in chain.from_iterable(processes.gathered(self.errors)):
            raise error
        differences = chain.from_iterable(processes.gathered(self.differences))
        return OutputComparison(self.sampler, sorted(differences, key=lambda item: item.index))

    @property
    def _by_source(self) -> dict[str, list[_Difference]]:
        sources: dict[str, list[_Difference]] = {}
        for item in self.differences:
            sources.setdefault(item.source, []).append(item)
        return sources

    @property
    def change(self) -> float:
        """Change of the output per sample, in the unit of predicted losses.

        Of several sources it is the geometric mean: none counts more because its samples change
        more, whatever the model.
        """
        changes = self.changes.values()
        several = len(changes) > 1 and all(changes)
        return exp(fmean(map(log, changes))) if several else _per_sample(self.differences)

    @property
    def changes(self) -> dict[str, float]:
        """The same by source."""
        return {source: _per_sample(items) for source, items in self._by_source.items()}

    @property
    def agreement(self) -> dict[str, float]:
        """Agreement of both models by source; 1 is in everything.

        Of scores it is the share whose best class or token is the same, of embeddings and states
        the rank correlation of the similarities of all samples, of a single score of each sample
        that of the scores.
        """
        agreements: dict[str, float] = {}
        for source, items in self._by_source.items():
            if scored := sum(item.scored for item in items):
                agreements[source] = sum(item.same for item in items) / scored
            elif widths := _by_width(pair for item in items for pair in item.vectors):
                agreements[source] = fmean(map(rank_correlation, widths))
        return {source: value for source, value in agreements.items() if not isnan(value)}

    @property
    def lost(self) -> float | None:
        """Disagreement: what is missing to full agreement, as the mean of all sources."""
        agreements = self.agreement
        return 1 - fmean(agreements.values()) if agreements else None


def _by_width(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Separate vectors of other widths, as states and their projection are."""
    widths: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for exact, changed in pairs:
        widths.setdefault(exact.shape[-1], []).append((exact, changed))
    return [*widths.values()]


def _per_sample(items: Sequence[_Difference]) -> float:
    return fsum(item.change for item in items) / sum(item.samples for item in items)


def _mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """One vector for each sample, float32 on the CPU."""
    flat = states.float().reshape(len(states), -1, states.shape[-1])
    counts = flat.new_ones(flat.shape[:2]) if mask is None else mask.reshape(len(states), -1)
    return Pooling()(flat, counts).cpu()


FEWEST = 3  # samples that have a rank correlation


def rank_correlation(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Correlate the ranks of the cosines of all vectors on both sides; NaN where that has none.

    Pairs of (n, d) and (n, e), on the CPU. Cosines of single numbers are signs, so of (n, 1) the
    numbers themselves are ranked.
    """
    sides = [torch.cat(side).double() for side in zip(*pairs, strict=True)]
    if all(side.shape[-1] == 1 for side in sides):
        return _ranked(*(side.flatten() for side in sides))
    upper = torch.triu_indices(len(sides[0]), len(sides[0]), 1).unbind()
    units = [normalize(side, dim=-1) for side in sides]
    exact, changed = ((unit @ unit.mT)[upper] for unit in units)
    return _ranked(exact, changed)


def _ranked(exact: Tensor, changed: Tensor) -> float:
    """Rank correlation of numbers; NaN where they are few or all the same.  # (n,)."""
    same = any(bool((side == side[:1]).all()) for side in (exact, changed))
    return nan if same or len(exact) < FEWEST else float(spearmanr(exact, changed).statistic)
