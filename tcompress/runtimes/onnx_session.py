"""An ONNX file in ONNX Runtime on the CPU: named inputs to named outputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcompress.errors import InputError, first_line
from tcompress.runtimes.installed import require_onnx

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """An open ONNX file. Use `OnnxModel.open`."""

    path: Path
    session: Any = field(repr=False)  # onnxruntime.InferenceSession

    @classmethod
    def open(cls, path: Path, threads: int | None = None) -> OnnxModel:
        """Open an `.onnx` file for the CPU; data of tensors outside it lie beside it.

        A pass has so many threads, by default torch's, so that both are comparable.

        Raises:
            InputError: ONNX Runtime is not installed, or cannot read the file.
        """
        require_onnx("onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors; hints about its own optimiser are not ours
        # Threads that spin while they wait would slow whatever is timed beside them.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            session = onnxruntime.InferenceSession(
                os.fspath(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its errors derive from no class of their own
            raise InputError(
                f"ONNX Runtime {onnxruntime.__version__} cannot open `{path}` "
                f"({first_line(error)})",
                "export the model again, or install a newer onnxruntime",
            ) from error
        return cls(path, session)

    @property
    def nbytes(self) -> int:
        """Bytes of the file, and of weights beside it."""
        return bytes_of(self.path)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return tuple(item.name for item in self.session.get_inputs())

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs, in order."""
        return tuple(item.name for item in self.session.get_outputs())

    def run(
        self, inputs: Mapping[str, Tensor | NDArray[Any]], outputs: Sequence[str] | None = None
    ) -> Arrays:
        """Compute outputs, by default all, from inputs; what the file does not take is left out."""
        names = list(outputs or self.outputs)
        arrays = self.session.run(names, arrays_of(inputs, self.inputs))
        return dict(zip(names, arrays, strict=True))


def arrays_of(inputs: Mapping[str, Tensor | NDArray[Any]], names: Sequence[str]) -> Arrays:
    """Turn inputs into arrays by the names that a file has for them.

    `token_type_ids` that nobody gives are zeros, an `attention_mask` is ones.
    """
    found: Arrays = {}
    for name in names:
        if name in inputs:
            value = inputs[name]
            found[name] = value.numpy() if isinstance(value, Tensor) else value
        elif name in ("attention_mask", "token_type_ids") and "input_ids" in inputs:
            like = np.asarray(inputs["input_ids"])
            found[name] = (np.ones if name == "attention_mask" else np.zeros)(like.shape, "int64")
    return found


def bytes_of(path: Path) -> int:
    """Count the bytes of an ONNX file, and of weights beside it."""
    beside = path.with_name(f"{path.name}_data")
    return sum(item.stat().st_size for item in (path, beside) if item.is_file())
