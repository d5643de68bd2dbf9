"""The fixed transforms Z: orthonormality, definitions, independence of global state, refusals."""

from __future__ import annotations

import math

import pytest
import scipy.fft
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tcompress.linalg.transforms import FIXED_TRANSFORMS, check_transform, fixed_transform
from tests.support.numerics import quick, randn

POWER_OF_TWO = ("haar", "hadamard")


def near(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=1e-12)


@quick
@given(kind=st.sampled_from(FIXED_TRANSFORMS), size=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_orthonormal_at_every_possible_size(kind: str, size: int, seed: int) -> None:
    if check_transform(kind, size) is not None:
        return
    z = fixed_transform(kind, size, seed)
    assert (z.shape, z.dtype, z.device.type) == ((size, size), torch.float64, "cpu")
    near(z @ z.T, torch.eye(size, dtype=torch.float64))


@quick
@given(size=st.integers(1, 70))
def test_only_haar_and_hadamard_ask_for_a_power_of_two(size: int) -> None:
    for kind in FIXED_TRANSFORMS:
        possible = math.log2(size).is_integer() or kind not in POWER_OF_TWO
        assert (check_transform(kind, size) is None) == possible


def test_reasons_name_kind_and_size() -> None:
    reason = "transform `haar` needs a power of two as number of slices, found 6"
    assert check_transform("haar", 6) == reason
    assert check_transform("dct", 6) is None


@pytest.mark.parametrize("size", [1, 2, 3, 8, 12, 64])
def test_dct_is_scipys_orthonormal_dct_ii(size: int) -> None:
    x = randn(size, 5)
    expected = torch.from_numpy(scipy.fft.dct(x.numpy(), type=2, norm="ortho", axis=0))
    near(fixed_transform("dct", size) @ x, expected)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_hadamard_is_sylvesters_by_doubling(size: int) -> None:
    expected = torch.ones(1, 1, dtype=torch.float64)
    while len(expected) < size:
        top, bottom = torch.hstack([expected, expected]), torch.hstack([expected, -expected])
        expected = torch.vstack([top, bottom])
    near(fixed_transform("hadamard", size), expected / math.sqrt(size))


@pytest.mark.parametrize("size", [1, 2, 8, 32])
def test_haar_is_the_pyramid_algorithm(size: int) -> None:
    x = randn(size)
    mean, details = x, list[Tensor]()
    while len(mean) > 1:
        details.insert(0, (mean[0::2] - mean[1::2]) / math.sqrt(2))
        mean = (mean[0::2] + mean[1::2]) / math.sqrt(2)
    near(fixed_transform("haar", size) @ x, torch.cat([mean, *details]))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9])
def test_dft_rows_are_cosines_and_sines_in_order(size: int) -> None:
    rows = [[math.sqrt(1 / size)] * size]
    for k in range(1, size):
        angles = [2 * math.pi * j * k / size for j in range(size)]
        if 2 * k < size:
            rows.append([math.sqrt(2 / size) * math.cos(angle) for angle in angles])
            rows.append([math.sqrt(2 / size) * math.sin(angle) for angle in angles])
        elif 2 * k == size:
            rows.append([math.sqrt(1 / size) * math.cos(angle) for angle in angles])
    near(fixed_transform("dft", size), torch.tensor(rows, dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_dft_coefficients_give_the_unitary_dft(size: int) -> None:
    x = randn(size)
    real = fixed_transform("dft", size) @ x
    spectrum = torch.zeros(size, dtype=torch.complex128)
    spectrum[0] = real[0]
    for k in range(1, (size - 1) // 2 + 1):
        spectrum[k] = torch.complex(real[2 * k - 1], -real[2 * k]) / math.sqrt(2)
        spectrum[size - k] = spectrum[k].conj()
    if size % 2 == 0:
        spectrum[size // 2] = real[-1]
    near(spectrum, torch.fft.fft(x, norm="ortho"))


def test_random_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = fixed_transform("random", 6, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(fixed_transform("random", 6, seed=3), first)
    assert not torch.allclose(fixed_transform("random", 6, seed=4), first)


def test_random_is_the_q_factor_with_positive_r() -> None:
    # The 1 x 1 case shows the sign fix alone: |g| > 0 makes Q = sign(g), whichever QR is used.
    signs = {fixed_transform("random", 1, seed=seed).item() for seed in range(20)}
    assert signs == {1.0, -1.0}


@pytest.mark.parametrize("kind", FIXED_TRANSFORMS)
def test_default_device_and_dtype_do_not_matter(kind: str) -> None:
    expected = fixed_transform(kind, 4)
    with torch.device("meta"):
        assert torch.equal(fixed_transform(kind, 4), expected)
