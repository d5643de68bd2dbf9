"""Our encoder of three texts is TAM as published, by the reference of its paper."""

from typing import Any

import numpy as np
import pytest
import torch

from tcompress.own_models.configs import TCompressTamConfig
from tcompress.own_models.tam import TCompressTamForPreTraining
from tests.reference import tam
from tests.reference.copied import CLOSE, array, linear, norm

WIDTH, SIZE, CORES, MEMORY, SEMANTICS = 8, 4, 2, 9, 4
TYPES = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
REAL = len(TYPES) - 1
"""Tokens of the example, whose last one is padding. The query is longer than SIZE."""


def _model(without: str) -> TCompressTamForPreTraining:
    config = TCompressTamConfig(
        vocab_size=20, hidden_size=WIDTH, attention_size=SIZE, cores=CORES, without=without,
        num_hidden_layers=2, intermediate_size=12, memory_length=MEMORY,
        semantics_length=SEMANTICS, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = TCompressTamForPreTraining(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.2 * noise)
    return model


def _memory(gru: Any, streams: list[np.ndarray]) -> np.ndarray:
    into, bias = linear(gru.inputs)
    weights = {f"w{gate}": part for gate, part in zip("rzn", np.split(into.T, 3), strict=True)}
    weights |= {f"b{gate}": part for gate, part in zip("rzn", np.split(bias, 3), strict=True)}
    gates = np.split(array(gru.gates.weight), 2)
    weights |= {"ur": gates[0], "uz": gates[1], "un": array(gru.candidate.weight)}
    return tam.gru_memory(streams, weights)


def _layer(layer: Any, without: str, keys: int, places: int) -> dict[str, Any]:
    """A block as `encoder_layer` takes it, for so many tokens of memory and of semantics."""
    mixer = layer.attention
    attention: dict[str, np.ndarray] = {"v": np.zeros((WIDTH, SIZE))}
    for name in "qks" if without == "semantic-fusing" else "qkvs":
        attention[name], attention["b" + name] = linear(getattr(mixer, name + "_proj"))
    weights: dict[str, Any] = {"attention": attention}
    if without == "semantic-fusing":
        weight, weights["bias"] = linear(mixer.split_proj)
        weight = weight.reshape(SEMANTICS, MEMORY, WIDTH)[:places, :keys]
        attention["o"] = weight.reshape(-1, WIDTH)
    else:
        weights["dense"], weights["bias"] = linear(mixer.o_proj)
    weights["w1"], weights["b1"] = linear(layer.mlp.fc1)
    weights["w2"], weights["b2"] = linear(layer.mlp.fc2)
    return weights | {"norm1": norm(layer.attention_norm), "norm2": norm(layer.mlp_norm)}


@pytest.mark.parametrize("without", ["nothing", "semantic-fusing", "query-alignment"])
def test_encoder_and_pretraining(without: str) -> None:
    """Equations (4) to (7), the GRU memory of 5.1, the ablations of 5.5 and the losses of 4.5."""
    model = _model(without)
    words = (torch.arange(len(TYPES)) % 20)[None]
    valid = torch.tensor([[1] * REAL + [0]])
    labels = torch.full((1, len(TYPES)), -100)
    labels[0, 2], labels[0, 3] = 7, 9
    with torch.no_grad():
        ours = model(
            words,
            attention_mask=valid,
            token_type_ids=torch.tensor([TYPES]),
            labels=labels,
            next_sentence_label=torch.tensor([1]),
            output_hidden_states=True,
            output_attentions=True,
        )
    inner = model.model
    tables = (inner.embed_tokens, inner.embed_positions, inner.embed_types)
    words_of, places, types = (array(table.weight) for table in tables)
    x = words_of[words[0]] + places[: len(TYPES)] + types[TYPES]
    x = tam.layer_norm(x, **norm(inner.norm))
    kinds = np.array(TYPES)[:REAL]
    texts = [x[:REAL][kinds == kind] for kind in range(3)]
    memory, semantics, query = _memory(inner.gru, texts[:2]), texts[2], texts[0]
    for layer in inner.layers:
        aligned = without != "query-alignment"
        first = len(query) if aligned else SIZE
        cores = [tam.diagonal_core(g, first, SIZE) for g in array(layer.attention.core[:, 0])]
        weights = _layer(layer, without, len(memory), len(semantics))
        fused = without != "semantic-fusing"
        aligns: dict[str, Any] = {"aligned": aligned}
        seen = tam.attention_map(query, memory, semantics, weights["attention"], cores, **aligns)
        query = tam.encoder_layer(query, memory, semantics, weights, cores, fused=fused, **aligns)
    rows = len(query)
    np.testing.assert_allclose(array(ours.hidden_states[-1][0])[:rows], query, **CLOSE)
    weights_of_keys = array(ours.attentions[-1][0, 0])[:rows, : len(memory)]
    np.testing.assert_allclose(weights_of_keys, seen, **CLOSE)  # Figure 2 (b), of the last layer
    loss = tam.pretraining_loss(
        array(ours.prediction_logits[0, 2:4]), np.array([7, 9]),
        array(ours.seq_relationship_logits[0]), 1,
    )  # fmt: skip
    np.testing.assert_allclose(float(ours.loss), loss, **CLOSE)
