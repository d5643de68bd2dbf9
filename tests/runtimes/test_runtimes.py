"""Models in ONNX Runtime beside PyTorch: the same numbers, and times in turn."""

from pathlib import Path

import pytest

import tcompress
from tcompress.artifact.manifest import read_manifest
from tcompress.errors import InputError
from tests.support.cli import run
from tests.support.converted import converted
from tests.support.evaluation import encoder, pairs_file

pytest.importorskip("onnxruntime")


def test_numbers_of_a_file_are_those_of_the_model(tmp_path: Path) -> None:
    pairs = str(pairs_file(tmp_path / "pairs.jsonl", 24))
    model = tcompress.export_onnx(encoder(tmp_path / "bert"), tmp_path / "files").folder
    runtime = ["torch", "onnx"]
    torch, onnx = tcompress.evaluate([model], "sts", pairs, runtime=runtime, bootstrap=0)
    assert onnx.name == f"{model} (onnx)"
    for one, other in zip(torch.metrics, onnx.metrics, strict=False):
        assert one.name == other.name
        assert other.value == pytest.approx(one.value, abs=1e-5)
    assert onnx.metrics[0].protocol["runtime"] == "onnx"
    assert onnx.metrics[-1].name == "agreement"
    assert onnx.metrics[-1].value == pytest.approx(1, abs=1e-5)
    manifest = read_manifest(model)
    assert [item.protocol.get("runtime") for item in manifest.metrics] == [None, None]
    (file,) = manifest.exports
    assert [item.name for item in file.metrics] == ["spearman", "pearson", "agreement"]


@pytest.mark.slow
def test_times_stand_beside_both_dense_models(tmp_path: Path) -> None:
    folder = converted("bert", tmp_path).folder
    sizes = {"batch": [2], "length": [4], "repeats": 1}
    (bench,) = tcompress.bench([folder], runtime=["torch", "onnx-int8"], **sizes)
    eager, int8 = bench.speed
    assert (eager.mode, int8.mode) == ("eager", "onnx-int8")
    assert eager.same_runtime_milliseconds is None
    assert int8.same_runtime_milliseconds > 0
    assert int8.weight_bytes is not None
    assert int8.protocol["threads"] == eager.protocol["threads"]
    assert [speed.mode for speed in read_manifest(folder).speed] == ["eager", "onnx-int8"]
    assert not (folder / "onnx").exists()
    assert "onnx-int8 B=2 T=4" in run("report", str(folder)).out


def test_what_has_no_second_runtime_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="in PyTorch alone"):
        tcompress.bench([tmp_path], generate=4, runtime=["onnx"])
