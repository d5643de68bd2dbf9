"""Files that work in progress keeps and reads back: written whole, and nothing where damaged.

A file belongs to what it was computed from: its name, or a field of it, carries a `fingerprint` of
all that its content depends on. Whoever reads one that is absent, cut off by a kill or written by
another version gets None and computes again. Records are written by `files.write_text`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import SafetensorError, safe_open

from tcompress.files import beside

if TYPE_CHECKING:  # records are read before anything is imported that takes seconds
    import torch
    from torch import Tensor

T = TypeVar("T")

DAMAGED = (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError)
"""Errors of reading a file that is absent, damaged, or of another version."""


def fingerprint(*facts: object) -> str:
    """Identify values by their `repr`, in 24 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(repr([*facts]).encode()).hexdigest()[:24]


def read_record(path: Path, parse: Callable[[str], T]) -> T | None:
    """Read a small text file; None where it is absent, or `parse` refuses what is in it."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except DAMAGED:
        return None


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors of any device, all of them or nothing."""
    from safetensors.torch import save_file

    with beside(path) as unfinished:
        on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_cpu, unfinished, metadata)


def load_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Read tensors onto the device that computes with them.

    Whoever reads has to say where: a file does not know on which device its tensors were made, and
    one that stays behind on the CPU fails on all others, in the first product.
    """
    from safetensors.torch import load_file

    # The library reads onto a device by itself only if it knows its name.
    return {name: tensor.to(device) for name, tensor in load_file(path).items()}


class StoredTensors(Mapping[str, "Tensor"]):
    """Tensors of a file by name, each read onto a device when it is asked for.

    Nothing is in it where the file is absent, or cut off (`is_readable`).
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._device = path, device
        self._names: tuple[str, ...] = ()
        self.is_readable = True
        try:
            with safe_open(path, "pt") as file:
                self._names = tuple(file.keys())
        except DAMAGED:
            self.is_readable = False

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        with safe_open(self._path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor.to(self._device, copy=True)  # pages of a mapped file stay resident

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_tensors(path: Path, device: torch.device) -> dict[str, Tensor] | None:
    """Read tensors onto a device; None where the file is absent or damaged."""
    try:
        return load_tensors(path, device)
    except DAMAGED:
        return None
