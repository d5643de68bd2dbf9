"""Rounding of weights to a few bits: whole codes on a symmetric grid, and how both are packed.

A tensor is a matrix of rows here; a row, or a group of numbers in it, has one scale, and a number
is its code times that scale. Zero is on every grid, so that there are no zero points. Packed, a
tensor is one run of bytes that says by itself what it holds: a header, the scales, the codes. torch
is imported where it is used, since sizes alone need none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from tcompress.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BITS = (8, 4, 3)
GROUP = 32
"""Numbers that share a scale, below eight bits."""

_MAGIC = 0x31424354  # `TCB1`
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_WORDS = 4  # of the header are filled up to a multiple of it
_CHUNK = 2**22  # numbers that are worked on at a time
_EXPONENT = 0x7F800000  # bits of a float32 that are the power of two in it
# Levels that the largest number of a group may stand for, relative to the largest code.
_STRETCH = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)


@dataclass(frozen=True)
class Rounding:
    """Width of codes, and how many numbers of a row share a scale; None is a whole row."""

    bits: int
    group: int | None = None

    def __str__(self) -> str:
        return f"{self.bits} bits" + (f" in groups of {self.group}" if self.group else "")

    @classmethod
    def usual(cls, bits: int, group: int | None = None) -> Rounding:
        """Return one scale per row for eight bits, and groups for fewer, by default of 32."""
        return cls(bits, None if bits == 8 else group or GROUP)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Count the bytes of a packed tensor, header and scales included."""
        rows, columns = matrix_shape(shape)
        scales = rows * _ceil(columns, self.group or columns) * 2
        return 4 * _header_words(len(shape)) + scales + _code_bytes(prod(shape), self.bits)


def widths_text(weights: Rounding | None, embeddings: Rounding | None) -> str:
    """Say to what a model is rounded, such as `8 bits, word embedding 4 bits in groups of 32`."""
    if embeddings is None or embeddings == weights:
        return str(weights)
    table = f"word embedding {embeddings}"
    return table if weights is None else f"{weights}, {table}"


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor: as many last axes are columns as give a group's width."""
    columns = 1
    for axis in reversed(range(len(shape))):
        columns *= shape[axis]
        if columns >= GROUP:
            return prod(shape[:axis]), columns
    return 1, columns


def quantize(weight: Tensor, bits: int, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Round a tensor to the nearest points of symmetric grids.

    Args:
        weight: Any floating tensor, finite; it is the matrix of `matrix_shape`.
        bits: Width of a code, 2 to 8: codes go from -2^(bits-1) to 2^(bits-1) - 1.
        group: Numbers of a row that share a scale; None for a whole row.

    Returns:
        Codes, int8 (rows, columns), and scales, bfloat16 (rows, ceil(columns / group)). A scale may
        be negative, which puts the extreme code on the side of the largest number; a group of zeros
        has the scale 0.
    """
    import torch

    matrix = _matrix(weight)
    step = max(1, _CHUNK // matrix.shape[1])
    codes, scales = zip(*(_rounded(rows, bits, group) for rows in matrix.split(step)), strict=True)
    return torch.cat(codes), torch.cat(scales)


def dequantize(codes: Tensor, scales: Tensor, group: int | None = None) -> Tensor:
    """Multiply codes by their scales, float32.  # (rows, columns), (rows, groups) -> the same."""
    return codes.float() * _steps(scales, group, codes.shape[1])


def _steps(scales: Tensor, group: int | None, columns: int) -> Tensor:
    """The scale of every number of a row.  # (rows, groups) -> (rows, columns)."""
    return scales.float().repeat_interleave(group or columns, 1)[:, :columns]


def _matrix(weight: Tensor) -> Tensor:
    return weight.detach().reshape(matrix_shape(weight.shape))


def rounded(weight: Tensor, rounding: Rounding) -> Tensor:
    """Round a tensor as it is when it was stored and read again; its shape and dtype stay."""
    codes, scales = quantize(weight, rounding.bits, rounding.group)
    return dequantize(codes, scales, rounding.group).to(weight.dtype).reshape(weight.shape)


def usual_scales(weight: Tensor, bits: int, group: int | None = None) -> Tensor:
    """Scales on which the largest number of each group lies half a code beyond the last one.

    Of those that `quantize` looks at they are the best on average.  # (rows, groups).
    """
    largest = _grouped(weight, group).abs().amax(-1)
    return (largest / (code_bounds(bits)[1] + 0.5 * (bits < 8))).bfloat16()


def _grouped(weight: Tensor, group: int | None) -> Tensor:
    """The numbers of a tensor, filled up with zeros.  # (rows, groups, group)."""
    from torch.nn.functional import pad

    matrix = _matrix(weight).float()
    group = group or matrix.shape[1]
    return pad(matrix, (0, -matrix.shape[1] % group)).unflatten(1, (-1, group))


def nearest(weight: Tensor, scales: Tensor, rounding: Rounding) -> Tensor:
    """Round a tensor to grids of known scales, those of `quantize`; its shape and dtype stay."""
    import torch

    matrix = _matrix(weight).float()
    steps = _steps(scales, rounding.group, matrix.shape[1])
    codes = (matrix / torch.where(steps == 0, 1.0, steps)).round_()
    return codes.clamp_(*code_bounds(rounding.bits)).mul_(steps).to(weight).reshape(weight.shape)


def code_bounds(bits: int) -> tuple[int, int]:
    """The smallest and the largest code: with eight bits as many on both sides of zero."""
    highest = 2 ** (bits - 1) - 1
    return -highest - (bits < 8), highest


def _rounded(matrix: Tensor, bits: int, group: int | None) -> tuple[Tensor, Tensor]:
    """Choose, for each group, the scale of least squared error.  # (rows, columns)."""
    import torch

    grouped, (lowest, top) = _grouped(matrix, group), code_bounds(bits)
    largest = grouped.abs().amax(-1, keepdim=True)
    # Relative to the power of two below the largest: float32 holds no squares of very small or very
    # large numbers, and all scales would look alike.
    unit = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)
    unit = torch.where(unit == 0, 1.0, unit)
    grouped, largest = grouped / unit, largest / unit
    # With eight bits nothing is won by cutting the largest numbers off. Levels below the last one
    # are those of numbers on a grid whose extreme codes none of them has: they stay as they are.
    levels: list[float] = [top]
    if bits < 8:
        levels = [*range(1, top), *(top + more for more in _STRETCH if more <= top)]
    best: tuple[Tensor, ...] = ()
    for level in levels:
        for sign in (1,) if level < top or bits == 8 else (1, -1):
            scale = (sign * largest / level).bfloat16().float()
            code = (grouped / torch.where(scale == 0, 1.0, scale)).round_().clamp_(lowest, top)
            error = (code * scale - grouped).square_().sum(-1, keepdim=True)
            now: tuple[Tensor, ...] = (error, code, scale)
            if best:
                better = error < best[0]
                now = tuple(torch.where(better, *pair) for pair in zip(now, best, strict=True))
            best = now
    _, codes, scales = best
    scales = (scales * unit).squeeze(-1).bfloat16()
    return codes.flatten(1)[:, : matrix.shape[1]].to(torch.int8), scales


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes without gaps, the first in the lowest bits, as codes + 2^(bits-1).  # (n,)."""
    import torch

    flat = (codes.reshape(-1).to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    packed = flat if bits == 8 else _recut(flat, bits, 8)
    return packed[: _code_bytes(codes.numel(), bits)]


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack_codes`.  # int8 (count,)."""
    import torch

    flat = packed if bits == 8 else _recut(packed, 8, bits)
    return (flat[:count].to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)


def _recut(numbers: Tensor, bits: int, into: int) -> Tensor:
    """Cut a run of numbers of so many bits into numbers of others.  # uint8 (n,).

    Eight codes are as many bytes as a code has bits: so many at a time are one whole number.
    """
    import torch

    count = 8 * into // max(bits, into)
    rows = torch.nn.functional.pad(numbers, (0, -len(numbers) % count)).reshape(-1, count)
    whole = rows.new_zeros(len(rows), dtype=torch.int64)
    for index in range(count):
        whole |= rows[:, index].long() << index * bits
    starts = range(0, count * bits, into)
    cut = [(whole >> start & 2**into - 1).to(torch.uint8) for start in starts]
    return torch.stack(cut, 1).flatten()


@dataclass(frozen=True)
class Packed:
    """Header of a packed tensor."""

    rounding: Rounding
    kind: str  # element type, by its name in torch
    shape: tuple[int, ...]


_HEADER_BYTES = 64  # hold a header, whatever the shape


def read_header(packed: Any, size: int) -> Packed | None:
    """Read what so many bytes, a tensor or a slice of a file, say of themselves; None if nothing.

    No more than the header is read.
    """
    import numpy as np

    start = packed[: min(size, _HEADER_BYTES) // 4 * 4]
    start = np.asarray(start.cpu() if hasattr(start, "cpu") else start)
    words = start.view("<i4").tolist()
    if len(words) < _WORDS or words[0] != _MAGIC:
        return None
    bits, group, kind, axes = words[1] & 255, words[2], words[3] & 255, words[3] >> 8
    shape = tuple(words[4 : 4 + axes])
    if not (2 <= bits <= 8 and kind < len(_DTYPES) and len(shape) == axes and group >= 0):
        raise SourceError("the header of a packed tensor is damaged")
    rounding = Rounding(bits, group or None)
    return Packed(rounding, _DTYPES[kind], shape) if rounding.nbytes(shape) == size else None


def pack(tensor: Tensor, rounding: Rounding) -> Tensor:
    """Round and pack a tensor.  # uint8 (rounding.nbytes(tensor.shape),)."""
    import torch

    codes, scales = quantize(tensor, rounding.bits, rounding.group)
    kind = _DTYPES.index(str(tensor.dtype).removeprefix("torch."))
    words = [_MAGIC, rounding.bits, rounding.group or 0, kind | tensor.ndim << 8, *tensor.shape]
    words += [0] * (_header_words(tensor.ndim) - len(words))
    header = torch.tensor(words, dtype=torch.int32).view(torch.uint8).to(codes.device)
    raw = scales.contiguous().view(torch.uint8).reshape(-1)
    return torch.cat([header, raw, pack_codes(codes, rounding.bits)])


def unpack(packed: Tensor) -> Tensor:
    """Undo `pack`, but for what rounding lost: shape and dtype are those of the tensor."""
    import torch

    info = read_header(packed[:_HEADER_BYTES].cpu(), len(packed))
    if info is None:
        raise SourceError("a packed tensor is damaged: its size is not that of its header")
    rounding, (rows, columns) = info.rounding, matrix_shape(info.shape)
    groups = _ceil(columns, rounding.group or columns)
    start = 4 * _header_words(len(info.shape))
    stop = start + 2 * rows * groups
    scales = packed[start:stop].clone().view(torch.bfloat16).reshape(rows, groups)
    codes = unpack_codes(packed[stop:], rounding.bits, rows * columns).reshape(rows, columns)
    values = torch.empty(rows, columns, dtype=getattr(torch, info.kind), device=packed.device)
    step = max(1, _CHUNK // columns)
    pieces = zip(values.split(step), codes.split(step), scales.split(step), strict=True)
    for part, code, scale in pieces:
        part.copy_(dequantize(code, scale, rounding.group))
    return values.reshape(info.shape)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def _header_words(axes: int) -> int:
    return _ceil(4 + axes, _WORDS) * _WORDS


def _code_bytes(count: int, bits: int) -> int:
    return _ceil(count * bits, 8)
