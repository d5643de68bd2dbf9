"""Where a model comes from: names, weights on disk, names of tensors.

Names are looked up on first use, so that `ALIASES` and `resolve` cost no import of torch. `model`
puts together what `names`, `store` and `keymap` find. Open `model.py` first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcompress.models.keymap import KeyMap, read_finite, read_parameter
    from tcompress.models.model import SourceModel
    from tcompress.models.names import ALIASES, default_output_name, resolve
    from tcompress.models.store import WeightStore

__all__ = [
    "ALIASES",
    "KeyMap",
    "SourceModel",
    "WeightStore",
    "default_output_name",
    "read_finite",
    "read_parameter",
    "resolve",
]

_HOMES = {"SourceModel": "model", "WeightStore": "store"}
_HOMES |= dict.fromkeys(("KeyMap", "read_finite", "read_parameter"), "keymap")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'names')}"), name)
