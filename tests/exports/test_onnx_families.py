"""Tiny models of every family as ONNX files: they agree with PyTorch, or are refused by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tcompress.artifact.reader import open_checked
from tcompress.errors import InputError
from tcompress.exports.onnx_folder import proofs_of
from tcompress.exports.onnx_graph import write_graph
from tcompress.runtimes.sessions import OnnxModel
from tests.support.tiny import EXPERTS, TINY, TinyModel

pytest.importorskip("onnx")
pytestmark = pytest.mark.grid
_TEXT = TINY["bert"].options
HEADS = {
    f"{family}, {head}": TinyModel(f"{stem}Config", f"{stem}{head}", _TEXT)
    for family, stem in (("bert", "Bert"), ("albert", "Albert"), ("xlm-roberta", "XLMRoberta"))
    for head in ("Model", "ForSequenceClassification", "ForTokenClassification")
}
HEADS["bert, answers"] = TinyModel("BertConfig", "BertForQuestionAnswering", _TEXT)
HEADS["t5, encoder"] = TinyModel("T5Config", "T5EncoderModel", TINY["t5"].options)
HEADS["vit, bare"] = TinyModel("ViTConfig", "ViTModel", TINY["vit"].options, ("image",))
ALL = TINY | EXPERTS | HEADS
FEWEST = 30


@pytest.fixture(scope="module")
def counts() -> Iterator[dict[str, str]]:
    """What became of each family."""
    found: dict[str, str] = {}
    yield found
    for name, text in found.items():
        print(f"{name:32} {text}")  # noqa: T201


@pytest.mark.parametrize("family", ALL)
def test_files_agree_with_pytorch(family: str, counts: dict[str, str], tmp_path: Path) -> None:
    ALL[family].build().save_pretrained(tmp_path / "model")
    apart = _apart(tmp_path / "model")
    counts[family] = str(apart)
    assert max(apart) < 1e-4 if isinstance(apart, list) else ALL[family].model in apart


def _apart(folder: Path) -> list[float] | str:
    """Differences of each file of a model from PyTorch, or why there is none."""
    apart = []
    try:
        for proof in proofs_of(open_checked(str(folder))):
            write_graph(proof.part, folder / "file.onnx")
            apart.append(proof.difference(OnnxModel.open(folder / "file.onnx")))
    except InputError as error:
        return error.message
    return apart


def test_most_families_are_exported(counts: dict[str, str]) -> None:
    if len(counts) < len(ALL):
        pytest.skip("only some were tried")
    exported = [name for name, text in counts.items() if text.startswith("[")]
    assert len(exported) >= FEWEST
