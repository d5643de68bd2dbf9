"""Parameters and multiply-adds of a model, from its shapes alone.

Multiply-adds are those of one token in a sequence of T tokens that passes every block once: in
models with an encoder and a decoder, or with two towers, one token of each. The sum is

    linear layers of the blocks   in x out; of experts, only those that a token is routed to
    + attention, per attention    2 T d   (query times keys, weights times values; d = heads x
                                  head size, the input width of the output projection); what
                                  another mechanism does, where there is one
    + output head                 d x vocabulary, if the class of the model has one

What a rewritten layer does once per pass (rebuilding a weight) is shared out among the T tokens. T
is chosen, but for models whose inputs all have the same number of tokens, such as most image
models. Embeddings are look-ups and count nothing, but for what a rewritten one builds a row with.
Left out are norms, activations and biases, projections outside the blocks other than the output
head, what runs once per sequence (poolers, classifiers, tables of relative positions), and patch
projections. Windows and causal masks are not subtracted: the number is that of the last of T tokens
under full attention. In families without a table of roles every block is taken to hold one
attention of the width that the config calls `hidden_size`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from tcompress.attention.replacement import mechanism
from tcompress.planning.entries import AttentionPlan, LayerPlan
from tcompress.roles import Anatomy, Block, Layer, attentions_of
from tcompress.structures.capabilities import macs_of

Planned = Mapping[tuple[str, str], LayerPlan]
"""Rewritten layers by module path and parameter."""

Exchanged = Mapping[str, AttentionPlan]
"""Attentions with another mechanism, by the module path of their block."""

_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def block_parameters(model: nn.Module, anatomy: Anatomy) -> int:
    """Parameters of all transformer blocks, biases and norms counted."""
    return _distinct(
        parameter
        for block in anatomy.blocks
        for parameter in model.get_submodule(block.name).parameters()
    )


def embedding_parameters(model: nn.Module, anatomy: Anatomy) -> int:
    """Parameters of all embedding tables outside the blocks: words, positions, segments."""
    inside = tuple(f"{block.name}." for block in anatomy.blocks)
    return _distinct(
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not name.startswith(inside)
    )


def all_parameters(model: nn.Module) -> int:
    """Parameters of the model; tied ones count once."""
    return _distinct(model.parameters())


def _distinct(parameters: Iterable[Tensor]) -> int:
    return sum({id(parameter): parameter.numel() for parameter in parameters}.values())


def macs_per_token(
    model: nn.Module,
    anatomy: Anatomy,
    planned: Planned,
    length: int,
    exchanged: Exchanged = MappingProxyType({}),
) -> tuple[int, int]:
    """Multiply-adds for one token, dense and with the planned layers rewritten.

    Args:
        model: The dense model; the meta device is enough.
        anatomy: Its anatomy.
        planned: What is rewritten.
        length: Number of tokens T in the sequence.
        exchanged: What has another mechanism: one of a fixed number of tokens is counted for that
            number, shared out among its tokens.
    """
    config = getattr(model, "config", None)
    same = sum(_left_alone(model.get_submodule(item.name), config) for item in anatomy.refused)
    dense = now = same * length
    dense += (_attention(anatomy.blocks, config, length) + _head(model, anatomy)) * length
    left = [block for block in anatomy.blocks if block.name not in exchanged]
    now += _attention(left, config, length) * length
    now += sum(mechanism_macs(entry, length) for entry in exchanged.values())
    now += sum(item.row_macs for item in planned.values() if item.kind == "embedding") * length
    table = _tied_table(model, anatomy, planned)
    now += _head(model, anatomy) * length if table is None else table.macs(length)
    dropped = {
        f"{path}.{layer.role}" for path, entry in exchanged.items() for layer in entry.unused
    }
    for layer in anatomy.layers:
        runs = experts_per_token(config, layer.experts)
        own = layer.in_features * layer.out_features * runs * length
        entry = planned.get((layer.name, layer.parameter))
        dense += own
        if any(f"{path}.{layer.role}" in dropped for path in _above(layer.name)):
            continue
        now += own if entry is None else layer_macs(entry, runs, length)
    return dense // length, -(-now // length)


def experts_per_token(config: Any, experts: int | None) -> int:
    """Experts that one token passes: all of them where the config does not say."""
    if experts is None:
        return 1
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = (getattr(text, name, None) for name in _ROUTED)
    return next((number for number in found if isinstance(number, int)), experts)


def layer_macs(entry: LayerPlan, runs: int, length: int) -> int:
    """Multiply-adds of a rewritten layer for a sequence.

    Args:
        entry: The layer.
        runs: Experts that a token passes, all of them equally often. What they share runs once:
            the input side of their first weight, the output side of their second unless biases
            come after it. Of experts that route tokens in a way of their own nothing is shared.
        length: Number of tokens T in the sequence.
    """
    if entry.kind != "experts":
        return entry.macs(length)
    once = {"experts_gate_up": "in", "experts_down": "" if entry.bias else "out"}.get(entry.role)
    total = 0
    for index, part in enumerate(entry.parts):
        for layout in part.terms:
            rows, more = divmod(length * runs, entry.copies)  # some experts get one more
            total += (entry.copies - more) * macs_of(layout, rows).apply
            total += more * macs_of(layout, rows + 1).apply
            macs = macs_of(layout, length)
            total += macs.decode * (1 if once == "out" else runs)
            if not index:
                total += macs.encode * (1 if once == "in" else runs)
    return total


def mechanism_macs(entry: AttentionPlan, length: int) -> int:
    """Multiply-adds of a mechanism for a sequence.

    Args:
        entry: The attention.
        length: Number of tokens T in the sequence.
    """
    tokens = _fixed(entry) or length
    return mechanism(entry.layout.mechanism).macs(entry.layout, tokens) * length // tokens


def usual_tokens(
    model: nn.Module, anatomy: Anatomy, length: int, exchanged: Exchanged = MappingProxyType({})
) -> int:
    """Returns the number of tokens to count a model for.

    Args:
        model: The model; the meta device is enough.
        anatomy: Its anatomy.
        length: Number of tokens, unless every attention has the same number whatever is given.
        exchanged: What has another mechanism.
    """
    fixed = {_fixed(entry) for entry in exchanged.values()}
    fixed |= {item.tokens for item in attentions_of(model, anatomy) if item.block not in exchanged}
    (first, *others) = fixed or {None}
    return length if others or not first else first


def _fixed(entry: AttentionPlan) -> int | None:
    """Number of tokens that a mechanism is tied to."""
    layout: Any = entry.layout
    if getattr(layout, "grid", ()):
        return int(prod(layout.grid)) + int(layout.special)
    return getattr(layout, "length", None)


def _above(path: str) -> Iterator[str]:
    """Paths of the modules that a module is part of."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _attention(blocks: Iterable[Block], config: Any, length: int) -> int:
    total = 0
    for block in blocks:
        widths = [layer.in_features for layer in block.layers if layer.role in ("o", "cross_o")]
        if not widths and all(layer.role == "linear" for layer in block.layers):
            widths = [_hidden_size(config, block.layers)]
        total += sum(2 * length * width for width in widths)
    return total


def _hidden_size(config: Any, layers: Iterable[Layer]) -> int:
    size = getattr(config, "hidden_size", None)
    return size if isinstance(size, int) else next(iter(layers)).in_features


def _head(model: nn.Module, anatomy: Anatomy) -> int:
    if anatomy.output_head is None:
        return 0
    weight = getattr(model.get_submodule(anatomy.output_head), "weight", None)
    return 0 if weight is None else int(weight.numel())


def _tied_table(model: nn.Module, anatomy: Anatomy, planned: Planned) -> LayerPlan | None:
    """The rewritten word embedding that the output head applies, if it does."""
    if anatomy.output_head is None:
        return None
    own = getattr(model.get_submodule(anatomy.output_head), "weight", None)
    for (path, _), entry in planned.items():
        if entry.kind == "embedding" and model.get_submodule(path).weight is own:
            return entry
    return None


def _left_alone(module: nn.Module, config: Any) -> int:
    """Multiply-adds of a projection that is never rewritten, such as a router."""
    total = 0
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 2:
            total += parameter.numel()
        elif parameter.ndim == 3:
            experts = parameter.shape[0]
            total += parameter.numel() // experts * experts_per_token(config, experts)
    return total
