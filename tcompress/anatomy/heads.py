"""How wide one head of an attention is."""

from __future__ import annotations

from typing import Any

from torch import nn

from tcompress.anatomy.data import Role

_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_COUNTS = ("num_attention_heads", "n_heads", "num_heads", "n_head")
_WHOLE = ("hidden_size", "dim", "d_model", "n_embd")
_ATTENTION = frozenset({"q", "k", "v", "qkv", "o", "cross_q", "cross_k", "cross_v", "cross_o"})


def head_width(block: nn.Module, name: str, role: Role, config: Any) -> int | None:
    """Read the width of a head off the modules around a projection, or off the config.

    Args:
        block: The block.
        name: Path of the projection below the block.
        role: What the projection does.
        config: Config of the model that the block belongs to.

    Returns:
        The width; None where it is not known, or the projection is not part of an attention.
    """
    if role not in _ATTENTION:
        return None
    path = name
    while path:
        path = path.rpartition(".")[0]
        found = {
            getattr(module, field)
            for module in block.get_submodule(path).modules()
            for field in _WIDTHS
            if isinstance(getattr(module, field, None), int)
        }
        if found:
            return found.pop() if len(found) == 1 else None
    count, whole = _first(config, _COUNTS), _first(config, _WHOLE)
    return whole // count if whole and count and whole % count == 0 else None


def _first(config: Any, fields: tuple[str, ...]) -> int | None:
    values = (getattr(config, field, None) for field in fields)
    return next((value for value in values if isinstance(value, int)), None)
