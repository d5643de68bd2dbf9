"""Files that work in progress keeps: whole, or as good as absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tcompress.artifact.disk_cache import fingerprint, read_record, read_tensors, save_tensors

CPU = torch.device("cpu")


def test_fingerprints_tell_values_and_their_types_apart() -> None:
    names = [fingerprint(*facts) for facts in [(1,), ("1",), (1, 2), ((1, 2),), (torch.float32,)]]
    assert len({*names}) == len(names)
    assert fingerprint("a", 1) == fingerprint("a", 1)


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"other": 1}', '{"number": "x"}'])
def test_a_damaged_record_is_none(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert read_record(path, lambda found: float(json.loads(found)["number"])) is None


def test_tensors_come_back_or_not_at_all(tmp_path: Path) -> None:
    path, value = tmp_path / "some.safetensors", torch.arange(6.0).view(2, 3)
    assert read_tensors(path, CPU) is None
    save_tensors({"x": value.mT}, path, {"kind": "test"})
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    tensors = read_tensors(path, CPU)
    assert tensors is not None
    assert torch.equal(tensors["x"], value.mT)
    path.write_bytes(path.read_bytes()[:-1])  # cut off by a kill
    assert read_tensors(path, CPU) is None
