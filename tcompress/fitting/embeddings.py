"""Fits of word embeddings, weighted by how often words occur.

A table is a weight whose input is one word at a time, so that the moments of its input are the
frequencies of words: rows are weighted by their square roots. Calibration texts hold few of the
words that a model knows. Unseen words share a smoothed estimate: Good and Turing put it at the
share of words that were seen once, and it is spread over all words alike.

Reference: Good (1953), The population frequencies of species; Chen et al. (2018), GroupReduce
(arXiv:1806.06950), weighs rows by frequency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError, SourceError
from tcompress.fitting.layer_fits import WIDER, BlockResult, FittedLayer
from tcompress.linalg.moments import is_finite, relative_error
from tcompress.models import SourceModel, read_finite
from tcompress.planning.costs import path_of
from tcompress.planning.entries import LayerPlan
from tcompress.planning.sites import tied_to
from tcompress.structures import Target, structure
from tcompress.structures.base import LooksUp

EMBEDDINGS = "embeddings"  # name of what is fitted before all blocks

LEAST = 0.01  # share of the weight that is spread over all words, at least

_INPUTS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}


def fit_embeddings(
    source: SourceModel,
    entries: Sequence[LayerPlan],
    data: CalibrationData,
    dtype_of: Callable[[LayerPlan], torch.dtype],
    device: torch.device,
) -> BlockResult:
    """Fit all tables of a plan."""
    result = BlockResult(EMBEDDINGS, {}, {})
    for entry in entries:
        weight = read_table(source, entry, device)
        words = len(weight)
        counts = [count_words(data, words, held_out=held).to(device) for held in (False, True)]
        result.layers[entry.key] = fit_table(entry, weight, counts[0], counts[1], dtype_of(entry))
    return result


def read_table(source: SourceModel, entry: LayerPlan, device: torch.device) -> Tensor:
    """Read a table, and make sure that heads which are stored apart are the same."""
    name = path_of(source, entry)
    path, keymap = name.removesuffix(f".{entry.parameter}"), source.keymap
    weight = read_finite(source.store, keymap, name, device)
    for tied in tied_to(source, path):
        head = f"{tied}.weight"
        if keymap.sources(head).keys != keymap.sources(name).keys and not torch.equal(
            read_finite(source.store, keymap, head, device), weight
        ):
            raise SourceError(
                f"the config ties `{tied}` to `{path}`, but the checkpoint stores both, and they "
                "differ",
                "set `tie_word_embeddings` to false in `config.json`, or leave the word embedding "
                "as it is",
            )
    return weight


def count_words(data: CalibrationData, words: int, *, held_out: bool) -> Tensor:
    """Count how often each word occurs in calibration data, padding left out.  # (words,)."""
    counts = torch.zeros(words, dtype=torch.float64)
    for batch in (data.batches[i] for i in (sorted(data.holdout) if held_out else data.fitted)):
        for name, mask_name in _INPUTS.items():
            ids, mask = batch.get(name), batch.get(mask_name)
            if ids is None:
                continue
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
    exact = weight.double()
    scales = (frequencies(counts) * len(counts)).sqrt()
    scaled = exact * scales[:, None]
    assert isinstance(kind, LooksUp)  # no other is planned for a table
    fitted = kind.fit(Target(scaled, None), layout)
    unscaled = kind.scale_rows(fitted, 1 / scales, layout)
    if unscaled is None:  # its rows cannot be weighted afterwards, so they all count alike
        unscaled = kind.fit(Target(exact, None), layout)
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in unscaled.items()}
    if not all(map(is_finite, stored.values())):
        hint = f"{WIDER}, or leave the word embedding as it is"
        raise FitError(f"the fit of `{entry.name}` is not finite in {dtype}", hint)
    dense = kind.dense({name: tensor.double() for name, tensor in stored.items()}, layout)
    wrong, norm = (exact - dense).square().sum(1), exact.square().sum(1)
    weights = {"calibration": frequencies(counts)}
    if bool(held_out.any()):
        weights["held_out"] = held_out
    errors = {  # of the vectors that are looked up
        kind: relative_error(float(word_weights @ wrong), float(word_weights @ norm))
        for kind, word_weights in weights.items()
    }
    return FittedLayer({f"tc_{name}": tensor for name, tensor in stored.items()}, errors)
