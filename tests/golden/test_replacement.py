"""How golden files are compared and written."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tcompress
from tests.support.golden import Golden


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    return Golden(tmp_path)


@pytest.fixture
def update(tmp_path: Path) -> Golden:
    return Golden(tmp_path, update=True)


def _refusal(compare: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(pytest.fail.Exception) as caught:
        compare(*args, **options)
    return str(caught.value)


def test_a_difference_is_shown_with_what_to_do(golden: Golden, update: Golden) -> None:
    update.text("a/b.txt", "one\ntwo  \nthree\n")
    golden.text("a/b.txt", "one\ntwo\nthree")
    assert _refusal(golden.text, "a/b.txt", "one\n2\nthree").splitlines() == [
        "not as in tests/golden/files/a/b.txt:", "", "--- golden", "+++ found", "@@ -1,3 +1,3 @@",
        " one", "-two", "+2", " three", "",
        "If this is meant: pytest tests/golden --update-golden, then look at `git diff`.",
    ]  # fmt: skip
    assert "+one" in _refusal(golden.text, "new.txt", "one")


def test_what_varies_is_masked(update: Golden, tmp_path: Path) -> None:
    said = f"in `{Path.cwd()}/a`, 12.3 s, 2026-01-02T03:04:05+00:00, by tcompress "
    update.text("a.txt", said + tcompress.__version__)
    assert (tmp_path / "a.txt").read_text() == (
        "in `<here>/a`, <seconds> s, <time>, by tcompress <version>\n"
    )
    varying = {"seconds": 0.5, "environment": {"torch": "2"}, "mine": 1}
    update.document("a.json", varying, hide={"mine"})
    assert (tmp_path / "a.json").read_text() == (
        '{"seconds": "<seconds>", "environment": {"torch": "<environment>"}, "mine": "<mine>"}\n'
    )


def test_floats_may_differ_in_their_last_digits(golden: Golden, update: Golden) -> None:
    update.document("a.json", {"error": [0.5, 1e-12], "count": 2})
    golden.document("a.json", {"error": [0.50001, 2e-12], "count": 2})
    assert "0.501" in _refusal(golden.document, "a.json", {"error": [0.501, 0.0], "count": 2})
    assert '"count": 3' in _refusal(golden.document, "a.json", {"error": [0.5, 0.0], "count": 3})


def test_what_blocks_have_in_common_stands_once(
    golden: Golden, update: Golden, tmp_path: Path
) -> None:
    def document(*errors: float) -> dict[str, Any]:
        names = [f"h.{block}.{layer}" for block in range(2) for layer in ("q", "k")]
        layers = [{"name": name, "reads": [name[:3]]} for name in names]
        return {"layers": layers, "error": {f"h.{i}.q": error for i, error in enumerate(errors)}}

    update.document("a.json", document(0.5, 0.5))
    assert (tmp_path / "a.json").read_text() == (
        '{\n "layers": [{"name": "h.{0,1}.q", "reads": ["h.*"]}, '
        '{"name": "h.{0,1}.k", "reads": ["h.*"]}],\n "error": {"h.{0,1}.q": 0.5}\n}\n'
    )
    golden.document("a.json", document(0.5, 0.50001))
    assert '"h.1.q": 0.501' in _refusal(golden.document, "a.json", document(0.5, 0.501))


def test_tensors(golden: Golden, update: Golden) -> None:
    update.tensors("a.safetensors", {"x": torch.tensor([1.0, 4.0]), "y": torch.ones(2)})
    golden.tensors("a.safetensors", {"x": torch.tensor([1.0, 4.0001]), "y": torch.ones(2)})
    wrong = {"x": torch.tensor([1.0, 4.1]), "y": torch.ones(3), "z": torch.ones(1)}
    assert _refusal(golden.tensors, "a.safetensors", wrong).splitlines()[2:6] == [
        "! x: 2.5e-02 of its largest number away, 1e-04 are allowed", "- y: torch.float32 (2,)",
        "+ y: torch.float32 (3,)", "+ z",
    ]  # fmt: skip
    nan = {"x": torch.tensor([1.0, torch.nan]), "y": torch.ones(2)}
    assert "! x: nan" in _refusal(golden.tensors, "a.safetensors", nan)


def test_files_that_nothing_compares_with(golden: Golden, update: Golden, tmp_path: Path) -> None:
    for name in ("a/b.txt", "a/c.txt"):
        update.text(name, "text")
    assert "a/c.txt" in _refusal(golden.only, "a", ["b.txt"])
    update.only("a", ["b.txt"])
    golden.only("a", ["b.txt"])
    assert not (tmp_path / "a/c.txt").exists()
