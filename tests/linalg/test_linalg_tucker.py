"""Shared Tucker factors, against dense least squares and orthogonal iteration."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tensorly.decomposition
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tcompress.linalg.fits import damped_curvature
from tcompress.linalg.moments import fit_lowrank
from tcompress.linalg.tensortrain import tt_svd
from tcompress.linalg.tuckerfit import (
    Ranks,
    Tucker,
    TuckerFactors,
    User,
    _Projected,
    _started,
    _update_cores,
    _update_left,
    _update_mixing,
    _update_right,
    _whitened,
    clip_shared_ranks,
    fit_mixing,
    fit_tucker,
    mixed_weight,
    tucker_parameters,
)
from tests.support.numerics import quick
from tests.support.structures import randn

COUNT, ROWS, COLS = 6, 5, 7


def _matrices(found: Tucker) -> Tensor:
    """The matrices that factors stand for.  # (n, out, d)."""
    return found.left @ found.middles() @ found.right.mT


def _problem(
    seed: int = 0, *, count: int = COUNT, rows: int = 60, damping: float = 1e-3
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, W_l C_l and G_l of layers whose inputs differ."""
    weights = randn(count, ROWS, COLS, seed=seed)
    x = randn(count, rows, COLS, seed=seed + 1) @ randn(count, COLS, COLS, seed=seed + 2)
    new = x + 0.2 * randn(count, rows, COLS, seed=seed + 3)
    ridge = damped_curvature(new.mT @ new / rows, damping) - new.mT @ new / rows
    return weights, weights @ (x.mT @ new / rows + ridge), new.mT @ new / rows + ridge


def _loss(
    found: Tucker, products: Tensor, grams: Tensor | None, curves: Tensor | None = None
) -> float:
    dense = _matrices(found)
    change = (dense if grams is None else dense @ grams) - 2 * products
    return float((change if curves is None else curves @ change).mul(dense).sum())


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(("count", "ranks"), [(COUNT, (2, 3, 4)), (1, (1, 3, 3))])
def test_parameters_are_those_of_the_factors(count: int, ranks: Ranks) -> None:
    found = fit_tucker(randn(count, ROWS, COLS), None, ranks)
    stored = [found.left, found.cores, found.right] + ([found.mixing] if count > 1 else [])
    assert tucker_parameters(count, ROWS, COLS, ranks) == sum(t.numel() for t in stored)
    assert found.mixing.shape == (count, ranks[0])


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        ((9, 9, 9), (6, 5, 7)),
        ((1, 4, 7), (1, 4, 4)),
        ((6, 1, 2), (2, 1, 2)),
        ((2, 5, 2), (2, 4, 2)),
        ((2, 3, 4), (2, 3, 4)),
    ],
)
def test_ranks_are_clipped_to_the_shape(ranks: Ranks, wanted: Ranks) -> None:
    assert clip_shared_ranks(COUNT, ROWS, COLS, ranks) == wanted
    found = fit_tucker(randn(COUNT, ROWS, COLS), None, ranks)
    assert found.cores.shape == wanted


# ---------------------------------------------------------------- fits
@pytest.mark.parametrize("moments", ["none", "shared", "own"])
@pytest.mark.parametrize("curved", [False, True])
def test_full_ranks_give_the_matrices_back(moments: str, curved: bool) -> None:
    weights, _, grams = _problem(damping=0.1 if curved else 1e-3)
    given_grams = {"none": None, "shared": grams[0], "own": grams}[moments]
    products = weights if given_grams is None else weights @ given_grams
    both: dict[str, Any] = {"curvatures": _curves(), "inner": 50} if curved else {}
    found = fit_tucker(products, given_grams, (COUNT, ROWS, COLS), **both)
    near = 1e-5 if curved else 1e-6
    assert_close(_matrices(found), weights, rtol=near, atol=near)


def test_matrices_of_low_rank_are_found() -> None:
    _, _, grams = _problem()
    cores, mixing = randn(2, 3, 3), randn(COUNT, 2, seed=1)
    true = Tucker(randn(ROWS, 3, seed=2), cores, randn(COLS, 3, seed=3), mixing)
    found = fit_tucker(_matrices(true) @ grams, grams, (2, 3, 3))
    assert_close(_matrices(found), _matrices(true), rtol=1e-5, atol=1e-5)


def test_a_single_matrix_is_whitened_low_rank() -> None:
    _, products, grams = _problem(count=1)
    for shape in (grams, grams[0]):
        found = fit_tucker(products, shape, (1, 3, 3))
        a, b = fit_lowrank(products[0], grams[0], 3)
        assert_close(_matrices(found)[0], a @ b, rtol=1e-6, atol=1e-6)
        assert_close(found.left @ found.cores[0] @ found.right.T, a @ b, rtol=1e-6, atol=1e-6)


def test_a_shared_moment_is_the_same_as_equal_ones() -> None:
    _, products, grams = _problem()
    one = fit_tucker(products, grams[0], (2, 3, 4), start=0)
    same = fit_tucker(products, grams[:1].expand(COUNT, -1, -1), (2, 3, 4))
    assert_close(_matrices(one), _matrices(same), rtol=1e-6, atol=1e-6)


@quick
@given(
    seed=st.integers(0, 1000),
    ranks=st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 7)),
    rows=st.sampled_from([2, 5, 60]),
    inner=st.sampled_from([1, 3, 50]),
    moments=st.booleans(),
)
def test_no_update_costs_loss(
    seed: int, ranks: Ranks, rows: int, inner: int, moments: bool
) -> None:
    weights, products, grams = _problem(seed, rows=rows)
    problem, _, _ = _whitened(products, grams) if moments else _whitened(weights, None)
    ranks = clip_shared_ranks(COUNT, ROWS, COLS, ranks)
    now = _started(problem, ranks, 0)
    trace = [_loss(now, problem.products, problem.grams)]
    for _ in range(3):
        now = _update_left(problem, now)
        trace.append(_loss(now, problem.products, problem.grams))
        now = _update_right(problem, now, inner)
        trace.append(_loss(now, problem.products, problem.grams))
        seen = _Projected.of(problem, now)
        now = _update_cores(seen, now, inner)
        trace.append(_loss(now, problem.products, problem.grams))
        now = _update_mixing(seen, now, inner)
        trace.append(_loss(now, problem.products, problem.grams))
        assert seen.loss(now) == pytest.approx(trace[-1])
        eye = torch.eye(ranks[0]).double()
        assert_close(now.mixing.mT @ now.mixing, eye)
    steps = torch.tensor(trace).double().diff()
    assert bool((steps <= 1e-9 * abs(trace[-1])).all()), trace


@pytest.mark.parametrize("ranks", [(2, 3, 4), (1, 2, 2), (3, 2, 5)])
def test_no_worse_than_orthogonal_iteration(ranks: Ranks) -> None:
    weights = randn(COUNT, ROWS, COLS)
    with tensorly.backend_context("pytorch", local_threadsafe=True):
        wanted = tensorly.decomposition.tucker(weights, list(ranks), n_iter_max=5).to_tensor()
    found = fit_tucker(weights, None, ranks, start=5)
    reference = float((weights - wanted).square().sum())
    assert float((weights - _matrices(found)).square().sum()) <= reference * (1 + 1e-9)
    rough = fit_tucker(weights, None, ranks, sweeps=0, start=5)
    assert float((weights - _matrices(rough)).square().sum()) == pytest.approx(reference)


def test_moments_matter() -> None:
    weights, products, grams = _problem()
    found, free = fit_tucker(products, grams, (2, 3, 4)), fit_tucker(weights, None, (2, 3, 4))
    best = float(-torch.linalg.solve(grams, products.mT).mT.mul(products).sum())
    aware, blind = (_loss(fit, products, grams) - best for fit in (found, free))
    assert 0 < aware < 0.7 * blind


@pytest.mark.parametrize("moments", ["none", "shared", "own"])
def test_a_converged_fit_is_stationary(moments: str) -> None:
    weights, products, grams = _problem()
    given_grams = {"none": None, "shared": grams[0], "own": grams}[moments]
    products = weights if given_grams is None else products
    found = fit_tucker(products, given_grams, (2, 3, 4), sweeps=2000, tolerance=0.0)
    factors = [found.left, found.cores, found.right, found.mixing]
    for factor in factors:
        factor.requires_grad_()
    dense = _matrices(found)
    seen = dense if given_grams is None else dense @ given_grams
    grads = torch.autograd.grad((seen - 2 * products).mul(dense).sum(), factors)
    for factor, grad in zip(factors, grads, strict=True):
        relative = grad.norm() * factor.detach().norm() / products.mul(weights).sum()
        assert float(relative) < 1e-4


def test_a_single_matrix_has_no_mixing_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(*args: Any) -> Tucker:  # the sign of a singular vector is the library's choice
        found = _started(*args)
        return replace(found, mixing=-found.mixing, cores=-found.cores)

    monkeypatch.setattr("tcompress.linalg.tuckerfit._started", flipped)
    weight = randn(1, ROWS, COLS)
    found = fit_tucker(weight, None, (1, 5, 5), sweeps=0)
    assert_close(found.mixing, torch.ones(1, 1).double(), rtol=0, atol=0)
    assert_close(_matrices(found), weight)


def test_zero_matrices_are_fitted_by_zero() -> None:
    found = fit_tucker(torch.zeros(COUNT, ROWS, COLS).double(), None, (2, 3, 4))
    assert_close(_matrices(found), torch.zeros(COUNT, ROWS, COLS).double())


@pytest.mark.parametrize(
    ("name", "fit"),
    [
        ("tucker", lambda: fit_tucker(randn(COUNT, ROWS, COLS), None, (2, 3, 4))),
        ("tensor_train_matrix", lambda: tt_svd(randn(4, 4), (2, 2), (2, 2), [2])),
    ],
)
def test_the_backend_of_tensorly_is_changed_for_one_call_and_thread(
    name: str, fit: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def look() -> None:
        """Here, and in another thread."""
        seen.append(tensorly.get_backend())
        thread = threading.Thread(target=lambda: seen.append(tensorly.get_backend()))
        thread.start()
        thread.join()

    def decomposed(*args: Any, **options: Any) -> Any:
        look()
        return original(*args, **options)

    original = getattr(tensorly.decomposition, name)
    monkeypatch.setattr(tensorly.decomposition, name, decomposed)
    fit()
    look()
    assert seen == ["pytorch", "numpy", "numpy", "numpy"]


# ---------------------------------------------------------------- mixing weights of one layer
@pytest.mark.parametrize(("down", "across"), [(1, 1), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("moments", ["none", "inputs", "both"])
def test_mixing_is_least_squares_over_the_grid(down: int, across: int, moments: str) -> None:
    left, right, cores = randn(ROWS, 3), randn(COLS, 4, seed=1), randn(2, 3, 4, seed=2)
    height, width = down * ROWS, across * COLS
    weight = randn(height, width, seed=6)
    x = new = torch.eye(width).double()
    d = torch.eye(height).double()
    if moments != "none":
        x = randn(50, width, seed=3) @ randn(width, width, seed=4)
        new = x + 0.3 * randn(50, width, seed=5)
    if moments == "both":
        d = randn(50, height, seed=7)
    bank = TuckerFactors(left, cores, right)
    product, gram = d.T @ d @ weight @ x.T @ new, new.T @ new if moments != "none" else None
    found = fit_mixing(product, gram, bank, d.T @ d if moments == "both" else None)
    assert found.shape == (down, across, 2)
    blocks = torch.stack([left @ core @ right.T for core in cores])  # (r1, out, d)
    columns = []
    for i in range(down):
        for j in range(across):
            for block in blocks:
                dense = torch.zeros(height, width).double()
                dense[i * ROWS : (i + 1) * ROWS, j * COLS : (j + 1) * COLS] = block
                columns.append((d @ dense @ new.T).flatten())
    wanted = torch.linalg.lstsq(torch.stack(columns, 1), (d @ weight @ x.T).flatten()[:, None])
    assert_close(found.flatten(), wanted.solution[:, 0], rtol=1e-6, atol=1e-6)
    dense = mixed_weight(found, bank)
    assert_close((d @ dense @ new.T).flatten(), torch.stack(columns, 1) @ found.flatten())


def test_mixing_agrees_with_the_joint_fit() -> None:
    _, products, grams = _problem()
    found = fit_tucker(products, grams, (2, 3, 4), sweeps=2, inner=200, tolerance=0.0)
    for i in range(COUNT):
        bank = TuckerFactors(found.left, found.cores, found.right)
        alone = fit_mixing(products[i], grams[i], bank)
        assert_close(alone[0, 0], found.mixing[i], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- moments of both sides
def _curves(seed: int = 20) -> Tensor:
    half = randn(COUNT, ROWS, ROWS, seed=seed)
    return half @ half.mT + 0.1 * torch.eye(ROWS).double()


@pytest.mark.parametrize("seed", range(5))
def test_no_round_costs_loss_with_both_moments(seed: int) -> None:
    _, products, grams = _problem(seed)
    curves, losses = _curves(seed), []
    options: dict[str, Any] = {"curvatures": curves, "tolerance": 0.0, "inner": 3}
    for sweeps in (1, 2, 4, 8):
        found = fit_tucker(products, grams, (2, 3, 4), sweeps=sweeps, **options)
        losses.append(_loss(found, products, grams, curves))
    assert losses == sorted(losses, reverse=True)


def test_moments_that_all_share_only_change_coordinates() -> None:
    """From the start on: symmetric roots here, triangular ones there, and the same matrices."""
    weights, gram, curve = randn(COUNT, ROWS, COLS), _problem()[2][0], _curves()[0]
    options: dict[str, Any] = {"sweeps": 0, "start": 30}
    found = fit_tucker(weights @ gram, gram, (2, 3, 4), curvatures=curve, **options)
    roots = []
    for moment in (curve, gram):
        values, vectors = torch.linalg.eigh(moment)
        roots.append(vectors * values.sqrt() @ vectors.T)
    plain = _matrices(fit_tucker(roots[0] @ weights @ roots[1], None, (2, 3, 4), **options))
    back = torch.linalg.inv(roots[0]) @ plain @ torch.linalg.inv(roots[1])
    assert_close(_matrices(found), back, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_transposed_problem_is_solved_as_well() -> None:
    weights = randn(COUNT, ROWS, COLS)
    _, _, grams = _problem()
    curves = _curves()
    options = {"sweeps": 300, "tolerance": 0.0, "inner": 20}
    one = fit_tucker(weights @ grams, grams, (2, 3, 4), curvatures=curves, **options)
    two = fit_tucker(weights.mT @ curves, curves, (2, 4, 3), curvatures=grams, **options)
    losses = [_loss(one, weights @ grams, grams, curves)]
    turned = Tucker(two.right, two.cores.mT, two.left, two.mixing)
    losses.append(_loss(turned, weights @ grams, grams, curves))
    assert losses[0] == pytest.approx(losses[1], rel=0.03)  # optima are local


def test_what_a_weight_misses_in_a_bank_is_measured_by_its_moments() -> None:
    bank = TuckerFactors(randn(ROWS, 3), randn(2, 3, 4, seed=2), randn(COLS, 4, seed=1))
    weight = randn(2 * ROWS, COLS, seed=5)
    x, d = randn(50, COLS, seed=3), randn(50, 2 * ROWS, seed=4)
    user = User(weight, x.T @ x, d.T @ d, 4.0)
    mixing = fit_mixing(d.T @ d @ weight @ x.T @ x, x.T @ x, bank, d.T @ d)
    missed = d @ (weight - mixed_weight(mixing, bank)) @ x.T
    assert user.error(bank) == pytest.approx(float(missed.square().sum()) / 4)
    turned = user.turned().error(TuckerFactors(bank.right, bank.cores.mT, bank.left))
    assert turned == pytest.approx(user.error(bank))
