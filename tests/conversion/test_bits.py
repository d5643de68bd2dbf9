"""Fewer bits for what is stored: rounding, packed files, what reads and writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from tcompress.artifact.manifest import read_manifest
from tcompress.artifact.reader import Artifact, verify_files
from tcompress.conversion.converter import convert
from tcompress.conversion.estimate import estimate
from tcompress.errors import ArtifactError, PlanError, SourceError
from tcompress.exports.dense import export_dense
from tcompress.inspection import inspect_model
from tcompress.linalg.rounding import (
    Rounding,
    dequantize,
    matrix_shape,
    pack,
    pack_codes,
    quantize,
    unpack,
    unpack_codes,
)
from tcompress.models import SourceModel
from tcompress.models.store import WeightStore
from tcompress.options import Convert, Finetune
from tcompress.planning import costs
from tcompress.planning.costs import disk_bytes
from tcompress.planning.planner import make_plan
from tcompress.reporting.model_report import report_of
from tcompress.training.rounded import RoundedWeights
from tests.support.cli import completed, run
from tests.support.conversions import calibration, load_whole, outputs
from tests.support.converted import converted
from tests.support.evaluation import encoder
from tests.support.model_folders import save_tokenizer
from tests.support.numerics import quick
from tests.support.tiny import TINY, build
from tests.support.training import small, texts, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _round_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "SMALLEST", 256)


def _recipe(**changes: Any) -> Convert:
    return Convert.model_validate({"calibration": {"source": "none"}, **changes})


def _rounded_keys(folder: Path) -> dict[str, Rounding]:
    store = WeightStore.open(folder)
    found = {key: store.rounding(key) for key in _numbers(folder)}
    return {key: rounding for key, rounding in found.items() if rounding is not None}


def _numbers(folder: Path) -> dict[str, Tensor]:
    store = WeightStore.open(folder)
    return {key: store.tensor(key) for key in store.keys()}  # noqa: SIM118 - no mapping


# ---------------------------------------------------------------- numbers
@quick
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(2, 8),
    st.one_of(st.none(), st.integers(3, 50)),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_a_packed_tensor_says_what_it_holds(
    shape: list[int], bits: int, group: int | None, dtype: torch.dtype
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    rounding = Rounding(bits, group)
    packed = pack(weight, rounding)
    assert (packed.dtype, len(packed)) == (torch.uint8, rounding.nbytes(shape))
    found = unpack(packed)
    assert (found.dtype, found.shape) == (dtype, weight.shape)
    codes, scales = quantize(weight, bits, group)
    exact = dequantize(codes, scales, group).reshape(shape).to(dtype)
    assert torch.equal(found, exact)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.51), (4, 1.01), (3, 1.01)])
def test_numbers_are_rounded_to_the_nearest_point(bits: int, most: float) -> None:
    """Within half a step, but for the largest, which may be cut off where that loses less."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(weight, bits, 32)
    assert int(codes.min()) >= -(2 ** (bits - 1))
    assert int(codes.max()) < 2 ** (bits - 1)
    steps = scales.float().abs().repeat_interleave(32, 1)
    wrong = (dequantize(codes, scales, 32) - weight).abs() / steps
    inside = (codes > -(2 ** (bits - 1))) & (codes < 2 ** (bits - 1) - 1)
    assert float(wrong[inside].max()) <= 0.5 + 1e-3
    assert float(wrong.max()) <= most * 2 ** (bits > 4 or 1)


def test_rounding_again_changes_nothing() -> None:
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
    for rounding in (Rounding(8), Rounding(4, 32), Rounding(3, 32)):
        once = pack(weight, rounding)
        assert torch.equal(pack(unpack(once), rounding), once)


def test_extreme_tensors_keep_their_zeros_and_size() -> None:
    weight = torch.zeros(4, 64)
    weight[1] = 1e-30
    weight[2, :32], weight[3] = 3e4, -torch.arange(64.0)
    for rounding in (Rounding(8), Rounding(4, 32)):
        found = unpack(pack(weight, rounding))
        assert torch.equal(found[0], weight[0])
        assert torch.equal(found[2, 32:], weight[2, 32:])
        torch.testing.assert_close(found, weight, rtol=0.01, atol=4.5)


def test_codes_lie_as_onnx_has_them() -> None:
    """Four bits: the first of two codes in the lower half of a byte, with an offset of eight."""
    codes = torch.tensor([-8, 7, 0, 1], dtype=torch.int8)
    assert pack_codes(codes, 4).tolist() == [0xF0, 0x98]
    assert torch.equal(unpack_codes(pack_codes(codes, 4), 4, 4), codes)


def test_rows_are_as_wide_as_a_group_at_least() -> None:
    assert matrix_shape((5, 64)) == (5, 64)
    assert matrix_shape((3, 4, 40)) == (12, 40)
    assert matrix_shape((16, 3, 4, 4)) == (16, 48)  # kernels of a convolution
    assert matrix_shape((2, 5)) == (1, 10)


# ---------------------------------------------------------------- files and models
def _saved_again(kind: Any, folder: Path, again: Path) -> nn.Module:
    """Load a model, which is whole, and save it as an ordinary checkpoint of the same numbers."""
    model = load_whole(kind, folder)
    model.save_pretrained(again)
    other = kind.from_pretrained(again)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    return model


TABLELESS = ("vit", "deit", "clip_vision_model", "tcompress_grid", "tcompress_grid-series")


@pytest.mark.often("bert", "gpt2", "t5", "mixtral", "vit")
@pytest.mark.parametrize("family", TINY)
def test_every_family_loads_what_was_rounded(family: str, tmp_path: Path) -> None:
    dense = build(family)
    dense.save_pretrained(tmp_path / "dense")
    source = SourceModel.open(str(tmp_path / "dense"))
    recipe = _recipe(bits=8, embedding_bits=None if family in TABLELESS else 4)
    plan = make_plan(recipe, source)
    done = convert(source, recipe, tmp_path / "small")
    store, before = WeightStore.open(done.folder), WeightStore.open(tmp_path / "dense")
    assert store.total_bytes == disk_bytes(source, plan, None)
    assert store.total_bytes == estimate(plan, source, recipe).disk_bytes
    assert store.total_bytes < 0.4 * before.total_bytes
    rounded = _rounded_keys(done.folder)
    assert {rounding.bits for rounding in rounded.values()} == (
        {8} if family in TABLELESS else {8, 4}
    )
    for key, value in _numbers(tmp_path / "dense").items():
        expected = unpack(pack(value, rounded[key])) if key in rounded else value
        assert torch.equal(store.tensor(key), expected)
    _saved_again(type(dense), done.folder, tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())


METHODS: dict[str, dict[str, Any]] = {
    "svd": {"method": {"name": "svd"}, "target": 0.5},
    "lprod": {},
    "width": {"method": {"name": "width"}, "target": 0.5},
    "shared": {"method": {"name": "tucker", "share": "model"}, "target": 0.5},
    "table": {"embeddings": {"method": {"name": "svd"}, "target": 0.5}},
    "experts": {"method": {"name": "svd"}, "target": 0.5},
    "attention": {"method": None, "attention": {"name": "hot"}},
}
FAMILY_OF = {"experts": "mixtral", "attention": "vit"}


@pytest.mark.parametrize("method", METHODS)
def test_factors_are_rounded_too(method: str, tmp_path: Path) -> None:
    family = FAMILY_OF.get(method, "bert")
    done = converted(family, tmp_path, bits=4, **METHODS[method])
    artifact = Artifact.open(done.folder)
    assert artifact.storage == done.manifest.plan.storage
    factors = [key for key in _rounded_keys(done.folder) if ".tc_" in key]
    assert factors
    source = SourceModel.open(str(tmp_path / family))
    assert artifact.store.total_bytes == disk_bytes(source, done.manifest.plan, None)
    kind: Any = type(build(family))
    model = _saved_again(kind, done.folder, tmp_path / "again")
    assert Artifact.open(tmp_path / "again").storage is None
    if artifact.attention:
        return
    plain = kind.from_pretrained(export_dense(done.folder, tmp_path / "plain"))
    same = [outputs(item, TINY[family].inputs(2, 8, 50)) for item in (plain, model)]
    torch.testing.assert_close(*same, rtol=0, atol=1e-4)


def test_nothing_loads_what_it_does_not_understand(tmp_path: Path) -> None:
    """Eight bits have as many bytes as numbers; no tensor may have the shape of the dense one."""
    done = converted("bert", tmp_path, method=None, bits=8)
    stored = load_file(done.folder / "model.safetensors")
    packed = {key for key, tensor in stored.items() if tensor.dtype == torch.uint8}
    assert packed == _rounded_keys(done.folder).keys()
    assert all(stored[key].ndim == 1 for key in packed)
    broken = {key: tensor[:-1] if key in packed else tensor for key, tensor in stored.items()}
    with pytest.raises(SourceError, match="its size is not that of its header"):
        unpack(next(broken[key] for key in packed))
    section = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert section["format_version"] == 5
    assert section["storage"]["weights"]["bits"] == 8


def test_what_is_rounded_alone_is_a_source_like_any(tmp_path: Path) -> None:
    first = converted("bert", tmp_path, method=None, bits=8).folder
    source = SourceModel.open(str(first))
    assert "quantization_config" not in source.settings
    done = convert(source, _recipe(method={"name": "svd"}, target=0.5), tmp_path / "second")
    assert not _rounded_keys(done.folder)
    assert done.manifest.source.bytes == WeightStore.open(first).total_bytes
    kind: Any = type(build("bert"))
    dense, model = kind.from_pretrained(first), kind.from_pretrained(done.folder)
    names = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(dense.get_parameter(names), model.get_parameter(names))


def test_reports_count_what_is_in_the_files(tmp_path: Path) -> None:
    done = converted("bert", tmp_path, bits=4, embedding_bits=8)
    report = report_of(done.folder)
    layer = report.layers[0]
    assert layer.bytes is not None
    assert layer.bytes.now < 0.4 * 4 * layer.parameters.now
    assert layer.bytes.dense == 4 * layer.parameters.dense
    assert str(report.storage) == "4 bits in groups of 32, word embedding 8 bits"
    assert report.bytes_on_disk.now < 0.3 * report.bytes_on_disk.dense
    assert "stored in 4 bits in groups of 32" in (done.folder / "README.md").read_text()
    assert inspect_model(str(done.folder)).storage == str(report.storage)
    assert verify_files(done.folder).files
    (done.folder / "tcompress.json").unlink()
    again = report_of(done.folder)
    assert (again.storage, again.bytes_on_disk.now) == (report.storage, report.bytes_on_disk.now)


def test_healing_rounds_again(tmp_path: Path) -> None:
    chosen = _recipe(method={"name": "svd"}, target=0.5, bits=4)
    rounded = convert(str(encoder(tmp_path / "bert")), chosen, tmp_path / "rounded").folder
    save_tokenizer(rounded)
    done = train(rounded, tmp_path / "healed", data=texts(tmp_path), steps=4, learning_rate=1e-2)
    assert _rounded_keys(done.folder) == _rounded_keys(rounded)
    manifest = read_manifest(done.folder)
    assert manifest is not None
    assert Artifact.open(done.folder).storage == manifest.plan.storage
    assert verify_files(done.folder).files
    assert WeightStore.open(rounded).total_bytes == WeightStore.open(done.folder).total_bytes


def test_training_sees_weights_as_they_will_be_stored(tmp_path: Path) -> None:
    """What was validated last is what is written, and so what the next run begins with."""
    rounded = small("llama", tmp_path, method=None, bits=4)
    given = {"data": texts(tmp_path), "task": "causal-lm", "objectives": {"task": 1.0}}
    first = train(rounded, tmp_path / "first", steps=6, learning_rate=3e-3, **given)
    assert first.facts.best_step > 0
    one, two = map(_numbers, (rounded, first.folder))
    assert any(not torch.equal(one[key], two[key]) for key in _rounded_keys(rounded))
    second = train(first.folder, tmp_path / "second", steps=1, **given)
    assert second.facts.curve[0].validation == pytest.approx(first.facts.best, rel=1e-6)


def test_healing_begins_with_whole_weights_and_writes_few_bits(tmp_path: Path) -> None:
    """Of what was validated: the next run begins with the same number."""
    table = {"method": {"name": "svd"}, "target": 0.5}  # has no moments to be rounded by
    options = {"method": {"name": "svd"}, "target": 0.5, "embeddings": table}
    whole = small("llama", tmp_path, **options)
    given = {"data": texts(tmp_path), "task": "causal-lm", "objectives": {"task": 1.0}}
    options = {**given, "train": "blocks"}
    first = train(whole, tmp_path / "first", steps=6, bits=4, learning_rate=3e-3, **options)
    widths = {WeightStore.open(first.folder).rounding(key) for key in _rounded_keys(first.folder)}
    assert widths == {Rounding.usual(4)}
    assert any("tc_a" in key for key in _rounded_keys(first.folder))
    assert any("embed" in key for key in _rounded_keys(first.folder))
    manifest = read_manifest(first.folder)
    assert manifest is not None
    assert str(manifest.plan.storage) == str(Artifact.open(first.folder).storage) != "None"
    second = train(first.folder, tmp_path / "second", steps=1, **options)
    assert second.facts.curve[0].validation == pytest.approx(first.facts.best, rel=1e-6)
    with pytest.raises(ValueError, match="goes with `bits`"):
        Finetune(embedding_bits=4)


def test_gradients_are_those_at_the_rounded_weights() -> None:
    whole = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    parameter, x = nn.Parameter(whole.clone()), torch.eye(64)
    weights = RoundedWeights({"w": Rounding(4, 32)})
    for usual in (True, False):
        parameter.grad = None
        with weights.applied({"w": parameter}, quick=usual):
            seen = parameter.detach().clone()
            (x @ parameter).square().sum().backward()
        assert torch.equal(parameter, whole)
        assert 0 < float((seen - whole).norm() / whole.norm()) < 0.1
        torch.testing.assert_close(parameter.grad, 2 * seen)
    assert torch.equal(seen, unpack(pack(whole, Rounding(4, 32))))


def test_devices_load_it_and_the_disk_cannot_keep_it(tmp_path: Path) -> None:
    folder = converted("llama", tmp_path, method=None, bits=4).folder
    kind: Any = type(build("llama"))
    whole = kind.from_pretrained(folder)
    for where in ("auto", {"": "cpu"}):
        placed = kind.from_pretrained(folder, device_map=where)
        assert all(map(torch.equal, whole.state_dict().values(), placed.state_dict().values()))
    apart = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ArtifactError, match="cannot stay on the disk"):
        kind.from_pretrained(folder, device_map=apart, offload_folder=str(tmp_path / "offload"))


# ---------------------------------------------------------------- budgets
@pytest.fixture(scope="module")
def source(tiny: Callable[[str], Path]) -> SourceModel:
    return SourceModel.open(str(tiny("bert")))


@pytest.mark.parametrize("changes", [{}, {"bits": 8}], ids=["float", "eight"])
def test_bytes_choose_the_embedding_too(
    changes: dict[str, Any], source: SourceModel, tmp_path: Path
) -> None:
    whole = source.store.total_bytes
    limit = round((0.35 if changes else 0.75) * whole)
    recipe = Convert.model_validate({"method": {"name": "svd"}, "target_bytes": limit, **changes})
    assert recipe.chooses_table
    done = convert(source, recipe, tmp_path / "small", data=calibration("bert"))
    plan = done.manifest.plan
    assert plan.storage is not None
    assert plan.storage.embeddings is not None
    assert WeightStore.open(done.folder).total_bytes <= limit
    assert (plan.storage.weights is None) == (not changes)


def test_a_width_that_is_given_is_not_chosen(source: SourceModel) -> None:
    given = {"method": {"name": "svd"}, "target_bytes": "1MB"}
    for fixed in ({"embedding_bits": 8}, {"embedding_bits": "none"}, {"allocation": "uniform"}):
        assert not Convert.model_validate({**given, **fixed}).chooses_table


def test_models_without_words_have_no_bits_for_them(tiny: Callable[[str], Path]) -> None:
    source = SourceModel.open(str(tiny("vit")))
    limit = round(0.8 * source.store.total_bytes)
    recipe = Convert.model_validate({"method": {"name": "svd"}, "target_bytes": limit})
    assert make_plan(recipe, source).storage is None
    with pytest.raises(PlanError, match="has none"):
        make_plan(_recipe(embedding_bits=4), source)


def test_bytes_out_of_reach_name_what_each_option_gives(source: SourceModel) -> None:
    recipe = _recipe(method={"name": "svd"}, target_bytes=2000)
    with pytest.raises(PlanError, match=r"smallest possible is 0\.\d\d MB") as caught:
        make_plan(recipe, source)
    hint = caught.value.hint or ""
    for option in ("--embedding-bits 4", "--bits 8", "--embeddings svd", "--dtype bfloat16"):
        assert f"`{option}" in hint


# ---------------------------------------------------------------- options
def test_the_command_needs_no_method(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    output = tmp_path / "out"
    shown = completed("convert", str(tiny("bert")), "--bits", "4", "-o", str(output))
    assert "4 bits in groups of 32" in shown.out
    manifest = read_manifest(output)
    assert manifest is not None
    assert manifest.plan.only_rounded
    again = run("convert", str(tiny("bert")), "--bits", "5", "-o", str(output))
    assert again.code == 2


def test_the_size_of_groups_and_the_precision_of_loaded_weights_are_chosen(tmp_path: Path) -> None:
    options = {"method": None, "bits": 4, "group_size": 16, "dtype": "bfloat16"}
    done = converted("llama", tmp_path, **options)
    assert set(_rounded_keys(done.folder).values()) == {Rounding(4, 16)}
    assert {tensor.dtype for tensor in _numbers(done.folder).values()} == {torch.bfloat16}
    kind: Any = type(build("llama"))
    assert kind.from_pretrained(done.folder, dtype="auto").dtype == torch.bfloat16
