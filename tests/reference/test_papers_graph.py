"""Graph attention and the papers' classifier compute what the references of TSA and TGA do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tcompress.attention.graph import GraphLayout
from tcompress.attention.replacement import replacement_named
from tcompress.attention.visibility import Visible
from tests.reference import tsa
from tests.reference.copied import CLOSE, array, drawn, linear, model_of

HEADS, WIDTH, TOKENS = 2, 4, 6
SIZES: dict[str, Any] = {
    "model_type": "tcompress_text", "class": "TCompressTextForSequenceClassification",
    "vocab_size": 12, "hidden_size": 8, "num_labels": 3, "classifier_size": 5,
}  # fmt: skip


@pytest.mark.parametrize("alpha", [None, (0.5, 1.5, -0.3)])
def test_filters(alpha: Any) -> None:
    """Equation (1) of TSA, with alpha = (1, 1) TGA's, by the eigendecomposition."""
    order = 2 if alpha is None else len(alpha)
    layout = GraphLayout(
        heads=HEADS, key_heads=HEADS, head_dim=WIDTH, filter_order=order, weighted=alpha is not None
    )
    damping = (0.9, 0.6)
    tensors = {"decay": torch.tensor(damping, dtype=torch.float64).logit()}
    if alpha is not None:
        tensors["coefficients"] = torch.tensor(alpha, dtype=torch.float64)[:, None].expand(-1, 2)
    q, k, v = (drawn(1, HEADS, TOKENS, WIDTH, seed=seed) for seed in range(3))
    seen = torch.tensor([[True] * 5 + [False]])
    visible = Visible(seen[:, None, None])
    ours = replacement_named("graph").apply(q, k, v, tensors, layout, visible)[0]
    for head in range(HEADS):
        omega = tsa.bidirectional_graph(TOKENS, damping[head])
        psi = tsa.attention_graph(array(k[0, head]), omega, mask=seen[0].numpy())
        expected = tsa.spectral_filter(psi, array(v[0, head]), alpha or (1.0, 1.0))
        np.testing.assert_allclose(array(ours[0, head, :5]), expected[:5], **CLOSE)


def _chain(layer: Any) -> np.ndarray:
    """The weight (in, out) of one chain of ours, whose first modes are those of the output."""
    cores = []
    while hasattr(layer, f"tc_core{len(cores)}"):
        cores.append(array(getattr(layer, f"tc_core{len(cores)}")).transpose(0, 2, 1, 3))
    return tsa.tt_matrix(cores, "big")[: layer.in_features, : layer.out_features]


def _probabilities(model: Any, mixed: np.ndarray, mask: Any = None) -> np.ndarray:
    head = model.classifier
    weights = dict(zip(("w1", "b1"), linear(head.dense), strict=True))
    weights |= dict(zip(("w2", "b2"), linear(head.out_proj), strict=True))
    return tsa.classify(mixed, weights, mask)


def test_classifier_with_graph_attention_in_trains(tmp_path: Path) -> None:
    """Algorithm 1 in the seven layers of section 6; one chain of ours makes keys of all heads."""
    recipe = {"attention": {"name": "tga"}, "method": {"name": "qtt"}}
    model = model_of(tmp_path, AutoModelForSequenceClassification, recipe, **SIZES)
    words = torch.arange(TOKENS)[None]
    with torch.no_grad():
        ours = array(model(words).logits[0].softmax(-1))
    x = array(model.model.embed_tokens(words)[0])
    attention = model.model.layers[0].self_attn
    keys, values = x @ _chain(attention.k_proj), x @ _chain(attention.v_proj)
    width, outputs = SIZES["hidden_size"], []
    for head, decay in enumerate(attention.tc_attn.decay.sigmoid().tolist()):
        columns = slice(head * width, (head + 1) * width)
        omega = tsa.bidirectional_graph(TOKENS, decay)
        psi = tsa.attention_graph(keys[:, columns], omega)
        outputs.append(tsa.polynomial_filter(psi, values[:, columns]))
    mixed = tsa.combine_heads(outputs, output=_chain(attention.o_proj))
    np.testing.assert_allclose(ours, _probabilities(model, mixed), **CLOSE)


def test_dot_product_baseline(tmp_path: Path) -> None:
    """2.3 in the seven layers: softmax attention with the scale of the text."""
    model = model_of(tmp_path, AutoModelForSequenceClassification, {}, **SIZES)
    words = torch.arange(TOKENS)[None]
    with torch.no_grad():
        ours = array(model(words).logits[0].softmax(-1))
    x = array(model.model.embed_tokens(words)[0])
    attention = model.model.layers[0].self_attn
    width, outputs = SIZES["hidden_size"], []
    for head in range(2):
        columns = slice(head * width, (head + 1) * width)
        weights = {
            name: linear(getattr(attention, name + "_proj"))[0][:, columns] for name in "qkv"
        }
        outputs.append(tsa.dot_product(x, weights))
    mixed = tsa.combine_heads(outputs, output=linear(attention.o_proj)[0])
    np.testing.assert_allclose(ours, _probabilities(model, mixed), **CLOSE)


def test_a_chain_for_each_head(tmp_path: Path) -> None:
    """Algorithm 1 "repeated for H different heads", keys and values by chains of their own."""
    recipe = {"attention": {"name": "tsa"}, "method": {"name": "qtt", "chains": "heads"}}
    model = model_of(tmp_path, AutoModelForSequenceClassification, recipe, **SIZES)
    words = torch.arange(TOKENS)[None]
    with torch.no_grad():
        ours = array(model(words).logits[0].softmax(-1))
    attention = model.model.layers[0].self_attn
    chains = {name: _chains(getattr(attention, name + "_proj")) for name in "kvo"}
    heads = list(zip(chains["k"], chains["v"], strict=True))
    assert tsa.tt_parameters(chains["k"][0]) == 16 * (3 - 1)  # the paper's count, I = J = 2^3
    graph = attention.tc_attn
    x = array(model.model.embed_tokens(words)[0])
    outputs = []
    for head, (keys, values) in enumerate(heads):
        omega = tsa.bidirectional_graph(TOKENS, float(array(graph.decay[head].sigmoid())))
        alpha = array(graph.coefficients[:, head]).tolist()
        outputs.append(tsa.head(x, keys, values, omega, order="big", alpha=alpha))
    after = np.concatenate([tsa.tt_matrix(chain, "big") for chain in chains["o"]])
    mixed = tsa.combine_heads(outputs, output=after)
    np.testing.assert_allclose(ours, _probabilities(model, mixed), **CLOSE)


def _chains(layer: Any) -> list[list[np.ndarray]]:
    """The cores of each chain, its first modes those of the input."""
    cores: list[np.ndarray] = []
    while hasattr(layer, f"tc_core{len(cores)}"):
        core = array(getattr(layer, f"tc_core{len(cores)}"))  # (chains, R, out, in, R)
        cores.append(core.transpose(0, 1, 3, 2, 4))
    return [[core[chain] for core in cores] for chain in range(len(cores[0]))]


def test_additive_baseline(tmp_path: Path) -> None:
    """ADA of section 6, Bahdanau's scores, in the seven layers; with padding."""
    recipe = {"attention": {"name": "additive"}}
    model = model_of(tmp_path, AutoModelForSequenceClassification, recipe, **SIZES)
    words = torch.arange(TOKENS)[None]
    seen = torch.tensor([[1] * (TOKENS - 1) + [0]])
    with torch.no_grad():
        ours = array(model(words, attention_mask=seen).logits[0].softmax(-1))
    x = array(model.model.embed_tokens(words)[0])
    attention = model.model.layers[0].self_attn
    projections = {name: linear(getattr(attention, name + "_proj"))[0] for name in "qkv"}
    width, outputs, mask = SIZES["hidden_size"], [], seen[0].numpy().astype(bool)
    for head in range(2):
        columns = slice(head * width, (head + 1) * width)
        weights = {name: weight[:, columns] for name, weight in projections.items()}
        weights["scale"] = array(attention.tc_attn.score_weight[head])
        outputs.append(tsa.additive(x, weights, mask))
    mixed = tsa.combine_heads(outputs, output=linear(attention.o_proj)[0])
    np.testing.assert_allclose(ours, _probabilities(model, mixed, mask), **CLOSE)
