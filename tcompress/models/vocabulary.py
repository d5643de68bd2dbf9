"""Which tokens of a model are left, and weights that hold the rows of these tokens only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from tcompress.models.store import Shard, TensorInfo, WeightStore

if TYPE_CHECKING:
    from torch import Tensor, nn


class Vocabulary(BaseModel, extra="forbid", frozen=True):
    """The tokens that are left of a model's vocabulary, and how they were chosen."""

    before: int  # rows of the dense model's word embedding
    kept: str  # ids in the dense model of the tokens 0, 1, 2, ..., as runs: `0 100-103 1996`
    rows: int  # number of them that have a row: the tokens that the model knows
    required: int  # those that have to stay: special tokens, an alphabet, what other pieces need
    chosen: Literal["data", "ranks"]  # by counts in data, or by the tokenizer's own order
    data: str = ""  # that was counted, such as `train.csv:text`
    texts: int = 0  # number of its texts
    tokens: int = 0  # number of tokens in them, as the dense model's tokenizer writes them
    pieces: int = 0  # number of different ones
    covered: float | None = None  # share of these tokens that are left
    alone: int = 0  # number of these tokens that are left for the sake of one row
    parameters: int = 0  # that the model loses, tied ones counted once

    @property
    def lost(self) -> float | None:
        """Share of tokens in new rows like those of the data that are not left; None if unknown.

        A row that is new is like each row of the data to all others: what is left for its sake
        alone would be missing (an estimate by leaving one out, as Good's of unseen species, 1953).
        """
        if self.covered is None or self.rows > self.required + self.pieces:
            return None  # without data; or tokens that it lacks are left too
        return 1 - self.covered + self.alone / max(1, self.tokens)

    @property
    def origin(self) -> str:
        """Criterion by which they were chosen, in words."""
        if self.chosen == "ranks":
            return "by the ranks of its tokenizer"
        return f"by how often they occur in {self.data}"

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Ids in the dense model by those of the result."""
        return tuple(_listed(self.kept))


def as_runs(ids: Iterable[int]) -> str:
    """Write ids, in their order, as runs such as `0 100-103 1996`."""
    # An id less its place is the same all along a run.
    groups = groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0])
    runs = [[index for _, index in group] for _, group in groups]
    return " ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _listed(runs: str) -> Iterator[int]:
    for run in runs.split():
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


class _RowsShard(Shard):
    """A file of weights of which some tensors are read in part."""

    def __init__(self, shard: Shard, axes: Mapping[str, int], rows: Sequence[int]) -> None:
        self._shard, self._axes, self._rows = shard, axes, rows
        self.path, self.infos = shard.path, dict(shard.infos)
        for key, axis in axes.items():
            info = shard.infos[key]
            shape = (*info.shape[:axis], len(rows), *info.shape[axis + 1 :])
            self.infos[key] = TensorInfo(info.kind, info.itemsize, shape)

    def read(self, key: str) -> Tensor:
        tensor = self._shard.read(key)
        axis = self._axes.get(key)
        return tensor if axis is None else select_rows(tensor, axis, self._rows)

    def digest(self) -> bytes:
        return self._shard.digest()

    def close(self) -> None:
        self._shard.close()


def with_rows(store: WeightStore, axes: Mapping[str, int], rows: Sequence[int]) -> WeightStore:
    """Give a view of weights in which tensors have these rows only, along axes by their names.

    Its fingerprint is that of the weights.
    """

    def view(shard: Shard, names: Mapping[str, str]) -> Shard:
        return _RowsShard(shard, {names[k]: axis for k, axis in axes.items() if k in names}, rows)

    return store.viewed(view)


def select_rows(tensor: Tensor, axis: int, rows: Sequence[int]) -> Tensor:
    """Copy rows of a tensor along an axis."""
    import torch

    return tensor.index_select(axis, torch.tensor(rows, dtype=torch.long, device=tensor.device))


def row_axes(whole: nn.Module, cut: nn.Module, before: int, after: int) -> dict[str, int]:
    """Find the tensors of a model that have a row for each token: the axis of each, by name.

    `cut` is the same by a config that has `after` tokens in place of `before`; values do not
    matter. A `ValueError` names a tensor in which they differ by more than one axis.
    """
    old, new = whole.state_dict(keep_vars=True), cut.state_dict(keep_vars=True)
    axis_of: dict[str, int] = {}
    for name in {**old, **new}:
        shape, other = (tuple(s[name].shape) if name in s else None for s in (old, new))
        if shape == other:
            continue
        axes = [
            axis
            for axis, size in enumerate(shape or ())
            if shape and size == before and other == (*shape[:axis], after, *shape[axis + 1 :])
        ]
        if not axes:
            raise ValueError(f"`{name}` is more than a row for each token")
        axis_of[name] = axes[0]
    return axis_of
