"""Fits of tensor-train matrices, against brute-force least squares."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tcompress.errors import FitError
from tcompress.linalg import ttfit
from tcompress.linalg.tensortrain import merge_cores, tt_shape, tt_svd, tt_to_matrix
from tcompress.linalg.ttfit import TTProblem, fit_tt, orthogonalised, tt_loss, update_core
from tests.support.numerics import near, quick, randn

# Input modes, output modes and inner ranks of a 12 x 18 matrix, and of a padded one.
CASES = {
    "2 cores": ((6, 3), (3, 4), (4,)),
    "3 cores": ((3, 3, 2), (2, 3, 2), (3, 3)),
    "padded inputs": ((5, 4), (3, 4), (4,)),
    "padded outputs": ((6, 3), (2, 7), (4,)),
    "both padded": ((3, 3, 3), (2, 4, 2), (4, 3)),
}
OUT, IN = 12, 18
cases = pytest.mark.parametrize("case", CASES)
with_curvature = pytest.mark.parametrize("curved", [False, True])


def spd(size: int, decades: float, seed: int) -> Tensor:
    """Random positive definite matrix whose eigenvalues span so many decades."""
    basis, _ = torch.linalg.qr(randn(size, size, seed=seed))
    return (basis * torch.logspace(0, -decades, size, dtype=torch.float64)) @ basis.T


def until_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps within a fit go on until they change nothing."""
    for name, value in (("STEPS", 300), ("CURVED_STEPS", 300), ("ENOUGH", 1e-24)):
        monkeypatch.setattr(ttfit, name, value)


class Setting:
    """A weight, its moments and where a fit starts."""

    def __init__(self, case: str, curved: bool, *, decades: float = 2, seed: int = 0) -> None:
        self.weight = randn(OUT, IN, seed=seed)
        self.gram = spd(IN, decades, seed + 1)
        self.curvature = spd(OUT, decades, seed + 2) if curved else None
        self.product = self.weight @ self.gram
        in_modes, out_modes, ranks = CASES[case]
        self.cores = tt_svd(self.weight, in_modes, out_modes, ranks)

    def loss(self, cores: list[Tensor]) -> float:
        return float(tt_loss(self.product, self.gram, cores, self.curvature))

    def fit(self, sweeps: int = 4) -> list[Tensor]:
        return fit_tt(self.product, self.gram, self.cores, sweeps, self.curvature)

    @property
    def problem(self) -> TTProblem:
        return TTProblem.of(self.product, self.gram, self.curvature, self.cores)

    def around(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The cores before core n merged, the core, and those after it merged."""
        left = right = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        cores = orthogonalised(self.cores)
        for core in cores[:n]:
            left = merge_cores(left, core)
        for core in reversed(cores[n + 1 :]):
            right = merge_cores(core, right)
        return left, cores[n], right

    def images(self, left: Tensor, core: Tensor, right: Tensor) -> Tensor:
        """Whitened and flattened matrices of all unit cores: a least-squares design."""
        half = torch.linalg.cholesky(self.gram)
        rows = torch.eye(OUT).double()
        if self.curvature is not None:
            rows = torch.linalg.cholesky(self.curvature).T
        units = torch.eye(core.numel()).double().view(-1, *core.shape)
        built = [tt_to_matrix([left, unit, right])[:OUT, :IN] for unit in units]
        return torch.stack([(rows @ w @ half).flatten() for w in [*built, self.weight]], 1)


def test_the_loss_is_the_error_without_its_constant() -> None:
    s = Setting("both padded", curved=True)
    gap = s.weight - tt_to_matrix(s.cores)[:OUT, :IN]
    error = torch.trace(s.curvature @ gap @ s.gram @ gap.T)
    constant = torch.trace(s.curvature @ s.weight @ s.gram @ s.weight.T)
    assert s.loss(s.cores) == pytest.approx(float(error - constant))
    plain = tt_loss(s.weight, None, s.cores)
    assert float(plain) == pytest.approx(float(gap.square().sum() - s.weight.square().sum()))


@cases
@with_curvature
@pytest.mark.parametrize(("n", "side"), [(0, 0), (1, 4096), (-1, 0), (0, 4096)])
def test_one_update_is_the_least_squares_optimum(
    case: str, curved: bool, n: int, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttfit, "SIDE", side)
    until_solved(monkeypatch)
    s = Setting(case, curved)
    left, core, right = s.around(n % len(s.cores))
    design = s.images(left, core, right)
    best = torch.linalg.lstsq(design[:, :-1], design[:, -1:], driver="gelsd").solution
    found = update_core(s.problem, left, core, right)
    assert s.loss([left, core, right]) > s.loss([left, found, right])
    assert_close(design[:, :-1] @ found.reshape(-1, 1), design[:, :-1] @ best, rtol=0, atol=1e-6)


@pytest.mark.slow
@quick
@given(
    st.sampled_from(sorted(CASES)), st.booleans(), st.sampled_from([0.5, 3, 7]), st.integers(0, 99)
)
def test_no_update_goes_up(case: str, curved: bool, decades: float, seed: int) -> None:
    s = Setting(case, curved, decades=decades, seed=seed)
    scale = abs(s.loss(s.cores))
    losses = [s.loss(s.cores)]

    def recorded(problem: TTProblem, left: Tensor, core: Tensor, right: Tensor) -> Tensor:
        assert s.loss([left, core, right]) == pytest.approx(losses[-1], abs=1e-9 * scale)
        near(torch.einsum("xopa,xopc->ac", left, left), torch.eye(left.shape[-1]).double())
        near(torch.einsum("bxry,dxry->bd", right, right), torch.eye(len(right)).double())
        found = update_core(problem, left, core, right)
        losses.append(s.loss([left, found, right]))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ttfit, "update_core", recorded)
        fitted = s.fit()
    assert len(losses) == 1 + 4 * 2 * (len(s.cores) - 1)
    assert all(b <= a + 1e-12 * scale for a, b in pairwise(losses))
    assert s.loss(fitted) < losses[0]
    assert s.loss(fitted) == pytest.approx(losses[-1], abs=1e-9 * scale)
    assert tt_shape(fitted) == tt_shape(s.cores)


def test_a_fit_that_ends_higher_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Setting("2 cores", curved=False)
    monkeypatch.setattr(ttfit, "update_core", lambda problem, left, core, right: 5 * core)
    assert_close(s.fit(sweeps=1), s.cores, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("case", ["2 cores", "3 cores"])
def test_gradients_and_factors_find_the_same_fit(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = Setting(case, curved=False, decades=1)
    until_solved(monkeypatch)
    factored = tt_to_matrix(s.fit(sweeps=2))[:OUT, :IN]
    monkeypatch.setattr(ttfit, "normal_matrix", None)  # must not be called
    monkeypatch.setattr(ttfit, "SIDE", 0)
    assert_close(tt_to_matrix(s.fit(sweeps=2))[:OUT, :IN], factored, rtol=0, atol=1e-6)
    monkeypatch.setattr(ttfit, "SIDE", 4096)
    monkeypatch.setattr(ttfit, "ROOM", 0)
    assert_close(tt_to_matrix(s.fit(sweeps=2))[:OUT, :IN], factored, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["2 cores", "3 cores"])
def test_few_steps_come_close(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Setting(case, curved=True, decades=3)
    few = s.loss(s.fit())
    until_solved(monkeypatch)
    start, most = s.loss(s.cores), s.loss(s.fit())
    assert start - few > 0.999 * (start - most)


def test_one_core_is_the_plain_regression() -> None:
    s = Setting("2 cores", curved=False)
    target = randn(OUT, IN, seed=7)
    start = [torch.zeros(1, OUT, IN, 1).double()]
    assert_close(tt_to_matrix(fit_tt(target @ s.gram, s.gram, start, 1)), target, atol=1e-6, rtol=0)


def test_exact_trains_are_recovered() -> None:
    s = Setting("3 cores", curved=False)
    target = tt_to_matrix(s.cores)
    start = [core + 0.1 * randn(*core.shape, seed=8) for core in s.cores]
    fitted = fit_tt(target @ s.gram, s.gram, start, 30)
    assert_close(tt_to_matrix(fitted), target, rtol=0, atol=1e-3)


def test_padded_outputs_are_those_of_no_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttfit, "CURVED_STEPS", ttfit.STEPS)
    s = Setting("padded outputs", curved=False)
    explicit = torch.eye(OUT).double()
    wanted = fit_tt(s.product, s.gram, s.cores, 4, explicit)
    near(tt_to_matrix(s.fit())[:OUT, :IN], tt_to_matrix(wanted)[:OUT, :IN])
    full = Setting("2 cores", curved=False)
    assert not s.problem.separates
    assert full.problem.separates


def test_no_gram_is_the_identity() -> None:
    s = Setting("3 cores", curved=False)
    eye = torch.eye(IN).double()
    assert_close(
        tt_to_matrix(fit_tt(s.weight, None, s.cores)), tt_to_matrix(fit_tt(s.weight, eye, s.cores))
    )
    two = Setting("2 cores", curved=False)  # here the start is the optimum
    free = tt_to_matrix(fit_tt(two.weight, None, two.cores))
    near(free, tt_to_matrix(two.cores))


def test_moments_that_hold_no_numbers_are_refused() -> None:
    s = Setting("2 cores", curved=True)
    bad = torch.full((IN, IN), math.nan).double()
    with pytest.raises(FitError, match="NaN or infinity"):
        fit_tt(s.product, bad, s.cores)
    with pytest.raises(FitError, match="NaN or infinity"):
        fit_tt(s.product, s.gram, s.cores, curvature=bad[:OUT, :OUT])


@with_curvature
def test_inputs_that_are_always_zero(curved: bool) -> None:
    s = Setting("2 cores", curved)
    s.gram[3:9] = 0.0
    s.gram[:, 3:9] = 0.0
    s.product = s.weight @ s.gram
    fitted = s.fit()
    assert all(bool(core.isfinite().all()) for core in fitted)
    assert s.loss(fitted) < s.loss(s.cores)
    zero = fit_tt(torch.zeros(OUT, IN), torch.zeros(IN, IN), s.cores, 1, s.curvature)
    assert all(bool(core.isfinite().all()) for core in zero)
