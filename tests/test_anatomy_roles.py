"""Roles and parts: what each layer of a supported family is said to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from tcompress.roles import Layer, anatomy_of
from tests.support.tiny import TINY, build


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


# Widths of heads, which modules or configs tell
ATTENTION = {"q", "k", "v", "qkv", "o", "cross_q", "cross_k", "cross_v", "cross_o"}


COUNTS = ("num_attention_heads", "n_heads", "n_head", "num_heads", "encoder_attention_heads")


@pytest.mark.parametrize("family", TINY)
def test_heads_of_every_family(family: str) -> None:
    model = build(family)
    config = model.config
    config = getattr(config, "text_config", None) or config
    heads = next(getattr(config, name) for name in COUNTS if getattr(config, name, None))
    for layer in anatomy_of(model).layers:
        if layer.role not in ATTENTION:
            assert layer.head is None
            continue
        assert layer.head is not None, layer.name
        if layer.role in ("o", "cross_o"):
            assert layer.in_features == heads * layer.head, layer.name
        elif layer.role in ("q", "cross_q"):
            assert layer.out_features == heads * layer.head, layer.name
        assert all(part.size % layer.head == 0 for part in layer.parts)


def test_attentions_of_several_widths_are_not_told_apart() -> None:
    from tcompress.roles.find import head_width

    block = nn.Module()
    for name, width in (("one", 8), ("two", 16)):
        attention = nn.Module()
        attention.head_dim = width  # type: ignore[assignment]
        attention.q = nn.Linear(32, 32)
        block.add_module(name, attention)
    block.o = nn.Linear(32, 32)
    assert [head_width(block, f"{name}.q", "q", None) for name in ("one", "two")] == [8, 16]
    assert head_width(block, "o", "o", None) is None
    assert head_width(block, "o", "down", None) is None
