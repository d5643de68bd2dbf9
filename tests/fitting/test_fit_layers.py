"""Fits of layers that read one input: sums of terms, shared sides, biases, experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcompress.errors import FitError
from tcompress.fitting import layer_fits as fitting
from tcompress.fitting.layer_fits import (
    DATA_FREE,
    FittedLayer,
    LayerMoments,
    LayerToFit,
    fit_layers,
)
from tcompress.linalg.moments import Moments
from tcompress.planning.entries import LayerPlan
from tcompress.structures import Layout, Site, structure
from tcompress.structures.base import transform_of
from tcompress.structures.modules.linear import PartLayout, StructuredLinear, tensor_prefix
from tests.support.structures import fitted_weight, identity_moments, make_moments, randn

WIDTH, OUTPUTS = 24, 16
LOW = ("lowrank", {"rank": 3})
DCT = ("lprod", {"transform": "dct"})
DFT = ("lprod", {"transform": "dft"})
FITTED = ("lprod", {"transform": "fitted", "block": 4})
OUT = ("lprod", {"transform": "fitted", "block": 4, "placement": "out"})
SUMS = {"lowrank": [LOW], "dct": [DCT], "dft": [DFT], "fitted": [FITTED], "out": [OUT]}
SUMS |= {"dct+rank": [DCT, LOW], "out+rank": [OUT, LOW]}

Method = tuple[str, dict[str, Any]]


def _layout(method: Method, outputs: int = OUTPUTS) -> Layout:
    kind = structure(method[0])
    return kind.layout(kind.spec(**method[1]), Site(WIDTH, outputs, "in"))


def _plan(terms: list[Method], outputs: tuple[int, ...] = (OUTPUTS,), **options: Any) -> LayerPlan:
    parts = tuple(
        PartLayout(name=f"p{index}", terms=tuple(_layout(term, size) for term in terms))
        for index, size in enumerate(outputs)
    )
    fixed: dict[str, Any] = {"name": "b.q", "block": "b", "role": "q", "kind": "linear"}
    return LayerPlan(**{**fixed, "bias": False, "parts": parts, **options})


def _fit(
    entry: LayerPlan,
    weight: Tensor,
    *moments: LayerMoments,
    dtype: torch.dtype = torch.float64,
    damping: float = 0.0,
) -> FittedLayer:
    layer = LayerToFit(entry, weight, moments or DATA_FREE)
    return fit_layers([layer], dtype=dtype, damping=damping)[0]


def _layer(entry: LayerPlan, fitted: FittedLayer, owner: StructuredLinear | None = None) -> Any:
    layer = StructuredLinear(
        entry.parts, input_of=owner, experts=entry.experts, dtype=torch.float64
    )
    own = dict(layer.named_parameters())
    assert {name: tuple(t.shape) for name, t in fitted.tensors.items()} == entry.tensor_shapes
    assert own.keys() == fitted.tensors.keys()
    with torch.no_grad():
        for name, tensor in fitted.tensors.items():
            own[name].copy_(tensor)
    return layer.requires_grad_(False)


@dataclass(frozen=True)
class Rows:
    """Paired rows of both streams with different means."""

    dense: Tensor
    new: Tensor

    @classmethod
    def drawn(cls, count: int = 80, seed: int = 0) -> Rows:
        x = randn(count, WIDTH, seed=seed) @ randn(WIDTH, WIDTH, seed=1) + randn(WIDTH, seed=2)
        return cls(x, x + 0.3 * randn(count, WIDTH, seed=seed + 3) + 0.2 * randn(WIDTH, seed=4))

    def moments(self, *, centred: bool) -> Moments:
        means = [rows.mean(0) if centred else 0 * rows[0] for rows in (self.new, self.dense)]
        new, dense, count = self.new - means[0], self.dense - means[1], len(self.new)
        grams = (new.T @ new / count, dense.T @ new / count, dense.T @ dense / count)
        return Moments(*grams, means[0], means[1], count)

    def error(self, weight: Tensor, fitted: Tensor, shift: Tensor | None) -> float:
        """Relative error of the outputs; with a bias, relative to their variance."""
        wanted = self.dense @ weight.T
        found = self.new @ fitted.T + (0.0 if shift is None else shift)
        level = 0.0 if shift is None else wanted.mean(0)
        return float((wanted - found).square().sum() / (wanted - level).square().sum())


# ---------------------------------------------------------------- results
@pytest.mark.parametrize("terms", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("bias", [False, True])
def test_errors_are_those_on_rows(terms: list[Method], bias: bool) -> None:
    entry, weight = _plan(terms, bias=bias), randn(OUTPUTS, WIDTH)
    rows = {"calibration": Rows.drawn(), "held_out": Rows.drawn(30, seed=50)}
    moments = LayerMoments(*(part.moments(centred=bias) for part in rows.values()))
    fitted = _fit(entry, weight, moments, damping=0.01)
    dense = _layer(entry, fitted).dense_weight()
    assert (fitted.shift is not None) == bias
    errors = {kind: part.error(weight, dense, fitted.shift) for kind, part in rows.items()}
    assert fitted.errors == pytest.approx(errors, abs=1e-9)


@pytest.mark.parametrize("terms", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("aware", [False, True])
def test_a_weight_of_zeros_is_fitted_without_error(terms: list[Method], aware: bool) -> None:
    entry, weight = _plan(terms, bias=True), torch.zeros(OUTPUTS, WIDTH)
    moments = [part.moments(centred=True) for part in (Rows.drawn(), Rows.drawn(30, seed=50))]
    fitted = _fit(entry, weight, LayerMoments(*moments) if aware else LayerMoments(), damping=0.01)
    kinds = ("calibration", "held_out") if aware else ("weight",)
    assert fitted.errors == dict.fromkeys(kinds, 0.0)


@pytest.mark.parametrize("terms", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("size", [1e-38, 3e38])
def test_errors_do_not_depend_on_the_size_of_a_weight(terms: list[Method], size: float) -> None:
    entry, weight = _plan(terms), randn(OUTPUTS, WIDTH).clamp(-1, 1)
    moments = [LayerMoments(), LayerMoments(Rows.drawn().moments(centred=False))]
    for own in moments:
        usual, extreme = (_fit(entry, s * weight, own, damping=0.01) for s in (1.0, size))
        for kind, error in usual.errors.items():
            assert extreme.errors[kind] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("terms", SUMS.values(), ids=SUMS)
def test_data_free_error_estimates_that_of_the_weight(terms: list[Method]) -> None:
    entry, weight = _plan(terms), randn(OUTPUTS, WIDTH)
    fitted = _fit(entry, weight)
    dense = _layer(entry, fitted).dense_weight()
    error = float((weight - dense).square().sum() / weight.square().sum())
    assert fitted.shift is None
    assert fitted.errors == {"weight": pytest.approx(error, rel=0.25)}


def test_the_shift_of_the_bias_is_the_best() -> None:
    entry, weight, rows = _plan([FITTED], bias=True), randn(OUTPUTS, WIDTH), Rows.drawn()
    fitted = _fit(entry, weight, LayerMoments(rows.moments(centred=True)))
    dense, shift = _layer(entry, fitted).dense_weight(), fitted.shift
    assert_close(shift, (rows.dense @ weight.T - rows.new @ dense.T).mean(0))
    best = rows.error(weight, dense, shift)
    for seed in range(5):
        assert best < rows.error(weight, dense, shift + 0.01 * randn(OUTPUTS, seed=seed))


@pytest.mark.parametrize("terms", [SUMS["dct+rank"], [OUT, DFT, LOW]], ids=["two", "three"])
@pytest.mark.parametrize("data", [False, True], ids=["data-free", "moments"])
def test_more_rounds_never_make_a_sum_worse(
    terms: list[Method], data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, weight, errors = _plan(terms), randn(OUTPUTS, WIDTH), []
    moments = make_moments(WIDTH, 80) if data else identity_moments(WIDTH)
    for rounds in (0, 1, 2, 5):
        monkeypatch.setattr(fitting, "ROUNDS", rounds)
        fitted = _fit(entry, weight, LayerMoments(moments if data else None))
        errors.append(moments.error(weight, _layer(entry, fitted).dense_weight()))
    assert all(b <= a + 1e-12 for a, b in pairwise(errors)), errors
    assert errors[-1] < errors[0]


def test_damping_counts_rows_for_every_regressor() -> None:
    weight, moments = randn(OUTPUTS, WIDTH), make_moments(WIDTH, 50)
    for method, regressors in ((LOW, WIDTH), (DCT, WIDTH // 4)):
        entry = _plan([method])
        found = _fit(entry, weight, LayerMoments(moments), damping=0.3)
        damped = moments.damped(0.3 * regressors / 50)
        sums = {"gram": damped.gram, "cross": damped.product(torch.eye(WIDTH))}
        wanted = _fit(entry, weight, LayerMoments(replace(moments, **sums)))
        assert_close(_layer(entry, found).dense_weight(), _layer(entry, wanted).dense_weight())


# ---------------------------------------------------------------- sharing
def test_layers_that_share_an_input_are_fitted_together() -> None:
    owner = _plan([FITTED, LOW], readers=2)
    other = _plan([FITTED, LOW], (8, 8), name="b.k", input_of="b.q")
    lone = _plan([DCT], name="b.v")
    weights = [randn(OUTPUTS, WIDTH, seed=seed) for seed in range(3)]
    moments = [LayerMoments(make_moments(WIDTH, 80))]
    pairs = zip([lone, owner, other], weights, strict=True)
    order = [LayerToFit(*pair, moments) for pair in pairs]
    found = fit_layers(order, dtype=torch.float64, damping=0.01)
    first = _layer(owner, found[1])
    second = _layer(other, found[2], first)
    layers = [_layer(lone, found[0]), first, second]
    for layer, weight, fitted in zip(layers, weights, found, strict=True):
        error = moments[0].train.error(weight, layer.dense_weight())  # type: ignore[union-attr]
        assert fitted.errors["calibration"] == pytest.approx(error, abs=1e-9)
        assert error < 0.8
    alone = _fit(_plan([FITTED, LOW]), weights[1], *moments, damping=0.01)
    name = "tc_in0.generators"
    assert not torch.allclose(found[1].tensors[name], alone.tensors[name])


# ---------------------------------------------------------------- stored precision
@pytest.mark.usefixtures("whole_fits")
@pytest.mark.parametrize("terms", [[FITTED], [OUT]], ids=["in", "out"])
def test_the_fit_knows_that_tensors_are_rounded(terms: list[Method]) -> None:
    entry, weight = _plan(terms), randn(OUTPUTS, WIDTH)
    moments = make_moments(WIDTH, 80, noise=0.0)
    exact = _fit(entry, weight, LayerMoments(moments))
    aware = _fit(entry, weight, LayerMoments(moments), dtype=torch.bfloat16)
    afterwards = FittedLayer({n: t.bfloat16() for n, t in exact.tensors.items()}, {})
    assert {tensor.dtype for tensor in aware.tensors.values()} == {torch.bfloat16}
    errors = [
        moments.error(weight, _layer(entry, fitted).dense_weight())
        for fitted in (exact, aware, afterwards)
    ]
    assert errors[0] < errors[1] < errors[2]
    assert aware.errors["calibration"] == pytest.approx(errors[1], abs=1e-9)


def test_values_beyond_the_stored_dtype_are_refused() -> None:
    with pytest.raises(FitError, match=r"b\.q"):
        _fit(_plan([LOW]), 1e12 * randn(OUTPUTS, WIDTH), dtype=torch.float16)


# ---------------------------------------------------------------- bad and scarce data
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = randn(OUTPUTS, WIDTH)
    weight[3, 4] = bad
    with pytest.raises(FitError) as error:
        _fit(_plan([FITTED]), weight)
    assert error.value.message == "the weight of layer `b.q` holds NaN or infinity"
    assert error.value.hint == "repair the checkpoint first"


def test_moments_that_are_not_finite_name_the_layers() -> None:
    good = make_moments(WIDTH, 80)
    bad = Moments(good.gram * float("nan"), good.cross, good.dense, good.mean, good.mean, 80)
    with pytest.raises(FitError) as error:
        _fit(_plan([LOW]), randn(OUTPUTS, WIDTH), LayerMoments(bad))
    assert error.value.message.startswith("the fit of `b.q` failed: a moment matrix holds NaN")


@pytest.mark.parametrize("terms", SUMS.values(), ids=SUMS)
def test_fewer_rows_than_dimensions(terms: list[Method]) -> None:
    entry, weight, moments = _plan(terms), randn(OUTPUTS, WIDTH), make_moments(WIDTH, 5)
    fitted = _fit(entry, weight, LayerMoments(moments), damping=0.1)
    dense = _layer(entry, fitted).dense_weight()
    assert bool(dense.isfinite().all())
    assert moments.error(weight, dense) < 0.5
    unseen = torch.eye(WIDTH).double() - torch.linalg.pinv(moments.gram) @ moments.gram
    assert float((dense @ unseen).norm() / (weight @ unseen).norm()) > 0.3  # not driven to zero


@pytest.mark.parametrize("terms", [[LOW], [DCT], [DFT], [DCT, LOW]], ids=str)
def test_fits_tend_to_the_data_free_one(terms: list[Method]) -> None:
    entry, weight, moments = _plan(terms), randn(OUTPUTS, WIDTH), make_moments(WIDTH, 5)
    free = _layer(entry, _fit(entry, weight)).dense_weight()
    distances = []
    for damping in (1e-2, 1.0, 1e2, 1e6):
        fitted = _fit(entry, weight, LayerMoments(moments), damping=damping)
        distances.append(float((_layer(entry, fitted).dense_weight() - free).norm()))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-3


@pytest.mark.parametrize("terms", [[LOW], [DCT], [FITTED]], ids=["lowrank", "dct", "fitted"])
def test_inputs_that_are_always_zero_give_the_data_free_fit(terms: list[Method]) -> None:
    zero, none = torch.zeros(WIDTH, WIDTH).double(), torch.zeros(WIDTH).double()
    silent = LayerMoments(Moments(zero, zero, zero, none, none, 80))
    entry, weight = _plan(terms), randn(OUTPUTS, WIDTH)
    found = _layer(entry, _fit(entry, weight, silent, damping=0.1)).dense_weight()
    assert_close(found, _layer(entry, _fit(entry, weight)).dense_weight(), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- experts
EXPERTS = {"kind": "experts", "experts": 3, "parameter": "gate_up_proj"}


@pytest.mark.parametrize("terms", [[LOW], [FITTED], [OUT, LOW]], ids=["low", "in", "out+low"])
def test_experts_are_fitted_to_their_own_moments(terms: list[Method]) -> None:
    entry, weight = _plan(terms, (8, 8), **EXPERTS), randn(3, 16, WIDTH)
    moments = [LayerMoments(make_moments(WIDTH, 80, seed=seed)) for seed in range(3)]
    fitted = _fit(entry, weight, *moments, damping=0.01)
    dense = _layer(entry, fitted).dense_weight()
    errors = [m.train.error(w, d) for m, w, d in zip(moments, weight, dense, strict=True)]
    assert fitted.errors == {"calibration": pytest.approx(sum(errors) / 3, abs=1e-9)}
    assert max(errors) < 0.8


def test_one_moment_matrix_may_serve_all_experts() -> None:
    entry, weight = _plan([DCT], **EXPERTS), randn(3, OUTPUTS, WIDTH)
    shared = LayerMoments(make_moments(WIDTH, 80))
    one, three = _fit(entry, weight, shared), _fit(entry, weight, *[shared] * 3)
    assert_close(one.tensors, three.tensors)


@pytest.mark.parametrize(
    ("method", "silent"), [(DCT, 0), (DCT, 2), (FITTED, 1)], ids=["first", "last", "fitted"]
)
def test_experts_without_tokens_are_fitted_without_data(method: Method, silent: int) -> None:
    entry, weight = _plan([method], **EXPERTS), randn(3, OUTPUTS, WIDTH)
    moments = [LayerMoments(make_moments(WIDTH, 80, seed=seed)) for seed in range(3)]
    moments[silent] = LayerMoments()
    layer = _layer(entry, _fit(entry, weight, *moments, damping=0.01))
    dense = layer.dense_weight()
    free = {k: t for k, t in layer.named_parameters() if k.startswith("tc_in0")}
    layout = entry.parts[0].terms[0]
    own = {name.rpartition(".")[2]: tensor.detach() for name, tensor in free.items()}
    operators = {"in": transform_of(layout, "in").build(own, weight)}
    assert_close(dense[silent], fitted_weight(layout, weight[silent], None, operators))


def test_some_experts_without_held_out_tokens() -> None:
    entry, weight = _plan([LOW], **EXPERTS), randn(3, OUTPUTS, WIDTH)
    train, held = make_moments(WIDTH, 80), make_moments(WIDTH, 20, seed=5)
    moments = [LayerMoments(train, held), LayerMoments(train), LayerMoments(train, held)]
    fitted = _fit(entry, weight, *moments, damping=0.01)
    dense = _layer(entry, fitted).dense_weight()
    errors = [held.error(weight[e], dense[e]) for e in (0, 2)]
    assert fitted.errors["held_out"] == pytest.approx(sum(errors) / 2, abs=1e-9)


def test_an_expert_without_tokens_does_not_choose_the_transform() -> None:
    """Its data-free target must be on the scale of the others, whatever the inputs' scale."""
    entry, weight = _plan([FITTED], **EXPERTS), randn(3, OUTPUTS, WIDTH)
    errors = []
    for scale in (1.0, 1e-3):
        moments = []
        for seed in range(3):
            m = make_moments(WIDTH, 80, seed=seed)
            grams = (scale * m.gram, scale * m.cross, scale * m.dense)
            moments.append(LayerMoments(Moments(*grams, m.mean, m.dense_mean, 80)))
        moments[1] = LayerMoments()
        dense = _layer(entry, _fit(entry, weight, *moments, damping=0.01)).dense_weight()
        errors.append([moments[e].train.error(weight[e], dense[e]) for e in (0, 2)])  # type: ignore[union-attr]
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)


def test_parts_of_a_fused_layer_are_fitted_by_their_own_curvature() -> None:
    """Fused q, k and v come out as three layers that each have their block of the curvature."""
    sizes = (6, 4, 6)
    weight = randn(16, WIDTH, seed=1)
    roots = randn(16, 16, seed=2) * torch.linspace(1, 30, 16).double()[:, None]
    curvature = roots @ roots.T
    moments = [LayerMoments(Rows.drawn().moments(centred=False))]
    options: dict[str, Any] = {"dtype": torch.float64, "damping": 0.0}
    entry = _plan([LOW], sizes)
    layer = LayerToFit(entry, weight, moments, curvature, is_judged=True)
    fused = fit_layers([layer], **options)[0]
    start, lost, whole = 0, list[Tensor](), list[Tensor]()
    for index, size in enumerate(sizes):
        rows = slice(start, start + size)
        single = _plan([LOW], (size,))
        layer = LayerToFit(single, weight[rows], moments, curvature[rows, rows])
        alone = fit_layers([layer], **options)[0]
        found = [
            fitted.tensors[f"{prefix}a"] @ fitted.tensors[f"{prefix}b"]
            for fitted, prefix in (
                (fused, tensor_prefix(entry.parts, index, 0)),
                (alone, tensor_prefix(single.parts, 0, 0)),
            )
        ]
        assert_close(*found)
        # Errors on rows x, written out as |e x|^2.
        for total, part in ((lost, weight[rows] - found[0]), (whole, weight[rows])):
            total.append((part @ Rows.drawn().new.T).square().sum())
        start += size
    assert fused.loss == pytest.approx(float(sum(lost) / sum(whole)))
