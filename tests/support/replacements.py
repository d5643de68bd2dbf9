"""Cases of every mechanism, for small sizes."""

from collections.abc import Mapping

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
CAUSAL = BaseAttention(heads=HEADS, key_heads=1, head_dim=WIDTH, causal=True)

# Name: options, host, number of tokens.
CASES: Mapping[str, tuple[ReplacementSpec, BaseAttention, int]] = {
    "tga": (GraphSpec(), TEXT, 6),
    "tga-causal": (GraphSpec(), CAUSAL, 6),
    "tsa": (GraphSpec(name="tsa", filter_order=4), TEXT, 6),
    "tsa-causal": (GraphSpec(name="tsa", filter_order=4), CAUSAL, 6),
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
    return replacement_of(CASES[name][0]).apply(q, k, v, tensors, layout, seen)[0]
