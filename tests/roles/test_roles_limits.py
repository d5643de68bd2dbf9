"""Roles of layers, and what an anatomy leaves alone, does not know, or cannot read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from tcompress.errors import InputError
from tcompress.roles import Layer, Part, Refusal
from tcompress.roles.find import find_roles
from tests.support.tiny import TINY, build


def test_position_tables_of_deberta_are_refused_and_shared_keys_are_marked() -> None:
    config = transformers.DebertaV2Config(**{**TINY["deberta-v2"].options, "share_att_key": False})
    apart = find_roles(transformers.DebertaV2Model(config))
    assert [refusal.name.rpartition(".")[2] for refusal in apart.refused] == [
        "pos_key_proj",
        "pos_query_proj",
    ] * 2
    assert not apart.warnings
    shared = find_roles(build("deberta-v2"))
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
        roles = find_roles(getattr(transformers, f"{kind}Model")(config))
    reasons = [item for item in roles.refused if "uses its weight directly" in item.reason]
    assert {item.name.rpartition(".")[2] for item in reasons} == direct
    assert roles.layers
    assert not any("left alone" in warning for warning in roles.warnings)


class _Backwards(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class _Clipped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-5, 5))


def test_subclasses_of_linear_layers_are_told_by_what_they_compute() -> None:
    block = nn.ModuleDict({"a": _Backwards(8, 8), "b": _Clipped(8, 8), "norm": nn.LayerNorm(8)})
    roles = find_roles(nn.ModuleList([block]))
    assert [layer.name for layer in roles.layers] == ["0.a"]
    assert roles.refused == (Refusal("0.b", "its class `_Clipped` has a forward pass of its own"),)


def test_prediction_heads_beside_a_decoder_are_no_blocks() -> None:
    def head() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    model = nn.ModuleDict(
        {"layers": nn.ModuleList([_Item()]), "boxes": nn.ModuleList([head(), head()])}
    )
    assert [block.name for block in find_roles(model).blocks] == ["layers.0"]


def test_a_list_in_a_list_is_no_block() -> None:
    """Stages of hierarchical models: nothing runs a list, and so none would be met in a pass."""
    stages = nn.ModuleList([nn.ModuleList([_Item(), _Item()]), nn.ModuleList([_Item()])])
    assert [block.name for block in find_roles(stages).blocks] == ["0.0", "0.1", "1.0"]


def test_each_tower_follows_its_own_config() -> None:
    text = {**TINY["gemma3"].options}
    vision = {**TINY["clip_vision_model"].options}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    roles = find_roles(model)
    assert (roles.family, roles.warnings) == ("gemma3", ())
    assert {block.name: len(block.layers) for block in roles.blocks} == {
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
        roles = find_roles(transformers.EncoderDecoderModel(config))
    assert not roles.warnings
    assert [len(block.layers) for block in roles.blocks] == [6, 6, 10, 10]


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
    roles = find_roles(_Scanned())
    assert [block.name for block in roles.blocks] == ["layers.0"]
    assert roles.layers[2] == Layer(
        name="layers.0.ffn.2",
        role="linear",
        kind="linear",
        in_features=16,
        out_features=8,
        bias=False,
        parts=(Part("linear", 8),),
        group="layers.0.ffn.2",
    )
    assert {layer.side for layer in roles.layers} == {"both"}
    assert {refusal.name: refusal.reason for refusal in roles.refused} == {
        "layers.0.attention": "`nn.MultiheadAttention` uses its weight directly",
        "layers.0.attention.out_proj": "`nn.MultiheadAttention` uses its weight directly",
        "layers.1.gate": "it routes tokens to experts, which a small error changes",
        "layers.1.experts": "its forward pass does not say how it multiplies by its stacked"
        " weights: `w1`",
    }
    assert roles.warnings[0].startswith("family `_Scanned` has no table of roles")


def test_model_without_blocks_is_reported() -> None:
    roles = find_roles(nn.Sequential(nn.Linear(2, 2)))
    assert roles.blocks == ()
    assert roles.warnings == (
        "no repeated block with linear layers was found in family `Sequential`",
    )


@pytest.mark.parametrize(
    ("family", "damage", "message"),
    [
        ("bert", lambda model: delattr(model.bert.encoder.layer[1].attention.self, "query"),
         r"^block `bert.encoder.layer.1` of family `bert` lacks `attention.self.query`\n"),
        ("bert", lambda model: setattr(model.bert.encoder, "layer", nn.ModuleList()),
         "no transformer block was found in this `BertForMaskedLM`"),
        ("phi3", lambda model: setattr(model.config, "num_key_value_heads", 1),
         r"has 64 outputs, .* ask for 32 \+ 8 \+ 8"),
        ("mixtral", lambda model: delattr(model.model.layers[0].mlp.experts, "down_proj"),
         "have no 3-D parameter `down_proj`"),
    ],
    ids=["a projection", "blocks", "heads", "experts"],
)  # fmt: skip
def test_what_a_supported_family_lacks_is_an_error(
    family: str, damage: Callable[[Any], None], message: str
) -> None:
    model = build(family)
    damage(model)
    with pytest.raises(InputError, match=message):
        find_roles(model)


# Roles and parts: what each layer of a supported family is said to be


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
        block = find_roles(model).blocks[-1]
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
    layer = find_roles(model).blocks[0].layers[0]
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
    for layer in find_roles(model).layers:
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
