"""Finding the anatomy of a model: by the table of its family, else by its structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn

from tcompress.anatomy.data import GROUP_OF_ROLE, Anatomy, Block, Layer, Part, Refusal, Role
from tcompress.anatomy.families import (
    FAMILIES,
    REFUSED_FAMILIES,
    REFUSED_MODULES,
    Style,
    calls_of,
    match,
    parts_of,
)
from tcompress.anatomy.heads import head_width
from tcompress.anatomy.projections import projections, reason_to_refuse, shape_of
from tcompress.errors import InputError


@dataclass(frozen=True)
class _Site:
    """A block in the model, with the family and config of the model it directly belongs to."""

    name: str
    block: nn.Module
    family: str
    config: Any

    def path(self, relative: str) -> str:
        return f"{self.name}.{relative}"


def anatomy_of(model: nn.Module) -> Anatomy:
    """Find the blocks of a transformer and the role of every layer in them.

    Only names and shapes are read, so the model may live on the meta device. Models made of
    several models (two towers, encoder and decoder) are read tower by tower: each block follows
    the nearest config above it.

    Args:
        model: A Hugging Face model, or any module with repeated blocks in a `ModuleList`.

    Returns:
        The anatomy. In families without a table every linear layer of a block is listed with
        the role `linear`, and `supported` is False.

    Raises:
        InputError: A block of a supported family lacks a module that its table names.
    """
    family = _family(model) or type(model).__name__
    sites = tuple(_sites(model, "", family, getattr(model, "config", None)))
    if family in FAMILIES and not sites:
        raise InputError(
            f"no transformer block was found in this `{type(model).__name__}`",
            "give the whole model, with its blocks in a ModuleList",
        )
    shared = _shared(model)
    blocks: list[Block] = []
    refused: list[Refusal] = []
    for site in sites:
        layers, left = _read(site, shared)
        refused.extend(left)
        if layers:
            blocks.append(Block(site.name, layers))
    return Anatomy(
        family=family,
        blocks=tuple(blocks),
        embeddings=_embeddings(model),
        output_head=_output_head(model),
        refused=tuple(refused),
        warnings=_warnings(family, sites, blocks),
        supported=bool(sites) and all(site.family in FAMILIES for site in sites),
    )


def _family(module: nn.Module) -> str | None:
    family = getattr(getattr(module, "config", None), "model_type", None)
    return family if isinstance(family, str) and family else None


def _sites(module: nn.Module, path: str, family: str, config: Any) -> Iterator[_Site]:
    """Yield the items of the outermost module lists that hold projections."""
    if own := _family(module):
        family, config = own, getattr(module, "config", None)
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if not isinstance(child, nn.ModuleList):
            yield from _sites(child, child_path, family, config)
            continue
        for index, item in child.named_children():
            # A list of bare linear layers is a list of heads, not of blocks.
            if projections(item):
                yield _Site(f"{child_path}.{index}", item, family, config)


def _shared(model: nn.Module) -> frozenset[nn.Module]:
    """Return the modules that can be reached by several paths."""
    counts = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    return frozenset(module for module, count in counts.items() if count > 1)


def _read(
    site: _Site, shared: Collection[nn.Module]
) -> tuple[tuple[Layer, ...], tuple[Refusal, ...]]:
    """Sort the projections of one block into layers and refusals."""
    modules = projections(site.block)
    reasons = {name: reason_to_refuse(name, site.block, shared) for name in modules}
    if site.family in FAMILIES:
        style, roles = _match(site, list(modules))
        layers = [_layer(site, role, name, style) for role, name in roles.items()]
        default = f"the table of family `{site.family}` gives it no role"
    elif site.family in REFUSED_FAMILIES:
        layers, default = [], REFUSED_FAMILIES[site.family]
    else:
        plain = [name for name, reason in reasons.items() if reason is None]
        layers, default = [_layer(site, "linear", name, None) for name in plain], ""
    taken = {layer.name for layer in layers}
    refused = [
        Refusal(site.path(name), REFUSED_MODULES.get(_last(name)) or reason or default)
        for name, reason in reasons.items()
        if site.path(name) not in taken
    ]
    return tuple(layers), tuple(refused)


def _match(site: _Site, names: list[str]) -> tuple[Style, dict[Role, str]]:
    """Find the style whose rows are all in the block, and the module of each row."""
    missing: list[str] = []
    for style in FAMILIES[site.family]:
        roles, absent = match(style.roles, names)
        if not absent:
            return style, roles
        if not missing or len(absent) < len(missing):
            missing = absent
    raise InputError(
        f"block `{site.name}` of family `{site.family}` lacks {_listed(missing)}",
        f"transformers {transformers.__version__} may name its modules in a new way, or the model"
        " was already changed: load an unchanged checkpoint, or update tcompress",
    )


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _layer(site: _Site, role: Role, name: str, style: Style | None) -> Layer:
    path = site.path(name)
    shape = shape_of(site.block.get_submodule(name), role, path)
    parts: tuple[Part, ...] = (Part(role, shape.out_features),)
    group, calls = path, 1
    if style is not None:
        parts = parts_of(path, role, shape.out_features, style, site.config)
        group, calls = GROUP_OF_ROLE[role], calls_of(site.family, role, site.config)
    return Layer(
        name=path,
        role=role,
        kind=shape.kind,
        in_features=shape.in_features,
        out_features=shape.out_features,
        bias=shape.bias,
        parts=parts,
        group=group,
        experts=shape.experts,
        parameter=shape.parameter,
        calls=calls,
        head=head_width(site.block, name, role, site.config),
    )


def _embeddings(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the input embeddings of the model and of the models inside it."""
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            try:
                found.append(module.get_input_embeddings())
            except NotImplementedError:  # two towers, no embedding of its own
                continue
    wanted = {module for module in found if isinstance(module, nn.Embedding)}
    return tuple(name for name, module in model.named_modules() if module in wanted)


def _output_head(model: nn.Module) -> str | None:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return next((name for name, module in model.named_modules() if module is head), None)


def _warnings(family: str, sites: Collection[_Site], blocks: Collection[Block]) -> tuple[str, ...]:
    families = sorted({site.family for site in sites})
    warnings = [
        f"family `{name}` has no table of roles: its linear layers were found by their place in a"
        " numbered list, so that roles, shared inputs and order of execution are unknown"
        for name in families
        if name not in FAMILIES and name not in REFUSED_FAMILIES
    ]
    warnings += [
        f"family `{name}` is left alone: {REFUSED_FAMILIES[name]}"
        for name in families
        if name in REFUSED_FAMILIES
    ]
    again = sorted({layer.role for block in blocks for layer in block.layers if layer.calls > 1})
    if again:
        warnings.append(
            f"the {_listed(again)} layers also project the table of relative positions: their"
            " second call does not read tokens"
        )
    if not sites:
        warnings.append(f"no repeated block with linear layers was found in family `{family}`")
    return tuple(warnings)
