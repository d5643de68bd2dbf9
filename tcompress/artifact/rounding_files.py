"""Rounding of a model that is on disk already, as `save_pretrained` left it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tcompress.artifact.format import (
    Shard,
    Stored,
    quantization_section,
    section_digest,
    write_index,
    write_shard,
)
from tcompress.errors import read_settings
from tcompress.files import write_text
from tcompress.linalg.rounding import Rounding
from tcompress.models.store import WeightStore
from tcompress.planning.entries import Storage


def round_files(
    folder: Path, roundings: Mapping[str, Rounding | None], storage: Storage
) -> dict[str, Rounding]:
    """Round what is stored in a folder, by names that may gain or lose a prefix.

    Returns the roundings by stored name. Memory holds one tensor.
    """
    store = WeightStore.open(folder)
    stored = _alike(roundings, store)
    if not stored:
        return {}
    shards = []
    for file in store.files:
        keys = sorted(key for key in store.keys() if store.file_of(key) == file)  # noqa: SIM118
        tensors = [Stored(k, store.shape(k), store.dtype(k), stored.get(k)) for k in keys]
        shards.append(Shard(file, tuple(sorted(tensors, key=lambda item: -item.itemsize))))
    for shard in shards:
        write_shard(folder, shard, lambda item: store.tensor(item.key), lambda _: None)
    write_index(folder, shards)
    path = folder / "config.json"
    config = read_settings(path)
    facts = storage.model_dump(mode="json", exclude_none=True)
    section: dict[str, Any] = config.get("quantization_config") or quantization_section(())
    section = {**section, "format_version": 5, "storage": facts}
    config["quantization_config"] = {**section, "digest": section_digest(section)}
    write_text(path, json.dumps(config, indent=2) + "\n")
    return stored


def _alike(roundings: Mapping[str, Rounding | None], store: WeightStore) -> dict[str, Rounding]:
    """Find the rounding of every stored tensor, by its name with or without a prefix."""
    chosen = {key: rounding for key, rounding in roundings.items() if rounding is not None}
    stored = {}
    for key in store.keys():  # noqa: SIM118 - no mapping
        ends = (k for k in chosen if key.endswith(f".{k}") or k.endswith(f".{key}"))
        match = key if key in chosen else None if key in roundings else next(ends, None)
        if match is not None:
            stored[key] = chosen[match]
    return stored
