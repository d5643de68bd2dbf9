"""Rounding in the norm of the moments, in fits and after healing."""

import pytest
import torch
from torch import Tensor

from tcompress import linalg
from tcompress.linalg.rounding import Rounding, quantize, rounded
from tcompress.structures import Target, structure
from tcompress.structures.base import Site

R4 = Rounding.usual(4)


def _moments(size: int, *lead: int) -> Tensor:
    """Of inputs that a few directions dominate."""
    generator = torch.Generator().manual_seed(size)
    mixing = torch.randn(*lead, size, size, generator=generator, dtype=torch.float64)
    return mixing @ torch.diag(0.9 ** torch.arange(size, dtype=torch.float64)) @ mixing.mT


def _lost(weight: Tensor, other: Tensor, gram: Tensor) -> float:
    gap = weight - other
    return float((gap @ gram).mul(gap).sum())


@pytest.mark.parametrize(("size", "lead"), [(96, ()), (80, (3,)), (20, ())])
def test_it_loses_less_than_nearest_and_stays_on_its_grid(size: int, lead: tuple[int, ...]) -> None:
    weight = torch.randn(*lead, 48, size, generator=torch.Generator().manual_seed(0)).double()
    gram = _moments(size, *lead)
    found, nearest = linalg.rounded_in_norm(weight, gram, R4), rounded(weight, R4)
    if size >= 32:
        assert _lost(weight, found, gram) < 0.5 * _lost(weight, nearest, gram)
    else:  # groups are not of inputs
        assert torch.equal(found, nearest)
    assert torch.equal(rounded(found, R4), found)
    assert torch.equal(linalg.rounded_in_norm(found, gram, R4), found)
    assert torch.equal(linalg.rounded_in_norm(weight, 0 * gram, R4), nearest)


def test_numbers_on_a_grid_keep_their_codes_without_the_extreme_one() -> None:
    codes = torch.tensor([[3, -2, 0, 1] * 8, [-5, 4, 0, 0] * 8], dtype=torch.float32)
    weight = codes * torch.tensor([[0.125], [0.0703125]])
    found, _ = quantize(weight, 4, 32)
    assert torch.equal(found, codes.to(torch.int8))


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("power", [-100, 100])
def test_the_size_of_numbers_changes_no_code(bits: int, power: int) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    codes, scales = quantize(weight, bits, 32)
    others, sized = quantize(weight * 2.0**power, bits, 32)
    assert torch.equal(others, codes)
    assert torch.equal(sized, scales * 2.0**power)


def test_factors_are_fitted_to_one_another() -> None:
    """The first factor makes up for what rounding the second one did."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 96, generator=generator, dtype=torch.float64)
    gram = _moments(96)
    product = weight @ gram
    a, b = linalg.fit_lowrank(product, gram, 32)
    one, two = linalg.rounded_factors(product, gram, (a, b), (R4, R4))
    assert torch.equal(rounded(one, R4), one)
    assert torch.equal(rounded(two, R4), two)
    apart = rounded(a, R4) @ rounded(b, R4)
    assert _lost(a @ b, one @ two, gram) < 0.7 * _lost(a @ b, apart, gram)
    kept, _ = linalg.rounded_factors(product, gram, (a, b), (None, None))
    torch.testing.assert_close(kept, a)


def test_slices_are_rounded_behind_their_transform() -> None:
    kind = structure("lprod")
    layout = kind.layout(kind.spec(p=2, transform="dct"), Site(64, 64, "in"))
    gram = _moments(64)
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).double()
    operators = {
        side: transform.build({}, weight)
        for side in ("in", "out")
        if (transform := kind.transform(layout, side)) is not None
    }
    target = Target(weight @ gram, gram, operators=operators)
    fitted = kind.fit(target, layout)
    found = kind.rounded(target, layout, fitted, {"slices": R4})
    assert torch.equal(rounded(found["slices"], R4), found["slices"])
    assert kind.rounded(target, layout, fitted, {}) == fitted
