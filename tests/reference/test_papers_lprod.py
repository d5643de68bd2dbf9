"""L-product models of ours compute what the reference of their paper does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from tcompress import linalg
from tcompress.hf.build import SliceNorm, slice_positions
from tests.reference import lprod
from tests.reference.copied import CLOSE, array, drawn, model_of, sliced_norm, slices

P, HEADS = 4, 8
SIZES: dict[str, Any] = {
    "model_type": "bert", "class": "BertModel", "vocab_size": 20, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 64,
    "max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["standard", "linear", "exponential", "harmonic"])
def test_positions(strategy: str) -> None:
    """Definition 13, the first token at 1."""
    ours = lprod.fold(array(slice_positions(7, 12, 3, strategy)), 3)
    alpha = lprod.frequency_scales(strategy, 3)
    np.testing.assert_allclose(ours, lprod.positions(7, 4, alpha), **CLOSE)


def test_norm_and_transform() -> None:
    """Definition 17; footnote 3."""
    layer = SliceNorm(12, 3, 1e-3, dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(drawn(12, seed=seed))
    x = drawn(5, 12, seed=2)
    weights = sliced_norm(layer, 3)
    expected = lprod.layer_norm(lprod.fold(array(x), 3), **weights, epsilon=1e-3)
    np.testing.assert_allclose(array(layer(x)), lprod.unfold(expected), **CLOSE)
    z = array(linalg.fixed_transform("dct", 5, 0))
    np.testing.assert_allclose(z, lprod.dct_matrix(5), **CLOSE)


def encoder_weights(layer: Any, z: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """A layer of BERT as `encoder_layer` takes it."""
    attention: dict[str, np.ndarray] = {}
    for name, projection in (
        ("q", layer.attention.self.query),
        ("k", layer.attention.self.key),
        ("v", layer.attention.self.value),
        ("o", layer.attention.output.dense),
    ):
        attention[name], attention["b" + name] = slices(projection, z, returns=name == "o")
    w1, b1 = slices(layer.intermediate.dense, z, returns=False)
    w2, b2 = slices(layer.output.dense, z, returns=True)
    return {
        "attention": attention,
        "feed_forward": {"w1": w1, "b1": b1, "w2": w2, "b2": b2},
        "norm1": sliced_norm(layer.attention.output.LayerNorm, P),
        "norm2": sliced_norm(layer.output.LayerNorm, P),
    }


def test_encoder(tmp_path: Path) -> None:
    """Definition 18 in two layers of a BERT, with heads inside of slices, and with padding."""
    method = {"name": "lprod", "p": P}
    recipe = {"method": method, "positions": "linear", "norm": "tensor"}
    model = model_of(tmp_path, AutoModel, recipe, **SIZES)
    z = lprod.dct_matrix(P)
    words = torch.arange(5)[None]
    seen = torch.tensor([[1, 1, 1, 1, 0]])
    with torch.no_grad():
        output = model(words, attention_mask=seen, output_hidden_states=True)
    x = lprod.fold(array(output.hidden_states[0][0]), P)
    mask = np.repeat(seen.numpy().astype(bool), 5, axis=0)
    for layer in model.encoder.layer:
        weights = encoder_weights(layer, z)
        x = lprod.encoder_layer(x, weights, HEADS // P, z, mask=mask, epsilon=1e-12)
    ours = array(output.last_hidden_state[0])
    np.testing.assert_allclose(ours[:4], lprod.unfold(x)[:4], **CLOSE)
