"""The weights of a checkpoint: an index of all tensors, and lazy reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tcompress.errors import SourceError, after_colon, folder_content, listed, read_json
from tcompress.models.tensor_files import SafetensorsShard, Shard, TensorInfo, TorchShard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
        self,
        folder: Path,
        shards: Mapping[str, Shard],
        where: Mapping[str, str],
        inside: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._shards = dict(shards)
        self._where = dict(where)
        self._inside = dict(inside or {})  # names in the files, where they differ
        self._last: Shard | None = None

    @staticmethod
    def are_in(folder: Path) -> bool:
        return any((folder / name).is_file() for name in _LAYOUTS) or any(folder.glob("*-of-*"))

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
        inside = {new: self.name_inside(old) for new, old in names.items()}
        return WeightStore(self.folder, self._shards, where, inside)

    def name_inside(self, key: str) -> str:
        """Name of a tensor in its file; another one only in a renamed view."""
        return self._inside.get(key, key)

    def keys(self) -> list[str]:
        return sorted(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

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

    def file_of(self, key: str) -> str:
        return self._where[key]

    def tensor(self, key: str) -> Tensor:
        """Read a tensor, as stored, into memory of its own; one file is open for further reads."""
        self._info(key)
        shard = self._shards[self._where[key]]
        if self._last is not None and self._last is not shard:
            self._last.close()
        self._last = shard
        return shard.read(self.name_inside(key))

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
        return self._shards[self._where[key]].infos[self.name_inside(key)]


def _no_weights(folder: Path) -> SourceError:
    if not folder.is_dir():
        return SourceError(f"there is no folder `{folder}`", hint="check the path")
    hint = "save the model with `save_pretrained`, which writes `model.safetensors`"
    if any(folder.glob("*-of-*")):
        hint = "the index of the shards is missing: download it too"
    return SourceError(
        f"`{folder}` holds no weights: expected one of {listed(_LAYOUTS)}, "
        f"found {folder_content(folder)}",
        hint=hint,
    )


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
    return not (
        path.is_absolute() or ".." in path.parts or "\\" in file or ":" in file or not path.parts
    )


def _locate(
    shards: Mapping[str, Shard], index: Mapping[str, str], problems: list[str]
) -> dict[str, str]:
    """Say which file holds each tensor; like Transformers, take tensors the index left out."""
    found: dict[str, str] = {}
    for file, shard in shards.items():
        absent = [key for key, place in index.items() if place == file and key not in shard.infos]
        if absent:
            problems.append(f"the index places {listed(absent)} in `{file}`, where it is not")
        for key in shard.infos:
            # Which of two would count depends on the version of Transformers.
            if found.setdefault(key, file) != file:
                problems.append(f"`{key}` is both in `{found[key]}` and in `{file}`")
    return found
