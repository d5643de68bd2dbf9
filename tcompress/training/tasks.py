"""Tasks that a model can be taught: what they read, their loss, and how well they are done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from scipy.stats import mannwhitneyu, spearmanr
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from tcompress.data.examples import Examples, Needs, others, places_of
from tcompress.data.inputs import IGNORED
from tcompress.data.labels import Classes
from tcompress.data.sentences import PLAIN, SentenceEncoder
from tcompress.errors import DataError
from tcompress.hf.opening import Head
from tcompress.training.objectives import Batch, Observed, embedded

WRONG_PAIRS = 3  # wrong responses beside every right one


class TrainingTask(ABC):
    """A task that a model can be taught; `validated` names the number that is validated."""

    name: ClassVar[str]
    head: Head | None = None
    needs: ClassVar[Needs]
    validated: ClassVar[str] = "loss"
    fewest_held: ClassVar[int] = 1  # examples to hold out, where they are not half of all

    def __init__(self, sentences: SentenceEncoder = PLAIN) -> None:
        self.sentences = sentences

    @property
    def higher_is_better(self) -> bool:
        """True if the validated number grows as the model learns."""
        return self.validated not in ("loss", "mae")

    def prepare(self, examples: Examples) -> Examples:
        """Complete examples as they are read."""
        return examples

    def expand(self, examples: Examples, seed: int) -> Examples:
        """Make examples out of those that are trained, or validated, on."""
        return examples

    def suited_to(self, labels: Classes) -> TrainingTask:
        """The task as data with such labels has it."""
        return self

    @abstractmethod
    def loss(self, outputs: Observed, batch: Batch) -> Tensor:
        """Sum of the loss over labels."""

    def predictions(self, outputs: Observed, batch: Batch) -> Tensor:
        """Predictions for each example; for tasks that are validated by it."""
        raise NotImplementedError

    def score(self, predictions: Tensor, labels: Tensor) -> float:
        """The validated number, from the predictions for all examples."""
        raise NotImplementedError


class Classification(TrainingTask):
    """One class for one or two texts, or several where the data has lists of them."""

    name = "classification"
    head: Head | None = "classification"
    needs = Needs((1, 2), target="class", several=True)
    validated = "accuracy"

    def loss(self, outputs: Observed, batch: Batch) -> Tensor:
        return cross_entropy(_logits(outputs), batch["labels"], reduction="sum")

    def predictions(self, outputs: Observed, batch: Batch) -> Tensor:
        return _logits(outputs).argmax(-1)

    def score(self, predictions: Tensor, labels: Tensor) -> float:
        return float((predictions == labels).double().mean())

    def suited_to(self, labels: Classes) -> TrainingTask:
        return SeveralClasses(self.sentences, self.head) if labels.several else self


class ImageClassification(Classification):
    """One class for a picture, or several."""

    name = "image-classification"
    head = "image-classification"
    needs = Needs(image=True, target="class", several=True)


class SeveralClasses(Classification):
    """Several classes for one or two texts, or for a picture: each label is a yes or no."""

    validated = "micro_f1"

    def __init__(self, sentences: SentenceEncoder, head: Head | None) -> None:
        super().__init__(sentences)
        self.head = head

    def loss(self, outputs: Observed, batch: Batch) -> Tensor:
        return binary_cross_entropy_with_logits(_logits(outputs), batch["labels"], reduction="sum")

    def predictions(self, outputs: Observed, batch: Batch) -> Tensor:
        return _logits(outputs) > 0

    def score(self, predictions: Tensor, labels: Tensor) -> float:
        """F1 over all labels of all examples; 0 where none is right."""
        guess, truth = predictions.bool(), labels.bool()
        total = int(guess.sum() + truth.sum())
        return 2 * int((guess & truth).sum()) / total if total else 0.0


class RankedClassification(Classification):
    """Classes validated by the area under the ROC curve: some are rarer than others."""

    validated = "auc"

    def predictions(self, outputs: Observed, batch: Batch) -> Tensor:
        return _logits(outputs).softmax(-1)

    def score(self, predictions: Tensor, labels: Tensor) -> float:
        """A mean over the classes that can be told apart."""
        areas = []
        for index in [1] if predictions.shape[1] == 2 else range(predictions.shape[1]):
            is_class = labels == index
            if 0 < (count := int(is_class.sum())) < len(labels):
                rows = (is_class, ~is_class)
                inner, outer = (predictions[where, index].double() for where in rows)
                ranked = mannwhitneyu(inner.numpy(), outer.numpy(), method="asymptotic")
                areas.append(ranked.statistic / (count * (len(labels) - count)))
        return float(np.mean(areas)) if areas else 0.0


class VolumeClassification(RankedClassification):
    """One class for a volume."""

    name = "volume-classification"
    head = "image-classification"
    needs = Needs(volume=True, target="class")


class ResponseSelection(RankedClassification):
    """A second text that answers the first, or not; most do not, so accuracy says nothing."""

    name = "response-selection"
    needs = Needs((2, 3))
    fewest_held = 2 * (WRONG_PAIRS + 1)
    wrong: ClassVar[int] = WRONG_PAIRS  # beside every right one

    def prepare(self, examples: Examples) -> Examples:
        """Call the pairs right ones; wrong ones come later, once data is held out."""
        classes = ("other response", "right response")
        return replace(examples, targets=[1] * len(examples), labels=Classes(classes, (0, 1)))

    def expand(self, examples: Examples, seed: int) -> Examples:
        """Add pairs of each first text with second texts of others, as class 0.

        A third text stays with the first.
        """
        (first, second, *further), count = examples.texts, self.wrong
        distinct = list(dict.fromkeys(second))
        if len(distinct) <= count:
            raise DataError(
                f"`{examples.name}` has {len(distinct)} different second texts, too few to draw "
                f"{count} wrong ones",
                hint="give more pairs",
            )
        wrong = others(places_of(second, distinct), count, len(distinct), seed).flatten()
        contexts, *others_again = (
            column + [text for text in column for _ in range(count)] for column in (first, *further)
        )
        responses = second + [distinct[index] for index in wrong.tolist()]
        targets = [1] * len(first) + [0] * (count * len(first))
        return replace(examples, texts=(contexts, responses, *others_again), targets=targets)


class Pretraining(ResponseSelection):
    """Masked words, and whether the second text follows the first, as BERT is pretrained.

    Both are cross-entropies; that of an example's words is their mean.
    """

    name = "pretraining"
    head = "pretraining"
    validated = "loss"
    wrong = 1
    fewest_held = 4

    def loss(self, outputs: Observed, batch: Batch) -> Tensor:
        words = batch["words"]
        rows, places = (words != IGNORED).nonzero(as_tuple=True)
        logits = outputs.output.prediction_logits.float()
        if logits.dim() == 3:  # of all words, since the model does not say what predicts them
            logits = logits[rows, places]
        each = cross_entropy(logits, words[rows, places], reduction="none")
        counts = torch.bincount(rows, minlength=len(words)).clamp_min(1)
        segments = outputs.output.seq_relationship_logits.float()
        # Class 0 is that of a text that follows.
        follows = cross_entropy(segments, 1 - batch["labels"], reduction="sum")
        return (each / counts[rows]).sum() + follows


class Regression(TrainingTask):
    """A score for one or two texts, read together."""

    name = "regression"
    head: Head | None = "regression"
    needs = Needs((1, 2), target="score")
    validated = "spearman"

    def loss(self, outputs: Observed, batch: Batch) -> Tensor:
        return (self.predictions(outputs, batch) - batch["labels"]).square().sum()

    def predictions(self, outputs: Observed, batch: Batch) -> Tensor:
        return _logits(outputs).squeeze(-1)

    def score(self, predictions: Tensor, labels: Tensor) -> float:
        """Spearman's rank correlation; 0 where scores or predictions are constant."""
        if min(float(values.max() - values.min()) for values in (predictions, labels)) == 0.0:
            return 0.0
        return float(spearmanr(predictions.numpy(), labels.numpy()).statistic)


class Similarity(Regression):
    """A score for two texts, as the cosine of their embeddings; scores are scaled to 0 to 1."""

    name = "sts"
    head = None
    needs = Needs((2, 2), target="score")

    def prepare(self, examples: Examples) -> Examples:
        """Scale the scores of each source by itself."""
        scores = torch.tensor(examples.targets, dtype=torch.float64)
        low, high = scores.aminmax()
        scaled = (scores - low) / (high - low).clamp_min(1e-12)
        return replace(examples, targets=scaled.tolist())

    def predictions(self, outputs: Observed, batch: Batch) -> Tensor:
        """Cosines of the rows 2 i and 2 i + 1."""
        rows = embedded(self.sentences, batch, outputs)
        first, second = rows.unflatten(0, (-1, 2)).unbind(1)
        return (first * second).sum(-1)


class Forecasting(Regression):
    """Continuation of a series, by squared error; validated by the mean absolute error."""

    name = "forecasting"
    head = "forecasting"
    needs = Needs(window=(0, 0))  # of the size that the model was made for
    validated = "mae"

    def predictions(self, outputs: Observed, batch: Batch) -> Tensor:
        """Forecasts.  # (examples, horizon, variables)."""
        return outputs.output.prediction_outputs.float()

    def score(self, predictions: Tensor, labels: Tensor) -> float:
        return float((predictions - labels).abs().double().mean())


class CausalLM(TrainingTask):
    """The next token; labels are already shifted."""

    name = "causal-lm"
    head: Head | None = "causal-lm"
    needs = Needs((1, 1))

    def loss(self, outputs: Observed, batch: Batch) -> Tensor:
        logits, labels = _logits(outputs).flatten(0, 1), batch["labels"].flatten()
        return cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)


class MaskedLM(CausalLM):
    """Tokens that were masked."""

    name = "masked-lm"
    head = "masked-lm"


class Seq2Seq(CausalLM):
    """A text made of another one: the next token of the target, padding left out."""

    name = "seq2seq"
    head = "seq2seq"
    needs = Needs((2, 2), generates=True)


TASKS: dict[str, type[TrainingTask]] = {
    kind.name: kind
    for kind in (
        Classification,
        ResponseSelection,
        Pretraining,
        Regression,
        Similarity,
        MaskedLM,
        CausalLM,
        Seq2Seq,
        ImageClassification,
        VolumeClassification,
        Forecasting,
    )
}
"""All tasks by name."""


def _logits(outputs: Observed) -> Tensor:
    assert outputs.logits is not None  # the head was asked for when the model was loaded
    return outputs.logits.float()


def masked(ids: Tensor, special: Tensor, mask_token: int, words: int, seed: list[int]) -> Batch:
    """Mask tokens as BERT does: of 15 % chosen, 80 % by the mask, 10 % by any of `words`."""
    rng = np.random.default_rng(seed)
    draw = torch.from_numpy(rng.random(len(ids)))
    chosen = (draw < 0.15) & ~special
    if not chosen.any() and not special.all():
        chosen[int(torch.where(special, 2.0, draw).argmin())] = True
    how = torch.from_numpy(rng.random(len(ids)))
    anything = torch.from_numpy(rng.integers(0, words, len(ids)))
    changed = torch.where(how < 0.8, mask_token, ids)
    changed = torch.where(how >= 0.9, anything, changed)
    labels = torch.where(chosen, ids, IGNORED)
    return {"input_ids": torch.where(chosen, changed, ids), "labels": labels}
