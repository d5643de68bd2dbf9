"""Bytes that the tensors of an output take; exact, but for the headers of files."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from tcompress.planning.embeddings import tied_to
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.source import SourceModel


def weight_keys(source: SourceModel, entry: LayerPlan) -> tuple[str, ...]:
    """Names in the checkpoint of the tensors that a rewritten weight is read from."""
    path = source.keymap.runtime_name(entry.name) or entry.name
    return tuple(source.keymap.sources(f"{path}.{entry.parameter}").keys)


def rewritten_names(source: SourceModel, layers: Sequence[LayerPlan]) -> list[str]:
    """Lists the model's parameters in whose place structures are stored."""
    found = []
    for entry in layers:
        path = source.keymap.runtime_name(entry.name) or entry.name
        found.append(f"{path}.{entry.parameter}")
        if entry.bias and entry.kind != "experts":
            found.append(f"{path}.bias")
    return found


def copied_keys(source: SourceModel, plan: Plan) -> list[str]:
    """Names of the tensors that are carried over as they are."""
    replaced = {key for entry in plan.entries for key in weight_keys(source, entry)}
    for entry in plan.embeddings:
        for name in tied_to(source, source.keymap.runtime_name(entry.name) or entry.name):
            replaced.update(source.keymap.sources(f"{name}.weight").keys)
    for other in plan.attention:  # queries that a mechanism does not need
        for layer in other.unused:
            path = source.keymap.runtime_name(layer.name) or layer.name
            leaves = ("weight", "bias") if layer.bias else ("weight",)
            replaced.update(source.keymap.sources(f"{path}.{leaf}").keys[0] for leaf in leaves)
    replaced |= {*source.keymap.stale, *source.keymap.unmatched}  # no model reads them
    return [key for key in source.store.keys() if key not in replaced]  # noqa: SIM118


def disk_bytes(source: SourceModel, plan: Plan, dtype: str | None) -> int:
    """Counts the bytes of all tensors of an output.

    Args:
        source: The dense model, without blocks that are dropped.
        plan: What is done to it.
        dtype: Dtype of the output; None for that of the source.
    """
    store = source.store
    asked = None if dtype is None else getattr(torch, dtype)
    total = sum(
        prod(store.shape(k)) * _itemsize(store.dtype(k), asked) for k in copied_keys(source, plan)
    )
    keymap = source.keymap
    for path in keymap.apart(rewritten_names(source, plan.entries)).values():
        own = store.dtype(keymap.sources(path).keys[0])
        total += keymap.model.get_parameter_or_buffer(path).numel() * _itemsize(own, asked)
    for entry in plan.entries:
        total += entry.parameters * weight_bytes(source, entry, dtype)
    for other in plan.attention:
        path = source.keymap.runtime_name(other.like) or other.like
        own = store.dtype(source.keymap.sources(f"{path}.weight").keys[0])
        total += other.parameters * _itemsize(own, asked)
    return total


def weight_bytes(source: SourceModel, entry: LayerPlan, dtype: str | None) -> int:
    """Bytes of one number of a rewritten weight."""
    own = source.store.dtype(weight_keys(source, entry)[0])
    return _itemsize(own, None if dtype is None else getattr(torch, dtype))


def _itemsize(own: torch.dtype, asked: torch.dtype | None) -> int:
    return (own if asked is None or not own.is_floating_point else asked).itemsize
