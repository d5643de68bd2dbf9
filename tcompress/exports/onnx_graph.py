"""Which parts of a model become an ONNX file, with which inputs and outputs, and their export.

Names of files, inputs and outputs are those of optimum, which transformers.js and
sentence-transformers look for.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.data.inputs import inputs_of
from tcompress.errors import InputError, TCompressError, first_line
from tcompress.latency.sizes import RandomInputs
from tcompress.models import SourceModel

OPSET = 20
"""Layer norms, GELU and reductions by axis are single operators from here on."""
LARGEST_FILE = 2 * 10**9
"""Bytes of weights above which they lie outside of the file: protobuf ends at 2 GiB."""
TRACED = (2, 12)  # batch and length that the graph is traced with; both stay free

Axes = dict[int, str]
"""Names of the axes of an input whose size is free."""


class Part(nn.Module):
    """A part of a model as a function of named inputs to a tuple of tensors."""

    def __init__(self, model: nn.Module, outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute the outputs, in order."""
        computed = self.model(**inputs, return_dict=True)
        return tuple(computed[name] for name in self.outputs)


@dataclass(frozen=True, eq=False)
class Graph:
    """What becomes one ONNX file."""

    name: str  # of the file, without suffix
    part: nn.Module = field(repr=False)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    random: RandomInputs = field(repr=False)

    def sample(self, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
        """Draw inputs; every second text is padded at its end."""
        device = torch.device("cpu")
        drawn = self.random.batch(batch, length, seed, device, torch.float32)
        if "attention_mask" in drawn:
            drawn["attention_mask"][1::2, length - length // 4 :] = 0
        if "token_type_ids" in self.inputs:
            drawn["token_type_ids"] = torch.zeros_like(drawn["input_ids"])
            drawn["token_type_ids"][:, length // 2 :] = 1
        return {name: drawn[name] for name in self.inputs}

    def axes(self, name: str) -> Axes:
        """Name the free axes of an input."""
        texts = name.endswith(("_ids", "_mask"))
        return {0: "batch", 1: "length"} if texts else {0: "batch"}


def graphs_of(source: SourceModel, model: nn.Module) -> tuple[Graph, ...]:
    """Say which files a model takes; an `InputError` names a family that has no form here."""
    kinds, random = inputs_of(source), RandomInputs.of(source, source)
    names = ["input_ids", "attention_mask"] if kinds.text else []
    names = [name for name in names if name in kinds.names]
    if "token_type_ids" in kinds.names and getattr(source.config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    names += random.shapes
    graph = Graph("model", nn.Identity(), tuple(names), (), random)
    with torch.no_grad():
        computed = model(**graph.sample(*TRACED), return_dict=True)
    outputs = _outputs(computed)
    return (Graph("model", Part(model, outputs).eval(), tuple(names), outputs, random),)


_LEFT_OUT = ("loss", "past_key_values", "hidden_states", "attentions", "cross_attentions")


def _outputs(computed: Mapping[str, Any]) -> tuple[str, ...]:
    found = [name for name, value in computed.items() if isinstance(value, Tensor)]
    found = [name for name in found if name not in _LEFT_OUT]
    # Sentence encoders pool by themselves; what BERT puts on its first token few models train.
    if "last_hidden_state" in found and "pooler_output" in found:
        found.remove("pooler_output")
    return tuple(found)


def write_graph(graph: Graph, path: Path) -> None:
    """Export a part of a model to a file.

    Raises:
        InputError: The exporter cannot express what the model computes.
    """
    inputs = graph.sample(*TRACED)
    dims = {name: torch.export.Dim(name) for name in ("batch", "length")}
    free = {
        name: {axis: dims[label] for axis, label in graph.axes(name).items()} for name in inputs
    }
    nbytes = sum(tensor.nbytes for tensor in graph.part.state_dict().values())
    with _quiet():
        try:
            program = torch.onnx.export(
                graph.part,
                (),
                kwargs={"inputs": inputs},  # a mapping at the end of `args` would be keywords
                input_names=list(inputs),
                output_names=list(graph.outputs),
                dynamic_shapes={"inputs": free},
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
                report=False,
            )
        except (TCompressError, MemoryError):
            raise
        except Exception as error:  # the exporter raises errors of many unrelated classes
            raise InputError(
                f"PyTorch cannot export `{graph.name}` ({type(error).__name__}: "
                f"{first_line(error)})",
                "run it with PyTorch",
            ) from error
        assert program is not None
        program.save(path, external_data=nbytes > LARGEST_FILE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the exporter says of its own parts away from the user."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
