"""A model with narrower layers: other numbers in its config, which has keys for them.

Which key says a width is found by trial, whatever the family: a key with that number is given the
new one, and the model that this makes is compared with the wanted one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import nn

from tcompress.models.fewer_layers import sections, shapes_of, write_keys
from tcompress.models.model import SourceModel

Keys = Mapping[str, int]
"""New values in `config.json`, by key; those of a part such as `text_config.intermediate_size`."""

Shape = tuple[int, ...]


def with_keys(source: SourceModel, keys: Keys) -> SourceModel:
    """Describes a model by other numbers in its config; the store stays."""
    settings = deepcopy(source.settings)
    for place, value in keys.items():
        part, _, key = place.rpartition(".")
        owner = getattr(source.config, part) if part else source.config
        for section in sections(settings, part or None):
            write_keys(section, owner, {key: value})
    return source.with_settings(settings)


def find_keys(
    source: SourceModel, sizes: Sequence[tuple[int, int]], wanted: Mapping[str, Shape]
) -> tuple[dict[str, int], list[str]]:
    """Finds the keys that make a model with these shapes of parameters, and no other change.

    Args:
        source: The model.
        sizes: Pairs of a width and its new number, that wanted shapes come from.
        wanted: New shapes by name of the parameter.

    Returns:
        New values by key, and the problems: what no key changes, or what changes with it.
    """
    dense = _facts(with_keys(source, {}).meta_model())
    tensors = source.keymap.model.state_dict()
    found: dict[str, int] = {}
    reached: set[str] = set()
    beside: Counter[str] = Counter()
    for key, value in _candidates(source, sizes):
        if reached == wanted.keys():
            break
        changed = _changes(source, dense, {key: value})
        right = {name for name in changed if name in wanted and wanted[name] == changed[name]}
        if right and len(right) == len(changed):
            found[key] = value
            reached |= right
        elif right:
            others = [name for name in changed if name not in right]
            other = next((name for name in others if name in tensors), others[0])
            text = f"`{key}` in its config would change `{other}` too, which is to stay"
            beside[text] = len(right)
    missing = [name for name in wanted if name not in reached]
    if missing:
        reasons = [text for text, _ in beside.most_common(2)]
        return found, reasons or [f"no key of its config says the width of `{missing[0]}`"]
    if _changes(source, dense, found) != dict(wanted):
        return found, [f"{', '.join(map(repr, found))} in its config change more together"]
    return found, []


def _candidates(source: SourceModel, sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Keys that hold a width come first, then those left to a default."""
    config: Any = source.config
    parts = ("", *(part for part in getattr(config, "sub_configs", {})))
    owners = [(part, getattr(config, part) if part else config) for part in parts]
    values = [
        (f"{part}.{key}".lstrip("."), value)
        for part, owner in owners
        if owner is not None
        for key, value in owner.to_dict().items()
    ]
    for before, after in sizes:
        yield from ((key, after) for key, value in values if type(value) is int and value == before)
    for _, after in sizes:
        yield from ((key, after) for key, value in values if value is None)


def _changes(source: SourceModel, dense: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Facts of a model of other numbers that differ from the dense one's; all if there is none."""
    try:
        narrow = _facts(with_keys(source, keys).meta_model())
    except Exception:  # a config class may raise anything
        return dict.fromkeys(dense)
    return {
        name: narrow.get(name)
        for name in {**dense, **narrow}
        if dense.get(name) != narrow.get(name)
    }


def _facts(model: nn.Module) -> dict[str, Any]:
    """Shapes of all tensors by name, and what modules compute with besides: scales and switches."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if type(value) in (float, bool, str) and not key.startswith("_")
        }
        facts = {**shapes_of(module), **plain}
        found |= {f"{path}.{key}".lstrip("."): value for key, value in facts.items()}
    return found
