"""Shapes of tensor-train matrices: how sizes split into modes, and which ranks fit.

A tensor-train matrix of N cores maps J = J_1 ... J_N inputs to I = I_1 ... I_N outputs. Core n has
the shape (R_{n-1}, I_n, J_n, R_n) with R_0 = R_N = 1; `ranks` are the inner ones, R_1 to R_{N-1}.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count, pairwise

from tcompress.errors import InputError

BALANCE = 2  # the largest mode may exceed the geometric mean by this factor


@lru_cache(maxsize=1024)
def balanced_modes(size: int, order: int) -> tuple[int, ...]:
    """Factors a size into modes as equal as possible, padding it where it has no such factors.

    Modes are balanced if the largest is at most twice the `order`-th root of their product. A size
    whose most even factorisation is not (a prime, twice a prime) gives the modes of the next size
    that has one. So from size 4 on at least two modes are larger than 1, whatever the size.

    Args:
        size: Number of inputs or outputs.
        order: Number of modes N.

    Returns:
        N modes in ascending order, whose product is the size or a little more.

    Raises:
        InputError: Size or order below 1.
    """
    if size < 1 or order < 1:
        raise InputError(f"modes need a size and an order of at least 1, found {size} and {order}")
    for padded in count(size):  # ends at the next power of `order`, at the latest
        modes = min(_factorisations(padded, order), key=lambda found: (found[-1] / found[0], found))
        if modes[-1] ** order <= BALANCE**order * padded:
            return modes
    raise AssertionError  # the loop only ends by returning


def _factorisations(size: int, order: int, smallest: int = 1) -> Iterator[tuple[int, ...]]:
    """All ascending factorisations into `order` factors that start at `smallest` or above."""
    if order == 1:
        yield (size,)
        return
    for factor in range(smallest, size + 1):
        if factor**order > size:
            return
        if size % factor == 0:
            for rest in _factorisations(size // factor, order - 1, factor):
                yield (factor, *rest)


def quantized_modes(size: int) -> tuple[int, ...]:
    """Returns modes of 2 whose product is the next power of two; (1,) for a size of 1."""
    if size < 1:
        raise InputError(f"modes need a size of at least 1, found {size}")
    return (2,) * (size - 1).bit_length() or (1,)


def matrix_modes(
    in_features: int, out_features: int, order: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Chooses balanced modes for both sides of a matrix.

    Input modes descend while output modes ascend, which makes the products I_n J_n of the cores
    more equal: fewer parameters at every rank.

    Returns:
        Input modes and output modes.
    """
    return balanced_modes(in_features, order)[::-1], balanced_modes(out_features, order)


def quantized_matrix_modes(
    in_features: int, out_features: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Chooses modes of 2 for both sides of a matrix.

    The longer side has more of them: there the leading cores are 2 x 1 or 1 x 2, so that the
    shorter side is not padded beyond its own power of two.

    Returns:
        Input modes and output modes, equally many.
    """
    in_modes, out_modes = quantized_modes(in_features), quantized_modes(out_features)
    length = max(len(in_modes), len(out_modes))
    return (1,) * (length - len(in_modes)) + in_modes, (1,) * (length - len(out_modes)) + out_modes


def clip_ranks(
    ranks: Sequence[int], in_modes: Sequence[int], out_modes: Sequence[int]
) -> tuple[int, ...]:
    """Clips inner ranks to what the shape admits.

    No rank can usefully exceed the number of entries of the cores on either side of it, nor,
    within a list of different ranks, what its neighbours and the modes between them admit.

    Args:
        ranks: Wanted ranks R_1 to R_{N-1}, at least 1.
        in_modes: Input modes J_1 to J_N.
        out_modes: Output modes I_1 to I_N.

    Raises:
        InputError: Numbers of modes and ranks that do not belong together, or a rank below 1.
    """
    sizes = _core_sizes(in_modes, out_modes)
    if len(ranks) != len(sizes) - 1 or any(rank < 1 for rank in ranks):
        raise InputError(
            f"{len(sizes)} cores have {len(sizes) - 1} inner ranks of at least 1, "
            f"found {list(ranks)}"
        )
    clipped = [1, *ranks, 1]
    for n, size in enumerate(sizes[:-1], 1):
        clipped[n] = min(clipped[n], clipped[n - 1] * size)
    for n in range(len(sizes) - 1, 0, -1):
        clipped[n] = min(clipped[n], clipped[n + 1] * sizes[n])
    return tuple(clipped[1:-1])


def full_ranks(in_modes: Sequence[int], out_modes: Sequence[int]) -> tuple[int, ...]:
    """Returns the ranks at which a tensor train represents every matrix of its shape."""
    sizes = _core_sizes(in_modes, out_modes)
    return clip_ranks([math.prod(sizes)] * (len(sizes) - 1), in_modes, out_modes)


def parameter_count(in_modes: Sequence[int], out_modes: Sequence[int], ranks: Sequence[int]) -> int:
    """Counts the numbers in the cores of these inner ranks."""
    sizes = _core_sizes(in_modes, out_modes)
    bonds = pairwise((1, *ranks, 1))
    return sum(a * size * b for (a, b), size in zip(bonds, sizes, strict=True))


def rank_for_budget(in_modes: Sequence[int], out_modes: Sequence[int], budget: int) -> int:
    """Finds the largest uniform rank, clipped at every position, that a budget pays for.

    Args:
        in_modes: Input modes J_1 to J_N.
        out_modes: Output modes I_1 to I_N.
        budget: Number of parameters.

    Returns:
        The rank, at most the largest that the shape admits; 0 if not even rank 1 fits.
    """
    inner = len(_core_sizes(in_modes, out_modes)) - 1

    def fits(rank: int) -> bool:
        ranks = clip_ranks([rank] * inner, in_modes, out_modes)
        return parameter_count(in_modes, out_modes, ranks) <= budget

    low, high = 0, max(full_ranks(in_modes, out_modes), default=1)
    while low < high:  # the count grows with the rank
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _core_sizes(in_modes: Sequence[int], out_modes: Sequence[int]) -> list[int]:
    """I_n J_n of every core."""
    if not in_modes or len(in_modes) != len(out_modes):
        raise InputError(
            "a tensor train needs as many input modes as output modes, found "
            f"{list(in_modes)} and {list(out_modes)}"
        )
    return [rows * columns for rows, columns in zip(out_modes, in_modes, strict=True)]
