"""Smaller ONNX files: weights of eight bits for every processor, or of four bits in blocks.

ONNX Runtime's quantisers rewrite products with one matrix. What they do not do is done here: tables
of embeddings get a scale for each row, and products with a stack of matrices, as slices of a tensor
have them, one for each column of each matrix.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_STEP = 64
"""Largest weight of eight bits: half of what they hold.

Processors without instructions for bytes (AVX2 without VNNI) add two products of an unsigned and a
signed byte in 16 bits, where larger sums are cut off. 2 * 255 * 64 = 32,640 is below 2**15 - 1.
"""
BLOCK = 32
"""Weights that share a scale where they have four bits."""
FEWEST = 4096
"""Values below which a tensor stays as it is: it would save nothing that counts."""
_DOMAIN = "com.microsoft"

Array = NDArray[Any]


def quantize_int8(source: Path, target: Path, external: bool = False) -> tuple[str, ...]:
    """Write a file whose weights have eight bits; inputs of products are quantised as they come.

    Args:
        source: A file in float32.
        target: The file to write.
        external: Whether weights are to lie beside the file.

    Returns:
        Names of the larger tensors that stay in float32.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    graph = _Graph(model)
    graph.split_gemm()
    graph.quantize_tables()
    graph.quantize_stacks()
    graph.store()
    if graph.products(2):
        with _quiet():
            quantize_dynamic(
                model,
                target,
                op_types_to_quantize=["MatMul"],
                per_channel=True,
                reduce_range=True,  # to `LARGEST_STEP`
                weight_type=QuantType.QInt8,
                use_external_data_format=external,
            )
        model = onnx.load(target, load_external_data=False)
    else:
        _save(model, target, external)
    return _left(model)


def quantize_int4(source: Path, target: Path, external: bool = False) -> tuple[str, ...]:
    """Write a file whose weights have four bits, in blocks of 32 with a scale; see `quantize_int8`.

    Products that four bits have no operator for, or that are too narrow for blocks, get eight.
    """
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = onnx.load(source)
    graph = _Graph(model)
    graph.split_gemm()
    graph.quantize_stacks()
    narrow = graph.narrow()
    graph.store()
    with _quiet():
        quantizer = MatMulNBitsQuantizer(
            model,
            bits=4,
            block_size=BLOCK,
            is_symmetric=True,
            accuracy_level=4,
            op_types_to_quantize=("MatMul", "Gather"),
            nodes_to_exclude=narrow,
        )
        quantizer.process()
    model = quantizer.model.model
    _save(model, target, external)
    return _left(model)


class _Graph:
    """The nodes and weights of a model that is rewritten; `store` puts them back."""

    def __init__(self, model: Any) -> None:
        from onnx import numpy_helper

        self.model = model
        self.nodes = list(model.graph.node)
        tensors = {item.name: item for item in model.graph.initializer}
        self._tensors = tensors
        self._array = numpy_helper.to_array
        self._new: dict[str, Any] = {}

    def weight(self, name: str) -> Array | None:
        """Read a float32 tensor of some size; None for what is none."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.data_type != 1 or np.prod(tensor.dims) < FEWEST:
            return None
        return np.asarray(self._array(tensor))

    def add(self, name: str, value: Array) -> str:
        """Put a tensor into the model; gives its name."""
        from onnx import numpy_helper

        if name not in self._new:
            self._new[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def products(self, ndim: int) -> list[Any]:
        """List products with a constant of so many axes on the right."""
        found = (node for node in self.nodes if node.op_type == "MatMul")
        return [
            node
            for node in found
            if (weight := self.weight(node.input[1])) is not None and weight.ndim == ndim
        ]

    def narrow(self) -> list[str]:
        """Name the nodes whose constants blocks of four bits would not make smaller than eight."""
        names = [node.name for node in self.products(2) if self.weight(node.input[1]).shape[0] < BLOCK]
        return names

    def replace(self, node: Any, *nodes: Any) -> None:
        """Put nodes in the place of one."""
        index = next(i for i, item in enumerate(self.nodes) if item is node)
        self.nodes[index : index + 1] = nodes

    def split_gemm(self) -> None:
        """Make products and sums of `Gemm`, which quantisers do not know."""
        from onnx import helper

        for node in [item for item in self.nodes if item.op_type == "Gemm"]:
            options = {item.name: helper.get_attribute_value(item) for item in node.attribute}
            weight = self.weight(node.input[1])
            plain = options.get("alpha", 1) == options.get("beta", 1) == 1
            if weight is None or options.get("transA") or not plain:
                continue
            name = f"{node.input[1]}_columns" if options.get("transB") else node.input[1]
            if options.get("transB"):
                self._keep(name, weight.T)
            product = f"{node.output[0]}_product" if len(node.input) > 2 else node.output[0]
            nodes = [helper.make_node("MatMul", [node.input[0], name], [product], node.name)]
            if len(node.input) > 2:
                ends = [product, node.input[2]]
                nodes.append(helper.make_node("Add", ends, list(node.output), f"{node.name}_add"))
            self.replace(node, *nodes)

    def _keep(self, name: str, value: Array) -> None:
        self._tensors[name] = self._new[self.add(name, value)]

    def quantize_tables(self) -> None:
        """Store tables that rows are read from in eight bits, with a scale for each row."""
        from onnx import TensorProto, helper

        for node in [item for item in self.nodes if item.op_type == "Gather"]:
            table = self.weight(node.input[0])
            axis = next((item.i for item in node.attribute if item.name == "axis"), 0)
            if table is None or table.ndim != 2 or axis:
                continue
            steps, scales = _rounded(table, axis=1, largest=127)
            name, out = node.input[0], node.output[0]
            rows = self.add(f"{name}_int8", steps), self.add(f"{name}_scales", scales)
            ids = node.input[1]
            self.replace(
                node,
                helper.make_node("Gather", [rows[0], ids], [f"{out}_int8"], node.name),
                helper.make_node("Gather", [rows[1], ids], [f"{out}_scales"], f"{node.name}_scales"),
                helper.make_node(
                    "Cast", [f"{out}_int8"], [f"{out}_steps"], f"{node.name}_cast", to=TensorProto.FLOAT
                ),
                helper.make_node(
                    "Mul", [f"{out}_steps", f"{out}_scales"], [out], f"{node.name}_scaled"
                ),
            )

    def quantize_stacks(self) -> None:
        """Store stacks of matrices in eight bits, and quantise what they are multiplied with."""
        from onnx import TensorProto, helper

        quantised: set[str] = set()
        for node in self.products(3):
            weight = self.weight(node.input[1])
            assert weight is not None
            steps, scales = _rounded(weight, axis=-2, largest=LARGEST_STEP)
            x, name, out = node.input[0], node.input[1], node.output[0]
            parts = [f"{x}_uint8", f"{x}_scale", f"{x}_zero"]
            nodes = []
            if x not in quantised:
                nodes.append(helper.make_node("DynamicQuantizeLinear", [x], parts, f"{x}_quantize"))
                quantised.add(x)
            stored = self.add(f"{name}_int8", steps), self.add(f"{name}_scales", scales)
            nodes += [
                helper.make_node(
                    "MatMulInteger", [parts[0], stored[0], parts[2]], [f"{out}_int32"], node.name
                ),
                helper.make_node(
                    "Cast", [f"{out}_int32"], [f"{out}_sum"], f"{node.name}_cast", to=TensorProto.FLOAT
                ),
                helper.make_node(
                    "Mul", [parts[1], stored[1]], [f"{out}_scales"], f"{node.name}_scales"
                ),
                helper.make_node("Mul", [f"{out}_sum", f"{out}_scales"], [out], f"{node.name}_scaled"),
            ]
            self.replace(node, *nodes)

    def store(self) -> None:
        """Put nodes and tensors back into the model; what no node reads is dropped."""
        graph = self.model.graph
        read = {name for node in self.nodes for name in node.input}
        read |= {item.name for item in graph.output}
        kept = {item.name: item for item in graph.initializer if item.name in read}
        kept |= {name: item for name, item in self._new.items() if name in read}
        del graph.node[:]
        graph.node.extend(self.nodes)
        del graph.initializer[:]
        graph.initializer.extend(kept.values())
        del graph.value_info[:]


def _rounded(weight: Array, axis: int, largest: int) -> tuple[Array, Array]:
    """Round to the nearest step of a symmetric grid.  # int8, and float32 scales along an axis."""
    scales = np.abs(weight).max(axis=axis, keepdims=True).astype(np.float64) / largest
    steps = np.rint(weight / np.where(scales == 0, 1, scales))
    return steps.astype(np.int8), scales.astype(np.float32)


def _left(model: Any) -> tuple[str, ...]:
    """Name the larger tensors in float32."""
    tensors: Sequence[Any] = model.graph.initializer
    return tuple(
        sorted(
            item.name
            for item in tensors
            if item.data_type == 1 and np.prod(item.dims) >= FEWEST and not item.name.endswith("scales")
        )
    )


def _save(model: Any, target: Path, external: bool) -> None:
    import onnx

    onnx.save(
        model,
        target,
        save_as_external_data=external,
        location=f"{target.name}_data",
        size_threshold=1024,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep advice of ONNX Runtime's quantisers, which write to the root logger, from the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
