"""Kronecker attention and grid models of ours compute what the reference of their paper does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageClassification, AutoModelForTimeSeriesPrediction

from tcompress.attention.kronecker import KroneckerLayout, mix_grid
from tcompress.own_models.configs import TCompressGridConfig
from tcompress.own_models.grid import Convolutions, rotations
from tcompress.own_models.text import turned
from tests.reference import hot, lprod
from tests.reference.copied import CLOSE, array, drawn, linear, model_of, norm

GRID, HEADS, WIDTH = (2, 3, 2), 2, 4


def _order(size: int, axes: int) -> list[int]:
    """Features of a head of ours in the order of "split": ours pairs j with j + size / 2."""
    half, each = size // 2, size // 2 // axes
    pairs = [axis * each + pair for axis in range(axes) for pair in range(each)]
    return [feature for pair in pairs for feature in (pair, pair + half)]


def test_rotations_on_all_axes() -> None:
    """The reading "split": the features of a head in another order, which no score sees."""
    config = TCompressGridConfig(
        input_size=GRID, patch_size=(1, 1, 1), hidden_size=24, num_attention_heads=2,
        positions="rotary",
    )  # fmt: skip
    q, k, v = (drawn(1, HEADS, 12, 12, seed=seed) for seed in range(3))
    angles = rotations(config, torch.device("cpu"), torch.float64)
    layout = KroneckerLayout(heads=HEADS, key_heads=HEADS, head_dim=12, grid=GRID, pool="sum")
    tensors = {"scale": torch.zeros(3, HEADS, dtype=torch.float64)}
    ours = mix_grid(turned(q, angles), turned(k, angles), v, None, tensors, layout)

    order = _order(12, 3)
    for head in range(HEADS):
        grids = [array(x[0, head]).reshape(*GRID, 12) for x in (q, k, v)]
        mixed = grids[2]
        how: Any = {"rotary_axes": (0, 1, 2), "rotary": "split"}
        for axis, s in hot.factors(grids[0][..., order], grids[1][..., order], **how).items():
            mixed = hot.mode_product(mixed, s, axis + 1)

        np.testing.assert_allclose(array(ours[0, head]), mixed.reshape(12, 12), **CLOSE)


def _block(layer: Any, order: list[int]) -> dict[str, Any]:
    """A block of the grid model as `block` takes it, features of queries and keys in an order."""
    attention, mlp, size = layer.self_attn, layer.mlp, len(order)
    projections = {name: linear(getattr(attention, name + "_proj")) for name in "qkvo"}
    heads: list[dict[str, np.ndarray]] = []
    for first in range(0, len(projections["o"][0]), size):
        columns = first + np.array(order)
        head: dict[str, np.ndarray] = {"o": projections["o"][0][first : first + size]}
        for name, chosen in (("q", columns), ("k", columns), ("v", first + np.arange(size))):
            weight, bias = projections[name]
            head[name], head["b" + name] = weight[:, chosen], bias[chosen]
        heads.append(head)
    heads[0]["bo"] = projections["o"][1]
    w1, b1 = linear(mlp.fc1)
    w2, b2 = linear(mlp.fc2)
    norms = {"norm1": norm(layer.attention_norm), "norm2": norm(layer.mlp_norm)}
    return {"heads": heads, "w1": w1, "b1": b1, "w2": w2, "b2": b2, **norms}


def _states(model: Any, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Blocks (pre-norm) and the last norm, with rotations along axes, as the model has them.

    Queries, keys and random directions in the order of features that the reference rotates in.
    """
    config, epsilon = model.config, {"epsilon": model.config.layer_norm_eps}
    order = _order(config.hidden_size // config.num_attention_heads, len(axes))
    for layer in model.model.layers:
        replacement = layer.self_attn.tc_attn
        how: dict[str, Any] = {"rotary_axes": axes, "rotary": "split"}
        constants = replacement.kind.constants(replacement.layout)
        if constants:
            w = array(constants["directions"])[:, order]
            how["features"] = lambda y, w=w: hot.smreg_features(y, w)
        weights = _block(layer, order)
        x = hot.block(x, weights, lprod.gelu, norm="pre", **epsilon, **how)
    return hot.layer_norm(x, **norm(model.model.norm), **epsilon)


COMMON: dict[str, Any] = {
    "model_type": "tcompress_grid", "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 10, "hidden_dropout_prob": 0.0, "positions": "rotary",
}  # fmt: skip
SOFTMAX: dict[str, Any] = {"name": "hot", "pool": "sum", "scale": "fixed"}
PUBLISHED: dict[str, Any] = {**SOFTMAX, "kernel": "smreg"}


@pytest.mark.parametrize("attention", [SOFTMAX, PUBLISHED], ids=["softmax", "published"])
def test_forecasting(tmp_path: Path, attention: dict[str, Any]) -> None:
    """A whole model: patches of 4, two blocks, flattened, one linear layer.

    As published with sums, SMREG features and rotations along time, which sums of variates see too
    (the reading "split").
    """
    sizes: dict[str, Any] = {
        **COMMON, "class": "TCompressGridForForecasting", "input_size": [3, 16], "horizon": 2,
        "patch_size": [1, 4], "hidden_size": 8, "instance_norm": False, "rotary_axes": [1],
    }  # fmt: skip
    model = model_of(tmp_path, AutoModelForTimeSeriesPrediction, {"attention": attention}, **sizes)
    series = drawn(1, 16, 3, seed=0)
    with torch.no_grad():
        forecast = array(model(series).prediction_outputs[0])
    weight, bias = linear(model.model.embeddings.projection)
    x = _states(model, hot.time_patches(array(series[0]), weight.T, bias), (1,))
    weight, bias = linear(model.head)
    expected = np.stack([row.reshape(-1) @ weight + bias for row in x], axis=1)
    np.testing.assert_allclose(forecast, expected, **CLOSE)


def test_classification_of_volumes(tmp_path: Path) -> None:
    """A whole model as published, rotations along three axes, the mean of the patches."""
    sizes: dict[str, Any] = {
        **COMMON, "class": "TCompressGridForImageClassification", "input_size": [4, 6, 4],
        "patch_size": [2, 2, 2], "hidden_size": 12, "num_labels": 3,
    }  # fmt: skip
    model = model_of(tmp_path, AutoModelForImageClassification, {"attention": PUBLISHED}, **sizes)
    volume = drawn(1, 1, 4, 6, 4, seed=0)
    with torch.no_grad():
        logits = array(model(volume).logits[0])
    weight, bias = linear(model.model.embeddings.projection)
    image = array(volume[0].movedim(0, -1))
    x = hot.patches(image, weight.T.reshape(12, 2, 2, 2, 1), bias, 2)
    x = _states(model, x, (0, 1, 2))
    weight, bias = linear(model.classifier)
    np.testing.assert_allclose(logits, hot.classify(x, "average", weight.T, bias), **CLOSE)


def test_convolutions_make_the_published_grid() -> None:
    """28 x 28 x 28 voxels become 7 x 7 x 7 places."""
    config = TCompressGridConfig(stem="convolution", hidden_size=8)
    states = Convolutions(config)(torch.zeros(1, 1, *config.input_size))
    assert tuple(states.shape[1:]) == hot.image_shape(config.input_size, 8)
