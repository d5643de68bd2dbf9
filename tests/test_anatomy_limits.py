"""What an anatomy leaves alone, does not know, or cannot read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tcompress.errors import InputError
from tcompress.roles import Layer, Part, Refusal, anatomy_of
from tests.support.tiny import TINY, build


def test_position_tables_of_deberta_are_refused_and_shared_keys_are_marked() -> None:
    config = transformers.DebertaV2Config(**{**TINY["deberta-v2"].options, "share_att_key": False})
    apart = anatomy_of(transformers.DebertaV2Model(config))
    assert [refusal.name.rpartition(".")[2] for refusal in apart.refused] == [
        "pos_key_proj",
        "pos_query_proj",
    ] * 2
    assert not apart.warnings
    shared = anatomy_of(build("deberta-v2"))
    assert {layer.role for layer in shared.layers if layer.calls == 2} == {"q", "k"}
    assert shared.warnings == (
        "the `k`, `q` layers also project the table of relative positions: their second call"
        " does not read tokens",
    )


_SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "direct"),
    [
        ("Deberta", {}, {"in_proj"}),
        ("Mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 2}, {"out_proj"}),
        ("WavLM", {}, {"q_proj", "k_proj", "v_proj", "out_proj"}),
        ("Albert", {}, set()),
        ("Bloom", {}, set()),
        ("Bloom", {"pretraining_tp": 2, "slow_but_exact": True}, {"dense", "dense_4h_to_h"}),
        ("T5", {"d_model": 32, "num_layers": 2}, set()),  # reads no more than a dtype
    ],
)
def test_layers_whose_weights_a_forward_pass_reads_stay_dense(
    kind: str, options: dict[str, Any], direct: set[str]
) -> None:
    with torch.device("meta"):
        config = getattr(transformers, f"{kind}Config")(**{**_SMALL, **options})
        anatomy = anatomy_of(getattr(transformers, f"{kind}Model")(config))
    reasons = [item for item in anatomy.refused if "uses its weight directly" in item.reason]
    assert {item.name.rpartition(".")[2] for item in reasons} == direct
    assert anatomy.layers
    assert not any("left alone" in warning for warning in anatomy.warnings)


class _Backwards(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class _Clipped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-5, 5))


def test_subclasses_of_linear_layers_are_told_by_what_they_compute() -> None:
    block = nn.ModuleDict({"a": _Backwards(8, 8), "b": _Clipped(8, 8), "norm": nn.LayerNorm(8)})
    anatomy = anatomy_of(nn.ModuleList([block]))
    assert [layer.name for layer in anatomy.layers] == ["0.a"]
    assert anatomy.refused == (
        Refusal("0.b", "its class `_Clipped` has a forward pass of its own"),
    )


def test_prediction_heads_beside_a_decoder_are_no_blocks() -> None:
    def head() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    model = nn.ModuleDict(
        {"layers": nn.ModuleList([_Item()]), "boxes": nn.ModuleList([head(), head()])}
    )
    assert [block.name for block in anatomy_of(model).blocks] == ["layers.0"]


def test_each_tower_follows_its_own_config() -> None:
    text = {**TINY["gemma3"].options}
    vision = {**TINY["clip_vision_model"].options}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    anatomy = anatomy_of(model)
    assert (anatomy.family, anatomy.supported) == ("gemma3", True)
    assert {block.name: len(block.layers) for block in anatomy.blocks} == {
        **{f"model.vision_tower.encoder.layers.{i}": 6 for i in range(2)},
        **{f"model.language_model.layers.{i}": 7 for i in range(2)},
    }


def test_unknown_family_that_joins_known_ones_is_supported() -> None:
    config = transformers.EncoderDecoderConfig(
        encoder=transformers.BertConfig(**TINY["bert"].options).to_dict(),
        decoder=transformers.RobertaConfig(
            **TINY["roberta"].options, is_decoder=True, add_cross_attention=True
        ).to_dict(),
    )
    with torch.device("meta"):
        anatomy = anatomy_of(transformers.EncoderDecoderModel(config))
    assert anatomy.supported
    assert [len(block.layers) for block in anatomy.blocks] == [6, 6, 10, 10]


class _Item(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.ffn = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False))
        self.attention = nn.MultiheadAttention(8, 2)


class _Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.Module()
        self.experts.w1 = nn.Parameter(torch.zeros(4, 8, 16))


class _Scanned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList([_Item(), _Routed()])
        self.heads = nn.ModuleList([nn.Linear(8, 2)])


def test_unknown_model_is_scanned_by_structure() -> None:
    anatomy = anatomy_of(_Scanned())
    assert not anatomy.supported
    assert [block.name for block in anatomy.blocks] == ["layers.0"]
    assert anatomy.layers[2] == Layer(
        name="layers.0.ffn.2",
        role="linear",
        kind="linear",
        in_features=16,
        out_features=8,
        bias=False,
        parts=(Part("linear", 8),),
        group="layers.0.ffn.2",
    )
    assert {layer.side for layer in anatomy.layers} == {"both"}
    assert {refusal.name: refusal.reason for refusal in anatomy.refused} == {
        "layers.0.attention": "`nn.MultiheadAttention` uses its weight directly",
        "layers.0.attention.out_proj": "`nn.MultiheadAttention` uses its weight directly",
        "layers.1.gate": "it routes tokens to experts, which a small error changes",
        "layers.1.experts": "its forward pass does not say how it multiplies by its stacked"
        " weights: `w1`",
    }
    assert anatomy.warnings[0].startswith("family `_Scanned` has no table of roles")


def test_unknown_transformers_family_is_scanned() -> None:
    options: dict[str, Any] = {
        "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
    }  # fmt: skip
    anatomy = anatomy_of(transformers.PatchTSTModel(transformers.PatchTSTConfig(**options)))
    assert anatomy.family == "patchtst"
    assert [len(block.layers) for block in anatomy.blocks] == [6, 6]
    assert len({layer.group for layer in anatomy.layers}) == 12


def test_model_without_blocks_is_reported() -> None:
    anatomy = anatomy_of(nn.Sequential(nn.Linear(2, 2)))
    assert anatomy.blocks == ()
    assert not anatomy.supported
    assert anatomy.warnings == (
        "no repeated block with linear layers was found in family `Sequential`",
    )


def test_renamed_module_of_a_supported_family_is_an_error() -> None:
    model: Any = build("bert")
    attention = model.bert.encoder.layer[1].attention.self
    attention.queries = attention.query
    del attention.query
    with pytest.raises(InputError) as caught:
        anatomy_of(model)
    assert caught.value.message == (
        "block `bert.encoder.layer.1` of family `bert` lacks `attention.self.query`"
    )


def test_supported_family_without_blocks_is_an_error() -> None:
    model: Any = build("bert")
    model.bert.encoder.layer = nn.ModuleList()
    with pytest.raises(
        InputError, match="no transformer block was found in this `BertForMaskedLM`"
    ):
        anatomy_of(model)


def test_heads_that_do_not_fill_a_fused_projection_are_an_error() -> None:
    model: Any = build("phi3")
    model.config.num_key_value_heads = 1
    with pytest.raises(InputError, match=r"has 64 outputs, .* ask for 32 \+ 8 \+ 8"):
        anatomy_of(model)


def test_experts_without_stacked_weights_are_an_error() -> None:
    model: Any = build("mixtral")
    experts = model.model.layers[0].mlp.experts
    del experts.down_proj
    with pytest.raises(InputError, match="have no 3-D parameter `down_proj`"):
        anatomy_of(model)
