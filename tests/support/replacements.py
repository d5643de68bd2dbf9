"""Cases of every mechanism, and what it computes written out: with loops, for small sizes."""

from collections.abc import Callable, Mapping
from itertools import product

import torch
from torch import Tensor

from tcompress.attention import BaseAttention, ReplacementSpec, replacement_of
from tcompress.attention.additive import AdditiveSpec
from tcompress.attention.graph import GraphSpec
from tcompress.attention.kronecker import KroneckerSpec
from tcompress.attention.multilinear import MultilinearSpec
from tcompress.attention.replacement import ReplacementLayout
from tcompress.attention.tam import TamSpec
from tcompress.attention.visibility import Visible
from tests.support.numerics import randn

HEADS, WIDTH = 2, 4
TEXT = BaseAttention(heads=HEADS, key_heads=HEADS, head_dim=WIDTH)
IMAGE = BaseAttention(
    heads=HEADS, key_heads=HEADS, head_dim=WIDTH, tokens=7, grid=(2, 3), special=1
)
VIDEO = BaseAttention(heads=HEADS, key_heads=HEADS, head_dim=WIDTH, tokens=12, grid=(2, 3, 2))

# Name: options, host, number of tokens.
CASES: Mapping[str, tuple[ReplacementSpec, BaseAttention, int]] = {
    "tga": (GraphSpec(), TEXT, 6),
    "tga-causal": (GraphSpec(), BaseAttention(HEADS, 1, WIDTH, causal=True), 6),
    "tsa": (GraphSpec(name="tsa", filter_order=4), TEXT, 6),
    "tsa-causal": (
        GraphSpec(name="tsa", filter_order=4),
        BaseAttention(HEADS, 1, WIDTH, causal=True),
        6,
    ),
    "hot-image": (KroneckerSpec(), IMAGE, 7),
    "hot-two-special": (
        KroneckerSpec(),
        BaseAttention(HEADS, HEADS, WIDTH, tokens=8, grid=(2, 3), special=2),
        8,
    ),
    "hot-video": (KroneckerSpec(), VIDEO, 12),
    "hot-sum": (KroneckerSpec(pool="sum"), VIDEO, 12),
    "hot-folded": (KroneckerSpec(fold=3), TEXT, 8),
    "hot-favor": (KroneckerSpec(kernel="favor", features=6), VIDEO, 12),
    "hot-smreg": (KroneckerSpec(kernel="smreg", features=6, pool="sum"), VIDEO, 12),
    "hot-axes": (KroneckerSpec(axes=(2, 0), masks=("causal", "none")), VIDEO, 12),
    "hot-masked-features": (
        KroneckerSpec(
            kernel="smreg",
            features=6,
            pool="sum",
            masks=("causal", "window:1", "none"),
            scale="fixed",
        ),
        VIDEO,
        12,
    ),
    "hot-folded-columns": (KroneckerSpec(fold=3, axes=(1,), masks=("window:1",)), TEXT, 8),
    "hot-favor-folded": (KroneckerSpec(kernel="favor", features=6, fold=4), TEXT, 6),
    "tam-cp": (TamSpec(cores=2), TEXT, 6),
    "tam-aligned": (TamSpec(core="aligned"), TEXT, 6),
    "tam-tucker": (TamSpec(core="tucker", rank=3, semantic_rank=2), TEXT, 6),
    "tam-plain": (TamSpec(normalize="none"), TEXT, 6),
    "tam-gru": (TamSpec(memory="gru"), TEXT, 6),
    "multilinear": (MultilinearSpec(length=6), TEXT, 6),
    "additive": (AdditiveSpec(), TEXT, 6),
}
TEXT_CASES = tuple(name for name, (_, host, _) in CASES.items() if host.tokens is None)


def layout_of(name: str) -> ReplacementLayout:
    spec, host, _ = CASES[name]
    return replacement_of(spec).layout(spec, host)


def tensors_of(name: str, *, seed: int = 0) -> dict[str, Tensor]:
    """Float64 tensors that are nowhere zero, and the constants."""
    kind, layout = replacement_of(CASES[name][0]), layout_of(name)
    drawn = {
        key: 0.5 * randn(*shape, seed=seed + index)
        for index, (key, shape) in enumerate(kind.tensors(layout).items())
    }
    return drawn | {key: value.double() for key, value in kind.constants(layout).items()}


def inputs_of(name: str, *, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    layout, tokens = layout_of(name), CASES[name][2]
    q = randn(batch, layout.heads, tokens, WIDTH, seed=seed)
    k, v = (randn(batch, layout.key_heads, tokens, WIDTH, seed=seed + i) for i in (1, 2))
    return q, k, v


def run(
    name: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    tensors: Mapping[str, Tensor],
    mask: Tensor | None = None,
) -> Tensor:
    q, k, v = inputs
    layout = layout_of(name)
    seen = Visible.of(mask, q, k, causal=layout.causal)
    return replacement_of(CASES[name][0]).apply(q, k, v, tensors, layout, seen)


# ---------------------------------------------------------------- written out
def explicit_kronecker(
    q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, ...], scale: Tensor, *, pool: str
) -> Tensor:
    """One head of one example through the whole Kronecker product.  # (tokens, width) each."""
    places = list(product(*map(range, grid)))
    total: Tensor | None = None
    for axis, size in enumerate(grid):
        rows, columns = [], []
        for index in range(size):
            inside = [n for n, place in enumerate(places) if place[axis] == index]
            share = len(inside) if pool == "mean" else 1
            rows.append(sum(q[n] for n in inside) / share)
            columns.append(sum(k[n] for n in inside) / share)
        scores = torch.stack(rows) @ torch.stack(columns).T
        factor = (scores * scale[axis] * q.shape[-1] ** -0.5).softmax(-1)
        total = factor if total is None else torch.kron(total, factor)
    assert total is not None
    return total @ v


def explicit_graph(k: Tensor, decay: float, *, causal: bool) -> Tensor:
    """Edges of one head of one example."""
    tokens, width = k.shape
    psi = torch.zeros(tokens, tokens, dtype=k.dtype)
    for i, j in product(range(tokens), repeat=2):
        if i == j or (causal and j > i):
            continue
        weight = decay ** abs(i - j) * (1.0 if causal else 0.5)
        psi[i, j] = weight * torch.relu(k[i] @ k[j] / width**0.5)
    return psi


def literal_tam(q: Tensor, k: Tensor, s: Tensor, core: Callable[[int, int, int], float]) -> Tensor:
    """The paper's equation 6, term by term: sums over i, j, l and s.  # (tokens, width) each."""
    width = q.shape[1]
    scores = torch.zeros(len(q), len(k), dtype=q.dtype)
    for a, b, c in product(range(len(q)), range(len(k)), range(len(s))):
        for i, j, m in product(range(width), repeat=3):
            scores[a, b] += core(a, j, m) * q[a, i] * k[b, j] * s[c, m]
    return scores
