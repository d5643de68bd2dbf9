"""Files in ONNX Runtime and OpenVINO on the CPU: named inputs to named outputs.

An `OnnxModule` stands in the place of a model in PyTorch, for whatever runs forward passes.
"""

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
from torch import Tensor, nn
from transformers.utils import ModelOutput

from tcompress.errors import InputError, first_line
from tcompress.runtimes.installed import require

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
        require("onnx", "onnxruntime")
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
    arrays: Arrays = {}
    for name in names:
        if name in inputs:
            value = inputs[name]
            arrays[name] = value.numpy() if isinstance(value, Tensor) else value
        elif name in ("attention_mask", "token_type_ids") and "input_ids" in inputs:
            like = np.asarray(inputs["input_ids"])
            arrays[name] = (np.ones if name == "attention_mask" else np.zeros)(like.shape, "int64")
    return arrays


def bytes_of(path: Path) -> int:
    """Count the bytes of an ONNX file, and of weights beside it."""
    beside = path.with_name(f"{path.name}_data")
    return sum(item.stat().st_size for item in (path, beside) if item.is_file())


class OnnxModule(nn.Module):
    """A forward pass in ONNX Runtime: named tensors in, a `ModelOutput` of tensors out.

    A cache that the file asks for is empty, so that texts are read from their beginning.
    """

    device = torch.device("cpu")  # of inputs and outputs
    dtype = torch.float32  # of those that are no ids

    def __init__(self, file: OnnxModel, config: Any) -> None:
        super().__init__()
        self.file, self.config = file, config
        states = [name for name in file.inputs if name.startswith("encoder_")]
        if states:
            text = f"`{file.path}` is the second part of a model: it asks for `{states[0]}`"
            raise InputError(text, "measure this model with `--runtime torch`")

    @property
    def base_model(self) -> OnnxModule:
        """The module itself: hidden states are among its outputs, if the file has them."""
        return self

    def forward(self, **inputs: Any) -> ModelOutput:
        """Compute all outputs of a file but its cache."""
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        first = next(iter(tensors.values()))
        tensors |= self._empty_cache(first.shape[0])
        if "position_ids" in self.file.inputs and "position_ids" not in tensors:
            tensors["position_ids"] = _positions(tensors, first)
        names = [name for name in self.file.outputs if not name.startswith("present.")]
        arrays = self.file.run(tensors, names)
        return ModelOutput({name: torch.from_numpy(value) for name, value in arrays.items()})

    def _empty_cache(self, batch: int) -> dict[str, Tensor]:
        """Keys and values of no tokens.  # (batch, heads, 0, width) each."""
        sizes = {item.name: item.shape for item in self.file.session.get_inputs()}
        return {
            name: torch.zeros(batch, shape[1], 0, shape[3])
            for name, shape in sizes.items()
            if name.startswith("past_key_values.")
        }


def _positions(inputs: dict[str, Tensor], first: Tensor) -> Tensor:
    """Number the tokens of each text, padding before it left out.  # (batch, length)."""
    mask = inputs.get("attention_mask", torch.ones_like(first))
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


@dataclass(frozen=True, eq=False)
class OpenvinoModel:
    """An open OpenVINO file. Use `OpenvinoModel.open`."""

    path: Path
    compiled: Any = field(repr=False)  # openvino.CompiledModel

    @classmethod
    def open(cls, path: Path) -> OpenvinoModel:
        """Open an `.xml` file, with its `.bin` beside it, in float32 and with torch's threads.

        OpenVINO itself would take bfloat16 on processors that have instructions for it.
        """
        require("openvino", "openvino")
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
