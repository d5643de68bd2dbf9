"""What a teacher computes for texts that a run meets again: once, then read from a file.

On a CPU, that is. A block of width d computes 24 d^2 operations for a token, whose state is 2 d
bytes: a GPU is done with them before its disk, or even its bus, has brought the state.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from tcompress.training.objectives import Observed

MOST_BYTES = 4 * 2**30
"""Of one file; where a run needs more, or half of what the disk has left, nothing is kept."""


class _Part(NamedTuple):
    """One tensor among those of a pass, in the columns of the file."""

    name: str
    columns: int  # of two bytes each
    dtype: torch.dtype
    by_token: bool = True


class KeptOutputs:
    """Outputs of a teacher by text, in a file that a run which goes on finds again.

    States are rounded to bfloat16, in the first pass as in all others; logits are not. What was
    computed for a text together with its first batch is what every pass over it gets: so a run
    that was killed and goes on computes what it would have.
    """

    def __init__(self, path: Path, lengths: Sequence[int], *, logits: bool) -> None:
        self._path, self._logits = path, logits
        self._lengths = torch.tensor(lengths)
        self._starts = self._lengths.cumsum(0) - self._lengths
        self._parts: list[_Part] | None = None  # none are kept
        self._table = self._known = torch.empty(0)
        self._is_open = self._ends_with_state = False

    def observed(
        self, places: Tensor, run: Callable[[], Observed], tokens: int | None = None
    ) -> Observed:
        """Gives what the teacher computes for texts, or has computed.  # places: (texts,).

        Texts are as long as the longest of them, or have so many `tokens` with padding.
        """
        if self._parts and bool(self._known[places].all()):
            return self._read(places, tokens)
        seen = run()
        if not self._is_open:
            self._open(seen)
        if not self._parts:
            return seen
        self._write(places, self._tensors(seen))
        return self._read(places, tokens)

    def _tensors(self, seen: Observed) -> dict[str, Tensor]:
        """What objectives read of a pass, by name."""
        found = {f"state {index}": state for index, state in enumerate(seen.states)}
        found |= {f"projection {role}": own for role, own in seen.projections.items()}
        if seen.final is not None and not _ends_with_state(seen):
            found["final"] = seen.final
        if self._logits and seen.logits is not None:
            found["logits"] = seen.logits
        return found

    def _open(self, seen: Observed) -> None:
        self._is_open = True
        tensors = self._tensors(seen)
        tokens = {own.shape[1] for name, own in tensors.items() if name != "logits"}
        if len(tokens) != 1:  # two stacks, which read texts of their own
            return
        parts = [
            _Part(name, 2 * own.shape[-1], torch.float32, own.ndim > 2)
            if name == "logits"
            else _Part(name, own.shape[-1], torch.bfloat16)
            for name, own in tensors.items()
        ]
        rows, columns = int(self._lengths.sum()), sum(part.columns for part in parts)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        room = min(MOST_BYTES, shutil.disk_usage(self._path.parent).free // 2)
        if 2 * rows * columns > room:
            return
        with suppress(OSError):  # the disk has filled up meanwhile
            self._table = _mapped(self._path, rows * columns, torch.int16).view(rows, columns)
            known = self._path.with_suffix(".known")
            self._known = _mapped(known, len(self._lengths), torch.uint8)
            self._parts, self._ends_with_state = parts, _ends_with_state(seen)

    def _rows(self, places: Tensor, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Rows of the file that texts have, and which tokens of a batch these are."""
        lengths = self._lengths[places]
        token = torch.arange(tokens or int(lengths.max()))
        inside = token < lengths[:, None]
        return (self._starts[places][:, None] + token)[inside], inside

    def _write(self, places: Tensor, tensors: dict[str, Tensor]) -> None:
        assert self._parts
        new = self._known[places] == 0
        if not new.any():
            return
        rows, inside = self._rows(places[new])
        packed = []
        for part in self._parts:
            value = tensors[part.name].detach()[new]
            if not part.by_token:
                value = value[:, None].expand(-1, inside.shape[1], -1)
            value = value[:, : inside.shape[1]][inside]
            packed.append(value.to(part.dtype).contiguous().view(torch.int16))
        self._table.index_copy_(0, rows, torch.cat(packed, -1))
        self._known[places[new]] = 1  # last: what is known is there

    def _read(self, places: Tensor, tokens: int | None) -> Observed:
        assert self._parts
        rows, inside = self._rows(places, tokens)
        padded = self._table.new_zeros(*inside.shape, self._table.shape[1])
        padded[inside] = self._table[rows]
        seen, returned = Observed(), SimpleNamespace()
        split = padded.split([part.columns for part in self._parts], -1)
        for part, own in zip(self._parts, split, strict=True):
            value = own.contiguous().view(part.dtype).float()
            kind, _, role = part.name.partition(" ")
            if kind == "state":
                seen.states.append(value)
            elif kind == "projection":
                seen.projections[role] = value
            elif kind == "final":
                returned.last_hidden_state = value
            else:
                returned.logits = value if part.by_token else value[:, 0]
        if self._ends_with_state:
            returned.last_hidden_state = seen.states[-1]
        seen.output = returned
        return seen


def _ends_with_state(seen: Observed) -> bool:
    """Whether the last block computes what the model returns."""
    return seen.final is not None and seen.final is seen.states[-1]


def _mapped(path: Path, count: int, dtype: torch.dtype) -> Tensor:
    """A tensor in a file, which has zeros where nothing was written.

    Its place on the disk is taken now: where it is lacking later, writing would end the process.
    """
    if count and hasattr(os, "posix_fallocate"):
        with path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype)
