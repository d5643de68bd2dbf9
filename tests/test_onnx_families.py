"""Tiny models of every family as ONNX files: they agree with PyTorch, or are refused by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tcompress.artifact.reader import open_checked
from tcompress.errors import InputError
from tcompress.exports.onnx_folder import opened
from tcompress.exports.onnx_graph import write_graph
from tcompress.exports.onnx_parts import parts_of
from tcompress.exports.onnx_proof import Proof
from tcompress.runtimes.onnx_session import OnnxModel
from tests.support.tiny import EXPERTS, TINY

pytest.importorskip("onnx")
pytestmark = pytest.mark.grid
ALL = TINY | EXPERTS
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
    source = open_checked(str(tmp_path / "model"))
    apart = []
    try:
        for part in parts_of(source, opened(source)):
            proof = Proof.of(part.eval())
            write_graph(part, tmp_path / "file.onnx")
            apart.append(proof.difference(OnnxModel.open(tmp_path / "file.onnx")))
    except InputError as error:
        if ALL[family].model not in error.message:
            raise
        counts[family] = f"refused: {error.message}"
    else:
        assert max(apart) < 1e-4
        counts[family] = f"{max(apart):.1e}, {len(apart)} file{'s' * (len(apart) > 1)}"


def test_most_families_are_exported(counts: dict[str, str]) -> None:
    if len(counts) < len(ALL):
        pytest.skip("only some were tried")
    exported = [name for name, text in counts.items() if not text.startswith("refused")]
    assert len(exported) >= FEWEST
