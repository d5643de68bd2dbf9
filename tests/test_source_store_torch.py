"""Weights in files of torch: reads, refusals of what could run code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tcompress.models import WeightStore, tensor_files
from tests.support.checkpoints import refusal_of


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_is_read(tmp_path: Path, zipped: bool) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(4, 4).t(), "n": torch.tensor(3)}
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    store = WeightStore.open(tmp_path)
    assert store.total_bytes == 12 * 4 + 16 * 4 + 8
    for key, tensor in tensors.items():
        read = store.tensor(key)
        assert torch.equal(read, tensor)
        assert read.is_contiguous()
        assert read.untyped_storage().nbytes() == read.nbytes


def test_torch_shards_are_read_and_one_is_open_at_a_time(tmp_path: Path) -> None:
    files = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    for key, file in files.items():
        torch.save({key: torch.ones(2)}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    store = WeightStore.open(tmp_path)
    for key in ("a", "b", "a"):
        assert store.tensor(key).tolist() == [1, 1]
        opened: list[Any] = [shard for _, shard in sorted(store._shards.items())]
        mapped = [shard._open is not None for shard in opened]
        assert mapped == [key == "a", key == "b"]


def test_a_torch_file_is_mapped_and_opened_anew_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Any] = []
    real = torch.load

    def load(*arguments: Any, **options: Any) -> Any:
        loads.append((options["map_location"], options["weights_only"], options["mmap"]))
        return real(*arguments, **options)

    torch.save({"a": torch.ones(10), "b": torch.zeros(10)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr(tensor_files, "REOPEN_AFTER_BYTES", 80)
    store = WeightStore.open(tmp_path)
    for _ in range(2):
        store.tensor("a")
        store.tensor("b")
    assert loads == [("meta", True, False), ("cpu", True, True), ("cpu", True, True)]


def test_the_fingerprint_of_a_torch_file_follows_its_content(tmp_path: Path) -> None:
    prints = []
    for value in (1.0, 1.0, 2.0):
        torch.save({"a": torch.full((9,), value)}, tmp_path / "pytorch_model.bin")
        prints.append(WeightStore.open(tmp_path).fingerprint())
    assert prints[0] == prints[1] != prints[2]


class Foreign:
    """Would run a command when unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def test_a_pickle_with_more_than_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"a": Foreign()}, tmp_path / "pytorch_model.bin")
    message = refusal_of(tmp_path)
    assert "`pytorch_model.bin` is damaged or holds Python objects besides tensors" in message
    assert "could run foreign code" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "holds a `list`, not a dictionary of tensors"),
        ({"model": {"a": torch.ones(1)}, "epoch": 3}, "flat dictionary of tensors: `model`, `ep"),
    ],
)
def test_a_torch_file_of_another_form_is_refused(
    tmp_path: Path, content: Any, message: str
) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert message in refusal_of(tmp_path)


def test_a_truncated_torch_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path)
    os.truncate(path, 3000)
    assert "`pytorch_model.bin`" in refusal_of(tmp_path)
