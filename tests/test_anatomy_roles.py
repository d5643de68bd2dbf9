"""Roles and parts: what each layer of a supported family is said to be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from tcompress.roles import Anatomy, Block, Layer, anatomy_of
from tests.support.tiny import TINY, build


def _listing(anatomy: Anatomy) -> dict[str, list[str]]:
    """One line per layer: name below the block, role, kind, in x out, parts, group, side."""
    return {block.name: [_line(block, layer) for layer in block.layers] for block in anatomy.blocks}


def _line(block: Block, layer: Layer) -> str:
    parts = "+".join(f"{part.name}:{part.size}" for part in layer.parts)
    experts = f"{layer.experts}x" if layer.experts else ""
    name = layer.weight_name.removeprefix(f"{block.name}.").removesuffix(".weight")
    shape = f"{experts}{layer.in_features}>{layer.out_features}"
    bias = "bias" if layer.bias else "-"
    return f"{name} {layer.role} {layer.kind} {shape} {bias} {parts} {layer.group} {layer.side}"


_LLAMA_ATTENTION = [
    "self_attn.q_proj q linear 32>32 - q:32 attn_in in",
    "self_attn.k_proj k linear 32>16 - k:16 attn_in in",
    "self_attn.v_proj v linear 32>16 - v:16 attn_in in",
    "self_attn.o_proj o linear 32>32 - o:32 o_in out",
]
_T5_SELF = [
    "layer.0.SelfAttention.q q linear 32>32 - q:32 attn_in in",
    "layer.0.SelfAttention.k k linear 32>32 - k:32 attn_in in",
    "layer.0.SelfAttention.v v linear 32>32 - v:32 attn_in in",
    "layer.0.SelfAttention.o o linear 32>32 - o:32 o_in out",
]
_T5_CROSS = [
    "layer.1.EncDecAttention.q cross_q linear 32>32 - cross_q:32 cross_q_in in",
    "layer.1.EncDecAttention.k cross_k linear 32>32 - cross_k:32 cross_kv_in in",
    "layer.1.EncDecAttention.v cross_v linear 32>32 - cross_v:32 cross_kv_in in",
    "layer.1.EncDecAttention.o cross_o linear 32>32 - cross_o:32 cross_o_in out",
]
_T5_FFN = [
    "layer.{}.DenseReluDense.wi_0 gate linear 32>64 - gate:64 ffn_in in",
    "layer.{}.DenseReluDense.wi_1 up linear 32>64 - up:64 ffn_in in",
    "layer.{}.DenseReluDense.wo down linear 64>32 - down:32 down_in out",
]
EXPECTED = {
    "bert": {
        f"bert.encoder.layer.{index}": [
            "attention.self.query q linear 32>32 bias q:32 attn_in in",
            "attention.self.key k linear 32>32 bias k:32 attn_in in",
            "attention.self.value v linear 32>32 bias v:32 attn_in in",
            "attention.output.dense o linear 32>32 bias o:32 o_in out",
            "intermediate.dense up linear 32>64 bias up:64 ffn_in in",
            "output.dense down linear 64>32 bias down:32 down_in out",
        ]
        for index in range(2)
    },
    "gpt2": {
        f"transformer.h.{index}": [
            "attn.c_attn qkv conv1d 32>96 bias q:32+k:32+v:32 attn_in in",
            "attn.c_proj o conv1d 32>32 bias o:32 o_in out",
            "mlp.c_fc up conv1d 32>64 bias up:64 ffn_in in",
            "mlp.c_proj down conv1d 64>32 bias down:32 down_in out",
        ]
        for index in range(2)
    },
    "phi3": {
        f"model.layers.{index}": [
            "self_attn.qkv_proj qkv linear 32>64 - q:32+k:16+v:16 attn_in in",
            "self_attn.o_proj o linear 32>32 - o:32 o_in out",
            "mlp.gate_up_proj gate_up linear 32>128 - gate:64+up:64 ffn_in in",
            "mlp.down_proj down linear 64>32 - down:32 down_in out",
        ]
        for index in range(2)
    },
    "mixtral": {
        f"model.layers.{index}": [
            *_LLAMA_ATTENTION,
            "mlp.experts.gate_up_proj experts_gate_up experts 4x32>128 - gate:64+up:64 ffn_in in",
            "mlp.experts.down_proj experts_down experts 4x64>32 - experts_down:32 down_in out",
        ]
        for index in range(2)
    },
    "t5-gated": {
        **{
            f"encoder.block.{index}": [*_T5_SELF, *(line.format(1) for line in _T5_FFN)]
            for index in range(2)
        },
        **{
            f"decoder.block.{index}": [*_T5_SELF, *_T5_CROSS, *(line.format(2) for line in _T5_FFN)]
            for index in range(2)
        },
    },
}

_PLAIN = {"q": 2, "k": 2, "v": 2, "o": 2, "up": 2, "down": 2}
_TWICE = dict.fromkeys(_PLAIN, 4)
_CROSS = {"cross_q": 2, "cross_k": 2, "cross_v": 2, "cross_o": 2}
_EXPERTS = {"experts_gate_up": 2, "experts_down": 2}
_COUNT_ROWS: list[tuple[str, dict[str, int]]] = [
    ("bert roberta distilbert electra mpnet deberta-v2 opt vit deit", _PLAIN),
    ("clip_text_model clip_vision_model", _PLAIN),
    ("llama mistral qwen3 gemma3", {**_PLAIN, "gate": 2}),
    ("modernbert phi3", {"qkv": 2, "o": 2, "gate_up": 2, "down": 2}),
    ("gpt2 gpt_neox", {"qkv": 2, "o": 2, "up": 2, "down": 2}),
    ("clip", _TWICE),
    ("t5 bart whisper", {**_TWICE, **_CROSS}),
    ("t5-gated", {**_TWICE, **_CROSS, "gate": 4}),
    ("mixtral", {"q": 2, "k": 2, "v": 2, "o": 2, **_EXPERTS}),
    (
        "qwen3_moe",
        {**_PLAIN, "gate": 1, "up": 1, "down": 1, "experts_gate_up": 1, "experts_down": 1},
    ),
    ("tcompress_text", dict.fromkeys("qkvo", 2)),
    ("tcompress_grid tcompress_grid-series", _PLAIN),
]
COUNTS = {name: counts for names, counts in _COUNT_ROWS for name in names.split()}


@pytest.mark.parametrize("name", EXPECTED)
def test_literal_listing(name: str) -> None:
    assert _listing(anatomy_of(build(name))) == EXPECTED[name]


@pytest.mark.parametrize("name", TINY)
def test_counts_of_roles(name: str) -> None:
    assert Counter(layer.role for layer in anatomy_of(build(name)).layers) == COUNTS[name]


def _scale_rows(model: nn.Module, layer: Layer, rows: slice, factor: float) -> None:
    weight = model.get_parameter(layer.weight_name)
    axis = {"linear": 0, "conv1d": 1, "experts": 1}[layer.kind]
    with torch.no_grad():
        weight.movedim(axis, 0)[rows] *= factor


@pytest.mark.parametrize(
    "name", ["modernbert", "phi3", "mixtral", "qwen3_moe", "llama", "t5-gated"]
)
def test_output_of_the_ffn_is_linear_in_up_and_not_in_gate(name: str) -> None:
    for role, linear in (("up", True), ("gate", False)):
        model = build(name)
        block = anatomy_of(model).blocks[-1]
        up = next(layer for layer in block.layers if role in [part.name for part in layer.parts])
        down = next(layer for layer in block.layers if layer.role.endswith("down"))
        states: list[Tensor] = []
        model.get_submodule(down.name).register_forward_hook(
            lambda module, args, output, states=states: states.append(output)
        )
        inputs = TINY[name].inputs(2, 8, 0)
        names = [part.name for part in up.parts]
        start = sum(part.size for part in up.parts[: names.index(role)])
        with torch.no_grad():
            model(**inputs)
            _scale_rows(model, up, slice(start, start + up.parts[names.index(role)].size), 2.0)
            model(**inputs)
        assert torch.allclose(states[1], 2 * states[0], rtol=1e-4, atol=1e-5) is linear


@pytest.mark.parametrize("name", ["modernbert", "phi3", "gpt2"])
def test_parts_of_fused_attention_reach_the_attention_as_q_k_v(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = build(name)
    layer = anatomy_of(model).blocks[0].layers[0]
    fused: list[Tensor] = []
    heads: list[tuple[Tensor, ...]] = []

    def record(module: nn.Module, *args: Any, **options: Any) -> Any:
        heads.append(args[:3])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "record", record)
    model.set_attn_implementation("record")
    model.get_submodule(layer.name).register_forward_hook(
        lambda module, args, output: fused.append(output)
    )
    with torch.no_grad():
        model(input_ids=TINY[name].inputs(2, 8, 0)["input_ids"])
    assert [part.name for part in layer.parts] == ["q", "k", "v"]
    sizes = [part.size for part in layer.parts]
    runs = torch.split(fused[0].view(2, 8, -1), sizes, dim=-1)
    for run, states in zip(runs, heads[0], strict=True):
        # Rotary positions turn each head without changing its length.
        lengths = run.reshape(2, 8, states.shape[1], -1).norm(dim=-1)
        assert torch.allclose(lengths, states.transpose(1, 2).norm(dim=-1), atol=1e-5)


def test_embeddings_and_output_head() -> None:
    expected = {
        "bert": (("bert.embeddings.word_embeddings",), "cls.predictions.decoder"),
        "gpt2": (("transformer.wte",), "lm_head"),
        "t5": (("shared", "encoder.embed_tokens", "decoder.embed_tokens"), "lm_head"),
        "whisper": (("model.decoder.embed_tokens",), "proj_out"),
        "clip": (("text_model.embeddings.token_embedding",), None),
        "vit": ((), None),
    }
    for name, found in expected.items():
        anatomy = anatomy_of(build(name))
        assert (anatomy.embeddings, anatomy.output_head) == found


def test_sides() -> None:
    sides = {layer.role: layer.side for name in TINY for layer in anatomy_of(build(name)).layers}
    outs = {role for role, side in sides.items() if side == "out"}
    assert outs == {"o", "cross_o", "down", "experts_down"}
    assert set(sides.values()) == {"in", "out"}
