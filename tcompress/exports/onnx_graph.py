"""A part of a model written as an ONNX file by PyTorch's exporter."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tcompress.errors import InputError, TCompressError, first_line
from tcompress.exports.onnx_parts import Part, Size

OPSET = 20
"""The version of ONNX's operators: layer norm and GELU are one operator each from here on."""
LARGEST_FILE = 1_900_000_000
"""Bytes of weights above which they lie beside the file: protobuf ends at 2 GiB."""
TRACED = Size(batch=2, length=6, past=5)
"""Sizes that a graph is traced with; all of them stay free."""


def write_graph(part: Part, path: Path) -> None:
    """Export a part of a model to a file; its weights lie beside it above 2 GB.

    Raises:
        InputError: The exporter cannot express what the model computes.
    """
    inputs = part.sample(TRACED)
    with _quiet():
        try:
            program = torch.onnx.export(
                part,
                (),
                kwargs={"inputs": inputs},  # a mapping at the end of `args` would be keywords
                input_names=list(inputs),
                output_names=list(part.outputs),
                dynamic_shapes={"inputs": {name: part.axes(name) for name in inputs}},
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
        except (TCompressError, MemoryError):
            raise
        except Exception as error:  # the exporter raises errors of many unrelated classes
            raise _unexportable(part, error) from error
    assert program is not None
    _forget_origin(program.model)
    nbytes = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    program.save(path, external_data=nbytes > LARGEST_FILE)


def _unexportable(part: Part, error: BaseException) -> InputError:
    cause = error
    while cause.__cause__ is not None:  # the exporter wraps what was wrong in its own advice
        cause = cause.__cause__
    kind = type(part.model).__name__
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
