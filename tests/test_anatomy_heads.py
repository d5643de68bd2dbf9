"""Widths of heads, which modules or configs tell."""

from __future__ import annotations

import pytest
from torch import nn

from tcompress.roles import anatomy_of
from tests.support.tiny import TINY, build

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
