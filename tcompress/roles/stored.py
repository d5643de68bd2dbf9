"""The layers of a supported family by the names and shapes of its stored tensors alone.

This takes no time, where building the model takes seconds. What names and shapes do not tell is
left to `anatomy_of`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
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
_NO_LAYERS = ("relative_attention_bias",)
_FIRST = (*_NO_LAYERS, "attn_norm.")  # what the first block alone has, or lacks
# Other names that configs have for what parts are computed from.
_ALIASES = {"num_attention_heads": ("n_head",), "hidden_size": ("n_embd",)}
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
# Tensors that are no parameters: old buffers, and statistics.
_BUFFERS = re.compile(
    r"(^|\.)(position_ids|inv_freq|(attn|attention)\.bias|masked_bias|running_mean|running_var"
    r"|num_batches_tracked|final_logits_bias)$"
)
_POOLED = re.compile(r"(^|\.)(pooler|cls\.seq_relationship)\.")
_UNPOOLED = re.compile(
    r"For(MaskedLM|CausalLM|TokenClassification|QuestionAnswering)$|LMHeadModel$"
)


class _Settings:
    """A `config.json` with attributes, as `parts_of` reads them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        for key in (name, *_ALIASES.get(name, ())):
            if key in self._config:
                return self._config[key]
        raise AttributeError(name)


def parameters_among(config: Mapping[str, Any], shapes: Shapes) -> Shapes:
    """Leaves out stored tensors that are no parameters of the model.

    Args:
        config: Content of `config.json`.
        shapes: Shapes of the stored tensors by name.
    """
    named = str(next(iter(config.get("architectures") or ()), ""))
    unused = _POOLED if _UNPOOLED.search(named) else None
    return {
        key: shape
        for key, shape in shapes.items()
        if not _BUFFERS.search(key) and not (unused and unused.search(key))
    }


def stored_blocks(config: Mapping[str, Any], shapes: Shapes) -> tuple[Block, ...] | None:
    """Finds the blocks of a checkpoint and the role of every layer in them.

    Args:
        config: Content of `config.json`.
        shapes: Shapes of the parameters by name.

    Returns:
        The blocks, with names as in the checkpoint; None where only the model itself can tell.
    """
    styles = FAMILIES.get(str(config.get("model_type")), ())
    found: dict[str, dict[str, str]] = {}
    for key in shapes:
        inside = _BLOCK.fullmatch(key)
        if inside and "." in inside[2]:  # a list of bare layers is no list of blocks
            found.setdefault(inside[1], {})[inside[2]] = key
    blocks = []
    for name in sorted(found, key=_place):
        try:
            layers = _layers(name, found[name], shapes, styles, _Settings(config))
        except (InputError, AttributeError, TypeError, ZeroDivisionError):
            return None
        family = str(config["model_type"])
        if layers is None or any(
            calls_of(family, item.role, _Settings(config)) > 1 for item in layers
        ):
            return None
        blocks.append(Block(name, layers))
    depths = [part.get(name) for part in (config, *_parts(config)) for name in _COUNTS]
    stacks: dict[str, list[Block]] = {}
    for block in blocks:
        stacks.setdefault(block.name.rpartition(".")[0], []).append(block)
    # What does not fit together, or not the config, is for the model to say.
    fits = all(len(stack) in depths and _alike(stack, found) for stack in stacks.values())
    return tuple(blocks) if stacks and fits and _wide(blocks, config) else None


def stored_parameters(config: Mapping[str, Any], shapes: Shapes) -> int | None:
    """Counts the parameters of a checkpoint, tied ones once.

    Args:
        config: Content of `config.json`.
        shapes: Shapes of the parameters by name.

    Returns:
        The number; None where only the model itself can tell.
    """
    tables: dict[tuple[int, ...], int] = {}
    for shape in shapes.values():
        if shape and shape[0] == config.get("vocab_size"):
            tables[shape] = tables.get(shape, 0) + 1
    twice = [shape for shape, count in tables.items() if count > 1]
    if twice and config.get("tie_word_embeddings") is not False:
        return None
    return sum(prod(shape) for shape in shapes.values())


def _layers(
    block: str, keys: Mapping[str, str], shapes: Shapes, styles: tuple[Style, ...], config: Any
) -> tuple[Layer, ...] | None:
    names = {
        key.removesuffix(".weight")
        for key in keys
        if key.endswith(".weight") and len(shapes[keys[key]]) > 1
    }
    others = [key for key in keys if not key.endswith(".weight") and len(shapes[keys[key]]) > 2]
    names = {name for name in names if name.rpartition(".")[2] not in _NO_LAYERS}
    for style in styles:
        for roles in (style.roles, style.stored):
            hits, absent = match(roles, names)
            if roles and not absent and set(hits.values()) == names and not others:
                return tuple(
                    _layer(block, role, name, keys, shapes, style, config)
                    for role, name in hits.items()
                )
    return None


def _layer(
    block: str,
    role: Any,
    name: str,
    keys: Mapping[str, str],
    shapes: Shapes,
    style: Style,
    config: Any,
) -> Layer:
    shape, path = shapes[keys[f"{name}.weight"]], f"{block}.{name}"
    rows, columns = shape[::-1] if style.transposed else shape
    return Layer(
        name=path,
        role=role,
        kind="conv1d" if style.transposed else "linear",
        in_features=columns,
        out_features=rows,
        bias=f"{name}.bias" in keys,
        parts=parts_of(path, role, rows, style, config),
        group=GROUP_OF_ROLE[role],
    )


def _place(block: str) -> tuple[tuple[int, int, str], ...]:
    """Orders blocks by number, and encoders before decoders, as models run them."""
    return tuple(
        (int(step), 0, "") if step.isdigit() else (0, int(step == "decoder"), step)
        for step in block.split(".")
    )


def _alike(stack: list[Block], found: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether blocks of a stack hold the same tensors; the first of some has one more."""
    names = [
        {key for key in found[block.name] if not any(part in key for part in _FIRST)}
        for block in stack
    ]
    return all(other == names[0] for other in names)


def _wide(blocks: list[Block], config: Mapping[str, Any]) -> bool:
    """Whether the layers are as wide as the config says, where it does."""
    width = config.get("intermediate_size")
    sizes = [
        part.size
        for block in blocks
        for layer in block.layers
        for part in layer.parts
        if part.name in ("gate", "up")
    ]
    return width is None or all(size == width for size in sizes)


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [value for value in config.values() if isinstance(value, Mapping)]
