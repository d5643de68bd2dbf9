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
from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import InputError, TCompressError, first_line
from tcompress.latency.sizes import RandomInputs
from tcompress.models import SourceModel

OPSET = 20
"""The version of ONNX's operators: layer norm and GELU are one operator each from here on."""
LARGEST_FILE = 1_900_000_000
"""Bytes of weights above which they lie beside the file: protobuf ends at 2 GiB."""
TRACED = (2, 12)
"""Batch and length that a graph is traced with; both stay free."""
_BATCH, _LENGTH = "batch_size", "sequence_length"


class Part(nn.Module):
    """A part of a model as a function of named inputs to a tuple of tensors."""

    def __init__(self, model: nn.Module, outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute the outputs, in order."""
        computed = self.model(**inputs, return_dict=True)
        return tuple(computed[name] for name in self.outputs)


class EmbeddingPart(Part):
    """A sentence encoder whose last output is the embedding, as sentence-transformers has it."""

    def __init__(self, model: nn.Module, outputs: tuple[str, ...], encoder: SentenceEncoder):
        super().__init__(model, outputs)
        self.encoder = encoder

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute the hidden states, and pool them."""
        hidden = self.model(**inputs, return_dict=True)["last_hidden_state"]
        return hidden, self.encoder.vectors(hidden, inputs["attention_mask"])


@dataclass(frozen=True, eq=False)
class Graph:
    """What becomes one ONNX file."""

    name: str  # of the file, without suffix
    part: Part = field(repr=False)
    inputs: tuple[str, ...]
    random: RandomInputs = field(repr=False)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs, in order."""
        return self.part.outputs

    def sample(self, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
        """Draw inputs; every second text is padded at its end."""
        return drawn(self.random, self.inputs, batch, length, seed)

    def axes(self, name: str) -> dict[int, str]:
        """Name the free axes of an input."""
        texts = name.endswith(("_ids", "_mask"))
        return {0: _BATCH, 1: _LENGTH} if texts else {0: _BATCH}


def drawn(
    random: RandomInputs, names: tuple[str, ...], batch: int, length: int, seed: int
) -> dict[str, Tensor]:
    """Draw named inputs; every second text is padded at its end."""
    values = random.batch(batch, length, seed, torch.device("cpu"), torch.float32)
    if "attention_mask" in names:
        mask = torch.ones_like(values["input_ids"])
        mask[1::2, length - length // 4 :] = 0
        values["attention_mask"] = mask
    if "token_type_ids" in names:
        kinds = torch.zeros_like(values["input_ids"])
        kinds[:, length // 2 :] = 1
        values["token_type_ids"] = kinds
    return {name: values[name] for name in names}


def graphs_of(
    source: SourceModel, model: nn.Module, encoder: SentenceEncoder | None = None
) -> tuple[Graph, ...]:
    """Say which files a model takes; an `InputError` names a family that has no form here.

    With an `encoder`, sentence embeddings are an output too.
    """
    kinds, random = inputs_of(source), RandomInputs.of(source, source)
    names = ["input_ids", "attention_mask"] if kinds.text else []
    names = [name for name in names if name in kinds.names]
    if "token_type_ids" in kinds.names and getattr(source.config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    names += random.shapes
    with torch.no_grad():
        computed = model(**drawn(random, tuple(names), *TRACED, seed=0), return_dict=True)
    outputs = _outputs(computed)
    part = Part(model, outputs)
    if encoder is not None:
        part = EmbeddingPart(model, ("last_hidden_state", "sentence_embedding"), encoder)
    return (Graph("model", part.eval(), tuple(names), random),)


_LEFT_OUT = ("loss", "past_key_values", "hidden_states", "attentions", "cross_attentions")


def _outputs(computed: Mapping[str, Any]) -> tuple[str, ...]:
    found = [name for name, value in computed.items() if isinstance(value, Tensor)]
    found = [name for name in found if name not in _LEFT_OUT]
    # Sentence encoders pool by themselves; what BERT puts on its first token few models train.
    if "last_hidden_state" in found and "pooler_output" in found:
        found.remove("pooler_output")
    return tuple(found)


def write_graph(graph: Graph, path: Path) -> None:
    """Export a part of a model to a file; its weights lie beside it above 2 GB.

    Raises:
        InputError: The exporter cannot express what the model computes.
    """
    inputs = graph.sample(*TRACED)
    dims = {name: torch.export.Dim(name) for name in (_BATCH, _LENGTH)}
    free = {
        name: {axis: dims[label] for axis, label in graph.axes(name).items()} for name in inputs
    }
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
            )
        except (TCompressError, MemoryError):
            raise
        except Exception as error:  # the exporter raises errors of many unrelated classes
            raise _unexportable(graph, error) from error
    assert program is not None
    _forget_origin(program.model)
    nbytes = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    program.save(path, external_data=nbytes > LARGEST_FILE)


def _unexportable(graph: Graph, error: BaseException) -> InputError:
    cause = error
    while cause.__cause__ is not None:  # the exporter wraps what was wrong in its own advice
        cause = cause.__cause__
    kind = type(graph.part.model).__name__
    return InputError(
        f"PyTorch cannot export a `{kind}` to ONNX ({type(cause).__name__}: {first_line(cause)})",
        "run it with PyTorch",
    )


def _forget_origin(model: Any) -> None:
    """Drop the stack traces of every node, which name folders of this machine."""
    graphs = [model.graph, *model.functions.values()]
    for graph in graphs:
        graph.metadata_props.clear()
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.metadata_props.clear()


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
