"""Registers the format and our own models as soon as Transformers is there, without importing it.

`import tcompress` must be enough for `from_pretrained`, but must not cost the seconds that
importing torch and transformers takes: `tcompress --help` would pay them too. So each registration
waits for the modules that it needs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

METHOD = "tcompress"  # as in tcompress.models.names, which imports more
_MODELS = "transformers.models.auto.modeling_auto"
# What our own models are made of. Each may be what loads the Auto classes, and is half loaded then.
_PARTS = (
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.models.clip.modeling_clip",
)

_loading: set[str] = set()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds an awaited module with the other finders, and acts when it has run."""

    def __init__(self, awaited: str, act: Callable[[], object]) -> None:
        self.awaited, self.act = awaited, act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.awaited:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                _loading.add(name)
                try:
                    run(module)
                finally:
                    _loading.discard(name)
                self.act()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register_attention() -> None:
    from transformers.modeling_utils import AttentionInterface

    def mix(*args: Any, **kwargs: Any) -> Any:
        from tcompress.hf.build import mix_tokens  # needs more of Transformers

        return mix_tokens(*args, **kwargs)

    AttentionInterface.register(METHOD, mix)


def _register_models() -> None:
    if _MODELS in sys.modules and not _loading & {_MODELS, *_PARTS}:
        import tcompress.own_models.grid
        import tcompress.own_models.tam
        import tcompress.own_models.text  # noqa: F401


_AWAITED: tuple[tuple[str, Callable[[], object]], ...] = (
    ("transformers.quantizers", partial(import_module, "tcompress.hf.quantizer")),
    (
        "transformers.models.auto.configuration_auto",
        partial(import_module, "tcompress.own_models.configs"),
    ),
    (_PARTS[0], _register_attention),
    *((name, _register_models) for name in (*_PARTS, _MODELS)),
)


def register_when_ready() -> None:
    """Registers now what Transformers has loaded already, and the rest when it is loaded."""
    for awaited, act in _AWAITED:
        if awaited in sys.modules:
            act()
        else:
            sys.meta_path.insert(0, _AfterImport(awaited, act))
