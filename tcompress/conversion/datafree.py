"""Fits of weights alone, one group of layers at a time."""

from __future__ import annotations

import torch

from tcompress.conversion.blocks import BlockResult
from tcompress.conversion.embeddings import read_table
from tcompress.conversion.fit import LayerMoments, fit_layers
from tcompress.conversion.outputs import Cluster, Outputs
from tcompress.conversion.shared import Banks
from tcompress.conversion.start import start_layers
from tcompress.source import read_finite


def fit_without_data(
    outputs: Outputs, cluster: Cluster, banks: Banks, device: torch.device
) -> BlockResult:
    """Fits layers to their weights, or draws them where the model begins at random.

    Args:
        outputs: What is written, and of which model.
        cluster: Layers that are fitted together.
        banks: What layers share.
        device: Where to compute.

    Raises:
        FitError: A weight holds NaN or infinity.
    """
    source = outputs.source
    weights, biases = [], {}
    for entry in cluster:
        path = outputs.runtime_name(entry)
        if entry.kind == "embedding":
            weight = read_table(source, entry)
        else:
            weight = read_finite(source.store, source.keymap, f"{path}.{entry.parameter}")
        weights.append(entry.matrix(weight).to(device))
        if entry.bias and entry.kind != "experts":
            biases[entry.name] = read_finite(source.store, source.keymap, f"{path}.bias")
    dtype = outputs.dtype_of(cluster[0])
    if source.seed is not None:
        fitted = start_layers(cluster, weights, dtype=dtype, banks=banks, seed=source.seed)
    else:
        moments = [[LayerMoments()] for _ in cluster]
        fitted = fit_layers(cluster, weights, moments, dtype=dtype, damping=0.0, banks=banks)
    keys = [f"{entry.name}.{entry.parameter}" for entry in cluster]
    return BlockResult("", dict(zip(keys, fitted, strict=True)), biases)
