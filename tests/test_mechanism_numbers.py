"""Mechanisms on numbers that are hard for floating point."""

from __future__ import annotations

import pytest
import torch

from tcompress.attention.graph import GraphLayout
from tcompress.attention.kronecker import KroneckerLayout
from tcompress.attention.module import MechanismModule
from tcompress.attention.replacement import Visible

SMALL = {"heads": 2, "key_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"fold": 4, "pool": "sum"},
        {"fold": 4},
        {"fold": 4, "kernel": "favor", "features": 16},
        {"grid": (4, 4), "pool": "sum"},
        {"grid": (4, 4), "pool": "sum", "kernel": "smreg", "features": 16},
        {"grid": (4, 4), "kernel": "favor", "features": 16},
    ],
    ids=["fold-sum", "fold", "fold-favor", "grid-sum", "grid-smreg", "favor"],
)
def test_large_scores_and_rows_of_padding(
    options: dict[str, object], autocast: bool, dtype: torch.dtype
) -> None:
    """Nothing overflows, and nothing vanishes: products of small shares leave half precision."""
    layout = KroneckerLayout.model_validate({"mechanism": "kronecker", **SMALL, **options})
    own = MechanismModule(layout, dtype=torch.float32 if autocast else dtype)
    own.fill(0, pretrained=True)
    generator = torch.Generator().manual_seed(0)
    shared = 8 * torch.randn(1, 2, 1, 16, generator=generator)
    q, k, v = (
        (8 * torch.randn(3, 2, 16, 16, generator=generator) + shared).to(dtype) for _ in range(3)
    )
    mask = torch.ones(3, 16, dtype=torch.bool)
    mask[1, 9:] = False
    mask[2] = False  # nothing but padding
    with torch.no_grad():
        with torch.autocast("cpu", dtype, enabled=autocast and dtype != torch.float32):
            mixed = own(q, k, v, mask if "fold" in options else None)
        exact = own.double()(
            q.double(), k.double(), v.double(), mask if "fold" in options else None
        )
    assert torch.isfinite(mixed).all()
    error = (mixed.double() - exact)[mask].norm(dim=-1) / exact[mask].norm(dim=-1)
    assert float(error.max()) < {torch.float32: 1e-4, torch.float16: 0.01}.get(dtype, 0.1)


def test_large_keys_of_a_graph() -> None:
    """Edges of keys that are alike and long stay within half precision."""
    layout = GraphLayout(heads=2, key_heads=2, head_dim=64, causal=False, filter_order=2)
    own = MechanismModule(layout, dtype=torch.float16)
    own.fill(0, pretrained=True)
    generator = torch.Generator().manual_seed(0)
    shared = 30 * torch.randn(1, 2, 1, 64, generator=generator)
    k = (shared + 5 * torch.randn(1, 2, 80, 64, generator=generator)).half()
    v = (1e-3 * torch.randn(1, 2, 80, 64, generator=generator)).half()
    with torch.no_grad():
        mixed = own(k, k, v)
        exact = own.double()(k.double(), k.double(), v.double())
    assert torch.isfinite(mixed).all()
    assert torch.allclose(mixed.double(), exact, rtol=0.05, atol=0.01 * float(exact.abs().max()))


@pytest.mark.parametrize("lowest", [-1e4, -1e9, float("-inf"), torch.finfo(torch.float32).min])
def test_masks_hide_whatever_low_number_they_add(lowest: float) -> None:
    mask = torch.tensor([[[[0.0, 0.0, lowest]]]])
    q = torch.zeros(1, 1, 1, 4)
    seen = Visible.of(mask, q, torch.zeros(1, 1, 3, 4), causal=False)
    assert seen.tokens.tolist() == [[True, True, False]]
