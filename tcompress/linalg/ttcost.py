"""What a fit of a tensor-train matrix costs, from its shape alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from tcompress.linalg.ttfit import ROOM, SIDE, STEPS, SWEEPS


def fit_macs(
    in_modes: Sequence[int],
    out_modes: Sequence[int],
    ranks: Sequence[int],
    *,
    separates: bool = True,
) -> float:
    """Counts the multiply-adds of `fit_tt`, roughly.

    Args:
        in_modes: Input modes J_1 to J_N.
        out_modes: Output modes I_1 to I_N.
        ranks: Inner ranks R_1 to R_{N-1}.
        separates: Whether neither padded outputs nor an output moment couple output indices.
    """
    return SWEEPS * sum(
        place.visits * place.macs(separates=separates)
        for place in _places(in_modes, out_modes, ranks)
    )


def fit_bytes(in_modes: Sequence[int], out_modes: Sequence[int], ranks: Sequence[int]) -> int:
    """Bytes of the largest normal matrix of `fit_tt`, its factor, and what it is made from."""
    places = list(_places(in_modes, out_modes, ranks))
    return 8 * max(2 * place.side**2 + place.half if place.is_small else 0 for place in places)


@dataclass(frozen=True)
class _Place:
    """A core (a, i, j, b) between o outputs and p inputs before it, x and r after it."""

    a: int
    i: int
    j: int
    b: int
    o: int
    p: int
    x: int
    r: int
    visits: int  # in a sweep

    @property
    def side(self) -> int:
        return self.a * self.j * self.b

    @property
    def half(self) -> int:
        return min((self.a * self.j * self.r) ** 2, (self.p * self.j * self.b) ** 2)

    @property
    def is_small(self) -> bool:
        largest = max((self.p * self.a) ** 2, (self.r * self.b) ** 2, self.half)
        return self.side <= SIDE and largest <= ROOM

    def macs(self, *, separates: bool) -> float:
        inputs = self.p * self.j * self.r
        dense = inputs * self.o * self.i * self.x
        pull = dense * min(self.a, self.b)
        total = float(pull)
        if self.is_small:
            a, p, b, r = self.a**2, self.p**2, self.b**2, self.r**2
            build = self.j**2 * min(a * p * r + a * r * b, p * r * b + p * a * b)
            total += build + self.side**3 / 6 + 2.0 * self.side**2 * self.i
        if not (self.is_small and separates):
            # Steps of conjugate gradients: build the matrix, multiply it by G, pull it back.
            total += STEPS * (2.0 * pull + dense * inputs)
        return total


def _places(
    in_modes: Sequence[int], out_modes: Sequence[int], ranks: Sequence[int]
) -> Iterator[_Place]:
    bonds, last = (1, *ranks, 1), len(in_modes) - 1
    for n, (i, j) in enumerate(zip(out_modes, in_modes, strict=True)):
        yield _Place(
            a=bonds[n],
            i=i,
            j=j,
            b=bonds[n + 1],
            o=prod(out_modes[:n]),
            p=prod(in_modes[:n]),
            x=prod(out_modes[n + 1 :]),
            r=prod(in_modes[n + 1 :]),
            visits=2 if 0 < n < last else 1,
        )
