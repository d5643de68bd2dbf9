"""Where a model comes from: names, weights on disk, names of tensors.

Names are looked up on first use, so that `ALIASES` and `resolve` cost no import of torch. `model`
puts together what `names`, `store` and `keymap` find. Open `model.py` first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcompress.models.keymap import KeyMap as KeyMap
    from tcompress.models.keymap import read_finite as read_finite
    from tcompress.models.keymap import read_parameter as read_parameter
    from tcompress.models.model import SourceModel as SourceModel
    from tcompress.models.model import tell_padding as tell_padding
    from tcompress.models.names import ALIASES as ALIASES
    from tcompress.models.names import default_output_name as default_output_name
    from tcompress.models.names import name_of as name_of
    from tcompress.models.names import resolve as resolve
    from tcompress.models.store import WeightStore as WeightStore

_HOMES = {"SourceModel": "model", "tell_padding": "model", "WeightStore": "store"}
_HOMES |= dict.fromkeys(("KeyMap", "read_finite", "read_parameter"), "keymap")
_HOMES |= dict.fromkeys(("ALIASES", "default_output_name", "name_of", "resolve"), "names")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
