"""ONNX files of whole models: what is in them, what is told of them, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import normalize

from tcompress.artifact.manifest import read_manifest
from tcompress.artifact.reader import check_files, is_converted, open_checked, verify_files
from tcompress.conversion.converter import convert
from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import InputError, WriteError
from tcompress.exports.onnx_folder import ExportedOnnx, RuntimeFiles, export_onnx, proofs_of
from tcompress.exports.onnx_parts import Size
from tcompress.models import SourceModel
from tcompress.options.commands import OnnxFiles
from tcompress.runtimes.sessions import OnnxModel
from tests.support.cli import completed, run
from tests.support.converted import recipe
from tests.support.sentence_folders import MEAN, base, in_old_layout, with_dense
from tests.support.tiny import build

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted sentence encoder with a dense layer after pooling."""
    home = tmp_path_factory.mktemp("onnx")
    source = with_dense(base(home / "model", MEAN, "Dense", "Normalize"))
    half = recipe(method={"name": "svd"}, target=0.5)
    return convert(str(source), half, home / "small").folder


@pytest.fixture(scope="module")
def exported(folder: Path) -> ExportedOnnx:
    return export_onnx(folder, folder.parent / "out", OnnxFiles(int8=True, bits=4))


def test_a_folder_is_what_libraries_look_for(folder: Path, exported: ExportedOnnx) -> None:
    out = exported.folder
    assert sorted(path.name for path in (out / "onnx").iterdir()) == [
        "model.onnx", "model_int8.onnx", "model_q4.onnx",
    ]  # fmt: skip
    before = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert all((out / name).is_file() for name in before)
    for file in exported.files:
        model = OnnxModel.open(out / file.file)
        assert model.inputs == ("input_ids", "attention_mask", "token_type_ids")
        assert model.outputs == ("last_hidden_state", "sentence_embedding")
        axes = [item.shape for item in model.session.get_inputs()]
        assert axes == [["batch_size", "sequence_length"]] * 3


@pytest.mark.smoke
def test_embeddings_are_those_of_the_model(folder: Path, exported: ExportedOnnx) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["a red fox", "the old stone bridge and then it sleeps under one tall tree"]
    inputs = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    model = transformers.AutoModel.from_pretrained(exported.folder)
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    encoder = SentenceEncoder.of(SourceModel.open(str(folder.parent / "model")))
    expected = normalize(encoder.embed(hidden, inputs["attention_mask"])).numpy()
    for file, most in zip(exported.files, (1e-5, 0.1, 0.5), strict=True):
        computed = OnnxModel.open(exported.folder / file.file).run(inputs)
        assert np.abs(computed["sentence_embedding"] - expected).max() < most


def test_what_was_measured_is_recorded(exported: ExportedOnnx) -> None:
    assert tuple(read_manifest(exported.folder).exports) == exported.files
    whole, eight, four = exported.files
    assert (whole.bits, eight.bits, four.bits) == (32, 8, 4)
    assert whole.bytes > eight.bytes > four.bytes
    assert whole.difference < 1e-5
    assert whole.agreement == pytest.approx(1, abs=1e-6)
    assert 1 > eight.agreement > 0.995
    assert eight.agreement > four.agreement > 0.8
    assert not eight.left
    assert not four.left
    for file in exported.files:
        assert file.bytes == (exported.folder / file.file).stat().st_size
        assert file.ratio == pytest.approx(file.baseline_milliseconds / file.milliseconds)
        assert {"onnxruntime", "threads", "instructions"} < file.protocol.keys()
    card = (exported.folder / "README.md").read_text()
    assert card.count("## ONNX files") == 1
    assert "| `onnx/model_int8.onnx` | 8 |" in card
    verify_files(exported.folder)


def test_layers_keep_their_structure_and_their_names(exported: ExportedOnnx) -> None:
    model = onnx.load(exported.folder / "onnx" / "model.onnx")
    prefix = "encoder.layer.0.attention.self.query"
    shapes = {item.name: list(item.dims) for item in model.graph.initializer}
    two = [shapes[f"{prefix}.weight"], shapes[f"{prefix}.weight_1"]]
    assert two[0][0] == two[1][1] == 32
    assert two[0][1] == two[1][0] < 32
    assert f"{prefix}.bias" in shapes
    assert any(node.name == f"/{prefix.replace('.', '/')}/MatMul" for node in model.graph.node)
    text = (exported.folder / "onnx" / "model.onnx").read_bytes()
    assert str(Path(transformers.__file__).parent).encode() not in text  # of stack traces
    assert b".py" not in text


@pytest.mark.slow
def test_the_folder_of_the_model_gets_files_too(tmp_path: Path) -> None:
    """Links in it stay as they are, also those that lead nowhere."""
    source = base(tmp_path / "model", MEAN)
    (source / "mine.txt").write_text("kept")
    (store := tmp_path / "store").mkdir()
    links = {"model.safetensors": "../store/big", "1_Pooling": "../store/1", "gone": "../gone"}
    for name, target in links.items():
        if (source / name).exists():
            (source / name).rename(source / target)
        (source / name).symlink_to(target)
    before = {path.relative_to(source) for path in source.rglob("*")}
    weights = (source / "model.safetensors").read_bytes()
    ran = completed("export", source, "--to", "onnx", "-o", source, "--no-sentence-embedding")
    assert ran.lines[0].startswith("onnx/model.onnx: ")
    assert (source / "mine.txt").read_text() == "kept"
    after = {path.relative_to(source) for path in source.rglob("*")}
    assert {str(path) for path in after - before} == {
        "onnx", "onnx/model.onnx", "tcompress.json", "README.md",
    }  # fmt: skip
    assert not before - after
    assert (source / "model.safetensors").read_bytes() == weights
    assert OnnxModel.open(source / "onnx" / "model.onnx").outputs == ("last_hidden_state",)
    assert {name: str((source / name).readlink()) for name in links} == links
    assert {path.name for path in tmp_path.iterdir()} == {"model", "store"}
    assert [path.name for path in store.iterdir()] == ["big", "1"]
    check_files(source)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_is_cut_off_leaves_nothing(error: BaseException, folder: Path, tmp_path: Path) -> None:
    writes = patch("tcompress.exports.onnx_folder.write_graph", side_effect=error)
    proofs = patch("tcompress.exports.onnx_folder.Proof.of")
    with writes, proofs, pytest.raises((type(error), WriteError)):
        export_onnx(folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_computes_something_else_is_not_published(
    folder: Path, exported: ExportedOnnx, tmp_path: Path
) -> None:
    """Another model's file in the place of what the exporter writes."""
    source = base(tmp_path / "model", MEAN, "Normalize")

    def write(_: Any, path: Path) -> None:
        path.write_bytes((exported.folder / "onnx" / "model.onnx").read_bytes())

    with (
        patch("tcompress.exports.onnx_folder.write_graph", write),
        patch("tcompress.exports.onnx_parts._outputs", return_value=("last_hidden_state",)),
        pytest.raises(WriteError, match="computes something else than PyTorch"),
    ):
        export_onnx(source, tmp_path / "out", OnnxFiles(sentence_embedding=False))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


REFUSED: dict[str, tuple[Callable[[Path], list[Any]], list[str]]] = {
    "the folder inside": (
        lambda out: [out / "onnx", "--to", "onnx"],
        ["has no `config.json`", "give the folder `{out}`"],
    ),
    "a file": (
        lambda out: [out / "onnx" / "model.onnx", "--to", "onnx"],
        ["is a file, but a model is a folder", "is not read back"],
    ),
    "options of ONNX files": (
        lambda out: [out, "--int8", "--bits", "4"],
        ["`--int8`, `--bits` can only be given for ONNX files", "add `--to onnx`"],
    ),
    "bits of embeddings in no file": (
        lambda out: [out, "--to", "onnx", "--bits", "4", "--embedding-bits", "4"],
        ["`--embedding-bits 4` is of the file with 8 bits, and none is asked", "add `--int8`"],
    ),
    "other bits": (
        lambda out: [out, "--to", "onnx", "--bits", "3"],
        ["`--bits` is `3`, allowed is one of `8`, `4`"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused(case: str, exported: ExportedOnnx, tmp_path: Path) -> None:
    arguments, said = REFUSED[case]
    ran = run("export", *arguments(exported.folder), "-o", tmp_path / "out")
    assert ran.code == 2
    for text in said:
        assert text.format(out=exported.folder) in ran.err
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_installed_is_named(folder: Path, tmp_path: Path) -> None:
    with patch("tcompress.runtimes.installed.find_spec", return_value=None):
        ran = run("export", folder, "--to", "onnx", "-o", tmp_path / "out")
    assert ran.code == 2
    assert "`onnx`, `onnxscript`, `onnxruntime` are not installed" in ran.err
    assert "pip install 'tcompress[onnx]" in ran.err


@pytest.mark.slow
def test_weights_of_large_models_lie_beside_their_files(folder: Path, tmp_path: Path) -> None:
    limits = [
        patch(f"tcompress.exports.{name}.LARGEST_FILE", 1000)
        for name in ("onnx_graph", "onnx_folder")
    ]
    with limits[0], limits[1]:
        exported = export_onnx(folder, tmp_path / "out", OnnxFiles(int8=True, bits=4))
    assert sorted(path.name for path in (tmp_path / "out" / "onnx").iterdir()) == [
        "model.onnx", "model.onnx_data", "model_int8.onnx", "model_int8.onnx_data",
        "model_q4.onnx", "model_q4.onnx_data",
    ]  # fmt: skip
    assert exported.files[0].difference < 1e-5
    for file in exported.files:
        path = exported.folder / file.file
        both = (path, path.with_name(f"{path.name}_data"))
        assert file.bytes == sum(item.stat().st_size for item in both)


@pytest.mark.slow
def test_weights_are_multiplied_out_if_asked(folder: Path, tmp_path: Path) -> None:
    """The model beside the files stays as it is."""
    exported = export_onnx(folder, tmp_path / "out", OnnxFiles(dense=True))
    graph = onnx.load(exported.folder / exported.files[0].file).graph
    shapes = {item.name: list(item.dims) for item in graph.initializer}
    assert shapes["encoder.layer.0.attention.self.query.weight"] == [32, 32]
    assert is_converted(exported.folder)
    verify_files(exported.folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_files_without_weights_are_not_read_back(exported: ExportedOnnx, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    (alone / "onnx").mkdir(parents=True)
    (alone / "onnx" / "model.onnx").write_bytes(b"")
    config = json.loads((exported.folder / "config.json").read_text())
    config.pop("quantization_config")
    (alone / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"(?s)holds no weights.*hint: .*is not read back"):
        export_onnx(alone, tmp_path / "out")


def test_an_encoder_in_the_old_layout_is_not_replaced(tmp_path: Path) -> None:
    folder = in_old_layout(base(tmp_path / "old"))
    with pytest.raises(InputError, match="is the model itself, or contains it"):
        export_onnx(folder, folder)


def test_models_of_one_fingerprint_have_files_of_their_own(folder: Path, tmp_path: Path) -> None:
    """It is made of samples of the weights."""
    source = open_checked(str(folder))
    others = [replace(source, settings={}), replace(source, folder=tmp_path)]
    sources = [source, source, *others, replace(source, id="code", trust_remote_code=True)]
    with (
        RuntimeFiles.opened() as files,
        patch("tcompress.exports.onnx_folder.export_onnx") as export,
    ):
        for item in sources:
            with pytest.raises(InputError, match="several files"):
                files._new(item, "onnx")
    outputs = [call.args[1] for call in export.call_args_list]
    assert outputs[0] == outputs[1] == outputs[4]
    assert len(set(outputs)) == 3
    assert [call.kwargs["trust_remote_code"] for call in export.call_args_list][-2:] == [
        False,
        True,
    ]


def test_there_may_be_more_pictures_than_texts(tmp_path: Path) -> None:
    build("clip").save_pretrained(tmp_path / "clip")
    (proof,) = proofs_of(open_checked(str(tmp_path / "clip")))
    names = [proof.part.axes(name)[0] for name in ("input_ids", "pixel_values")]
    assert names == ["batch_size", "image_batch_size"]
    shapes = [answer["logits_per_image"].shape for _, answer in proof.shapes]
    assert shapes == [(1, 1), (4, 3), (2, 2)]
    assert len(proof.part.sample(Size(3, 5))["pixel_values"]) == 3
