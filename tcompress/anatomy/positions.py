"""Tables of positions: where a model keeps them, and which rows text begins at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class Positions(NamedTuple):
    """A table of positions.

    Attributes:
        path: Its module path.
        table: The table.
        offset: Rows before that of the first token.
    """

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
    """Returns how many tokens a model has positions for that says a limit in its config.

    RoBERTa and its kin count rows in it that no text ever uses.
    """
    for _, table, offset in position_tables(model):
        if table.num_embeddings == limit and table.padding_idx is not None:
            return limit - offset
    return limit
