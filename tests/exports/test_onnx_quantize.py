"""Eight and four bits of small graphs that are made by hand, in ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tcompress.exports.onnx_quantize import (
    LARGEST_STEP,
    Graph,
    quantize_int4,
    quantize_int8,
    rounded,
)
from tcompress.exports.onnx_smooth import activations_of, smooth
from tcompress.linalg.rounding import Rounding, nearest, quantize
from tcompress.runtimes.sessions import OnnxModel

onnx = pytest.importorskip("onnx")
WORDS, WIDTH, SLICES, TOKENS = 64, 64, 4, 3

Weights = dict[str, NDArray[np.float32]]


def _graph(path: Path, *nodes: tuple[Any, ...], **weights: NDArray[np.float32]) -> Path:
    """Write a graph from `ids` to `y`; nodes are an operator, inputs, an output and attributes."""
    helper = onnx.helper
    made = [
        helper.make_node(kind, inputs, [output], f"/{output}", **(options[0] if options else {}))
        for kind, inputs, output, *options in nodes
    ]
    ids = helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch"])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    stored = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    opsets = [helper.make_opsetid("", 20)]
    graph = helper.make_graph(made, "g", [ids], [y], stored)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def _drawn(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


LOOKED_UP = ("Gather", ["table", "ids"], "x")
TABLE = _drawn(WORDS, WIDTH)
SHAPE = np.array([1, -1, WIDTH], dtype=np.int64)
GRAPHS: dict[str, tuple[list[tuple[Any, ...]], Weights]] = {
    "one matrix": (
        [LOOKED_UP, ("MatMul", ["x", "w"], "y")],
        {"table": TABLE, "w": _drawn(WIDTH, 32)},
    ),
    "with a bias, turned": (
        [LOOKED_UP, ("Gemm", ["x", "w", "b"], "y", {"transB": 1})],
        {"table": TABLE, "w": _drawn(32, WIDTH), "b": _drawn(32)},
    ),
    "slices": (
        [LOOKED_UP, ("Reshape", ["x", "shape"], "x1"), ("MatMul", ["x1", "w"], "y")],
        # Their sizes differ, as those of slices do in the domain of a transform.
        {"table": TABLE, "shape": SHAPE,
         "w": _drawn(SLICES, WIDTH, 32) * np.float32([[[1e-3]], [[1]], [[1]], [[10]]])},
    ),
    "tied": (
        [LOOKED_UP, ("Transpose", ["table"], "turned", {"perm": [1, 0]}),
         ("MatMul", ["x", "turned"], "y")],
        {"table": TABLE},
    ),
    "rebuilt": (
        [LOOKED_UP, ("Einsum", ["a", "c"], "w", {"equation": "ij,jk->ik"}),
         ("MatMul", ["x", "w"], "y")],
        {"table": TABLE, "a": _drawn(WIDTH, 40), "c": _drawn(40, 32)},
    ),
}  # fmt: skip


@pytest.fixture(params=GRAPHS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    nodes, weights = GRAPHS[request.param]
    return _graph(tmp_path / "model.onnx", *nodes, **weights)


def _computed(path: Path) -> NDArray[np.float32]:
    ids = np.random.default_rng(0).integers(WORDS, size=TOKENS)
    return np.asarray(OnnxModel.open(path, threads=1).run({"ids": ids})["y"])


def _apart(path: Path, small: Path) -> float:
    """Relative error of the worst slice."""
    dense, other = map(_computed, (path, small))
    dense, other = (item.reshape(-1, TOKENS, item.shape[-1]) for item in (dense, other))
    errors = np.linalg.norm(other - dense, axis=(1, 2)) / np.linalg.norm(dense, axis=(1, 2))
    return float(errors.max())


def _sizes(path: Path) -> tuple[int, int]:
    """Bytes of all tensors, and numbers that are stored as floats."""
    tensors = onnx.load(path).graph.initializer
    arrays = [(item, onnx.numpy_helper.to_array(item)) for item in tensors]
    floats = sum(int(array.size) for item, array in arrays if item.data_type == 1)
    # Arrays of half bytes take a byte for each number in NumPy.
    halves = {onnx.TensorProto.INT4, onnx.TensorProto.UINT4}
    return sum(a.nbytes // (1 + (i.data_type in halves)) for i, a in arrays), floats


@pytest.mark.parametrize(
    ("write", "bits", "error"), [(quantize_int8, 8, 0.02), (quantize_int4, 4, 0.15)]
)
def test_weights_have_fewer_bits_and_compute_nearly_the_same(
    write: Callable[..., tuple[str, ...]], bits: int, error: float, path: Path
) -> None:
    small = path.with_name("small.onnx")
    assert write(path, small) == ()
    assert _apart(path, small) < error
    (before, _), (after, floats) = _sizes(path), _sizes(small)
    numbers = before // 4
    assert floats <= numbers / 16  # scales and biases
    assert after <= numbers * (1 + 0.25)
    if bits == 4 and "Einsum" not in {node.op_type for node in onnx.load(path).graph.node}:
        stacks = any(len(item.dims) == 3 for item in onnx.load(path).graph.initializer)
        assert stacks or after <= numbers * (0.5 + 0.16)


@pytest.mark.parametrize("write", [quantize_int8, quantize_int4])
def test_weights_of_large_files_lie_beside_them(
    write: Callable[..., tuple[str, ...]], path: Path, tmp_path: Path
) -> None:
    alone, small = tmp_path / "alone.onnx", tmp_path / "small.onnx"
    write(path, alone)
    assert write(path, small, external=True) == ()
    names = {path.name, "alone.onnx", "small.onnx", "small.onnx_data"}
    assert {item.name for item in tmp_path.iterdir()} == names
    np.testing.assert_array_equal(_computed(small), _computed(alone))


def test_products_of_bytes_fit_into_sixteen_bits(path: Path) -> None:
    """Without VNNI two products of an unsigned and a signed byte are added in 16 bits."""
    small = path.with_name("small.onnx")
    quantize_int8(path, small)
    model = onnx.load(small)
    turned = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Transpose"}
    weights = {
        turned.get(node.input[1], node.input[1])
        for node in model.graph.node
        if node.op_type == "MatMulInteger"
    }
    assert bool(weights) == ("Einsum" not in {node.op_type for node in model.graph.node})
    for item in model.graph.initializer:
        if item.name in weights:
            largest = int(np.abs(onnx.numpy_helper.to_array(item).astype(int)).max())
            assert largest == LARGEST_STEP
            assert 2 * 255 * largest <= np.iinfo(np.int16).max


def test_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    nodes, weights = GRAPHS["tied"]
    path = _graph(tmp_path / "model.onnx", *nodes, **weights)
    for write, most in ((quantize_int8, 1.1), (quantize_int4, 0.65)):
        write(path, tmp_path / "small.onnx")
        assert _sizes(tmp_path / "small.onnx")[0] <= most * TABLE.size


def test_embeddings_of_four_bits_beside_products_of_eight(tmp_path: Path) -> None:
    nodes, weights = GRAPHS["one matrix"]
    path = _graph(tmp_path / "model.onnx", *nodes, **weights)
    quantize_int8(path, tmp_path / "small.onnx", table_bits=4)
    kinds = {node.op_type for node in onnx.load(tmp_path / "small.onnx").graph.node}
    assert {"GatherBlockQuantized", "MatMulInteger"} <= kinds
    assert _apart(path, tmp_path / "small.onnx") < 0.15


def test_four_bits_lose_nothing_of_weights_that_have_four(tmp_path: Path) -> None:
    """Those of `convert --bits 4`."""
    nodes, weights = GRAPHS["one matrix"]
    rounding = Rounding.usual(4)
    drawn = torch.from_numpy(weights["w"].T.copy())
    w = nearest(drawn, quantize(drawn, 4, rounding.group)[1], rounding)
    path = _graph(tmp_path / "model.onnx", *nodes, **{**weights, "w": w.T.contiguous().numpy()})
    quantize_int4(path, tmp_path / "small.onnx")
    stored = {
        item.name: onnx.numpy_helper.to_array(item)
        for item in onnx.load(tmp_path / "small.onnx").graph.initializer
    }
    packed, scales = stored["w_blocks"], stored["w_blocks_scales"]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1).astype(int) - 8
    assert np.array_equal((codes * scales[..., None]).reshape(w.shape), w.numpy())


@pytest.mark.parametrize(
    ("width", "scale", "spread", "bytes_"),
    [(80, 1.0, 1.0, 2), (64, 1e-7, 1e-3, 2), (64, 1e6, 1.0, 2), (64, 1.0, 1e-9, 4)],
)
def test_tables_of_four_bits_give_the_rows_of_four_bits(
    width: int, scale: float, spread: float, bytes_: int, tmp_path: Path
) -> None:
    """Of any width; scales take two bytes where those hold them and what they give exactly."""
    table = torch.from_numpy(_drawn(WORDS, width)) * scale
    table[1] *= spread
    rounding = Rounding.usual(4)
    rows = nearest(table, quantize(table, 4, rounding.group)[1], rounding)
    nodes = [("Gather", ["table", "ids"], "y")]
    path = _graph(tmp_path / "model.onnx", *nodes, table=rows.numpy())
    quantize_int8(path, tmp_path / "small.onnx", table_bits=4)
    assert np.array_equal(_computed(tmp_path / "small.onnx"), _computed(path))
    whole = -(-width // 32)
    taken = _sizes(tmp_path / "small.onnx")[0]
    assert 0 <= taken - WORDS * whole * (16 + bytes_) <= 64  # shapes


@pytest.mark.parametrize("linear", [False, True])
def test_large_channels_are_made_like_others(linear: bool, tmp_path: Path) -> None:
    """By the weights of a product before, or by a factor for each channel."""
    loud = np.ones(WIDTH, dtype=np.float32)
    loud[:3] = 40
    before = [LOOKED_UP, ("MatMul", ["x", "v"], "z")] if linear else [("Gather", ["t", "ids"], "z")]
    path = _graph(
        tmp_path / "model.onnx",
        *before,
        ("MatMul", ["z", "w"], "y"),
        table=TABLE,
        t=TABLE * loud,
        v=_drawn(WIDTH, WIDTH) * loud,
        w=_drawn(WIDTH, 32) / loud[:, None],
    )
    exact = _computed(path)
    activations = activations_of(path, [{"ids": np.arange(WORDS)}])
    errors = []
    for prepare in (lambda graph: 0, lambda graph: smooth(graph, activations)):
        quantize_int8(path, tmp_path / "small.onnx", prepare=prepare)
        errors.append(np.linalg.norm(_computed(tmp_path / "small.onnx") - exact))
    assert errors[1] < 0.6 * errors[0]
    kinds = [node.op_type for node in onnx.load(tmp_path / "small.onnx").graph.node]
    assert kinds.count("MatMulInteger") == 1 + linear


def test_channels_that_are_alike_stay(tmp_path: Path) -> None:
    nodes, weights = GRAPHS["one matrix"]
    alike = {name: np.sign(value) for name, value in weights.items()}
    path = _graph(tmp_path / "model.onnx", *nodes, **alike)
    assert smooth(Graph.open(path), activations_of(path, [{"ids": np.arange(WORDS)}])) == 0


def test_rounding_is_to_the_nearest_step_of_each_row() -> None:
    weight = np.array([[1.0, -0.5, 0.26], [0, 0, 0]], dtype=np.float32)
    steps, scales = rounded(weight, axis=1, largest=4)
    assert steps.tolist() == [[4, -2, 1], [0, 0, 0]]
    assert scales.tolist() == [[0.25], [0.0]]
