"""Channels of what is multiplied made more alike, where eight bits then lose less.

A product reads activations with one scale for all of them, and a few large channels take the steps
away from the others. Dividing a channel by a number and multiplying its weights by it changes no
product, but both errors (SmoothQuant, arXiv:2211.10438). How far to go is tried for each input of
products, on activations of real texts or pictures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tcompress.exports.onnx_quantize import LARGEST_STEP, Array, Graph, rounded, split_gemm

STRENGTHS = (0.5, 0.6, 0.75)
"""Exponents of the range of a channel, 1 less those of its weights."""
ROWS = 512
"""Tokens that are looked at."""
LEAST_GAIN = 0.3
"""Share of the squared error by which it has to fall where it costs an operator."""


def smooth(graph: Graph, activations: Mapping[str, Array]) -> int:
    """Make channels more alike wherever that pays, in a graph in float32, which is changed.

    `activations` are rows of inputs of products by name.  # (rows, channels). Returns the number of
    inputs that were changed.
    """
    groups: dict[str, list[Any]] = defaultdict(list)
    for node in graph.products(2):
        groups[node.input[0]].append(node)
    producers = {node.output[0]: node for node in graph.products(2)}
    changed = 0
    for name, nodes in groups.items():
        producer = producers.get(name)
        readers = [node for node in graph.nodes if name in node.input]
        folds = producer is not None and len(readers) == len(nodes)
        weights = [_weight(graph, node) for node in nodes]
        scales = _best(activations[name], weights, 0.0 if folds else LEAST_GAIN)
        if scales is None:
            continue
        changed += 1
        for node in nodes:
            graph.set_weight(node, _weight(graph, node) * scales[:, None])
        if producer is not None and folds:
            graph.set_weight(producer, _weight(graph, producer) / scales)
        else:
            graph.scale(name, nodes, 1 / scales)
    return changed


def _weight(graph: Graph, node: Any) -> Array:
    weight = graph.weight(node.input[1])
    assert weight is not None  # of `products`
    return weight


def _best(rows: Array, weights: Sequence[Array], gain: float) -> Array | None:
    """Find the scales of channels with the least error; None where none gains so much."""
    exact = [rows @ weight for weight in weights]
    norms = [max(float(np.square(item).sum()), 1e-30) for item in exact]

    def error(scales: Array) -> float:
        given = _quantised(rows / scales)
        products = (given @ _stepped(weight * scales[:, None]) for weight in weights)
        pairs = zip(products, exact, norms, strict=True)
        return sum(float(np.square(one - two).sum()) / norm for one, two, norm in pairs)

    ranges = np.maximum(np.abs(rows).max(0), 1e-6)
    heights = np.maximum(np.max([np.abs(weight).max(1) for weight in weights], axis=0), 1e-6)
    least, best = (1 - gain) * error(np.ones_like(ranges)), None
    for strength in STRENGTHS:
        scales = ranges**strength / heights ** (1 - strength)
        scales = (scales / np.exp(np.log(scales).mean())).astype(np.float32)
        if (found := error(scales)) < least:
            least, best = found, scales
    return best


def _quantised(x: Array) -> Array:
    """Round as `DynamicQuantizeLinear` does: 256 steps from the least to the largest, with 0."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    step = (high - low) / 255 or 1.0
    zero = round(-low / step)
    return (np.clip(np.rint(x / step) + zero, 0, 255) - zero).astype(np.float32) * np.float32(step)


def _stepped(weight: Array) -> Array:
    steps, scales = rounded(weight, axis=0, largest=LARGEST_STEP)
    return steps * scales


def activations_of(path: Path, batches: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Run a file on samples, and draw rows of what its products read.  # (rows, channels)."""
    import onnx
    import onnxruntime

    graph = Graph.open(path)
    split_gemm(graph)
    names = list(dict.fromkeys(node.input[0] for node in graph.products(2)))
    if not names:  # a session would take it for all outputs
        return {}
    outputs = {item.name for item in graph.model.graph.output}
    model = graph.stored()
    for name in names:
        if name not in outputs:
            value = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            model.graph.output.append(value)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    draw = np.random.default_rng(0)
    found: dict[str, list[Array]] = defaultdict(list)
    for batch in batches:
        given = {name: np.asarray(value) for name, value in batch.items()}
        for name, value in zip(names, session.run(names, given), strict=True):
            rows = value.reshape(-1, value.shape[-1])
            most = -(-ROWS // len(batches))
            found[name].append(rows[draw.permutation(len(rows))[:most]])
    return {name: np.concatenate(rows) for name, rows in found.items()}
