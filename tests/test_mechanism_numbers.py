"""Mechanisms on numbers that are hard for floating point."""

from __future__ import annotations

import pytest
import torch

from tcompress.mechanisms.kronecker import KroneckerLayout
from tcompress.mechanisms.module import MechanismModule

SMALL = {"heads": 2, "key_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{"fold": 4, "pool": "sum"}, {"fold": 4}, {"grid": (4, 4), "kernel": "favor", "features": 16}],
    ids=["fold-sum", "fold", "favor"],
)
def test_large_scores_and_rows_of_padding(options: dict[str, object], dtype: torch.dtype) -> None:
    """Nothing overflows, and nothing vanishes: products of small shares leave half precision."""
    layout = KroneckerLayout.model_validate({"mechanism": "kronecker", **SMALL, **options})
    own = MechanismModule(layout, dtype=dtype)
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
        mixed = own(q, k, v, mask if "fold" in options else None)
        exact = own.double()(
            q.double(), k.double(), v.double(), mask if "fold" in options else None
        )
    assert torch.isfinite(mixed).all()
    error = (mixed.double() - exact)[mask].norm(dim=-1) / exact[mask].norm(dim=-1)
    assert float(error.max()) < {torch.float32: 1e-4, torch.float16: 0.01}.get(dtype, 0.1)
