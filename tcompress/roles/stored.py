"""The layers of a supported family by the names and shapes of its stored tensors alone.

This takes no time, where building the model takes seconds. What names and shapes do not tell is
left to `find_roles`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from types import SimpleNamespace
from typing import Any

from tcompress.errors import InputError
from tcompress.roles.families import (
    FAMILIES,
    GROUP_OF_ROLE,
    Block,
    Layer,
    Style,
    calls_of,
    match,
    parts_of,
)

Shapes = Mapping[str, tuple[int, ...]]

_BLOCK = re.compile(r"((?:.*?\.)??\d+)\.(.+)")  # up to the first number
_FIRST = ("relative_attention_bias", "attn_norm.")  # what the first block alone has, or lacks
# Other names that configs have for what parts are computed from.
_ALIASES = {"n_head": "num_attention_heads", "n_embd": "hidden_size"}
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
# Tensors that are no parameters: old buffers, and statistics.
_BUFFERS = re.compile(
    r"(^|\.)(position_ids|inv_freq|(attn|attention)\.bias|masked_bias|running_mean|running_var"
    r"|num_batches_tracked|final_logits_bias)$"
)
_POOLED = re.compile(r"(^|\.)(pooler|cls\.seq_relationship)\.")
_NO_POOL = re.compile(r"For(MaskedLM|CausalLM|TokenClassification|QuestionAnswering)$|LMHeadModel$")


def parameters_among(config: Mapping[str, Any], shapes: Shapes) -> Shapes:
    """Leaves out stored tensors that are no parameters of the model."""
    named = str(next(iter(config.get("architectures") or ()), ""))
    unused = _POOLED if _NO_POOL.search(named) else None
    return {
        key: shape
        for key, shape in shapes.items()
        if not _BUFFERS.search(key) and not (unused and unused.search(key))
    }


def stored_blocks(config: Mapping[str, Any], shapes: Shapes) -> tuple[Block, ...] | None:
    """Finds the blocks of a checkpoint and their layers; None where only the model can tell."""
    family = str(config.get("model_type"))
    usual = {name: config[alias] for alias, name in _ALIASES.items() if alias in config}
    settings = SimpleNamespace(**{**usual, **config})
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        inside = _BLOCK.fullmatch(key)
        if inside and "." in inside[2]:  # a list of bare layers is no list of blocks
            found.setdefault(inside[1], {})[inside[2]] = shape
    blocks = []
    for name in sorted(found, key=_place):
        try:
            layers = _layers(name, found[name], family, settings)
        except (InputError, AttributeError, TypeError, ZeroDivisionError):
            return None
        if layers is None or any(calls_of(family, item.role, settings) > 1 for item in layers):
            return None
        blocks.append(Block(name, layers))
    parts = (config, *(value for value in config.values() if isinstance(value, Mapping)))
    depths = [part.get(name) for part in parts for name in _COUNTS]
    stacks: dict[str, list[frozenset[str]]] = {}
    for block in blocks:
        keys = (key for key in found[block.name] if not any(part in key for part in _FIRST))
        stacks.setdefault(block.name.rpartition(".")[0], []).append(frozenset(keys))
    width = config.get("intermediate_size")
    runs = (part for block in blocks for layer in block.layers for part in layer.parts)
    # What does not fit together, or not the config, is for the model to say.
    fits = all(len(stack) in depths and len({*stack}) == 1 for stack in stacks.values())
    wide = width is None or all(run.size == width for run in runs if run.name in ("gate", "up"))
    return tuple(blocks) if stacks and fits and wide else None


def stored_parameters(config: Mapping[str, Any], shapes: Shapes) -> int | None:
    """Counts the parameters of a checkpoint; None where only the model can tell which are tied."""
    rows = config.get("vocab_size")
    tables = Counter(shape for shape in shapes.values() if shape and shape[0] == rows)
    if max(tables.values(), default=0) > 1 and config.get("tie_word_embeddings") is not False:
        return None
    return sum(prod(shape) for shape in shapes.values())


def _layers(block: str, tensors: Shapes, family: str, config: Any) -> tuple[Layer, ...] | None:
    names = {
        key.removesuffix(".weight")
        for key, shape in tensors.items()
        if key.endswith(".weight") and len(shape) > 1 and _FIRST[0] not in key
    }
    if any(len(shape) > 2 and not key.endswith(".weight") for key, shape in tensors.items()):
        return None
    for style in FAMILIES.get(family, ()):
        for roles in (style.roles, style.stored):
            hits, absent = match(roles, names)
            if roles and not absent and set(hits.values()) == names:
                return tuple(
                    _layer(block, role, name, tensors, style, config) for role, name in hits.items()
                )
    return None


def _layer(block: str, role: Any, name: str, tensors: Shapes, style: Style, config: Any) -> Layer:
    shape, path = tensors[f"{name}.weight"], f"{block}.{name}"
    rows, columns = shape[::-1] if style.transposed else shape
    return Layer(
        name=path,
        role=role,
        kind="conv1d" if style.transposed else "linear",
        in_features=columns,
        out_features=rows,
        bias=f"{name}.bias" in tensors,
        parts=parts_of(path, role, rows, style, config),
        group=GROUP_OF_ROLE[role],
    )


def _place(block: str) -> tuple[tuple[int, int, str], ...]:
    """Orders blocks by number, and encoders before decoders, as models run them."""
    return tuple(
        (int(step), 0, "") if step.isdigit() else (0, int(step == "decoder"), step)
        for step in block.split(".")
    )
