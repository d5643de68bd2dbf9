"""Closed forms of fits, against least squares on raw rows."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from tcompress.blockwise.sensitivity import Sensitivity
from tcompress.errors import FitError
from tcompress.linalg import moments as moments_of_rows
from tcompress.linalg.fits import (
    Problem,
    _input_objective,
    _output_objective,
    damped_curvature,
    diagonal_blocks,
    fit_conjugate_slices,
    fit_rotation,
    fit_slices,
    turn_rows,
)
from tcompress.linalg.moments import (
    Moments,
    MomentSums,
    PairedRows,
    ProductSum,
    RowErrors,
    balanced,
    best_factors,
    column_gram,
    fit_lowrank,
    leading_vectors,
    relative_error,
    safe_cholesky,
    whitened,
)
from tcompress.linalg.transforms import (
    Stages,
    build_blocks,
    fold_tube_transform,
    merges_with,
    mix_tubes,
    nearest_block,
    rotate,
)
from tcompress.structures import Site, Target, structure
from tcompress.structures.lowrank import LowRankLayout
from tests.support.numerics import quick
from tests.support.structures import TUBES, dense_reference, identity_moments, randn, rotation

WIDTH, OUTPUTS, ROWS = 12, 8, 60


def _rows(rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated rows of the dense stream, and of a noisy copy."""
    x = randn(rows, WIDTH, seed=seed) @ randn(WIDTH, WIDTH, seed=seed + 1)
    return x, x + 0.3 * randn(rows, WIDTH, seed=seed + 2)


def _products(x: Tensor, new: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """W C and G."""
    return weight @ (x.T @ new) / len(x), new.T @ new / len(x)


# ---------------------------------------------------------------- moments
@pytest.mark.parametrize("centred", [False, True])
def test_moments_equal_direct_sums(centred: bool) -> None:
    x, new = _rows()
    x, new = x + 2.0, new - 1.0
    sums = MomentSums(WIDTH)
    for one, two in zip(x.split(17), new.split(17), strict=True):
        sums.add(one, two)
    sums.add(x[:0], new[:0])
    found = sums.moments(centred=centred)
    a, b = x.numpy(), new.numpy()
    means = [a.mean(0), b.mean(0)] if centred else [np.zeros(WIDTH)] * 2
    a, b = a - means[0], b - means[1]
    near = {"rtol": 1e-5, "atol": 1e-5}
    assert_close(found.gram, torch.from_numpy(b.T @ b / ROWS), **near)
    assert_close(found.cross, torch.from_numpy(a.T @ b / ROWS), **near)
    assert_close(found.dense, torch.from_numpy(a.T @ a / ROWS), **near)
    assert_close(found.dense_mean, torch.from_numpy(means[0]), **near)
    assert_close(found.mean, torch.from_numpy(means[1]), **near)
    assert (sums.rows, found.rows, len(found.gram)) == (ROWS, ROWS, WIDTH)
    assert {t.dtype for t in (found.gram, found.cross, found.dense)} == {torch.float64}


def test_variances_survive_a_large_mean() -> None:
    x = randn(4000, 3) + 300.0
    sums = MomentSums(3)
    for part in x.bfloat16().split(500):
        sums.add(part, part)
    wanted = x.bfloat16().double().var(0, correction=0)
    assert_close(sums.moments(centred=True).gram.diagonal(), wanted, rtol=0.02, atol=0)


def test_rows_that_are_all_alike_have_no_variance() -> None:
    row = torch.full((1, 3), 0.1) * torch.tensor([1.0, -7.0, 3e3])
    sums, worth = MomentSums(3), Sensitivity(3, 2, torch.device("cpu"))
    for count in (5, 1, 40):
        sums.add(row.expand(count, -1), 2 * row.expand(count, -1))
        worth.add(row.expand(count, -1), torch.ones(count, 2))
    found = sums.moments(centred=True)
    assert not any(bool(part.any()) for part in (found.gram, found.cross, found.dense))
    assert not bool(worth.inputs.moments(centred=True).gram.any())
    assert_close(sums.moments(centred=False).cross, 2 * row.mT.double() @ row.double())
    assert_close(worth.inputs.moments(centred=False).gram, row.mT.double() @ row.double())


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e30])
def test_sums_neither_overflow_nor_vanish(size: float) -> None:
    (x, new), back = (_rows()), randn(ROWS, 2)
    sums, worth = MomentSums(WIDTH), Sensitivity(WIDTH, 2, torch.device("cpu"))
    sums.add(size * x, size * new)
    worth.add(size * x, size * back)
    square = size * size
    near = {"rtol": 1e-4, "atol": 1e-4}
    assert_close(sums.moments(centred=False).cross / square, x.T @ new / ROWS, **near)
    weights = back.square().sum(-1).double()  # what errors at a token cost
    assert_close(
        worth.inputs.moments(centred=False).gram / square,
        (x.T * weights) @ x / weights.sum(),
        **near,
    )
    assert_close(worth.curvature.total() / square, back.T @ back, **near)


def test_rows_of_a_weight_count_as_so_many() -> None:
    x, new = _rows()
    times = torch.arange(ROWS) % 3
    weighed, repeated = MomentSums(WIDTH), MomentSums(WIDTH)
    for first in (0, 25):  # in two batches, about the mean of the first
        part = slice(first, first + 25 if not first else ROWS)
        weighed.add(x[part], new[part], times[part].double())
        again = [item[part].repeat_interleave(times[part], 0) for item in (x, new)]
        repeated.add(again[0], again[1])
    for centred in (False, True):
        found, wanted = weighed.moments(centred=centred), repeated.moments(centred=centred)
        for name in ("gram", "cross", "dense", "mean", "dense_mean"):
            assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-5, atol=1e-5)
    alike = int(times.sum()) ** 2 / int(times.square().sum())
    assert weighed.moments(centred=True).rows == round(alike) < ROWS


def test_tokens_without_gradients_still_have_moments() -> None:
    worth = Sensitivity(WIDTH, 2, torch.device("cpu"))
    x = _rows()[0]
    worth.add(x, torch.zeros(ROWS, 2))
    assert_close(
        worth.inputs.moments(centred=False).gram, (x.T @ x / ROWS).double(), rtol=1e-4, atol=1e-4
    )


def test_relative_errors_are_always_numbers() -> None:
    assert relative_error(0.0, 0.0) == relative_error(-1e-20, 1.0) == 0.0
    assert relative_error(1.0, 0.0) == relative_error(1e10, 1e-300) == 1.0
    assert relative_error(1.0, 4.0) == 0.25
    assert np.isnan(relative_error(float("nan"), 1.0))


def test_moments_of_nothing_and_of_bad_rows_are_refused() -> None:
    sums = MomentSums(2)
    with pytest.raises(FitError, match="no calibration rows reached this layer"):
        sums.moments(centred=True)
    sums.add(torch.tensor([[1.0, float("inf")]]), torch.ones(1, 2))
    with pytest.raises(FitError, match="calibration activations hold NaN or infinity"):
        sums.moments(centred=True)


def test_damping_adds_one_ridge_to_all_three() -> None:
    x, new = _rows()
    mean = randn(WIDTH)
    m = Moments(new.T @ new, x.T @ new, x.T @ x, mean, 2 * mean, ROWS)
    ridge = 0.25 * torch.eye(WIDTH, dtype=torch.float64) * m.gram.diagonal().mean()
    damped = m.damped(0.25)
    assert_close(damped.gram, m.gram + ridge)
    weight = randn(OUTPUTS, WIDTH, seed=5).double()
    for matrix in (torch.eye(WIDTH, dtype=torch.float64), weight):
        assert_close(damped.product(matrix), matrix @ (m.cross + ridge))
    assert damped.norm(weight) == pytest.approx(
        float((weight @ (m.dense + ridge)).mul(weight).sum())
    )


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("channels", [WIDTH, WIDTH - 3])
def test_outputs_stand_for_wide_inputs(
    channels: int, centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W C of sums over what the weight makes of rows, merged and damped as W times C is."""
    monkeypatch.setattr(moments_of_rows, "WIDE", WIDTH)
    weight, times = randn(OUTPUTS, WIDTH, seed=5), (1 + torch.arange(ROWS) % 3).double()
    lift = None if channels == WIDTH else randn(WIDTH, channels, seed=7).double()

    def summed(of: Tensor | None) -> Moments:
        halves = []
        for seed, shift in ((0, 1.0), (10, -3.0)):  # about means of their own
            sums, (x, new) = MomentSums(WIDTH, channels, weight=of), _rows(seed=seed)
            if channels == WIDTH:  # rows that are the same in both streams
                sums.add(same := x + shift, same, times)
            for part in (slice(0, 20), slice(20, None)):
                sums.add(x[part] + shift, new[part, :channels] - shift, times[part])
            halves.append(sums)
        return replace(halves[0].merge(halves[1]).moments(centred=centred), lift=lift)

    found, wanted = summed(weight), summed(None)
    assert (found.is_product, wanted.is_product) == (True, False)
    near = {"rtol": 1e-5, "atol": 1e-5}
    assert_close(found.gram, wanted.gram)
    assert_close(found.cross, weight.double() @ wanted.cross, **near)
    for rows in (slice(None), slice(2, 5)):
        products = (item.damped(0.1).product(weight[rows], rows) for item in (found, wanted))
        assert_close(*products, **near)
    other = randn(OUTPUTS, channels, seed=6)
    assert found.error(weight, other) == pytest.approx(wanted.error(weight, other), rel=1e-5)
    alone = MomentSums(WIDTH, weight=weight)
    alone.add(x := _rows()[0], x)
    assert (one := alone.moments(centred=centred)).cross is one.gram
    assert not one.is_product


def test_rows_of_one_stream_have_one_moment() -> None:
    x, _ = _rows()
    one, three = MomentSums(WIDTH), MomentSums(WIDTH)
    one.add(x, x)
    three.add(x, x.clone())  # told apart by identity
    expected, found = three.moments(centred=True), one.moments(centred=True, last=True)
    assert found.gram is found.cross is found.dense
    assert expected.gram is not expected.cross
    assert_close(found.gram, expected.gram)
    weight, fitted = randn(OUTPUTS, WIDTH, seed=5), randn(OUTPUTS, WIDTH, seed=6)
    assert found.error(weight, fitted) == pytest.approx(expected.error(weight, fitted))


@pytest.mark.parametrize("centred", [False, True])
def test_errors_of_wide_inputs(centred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (x, new), found = _rows(), {}
    worth = 1.0 + torch.arange(ROWS).double()
    for least in (WIDTH, WIDTH + 1):
        monkeypatch.setattr("tcompress.linalg.moments.WIDE", least)
        every = lambda rows, weights, _: (torch.arange(len(rows)), weights)  # noqa: E731
        monkeypatch.setattr("tcompress.linalg.moments.drawn_rows", every)
        sums = [MomentSums(WIDTH, WIDTH), PairedRows()]
        for item in sums:
            item.add(x[:20], new[:20], worth[:20])
            item.add(x[20:], new[20:], worth[20:])
        found[least] = [item.moments(centred=centred, last=True) for item in sums]
    moments, rows = found[WIDTH]
    expected = found[WIDTH + 1][0]
    assert (moments.gram.dtype, moments.cross.dtype) == (torch.float64, torch.float64)
    assert isinstance(moments.dense, RowErrors)
    assert isinstance(expected.dense, Tensor)
    assert_close(rows.mean, expected.mean)
    assert_close(rows.dense_mean, expected.dense_mean)
    weight, fitted = randn(OUTPUTS, WIDTH, seed=5), randn(OUTPUTS, WIDTH, seed=6)
    level = 0.25 * expected.gram.diagonal().mean()
    ridge = float(level * weight.double().square().sum())
    damped = moments.damped(0.25).norm(weight.double())
    assert damped == pytest.approx(expected.norm(weight) + ridge, rel=1e-5)
    for item in (moments, rows):
        assert item.norm(weight) == pytest.approx(expected.norm(weight), rel=1e-5)
        assert item.error(weight, fitted) == pytest.approx(expected.error(weight, fitted), rel=1e-5)


def test_few_drawn_rows_tell_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcompress.linalg.moments.WIDE", WIDTH)
    first = 30 * randn(WIDTH).float()  # huge, at the same place of every text
    weight, missed = randn(OUTPUTS, WIDTH, seed=5), 0.1 * randn(OUTPUTS, WIDTH, seed=6)
    fitted = weight + missed - torch.outer(missed @ first.double(), first) / first.square().sum()
    sums, batches = (
        MomentSums(WIDTH, WIDTH),
        [randn(64 * 8, WIDTH, seed=n).float() for n in range(4)],
    )
    for x in batches:
        x[::64] = first
        sums.add(x, x.clone())
    moments, rows = sums.moments(centred=False), torch.cat(batches).double()
    assert isinstance(moments.dense, RowErrors)
    assert len(moments.dense.dense) <= len(rows) / 8 + 4
    norm = (rows @ weight.T).square().sum() / len(rows)
    error = (rows @ (weight - fitted).T).square().sum() / len(rows) / norm
    assert moments.norm(weight) == pytest.approx(float(norm), rel=0.1)
    assert moments.error(weight, fitted) == pytest.approx(float(error), rel=0.2)


def test_large_products_leave_zeros_and_copies_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target, inputs = (
        randn(7, WIDTH).double(),
        randn(WIDTH, WIDTH, seed=1).tril() + 9 * torch.eye(WIDTH),
    )
    outputs = (randn(7, 7, seed=2).tril() + 9 * torch.eye(7)).double()
    whole = whitened(target, inputs.double(), outputs), column_gram(target)
    monkeypatch.setattr("tcompress.linalg.moments.LARGE", 3)
    monkeypatch.setattr("tcompress.linalg.moments._TILE", 3)
    assert_close(whitened(target, inputs.double(), outputs), whole[0])
    assert_close(column_gram(target), whole[1])
    gram = inputs.double() @ inputs.double().T  # of which the product of the weight is wanted
    whole_of_weight = whitened(target @ gram, inputs.double(), outputs)
    assert_close(whitened(None, inputs.double(), outputs, target), whole_of_weight)


def test_products_of_large_weights_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = _rows()[0], randn(OUTPUTS, WIDTH, seed=5)
    gram, curvature = x.T @ x / ROWS, torch.eye(OUTPUTS).double()
    eager = Target.of_weight(weight, gram, curvature=curvature)
    monkeypatch.setattr("tcompress.linalg.moments.LARGE", 5)
    lazy = Target.of_weight(weight, gram, curvature=curvature)
    assert lazy.cross_product is None
    assert_close(lazy.spectrum, eager.spectrum, rtol=1e-5, atol=0)  # of large ones to float32
    assert_close(lazy.product, eager.product)
    method, layout = (
        structure("lowrank"),
        LowRankLayout(in_features=WIDTH, out_features=OUTPUTS, rank=3),
    )
    one, two = (method.dense(method.fit(it, layout), layout) for it in (lazy, eager))
    assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(90, 70), (70, 90)])
@pytest.mark.parametrize("spread", [1.0, 4.0])  # powers of ten among the gradients of outputs
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("outlier", [1.0, 1e4])
def test_large_fits_by_way_of_float32_lose_nothing(
    shape: tuple[int, int],
    spread: float,
    size: float,
    outlier: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, width = shape
    x, weight = randn(400, width) * torch.logspace(0, -spread, width), size * randn(*shape, seed=1)
    slopes = randn(400, out, seed=2) * torch.logspace(0, -spread, out) * size
    x[:, 0] *= outlier
    gram, curvature = x.T @ x / 400, damped_curvature(slopes.T @ slopes / 400, 0.05)
    exact, root = fit_lowrank(weight @ gram, gram, 20, curvature), torch.linalg.cholesky(curvature)
    monkeypatch.setattr("tcompress.linalg.moments.LARGE", 60)
    near = fit_lowrank(weight @ gram, gram, 20, curvature)

    def loss(a: Tensor, b: Tensor) -> float:
        missed = root.T @ (weight - a @ b)
        return float((missed @ gram).mul(missed).sum() / size**2 / size**2)

    assert loss(*near) == pytest.approx(loss(*exact), rel=1e-3)


@pytest.mark.parametrize("shape", [(150, 200), (200, 150)])
@pytest.mark.parametrize("outlier", [0.0, 50.0, 300.0])
def test_spectra_by_way_of_float32_lose_nothing(
    shape: tuple[int, int], outlier: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = randn(*shape).double()
    curvature, gram = (_moment(size, outlier, seed) for seed, size in enumerate(shape))
    exact = Target.of_weight(weight, gram, curvature=curvature).spectrum
    monkeypatch.setattr("tcompress.linalg.moments.LARGE", 100)
    monkeypatch.setattr("tcompress.linalg.moments._TILE", 70)
    values = Target.of_weight(weight, gram, curvature=curvature).spectrum
    losses = [spectrum.square().flip(0).cumsum(0)[30:] for spectrum in (exact, values)]  # by rank
    assert_close(losses[1], losses[0], rtol=1e-3, atol=0)


def _moment(size: int, outlier: float, seed: int) -> Tensor:
    """Moments with a ridge, and a direction that outweighs all others."""
    rows = randn(4 * size, size, seed=seed).double() * torch.logspace(0, -1, size)
    far = outlier * torch.nn.functional.normalize(randn(size, seed=seed + 9).double(), dim=0)
    return rows.T @ rows / len(rows) + torch.outer(far, far) + 0.01 * torch.eye(size)


def _nothing(what: str) -> tuple[Tensor, Tensor, Tensor]:
    """A weight and moments, of which something is zero."""
    weight, (curvature, gram) = (
        randn(150, 200).double(),
        (_moment(size, 0.0, seed) for seed, size in enumerate((150, 200))),
    )
    weight = torch.zeros_like(weight) if what == "weight" else weight
    if what in ("entry", "column"):
        few = torch.zeros_like(weight)
        few[: 1 if what == "entry" else None, 3] = weight[: 1 if what == "entry" else None, 3]
        weight, gram, curvature = few, torch.eye(200).double(), torch.eye(150).double()
    return weight, torch.zeros_like(gram) if what == "inputs" else gram, curvature


@pytest.mark.parametrize("what", ["weight", "inputs", "entry", "column"])
def test_spectra_of_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gram, curvature = _nothing(what)
    exact = Target.of_weight(weight, gram, curvature=curvature).spectrum
    monkeypatch.setattr("tcompress.linalg.moments.LARGE", 100)
    values = Target.of_weight(weight, gram, curvature=curvature).spectrum
    assert_close(values, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e20, 1.0, 1e-24])
def test_rows_of_any_size_tell_errors(size: float) -> None:
    x, weight = _rows()[0].float() * size, randn(OUTPUTS, WIDTH).double()
    errors = RowErrors(x, x, torch.zeros(WIDTH).double(), torch.zeros(WIDTH).double())
    norm = (x.double() @ weight.T).square().sum()
    assert errors.norm(weight) == pytest.approx(float(norm), rel=1e-5)
    assert errors.error(weight, 0.9 * weight) == pytest.approx(0.01, rel=1e-3)


def test_sums_of_products_take_gram_matrices_too() -> None:
    a, b, c = (randn(5, WIDTH, seed=seed) for seed in range(3))
    total = ProductSum((WIDTH, WIDTH), "cpu")
    total.add(a, b)
    total.total()
    total.add(c, c)
    assert_close(total.total(), (a.T @ b + c.T @ c).double())


def test_sums_within_autocast_are_float32() -> None:
    x = randn(ROWS, WIDTH).float()
    with torch.autocast("cpu", torch.bfloat16):
        total = ProductSum((WIDTH, WIDTH), "cpu")
        total.add(x, x)
        gram = total.total()
    assert_close(gram, x.double().T @ x.double(), rtol=1e-6, atol=1e-5)


def test_halves_of_large_sums_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [randn(ROWS, WIDTH, seed=seed) + seed for seed in range(3)]

    def gram() -> Tensor:
        first, *others = (MomentSums(WIDTH) for _ in parts)
        for sums, rows in zip((first, *others), parts, strict=True):
            sums.add(rows, rows)
        for sums in others:
            first.merge(sums)
        first.add(parts[0], parts[0])
        return first.moments(centred=True).gram

    whole = gram()
    monkeypatch.setattr("tcompress.linalg.moments.LARGE", 5)
    monkeypatch.setattr("tcompress.linalg.moments._TILE", 5)
    assert_close(gram(), whole)
    monkeypatch.setattr("tcompress.linalg.moments.ROWS_AT_ONCE", 4)  # they have begun
    assert_close(gram(), whole)


@pytest.mark.parametrize(("batches", "waits"), [(3, True), (10, False), (40, False)])
@pytest.mark.parametrize("is_gram", [True, False])
def test_rows_of_a_large_sum_wait_while_they_are_smaller(
    is_gram: bool, batches: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tcompress.linalg.moments.LARGE", 5)
    monkeypatch.setattr("tcompress.linalg.moments.ROWS_AT_ONCE", 4)
    shape = (WIDTH if is_gram else 2 * WIDTH, WIDTH)
    total, exact = ProductSum(shape, "cpu"), torch.zeros(shape).double()
    for run in range(4):
        part = ProductSum(shape, "cpu")
        for batch in range(batches):
            x = randn(3, WIDTH, seed=batches * run + batch).float()
            pair = (x, x) if is_gram else (x.repeat(1, 2), x)
            part.add(*pair)
            exact += pair[0].double().T @ pair[1].double()
        assert (part._sum is None) == waits
        assert len(part._waiting) == batches if waits else len(part._waiting) < 2
        total = total.merge(part)
        assert not total._waiting  # whoever is given it sums nothing up
    assert_close(total.total(), exact, rtol=1e-5, atol=1e-5)


def test_rounded_products_end_with_their_sums() -> None:
    x = randn(ROWS, WIDTH).bfloat16().float()
    before = torch.backends.mkldnn.matmul.fp32_precision
    total = ProductSum((WIDTH, WIDTH), "cpu", passes=torch.bfloat16)
    total.add(x, x)
    assert_close(total.total(), x.double().T @ x.double(), rtol=1e-5, atol=1e-4)
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    y = randn(ROWS, WIDTH, seed=1)  # what follows is exact
    assert_close((x @ y.float().T).double(), x.double() @ y.T, rtol=1e-5, atol=1e-5)


def test_sums_of_bfloat16_gradients_stay_definite() -> None:
    gradients = randn(4096, 512).bfloat16() + 8 * randn(4096, 1, seed=1).bfloat16()  # one outweighs
    sums = Sensitivity(2, 512, torch.device("cpu"))
    sums.add(torch.ones(4096, 2), gradients, weighed=False)
    exact = gradients.double().T @ gradients.double()
    assert_close(sums.curvature.total(), exact, rtol=1e-5, atol=1e-6 * float(exact.max()))


@pytest.mark.parametrize("rank", [1, 20, 30])
def test_many_equal_eigenvalues(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcompress.linalg.moments.LARGE", 32)
    weight = torch.nn.init.orthogonal_(torch.empty(64, 64), generator=torch.manual_seed(0)).double()
    for curvature in (None, torch.eye(64).double()):
        a, b = fit_lowrank(weight, curvature, rank, curvature)
        assert a.shape == b.mT.shape == (64, rank)
        assert float((weight - a @ b).square().sum()) == pytest.approx(64 - rank, rel=1e-6)


@pytest.mark.parametrize("rank", [1, 5])
def test_few_eigenvectors_of_a_large_matrix(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = randn(30, WIDTH).double()
    left, right = best_factors(matrix, rank)
    monkeypatch.setattr("tcompress.linalg.moments.LARGE", WIDTH)
    solve = torch.linalg.eigh
    few = lambda it: solve(it) if len(it) < WIDTH else None  # noqa: E731
    monkeypatch.setattr(torch.linalg, "eigh", few)  # whose own way computes all of them
    few_left, few_right = best_factors(matrix, rank)
    assert_close(few_left @ few_right, left @ right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spread", [1.0, 2.0, 8.0])  # powers of ten between first and last
@pytest.mark.parametrize("outlier", [1.0, 1e8])
def test_eigenvectors_by_way_of_float32_lose_nothing(
    spread: float, outlier: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tcompress.linalg.moments.LARGE", 64)
    basis = torch.linalg.qr(randn(160, 160))[0]
    sizes = torch.logspace(0, -2 * spread, 160).double()
    sizes[:2] *= outlier
    gram = basis * sizes @ basis.T * 1e30
    vectors, exact = leading_vectors(gram, 40), torch.linalg.eigh(gram)[1][:, -40:]
    assert_close(vectors.T @ vectors, torch.eye(40).double())
    rest, least = ((gram - it @ (it.T @ gram)).trace() for it in (vectors, exact))
    assert float(rest) == pytest.approx(float(least), rel=1e-6, abs=1e-12 * float(gram.trace()))
    sizes = (vectors * (gram @ vectors)).sum(0)
    assert_close(
        sizes, torch.linalg.eigvalsh(gram)[-40:], rtol=1e-4, atol=1e-14 * float(gram.trace())
    )


def test_error_of_moments_is_that_of_rows() -> None:
    x, new = _rows()
    weight, fitted = randn(OUTPUTS, WIDTH, seed=5), randn(OUTPUTS, WIDTH, seed=6)
    zero = torch.zeros(WIDTH, dtype=torch.float64)
    m = Moments(new.T @ new / ROWS, x.T @ new / ROWS, x.T @ x / ROWS, zero, zero, ROWS)
    wanted = (x @ weight.T - new @ fitted.T).square().sum() / (x @ weight.T).square().sum()
    assert m.error(weight, fitted) == pytest.approx(float(wanted))
    assert m.error(torch.zeros_like(weight), fitted) == 1.0
    assert m.error(torch.zeros_like(weight), 0 * fitted) == 0.0
    identity = identity_moments(WIDTH)
    free = (weight - fitted).square().sum() / weight.square().sum()
    assert identity.error(weight, fitted) == pytest.approx(float(free))
    alike = Moments(m.dense, m.dense, m.dense, zero, zero, ROWS)
    for size in (1e-5, 1e-9, 1e-12):  # of a close fit, which is not lost in rounding
        missed = size * randn(OUTPUTS, WIDTH, seed=6)
        wanted = (x @ missed.T).square().sum() / (x @ weight.T).square().sum()
        assert alike.error(weight, weight - missed) == pytest.approx(float(wanted), rel=1e-2)


def test_cholesky_of_singular_matrices() -> None:
    x = randn(5, WIDTH)
    singular, regular = x.T @ x, x.T @ x + torch.eye(WIDTH, dtype=torch.float64)
    zero = torch.zeros_like(singular)
    factors = safe_cholesky(torch.stack([singular, regular, zero]))
    for factor, gram in zip(factors, (singular, regular, zero), strict=True):
        assert_close(factor, factor.tril())
        assert bool(factor.isfinite().all())
        assert float((factor @ factor.T - gram).abs().max()) < 1e-5 * (1 + float(gram.abs().max()))
    assert_close(safe_cholesky(regular), torch.linalg.cholesky(regular))


def test_cholesky_of_large_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are factored where their copy lies, which each attempt has to be of."""
    x, few = randn(ROWS, WIDTH).double(), randn(5, WIDTH).double()
    regular, singular = torch.cov(x.T), few.T @ few - 1e-7 * torch.eye(WIDTH).double()
    regular = (regular + regular.T) / 2
    exact, before = torch.linalg.cholesky(regular), singular.clone()
    monkeypatch.setattr("tcompress.linalg.moments.LARGE", 5)
    assert torch.equal(safe_cholesky(regular), exact)
    factor = safe_cholesky(singular)
    assert_close(factor @ factor.T, singular, rtol=1e-4, atol=1e-4)
    assert torch.equal(singular, before)
    assert_close(factor, factor.tril())
    with pytest.raises(FitError, match="not positive semidefinite"):
        safe_cholesky(-regular)


@pytest.mark.parametrize(
    ("gram", "reason"),
    [
        (torch.full((2, 2), float("nan")).double(), "holds NaN or infinity"),
        (torch.eye(2).double() * float("inf"), "holds NaN or infinity"),
        (torch.diag(torch.tensor([1.0, -1.0])).double(), "not positive semidefinite"),
    ],
)
def test_cholesky_refuses_what_is_no_moment_matrix(gram: Tensor, reason: str) -> None:
    with pytest.raises(FitError, match=reason):
        safe_cholesky(gram)


# ---------------------------------------------------------------- low rank
def _reduced_rank(x: Tensor, y: Tensor, rank: int) -> Tensor:
    """Best weight of a rank: least squares, then the leading directions of what it predicts."""
    full = torch.linalg.lstsq(x, y).solution  # (in, out)
    _, _, right = torch.linalg.svd(x @ full, full_matrices=False)
    return (full @ right[:rank].T @ right[:rank]).T


@pytest.mark.parametrize("rank", [1, 3, 7, 8])
def test_whitened_factors_are_the_brute_force_optimum(rank: int) -> None:
    (x, new), weight = _rows(), randn(OUTPUTS, WIDTH, seed=9)
    a, b = fit_lowrank(*_products(x, new, weight), rank)
    assert (a.shape, b.shape) == ((OUTPUTS, rank), (rank, WIDTH))
    assert_close(a @ b, _reduced_rank(new, x @ weight.T, rank), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (6, 6)])
def test_best_factors_are_the_truncated_svd(shape: tuple[int, int]) -> None:
    matrix = randn(3, *shape)
    left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    for rank in (1, 4, 5):
        wanted = left[..., :rank] * singular[:, None, :rank] @ right[..., :rank, :]
        one, two = best_factors(matrix, rank)
        assert_close(one @ two, wanted, rtol=1e-6, atol=1e-6)


def test_balanced_factors_have_one_scale() -> None:
    a, b = 1e4 * randn(6, 3), randn(3, 5, seed=1)
    b[1] = 0.0
    one, two = balanced(a, b)
    assert_close(one @ two, a @ b)
    assert_close(one.norm(dim=0)[[0, 2]], two.norm(dim=1)[[0, 2]])
    assert bool(one.isfinite().all())


# ---------------------------------------------------------------- slices
@pytest.mark.parametrize("p", [1, 2, 4])
def test_slices_are_regressions_on_raw_rows(p: int) -> None:
    """Of full rank, and of rank 2."""
    (x, new), weight = _rows(), randn(OUTPUTS, WIDTH, seed=9)
    target, gram = _products(x, new, weight)
    slices = fit_slices(target, gram, p)
    left, right = fit_lowrank(diagonal_blocks(target, p), diagonal_blocks(gram, p), 2)
    regressions = zip(new.chunk(p, 1), (x @ weight.T).chunk(p, 1), strict=True)
    for index, (inputs, outputs) in enumerate(regressions):
        full = torch.linalg.lstsq(inputs, outputs).solution.T
        assert_close(slices[index], full, rtol=1e-6, atol=1e-6)
        low = _reduced_rank(inputs, outputs, 2)
        assert_close(left[index] @ right[index], low, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_dft_slices_are_the_t_product(p: int) -> None:
    kind = structure("lprod")
    layout = kind.layout(kind.spec(p=p, transform="dft"), Site(WIDTH, 2 * WIDTH, "in"))
    slices, x = randn(p, 2 * WIDTH // p, WIDTH // p), randn(5, WIDTH, seed=1)
    turn_in, turn_out = (layout.transform_of(side).build({}, x) for side in ("in", "out"))
    encoded = kind.encode(x, turn_in, layout)
    y = kind.decode(kind.apply(encoded, {"slices": slices}, layout), turn_out, layout)
    dense = dense_reference(layout, {"slices": slices})
    blocks = torch.stack(dense[:, : WIDTH // p].chunk(p), -1)  # first block column: the tubes
    spectrum = torch.fft.fft(blocks)
    inputs = torch.fft.fft(x.unflatten(1, (p, -1)), dim=1)
    product = torch.fft.ifft(torch.einsum("cak,tka->tkc", spectrum, inputs), dim=1)
    assert_close(y, product.real.flatten(1))
    assert_close(spectrum[..., 0].real, slices[0])
    if p > 2:
        assert_close(spectrum[..., 1], torch.complex(slices[1], slices[2]))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_dft_fit_is_least_squares_over_circulant_weights(p: int) -> None:
    (x, new), weight = _rows(), randn(WIDTH, WIDTH, seed=9)
    kind = structure("lprod")
    layout = kind.layout(kind.spec(p=p, transform="dft"), Site(WIDTH, WIDTH, "in"))
    z = layout.transform_of("in").build({}, x).tubes
    turn = torch.kron(z, torch.eye(WIDTH // p, dtype=torch.float64))
    product, gram = _products(x, new, weight)
    slices = fit_conjugate_slices(turn @ product @ turn.T, turn @ gram @ turn.T, p)
    # Output block i sees input block i - t through tube entry t, whatever i.
    parts, wanted = new.unflatten(1, (p, -1)), (x @ weight.T).unflatten(1, (p, -1))
    design = torch.cat([torch.cat([parts[:, i - t] for t in range(p)], 1) for i in range(p)])
    tubes = torch.linalg.lstsq(design, wanted.transpose(0, 1).flatten(0, 1)).solution
    column = dense_reference(layout, {"slices": slices})[:, : WIDTH // p]
    found = torch.cat([block.T for block in column.chunk(p)])
    assert_close(found, tubes, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- staged rotations
@pytest.mark.parametrize("block", [1, 2, 5, 16])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0])
def test_blocks_are_exponentials(block: int, scale: float) -> None:
    generators = (scale * randn(3, 2, block * (block - 1) // 2)).requires_grad_()
    blocks = build_blocks(generators, block)
    each = [rotation(one, block) for one in generators.flatten(0, 1)]
    exact = torch.stack(each).unflatten(0, (3, 2))
    assert_close(blocks, exact, rtol=1e-9, atol=1e-9)
    assert_close(blocks @ blocks.mT, torch.eye(block).double().expand_as(blocks))
    if block > 1:
        mixing = randn(*blocks.shape, seed=1)
        got = torch.autograd.grad((blocks * mixing).sum(), generators)
        wanted = torch.autograd.grad((exact * mixing).sum(), generators)
        assert_close(got, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_orthogonal_from_low_precision_generators(dtype: torch.dtype) -> None:
    blocks = build_blocks(randn(2, 3, 28).to(dtype), 8)
    assert blocks.dtype == torch.float64
    assert_close(blocks @ blocks.mT, torch.eye(8).double().expand_as(blocks))


def test_rows_a_page_apart_are_kept_apart_and_rotated_alike() -> None:
    stages = Stages(24, 8, 2)
    blocks, x = build_blocks(randn(*stages.generators_shape), 8), randn(1024, 24, seed=1)
    whole = rotate(x.requires_grad_(), blocks)
    assert whole.stride(1) * whole.element_size() % 4096
    parts = torch.cat([rotate(part, blocks) for part in x.split(1000)])
    assert_close(whole, parts)
    grads = (torch.autograd.grad(turned.square().sum() / 2, x)[0] for turned in (whole, parts))
    for grad in grads:  # of half the squared norm, which a rotation leaves as it is
        assert_close(grad, x)
    with FakeTensorMode():  # large ones have no memory to give advice about
        assert rotate(torch.empty(2**18, 24), torch.empty(2, 3, 8, 8)).shape == (2**18, 24)


def test_folding_the_tube_transform_changes_nothing() -> None:
    stages, z = Stages(24, 8, 2), TUBES["dct"](4, 0)
    blocks, x = build_blocks(randn(*stages.generators_shape), 8), randn(5, 24, seed=1)
    assert merges_with(stages, 4)
    assert_close(rotate(x, fold_tube_transform(blocks, z)), mix_tubes(rotate(x, blocks), z))
    assert not merges_with(Stages(24, 8, 3), 4)
    assert not merges_with(Stages(24, 6, 2), 4)


@quick
@given(features=st.integers(1, 400), wanted=st.integers(1, 100))
def test_nearest_block_divides_and_is_closest(features: int, wanted: int) -> None:
    found = nearest_block(features, wanted)
    assert features % found == 0
    others = [size for size in range(1, features + 1) if features % size == 0]
    gap = min(abs(size - wanted) for size in others)
    assert found == min(size for size in others if abs(size - wanted) == gap)  # of two the smaller


# ---------------------------------------------------------------- the fitted transform
def _explained(weights: list[Tensor], turn: Tensor, p: int, *, output: bool) -> float:
    """Shares of the outputs' squares that slices explain on rows after x -> T x, summed."""
    (x, new), total = _rows(), 0.0
    for weight in weights:
        y = x @ weight.T
        inputs, outputs = (new, y @ turn.T) if output else (new @ turn.T, y)
        slices = fit_slices(outputs.T @ inputs / ROWS, inputs.T @ inputs / ROWS, p)
        missed = outputs - inputs @ torch.block_diag(*slices).T
        total += 1 - float(missed.square().sum() / outputs.square().sum())
    return total


@pytest.mark.often("stages0-out")
@pytest.mark.parametrize("output", [False, True], ids=["in", "out"])
@pytest.mark.parametrize("stages", [Stages(WIDTH, 4, 2), Stages(WIDTH, 3, 1)])
def test_fitted_transform(stages: Stages, output: bool) -> None:
    p, z = 4, TUBES["dct"](4, 0)
    (x, new), weights = _rows(), [randn(WIDTH, WIDTH, seed=9 + i) for i in range(2)]
    problems = [
        Problem(*_products(x, new, weight), float((x @ weight.T).square().sum() / ROWS))
        for weight in weights
    ]
    generators = fit_rotation(problems, stages, count=p, z=z, output=output)
    assert (generators.shape, generators.dtype) == (stages.generators_shape, torch.float64)
    eye = torch.eye(WIDTH, dtype=torch.float64)
    turn = mix_tubes(rotate(eye, build_blocks(generators, stages.block)), z).T
    assert_close(turn @ turn.T, eye)
    fitted = _explained(weights, turn, p, output=output)
    assert fitted > _explained(weights, mix_tubes(eye, z).T, p, output=output) + 0.05


def test_the_fit_of_a_transform_is_repeatable_whatever_the_size_of_inputs() -> None:
    (x, new), weight = _rows(), randn(WIDTH, WIDTH, seed=9)
    product, gram = _products(x, new, weight)
    options: dict[str, Any] = {"count": 4, "z": TUBES["dct"](4, 0), "output": False, "steps": 20}
    found = []
    for seed, size in enumerate((1.0, 1.0, 2.0**-100, 2.0**100)):
        torch.manual_seed(seed)
        problem = Problem(size**2 * product, size**2 * gram, size**2)
        found.append(fit_rotation([problem], Stages(WIDTH, 4, 2), **options))
    assert_close(found[1:], found[:1] * 3, rtol=0, atol=0)


@pytest.mark.parametrize("output", [False, True], ids=["in", "out"])
def test_a_transform_is_judged_by_what_slices_explain_of_each_weight(output: bool) -> None:
    """The mean of R^2 over weights, large or small: slices of raw rows regressed on slices."""
    p, x, z, stages = 4, _rows()[0], TUBES["dct"](4, 0), Stages(WIDTH, 4, 2)
    weights = [randn(WIDTH, WIDTH, seed=1), 100 * randn(WIDTH, WIDTH, seed=2)]
    outputs = [x @ weight.T for weight in weights]
    gram = x.T @ x / ROWS
    scales = [float(y.square().sum() / ROWS) for y in outputs]
    own = [Problem(w @ gram, gram, s) for w, s in zip(weights, scales, strict=True)]
    blocks = build_blocks(0.5 * randn(*stages.generators_shape), 4)
    turn = partial(turn_rows, z=z.float(), count=p)
    found = (_output_objective if output else _input_objective)(own, p, turn)(blocks.float())
    explained = []
    for y in outputs:
        left, right = (x, turn_rows(y, blocks, z, p)) if output else (turn_rows(x, blocks, z, p), y)
        pairs = zip(left.chunk(p, 1), right.chunk(p, 1), strict=True)
        fits = [a @ torch.linalg.lstsq(a, b).solution for a, b in pairs]
        explained.append(sum(fit.square().sum() for fit in fits) / y.square().sum())
    assert float(found) == pytest.approx(float(sum(explained) / 2), rel=1e-3)
