"""Axes and masks of higher-order attention, against a reference written from the paper alone."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tcompress.attention import BaseAttention, replacement_named
from tcompress.attention.kronecker import KroneckerSpec
from tcompress.attention.visibility import Visible

hot = pytest.importorskip("tests.reference.hot")  # written apart from this code

WIDTH = 8


def _mask(word: str, size: int) -> NDArray[np.bool_]:
    """What a row of an axis may see."""
    apart = np.subtract.outer(np.arange(size), np.arange(size))
    kind, _, width = word.partition(":")
    return {"none": apart > -size, "causal": apart >= 0}.get(kind, abs(apart) <= int(width or 0))


@pytest.mark.parametrize("kernel", ["softmax", "smreg"])
@pytest.mark.parametrize("pool", ["sum", "mean"])
@pytest.mark.parametrize(
    ("axes", "masks"),
    [
        (None, None),
        ((0, 2), None),
        ((1,), ("causal",)),
        (None, ("window:1", "none", "causal")),
        ((), None),
    ],
)
def test_attention_is_that_of_the_paper(
    kernel: Any, pool: Any, axes: tuple[int, ...] | None, masks: tuple[str, ...] | None
) -> None:
    """To 1e-10: factors of some axes, from sums or means, by softmax or random features."""
    grid = (3, 4, 2)
    spec = KroneckerSpec(
        kernel=kernel, pool=pool, features=12, axes=axes, masks=masks, scale="fixed"
    )
    kind, host = replacement_named("kronecker"), BaseAttention(1, 1, WIDTH, tokens=24, grid=grid)
    layout = kind.layout(spec, host)
    own = {name: value.double() for name, value in kind.constants(layout).items()}
    rng = np.random.default_rng(0)
    q, k, v = (0.4 * rng.standard_normal((*grid, WIDTH)) for _ in range(3))
    queries, keys, values = (torch.from_numpy(x.reshape(1, 1, -1, WIDTH)) for x in (q, k, v))
    mixed = kind.apply(queries, keys, values, own, layout, Visible())[0, 0].numpy()
    axes = (0, 1, 2) if axes is None else axes
    features = None
    if kernel == "smreg":
        directions = own["directions"].numpy()
        features = lambda x: hot.smreg_features(x, directions)  # noqa: E731
    hidden = {axis: _mask(word, grid[axis]) for axis, word in zip(axes, masks or (), strict=False)}
    parts = hot.factors(q, k, axes=axes, pooling=pool, features=features, masks=hidden)
    for axis, factor in parts.items():
        v = hot.mode_product(v, factor, axis + 1)
    np.testing.assert_allclose(mixed, v.reshape(-1, WIDTH), rtol=0, atol=1e-10)
