"""Layers that put out far more than they read: K^T W, condensed, in place of moments S."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.blockwise.sensitivity import BackwardWalk, Sensitivity
from tcompress.conversion.converter import convert
from tcompress.errors import FitError
from tcompress.fitting.workdir import FitWorkplace
from tcompress.linalg.fits import curved_loss
from tcompress.linalg.moments import (
    LARGE,
    condensed_weight,
    fit_condensed,
    fit_lowrank,
    product_with,
    ridge_level,
    with_ridge,
)
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning import costs
from tcompress.planning.planner import make_plan
from tcompress.search import candidates
from tcompress.search.candidates import condensed_layers, left_out, offered_in
from tcompress.structures import Target
from tests.support.conversions import calibration

WAYS: dict[str, dict[str, Any]] = {
    "svd": {"method": {"name": "svd"}, "target": 0.4},
    "width": {"method": {"name": "width"}, "target": 0.5},
    "both": {"method": {"name": "auto", "offer": ["svd", "width"]}, "target": 0.4},
    "bits": {"method": {"name": "svd"}, "target": 0.5, "bits": 4},
}
CPU = torch.device("cpu")


def _moments(width: int, generator: torch.Generator) -> torch.Tensor:
    rows = torch.randn(3 * width, width, dtype=torch.float64, generator=generator)
    rows *= torch.logspace(0, -1.5, width, dtype=torch.float64)
    return rows.mT @ rows / len(rows)


@pytest.mark.parametrize(("inputs", "same"), [(40, True), (40, False), (LARGE + 8, False)])
def test_predicts_and_fits_as_moments_of_outputs_do(inputs: int, same: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = 2 * inputs + 3
    weight = torch.randn(outputs, inputs, dtype=torch.float64, generator=generator)
    gram, measured = _moments(inputs, generator), _moments(outputs, generator)
    gram = with_ridge(gram, 0.1 * gram.diagonal().mean())
    level = ridge_level(measured, 0.05)
    curvature = with_ridge(measured, level)
    small = condensed_weight(weight.mT @ measured @ weight, level, weight)
    assert torch.allclose(small.mT @ small, weight.mT @ curvature @ weight, rtol=1e-6, atol=1e-4)

    whole = Target.of_weight(weight, gram, curvature=curvature)
    condensed = Target(None, gram, dense_weight=weight, condensed=small)
    spectra = whole.spectrum, condensed.spectrum
    assert torch.allclose(*spectra, rtol=1e-4, atol=1e-5 * float(spectra[0][0]))

    drift = torch.randn(gram.shape, dtype=torch.float64, generator=generator) / inputs**0.5
    cross = None if same else gram + 0.02 * gram.diagonal().mean() * drift
    product = weight @ (gram if cross is None else cross)
    constant = float((curvature @ weight).mul(product).sum())
    for rank in (inputs // 8, inputs // 2):
        target = None if same else product
        fits = [
            fit_lowrank(target, gram, rank, curvature, weight),
            fit_condensed(small.float(), cross, gram, rank, weight),
        ]
        lost = [float(curved_loss(a @ b, product, gram, curvature)) for a, b in fits]
        assert lost[1] == pytest.approx(lost[0], abs=1e-6 * constant)


def test_no_channels_that_are_left_are_no_error() -> None:
    cross, weight = torch.zeros(LARGE + 1, 0).double(), torch.ones(LARGE + 1, LARGE + 1)
    assert product_with(cross, weight).shape == (LARGE + 1, 0)


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Condense layers as small as those of tiny models."""
    monkeypatch.setattr(candidates, "LARGE", 8)


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize(
    ("family", "changes", "roles"),
    [
        ("llama", WAYS["svd"], {"gate", "up"}),
        ("llama", WAYS["both"], {"gate", "up"}),
        ("llama", WAYS["width"], {"gate", "up"}),
        ("bert", WAYS["svd"], {"up"}),
        ("phi3", WAYS["svd"], set()),  # one layer for both
        ("llama", {"method": {"name": "lprod", "p": 4}, "target": 0.4}, set()),
        ("llama", {"method": {"name": "auto"}, "target": 0.4}, set()),  # slices are on offer
        ("llama", {**WAYS["svd"], "layers": [{"match": "gate", "method": {"name": "tt"}}]}, {"up"}),
        ("llama", {**WAYS["svd"], "keep_neurons": 0.5}, set()),  # moments of those that stay
        ("llama", {**WAYS["svd"], "layers": [{"match": "gate", "residual_rank": 2}]}, {"up"}),
    ],
)
def test_which_layers(
    sources: Callable[[str], SourceModel], family: str, changes: dict[str, Any], roles: set[str]
) -> None:
    source, recipe = sources(family), Convert.model_validate(changes)
    plan = make_plan(recipe, source)
    names = condensed_layers(recipe, plan, source)
    assert {entry.role for entry in plan.layers if entry.name in names} == roles


def test_slices_are_left_out_of_wide_models_with_data(
    sources: Callable[[str], SourceModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sources("llama")
    auto = {"method": {"name": "auto"}, "target": 0.4}
    free = Convert.model_validate({**auto, "calibration": {"source": "none"}})
    recipe = Convert.model_validate(auto)
    slices = Convert.model_validate({**auto, "method": {"name": "auto", "offer": ["lprod"]}})
    assert [*offered_in(recipe, source, 0.25)] == ["svd", "lprod", "width"]
    assert not left_out(recipe, source)
    monkeypatch.setattr(candidates, "WIDEST", 8)
    assert [*offered_in(recipe, source, 0.25)] == ["svd", "width"]
    assert [*offered_in(free, source, 0.25)] == ["svd", "lprod", "width"]
    assert [*offered_in(slices, source, 0.25)] == ["lprod"]
    assert left_out(recipe, source).startswith("note: `auto` leaves out `lprod`: a layer has more")
    assert left_out(recipe, source).endswith("`--offer svd,lprod,width` takes all in")
    svd = Convert.model_validate({"method": {"name": "svd"}, "target": 0.4})
    assert not any(left_out(other, source) for other in (free, slices, svd))


def test_gradients_that_a_layer_alone_sends_back(
    sources: Callable[[str], SourceModel], tmp_path: Path
) -> None:
    """Of two layers that read one tensor, each has its own."""
    source, data = sources("llama"), calibration("llama")
    sampler = sampler_of(source)
    names = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
    measured = list[dict[str, Sensitivity]]()
    for condensed in ([], names):
        walk = BackwardWalk(source, data.batches, sampler, tmp_path, CPU, condensed)
        _, sums = next(walk.run())
        measured.append(sums)
    for name in names:
        whole, small = (sums[name] for sums in measured)
        weight = source.keymap.sources(f"{name}.weight").keys[0]
        matrix = source.store.tensor(weight).double()
        expected = matrix.mT @ whole.curvature.total() @ matrix
        assert torch.allclose(small.curvature.total(), expected, rtol=1e-4, atol=1e-12)
        mean = whole.curvature.total().diagonal().mean() / whole.rows
        assert float(small.ridge(0.05)) == pytest.approx(0.05 * float(mean))


def test_sums_of_runs_are_those_of_all_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [[torch.randn(5, size, generator=generator) for size in (3, 7, 3)] for _ in range(2)]
    whole, *parts = (Sensitivity(3, 7, CPU, condensed=True) for _ in range(3))
    for part, (x, gradient, returned) in zip(parts, batches, strict=True):
        for sums in (whole, part):
            sums.add(x, gradient)
            sums.add_returned(returned)
    total = parts[0].merge(parts[1])
    assert torch.allclose(total.curvature.total(), whole.curvature.total())
    assert float(total.ridge(0.1)) == pytest.approx(float(whole.ridge(0.1)))


def test_weights_of_low_rank_have_moments_that_are_singular() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right, back = (
        torch.randn(shape, generator=generator) for shape in ((160, 20), (20, 80), (4000, 160))
    )
    weight = (left @ right).double()
    back[:, 0] *= 300
    moment = torch.zeros(80, 80).double()
    for rows in (back.double() @ weight).float().split(1000):
        moment += rows.T @ rows
    small = condensed_weight(moment / 4000, torch.tensor(0.05), weight)
    expected = moment / 4000 + 0.05 * weight.mT @ weight
    assert torch.allclose(small.mT @ small, expected, atol=1e-6 * float(expected.diagonal().max()))
    with pytest.raises(FitError, match="NaN or infinity"):
        condensed_weight(moment * torch.nan, torch.tensor(0.05), weight)


@pytest.mark.parametrize("scale", [1e-23, 1e20])
def test_ridges_of_extreme_gradients(scale: float) -> None:
    sums = Sensitivity(3, 7, CPU, condensed=True)
    sums.add(torch.ones(5, 3), torch.full((5, 7), scale))
    assert float(sums.ridge(0.1)) == pytest.approx(0.1 * scale**2, rel=1e-5)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("way", WAYS)
def test_conversions_are_the_same(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A model comes out alike whichever of both is measured."""
    recipe = Convert.model_validate(WAYS[way])
    manifests, kept = [], list[int]()
    keep = FitWorkplace.keep_moments

    def counted(workdir: FitWorkplace, kind: str, block: str, moments: Any) -> None:
        kept[-1] += len(moments) * (kind == "condensed")
        keep(workdir, kind, block, moments)

    monkeypatch.setattr(FitWorkplace, "keep_moments", counted)
    for name in ("SMALLEST", "GROUP"):  # of tensors that are stored in few bits
        monkeypatch.setattr(costs, name, 4)
    for limit in (LARGE, 8):
        monkeypatch.setattr(candidates, "LARGE", limit)
        kept.append(0)
        data = calibration("llama")
        done = convert(str(tiny("llama")), recipe, tmp_path / str(limit), data=data)
        manifests.append(done.manifest)
    assert kept == [0, 0 if way == "width" else 4]  # plain matrices are fitted by inputs alone
    first, second = (manifest.plan for manifest in manifests)
    assert first.parameters == second.parameters
    errors = [manifest.fit for manifest in manifests]
    assert errors[0].keys() == errors[1].keys()
    for name, of_layer in errors[0].items():
        assert errors[1][name] == pytest.approx(of_layer, rel=1e-4)
