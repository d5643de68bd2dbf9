"""Files that hold weights, read one tensor at a time."""

from __future__ import annotations

import hashlib
import math
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tcompress.errors import SourceError, first_line, parse_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

REOPEN_AFTER_BYTES = 256 * 2**20
"""A mapped file is opened anew after this many bytes: pages that were read stay resident."""

_MAX_HEADER_BYTES = 100_000_000
_SAMPLES = 16
_SAMPLE_BYTES = 4096

# Types by the names of the format: those of torch, which may lack some, and bytes.
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
}
_LARGEST = 2**63


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a stored tensor without reading it.

    Attributes:
        kind: Element type, by its name in torch.
        itemsize: Bytes of an element.
        shape: Sizes.
        start: First byte in the file, where the format gives one.
    """

    kind: str
    itemsize: int
    shape: tuple[int, ...]
    start: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """Describe a tensor in memory."""
        kind = str(tensor.dtype).removeprefix("torch.")
        return cls(kind, tensor.dtype.itemsize, tuple(tensor.shape))

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        import torch

        found: torch.dtype = getattr(torch, self.kind)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.itemsize


class Shard(Protocol):
    """One file of weights."""

    path: Path
    infos: dict[str, TensorInfo]

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Read the rows `start` to `stop` (or all of a tensor without dimensions)."""
        ...

    def digest(self) -> bytes:
        """Hash of the header and of samples of the data."""
        ...

    def close(self) -> None:
        """Give back what is held for further reads; reading again is possible."""
        ...


class SafetensorsShard:
    """A safetensors file; it is never mapped, only the bytes asked for are read.

    Raises:
        SourceError: If the header is damaged or the size of the file is not what it says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, self._data_start = _read_header(path)
        self._header = header
        self.infos = self._parse(header)

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Read rows of a tensor into memory of its own."""
        import torch

        info = self.infos[key]
        shape = (max(stop - start, 0), *info.shape[1:]) if info.shape else ()
        row_bytes = math.prod(info.shape[1:]) * info.itemsize
        buffer = torch.empty(math.prod(shape) * info.itemsize, dtype=torch.uint8)
        if buffer.numel():
            target: Any = buffer.numpy()
            with self.path.open("rb") as file:
                file.seek(info.start + start * row_bytes)
                if file.readinto(target) != buffer.numel():
                    raise SourceError(
                        f"`{self.path}` ended while reading `{key}`: it was changed since opening",
                        hint="leave the files alone while they are in use, and start again",
                    )
        return buffer.view(info.dtype).reshape(shape)

    def digest(self) -> bytes:
        """Hash the header and a few kilobytes spread over the data."""
        return hashlib.sha256(self._header + _sampled(self.path)).digest()

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _parse(self, header: bytes) -> dict[str, TensorInfo]:
        name = self.path.name
        try:
            entries: dict[str, Any] = parse_json(header, strict=True)
            metadata = entries.pop("__metadata__", {})
            if not all(isinstance(value, str) for value in metadata.values()):
                raise ValueError("`__metadata__` holds more than texts")
            infos = {key: self._info(key, entry) for key, entry in entries.items()}
            spans = sorted((*entry["data_offsets"], key) for key, entry in entries.items())
            spans_fit = all(
                end - begin == infos[key].nbytes and begin >= 0 for begin, end, key in spans
            )
        except SourceError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SourceError(
                f"`{name}` has a damaged header ({type(error).__name__}: {first_line(error)})"
            ) from error
        ends = [0] + [end for _, end, _ in spans]
        if not spans_fit or any(
            begin != end for (begin, _, _), end in zip(spans, ends, strict=False)
        ):
            raise SourceError(f"`{name}` has a damaged header (sizes and offsets disagree)")
        expected, found = self._data_start + ends[-1], self.path.stat().st_size
        if found != expected:
            what = "is truncated" if found < expected else "is longer than its header says"
            raise SourceError(f"`{name}` {what}: expected {expected} bytes, found {found}")
        return infos

    def _info(self, key: str, entry: Any) -> TensorInfo:
        if entry["dtype"] not in DTYPES:
            raise SourceError(
                f"`{self.path.name}` stores `{key}` with element type `{entry['dtype']}`, "
                f"which is not supported"
            )
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if not all(type(size) is int and 0 <= size < _LARGEST for size in (*shape, begin, end)):
            raise ValueError(f"`{key}` has shape {list(shape)}, offsets {[begin, end]}")
        return TensorInfo(*DTYPES[entry["dtype"]], shape, self._data_start + begin)


class TorchShard:
    """A file of `torch.save`, opened as weights only and mapped where its format allows.

    Raises:
        SourceError: If it cannot be read, or holds anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            _refuse_pointer(path, file.read(64))
        tensors = self._load("meta")
        others = [str(key) for key, value in tensors.items() if not _is_plain_tensor(key, value)]
        if others:
            raise SourceError(
                f"`{path.name}` holds more than a flat dictionary of tensors: "
                + ", ".join(f"`{key}`" for key in others[:5])
            )
        self.infos = {key: TensorInfo.of(value) for key, value in tensors.items()}
        self._open: dict[str, Tensor] | None = None
        self._bytes_read = 0

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Read rows of a tensor into memory of its own."""
        import torch

        if self._open is None:
            self._open, self._bytes_read = self._load("cpu"), 0
        tensor = self._open[key]
        rows = tensor[start:stop] if tensor.dim() else tensor
        self._bytes_read += rows.nbytes
        if self._bytes_read >= REOPEN_AFTER_BYTES:
            self.close()
        return rows.detach().clone(memory_format=torch.contiguous_format)

    def digest(self) -> bytes:
        """Hash names, types and shapes, and a few kilobytes spread over the file."""
        listing = [
            (key, f"torch.{info.kind}", info.shape) for key, info in sorted(self.infos.items())
        ]
        return hashlib.sha256(repr(listing).encode() + _sampled(self.path)).digest()

    def close(self) -> None:
        """Unmap the file."""
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


def _read_header(path: Path) -> tuple[bytes, int]:
    """Give the JSON header of a safetensors file and the position of its data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        header = file.read(min(length, _MAX_HEADER_BYTES))
    _refuse_pointer(path, prefix + header[:56])
    if len(prefix) < 8:
        raise SourceError(f"`{path.name}` is truncated: expected at least 8 bytes, found {size}")
    if length > _MAX_HEADER_BYTES:
        raise SourceError(f"`{path.name}` has a damaged header (its length reads {length} bytes)")
    if len(header) < length:
        raise SourceError(
            f"`{path.name}` is truncated: expected at least {8 + length} bytes, found {size}"
        )
    return header, 8 + length


def _refuse_pointer(path: Path, start: bytes) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise SourceError(
            f"`{path.name}` is a Git LFS pointer and not the weights; run `git lfs pull` there"
        )


def _is_plain_tensor(key: Any, value: Any) -> bool:
    import torch

    return (
        isinstance(key, str)
        and isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
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
