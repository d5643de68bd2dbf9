"""Files that hold weights, read one tensor at a time."""

from __future__ import annotations

import hashlib
import math
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from tcompress.errors import SourceError, first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# A mapped file is opened anew after this many bytes: pages that were read stay resident.
REOPEN_AFTER_BYTES = 256 * 2**20
_SAMPLES, _SAMPLE_BYTES = 16, 4096

# Names in torch and bytes by the names of the format, so that torch need not be imported.
DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
    "BOOL": ("bool", 1), "C64": ("complex64", 8),
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Element type (by its name in torch), its size in bytes, and shape of a stored tensor."""

    kind: str
    itemsize: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        kind = str(tensor.dtype).removeprefix("torch.")
        return cls(kind, tensor.dtype.itemsize, tuple(tensor.shape))

    @property
    def dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, self.kind)
        return found

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class Shard(Protocol):
    """One file of weights."""

    path: Path
    infos: dict[str, TensorInfo]

    def read(self, key: str) -> Tensor: ...

    def digest(self) -> bytes: ...  # identifies the values by header and samples of the data

    def close(self) -> None:
        return  # gives back what is held for further reads, if anything is


class SafetensorsShard(Shard):
    """A safetensors file, mapped only while it is read; a damaged header is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_pointer(path)
        try:
            with safe_open(path, "np") as file:  # loads no torch
                found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                kinds = {key: item.get_dtype() for key, item in found.items()}
                shapes = {key: tuple(item.get_shape()) for key, item in found.items()}
        except SafetensorError as error:
            raise SourceError(
                f"`{path.name}` is truncated or has a damaged header ({first_line(error)}); "
                f"found {path.stat().st_size} bytes"
            ) from error
        for key in (key for key, kind in kinds.items() if kind not in DTYPES):
            kind = f"element type `{kinds[key]}`, which is not supported"
            raise SourceError(f"`{path.name}` stores `{key}` with {kind}")
        self.infos = {key: TensorInfo(*DTYPES[kinds[key]], shapes[key]) for key in kinds}

    def read(self, key: str) -> Tensor:
        try:
            with safe_open(self.path, "pt") as file:
                tensor: Tensor = file.get_tensor(key)
                return tensor.clone()
        except SafetensorError as error:
            raise SourceError(
                f"`{self.path}` cannot be read any more, it was changed since opening "
                f"({first_line(error)}, at `{key}`)",
                hint="leave the files alone while they are in use, and start again",
            ) from error

    def digest(self) -> bytes:
        with self.path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
        return hashlib.sha256(header + _sampled(self.path)).digest()


class TorchShard(Shard):
    """A file of `torch.save`, opened as weights only and mapped where its format allows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_pointer(path)
        tensors = self._load("meta")
        others = [f"`{key}`" for key, value in tensors.items() if not _is_plain(key, value)]
        if others:
            names = ", ".join(others[:5])
            raise SourceError(
                f"`{path.name}` holds more than a flat dictionary of tensors: {names}"
            )
        self.infos = {key: TensorInfo.of(value) for key, value in tensors.items()}
        self._open: dict[str, Tensor] | None = None
        self._bytes_read = 0

    def read(self, key: str) -> Tensor:
        import torch

        if self._open is None:
            self._open, self._bytes_read = self._load("cpu"), 0
        tensor = self._open[key]
        self._bytes_read += tensor.nbytes
        if self._bytes_read >= REOPEN_AFTER_BYTES:
            self.close()
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def digest(self) -> bytes:
        infos = sorted(self.infos.items())
        listing = [(key, f"torch.{info.kind}", info.shape) for key, info in infos]
        return hashlib.sha256(repr(listing).encode() + _sampled(self.path)).digest()

    def close(self) -> None:
        self._open = None

    def _load(self, device: str) -> dict[str, Tensor]:
        import torch

        # Files older than torch 1.6 are no zip archives and cannot be mapped.
        mapped = device == "cpu" and zipfile.is_zipfile(self.path)
        try:
            loaded = torch.load(self.path, map_location=device, weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            raise SourceError(
                f"`{self.path.name}` is damaged or holds Python objects besides tensors; "
                "it was refused, since loading those could run foreign code"
            ) from error
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            raise SourceError(
                f"`{self.path.name}` cannot be read ({first_line(error)}); "
                f"found {self.path.stat().st_size} bytes"
            ) from error
        if not isinstance(loaded, dict):
            raise SourceError(
                f"`{self.path.name}` holds a `{type(loaded).__name__}`, not a dictionary of tensors"
            )
        return loaded


def _is_plain(key: Any, value: Any) -> bool:
    import torch

    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return isinstance(key, str) and dense and not value.is_quantized


def _refuse_pointer(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise SourceError(
            f"`{path.name}` is a Git LFS pointer and not the weights; run `git lfs pull` there"
        )


def _sampled(path: Path) -> bytes:
    """Bytes from evenly spread places: tells two trainings of one architecture apart."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(max(size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
