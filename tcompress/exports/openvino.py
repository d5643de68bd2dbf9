"""OpenVINO's own form of an ONNX file: its graph in `.xml`, its weights in `.bin`."""

from __future__ import annotations

from pathlib import Path

from tcompress.errors import InputError, first_line
from tcompress.runtimes.openvino_session import OpenvinoModel

PREFIX = "openvino_"
"""Start of names of files, as optimum and sentence-transformers look for them."""


def write_openvino(graph: Path, target: Path) -> OpenvinoModel:
    """Convert an ONNX file in float32, and open what was written.

    Args:
        graph: An `.onnx` file.
        target: The `.xml` file to write.

    Raises:
        InputError: OpenVINO has no form for an operator.
    """
    import openvino

    try:
        # `convert_model` does the same, and reports to its authors over the network.
        model = openvino.Core().read_model(graph)
    except Exception as error:  # of classes that OpenVINO does not document
        raise InputError(
            f"OpenVINO {openvino.__version__} cannot read the ONNX file of this model "
            f"({first_line(error)})",
            "use `--to onnx`",
        ) from error
    openvino.save_model(model, target, compress_to_fp16=False)
    return OpenvinoModel.open(target)
