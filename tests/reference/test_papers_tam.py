"""TAM and multilinear attention of ours compute what the reference of their paper does."""

from typing import Any

import numpy as np
import pytest
import torch

from tcompress.attention.multilinear import MultilinearLayout
from tcompress.attention.replacement import replacement_named
from tcompress.attention.tam import TamLayout
from tcompress.attention.visibility import Visible
from tests.reference import tam
from tests.reference.copied import CLOSE, array, drawn

HEADS, WIDTH, TOKENS, CORES = 2, 4, 6, 2


def _inputs() -> tuple[torch.Tensor, ...]:
    return tuple(drawn(1, HEADS, TOKENS, WIDTH, seed=seed) for seed in range(3))


def _tensors(layout: TamLayout) -> dict[str, torch.Tensor]:
    shapes = replacement_named("tam").tensors(layout)
    return {name: 0.5 * drawn(*shape, seed=9 + n) for n, (name, shape) in enumerate(shapes.items())}


def _reference(
    inputs: Any, tensors: Any, cores: list[np.ndarray], head: int, **how: Any
) -> np.ndarray:
    """One head of ours: queries, keys and values are there, semantics are made of queries."""
    q, k, v = (array(x[0, head]) for x in inputs)
    s = q @ array(tensors["semantic_weight"][head]).T + array(tensors["semantic_bias"][head])
    parts = [tam.attention_tensor(q, k, s, core, how["aligned"]) for core in cores]
    scores = tam.fuse(tam.sum_cores(parts))
    if how.get("softmax") == "keys":
        scores = tam.row_softmax(scores)
    return scores @ v


@pytest.mark.parametrize("normalize", ["none", "softmax"])
@pytest.mark.parametrize("core", ["aligned", "cp"])
def test_diagonal_cores(core: Any, normalize: Any) -> None:
    """Equations (4) to (7); `cp` is "w/o query aligned". Texts are longer than heads are wide."""
    layout = TamLayout(
        heads=HEADS, key_heads=HEADS, head_dim=WIDTH, core=core, cores=CORES, normalize=normalize
    )
    tensors, inputs = _tensors(layout), _inputs()
    if normalize == "softmax":  # ours means semantics and scales, the paper sums
        tensors["scale"] = torch.full((HEADS,), float(np.log(TOKENS)), dtype=torch.float64)
    ours = replacement_named("tam").apply(*inputs, tensors, layout, Visible())[0]
    aligned = core == "aligned"
    for head in range(HEADS):
        first = TOKENS if aligned else WIDTH
        diagonals = array(tensors["core"][:, head])
        cores = [tam.diagonal_core(g, first, WIDTH) for g in diagonals]
        softmax = "keys" if normalize == "softmax" else "none"
        expected = _reference(inputs, tensors, cores, head, aligned=aligned, softmax=softmax)
        np.testing.assert_allclose(array(ours[0, head]), expected, **CLOSE)


def test_full_core() -> None:
    """A core D x D x D, not aligned, with factors of Tucker's form folded into it."""
    sizes: dict[str, Any] = {"rank": 3, "semantic_rank": 2, "cores": CORES, "normalize": "none"}
    layout = TamLayout(heads=HEADS, key_heads=HEADS, head_dim=WIDTH, core="tucker", **sizes)
    tensors, inputs = _tensors(layout), _inputs()
    ours = replacement_named("tam").apply(*inputs, tensors, layout, Visible())[0]
    for head in range(HEADS):
        factors = [array(tensors[name][head]) for name in ("factor_q", "factor_k", "factor_s")]
        cores = [
            np.einsum("abc,ia,jb,lc->ijl", array(core[head]), *factors) for core in tensors["core"]
        ]
        expected = _reference(inputs, tensors, cores, head, aligned=False)
        np.testing.assert_allclose(array(ours[0, head]), expected, **CLOSE)


def test_start_of_a_core() -> None:
    """Equation (5): weights that sum to 1."""
    layout = TamLayout(heads=HEADS, key_heads=HEADS, head_dim=WIDTH, core="aligned")
    values = replacement_named("tam").start(layout, torch.Generator(), pretrained=False)
    core = array(values["core"])
    assert (core > 0).all()
    np.testing.assert_allclose(core.sum(-1), np.ones((1, HEADS)), rtol=1e-6)


def test_multilinear() -> None:
    """Equations (1) to (3) with projections for each core, where the paper shares them."""
    layout = MultilinearLayout(heads=HEADS, key_heads=HEADS, head_dim=WIDTH, length=TOKENS)
    shapes = replacement_named("multilinear").tensors(layout)
    tensors = {name: drawn(*shape, seed=9 + n) for n, (name, shape) in enumerate(shapes.items())}
    inputs = _inputs()
    ours = replacement_named("multilinear").apply(*inputs, tensors, layout, Visible())[0]
    total = sum(
        tam.attention_td(array(tensors["core"][h]), *(array(x[0, h]) for x in inputs))
        for h in range(HEADS)
    )
    expected = tam.split_concat(total / HEADS, "keys") @ array(tensors["out"])
    joined = np.concatenate([array(ours[0, h]) for h in range(HEADS)], axis=1)
    np.testing.assert_allclose(joined, expected, **CLOSE)
