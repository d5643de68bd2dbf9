"""Sizes by predicted loss: a backward pass, a budget, and what becomes of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import AutoModelForMaskedLM

from tcompress.artifact.reader import Artifact
from tcompress.blockwise.sensitivity import BackwardWalk
from tcompress.conversion.converter import Converted, convert
from tcompress.data.calibration import CalibrationData
from tcompress.fitting.block_rewrite import BlockRewriter
from tcompress.fitting.workdir import FitWorkplace
from tcompress.options import Convert
from tcompress.search import corrections, predictions
from tests.support.conversions import calibration, make, outputs
from tests.support.depth import divergence
from tests.support.interrupted import Interrupt, contents, partial_folder
from tests.support.tiny import TINY, build

SVD = {"method": {"name": "svd"}, "target": 0.4}
MIXED = {"method": {"name": "lprod", "p": 8, "transform": "dct"}, "target": 0.5}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def source(tiny: Callable[[str], Path]) -> Path:
    return tiny("bert")


def _convert(source: Path, output: Path, changes: dict[str, Any], **options: Any) -> Converted:
    recipe = Convert.model_validate(changes)
    return convert(str(source), recipe, output, data=calibration("bert"), **options)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Converted]:
    """A conversion that nothing interrupts, made once."""
    return cache(lambda: _convert(source, tmp_path_factory.mktemp("whole") / "out", SVD))


def test_what_asks_for_a_backward_pass() -> None:
    none = {"calibration": {"source": "none"}}
    asked = {"calibration": {"source": "builtin", "output_moments": True}}
    rows: list[tuple[dict[str, Any], bool, bool]] = [
        (SVD, True, True),
        ({**SVD, **none}, False, False),
        ({**SVD, "allocation": "uniform"}, False, False),
        ({**SVD, "allocation": "uniform", **asked}, True, False),
        ({"method": {"name": "tucker", "share": "none"}, "target": 0.3}, True, True),
        ({"method": {"name": "tucker"}, "target": 0.3}, True, False),
        ({"method": {"name": "lprod", "p": 4}}, False, False),
        ({"method": {"name": "lprod", "p": 4}, **asked}, True, False),
    ]
    for changes, first, second in rows:
        chosen = Convert.model_validate(changes)
        assert (chosen.measures_sensitivity, chosen.by_loss) == (first, second), changes


@pytest.mark.often("svd")
@pytest.mark.parametrize("changes", [SVD, MIXED], ids=["svd", "sum"])
def test_a_budget_is_shared_unevenly_and_loses_less_than_equal_shares(
    changes: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    """Loss is what the model's outputs, for which the sizes were chosen, move by."""
    dense, batches = build("bert"), [TINY["bert"].inputs(8, 8, seed) for seed in range(2)]
    moved = []
    for allocation in ("uniform", "loss"):
        folder = tmp_path / allocation
        plan = _convert(source, folder, {**changes, "allocation": allocation}).manifest.plan
        small = AutoModelForMaskedLM.from_pretrained(folder).eval()
        moved.append(divergence(dense, small, batches))
    assert moved[1] < moved[0]
    assert 0.93 * changes["target"] < plan.kept <= changes["target"]
    assert len(plan.layers) == 12  # none stays dense
    assert len({round(entry.parameters / entry.dense_parameters, 2) for entry in plan.layers}) > 3
    assert Artifact.open(folder).layers == plan.layers


@pytest.mark.often("phi3")
@pytest.mark.parametrize("family", ["phi3", "mixtral", "t5", "whisper", "deberta-v2"])
def test_families(family: str, tmp_path: Path) -> None:
    """Fused projections, experts, decoders that read encoders, sounds, layers that run twice."""
    made = make(family, tmp_path, "svd", aware=True, target=0.5, method={"name": "svd"})
    layers = made.plan.layers
    sizes = [(entry.parameters / entry.dense_parameters, entry.experts) for entry in layers]
    assert len({round(size, 2) for size, experts in sizes if experts is None}) > 1
    assert all(abs(size - 0.5) < 0.1 for size, experts in sizes if experts)  # no budget sizes them
    assert all(bool(item.isfinite().all()) for item in outputs(made.load(), made.inputs()))


def test_an_interrupted_run_goes_on_with_the_sizes_it_had(
    source: Path, whole: Callable[[], Converted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    passes = 2 * len({entry.block for entry in whole().manifest.plan.layers})
    with pytest.raises(KeyboardInterrupt):
        _convert(source, output, SVD, progress=Interrupt(passes + 3))
    assert not list((partial_folder(output) / "scratch").iterdir())

    def walk(*_: object) -> None:
        raise AssertionError("the backward pass was made again")

    monkeypatch.setattr(predictions, "BackwardWalk", walk)
    _convert(source, output, SVD)
    assert contents(output) == contents(whole().folder)


@pytest.mark.slow
def test_a_backward_pass_that_was_cut_short_is_made_again(
    source: Path, whole: Callable[[], Converted], tmp_path: Path
) -> None:
    for after in (1, 3):
        output = tmp_path / f"out{after}"
        with pytest.raises(KeyboardInterrupt):
            _convert(source, output, SVD, progress=Interrupt(after))
        _convert(source, output, SVD)
        assert contents(output) == contents(whole().folder)


def test_a_part_of_little_data_tells_sizes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [TINY["bert"].inputs(1, 4, seed) for seed in range(5)]
    data = CalibrationData(batches, [4], "tiny", 5, 20, "tiny")
    walked: list[int] = []
    tried: list[int] = []

    class Walk(BackwardWalk):
        def __post_init__(self) -> None:
            walked.append(len(self.batches))
            super().__post_init__()

    def rewriter(inputs: Any, data: CalibrationData, *others: Any) -> BlockRewriter:
        tried.append(len(data.fitted))
        return BlockRewriter(inputs, data, *others)

    monkeypatch.setattr(predictions, "BackwardWalk", Walk)
    monkeypatch.setattr(corrections, "BlockRewriter", rewriter)

    def batches_for(**changes: Any) -> tuple[int, ...]:
        walked.clear()
        tried.clear()
        inputs_alone = {"source": "builtin", "output_moments": False}
        recipe = Convert.model_validate({**SVD, "calibration": inputs_alone, **changes})
        convert(str(source), recipe, tmp_path / "out", data=data, force=True)
        [count], counts = walked, {*tried}
        return count, *counts

    tucker = {"name": "tucker", "share": "none"}
    assert batches_for() == (1, 1)
    assert batches_for(calibration={"source": "builtin"}) == (4, 1)  # fits read what is measured
    assert batches_for(method=tucker) == (4,)  # none is tried
    assert batches_for(method={"name": "width"}) == (4, 4)
    # An error is held to what was measured.
    assert batches_for(target=None, max_error=0.3) == (4, 4)
    assert batches_for(layers=[{"match": "query", "method": tucker}]) == (4, 4)
    data = replace(data, tokens=4 * 64)  # the widest layers have 64 inputs
    assert batches_for() == (4, 4)
    data = replace(data, batches=batches[:3], holdout=[2], samples=3, tokens=12)
    assert batches_for() == (1, 1)


def test_several_gradients_of_each_sample_tell_more(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens count once, however often they are looked at."""
    kept: dict[str, dict[str, Tensor]] = {}
    keep = FitWorkplace.keep_moments

    def keep_moments(
        self: FitWorkplace, kind: str, block: str, moments: Mapping[str, Tensor]
    ) -> None:
        kept.setdefault(kind, {}).update(moments)
        keep(self, kind, block, moments)

    monkeypatch.setattr(FitWorkplace, "keep_moments", keep_moments)

    def measured(probes: int) -> tuple[dict[str, Tensor], set[str]]:
        kept.clear()
        changes = {**SVD, "calibration": {"source": "builtin", "probes": probes}}
        _convert(source, tmp_path / "out", changes, force=True)
        return kept["curvature"], {*kept["tokens"]}

    one, four, many = (measured(probes) for probes in (1, 4, 64))
    assert one[1] == four[1] == many[1]
    traces = [sum(float(it.trace()) for it in item[0].values()) for item in (one, many)]
    assert traces[0] == pytest.approx(traces[1], rel=0.2)

    def missed(curvature: dict[str, Tensor]) -> float:
        return sum(float((curvature[key] - exact).norm()) for key, exact in many[0].items())

    assert missed(four[0]) < 0.7 * missed(one[0])


def test_layers_with_rules_are_not_sized(source: Path, tmp_path: Path) -> None:
    changes = {
        **SVD,
        "keep": ["re:layer.0.*query"],
        "layers": [{"match": "value", "target": 0.7}, {"match": "key", "method": {"name": "svd"}}],
    }
    plan = _convert(source, tmp_path / "out", changes).manifest.plan
    shares = {entry.name: entry.parameters / entry.dense_parameters for entry in plan.layers}
    assert all(0.6 < share <= 0.7 for name, share in shares.items() if "value" in name)
    assert all(0.3 < share <= 0.4 for name, share in shares.items() if "key" in name)
    assert not any("layer.0" in name and "query" in name for name in shares)


@pytest.mark.often("method0")
@pytest.mark.parametrize("method", [{"name": "lprod", "p": 4, "transform": "dct"}, SVD["method"]])
def test_output_moments_change_fits_of_equal_sizes(
    method: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    target = {"target": 0.4} if method["name"] == "svd" else {}
    written = []
    for output_moments in (False, True):
        data = {"source": "builtin", "output_moments": output_moments}
        changes = {"method": method, "allocation": "uniform", "calibration": data, **target}
        folder = tmp_path / f"{output_moments}"
        plan = _convert(source, folder, changes).manifest.plan
        written.append((plan, contents(folder)["model.safetensors"]))
    assert written[0][0] == written[1][0]
    assert written[0][1] != written[1][1]


@pytest.mark.often("tt")
@pytest.mark.parametrize("name", ["tt", "qtt"])
def test_tensor_trains_take_a_budget(name: str, source: Path, tmp_path: Path) -> None:
    plan = _convert(source, tmp_path / "out", {"method": {"name": name}, "target": 0.4})
    assert 0.3 < plan.manifest.plan.kept <= 0.4
    ranks = {entry.parts[0].terms[0].ranks for entry in plan.manifest.plan.layers}  # type: ignore[attr-defined]
    assert len(ranks) > 2
