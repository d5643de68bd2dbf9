"""Outputs of a teacher for texts that a run meets again: computed once, then read from a file.

On a CPU, that is. A block of width d computes 24 d^2 operations for a token, whose state is 2 d
bytes: a GPU is done with them before its disk, or even its bus, has brought the state.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from tcompress.training.objectives import Observed

MOST_BYTES = 4 * 2**30
"""Of one file; where a run needs more, or half of what the disk has left, nothing is cached."""


class _Part(NamedTuple):
    """One tensor among those of a pass, in the columns of the file."""

    name: str
    columns: int  # of two bytes each
    dtype: torch.dtype
    by_token: bool = True


class TeacherCache:
    """Outputs of a teacher by text, in a file that a run which goes on reads again.

    States are rounded to bfloat16, in the first pass as in all others; logits are not. Every pass
    over a text gets what was computed for it together with its first batch: so a run that was
    killed and goes on computes what it would have.
    """

    def __init__(self, path: Path, lengths: Sequence[int], *, logits: bool) -> None:
        self._path, self._lengths, self._logits = path, torch.tensor(lengths), logits
        self._is_open = False
        self._file: _File | None = None  # nothing is cached

    def observed(
        self, indices: Tensor, run: Callable[[], Observed], tokens: int | None = None
    ) -> Observed:
        """Outputs for texts of these indices (texts,), from the file where all of them are in it.

        Texts are padded to so many tokens, by default to those of the longest.
        """
        if self._file is not None and self._file.has(indices):
            return self._file.read(indices, tokens)
        outputs = run()
        if not self._is_open:
            self._is_open = True
            self._file = _File.of(self._path, self._lengths, outputs, logits=self._logits)
        if self._file is None:
            return outputs
        self._file.write(indices, _tensors(outputs, logits=self._logits))
        return self._file.read(indices, tokens)


@dataclass(frozen=True, eq=False)
class _File:
    """A file with a row for each token of each text, laid out like the outputs of the first pass.

    Use `_File.of`.
    """

    parts: Sequence[_Part]
    ends_with_state: bool  # as the last block computes what the model returns
    lengths: Tensor  # (texts,)
    table: Tensor  # (tokens of all texts, columns)
    written: Tensor  # 1 for texts in the table: (texts,)

    @classmethod
    def of(cls, path: Path, lengths: Tensor, outputs: Observed, *, logits: bool) -> _File | None:
        """Open a file; None where there is no room for it, or stacks read texts of their own."""
        tensors = _tensors(outputs, logits=logits)
        tokens = {value.shape[1] for name, value in tensors.items() if name != "logits"}
        if len(tokens) != 1:
            return None
        parts = [
            _Part(name, 2 * value.shape[-1], torch.float32, value.ndim > 2)
            if name == "logits"
            else _Part(name, value.shape[-1], torch.bfloat16)
            for name, value in tensors.items()
        ]
        rows, columns = int(lengths.sum()), sum(part.columns for part in parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that goes on does what it did before, whatever room there is by now.
        refused, size = path.with_suffix(".refused"), 2 * rows * columns
        if refused.exists():
            return None
        begun = path.is_file() and path.stat().st_size == size
        if begun or size <= min(MOST_BYTES, shutil.disk_usage(path.parent).free // 2):
            with suppress(OSError):  # the disk has filled up meanwhile
                table = _mapped(path, rows * columns, torch.int16).view(rows, columns)
                written = _mapped(path.with_suffix(".known"), len(lengths), torch.uint8)
                return cls(parts, _ends_with_state(outputs), lengths, table, written)
        refused.touch()
        return None

    def has(self, indices: Tensor) -> bool:
        """True if all texts are in the file.  # indices: (texts,)."""
        return bool(self.written[indices].all())

    def write(self, indices: Tensor, tensors: dict[str, Tensor]) -> None:
        """Write outputs for those of some texts that are not in the file."""
        absent = self.written[indices] == 0
        if not absent.any():
            return
        rows, is_token = self._rows(indices[absent])
        packed = []
        for part in self.parts:
            value = tensors[part.name].detach()[absent]
            if not part.by_token:
                value = value[:, None].expand(-1, is_token.shape[1], -1)
            value = value[:, : is_token.shape[1]][is_token]
            packed.append(value.to(part.dtype).contiguous().view(torch.int16))
        self.table.index_copy_(0, rows, torch.cat(packed, -1))
        self.written[indices[absent]] = 1  # last: texts that it marks are there

    def read(self, indices: Tensor, tokens: int | None) -> Observed:
        """Read outputs for texts, filled up with zeros to so many tokens."""
        rows, is_token = self._rows(indices, tokens)
        padded = self.table.new_zeros(*is_token.shape, self.table.shape[1])
        padded[is_token] = self.table[rows]
        outputs, returned = Observed(), SimpleNamespace()
        columns = padded.split([part.columns for part in self.parts], -1)
        for part, bits in zip(self.parts, columns, strict=True):
            value = bits.contiguous().view(part.dtype).float()
            kind, _, role = part.name.partition(" ")
            if kind == "state":
                outputs.states.append(value)
            elif kind == "projection":
                outputs.projections[role] = value
            else:
                setattr(returned, part.name, value if part.by_token else value[:, 0])
        if self.ends_with_state:
            returned.last_hidden_state = outputs.states[-1]
        outputs.output = returned
        return outputs

    def _rows(self, indices: Tensor, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Rows of the file that texts have, and which tokens of a batch these are."""
        lengths, starts = self.lengths[indices], self.lengths.cumsum(0) - self.lengths
        token = torch.arange(tokens or int(lengths.max()))
        is_token = token < lengths[:, None]
        return (starts[indices][:, None] + token)[is_token], is_token


def _tensors(outputs: Observed, *, logits: bool) -> dict[str, Tensor]:
    """Tensors that objectives read of a pass, by name."""
    tensors = {f"state {index}": state for index, state in enumerate(outputs.states)}
    tensors |= {f"projection {role}": value for role, value in outputs.projections.items()}
    if outputs.final is not None and not _ends_with_state(outputs):
        tensors["last_hidden_state"] = outputs.final
    if logits and outputs.logits is not None:
        tensors["logits"] = outputs.logits
    return tensors


def _ends_with_state(outputs: Observed) -> bool:
    """True if the last block computes what the model returns."""
    return outputs.final is not None and outputs.final is outputs.states[-1]


def _mapped(path: Path, count: int, dtype: torch.dtype) -> Tensor:
    """A tensor in a file, which has zeros where nothing was written.

    Its room on the disk is taken now: where it is lacking later, writing would end the process.
    """
    if count and hasattr(os, "posix_fallocate"):
        with path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype)
