"""Fits of word embeddings, weighted by how often words occur.

A table is a weight whose input is one word at a time, so that the moments of its input are the
frequencies of words: rows are weighted by their square roots. Calibration texts hold few of the
words that a model knows. Unseen words share a smoothed estimate: Good and Turing put it at the
share of words that were seen once, and it is spread over all words alike.

Reference: Good (1953), The population frequencies of species; Chen et al. (2018), GroupReduce
(arXiv:1806.06950), weighs rows by frequency.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError
from tcompress.fitting.layer_fits import WIDER, FittedLayer
from tcompress.linalg.moments import is_finite, naming, relative_error
from tcompress.planning.entries import LayerPlan
from tcompress.structures import Target, structure
from tcompress.structures.base import LooksUp

EMBEDDINGS = "embeddings"  # name of what is fitted before all blocks

LEAST = 0.01  # share of the weight that is spread over all words, at least


def count_words(data: CalibrationData, words: int, *, held_out: bool) -> Tensor:
    """Count how often each word occurs in calibration data, padding left out.  # (words,)."""
    counts = torch.zeros(words, dtype=torch.float64)
    for batch in (data.batches[index] for index in (data.holdout if held_out else data.fitted)):
        for side in ("", "decoder_"):
            ids, mask = batch.get(f"{side}input_ids"), batch.get(f"{side}attention_mask")
            if ids is not None:
                words_read = ids.flatten() if mask is None else ids[mask.bool()]
                counts += torch.bincount(words_read.cpu(), minlength=words)[:words]
    return counts


def frequencies(counts: Tensor) -> Tensor:
    """Estimate how often each word will occur; all are above zero and add up to one."""
    total = counts.sum().clamp_min(1.0)
    unseen = float((counts == 1).sum() / total) if bool(counts.any()) else 1.0
    unseen = min(max(unseen, LEAST), 1.0)
    return (1 - unseen) * counts / total + unseen / len(counts)


def fit_table(
    entry: LayerPlan, weight: Tensor, counts: Tensor, held_out: Tensor, dtype: torch.dtype
) -> FittedLayer:
    """Fit one table, weighted by how often words occur in the data to fit to."""
    layout = entry.parts[0].terms[0]
    kind = structure(layout.structure)
    exact, shares = weight.double(), frequencies(counts)
    scales = (shares * len(counts)).sqrt()
    assert isinstance(kind, LooksUp)  # no other is planned for a table
    with naming(f"the fit of `{entry.name}` failed", "leave the word embedding as it is"):
        fitted = kind.fit(Target(exact * scales[:, None], None), layout)
        unscaled = kind.scale_rows(fitted, 1 / scales, layout)
        if unscaled is None:  # its rows cannot be weighted afterwards, so they all count alike
            unscaled = kind.fit(Target(exact, None), layout)
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in unscaled.items()}
    if not all(map(is_finite, stored.values())):
        hint = f"{WIDER}, or leave the word embedding as it is"
        raise FitError(f"the fit of `{entry.name}` is not finite in {dtype}", hint)
    dense = kind.dense({name: tensor.double() for name, tensor in stored.items()}, layout)
    wrong, norm = (exact - dense).square().sum(1), exact.square().sum(1)
    errors = {  # of the vectors that are looked up
        name: relative_error(float(weights @ wrong), float(weights @ norm))
        for name, weights in (("calibration", shares), ("held_out", held_out))
        if bool(weights.any())
    }
    return FittedLayer({f"tc_{name}": tensor for name, tensor in stored.items()}, errors)
