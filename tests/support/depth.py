"""Tiny models with several blocks in each stack, and the same without some of them, by hand."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.data.calibration import CalibrationData
from tcompress.models import SourceModel
from tcompress.roles.find import find_roles
from tests.support.tiny import TINY, TinyModel

_COUNTS = (
    "num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_decoder_layers",
    "encoder_layers", "decoder_layers",
)  # fmt: skip


def deep(family: str, blocks: int = 4, **options: Any) -> TinyModel:
    """A tiny model with so many blocks in each stack."""
    tiny = TINY[family]
    return replace(tiny, options={**_deeper(tiny.options, blocks), **options})


def _deeper(options: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    return {
        key: blocks
        if key in _COUNTS
        else _deeper(value, blocks)
        if isinstance(value, Mapping)
        else value
        for key, value in options.items()
    }


def idle_llama(folder: Path, blocks: int = 5, idle: Sequence[int] = (1, 3)) -> Any:
    """Write a language model of which some blocks hand on what they read; gives the model."""
    model: Any = deep("llama", blocks).build()
    with torch.no_grad():
        for index in idle:
            block = model.model.layers[index]
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    return model


def stacks(model: nn.Module) -> list[str]:
    """Module paths of the stacks."""
    names = [block.name for block in find_roles(model).blocks]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def without(model: nn.Module, path: str, kept: Sequence[int]) -> nn.Module:
    """A copy of a model with some blocks of a stack, put together by hand; no cache works."""
    model = copy.deepcopy(model)
    stack = model.get_submodule(path)
    blocks = [stack.get_submodule(str(index)) for index in kept]
    first = stack.get_submodule("0")
    if kept[0] and first is not blocks[0] and path.endswith(".block"):  # of t5: its first one
        own, other = blocks[0].layer[0].SelfAttention, first.layer[0].SelfAttention
        own.relative_attention_bias = other.relative_attention_bias
        own.has_relative_attention_bias = True
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.ModuleList(blocks))
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is not None and len(kinds) > len(kept):
            config.layer_types = [kinds[index] for index in kept]
        if config is not None:
            config.use_cache = False
    return model.eval()


def drawn(tiny: TinyModel, batches: int = 3) -> CalibrationData:
    """Batches of a model's inputs; the last one is held out."""
    made = [tiny.inputs(4, 8, seed) for seed in range(batches)]
    return CalibrationData(made, [batches - 1], "tiny", 4 * batches, 32 * batches, "deep")


def divergence(dense: Any, model: Any, batches: Sequence[Mapping[str, Tensor]]) -> float:
    """Twice the Kullback-Leibler divergence, summed over tokens that are not padding."""
    total = 0.0
    for batch in batches:
        with torch.no_grad():
            one, two = (item(**batch).logits.log_softmax(-1) for item in (dense, model))
        rows = 2 * (one.exp() * (one - two)).sum(-1)
        total += float(rows[batch["attention_mask"].bool()].sum())
    return total


def change_of(dense: Path, converted: Path, data: CalibrationData) -> float:
    """How far a language model is from the dense one, per sample held out, by whole passes."""
    one, two = (AutoModelForCausalLM.from_pretrained(folder) for folder in (dense, converted))
    sampler, change, samples = sampler_of(SourceModel.open(str(dense))), 0.0, 0
    with torch.no_grad():
        for index in data.holdout:
            batch = sampler.with_variants(data.batches[index])
            change += sampler.change(one(**batch), two(**batch), batch)
            samples += len(batch["input_ids"])
    return change / samples
