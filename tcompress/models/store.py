"""The weights of a checkpoint: an index of all tensors, and lazy reads."""

from __future__ import annotations

import hashlib
import math
import pickle
import threading
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from tcompress.errors import SourceError, after_colon, first_line, folder_content, listed, read_json
from tcompress.linalg.rounding import Rounding, read_header, unpack
from tcompress.models.names import NO_ONNX
from tcompress.progress import READING, timed

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
    """Element type (by its name in torch), its size in bytes, and shape of a stored tensor.

    Of one that is stored in fewer bits they are those that it is read in.
    """

    kind: str
    itemsize: int
    shape: tuple[int, ...]
    rounding: Rounding | None = None

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
        """Bytes in the file."""
        if self.rounding is not None:
            return self.rounding.nbytes(self.shape)
        return math.prod(self.shape) * self.itemsize


class Shard(Protocol):
    """One file of weights."""

    path: Path
    infos: dict[str, TensorInfo]

    def read(self, key: str) -> Tensor: ...

    def digest(self) -> bytes: ...  # identifies the values by header and samples of the data

    def are_one(self, first: str, second: str) -> bool:
        """Tell without reading whether two names of one shape are known to be one tensor."""
        return False

    def close(self) -> None:
        return  # gives back what is held for further reads, if anything is


class SafetensorsShard(Shard):
    """A safetensors file, mapped only while it is read; a damaged header is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_pointer(path)
        try:
            with safe_open(path, "np") as file:  # loads no torch
                self.infos = {key: _info(path, key, file.get_slice(key)) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise SourceError(
                f"`{path.name}` is truncated or has a damaged header ({first_line(error)}); "
                f"found {path.stat().st_size} bytes"
            ) from error

    def read(self, key: str) -> Tensor:
        try:
            with safe_open(self.path, "pt") as file:
                tensor: Tensor = file.get_tensor(key)
                return tensor.clone() if self.infos[key].rounding is None else unpack(tensor)
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


def _info(path: Path, key: str, item: Any) -> TensorInfo:
    """Say what a tensor is; of one in fewer bits its header says it, which alone is read."""
    kind, shape = item.get_dtype(), tuple(item.get_shape())
    if kind not in DTYPES:
        text = f"element type `{kind}`, which is not supported"
        raise SourceError(f"`{path.name}` stores `{key}` with {text}")
    packed = read_header(item, shape[0]) if kind == "U8" and len(shape) == 1 else None
    if packed is None:
        return TensorInfo(*DTYPES[kind], shape)
    itemsize = next(size for name, size in DTYPES.values() if name == packed.kind)
    return TensorInfo(packed.kind, itemsize, packed.shape, packed.rounding)


class TorchShard(Shard):
    """A file of `torch.save`, opened as weights only and mapped where its format allows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_pointer(path)
        tensors = self._load("meta")
        others = [f"`{key}`" for key, value in tensors.items() if not _is_plain(key, value)]
        if others:
            some = ", ".join(others[:5])
            raise SourceError(f"`{path.name}` holds more than a flat dictionary of tensors: {some}")
        self.infos = {key: TensorInfo.of(value) for key, value in tensors.items()}
        self._places = {  # names of tied tensors have one storage
            key: (value.untyped_storage()._cdata, value.storage_offset(), value.stride())
            for key, value in tensors.items()
        }
        self._open: dict[str, Tensor] | None = None
        self._bytes_read = 0

    def read(self, key: str) -> Tensor:
        import torch

        tensors = self._open  # which another thread may close meanwhile
        if tensors is None:
            tensors, self._bytes_read = self._load("cpu"), 0
            self._open = tensors
        tensor = tensors[key]
        self._bytes_read += tensor.nbytes
        if self._bytes_read >= REOPEN_AFTER_BYTES:
            self.close()
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def are_one(self, first: str, second: str) -> bool:
        return self._places[first] == self._places[second]

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
            kind = type(loaded).__name__
            raise SourceError(f"`{self.path.name}` holds a `{kind}`, not a dictionary of tensors")
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


# In the order of Transformers: a single file wins over an index, safetensors over torch.
_LAYOUTS: dict[str, Callable[[Path], Shard]] = {
    "model.safetensors": SafetensorsShard,
    "model.safetensors.index.json": SafetensorsShard,
    "pytorch_model.bin": TorchShard,
    "pytorch_model.bin.index.json": TorchShard,
}


class WeightStore:
    """The tensors of a checkpoint by name, each read from disk when it is asked for."""

    def __init__(
        self, folder: Path, shards: Mapping[str, Shard], where: Mapping[str, tuple[str, str]]
    ) -> None:
        """Take files by name, and for each tensor its file and its name in there."""
        self.folder = folder
        self._shards, self._where = dict(shards), dict(where)
        self._last: Shard | None = None
        self._lock = threading.Lock()

    @staticmethod
    def are_in(folder: Path) -> bool:
        return any((folder / name).is_file() for name in _LAYOUTS) or any(folder.glob("*-of-*"))

    @staticmethod
    def files_in(folder: Path) -> set[str]:
        """Names of the index files in a folder, and of all files that they name."""
        indices = {name for name in _LAYOUTS if name.endswith(".index.json")}
        indices = {name for name in indices if (folder / name).is_file()}
        return indices.union(*(_read_index(folder / name, []).values() for name in indices))

    @classmethod
    def open(cls, folder: Path | str) -> WeightStore:
        """Check all files in a folder without reading a weight; an error lists all problems."""
        folder = Path(folder)
        name = next((name for name in _LAYOUTS if (folder / name).is_file()), None)
        if name is None:
            raise _no_weights(folder)
        problems: list[str] = []
        index, files = {}, [name]
        if name.endswith(".index.json"):
            index = _read_index(folder / name, problems)
            files = sorted(set(index.values()))
        shards: dict[str, Shard] = {}
        for file in files:
            try:
                shards[file] = _LAYOUTS[name](folder / file)
            except FileNotFoundError:
                problems.append(f"`{file}` is missing")
            except SourceError as error:
                problems.append(error.message)
            except OSError as error:
                problems.append(f"`{file}` cannot be read ({error.strerror})")
        where = _locate(shards, index, problems)
        if problems:
            many = f", {len(problems)} problems" if problems[1:] else ""
            text = f"the weights in `{folder}` cannot be used{many}:{after_colon(problems)}"
            raise SourceError(text, "download or save the named files again")
        return cls(folder, shards, where)

    def renamed(self, names: Mapping[str, str]) -> WeightStore:
        """Give a view with some tensors only, by names here under new ones; same fingerprint."""
        where = {new: self._where[old] for new, old in names.items()}
        return WeightStore(self.folder, self._shards, where)

    def viewed(self, view: Callable[[Shard, Mapping[str, str]], Shard]) -> WeightStore:
        """Give the same tensors read in another way, by a view of each file; same fingerprint.

        `view` takes a file and the names in it of its tensors, by their names here.
        """
        names: dict[str, dict[str, str]] = {file: {} for file in self._shards}
        for key, (file, name) in self._where.items():
            names[file][key] = name
        shards = {file: view(shard, names[file]) for file, shard in self._shards.items()}
        return WeightStore(self.folder, shards, self._where)

    def name_inside(self, key: str) -> str:
        """Name of a tensor in its file; another one only in a renamed view."""
        return self._where[key][1]

    def keys(self) -> list[str]:
        return sorted(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    @property
    def files(self) -> list[str]:
        return sorted(self._shards)

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes(key) for key in self._where)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._info(key).shape

    def kind(self, key: str) -> str:
        return self._info(key).kind

    def dtype(self, key: str) -> torch.dtype:
        return self._info(key).dtype

    def nbytes(self, key: str) -> int:
        return self._info(key).nbytes

    def rounding(self, key: str) -> Rounding | None:
        """Bits that a tensor is stored in, where these are fewer than those of its dtype."""
        return self._info(key).rounding

    def file_of(self, key: str) -> str:
        return self._where[key][0]

    def tensor(self, key: str) -> Tensor:
        """Read a tensor, as stored, into memory of its own; one file is open for further reads.

        Several threads may read at once, from several files too.
        """
        self._info(key)
        file, name = self._where[key]
        shard = self._shards[file]
        # Not held while reading: who waits for a thread that reads may have begun to read too.
        with self._lock:
            last, self._last = self._last, shard
        if last is not None and last is not shard:
            last.close()
        with timed(READING):
            value = shard.read(name)
        if self._last is not shard:  # another thread went on to another file meanwhile
            shard.close()
        return value

    def are_same(self, first: str, second: str) -> bool:
        """Tell whether two tensors hold the same numbers; one with two names is not read."""
        import torch

        (file, name), (other_file, other_name) = self._where[first], self._where[second]
        if (self.shape(first), self.dtype(first)) != (self.shape(second), self.dtype(second)):
            return False
        if file == other_file and self._shards[file].are_one(name, other_name):
            return True
        return torch.equal(self.tensor(first), self.tensor(second))

    def times(self) -> list[tuple[str, int]]:
        return [(name, (self.folder / name).stat().st_mtime_ns) for name in self.files]

    def fingerprint(self) -> str:
        """Identify these weights by names, sizes, headers and samples of the files, not dates."""
        digest = hashlib.sha256()
        for name, shard in sorted(self._shards.items()):
            digest.update(f"{name}\0{shard.path.stat().st_size}\0".encode())
            digest.update(shard.digest())
        return digest.hexdigest()

    def _info(self, key: str) -> TensorInfo:
        if key not in self._where:
            near = get_close_matches(key, self._where, n=3)
            hint = f"near names are {listed(near)}"
            raise SourceError(f"the checkpoint in `{self.folder}` has no tensor `{key}`", hint)
        file, name = self._where[key]
        return self._shards[file].infos[name]


def _no_weights(folder: Path) -> SourceError:
    if not folder.is_dir():
        return SourceError(f"there is no folder `{folder}`", hint="check the path")
    hint = "save the model with `save_pretrained`, which writes `model.safetensors`"
    if any(folder.glob("*-of-*")):
        hint = "the index of the shards is missing: download it too"
    elif any(folder.glob("*.onnx")) or any(folder.glob("onnx/*.onnx")):
        hint = NO_ONNX
    content = f"expected one of {listed(_LAYOUTS)}, found {folder_content(folder)}"
    return SourceError(f"`{folder}` holds no weights: {content}", hint)


def _read_index(path: Path, problems: list[str]) -> dict[str, str]:
    """Give the file of each tensor; only names that stay inside the folder are accepted."""
    try:
        pairs: dict[str, str] = read_json(path, strict=True)["weight_map"]
        if others := [key for key, file in pairs.items() if not isinstance(file, str)]:
            raise ValueError(f"{listed(others)} name no file")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(f"`{path.name}` is no weight index ({type(error).__name__}: {error})")
        return {}
    if not pairs:
        problems.append(f"`{path.name}` names no tensors")
    outside = sorted({file for file in pairs.values() if not _is_inside(file)})
    problems.extend(f"`{path.name}` names `{file}`, outside the folder" for file in outside)
    return {key: file for key, file in pairs.items() if file not in outside}


def _is_inside(file: str) -> bool:
    # By name only: in the hub's cache every file is a link that leads out of the folder.
    path = PurePosixPath(file)
    outside = path.is_absolute() or ".." in path.parts or "\\" in file or ":" in file
    return bool(path.parts) and not outside


def _locate(
    shards: Mapping[str, Shard], index: Mapping[str, str], problems: list[str]
) -> dict[str, tuple[str, str]]:
    """Say which file holds each tensor; like Transformers, take tensors the index left out."""
    found: dict[str, tuple[str, str]] = {}
    for file, shard in shards.items():
        absent = [key for key, place in index.items() if place == file and key not in shard.infos]
        if absent:
            problems.append(f"the index places {listed(absent)} in `{file}`, where it is not")
        for key in shard.infos:
            # Which of two would count depends on the version of Transformers.
            first, _ = found.setdefault(key, (file, key))
            if first != file:
                problems.append(f"`{key}` is both in `{first}` and in `{file}`")
    return found


_TYPES = {kind for kind, _ in DTYPES.values()} | {"float", "double", "half"}
_WORDS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
          "f16": "float16", "f32": "float32", "f64": "float64"}  # fmt: skip
_KEYS = ("dtype", "torch_dtype")


def plain_types(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Give settings in which dtypes are words of torch; `auto`, as weights say, is left out."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and key.endswith("config"):
            found[key] = plain_types(value, path)
        elif key not in _KEYS or value is None or (isinstance(value, str) and value in _TYPES):
            found[key] = value
        else:
            word = str(value).strip().lower().removeprefix("torch.")
            word = _WORDS.get(word, word)
            if word not in _TYPES and word != "auto":
                allowed = ", ".join(f"`{name}`" for name in ("float32", "float16", "bfloat16"))
                text = f"`{path}` has `{str(value)[:40]}` as `{key}`, expected {allowed} or `auto`"
                raise SourceError(text, f"correct `{key}`, or delete it: weights say it themselves")
            found |= {} if word == "auto" else {key: word}
    return found
