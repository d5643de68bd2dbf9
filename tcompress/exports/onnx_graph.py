"""A part of a model written as an ONNX file by PyTorch's exporter."""

from __future__ import annotations

import ast
import io
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tcompress.errors import InputError, TCompressError, first_line
from tcompress.exports.onnx_parts import Part, Size

OPSET = 20
"""The version of ONNX's operators: layer norm and GELU are one operator each from here on."""
LARGEST_FILE = 1_900_000_000
"""Bytes of weights above which they lie beside the file: protobuf ends at 2 GiB."""
TRACED = Size(batch=2, length=6, past=5, pictures=3)
"""Sizes that a graph is traced with; all of them stay free."""


def write_graph(part: Part, path: Path) -> None:
    """Export a part of a model to a file; its weights lie beside it above 2 GB.

    Raises:
        InputError: The exporter cannot express what the model computes.
    """
    inputs = part.sample(TRACED)
    with _quiet(), expressible(part.model):
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
    assert program is not None
    _tidy(program.model)
    _share_tables(program.model)
    weights = (value.const_value for value in program.model.graph.initializers.values())
    nbytes = sum(weight.nbytes for weight in weights if weight is not None)
    if nbytes <= LARGEST_FILE:
        program.save(path, external_data=False)
    else:
        import onnx_ir

        onnx_ir.save(program.model, path, external_data=f"{path.name}_data")


@contextmanager
def expressible(model: Any) -> Iterator[None]:
    """Turn whatever a model or the exporter raises into an error that names the model's class."""
    try:
        yield
    except (TCompressError, MemoryError, OSError):
        raise
    except Exception as error:  # of many unrelated classes
        cause: BaseException = error
        while cause.__cause__ is not None:  # the exporter wraps what was wrong in its own advice
            cause = cause.__cause__
        raise InputError(
            f"PyTorch cannot export a `{type(model).__name__}` to ONNX ({type(cause).__name__}: "
            f"{first_line(cause)})",
            "run it with PyTorch",
        ) from error


_SCOPES = "pkg.torch.onnx.name_scopes"
"""Where the exporter says of which module a node is."""
_OURS = "model."  # the prefix that `Part` puts before all names


def _tidy(model: Any) -> None:
    """Name nodes and weights by their modules, and drop the rest of what the exporter notes.

    Stack traces among it name folders of this machine.
    """
    graph, counts = model.graph, Counter[str]()
    values = {value.name for value in graph.initializers.values()}
    for node in graph:
        scope = _module_of(node)
        path = f"/{scope.replace('.', '/')}/{node.op_type}".replace("//", "/")
        counts[path] += 1
        node.name = path if counts[path] == 1 else f"{path}_{counts[path] - 1}"
        for value in node.inputs:
            made = value is not None and value.is_initializer()
            made = made and ("." not in value.name or "/" in value.name)  # no parameter
            if made and scope and len(value.const_value.shape) > 1 and len(value.uses()) == 1:
                _rename(value, _free(f"{scope}.weight", values))
    for value in list(graph.initializers.values()):
        if value.name.startswith(_OURS):
            _rename(value, _free(value.name.removeprefix(_OURS), values))
    outputs = (value for node in graph for value in node.outputs)
    for item in (graph, model, *graph, *graph.inputs, *graph.initializers.values(), *outputs):
        item.metadata_props.clear()
    for node in graph:
        node.doc_string = None


def _module_of(node: Any) -> str:
    """Name the module that a node is of, as `named_modules` of the model does; "" for itself."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "['', '']"))
    name = scopes[-2] if len(scopes) > 1 else ""
    return "" if name == _OURS.rstrip(".") else str(name.removeprefix(_OURS))


def _rename(value: Any, name: str) -> None:
    value.name = name
    value.const_value.name = name


def _free(name: str, taken: set[str]) -> str:
    """Give a name, with a number behind it where it is taken, and take it."""
    free = next(text for n in count() if (text := f"{name}_{n}" if n else name) not in taken)
    taken.add(free)
    return free


def _share_tables(model: Any) -> None:
    """Have output heads read the table that they are tied to, of which the exporter makes a copy.

    ONNX Runtime turns it round once, when it opens the file.
    """
    import onnx_ir

    graph = model.graph
    tables = {
        tuple(value.const_value.shape)[::-1]: value
        for value in graph.initializers.values()
        if any(node.op_type == "Gather" and index == 0 for node, index in value.uses())
    }
    for value in list(graph.initializers.values()):
        table = tables.get(tuple(value.const_value.shape))
        uses = [node for node, _ in value.uses()]
        if table is None or {node.op_type for node in uses} != {"MatMul"}:
            continue
        if np.array_equal(table.const_value.numpy().T, value.const_value.numpy()):
            name = f"{value.name}_turned"
            turned = onnx_ir.node("Transpose", [table], {"perm": [1, 0]}, name=name)
            turned.outputs[0].name = name
            turned.outputs[0].type, turned.outputs[0].shape = value.type, value.shape
            graph.insert_before(uses[0], turned)
            for node in uses:
                index = next(i for i, item in enumerate(node.inputs) if item is value)
                node.replace_input_with(index, turned.outputs[0])
            del graph.initializers[value.name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the exporter says of its own parts away from the user."""
    # Some versions print how often they have applied their rules.
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), ExitStack() as stack:
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, ("torch.onnx", "onnxscript", "onnx_ir")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield
