"""The table of families, checked against what really happens in a forward pass."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tcompress.roles import Roles
from tcompress.roles.families import FAMILIES
from tcompress.roles.find import find_roles
from tests.support.own_models import VIDEOMAE
from tests.support.tiny import TINY, TinyModel, named


def _like(family: str, stem: str, **options: Any) -> TinyModel:
    """A relative: the same arguments and kind of head, other classes."""
    tiny = TINY[family]
    head = tiny.model.partition("For")[2]
    model = f"{stem}For{head}" if head else f"{stem}Model"
    return replace(tiny, config=f"{stem}Config", model=model, options={**tiny.options, **options})


RELATIVES = {
    "camembert": _like("bert", "Camembert"),
    "ernie": _like("bert", "Ernie"),
    "xlm-roberta": _like("roberta", "XLMRoberta"),
    "gemma": _like("gemma3", "Gemma"),
    "gemma2": _like("gemma3", "Gemma2"),
    "olmo2": _like("llama", "Olmo2"),
    "qwen2": _like("llama", "Qwen2"),
    "smollm3": _like("llama", "SmolLM3"),
    "blenderbot": _like("bart", "Blenderbot"),
    "m2m_100": _like("bart", "M2M100"),
    "marian": replace(_like("bart", "Marian"), model="MarianMTModel"),
    "mbart": _like("bart", "MBart"),
    "pegasus": _like("bart", "Pegasus"),
    "mt5": _like("t5-gated", "MT5"),
    "umt5": _like("t5-gated", "UMT5"),
    "gpt_neo": TinyModel(
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "vocab_size": 100,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "olmoe": _like("mixtral", "Olmoe", num_key_value_heads=4, num_experts=4, num_experts_per_tok=2),
    "siglip": _like("clip", "Siglip"),
    "siglip_text_model": _like("clip_text_model", "SiglipText"),
    "siglip_vision_model": _like("clip_vision_model", "SiglipVision"),
    "videomae": VIDEOMAE,
    "bert-decoder": TinyModel(
        "BertConfig",
        "BertLMHeadModel",
        {**TINY["bert"].options, "is_decoder": True, "add_cross_attention": True},
    ),
}
ALL = {**TINY, **RELATIVES}


def _inputs(name: str) -> dict[str, Tensor]:
    inputs = ALL[name].inputs(batch=2, length=12, seed=1)
    if name == "bert-decoder":
        inputs["encoder_hidden_states"] = torch.randn(2, 5, 32, generator=torch.manual_seed(2))
    return inputs


@cache
def _built(name: str) -> tuple[nn.Module, Roles]:
    model = ALL[name].build()
    return model, find_roles(model)


@cache
def _run(name: str) -> tuple[Roles, list[tuple[str, Tensor]]]:
    """The calls of layers in a pass, and the tensor that each one read."""
    model, roles = _built(name)
    calls: list[tuple[str, Tensor]] = []

    def hook(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, args: calls.append((path, args[0]))

    for path in {layer.name for layer in roles.layers}:
        model.get_submodule(path).register_forward_pre_hook(hook(path))
    with torch.no_grad():
        model(**_inputs(name))
    return roles, calls


@pytest.mark.parametrize("name", ALL)
def test_group_members_read_one_tensor_and_groups_differ(name: str) -> None:
    roles, calls = _run(name)
    first = dict(reversed(calls))  # what each layer read when it first ran
    for block in roles.blocks:
        leaders = []
        for group in block.groups:
            read = [first[layer.name] for layer in group if layer.role != "experts_down"]
            assert all(tensor is read[0] for tensor in read), group
            leaders += read[:1]
        for index, left in enumerate(leaders):
            assert not any(torch.equal(left, right) for right in leaders[index + 1 :]), block.name


@pytest.mark.parametrize("name", ALL)
def test_layers_run_in_their_order_and_as_often_as_listed(name: str) -> None:
    roles, calls = _run(name)
    counts = Counter(path for path, _ in calls)  # in the order of the first calls
    for block in roles.blocks:
        listed = list(dict.fromkeys(layer.name for layer in block.layers))
        assert listed == [path for path in counts if path in listed]
        assert len(block.groups) == len({layer.group for layer in block.layers})
    assert counts == {layer.name: layer.calls for layer in roles.layers}


@pytest.mark.parametrize("name", ALL)
def test_every_projection_in_a_block_is_listed_or_refused(name: str) -> None:
    model, roles = _built(name)
    inside = {
        path
        for path, module in model.named_modules()
        if re.search(r"(^|\.)\d+\.", path)
        and (
            isinstance(module, nn.Linear | Conv1D)
            or isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)
        )
    }
    listed = {layer.name for layer in roles.layers}
    refused = {refusal.name for refusal in roles.refused}
    assert inside - refused == listed
    assert not listed & refused


@pytest.mark.parametrize("name", ALL)
def test_shapes_equal_those_of_the_stored_weights(name: str) -> None:
    model, roles = _built(name)
    weights = dict(model.named_parameters(remove_duplicate=False))
    for layer in roles.layers:
        shape = (layer.out_features, layer.in_features)
        stored = {"linear": shape, "conv1d": shape[::-1], "experts": (layer.experts, *shape)}
        assert tuple(weights[layer.weight_name].shape) == stored[layer.kind]
        assert sum(part.size for part in layer.parts) == layer.out_features
        assert layer.bias == (f"{layer.name}.bias" in weights)


@pytest.mark.parametrize("name", ALL)
def test_meta_model_has_the_same_anatomy(name: str) -> None:
    tiny = ALL[name]
    with torch.device("meta"):
        config = named(tiny.config)(**tiny.options)
        model = named(tiny.model)(config)
    roles = find_roles(model)
    assert roles == _built(name)[1]
    assert not any("no table" in warning for warning in roles.warnings)
    assert len(roles.blocks) == (4 if roles.family in _TWO_STACKS.split() else 2)


_TWO_STACKS = "clip siglip t5 mt5 umt5 bart blenderbot m2m_100 marian mbart pegasus whisper"


def test_every_supported_family_is_tested() -> None:
    tested = {_built(name)[1].family for name in ALL}
    # The whole `gemma3`, with its vision tower, is a case in test_roles_limits; a model that reads
    # three texts is one in test_tam_published.
    assert tested | {"gemma3", "tcompress_tam"} == set(FAMILIES)
