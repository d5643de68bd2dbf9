"""Finding the roles of a model's modules, by the table of its family, else by structure."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from tcompress.errors import InputError, listed
from tcompress.roles.families import (
    FAMILIES,
    GROUP_OF_ROLE,
    REFUSED_MODULES,
    RELATIVES,
    Attention,
    Block,
    Layer,
    Part,
    Refusal,
    Role,
    Roles,
    Style,
    calls_of,
    match,
    parts_of,
)
from tcompress.roles.projections import (
    direct_uses,
    is_block,
    is_pointwise,
    projections,
    reason_to_refuse,
    shape_of,
    shapes_of,
)

Reasons = Mapping[nn.Module, str]
"""Why modules are left alone."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_COUNTS = ("num_attention_heads", "n_heads", "num_heads", "n_head")
_WHOLE = ("hidden_size", "dim", "d_model", "n_embd")
_ATTENTION = frozenset({"q", "k", "v", "qkv", "o", "cross_q", "cross_k", "cross_v", "cross_o"})


def head_width(block: nn.Module, name: str, role: Role, config: Any) -> int | None:
    """Read the width of a head of attention off the modules around a projection, or the config."""
    if role not in _ATTENTION:
        return None
    path = name
    while path:
        path = path.rpartition(".")[0]
        found = {
            getattr(module, field)
            for module in block.get_submodule(path).modules()
            for field in _WIDTHS
            if isinstance(getattr(module, field, None), int)
        }
        if found:
            return found.pop() if len(found) == 1 else None
    values = [[getattr(config, field, None) for field in fields] for fields in (_COUNTS, _WHOLE)]
    count, whole = (next((item for item in row if isinstance(item, int)), 0) for row in values)
    return whole // count if whole and count and whole % count == 0 else None


@dataclass(frozen=True)
class _Site:
    """A block in the model, with the family and config of the model it directly belongs to."""

    name: str
    block: nn.Module
    family: str
    config: Any

    def path(self, relative: str) -> str:
        return f"{self.name}.{relative}" if self.name else relative


def find_roles(model: nn.Module) -> Roles:
    """Find the blocks of a transformer and the role of every layer in them, by names and shapes.

    Models made of several models are read tower by tower: each block follows the nearest config
    above it. In families without a table every linear layer of a block has the role `linear`. An
    `InputError` says that a table does not fit a block.
    """
    family = _family(model) or type(model).__name__
    sites = tuple(_sites(model, "", family, getattr(model, "config", None)))
    if family in FAMILIES and not sites:
        hint = "give the whole model, with its blocks in a ModuleList"
        raise InputError(f"no transformer block was found in this `{type(model).__name__}`", hint)
    paths = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    shared = (module for module, count in paths.items() if count > 1)
    reasons = dict.fromkeys(shared, "several blocks share it") | direct_uses(model)
    head = _asked(model, "get_output_embeddings")
    read = [(site.name, *_read(site, reasons)) for site in sites]
    blocks = [Block(name, layers) for name, layers, _ in read if layers]
    return Roles(
        family=family,
        blocks=tuple(blocks),
        embeddings=_embeddings(model),
        output_head=next((name for name, part in model.named_modules() if part is head), None),
        refused=tuple(refusal for _, _, refusals in read for refusal in refusals),
        warnings=_warnings(family, sites, blocks),
        outside=tuple(_outside(_Site("", model, family, None), sites, reasons)),
    )


def _family(module: nn.Module) -> str | None:
    family = getattr(getattr(module, "config", None), "model_type", None)
    return family if isinstance(family, str) and family else None


def _sites(module: nn.Module, path: str, family: str, config: Any) -> Iterator[_Site]:
    """Yield the items of the outermost lists that hold blocks."""
    if own := _family(module):
        family, config = own, getattr(module, "config", None)
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        # All that is below an item of a list is part of the block, which a list is never itself:
        # no model runs one.
        inside = not isinstance(module, nn.ModuleList) or isinstance(child, nn.ModuleList)
        below = list(_sites(child, child_path, family, config)) if inside else []
        yield from below
        if not below and isinstance(module, _LISTS) and is_block(child):
            yield _Site(child_path, child, family, config)


def _read(site: _Site, known: Reasons) -> tuple[tuple[Layer, ...], tuple[Refusal, ...]]:
    modules = projections(site.block)
    reasons = {
        name: reason_to_refuse(name, site.block) or known.get(module)
        for name, module in modules.items()
    }
    style, roles = _match(site, reasons)
    if style is not None:
        layers = _with_roles(site, style, roles)
        default = f"the table of family `{site.family}` gives it no role"
    else:
        layers = [
            _layer(site, shape.role, name, None, shape)
            for name, module in modules.items()
            if reasons[name] is None
            for shape in shapes_of(module)
        ]
        default = ""
    taken = {layer.name for layer in layers}
    refused = [
        Refusal(site.path(name), REFUSED_MODULES.get(name.rpartition(".")[2]) or reason or default)
        for name, reason in reasons.items()
        if site.path(name) not in taken
    ]
    return tuple(layers), tuple(refused)


def _outside(whole: _Site, sites: Collection[_Site], known: Reasons) -> Iterator[Layer]:
    """Yield the ordinary linear layers of the whole model that are in no block, nor tied."""
    named = whole.block.named_parameters(remove_duplicate=False)
    uses = Counter(id(parameter) for _, parameter in named)
    inside = tuple(f"{site.name}." for site in sites)
    for name, module in projections(whole.block).items():
        linear = isinstance(module, (nn.Linear, Conv1D)) or is_pointwise(module)
        if name.startswith(inside) or not linear:
            continue
        free = uses[id(module.weight)] == 1 and module not in known
        if free and reason_to_refuse(name, whole.block) is None:
            yield _layer(whole, "linear", name, None)


def _match(site: _Site, reasons: Mapping[str, str | None]) -> tuple[Style | None, dict[Role, str]]:
    """Find the style whose rows are all in the block, and the module of each row.

    There is none for a block that is scanned. `reasons` why modules are left alone are by path.
    """
    if site.family not in FAMILIES:
        free = {name for name, reason in reasons.items() if reason is None}
        for relative in RELATIVES.get(site.family, ()):
            roles, missing = match(relative.roles, free)
            if not missing and {*roles.values()} == free:
                with suppress(InputError):  # code that came with a model may mean other things
                    _with_roles(site, relative, roles)
                    return relative, roles
        return None, {}
    found = [(style, *match(style.roles, reasons)) for style in FAMILIES[site.family]]
    style, roles, missing = min(found, key=lambda item: len(item[2]))
    if not missing:
        return style, roles
    raise InputError(
        f"block `{site.name}` of family `{site.family}` lacks {listed(missing)}",
        f"transformers {transformers.__version__} may name its modules in a new way, or the model"
        " was already changed: load an unchanged checkpoint, or update tcompress",
    )


def _with_roles(site: _Site, style: Style, roles: Mapping[Role, str]) -> list[Layer]:
    return [_layer(site, role, name, style) for role, name in roles.items()]


def _layer(
    site: _Site, role: Role, name: str, style: Style | None, shape: Layer | None = None
) -> Layer:
    path = site.path(name)
    shape = shape or shape_of(site.block.get_submodule(name), role, path)
    parts = shape.parts or (Part(role, shape.out_features),)
    facts: dict[str, Any] = {}
    if style is not None:
        if shape.experts is None:
            parts = parts_of(path, role, shape.out_features, style, site.config)
        facts = {"calls": calls_of(site.family, role, site.config), "bilinear": style.bilinear}
        group = GROUP_OF_ROLE[role]
    else:
        group = path if shape.experts is None else f"{path}.{shape.parameter}"
    head = head_width(site.block, name, role, site.config)
    return replace(shape, name=path, role=role, parts=parts, group=group, head=head, **facts)


def _embeddings(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the input embeddings of the model and of the models inside it."""
    inside = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    inputs = {_asked(part, "get_input_embeddings") for part in inside}
    tables = (
        (name, item) for name, item in model.named_modules() if isinstance(item, nn.Embedding)
    )
    return tuple(name for name, table in tables if table in inputs)


def _asked(model: nn.Module, question: str) -> nn.Module | None:
    try:
        return getattr(model, question, lambda: None)()
    except (NotImplementedError, AttributeError):  # it has none
        return None


def _warnings(family: str, sites: Collection[_Site], blocks: Collection[Block]) -> tuple[str, ...]:
    tables = FAMILIES.keys() | RELATIVES.keys()
    scanned = {b.name for b in blocks if any(layer.role == "linear" for layer in b.layers)}
    warnings = [
        f"family `{name}` has no table of roles: its linear layers were found by their place in a"
        " numbered list, so that roles, shared inputs and order of execution are unknown"
        for name in sorted({x.family for x in sites if x.family not in tables or x.name in scanned})
    ]
    again = sorted({layer.role for block in blocks for layer in block.layers if layer.calls > 1})
    if again:
        warnings.append(
            f"the {listed(again)} layers also project the table of relative positions: their"
            " second call does not read tokens"
        )
    if not sites:
        warnings.append(f"no repeated block with linear layers was found in family `{family}`")
    return tuple(warnings)


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
    biased = family in ("t5", "mt5", "umt5")
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
        biased=biased,
        alike=not biased and not _joins_heads(module, layers, width),
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


def _joins_heads(module: nn.Module, layers: Mapping[str, Layer], width: int) -> bool:
    """Return whether something beside projections, such as a norm, is as wide as several heads."""
    own = {item.name.rpartition(".")[2] for item in layers.values()}
    widths = {_width(layers, role) for role in ("q", "k")} - {width}
    return any(
        widths.intersection(parameter.shape)
        for name, child in module.named_modules()
        if name not in own
        for parameter in child.parameters(recurse=False)
    )


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
    if family in RELATIVES:
        return f"nothing is known of how family `{family}` masks and places what it attends to"
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
