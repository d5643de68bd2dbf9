"""Which module of a Hugging Face transformer plays which role in which block.

Names are looked up on first use, so that roles of stored tensors cost no import of torch.
`families` is the table of families, `find` reads a model by it. Open `families.py` first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcompress.roles.families import (
        Attention,
        Block,
        Layer,
        Part,
        Refusal,
        Roles,
        supported_families,
    )
    from tcompress.roles.find import attentions_of, find_roles

__all__ = [
    "Attention",
    "Block",
    "Layer",
    "Part",
    "Refusal",
    "Roles",
    "attentions_of",
    "find_roles",
    "supported_families",
]

_HOMES = {"attentions_of": "find", "find_roles": "find"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'families')}"), name)
