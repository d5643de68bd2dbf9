"""How `config.json` says the number of blocks, and what it lists block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import nn

# Names of the number of blocks, the usual ones first; a model class has its aliases for them.
_ENCODER = ("encoder_layers", "num_encoder_layers", "num_layers")
_DECODER = ("decoder_layers", "num_decoder_layers")
_ONLY = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")

# Lists with one entry for each block.
_BY_BLOCK = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_window")


def cut_settings(
    config: Any, settings: Mapping[str, Any], model: nn.Module, kept: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Rewrites the content of `config.json` for fewer blocks.

    Whether the result means what it should is for the caller to check.

    Args:
        config: The config that was read from it.
        settings: The content.
        model: The model; the meta device is enough.
        kept: Indices of the kept blocks by the path of their stack.
    """
    result: dict[str, Any] = deepcopy(dict(settings))
    for path, indices in kept.items():
        part, owner = _owner(config, model, path)
        # Old CLIP files say the same twice, and the second time counts.
        targets = [result] if part is None else [result.setdefault(part, {})]
        twice = result.get(f"{part}_dict")
        targets += [twice] if isinstance(twice, dict) else []
        for target in targets:
            target |= _by_block(owner, indices) | _routed(owner, indices)
            target |= _stages(owner, target, indices)
            counts = _counts(owner, model, path, len(indices), kept, part)
            target |= counts | _aliases(owner, target, counts)
    return result


def _owner(config: Any, model: nn.Module, path: str) -> tuple[str | None, Any]:
    """The part of the config that a stack follows, and its name; None for the whole."""
    above, steps = model, path.split(".")
    nearest = getattr(model, "config", None)
    for step in steps:
        above = above.get_submodule(step)
        nearest = getattr(above, "config", None) or nearest
    for part in getattr(config, "sub_configs", {}):
        # The model holds a copy of the config, with parts that are its own.
        if nearest is getattr(model.config, part, None):  # type: ignore[union-attr]
            return part, getattr(config, part)
    return None, config


def _counts(
    owner: Any,
    model: nn.Module,
    path: str,
    count: int,
    kept: Mapping[str, Sequence[int]],
    part: str | None,
) -> dict[str, int]:
    """Keys of the number of blocks with their new values.

    Where one config counts encoder and decoder, both are written: one that is left out of a file
    may mean as many as there are of the other.
    """
    before = len(model.get_submodule(path))  # type: ignore[arg-type]
    if part is not None or not getattr(owner, "is_encoder_decoder", False):
        return _named(owner, _ONLY, before, count)
    names, others = (_DECODER, _ENCODER) if _is_decoder(path) else (_ENCODER, _DECODER)
    found = _named(owner, names, before, count)
    if not any(_is_decoder(other) != _is_decoder(path) for other in kept):
        found |= _kept_count(owner, others)
    return found


def _is_decoder(path: str) -> bool:
    return "decoder" in path.split(".")


def _kept_count(owner: Any, names: Sequence[str]) -> dict[str, int]:
    known = [name for name in names if isinstance(getattr(owner, name, None), int)]
    return {name: getattr(owner, name) for name in known[:1]}


def _named(owner: Any, names: Sequence[str], before: int, count: int) -> dict[str, int]:
    """The first of these keys that says so many blocks."""
    aliases = getattr(owner, "attribute_map", {})
    for name in names:
        name = aliases.get(name, name)
        if getattr(owner, name, None) == before:
            return {name: count}
    return {}


def _aliases(owner: Any, settings: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, int]:
    """Other names of these keys that the file uses too; any of them may count."""
    aliases = getattr(owner, "attribute_map", {}).items()
    return {name: counts[real] for name, real in aliases if real in counts and name in settings}


def _by_block(owner: Any, indices: Sequence[int]) -> dict[str, Any]:
    """Lists by block, written out even where the file leaves them to a default."""
    found: dict[str, Any] = {}
    for name in _BY_BLOCK:
        values = getattr(owner, name, None)
        if isinstance(values, list | tuple) and len(values) > indices[-1]:
            found[name] = [values[index] for index in indices]
    kinds = getattr(owner, "attention_layers", None)  # of GPT-Neo, which writes it as runs
    if isinstance(kinds, list) and len(kinds) > indices[-1]:
        found["attention_layers"] = [kinds[index] for index in indices]
        found["attention_types"] = [[[kinds[index]], 1] for index in indices]
    return found


def _stages(owner: Any, settings: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """What a backbone says of its stages, one after the stem and one after every block.

    A stage whose block goes is the last one before it that stays.
    """
    names = getattr(owner, "stage_names", None)
    if not isinstance(names, list) or len(names) != getattr(owner, "num_hidden_layers", -1) + 1:
        return {}
    given = [place % len(names) for place in owner.out_indices or ()]
    places = sorted({sum(was < place for was in indices) for place in given})
    found = {
        "stage_names": names[: len(indices) + 1],
        "out_features": [names[place] for place in places],
        "out_indices": places,
    }
    return {name: value for name, value in found.items() if name in settings}


def _routed(owner: Any, indices: Sequence[int]) -> dict[str, Any]:
    """Which blocks have experts, where that follows from their numbers."""
    if not hasattr(owner, "mlp_only_layers"):
        return {}
    step = getattr(owner, "decoder_sparse_step", 1)
    dense = [now for now, was in enumerate(indices) if _is_dense(owner, was, step)]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


def _is_dense(owner: Any, index: int, step: int) -> bool:
    return index in (owner.mlp_only_layers or ()) or (index + 1) % step != 0
