"""Puts structured layers in the place of dense ones, from a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial

import torch
from torch import Tensor, nn

from tcompress.errors import ArtifactError
from tcompress.planning.entries import BankKey, LayerPlan
from tcompress.structures.bank import BankModule
from tcompress.structures.embedding import LookupScale, StructuredEmbedding, tie_tables
from tcompress.structures.experts import StructuredExperts, child_of
from tcompress.structures.linear import StructuredLinear
from tcompress.structures.pointwise import PointwiseConvolution


def install_layers(
    root: nn.Module,
    entries: Iterable[LayerPlan],
    runtime_name: Callable[[str], str | None],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    dtype_of: Callable[[str], torch.dtype | None] | None = None,
    banks: MutableMapping[BankKey, BankModule] | None = None,
) -> dict[str, StructuredLinear | StructuredExperts]:
    """Replaces every planned layer by a structured one with empty tensors.

    Args:
        root: Model or block.
        entries: Plans, owners of shared inputs before the layers that share them.
        runtime_name: Gives the module path below `root` of a planned name, or None where the
            model has no such layer (a plan may be read into a model without some heads).
        dtype: Dtype of the tensors.
        device: Device of the tensors.
        dtype_of: Dtype of one module, where it differs from `dtype`.
        banks: Banks that were made before; what these layers own is added.

    Returns:
        The new modules by planned name.
    """
    made: dict[str, StructuredLinear | StructuredExperts] = {}
    banks = {} if banks is None else banks
    for entry in entries:
        path = runtime_name(entry.name)
        if path is None:
            continue
        if entry.kind == "embedding":
            made[entry.name] = _table_at(root, path, entry, dtype, device)
            continue
        if entry.kind == "experts":
            stack = made[entry.name] = _experts_at(root, path)
            options = {"transposed": entry.transposed, "dtype": dtype, "device": device}
            stack.rewrite(entry.parameter, entry.parts, **options)  # type: ignore[arg-type]
            continue
        own = dtype_of(path) if dtype_of is not None else None
        owner = made.get(entry.input_of) if entry.input_of else None
        lent = {name: (other, name) for name, other in entry.bank_of.items()}
        if not banks.keys() >= set(lent.values()):
            raise ArtifactError(
                f"layer `{entry.name}` shares tensors with layers that this model lacks",
                "load the whole model, or export it first: `tcompress export MODEL --to dense`",
            )
        kind: Callable[..., StructuredLinear] = StructuredLinear
        if entry.kind == "pointwise":
            kind = partial(PointwiseConvolution, host=root.get_submodule(path))
        made[entry.name] = layer = kind(
            entry.parts,
            bias=entry.bias,
            input_of=owner if isinstance(owner, StructuredLinear) else None,
            readers=entry.readers,
            banks={name: banks[key] for name, key in lent.items()},
            dtype=own or dtype,
            device=device,
        )
        banks.update({(entry.name, name): layer.banks[name] for name in entry.own_banks})
        set_module(root, path, layer)
    return made


def _table_at(
    root: nn.Module,
    path: str,
    entry: LayerPlan,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> StructuredEmbedding:
    """Replaces an embedding, and what is tied to it."""
    host = root.get_submodule(path)
    table = StructuredEmbedding(
        entry.parts,
        padding_idx=getattr(host, "padding_idx", None),
        scale=LookupScale.of(host),
        dtype=dtype,
        device=device,
    )
    set_module(root, path, table)
    tie_tables(root, path, table)
    return table


def _experts_at(root: nn.Module, path: str) -> StructuredExperts:
    host = root.get_submodule(path)
    if not isinstance(host, StructuredExperts):
        host = StructuredExperts(host)
        set_module(root, path, host)
    return host


def set_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Replaces a submodule, keeping its training mode."""
    parent, _, leaf = path.rpartition(".")
    module.train(root.get_submodule(path).training)
    setattr(root.get_submodule(parent), leaf, module)


def stored_name(entry: LayerPlan, tensor: str) -> str:
    """Returns the name below the layer under which a tensor is stored."""
    if entry.kind != "experts":
        return tensor
    return f"{child_of(entry.parameter)}.{tensor}"


def fill(module: nn.Module, entry: LayerPlan, tensors: Mapping[str, Tensor]) -> None:
    """Copies fitted tensors into an installed layer."""
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[stored_name(entry, name)].copy_(tensor)
