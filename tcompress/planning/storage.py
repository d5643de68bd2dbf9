"""Fewer bits for what is stored: which tensors are rounded, and to what.

Weights of two and more axes are, structures' factors among them; biases, norms, buffers and tiny
tensors stay as they are. A word embedding, and a head that is tied to it, has a width of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from tcompress.errors import PlanError
from tcompress.linalg.rounding import GROUP, Rounding, matrix_shape
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.entries import LayerPlan, Storage
from tcompress.planning.sites import roles_of, tied_to

SMALLEST = 2048
"""Numbers of the smallest tensor that is rounded: those below are not worth their scales."""

TRANSFORM_BITS = 8
"""Least bits of the generators of an orthogonal transform: an angle that is off turns all that a
layer reads or writes."""

STAND_IN = 4
"""Bits of a word embedding until data tells what a budget of bytes makes of it."""

TABLE_RANKS = (0.5, 0.25, 0.125)
"""Kept fractions of a word embedding of low rank that a budget of bytes chooses from, in few bits:
wider factors lose as much as fewer bits do."""


def planned_storage(recipe: Convert, source: SourceModel) -> Storage | None:
    """Plan the widths that a recipe asks for; None where nothing is rounded.

    Raises:
        PlanError: Bits are asked for a word embedding, and the model has none.
    """
    if not (recipe.rounds or recipe.chooses_table):
        return None
    has_table = bool(roles_of(source).embeddings)
    if recipe.embedding_bits is not None and not has_table:
        raise PlanError(
            "`embedding_bits` is about a word embedding, and the model has none",
            "leave it out; `bits` is for all other weights",
        )
    weights = recipe.bits
    table: Any = recipe.bits if recipe.embedding_bits is None else recipe.embedding_bits
    if recipe.chooses_table:
        table = STAND_IN
    table = table if has_table else None
    widths = (None if bits in (None, "none") else bits for bits in (weights, table))
    pair = [bits and Rounding.usual(bits, recipe.group_size) for bits in widths]
    return Storage(weights=pair[0], embeddings=pair[1]) if any(pair) else None


@dataclass(frozen=True)
class Widths:
    """The rounding of every tensor of an output. Use `Widths.of`."""

    storage: Storage | None = None
    table_keys: frozenset[str] = frozenset()  # of word embeddings, and of what is tied to them
    tables: tuple[str, ...] = ()  # beginnings of the names of their factors
    transforms: frozenset[str] = frozenset()  # names of what transforms are built from
    buffers: frozenset[str] = frozenset()  # keys of what is no parameter

    @classmethod
    def of(
        cls, source: SourceModel, storage: Storage | None, entries: Iterable[LayerPlan]
    ) -> Widths:
        """Look up what is a word embedding in a checkpoint, and among a plan's entries."""
        if storage is None:
            return cls()
        keymap = source.keymap
        tables = roles_of(source).embeddings
        paths = [*tables, *(name for path in tables for name in tied_to(source, path))]
        names = [f"{path}.weight" for path in paths if keymap.has(f"{path}.weight")]
        buffers = (name for name, _ in keymap.model.named_buffers() if keymap.has(name))
        entries = tuple(entries)
        return cls(
            storage,
            frozenset(key for name in names for key in keymap.sources(name).keys),
            tuple(f"{entry.name}.tc_" for entry in entries if entry.kind == "embedding"),
            frozenset(
                f"{entry.name}.{entry.stored_name(name)}"
                for entry in entries
                for name in entry.transform_names
            ),
            frozenset(key for name in buffers for key in keymap.sources(name).keys),
        )

    def rounding(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> Rounding | None:
        """Give the rounding of a tensor; None for one that is stored as it is."""
        if self.storage is None or not dtype.is_floating_point or key in self.buffers:
            return None
        if len(shape) < 2 or prod(shape) < SMALLEST or matrix_shape(shape)[1] < GROUP:
            return None
        table = key in self.table_keys or key.startswith(self.tables)
        rounding = self.storage.embeddings if table else self.storage.weights
        if rounding is not None and key in self.transforms:
            return Rounding.usual(max(rounding.bits, TRANSFORM_BITS), rounding.group)
        return rounding
