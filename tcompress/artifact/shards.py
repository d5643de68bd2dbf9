"""Writes safetensors shards one tensor at a time.

All names, shapes and dtypes are known before the first value is, so a shard's header is written
first and values follow as they are made: memory never holds more than one tensor, where
`save_file` would need the whole shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from tcompress.artifact.format import INDEX, WEIGHTS
from tcompress.errors import TCompressError
from tcompress.files import beside, write_text

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class Stored:
    """A tensor that will be written.

    Attributes:
        key: Its name.
        shape: Its shape.
        dtype: Its dtype.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One weight file and what it holds, in the order in which it is written."""

    file: str
    tensors: tuple[Stored, ...]


def plan_shards(tensors: Sequence[Stored], largest: str) -> list[Shard]:
    """Distributes tensors over files.

    Args:
        tensors: What will be written, in the order in which it is made.
        largest: Largest file, such as `2GB`.
    """
    by_key = {item.key: item for item in tensors}
    meta = {item.key: torch.empty(item.shape, dtype=item.dtype, device="meta") for item in tensors}
    split = split_torch_state_dict_into_shards(
        meta, filename_pattern="model{suffix}.safetensors", max_shard_size=largest
    )
    return [
        # Wide elements first: every tensor then starts at a multiple of its element size.
        Shard(file, tuple(sorted((by_key[key] for key in keys), key=_descending_size)))
        for file, keys in split.filename_to_tensors.items()
    ]


def _descending_size(item: Stored) -> int:
    return -item.dtype.itemsize


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Writes the index of several shards; a single file has none."""
    if len(shards) == 1 and shards[0].file == WEIGHTS:
        return
    total = sum(item.nbytes for shard in shards for item in shard.tensors)
    where = {item.key: shard.file for shard in shards for item in shard.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def write_shard(
    folder: Path, shard: Shard, value: Callable[[Stored], Tensor], written: Callable[[int], None]
) -> str:
    """Writes one shard beside its final name, then renames it.

    Args:
        folder: Folder of the shard.
        shard: What it holds.
        value: Makes the value of a tensor.
        written: Called with the bytes of every tensor written.

    Returns:
        SHA-256 of the file.
    """
    digest = hashlib.sha256()
    with beside(folder / shard.file) as other, other.open("xb") as file:
        for chunk in _chunks(shard, value, written):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _chunks(
    shard: Shard, value: Callable[[Stored], Tensor], written: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    header = _header(shard.tensors)
    yield len(header).to_bytes(8, "little")
    yield header
    for item in shard.tensors:
        tensor = value(item)
        if tuple(tensor.shape) != item.shape or tensor.dtype != item.dtype:
            raise TCompressError(
                f"`{item.key}` came out as {list(tensor.shape)} {tensor.dtype}, "
                f"planned were {list(item.shape)} {item.dtype}",
                "please report this",
            )
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield flat.numpy().data
        written(item.nbytes)


def _header(tensors: Iterable[Stored]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for item in tensors:
        stop = start + item.nbytes
        entries[item.key] = {
            "dtype": _NAMES[item.dtype],
            "shape": list(item.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
