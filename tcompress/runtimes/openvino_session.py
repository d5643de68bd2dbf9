"""A file in OpenVINO on the CPU: named inputs to named outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from tcompress.runtimes.installed import require_openvino
from tcompress.runtimes.onnx_session import Arrays, arrays_of


@dataclass(frozen=True, eq=False)
class OpenvinoModel:
    """An open file. Use `OpenvinoModel.open`."""

    path: Path
    compiled: Any = field(repr=False)  # openvino.CompiledModel

    @classmethod
    def open(cls, path: Path) -> OpenvinoModel:
        """Open an `.xml` file, with its `.bin` beside it, in float32 and with torch's threads.

        OpenVINO itself would take bfloat16 on processors that have instructions for it.
        """
        require_openvino("openvino")
        import openvino

        hints = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        return cls(path, openvino.Core().compile_model(path, "CPU", hints))

    @property
    def nbytes(self) -> int:
        """Bytes of graph and weights."""
        return sum(path.stat().st_size for path in (self.path, self.path.with_suffix(".bin")))

    def run(self, inputs: Mapping[str, Tensor | NDArray[Any]]) -> Arrays:
        """Compute all outputs from inputs; what the file does not take is left out."""
        names = [port.get_any_name() for port in self.compiled.inputs]
        computed = self.compiled(arrays_of(inputs, names))
        return {name: value for port, value in computed.items() for name in port.names}
