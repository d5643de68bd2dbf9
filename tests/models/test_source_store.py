"""Weights on disk: reads, checks on opening, refusals."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcompress.errors import SourceError
from tcompress.models import WeightStore
from tcompress.models import store as weight_files
from tests.support.checkpoints import save
from tests.support.model_folders import edited

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save("bert", folder, max_shard_size="20KB")
    return folder


@pytest.fixture
def folder(sharded: Path, tmp_path: Path) -> Path:
    """A copy of the sharded checkpoint, to be damaged."""
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def shard_of(folder: Path, number: int) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[number]


def refusal_of(folder: Path) -> str:
    """Why the weights of a folder are refused; every refusal says what to do."""
    with pytest.raises(SourceError) as caught:
        WeightStore.open(folder)
    assert caught.value.hint
    return caught.value.message


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    with edited(folder / INDEX) as index:
        change(index["weight_map"])


def test_every_tensor_of_every_shard_is_read(sharded: Path) -> None:
    store, expected = WeightStore.open(sharded), stored(sharded)
    assert len(store.files) > 2
    assert store.keys() == sorted(expected)
    for key, tensor in expected.items():
        assert torch.equal(store.tensor(key), tensor)
        assert store.shape(key) == tensor.shape
        assert store.dtype(key) == tensor.dtype
        assert store.nbytes(key) == tensor.nbytes
        assert key in load_file(sharded / store.file_of(key))
        assert key in store
    assert store.total_bytes == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    ],
)
def test_every_element_type_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    save_file({"a": tensor, "b": tensor.clone()}, tmp_path / "model.safetensors")
    store = WeightStore.open(tmp_path)
    assert store.dtype("b") == dtype
    assert store.tensor("b").tolist() == tensor.tolist()


def test_tensors_without_elements_or_dimensions_are_read(tmp_path: Path) -> None:
    tensors = {"empty": torch.zeros(0, 4), "guard": torch.zeros(0), "scalar": torch.tensor(7.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    store = WeightStore.open(tmp_path)
    for key, tensor in tensors.items():
        assert torch.equal(store.tensor(key), tensor)


def test_a_tensor_read_is_nobody_elses(sharded: Path) -> None:
    store = WeightStore.open(sharded)
    key = store.keys()[0]
    store.tensor(key).zero_()
    assert torch.equal(store.tensor(key), stored(sharded)[key])


def test_opening_and_reading_keep_no_file_open(sharded: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    store = WeightStore.open(sharded)
    for key in stored(sharded):
        store.tensor(key)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
        assert str(sharded) not in Path("/proc/self/maps").read_text()


def test_an_unknown_tensor_gets_near_names(sharded: Path) -> None:
    with pytest.raises(SourceError) as caught:
        WeightStore.open(sharded).tensor("bert.embeddings.word_embedding.weight")
    assert "has no tensor `bert.embeddings.word_embedding.weight`" in caught.value.message
    assert "`bert.embeddings.word_embeddings.weight`" in str(caught.value.hint)


def test_the_fingerprint_follows_content_not_place_nor_date(folder: Path, tmp_path: Path) -> None:
    print_before = WeightStore.open(folder).fingerprint()
    moved = folder.rename(tmp_path / "elsewhere")
    for file in moved.iterdir():
        os.utime(file, (1, 1))
    assert WeightStore.open(moved).fingerprint() == print_before
    shard = shard_of(moved, 0)
    save_file({key: tensor + 1 for key, tensor in load_file(shard).items()}, shard)
    assert WeightStore.open(moved).fingerprint() != print_before


def test_a_file_that_shrinks_after_opening_is_noticed(folder: Path) -> None:
    store = WeightStore.open(folder)
    key = store.keys()[-1]
    os.truncate(folder / store.file_of(key), 8)
    with pytest.raises(SourceError, match=f"was changed since opening .* at `{key}`"):
        store.tensor(key)


def test_a_truncated_shard_is_named_with_its_size(folder: Path) -> None:
    shard = shard_of(folder, 1)
    size = shard.stat().st_size
    os.truncate(shard, size - 10)
    assert refusal_of(folder) == (
        f"the weights in `{folder}` cannot be used: "
        f"`{shard.name}` is truncated or has a damaged header (Error while deserializing header: "
        f"incomplete metadata, file not fully covered); found {size - 10} bytes"
    )


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, size=size: data[:size] for size in (0, 5, 100)),
        *(lambda data, place=place: flipped(data, place) for place in (5, 8, 9, 30)),
        lambda data: data + b"more",
    ],
)
def test_a_damaged_shard_is_found(damage: Callable[[bytes], bytes], folder: Path) -> None:
    shard = shard_of(folder, 1)
    shard.write_bytes(damage(shard.read_bytes()))
    assert f"`{shard.name}` is truncated or has a damaged header" in refusal_of(folder)


def write_header(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "header",
    [
        [1, 2],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, header: Any) -> None:
    write_header(tmp_path / "model.safetensors", header, bytes(8))
    assert "`model.safetensors` is truncated or has a damaged header" in refusal_of(tmp_path)


def test_an_element_type_that_torch_has_not_is_named(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    write_header(tmp_path / "model.safetensors", header, bytes(1))
    assert "stores `a` with element type `F4`, which is not supported" in refusal_of(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_recognised(tmp_path: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / name).write_text(pointer * 3)
    assert f"`{name}` is a Git LFS pointer and not the weights" in refusal_of(tmp_path)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard_of(folder, 1).unlink()
    assert "-00002-of-" in refusal_of(folder)
    assert refusal_of(folder).endswith("is missing")


def test_an_index_that_names_absent_tensors_is_refused(folder: Path) -> None:
    shard = shard_of(folder, 0).name
    edit_index(folder, lambda files: files.update({"ghost.weight": shard}))
    assert f"the index places `ghost.weight` in `{shard}`, where it is not" in refusal_of(folder)


def test_a_tensor_left_out_of_the_index_is_read_all_the_same(folder: Path) -> None:
    key = WeightStore.open(folder).keys()[0]
    edit_index(folder, lambda files: files.pop(key))
    assert key in WeightStore.open(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Transformers takes the one of the last file, whatever the index says."""
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file({"a": torch.zeros(1), "both": torch.zeros(1)}, tmp_path / files[0])
    save_file({"b": torch.zeros(1), "both": torch.zeros(1)}, tmp_path / files[1])
    placed = {"a": files[0], "b": files[1], "both": files[1]}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    for _ in range(2):
        assert f"`both` is both in `{files[0]}` and in `{files[1]}`" in refusal_of(tmp_path)
        edit_index(tmp_path, lambda places: places.pop("both", None))


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "a\\b.safetensors", "C:x", "..", ""]
)
def test_an_index_cannot_lead_out_of_the_folder(folder: Path, file: str) -> None:
    edit_index(folder, lambda files: files.update({"x": file}))
    assert f"`{INDEX}` names `{file}`, outside the folder" in refusal_of(folder)


def test_links_of_the_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    shard = shard_of(folder, 0)
    target = shard.rename(blobs / "abc")
    shard.symlink_to(target)
    WeightStore.open(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "is no weight index") for text in ("{", "[]", '{"weight_map": []}', '{"a": {}}')),
        ('{"weight_map": {}}', "names no tensors"),
    ],
)
def test_an_index_of_another_form_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / INDEX).write_text(text)
    assert f"`{INDEX}` {message}" in refusal_of(folder)


def test_all_problems_are_in_one_error(folder: Path) -> None:
    shard_of(folder, 0).unlink()
    os.truncate(shard_of(folder, 1), 50)
    shard = shard_of(folder, 2).name
    edit_index(folder, lambda files: files.update({"ghost": shard, "x": "../y"}))
    lines = refusal_of(folder).splitlines()
    assert "4 problems" in lines[0]
    assert len(lines) == 5


def test_a_folder_without_weights_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "tf_model.h5").touch()
    (tmp_path / "onnx").mkdir()
    assert refusal_of(tmp_path) == (
        f"`{tmp_path}` holds no weights: expected one of `model.safetensors`, "
        "`model.safetensors.index.json`, `pytorch_model.bin`, `pytorch_model.bin.index.json`, "
        "found `onnx/`, `tf_model.h5`"
    )


def test_shards_without_their_index_are_explained(folder: Path) -> None:
    (folder / INDEX).unlink()
    with pytest.raises(SourceError) as caught:
        WeightStore.open(folder)
    assert caught.value.hint == "the index of the shards is missing: download it too"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no folder"):
        WeightStore.open(tmp_path / "none")


def test_a_single_file_wins_over_shards_and_safetensors_over_torch(folder: Path) -> None:
    torch.save({"c": torch.ones(1)}, folder / "pytorch_model.bin")
    assert "c" not in WeightStore.open(folder)
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    assert WeightStore.open(folder).keys() == ["a"]


# Weights in files of torch: reads, refusals of what could run code
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


def test_two_threads_read_from_two_files(tmp_path: Path) -> None:
    files = {key: f"pytorch_model-0000{key}-of-00002.bin" for key in "12"}
    for key, file in files.items():
        torch.save({key: torch.full((9,), float(key))}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    store = WeightStore.open(tmp_path)

    def read(keys: str) -> set[tuple[str, float]]:
        return {(key, float(store.tensor(key).mean())) for key in keys * 100}

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(read, ("12", "21")))
    finally:
        sys.setswitchinterval(before)
    assert found == [{("1", 1.0), ("2", 2.0)}] * 2
    assert sum(shard._open is not None for shard in store._shards.values()) <= 1


def test_a_torch_file_is_mapped_and_opened_anew_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Mock(wraps=torch.load)
    torch.save({"a": torch.ones(10), "b": torch.zeros(10)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr(weight_files, "REOPEN_AFTER_BYTES", 80)
    store = WeightStore.open(tmp_path)
    for _ in range(2):
        store.tensor("a")
        store.tensor("b")
    how = itemgetter("map_location", "weights_only", "mmap")
    loads = [how(call.kwargs) for call in load.call_args_list]
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


FOREIGN = (
    "`pytorch_model.bin` is damaged or holds Python objects besides tensors; it was refused, since "
    "loading those could run foreign code"
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": Foreign()}, FOREIGN),
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
