"""Smaller ONNX files: eight bits for every machine, or four bits in blocks."""

from __future__ import annotations

import logging
from pathlib import Path


def quantize_int8(source: Path, target: Path) -> None:
    """Write a file with weights of eight bits per channel, and inputs quantised as they come.

    Weights take seven of the eight bits: processors without instructions for bytes add two
    products of an unsigned and a signed byte in 16 bits, and 2 * 255 * 64 = 32,640 fits there,
    2 * 255 * 127 does not.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        quantize_dynamic(
            source, target, per_channel=True, reduce_range=True, weight_type=QuantType.QInt8
        )
    finally:
        logger.setLevel(level)
