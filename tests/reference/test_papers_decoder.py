"""An encoder with a decoder in L-product slices computes what the reference of the paper does."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM

from tests.reference import lprod
from tests.reference.copied import CLOSE, array, model_of, sliced_norm, slices

P, HEADS, SLICED = 4, 8, 2
"""Slices, heads of all slices, and of each."""
SIZES: dict[str, Any] = {
    "model_type": "bart", "class": "BartForConditionalGeneration", "vocab_size": 20, "d_model": 32,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 16,
}  # fmt: skip


def _attention(layer: Any, z: np.ndarray) -> dict[str, np.ndarray]:
    weights: dict[str, np.ndarray] = {}
    for name in ("q", "k", "v", "out"):
        pair = slices(getattr(layer, f"{name}_proj"), z, returns=name == "out")
        weights[name[0]], weights["b" + name[0]] = pair
    return weights


def _layer(layer: Any, z: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """What layers of both kinds have, and the cross-attention of a decoder's."""
    w1, b1 = slices(layer.fc1, z, returns=False)
    w2, b2 = slices(layer.fc2, z, returns=True)
    weights = {
        "attention": _attention(layer.self_attn, z),
        "norm1": sliced_norm(layer.self_attn_layer_norm, P),
        "feed_forward": {"w1": w1, "b1": b1, "w2": w2, "b2": b2},
    }
    last = sliced_norm(layer.final_layer_norm, P)
    if not hasattr(layer, "encoder_attn"):
        return {**weights, "norm2": last}
    cross = sliced_norm(layer.encoder_attn_layer_norm, P)
    return {**weights, "cross": _attention(layer.encoder_attn, z), "norm2": cross, "norm3": last}


def test_encoder_and_decoder(tmp_path: Path) -> None:
    """Definitions 18 and 20 and W_out, two layers each, with padding in what is read."""
    recipe = {"method": {"name": "lprod", "p": P}, "positions": "linear", "norm": "tensor"}
    model = model_of(tmp_path, AutoModelForSeq2SeqLM, recipe, **SIZES)
    z = lprod.dct_matrix(P)
    seen = torch.tensor([[1, 1, 1, 1, 0]])
    source, target = torch.arange(3, 8)[None], torch.arange(4, 10)[None]
    with torch.no_grad():
        output = model(
            source, attention_mask=seen, decoder_input_ids=target, output_hidden_states=True
        )
    expected = lprod.unfold(lprod.positions(16, 32 // P, lprod.frequency_scales("linear", P)))
    for stack in (model.model.encoder, model.model.decoder):  # (9) and (11), at a size of ours
        table = array(stack.embed_positions.weight)[2:]
        size = np.linalg.norm(table) / np.linalg.norm(expected)
        np.testing.assert_allclose(table, size * expected, rtol=1e-5, atol=1e-7)  # kept in float32
    mask = seen.numpy().astype(bool)
    encoded = lprod.fold(array(output.encoder_hidden_states[0][0]), P)
    for layer in model.model.encoder.layers:
        weights, rows = _layer(layer, z), np.repeat(mask, 5, axis=0)
        encoded = lprod.encoder_layer(encoded, weights, SLICED, z, mask=rows)
    ours = array(output.encoder_last_hidden_state[0])
    np.testing.assert_allclose(ours[:4], lprod.unfold(encoded)[:4], **CLOSE)
    decoded = lprod.fold(array(output.decoder_hidden_states[0][0]), P)
    for layer in model.model.decoder.layers:
        weights, rows = _layer(layer, z), np.repeat(mask, 6, axis=0)
        decoded = lprod.decoder_layer(decoded, encoded, weights, SLICED, z, encoded_mask=rows)
    logits = lprod.unfold(decoded) @ array(model.lm_head.weight).T
    bias = array(model.final_logits_bias[0])  # BART's own, zeros that are not trained
    np.testing.assert_allclose(array(output.logits[0]), logits + bias, **CLOSE)
