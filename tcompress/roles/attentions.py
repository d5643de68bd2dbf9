"""Where tokens are mixed: attention modules, tables of positions, what a replacement must do."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torch import nn

from tcompress.roles.families import Block, Layer, Roles


class Positions(NamedTuple):
    """A table of positions, its module path, and the rows before that of the first token."""

    path: str
    table: nn.Embedding
    offset: int


def position_tables(model: nn.Module) -> Iterator[Positions]:
    """Lists the tables of positions of a model."""
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if not isinstance(module, nn.Embedding) or not ("position" in leaf or leaf == "wpe"):
            continue
        offset = getattr(module, "offset", None)
        if offset is None:  # RoBERTa counts from the padding token on
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
        yield Positions(path, module, int(offset))


def text_positions(model: nn.Module, limit: int) -> int:
    """Returns the positions behind a limit in a config, where RoBERTa counts unused rows too."""
    for _, table, offset in position_tables(model):
        if table.num_embeddings == limit and table.padding_idx is not None:
            return limit - offset
    return limit


# Tokens before the grid, by family of image and video models.
_SPECIAL: dict[str, int] = {"vit": 1, "deit": 2, "clip_vision_model": 1}
_SPECIAL |= dict.fromkeys(("siglip_vision_model", "videomae", "tcompress_grid"), 0)


@dataclass(frozen=True)
class BaseAttention:
    """What a self-attention does, whichever model it is part of."""

    heads: int  # of queries
    key_heads: int  # of keys and values; a divisor of `heads`
    head_dim: int  # width of one head
    causal: bool = False  # whether a token sees only itself and those before it
    window: int | None = None  # how far a token sees, if it does not see all
    biased: bool = False  # whether a bias of positions is added to its scores
    tokens: int | None = None  # of every input, if their number is fixed
    grid: tuple[int, ...] = ()  # on which the last tokens sit
    special: int = 0  # tokens before the grid, such as a class token
    longest: int | None = None  # most tokens of an input, if there is a limit


@dataclass(frozen=True, kw_only=True)
class Attention(BaseAttention):
    """The self-attention of one block."""

    name: str  # module path in the running model
    block: str  # module path of its block
    layers: Mapping[str, Layer]  # its projections by role; a fused one stands under `qkv`
    reason: str | None = None  # why nothing can replace it, if nothing can


def attentions_of(model: nn.Module, roles: Roles) -> tuple[Attention, ...]:
    """Finds the self-attention of every block whose projections are known."""
    found = (_attention(model, roles, block) for block in roles.blocks)
    return tuple(attention for attention in found if attention is not None)


def _attention(model: nn.Module, roles: Roles, block: Block) -> Attention | None:
    layers: dict[str, Layer] = {item.role: item for item in block.layers if item.kind != "experts"}
    first = layers.get("q") or layers.get("qkv")
    if first is None:
        return None
    name = first.name.rpartition(".")[0]
    module = model.get_submodule(name)
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", None) or roles.family
    width = first.head or 0
    grid, special = _grid(family, config)
    tokens = prod(grid) + special if grid else None
    if config and family == "whisper" and not getattr(module, "is_decoder", False):
        tokens = config.max_source_positions  # the encoder takes audio of one length
    limit = getattr(config, "max_position_embeddings", None)
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return Attention(
        name=name,
        block=block.name,
        layers={role: item for role, item in layers.items() if role in ("q", "k", "v", "qkv", "o")},
        heads=_width(layers, "q") // width if width else 0,
        key_heads=_width(layers, "k") // width if width else 0,
        head_dim=width,
        # CLIP says so only when it calls its attention.
        causal=bool(getattr(module, "is_causal", False)) or family == "clip_text_model",
        window=window if isinstance(window, int) and window > 0 else None,
        biased=family in ("t5", "mt5", "umt5"),
        tokens=tokens,
        grid=grid,
        special=special,
        longest=text_positions(model, limit) if isinstance(limit, int) and not grid else None,
        reason=_masked(model) or _reason(module, family, width),
    )


def _width(layers: Mapping[str, Layer], role: str) -> int:
    if role in layers:
        return layers[role].out_features
    fused = layers["qkv"]
    parts = {part.name: part.size for part in fused.parts}
    return parts.get(role, fused.out_features // 3)  # head by head there are no parts


def _masked(model: nn.Module) -> str | None:
    """VideoMAE learns from what it is not shown: its blocks meet some patches, in any order."""
    found = inspect.signature(model.forward).parameters.get("bool_masked_pos")
    if found is None or found.default is not inspect.Parameter.empty:
        return None
    return (
        f"a mask leaves patches out of what `{type(model).__name__}` reads, so that tokens have no "
        "place of their own: convert a class without one"
    )


def _reason(module: nn.Module, family: str, width: int) -> str | None:
    if not width:
        return "the width of its heads is not known"
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return (
            f"family `{family}` computes attention itself and never asks Transformers' attention "
            "interface, so nothing can stand in for it"
        )
    return None


def _grid(family: str, config: Any) -> tuple[tuple[int, ...], int]:
    if family not in _SPECIAL:
        return (), 0
    if family == "tcompress_grid":
        return tuple(config.grid), _SPECIAL[family]
    sizes = (config.image_size, config.patch_size)
    image, patch = ((size, size) if isinstance(size, int) else size for size in sizes)
    grid: tuple[int, ...] = (image[0] // patch[0], image[1] // patch[1])
    if family == "videomae":
        grid = (config.num_frames // config.tubelet_size, *grid)
    return grid, _SPECIAL[family]
