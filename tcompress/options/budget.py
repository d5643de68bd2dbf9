"""How large a conversion may come out, or how much it may lose: one of several ways to say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

BudgetKind = Literal["target", "target_params", "target_bytes", "max_error", "tol"]

_PARAMETERS = {"K": 10**3, "M": 10**6, "B": 10**9}
_BYTES = {
    "B": 1,
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMG", 1)},
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMG", 1)},
}

_MOST = 10**15  # more than any model has, and small enough to count with

Parameters = (
    Annotated[int, Field(gt=0, le=_MOST)]
    | Annotated[str, Field(pattern=r"^[0-9]{1,15}(\.[0-9]{1,15})?[KMB]?$", examples=["30M"])]
)
Bytes = (
    Annotated[int, Field(gt=0, le=_MOST)]
    | Annotated[str, Field(pattern=r"^[0-9]{1,15}(\.[0-9]{1,15})?([KMG]i?)?B$", examples=["60MB"])]
)


@dataclass(frozen=True)
class Budget:
    """A limit.

    Attributes:
        kind: The option that sets it.
        limit: A fraction, a number of parameters or bytes, or a relative error.
    """

    kind: BudgetKind
    limit: float

    @property
    def is_size(self) -> bool:
        """Whether it limits a size, which shapes alone tell; else it limits an error."""
        return self.kind not in ("max_error", "tol")

    def __str__(self) -> str:
        """Writes it as an option, such as `--target-params 30,000,000`."""
        whole = self.kind in ("target_params", "target_bytes")
        number = f"{self.limit:,.0f}" if whole else f"{self.limit:g}"
        return f"--{self.kind.replace('_', '-')} {number}"


def parameters_of(text: int | str) -> int:
    """Reads a number of parameters such as `30M`."""
    return _count(text, _PARAMETERS)


def bytes_of(text: int | str) -> int:
    """Reads a number of bytes such as `60MB` or `60MiB`."""
    return _count(text, _BYTES)


def _count(text: int | str, units: Mapping[str, int]) -> int:
    if isinstance(text, int):
        return text
    unit = text.lstrip("0123456789.")
    return int(float(text.removesuffix(unit)) * units.get(unit, 1))
