"""Registers the format as soon as Transformers is there, without importing it.

`import tcompress` must be enough for `from_pretrained`, but must not cost the seconds that
importing torch and transformers takes: `tcompress --help` would pay them too. So the registration
waits for the module it needs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_AWAITED = "transformers.quantizers"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the awaited module with the other finders, and registers when it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    from tcompress.integration.quantizer import register

    register()


def register_when_ready() -> None:
    """Registers now if Transformers' quantizers are loaded, else when they are."""
    if _AWAITED in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterImport())
