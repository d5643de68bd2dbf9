"""Files for OpenVINO: refused and recorded without it; with it (`doors`), what is in them.

`OPENVINO_DOOR` names a Python with sentence-transformers' own OpenVINO extra, and no tcompress.
"""

import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers

from tcompress.artifact.manifest import ExportedFile, read_manifest
from tcompress.artifact.reader import verify_files
from tcompress.conversion.converter import convert
from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import InputError
from tcompress.exports.onnx_folder import export_onnx, with_files, without_files
from tcompress.models import SourceModel
from tcompress.options.commands import OnnxFiles
from tests.support.cli import completed, run
from tests.support.converted import recipe
from tests.support.model_folders import model_folder, sentences
from tests.support.other_python import there
from tests.support.sentence_folders import MEAN, base, with_dense

PYTHON = os.environ.get("OPENVINO_DOOR", "")
TEXTS = sentences(12)

_ENCODE = """
import json, sys
from sentence_transformers import SentenceTransformer
folder, texts = json.loads(sys.argv[1])
options = {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}
model = SentenceTransformer(folder, backend="openvino", device="cpu", model_kwargs=options)
vectors = model.encode(texts).tolist()
assert "tcompress" not in sys.modules
print("\\n" + json.dumps(vectors))
"""


def test_what_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    model_folder("bert", tmp_path / "model")
    with patch("tcompress.runtimes.installed.find_spec", return_value=None):
        ran = run(
            "export", tmp_path / "model", "--to", "openvino", "--int8", "--bits", "4",
            "-o", tmp_path / "out",
        )  # fmt: skip
    assert ran.code == 2
    assert "`openvino` are not installed" in ran.err
    assert "pip install 'tcompress[openvino]" in ran.err
    assert "`--int8`, `--bits` can only be given for ONNX files" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_card_has_a_table_for_each_runtime() -> None:
    def file(name: str) -> ExportedFile:
        protocol = {"batch": 1, "length": 8, "threads": 1, "device_name": "A", "instructions": "b"}
        numbers = dict.fromkeys(("bytes", "difference", "milliseconds", "baseline_milliseconds"), 1)
        return ExportedFile(file=name, bits=32, agreement=1, ratio=1, protocol=protocol, **numbers)

    card = "# Model\n\ntext\n"
    card = with_files(card, [file("onnx/old.onnx")], "onnx")
    card = with_files(card, [file("openvino/openvino_model.xml")], "openvino")
    card = with_files(card, [file("onnx/model.onnx")], "onnx")
    assert card.startswith("# Model\n\ntext\n\n## OpenVINO files\n")
    assert card.count("\n## OpenVINO files\n") == card.count("\n## ONNX files\n") == 1
    assert "`openvino/openvino_model.xml`" in card
    assert "`onnx/model.onnx`" in card
    assert "old.onnx" not in card
    assert without_files(without_files(card, "openvino"), "onnx").strip() == "# Model\n\ntext"
    alone = with_files("", [file("onnx/old.onnx")], "onnx")  # of a folder without a card
    alone = with_files(alone, [file("onnx/model.onnx")], "onnx")
    assert alone.startswith("## ONNX files\n")
    assert (alone.count("## ONNX files"), alone.count("old.onnx")) == (1, 0)
    others = "## ONNX files\n\nMade by hand.\n"  # a heading of the user's, and text after our table
    card = with_files(others, [file("onnx/old.onnx")]) + " By Ann.\n\n# Citation\n\n| a |\n"
    card = with_files(card, [file("onnx/model.onnx")])
    assert "old.onnx" not in card
    assert card.startswith(f"{others}\n By Ann.\n\n# Citation\n\n| a |\n\n## ONNX files\n\n| file")


@pytest.mark.doors
def test_a_folder_holds_files_for_both_runtimes(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    source = with_dense(base(tmp_path / "model", MEAN, "Dense", "Normalize"))
    quarter = recipe(method={"name": "svd"}, target=0.25)
    small = convert(str(source), quarter, tmp_path / "small").folder
    out = export_onnx(small, tmp_path / "out").folder
    ran = completed("export", out, "--to", "openvino", "-o", out)
    assert ran.lines[0].startswith("openvino/openvino_model.xml: ")
    assert sorted(path.name for path in (out / "openvino").iterdir()) == [
        "openvino_model.bin", "openvino_model.xml",
    ]  # fmt: skip
    verify_files(out)
    manifest = read_manifest(out)
    onnx, file = manifest.exports
    assert (onnx.file, file.file) == ("onnx/model.onnx", "openvino/openvino_model.xml")
    assert file.difference < 1e-5
    assert file.protocol["openvino"] == openvino.__version__.partition("-")[0]
    graph = openvino.Core().read_model(out / file.file)
    assert [port.partial_shape.to_string() for port in graph.inputs] == ["[?,?]"] * 3
    names = [port.get_any_name() for port in graph.outputs]
    assert names == ["last_hidden_state", "sentence_embedding"]
    weights = (small / "model.safetensors").stat().st_size  # structures stay
    assert (out / "openvino" / "openvino_model.bin").stat().st_size < 1.05 * weights
    elsewhere = export_onnx(out, tmp_path / "elsewhere", to="openvino").folder
    assert not (elsewhere / "onnx").exists()
    assert "## ONNX files" not in (elsewhere / "README.md").read_text()
    if PYTHON:
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
        with torch.no_grad():
            hidden = transformers.AutoModel.from_pretrained(out)(**inputs).last_hidden_state
        encoder = SentenceEncoder.of(SourceModel.open(str(source)))
        expected = encoder(hidden, inputs["attention_mask"]).numpy()
        vectors = there(PYTHON, _ENCODE, str(out), TEXTS)
        assert np.abs(np.array(vectors) - expected).max() < 1e-5


@pytest.mark.doors
def test_an_operator_that_is_unknown_is_named(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    source = base(tmp_path / "model", MEAN)

    def write(_: object, path: Path) -> None:
        path.write_bytes(b"none")

    with (
        patch("tcompress.exports.onnx_folder.write_graph", write),
        pytest.raises(InputError, match=r"OpenVINO .* cannot read the ONNX file") as caught,
    ):
        export_onnx(source, tmp_path / "out", OnnxFiles(), to="openvino")
    assert "--to onnx" in str(caught.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
