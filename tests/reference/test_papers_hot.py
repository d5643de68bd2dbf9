"""Kronecker attention and grid models of ours compute what the reference of their paper does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTimeSeriesPrediction

from tcompress.attention.kronecker import KroneckerLayout, mix_grid
from tcompress.attention.replacement import replacement_named
from tcompress.own_models.configs import TCompressGridConfig
from tcompress.own_models.grid import rotations
from tcompress.own_models.text import turned
from tests.reference import hot, lprod
from tests.reference.copied import CLOSE, array, drawn, linear, model_of, norm

GRID, HEADS, WIDTH = (2, 3, 2), 2, 4


def _layout(**form: Any) -> KroneckerLayout:
    return KroneckerLayout(heads=HEADS, key_heads=HEADS, head_dim=WIDTH, grid=GRID, **form)


def _mixed(q: Any, k: Any, v: Any, layout: KroneckerLayout) -> np.ndarray:
    """Ours, (heads, *grid, width)."""
    tensors = {"scale": torch.zeros(len(GRID), HEADS, dtype=torch.float64)}
    constants = replacement_named("kronecker").constants(layout)
    tensors |= {name: value.double() for name, value in constants.items()}
    return array(mix_grid(q, k, v, None, tensors, layout)[0]).reshape(HEADS, *GRID, WIDTH)


def _inputs() -> tuple[torch.Tensor, ...]:
    return tuple(0.5 * drawn(1, HEADS, 12, WIDTH, seed=seed) for seed in range(3))


def _reference(q: Any, k: Any, v: Any, **how: Any) -> np.ndarray:
    """Equations (7), or (10), and (9), a head at a time."""
    result = []
    for head in range(HEADS):
        grids = [array(x[0, head]).reshape(*GRID, WIDTH) for x in (q, k, v)]
        mixed = grids[2]
        for axis, s in hot.factors(grids[0], grids[1], **how).items():
            mixed = hot.mode_product(mixed, s, axis + 1)
        result.append(mixed)
    return np.stack(result)


@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_softmax(pool: Any) -> None:
    ours = _mixed(*_inputs(), _layout(pool=pool))
    np.testing.assert_allclose(ours, _reference(*_inputs(), pooling=pool), **CLOSE)


def test_smreg() -> None:
    """Performer's directions, of length sqrt(d), orthogonal in blocks, by (10) and (12)."""
    layout = _layout(kernel="smreg", features=6, pool="sum")
    directions = array(replacement_named("kronecker").constants(layout)["directions"])
    gram = directions @ directions.T
    np.testing.assert_allclose(gram[:4, :4], WIDTH * np.eye(4), atol=1e-5)  # drawn in float32
    np.testing.assert_allclose(np.diag(gram), np.full(6, WIDTH), atol=1e-5)
    ours = _mixed(*_inputs(), layout)
    expected = _reference(*_inputs(), features=lambda x: hot.smreg_features(x, directions))
    np.testing.assert_allclose(ours, expected, **CLOSE)


def test_rotations_on_all_axes() -> None:
    """The reading "split": the features of a head in another order, which no score sees."""
    config = TCompressGridConfig(
        input_size=GRID, patch_size=(1, 1, 1), hidden_size=24, num_attention_heads=2,
        positions="rotary",
    )  # fmt: skip
    q, k, v = (drawn(1, HEADS, 12, 12, seed=seed) for seed in range(3))
    angles = rotations(config, torch.device("cpu")).double()
    layout = KroneckerLayout(heads=HEADS, key_heads=HEADS, head_dim=12, grid=GRID, pool="sum")
    tensors = {"scale": torch.zeros(3, HEADS, dtype=torch.float64)}
    ours = mix_grid(turned(q, angles), turned(k, angles), v, None, tensors, layout)
    # Ours pairs j with j + 6; the two pairs of an axis are 2 axis and 2 axis + 1.
    order = [half + 2 * axis + pair for axis in range(3) for pair in range(2) for half in (0, 6)]
    for head in range(HEADS):
        grids = [array(x[0, head]).reshape(*GRID, 12) for x in (q, k, v)]
        mixed = grids[2]
        how: Any = {"rotary_axes": (0, 1, 2), "rotary": "split"}
        for axis, s in hot.factors(grids[0][..., order], grids[1][..., order], **how).items():
            mixed = hot.mode_product(mixed, s, axis + 1)
        # Angles of ours are made in float32.
        np.testing.assert_allclose(array(ours[0, head]), mixed.reshape(12, 12), atol=1e-5)


def _block(layer: Any, width: int, heads: int) -> dict[str, Any]:
    """A block of the grid model as `block` takes it."""
    size = width // heads
    attention, mlp = layer.self_attn, layer.mlp
    columns = [slice(h * size, (h + 1) * size) for h in range(heads)]
    found: list[dict[str, np.ndarray]] = [{} for _ in range(heads)]
    for name in "qkv":
        weight, bias = linear(getattr(attention, name + "_proj"))
        for head, part in zip(found, columns, strict=True):
            head[name], head["b" + name] = weight[:, part], bias[part]
    weight, bias = linear(attention.o_proj)
    for head, part in zip(found, columns, strict=True):
        head["o"] = weight[part]
    found[0]["bo"] = bias
    w1, b1 = linear(mlp.fc1)
    w2, b2 = linear(mlp.fc2)
    norms = {"norm1": norm(layer.attention_norm), "norm2": norm(layer.mlp_norm)}
    return {"heads": found, "w1": w1, "b1": b1, "w2": w2, "b2": b2, **norms}


@pytest.mark.parametrize("published", [False, True])
def test_forecasting(tmp_path: Path, published: bool) -> None:
    """A whole model: patches of 4, two blocks (pre-norm), flattened, one linear layer.

    As published with sums, SMREG features and rotations along time, which sums of variates see too
    (the reading "split").
    """
    width, heads, variates, steps, horizon = 8, 2, 3, 16, 2
    sizes: dict[str, Any] = {
        "model_type": "tcompress_grid", "class": "TCompressGridForForecasting",
        "input_size": [variates, steps], "patch_size": [1, 4], "horizon": horizon,
        "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": heads,
        "intermediate_size": 12, "instance_norm": False, "hidden_dropout_prob": 0.0,
        "positions": "rotary", "rotary_axes": [1],
    }  # fmt: skip
    attention = {"name": "hot", "pool": "sum", **({"kernel": "smreg"} if published else {})}
    model = model_of(tmp_path, AutoModelForTimeSeriesPrediction, {"attention": attention}, **sizes)
    series = drawn(1, steps, variates, seed=0)
    ours = []
    for layer in model.model.layers:
        replacement = layer.self_attn.tc_attn
        with torch.no_grad():
            replacement.scale.zero_()  # a sharpness that is learnt, beside the paper
        ours.append(replacement)
    with torch.no_grad():
        forecast = array(model(series).prediction_outputs[0])
    weight, bias = linear(model.model.embeddings.projection)
    x = hot.time_patches(array(series[0]), weight.T, bias)
    gelu = lprod.gelu
    for layer, replacement in zip(model.model.layers, ours, strict=True):
        how: dict[str, Any] = {"rotary_axes": (1,), "rotary": "split", "pairing": "half"}
        if published:
            w = array(replacement.kind.constants(replacement.layout)["directions"])
            how["features"] = lambda y, w=w: hot.smreg_features(y, w)
        x = hot.block(
            x, _block(layer, width, heads), gelu,
            norm="pre", epsilon=model.config.layer_norm_eps, **how,
        )  # fmt: skip
    last = norm(model.model.norm)
    x = hot.layer_norm(x, **last, epsilon=model.config.layer_norm_eps)
    weight, bias = linear(model.head)
    expected = np.stack([x[n].reshape(-1) @ weight + bias for n in range(variates)], axis=1)
    np.testing.assert_allclose(forecast, expected, rtol=1e-5, atol=1e-6)  # float32 angles
