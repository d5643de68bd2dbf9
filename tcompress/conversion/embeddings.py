"""Fits tables of word embeddings: what counts is how often a word occurs.

A table is a weight whose input is one word at a time, so that the moments of its input are the
frequencies of words: rows are weighted by their square roots. Calibration texts hold few of the
words that a model knows. As much weight as words that were never seen have in text, which Good
and Turing put at the share of words that were seen once, is shared out over all words alike.

Reference: Good (1953), The population frequencies of species; Chen et al. (2018), GroupReduce
(arXiv:1806.06950), weighs rows by frequency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tcompress.calibrate.data import CalibrationData
from tcompress.conversion.blocks import BlockResult
from tcompress.conversion.fit import WIDER, FittedLayer
from tcompress.errors import FitError, SourceError
from tcompress.integration.build import fill
from tcompress.linalg.moments import relative_error
from tcompress.planning.embeddings import tied_to
from tcompress.planning.entries import LayerPlan
from tcompress.source import SourceModel, read_finite
from tcompress.structures import Target, structure
from tcompress.structures.capabilities import LooksUp
from tcompress.structures.embedding import StructuredEmbedding

EMBEDDINGS = "embeddings"
"""Name of what is fitted before all blocks."""

LEAST = 0.01  # share of the weight that all words have alike, at least

_INPUTS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}


def fit_embeddings(
    source: SourceModel,
    entries: Sequence[LayerPlan],
    data: CalibrationData,
    dtype_of: Callable[[LayerPlan], torch.dtype],
    device: torch.device,
) -> BlockResult:
    """Fits all tables of a plan.

    Args:
        source: The dense model.
        entries: Planned tables.
        data: Calibration data.
        dtype_of: Dtype in which a table is stored.
        device: Where to compute.

    Raises:
        FitError: A table is not finite, or a fit failed.
        SourceError: An output head is stored that is not the table to which the model ties it.
    """
    result = BlockResult(EMBEDDINGS, {}, {})
    for entry in entries:
        weight = read_table(source, entry).to(device)
        counts = [
            count_words(data, len(weight), held_out=held).to(device) for held in (False, True)
        ]
        result.layers[f"{entry.name}.{entry.parameter}"] = fit_table(
            entry, weight, counts[0], counts[1], dtype_of(entry)
        )
    return result


def read_table(source: SourceModel, entry: LayerPlan) -> Tensor:
    """Reads a table, and makes sure that heads which are stored apart are the same.

    Raises:
        SourceError: One is not.
    """
    path = source.keymap.runtime_name(entry.name) or entry.name
    weight = read_finite(source.store, source.keymap, f"{path}.{entry.parameter}")
    own = source.keymap.sources(f"{path}.{entry.parameter}").keys
    for other in tied_to(source, path):
        keys = source.keymap.sources(f"{other}.weight").keys
        if keys != own and not torch.equal(
            read_finite(source.store, source.keymap, f"{other}.weight"), weight
        ):
            raise SourceError(
                f"the config ties `{other}` to `{path}`, but the checkpoint stores both, and they "
                "differ",
                hint="set `tie_word_embeddings` to false in `config.json`, or leave the word "
                "embedding as it is",
            )
    return weight


def count_words(data: CalibrationData, words: int, *, held_out: bool) -> Tensor:
    """Counts how often each word occurs in calibration data, padding left out.  # (words,)."""
    chosen = frozenset(data.holdout)
    counts = torch.zeros(words, dtype=torch.float64)
    for index, batch in enumerate(data.batches):
        if (index in chosen) != held_out:
            continue
        for name, mask_name in _INPUTS.items():
            ids, mask = batch.get(name), batch.get(mask_name)
            if ids is None:
                continue
            seen = ids.flatten() if mask is None else ids[mask.bool()]
            counts += torch.bincount(seen.cpu(), minlength=words)[:words]
    return counts


def frequencies(counts: Tensor) -> Tensor:
    """Estimates how often each word will occur; all are above zero and add up to one."""
    total = counts.sum().clamp_min(1.0)
    unseen = float((counts == 1).sum() / total) if bool(counts.any()) else 1.0
    unseen = min(max(unseen, LEAST), 1.0)
    return (1 - unseen) * counts / total + unseen / len(counts)


def fit_table(
    entry: LayerPlan, weight: Tensor, counts: Tensor, held_out: Tensor, dtype: torch.dtype
) -> FittedLayer:
    """Fits one table.

    Args:
        entry: Its plan.
        weight: The dense table.  # (words, width)
        counts: How often words occur in the data to fit to.  # (words,)
        held_out: How often they occur in what is held out.  # (words,)
        dtype: Dtype to store in.

    Raises:
        FitError: The fit is not finite.
    """
    layout = entry.parts[0].terms[0]
    kind = structure(layout.structure)
    exact = weight.double()
    scales = (frequencies(counts) * len(counts)).sqrt()
    scaled = exact * scales[:, None]
    assert isinstance(kind, LooksUp)  # no other is planned for a table
    fitted = kind.fit(Target(scaled, None), layout)
    found = kind.scale_rows(fitted, 1 / scales, layout)
    if found is None:  # its rows cannot be weighted afterwards, so they all count alike
        found = kind.fit(Target(exact, None), layout)
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in found.items()}
    if not all(bool(torch.isfinite(tensor).all()) for tensor in stored.values()):
        raise FitError(
            f"the fit of `{entry.name}` is not finite in {dtype}",
            f"{WIDER}, or leave the word embedding as it is",
        )
    dense = kind.dense({name: tensor.double() for name, tensor in stored.items()}, layout)
    errors = {"calibration": _error(exact, dense, frequencies(counts))}
    if bool(held_out.any()):
        errors["held_out"] = _error(exact, dense, held_out)
    return FittedLayer({f"tc_{name}": tensor for name, tensor in stored.items()}, errors)


def _error(weight: Tensor, dense: Tensor, counts: Tensor) -> float:
    """Squared error over squared norm of the vectors that are looked up."""
    wrong, norm = (weight - dense).square().sum(1), weight.square().sum(1)
    return relative_error(float(counts @ wrong), float(counts @ norm))


def installed(entry: LayerPlan, fitted: FittedLayer, device: torch.device) -> StructuredEmbedding:
    """Builds a fitted table, to run the model on."""
    table = StructuredEmbedding(entry.parts, dtype=torch.float32, device=device)
    fill(table, entry, fitted.tensors)
    return table.requires_grad_(False).eval()
