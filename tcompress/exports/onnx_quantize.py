"""Smaller ONNX files: weights of eight bits for every processor, or of four bits in blocks.

ONNX Runtime's quantiser rewrites products with one matrix to eight bits. What it does not know is
done here: tables of embeddings get a scale for each row, products with a stack of matrices, as
slices have them, one for each column of each matrix, and weights that are read in another way are
stored in eight bits and made floats again when a file is opened. Four bits are rounded as those of
`convert --bits 4` are, so that they lose nothing where a model has them already.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_STEP = 64
"""Largest weight of eight bits that integers are multiplied with: half of what they hold.

Processors without instructions for bytes (AVX2 without VNNI) add two products of an unsigned and a
signed byte in 16 bits, where larger sums are cut off. 2 * 255 * 64 = 32,640 is below 2**15.
"""
BLOCK = 32
"""Weights that share a scale where they have four bits."""
FEWEST = 1024
"""Numbers below which a tensor stays as it is: it would save nothing that counts."""
_DOMAIN = "com.microsoft"
_FLOAT, _HALF = 1, 10  # types of ONNX's tensors

Array = NDArray[Any]


def quantize_int8(
    source: Path,
    target: Path,
    *,
    table_bits: int = 8,
    external: bool = False,
    prepare: Callable[[Graph], object] = lambda graph: None,
) -> tuple[str, ...]:
    """Write a file whose weights have eight bits; inputs of products are quantised as they come.

    The `source` is in float32. Embeddings have `table_bits`: 8 with a scale for each row, or 4 in
    blocks. With `external`, weights lie beside the file. `prepare` is done to the graph in float32
    before. Returns the names of the larger tensors that stay in float32.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = Graph.open(source)
    split_gemm(graph)
    prepare(graph)
    part_norms(graph)
    share_products(graph)
    shrink_tables(graph, all_=table_bits == 8)
    quantize_products(graph, graph.products(3))
    if table_bits == 4:
        block_tables(graph)
    store_others(graph)
    model = graph.stored()
    products = [node.name for node in Graph(model).products(2)]
    if not products:
        return _saved(model, target, external)
    with _quiet(), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        written = Path(scratch) / target.name
        quantize_dynamic(
            model,
            written,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=products,
            per_channel=True,
            reduce_range=True,  # to `LARGEST_STEP`
            weight_type=QuantType.QInt8,
            use_external_data_format=external,
            # What contributed operators compute, shape inference does not know.
            extra_options={"DefaultTensorType": _FLOAT},
        )
        # Written again, for its weights beside it to have the name that they have here.
        return _saved(onnx.load(written), target, external)


def quantize_int4(source: Path, target: Path, *, external: bool = False) -> tuple[str, ...]:
    """Write a file whose weights have four bits, in blocks of 32 with a scale; see `quantize_int8`.

    Products that blocks have no operator for get eight bits, as do weights that would not be
    smaller in blocks.
    """
    graph = Graph.open(source)
    split_gemm(graph)
    block_products(graph)
    block_tables(graph)
    quantize_products(graph, [*graph.products(2), *graph.products(3)])
    shrink_tables(graph, all_=True)
    store_others(graph)
    return _saved(graph.stored(), target, external)


class Graph:
    """The nodes and weights of an ONNX model that is being rewritten."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.nodes: list[Any] = list(model.graph.node)
        self.tensors = {item.name: item for item in model.graph.initializer}

    @classmethod
    def open(cls, path: Path) -> Graph:
        """Read a file, and the weights beside it."""
        import onnx

        return cls(onnx.load(path))

    def stored(self) -> Any:
        """Put nodes and weights back into the model, without those that no node reads."""
        from onnx import helper

        graph = self.model.graph
        if not any(item.domain == _DOMAIN for item in self.model.opset_import):
            self.model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
        read = {name for node in self.nodes for name in node.input}
        read |= {item.name for item in graph.output}
        kept = [item for name, item in self.tensors.items() if name in read]
        for field, items in ((graph.node, self.nodes), (graph.initializer, kept)):
            del field[:]
            field.extend(items)
        del graph.value_info[:]  # shapes of values that are no more
        return self.model

    def weight(self, name: str) -> Array | None:
        """Read a float32 tensor of some size and more than one axis; None for what is none."""
        from onnx import numpy_helper

        tensor: Any = self.tensors.get(name)
        return np.asarray(numpy_helper.to_array(tensor)) if _is_large(tensor) else None

    def add(self, name: str, value: Array) -> str:
        """Put a tensor into the model; gives its name."""
        from onnx import numpy_helper

        if name not in self.tensors:
            self.tensors[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def set_weight(self, node: Any, value: Array) -> None:
        """Give a product another constant of the same shape, which no other node sees."""
        name = f"{node.name}_weight"
        self.tensors.pop(name, None)
        node.input[1] = self.add(name, value.astype(np.float32))

    def scale(self, name: str, readers: list[Any], factors: Array) -> None:
        """Multiply the channels of a value by factors, for some of the nodes that read it."""
        scaled = f"{name}_smooth"
        factors_name = self.add(f"{scaled}_scales", factors.astype(np.float32))
        node = _node("Mul", [name, factors_name], [scaled], scaled)
        ends = [index for index, item in enumerate(self.nodes) if name in item.output]
        self.nodes.insert(ends[0] + 1 if ends else 0, node)
        for reader in readers:
            reader.input[0] = scaled

    def of_kind(self, kind: str) -> list[Any]:
        """List nodes by operator."""
        return [node for node in self.nodes if node.op_type == kind]

    def products(self, ndim: int) -> list[Any]:
        """List products with a constant of so many axes on the right."""
        weights = ((node, self.weight(node.input[1])) for node in self.of_kind("MatMul"))
        return [node for node, weight in weights if weight is not None and weight.ndim == ndim]

    def tables(self) -> list[Any]:
        """List the nodes that read rows of a table."""
        found = []
        for node in self.of_kind("Gather"):
            table = self.weight(node.input[0])
            axis = next((item.i for item in node.attribute if item.name == "axis"), 0)
            if table is not None and table.ndim == 2 and axis == 0:
                found.append(node)
        return found

    def makes(self, name: str) -> bool:
        """Return whether a node puts a value of that name out."""
        return any(name in item.output for item in self.nodes)

    def replace(self, node: Any, *nodes: Any) -> None:
        """Put nodes in the place of one."""
        place = next(index for index, item in enumerate(self.nodes) if item is node)
        self.nodes[place : place + 1] = nodes


def _node(kind: str, inputs: Any, outputs: Any, name: str, **options: Any) -> Any:
    from onnx import helper

    return helper.make_node(kind, inputs, outputs, name, **options)


def _to_float(value: str, made: str, name: str) -> Any:
    return _node("Cast", [value], [made], name, to=_FLOAT)


def split_gemm(graph: Graph) -> None:
    """Make products and sums of `Gemm`, which quantisers do not know."""
    from onnx import helper

    for node in graph.of_kind("Gemm"):
        options = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        weight, name = graph.weight(node.input[1]), node.input[1]
        plain = options.get("alpha", 1.0) == options.get("beta", 1.0) == 1.0
        if weight is None or options.get("transA") or not plain:
            continue
        if options.get("transB"):
            name = graph.add(f"{name}_turned", weight.T)
        (out,), bias = node.output, node.input[2:]
        product = f"{out}_product" if bias else out
        sums = [_node("Add", [product, *bias], [out], f"{node.name}_add")] if bias else []
        graph.replace(node, _node("MatMul", [node.input[0], name], [product], node.name), *sums)


def part_norms(graph: Graph) -> None:
    """Keep ONNX Runtime from joining a layer norm and the sum before it.

    Its joint operator takes five times as long on a CPU as both alone (1.32). A sum by another
    name is left as it is.
    """
    norms = {node.input[0] for node in graph.of_kind("LayerNormalization")}
    for node in graph.of_kind("Add"):
        if node.output[0] in norms:
            node.op_type = "Sum"


def turned_tables(graph: Graph) -> dict[str, Any]:
    """Find the nodes that turn a table round for an output head, by what they compute."""
    nodes = graph.of_kind("Transpose")
    return {node.output[0]: node for node in nodes if graph.weight(node.input[0]) is not None}


def share_products(graph: Graph) -> None:
    """Quantise products with a table that is read by rows too; both read the same bytes."""
    turned = turned_tables(graph)
    for node in graph.of_kind("MatMul"):
        turn = turned.get(node.input[1])
        if turn is None:
            continue
        graph.nodes = [item for item in graph.nodes if item is not turn]
        parts = _in_bytes(graph, turn.input[0], 1, LARGEST_STEP)
        names = [f"{part}_turned" for part in parts]
        _integer_product(graph, node, *names)
        if not graph.makes(names[0]):
            graph.nodes[:0] = [
                _node("Transpose", [part], [name], name, perm=[1, 0])
                for part, name in zip(parts, names, strict=True)
            ]


def block_products(graph: Graph) -> None:
    """Store matrices in blocks of four bits, and those that are tables turned round."""
    turned = turned_tables(graph)
    for node in graph.of_kind("MatMul"):
        turn = turned.get(node.input[1])
        name = node.input[1] if turn is None else turn.input[0]
        weight = graph.weight(name)
        if weight is None or weight.ndim != 2:
            continue
        rows = weight.T if turn is None else weight
        outputs, inputs = rows.shape
        if inputs < BLOCK:
            continue
        options = {"K": inputs, "N": outputs, "bits": 4, "block_size": BLOCK}
        product = _node(
            "MatMulNBits",
            [node.input[0], *_in_blocks(graph, name, rows)],
            list(node.output),
            node.name,
            domain=_DOMAIN,
            accuracy_level=4,  # inputs have eight bits in a product
            **options,
        )
        graph.replace(node, product)
        graph.nodes = [item for item in graph.nodes if item is not turn]


def block_tables(graph: Graph) -> None:
    """Store tables in blocks of four bits; those that a product has so too are shared."""
    for node in graph.tables():
        name, (out,) = node.input[0], node.output
        table = graph.weight(name)
        if table is None or table.shape[1] < BLOCK or f"{name}_int8" in graph.tensors:
            continue
        rows, width = table.shape
        blocks = -(-width // BLOCK)
        parts = _in_blocks(graph, name, table, half=True)
        shapes = ([rows, blocks * BLOCK // 2], [rows, blocks])
        read = [f"{part}_rows" for part in parts]
        for part, shape, new in zip(parts, shapes, read, strict=True):
            size = graph.add(f"{part}_shape", np.array(shape, dtype=np.int64))
            if not graph.makes(new):
                graph.nodes.insert(0, _node("Reshape", [part, size], [new], new))
        follow, value = [], out
        if width % BLOCK:  # codes of whole blocks, of which the last is cut off
            value = f"{out}_whole"
            ends = ((0, "start"), (width, "end"), (-1, "axis"))
            cut = [graph.add(f"{name}_{what}", np.array([at])) for at, what in ends]
            follow.append(_node("Slice", [value, *cut], [out], f"{node.name}_cut"))
        if graph.tensors[parts[1]].data_type == _HALF:
            half, unscaled = f"{out}_half", f"{out}_unscaled"
            unit = _node("Mul", [unscaled, f"{parts[1]}_unit"], [value], f"{node.name}_unit")
            follow[:0] = [_to_float(half, unscaled, f"{node.name}_cast"), unit]
            value = half
        lookup = _node(
            "GatherBlockQuantized",
            [read[0], node.input[1], read[1]],
            [value],
            node.name,
            domain=_DOMAIN,
            bits=4,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
        graph.replace(node, lookup, *follow)


def _in_blocks(graph: Graph, name: str, rows: Array, *, half: bool = False) -> tuple[str, str]:
    """Store rows in blocks of four bits, once; gives the names of codes and of scales.

    Scales have eight bits of precision and codes three, so that `half` of the bytes holds
    scales and their products with codes exactly: in a unit, a power of two, that is stored beside
    them, and unless the largest is 2**26 times the least.
    """
    import torch

    from tcompress.linalg.rounding import pack_codes, quantize

    parts = f"{name}_blocks", f"{name}_blocks_scales"
    if parts[0] not in graph.tensors:
        count, width = rows.shape
        codes, scales = quantize(torch.from_numpy(rows.copy()), 4, BLOCK)
        padded = torch.nn.functional.pad(codes, (0, -width % BLOCK))
        packed = pack_codes(padded, 4).reshape(count, -1, BLOCK // 2)
        scales = scales.float()
        sizes = scales.abs()
        # Products with codes, of which the largest is 8, end below the largest float16.
        unit = 2.0 ** max(-126, int(torch.frexp(sizes.max())[1]) - 12)
        if half and bool(((sizes == 0) | (sizes / unit >= torch.finfo(torch.float16).tiny)).all()):
            graph.add(f"{parts[1]}_unit", np.array(unit, dtype=np.float32))
            scales = (scales / unit).half()
        graph.add(parts[0], packed.numpy())
        graph.add(parts[1], scales.numpy())
    return parts


def _in_bytes(
    graph: Graph, name: str, axis: int | tuple[int, ...], largest: int = 127
) -> tuple[str, str]:
    """Store a weight in eight bits, once; gives the names of steps and of scales. See `rounded`."""
    parts = f"{name}_int8", f"{name}_scales"
    if parts[0] not in graph.tensors:
        weight = graph.weight(name)
        assert weight is not None
        for part, value in zip(parts, rounded(weight, axis, largest), strict=True):
            graph.add(part, value)
    return parts


def shrink_tables(graph: Graph, *, all_: bool) -> None:
    """Store tables that rows are read from in eight bits, with a scale for each row.

    Without `all_`, only those that a product reads in eight bits anyway.
    """
    for node in graph.tables():
        if not all_ and f"{node.input[0]}_int8" not in graph.tensors:
            continue
        steps, scales = _in_bytes(graph, node.input[0], 1)
        ids, (out,) = node.input[1], node.output
        names = [f"{out}_{end}" for end in ("int8", "steps", "scales")]
        graph.replace(
            node,
            _node("Gather", [steps, ids], names[:1], node.name),
            _to_float(names[0], names[1], f"{node.name}_steps"),
            _node("Gather", [scales, ids], names[2:], f"{node.name}_scales"),
            _node("Mul", names[1:], [out], f"{node.name}_scaled"),
        )


def quantize_products(graph: Graph, products: list[Any]) -> None:
    """Store matrices, or stacks of them, in eight bits, and quantise what they multiply."""
    for node in products:
        _integer_product(graph, node, *_in_bytes(graph, node.input[1], -2, LARGEST_STEP))


def _integer_product(graph: Graph, node: Any, steps: str, scales: str) -> None:
    """Multiply integers in the place of a product, and scale what comes out."""
    x, (out,) = node.input[0], node.output
    parts = [f"{x}_{end}" for end in ("uint8", "scale", "zero")]
    names = [f"{out}_{end}" for end in ("int32", "sum", "scales")]
    nodes = [
        _node("MatMulInteger", [parts[0], steps, parts[2]], names[:1], f"{node.name}_integer"),
        _to_float(names[0], names[1], f"{node.name}_sum"),
        _node("Mul", [parts[1], scales], names[2:], f"{node.name}_scales"),
        _node("Mul", names[1:], [out], f"{node.name}_scaled"),
    ]
    if not graph.makes(parts[0]):
        nodes.insert(0, _node("DynamicQuantizeLinear", [x], parts, f"{x}_quantize"))
    graph.replace(node, *nodes)


def store_others(graph: Graph) -> None:
    """Store what is read in no product with one matrix in eight bits, to be made floats.

    ONNX Runtime does that once, when it opens the file: so memory and time stay as they were.
    """
    spared = {node.input[1] for node in graph.products(2)}
    read = {name for node in graph.nodes for name in node.input}
    for name in [name for name in graph.tensors if name in read - spared]:
        weight = graph.weight(name)
        if weight is None:
            continue
        # A scale for each index of the longest axis.
        others = tuple({*range(weight.ndim)} - {int(np.argmax(weight.shape))})
        steps, scales = _in_bytes(graph, name, others)
        cast = _to_float(steps, f"{name}_steps", f"{name}_steps")
        graph.nodes[:0] = [cast, _node("Mul", [f"{name}_steps", scales], [name], f"{name}_scaled")]
        del graph.tensors[name]


def rounded(weight: Array, axis: int | tuple[int, ...], largest: int) -> tuple[Array, Array]:
    """Round to the nearest step of a symmetric grid; numbers along `axis` share a scale.

    Returns steps in int8, `largest` at most, and scales in float32: numbers are their products.
    """
    scales = np.abs(weight).max(axis=axis, keepdims=True).astype(np.float64) / largest
    steps = np.rint(weight / np.where(scales == 0, 1, scales))
    return steps.astype(np.int8), scales.astype(np.float32)


def _is_large(tensor: Any) -> bool:
    """Return whether a tensor is in float32, of some size, of more than one axis, and no scales."""
    if tensor is None or tensor.data_type != _FLOAT or len(tensor.dims) < 2:
        return False
    return bool(np.prod(tensor.dims) >= FEWEST) and not tensor.name.endswith("_scales")


def _saved(model: Any, target: Path, external: bool) -> tuple[str, ...]:
    """Write a model; gives the names of its larger tensors in float32."""
    import onnx

    onnx.save(
        model,
        target,
        save_as_external_data=external,
        location=f"{target.name}_data",
        size_threshold=1024,
    )
    return tuple(sorted(item.name for item in model.graph.initializer if _is_large(item)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep advice of ONNX Runtime's quantisers, which write to the root logger, from the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
