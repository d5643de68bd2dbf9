"""tcompress: smaller transformers by tensor methods, saved as ordinary checkpoints.

Importing this package is enough for `from_pretrained` to load converted models. It costs
milliseconds: torch and transformers are imported by the first function that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tcompress.errors import TCompressError
from tcompress.hf.autoload import register_when_ready

if TYPE_CHECKING:
    from tcompress.api import (
        bench,
        compress,
        convert,
        evaluate,
        export_dense,
        export_onnx,
        export_openvino,
        finetune,
        inspect,
        keep_weights,
        plan,
        report,
        sweep,
    )

__version__ = "0.1.0"

__all__ = [
    "TCompressError",
    "__version__",
    "bench",
    "compress",
    "convert",
    "evaluate",
    "export_dense",
    "export_onnx",
    "export_openvino",
    "finetune",
    "inspect",
    "keep_weights",
    "plan",
    "report",
    "sweep",
]

register_when_ready()


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module `tcompress` has no attribute `{name}`")
    import tcompress.api

    return getattr(tcompress.api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
