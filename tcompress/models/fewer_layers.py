"""A model without some of its blocks, or with some twice: the same files, another depth.

Everything that reads a `SourceModel` can read the result, which has a config with so many blocks,
and a store that names the tensors of the kept blocks by their new places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import count, islice
from typing import Any

from torch import nn

from tcompress.errors import PlanError, SourceError, after_colon, first_line
from tcompress.models.keymap import modules_above
from tcompress.models.model import SourceModel

Kept = Mapping[str, Sequence[int]]
"""Indices of the kept blocks, ascending, by the module path of their stack; copies repeat one."""

# What the first block of a stack computes for all of them stays in the first one.
_FOR_ALL = "relative_attention_bias"

# Names of the number of blocks, the usual ones first; a model class has its aliases for them.
_ENCODER = ("encoder_layers", "num_encoder_layers", "num_layers")
_DECODER = ("decoder_layers", "num_decoder_layers")
_ONLY = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")

# Lists with one entry for each block.
_BY_BLOCK = (
    "layer_types", "mlp_layer_types", "no_rope_layers", "attention_window", "attention_layers",
)  # fmt: skip

# Lists of blocks, by number, whose outputs are read outside their stack, one by one.
_READ_ELSEWHERE = (
    "backbone_out_indices", "extract_layers", "deepstack_visual_indexes",
    "intermediate_layers_indices",
)  # fmt: skip


def _cut_settings(source: SourceModel, kept: Kept) -> dict[str, Any]:
    """Rewrites `config.json` for so many blocks; whether it means that is for others to check."""
    model: nn.Module = source.keymap.model
    result = deepcopy(source.settings)
    for path, indices in kept.items():
        part, owner = _owner(source.config, model, path)
        for target in sections(result, part):
            target |= _by_block(owner, indices) | _routed(owner, indices)
            target |= _renumbered(owner, indices)
            target |= _stages(owner, target, indices)
            write_keys(target, owner, _counts(owner, model, path, kept, part))
    return result


def sections(settings: dict[str, Any], part: str | None) -> list[dict[str, Any]]:
    """Lists what of `config.json` a part of a config is read from; None stands for the whole."""
    found = [settings] if part is None else [settings.setdefault(part, {})]
    # Old CLIP files say the same twice, and the second time counts.
    twice = settings.get(f"{part}_dict")
    return [*found, twice] if isinstance(twice, dict) else found


def write_keys(section: dict[str, Any], owner: Any, values: Mapping[str, Any]) -> None:
    """Puts values into what a config is read from."""
    section |= values
    # Files use other names of these keys too, and any of them may count.
    aliases = getattr(owner, "attribute_map", {}).items()
    known = [(name, real) for name, real in aliases if name in section]
    section |= {name: values[real] for name, real in known if real in values}


def _owner(config: Any, model: nn.Module, path: str) -> tuple[str | None, Any]:
    """The part of the config that a stack follows, and its name; None for the whole."""
    nearest = getattr(model, "config", None)
    for above in (*modules_above(path), path):
        nearest = getattr(model.get_submodule(above), "config", None) or nearest
    for part in getattr(config, "sub_configs", {}):
        # The model holds a copy of the config, with parts that are its own.
        if nearest is getattr(model.config, part, None):  # type: ignore[union-attr]
            return part, getattr(config, part)
    return None, config


def _counts(owner: Any, model: Any, path: str, kept: Kept, part: str | None) -> dict[str, int]:
    """Keys of the number of blocks with their new values.

    Encoder and decoder are both written: one left out of a file may mean as many as of the other.
    """

    def is_decoder(place: str) -> bool:
        return "decoder" in place.split(".")

    names: tuple[str, ...] = _ONLY
    others: tuple[str, ...] = ()
    if part is None and getattr(owner, "is_encoder_decoder", False):
        names, others = (_DECODER, _ENCODER) if is_decoder(path) else (_ENCODER, _DECODER)
    before = len(model.get_submodule(path))
    aliases = getattr(owner, "attribute_map", {})
    real = (aliases.get(name, name) for name in names)
    first = next((name for name in real if getattr(owner, name, None) == before), None)
    found = {} if first is None else {first: len(kept[path])}
    if not any(is_decoder(other) != is_decoder(path) for other in kept):
        unchanged = (name for name in others if isinstance(getattr(owner, name, None), int))
        found |= {name: getattr(owner, name) for name in islice(unchanged, 1)}
    return found


def _by_block(owner: Any, indices: Sequence[int]) -> dict[str, Any]:
    """Lists by block, written out even where the file leaves them to a default."""
    lists: dict[str, Any] = {}
    for name in _BY_BLOCK:
        values = getattr(owner, name, None)
        if isinstance(values, list | tuple) and len(values) > indices[-1]:
            lists[name] = [values[index] for index in indices]
    if "attention_layers" in lists:  # of GPT-Neo, which writes it as runs
        lists["attention_types"] = [[[kind], 1] for kind in lists["attention_layers"]]
    return lists


def _renumbered(owner: Any, indices: Sequence[int]) -> dict[str, Any]:
    """Lists of blocks of another kind, such as those of full attention, by their new numbers."""
    lists = {name: values for name, values in vars(owner).items() if name.endswith("block_indexes")}
    return {
        name: [now for now, was in enumerate(indices) if was in values]
        for name, values in lists.items()
        if isinstance(values, list | tuple)
    }


def _moved_numbers(source: SourceModel, kept: Kept) -> Iterator[str]:
    """Lists of blocks whose outputs are read elsewhere, where some are no longer in their place."""
    for path, indices in kept.items():
        _, owner = _owner(source.config, source.keymap.model, path)
        same = {now for now, was in enumerate(indices) if now == was}
        whole = owner if "text" in path else source.config  # they are of pictures
        for name in _READ_ELSEWHERE:
            values = getattr(owner, name, None) or getattr(whole, name, None)
            if isinstance(values, list | tuple) and not {*values} <= same:
                blocks = ", ".join(map(str, values))
                yield f"`{name}` of its config has the blocks {blocks}: keep them in place"


def _stages(owner: Any, settings: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """Rename a backbone's stages; one whose block goes is the last before it that stays."""
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
    if not hasattr(owner, "mlp_only_layers"):
        return {}
    step, before = getattr(owner, "decoder_sparse_step", 1), owner.mlp_only_layers or ()
    dense = [now for now, was in enumerate(indices) if was in before or (was + 1) % step]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


def cut_blocks(source: SourceModel, kept: Kept) -> SourceModel:
    """Describes a model with some of its blocks; stacks that are not named stay whole.

    A `PlanError` lists all that keeps blocks from their new places.
    """
    whole = source.keymap.model
    settings = _cut_settings(source, kept)
    try:
        cut = source.with_settings(settings)
        model = cut.meta_model()
    except Exception as error:
        # A config class may raise anything.
        reason = f"its config does not take the new number of blocks ({first_line(error)})"
        raise _refusal(source, [reason]) from error
    problems = [*_unlike_blocks(whole, model, kept), *_unlike_rest(whole, model, kept)]
    problems += _moved_numbers(source, kept)
    # DeBERTa sends what its first block reads and returns through a convolution.
    convolved = getattr(source.config, "conv_kernel_size", 0)
    deberta = source.config.model_type == "deberta-v2"
    if deberta and convolved and any(indices[0] for indices in kept.values()):
        problems.append("a convolution belongs to its first block: keep block 0")
    if problems:
        raise _refusal(source, problems)
    names = {key: key for key in source.store.keys()}  # noqa: SIM118 - not a mapping
    renumbered: list[tuple[str, str]] = []
    for path, indices in kept.items():
        prefix = _stored_prefix(source, path)
        names = _renamed(names, prefix, indices) | _carried(source, model, path, indices)
        for place in (path, prefix):
            before = _numbers(indices, len(whole.get_submodule(path)))  # type: ignore[arg-type]
            renumbered += [(f"{place}.{now}", f"{place}.{was}") for now, was in enumerate(before)]
    return replace(cut, store=source.store.renamed(names), renumbered=tuple(renumbered))


def _numbers(indices: Sequence[int], blocks: int) -> list[int]:
    """Numbers that people know blocks by: copies are counted on from the last block."""
    copies = count(blocks)
    return [next(copies) if was in indices[:now] else was for now, was in enumerate(indices)]


def fixed_blocks(source: SourceModel, path: str) -> tuple[int, ...]:
    """Returns the blocks of a stack that no other one can replace: the first one, if any."""
    blocks = len(source.keymap.model.get_submodule(path))
    try:
        cut_blocks(source, {path: range(1, blocks)})
    except PlanError:
        return (0,)
    return ()


def _unlike_blocks(whole: nn.Module, model: nn.Module, kept: Kept) -> Iterator[str]:
    for path, indices in kept.items():
        old, new = whole.get_submodule(path), model.get_submodule(path)
        if len(new) != len(indices):  # type: ignore[arg-type]
            yield f"nothing in its config sets the number of blocks in `{path}`"
            continue
        for now, was in enumerate(indices):
            before, after = old.get_submodule(str(was)), new.get_submodule(str(now))
            difference = next(_differences(before, after, was, now), None)
            if difference is not None:
                hint = f": keep block {now}" if now == 0 else ""
                yield f"block {was} of `{path}` would become block {now}, {difference}{hint}"


def _differences(before: nn.Module, after: nn.Module, was: int, now: int) -> Iterator[str]:
    """Yield differences of a block from the one in its new place, apart from the place itself."""
    old = {name: item for name, item in before.named_modules() if not name.endswith(_FOR_ALL)}
    new = {name: item for name, item in after.named_modules() if not name.endswith(_FOR_ALL)}
    for name in [name for name in {**old, **new} if (name in old) != (name in new)]:
        yield f"which has {'no' if name in old else 'another module,'} `{name}`"
    for name, one in old.items():
        two = new[name]
        if type(one) is not type(two):
            yield f"whose `{name}` is a {type(two).__name__} and not a {type(one).__name__}"
        if shapes_of(one) != shapes_of(two):
            yield f"whose `{name}` has other shapes"
        first, second = _plain(one), _plain(two)
        for key in sorted(first.keys() | second.keys()):
            a, b = first.get(key), second.get(key)
            if a != b and (type(a), a, b) != (int, was, now):  # other than its place itself
                yield f"whose `{f'{name}.{key}'.lstrip('.')}` is {b!r} and not {a!r}"


def _plain(module: nn.Module) -> dict[str, Any]:
    kinds = (bool, int, float, str, type(None))
    return {
        key: value
        for key, value in vars(module).items()
        if type(value) in kinds and not key.startswith("_") and _FOR_ALL not in key
    }


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a module itself holds, by name."""
    own = {**module._parameters, **module._buffers}
    return {name: tuple(item.shape) for name, item in own.items() if item is not None}


def _unlike_rest(whole: nn.Module, model: nn.Module, kept: Kept) -> Iterator[str]:
    """Tensors outside the stacks that depend on the number of blocks."""
    stacks = tuple(f"{path}." for path in kept)
    old, new = (
        {key: item.shape for key, item in one.state_dict().items() if not key.startswith(stacks)}
        for one in (whole, model)
    )
    for key in {key for key, _ in old.items() ^ new.items()}:
        yield f"`{key}` depends on the number of blocks"


def _stored_prefix(source: SourceModel, path: str) -> str:
    """Finds the name of a stack in the checkpoint, which must number its blocks alike."""
    keymap, found = source.keymap, set()
    for name, _ in source.keymap.model.get_submodule(path).named_children():
        try:
            prefix, _, number = keymap.checkpoint_prefix(f"{path}.{name}").rpartition(".")
        except SourceError as error:
            raise _refusal(source, [error.message]) from error
        inside = [key for key in keymap.model.state_dict() if key.startswith(f"{path}.{name}.")]
        stored = [keymap.sources(item).keys for item in inside if keymap.has(item)]
        keys = [key for item in stored for key in item]
        if number != name or any(not key.startswith(f"{prefix}.{name}.") for key in keys):
            raise _refusal(source, [f"the checkpoint does not number the blocks of `{path}`"])
        found.add(prefix)
    if len(found) != 1:
        raise _refusal(source, [f"the checkpoint keeps the blocks of `{path}` in several places"])
    return found.pop()


def _renamed(names: Mapping[str, str], prefix: str, indices: Sequence[int]) -> dict[str, str]:
    """Renumber tensors of kept blocks by their new places, and drop the others."""
    result = {}
    for key, old in names.items():
        block = re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.(.+)", key)
        if block is None:
            result[key] = old
            continue
        places = [now for now, was in enumerate(indices) if was == int(block[1])]
        result |= {f"{prefix}.{now}.{block[2]}": old for now in places}
    return result


def _carried(
    source: SourceModel, model: nn.Module, path: str, indices: Sequence[int]
) -> dict[str, str]:
    """Tensors of the first block that serve all of them, where that block is dropped."""
    if indices[0] == 0:
        return {}
    keymap = source.keymap
    old = keymap.model.get_submodule(f"{path}.{indices[0]}").state_dict()
    new = model.get_submodule(f"{path}.0").state_dict()
    missing = [f"{path}.0.{name}" for name in new if name not in old]
    stored = [keymap.sources(name).keys for name in missing if keymap.has(name)]
    return {key: key for keys in stored for key in keys}


def _refusal(source: SourceModel, problems: Sequence[str]) -> PlanError:
    return PlanError(
        f"blocks of this `{source.config.model_type}` model cannot be dropped or repeated:"
        + after_colon(problems),
        "keep the blocks that are named, or leave `keep_layers`, `drop_layers` and "
        "`append_layers` out",
    )
