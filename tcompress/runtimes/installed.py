"""Whether a runtime is installed; asked before anything is imported that takes seconds."""

from __future__ import annotations

from importlib.util import find_spec

from tcompress.errors import InputError
from tcompress.project import install_with

EXPORT = ("onnx", "onnxscript", "onnxruntime")
"""Packages that writing ONNX files takes; running them takes the last one alone."""


def require(extra: str, *packages: str) -> None:
    """Refuse to go on without packages of `onnx` or `openvino`, by default all of this extra."""
    packages = packages or (EXPORT if extra == "onnx" else (*EXPORT, "openvino"))
    absent = [name for name in packages if find_spec(name) is None]
    if absent:
        names = ", ".join(f"`{name}`" for name in absent)
        verb = "is" if len(absent) == 1 else "are"
        raise InputError(f"{names} {verb} not installed", f"run `{install_with(extra)}`")
