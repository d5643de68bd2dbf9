"""Mixed precision on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from tcompress.linalg.transforms import rotate_strided, slice_product
from tcompress.training.finetuning import FloatAttention


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_attention_stays_in_float32() -> None:
    q, k, v = (draw(2, 3, 5 + i, 4)[:, :, :5] for i in range(3))
    mask = draw(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = attend(q, k, v, attn_mask=mask)
        with FloatAttention():
            exact = attend(q, k, value=v, attn_mask=mask)
            low = attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
            product = q @ k.mT
    assert plain.dtype == product.dtype == torch.bfloat16
    assert exact.dtype == low.dtype == torch.float32
    torch.testing.assert_close(exact, attend(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("product", ["slices", "feature-major", "strided"])
def test_products_of_slices_in_bfloat16_equal_those_in_float32(product: str) -> None:
    x, slices = draw(12, 20).requires_grad_(), draw(4, 5, 5).requires_grad_()

    def apply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if product == "strided":
            return rotate_strided(a.T.contiguous().T, b)
        return slice_product(a, b, feature_major=product == "feature-major")

    expected = apply(x, slices)
    wanted = torch.autograd.grad(expected.square().sum(), (x, slices))
    found = apply(x.bfloat16(), slices.bfloat16())
    assert found.dtype == torch.bfloat16
    assert found.stride() == expected.stride()
    got = torch.autograd.grad(found.float().square().sum(), (x, slices))
    for left, right in zip((found, *got), (expected, *wanted), strict=True):
        torch.testing.assert_close(left.float(), right, rtol=0.05, atol=0.2)
