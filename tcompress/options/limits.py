"""Limits of a conversion: how large, slow or lossy its result may be; one of several ways each.

A field of `Convert` that is one says so beside its flag (`limits=`); and is in all lists by that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, TypeAdapter

_PARAMETERS = {"K": 10**3, "M": 10**6, "B": 10**9}
_BYTES = TypeAdapter(ByteSize)
_MOST = 10**15  # more than any model has, and small enough to count with

Parameters = (
    Annotated[int, Field(gt=0, le=_MOST)]
    | Annotated[str, Field(pattern=r"^[0-9]{1,15}(\.[0-9]{1,15})?[KMB]?$", examples=["30M"])]
)
_SIZE = r"^[0-9]{1,15}(\.[0-9]{1,15})? ?([kKMG]i?)?B$"
Bytes = (
    Annotated[int, Field(gt=0, le=_MOST)] | Annotated[str, Field(pattern=_SIZE, examples=["60MB"])]
)
Speedup = Annotated[float, Field(gt=1, le=1000)]


def parameters_of(text: int | str) -> int:
    """Read a number of parameters such as `30M`."""
    if isinstance(text, int):
        return text
    unit = text.lstrip("0123456789.")
    return int(float(text.removesuffix(unit)) * _PARAMETERS.get(unit, 1))


def bytes_of(text: int | str) -> int:
    """Read a number of bytes such as `60MB` or `60MiB`."""
    return int(_BYTES.validate_python(text))


def milliseconds_of(text: str) -> float:
    """Read a time such as `5ms` or `0.2s`."""
    return float(text[:-2]) if text.endswith("ms") else 1e3 * float(text[:-1])


def speedups_of(value: float | tuple[float, ...]) -> float:
    """Read the least of several speeds."""
    return min(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Limit:
    """Quantity that a field limits.

    Attributes:
        what: A size, which shapes alone tell; a resource, which has to be measured; an error.
        unit: What is counted: of a size, or the name of the resource.
        read: From what the recipe says to a number.
        written: Format of the number.
        share: Whether it is a share of the rewritten layers; other sizes are of the whole model.
        each: Whether it limits the error of each layer; other errors are sums over all layers.
    """

    what: Literal["size", "resource", "error"]
    unit: str = "parameters"
    read: Callable[[Any], float] = float
    written: str = "{:g}"
    share: bool = False
    each: bool = False


LIMITS: dict[str, Limit] = {"tol": Limit("error", each=True)}
"""By name of the option; that of structures is theirs."""


@dataclass(frozen=True)
class Budget:
    """A limit: the option that sets it, and its number (of an error or fraction, or a count).

    What it limits is said where `Limit` is described.
    """

    kind: str
    limit: float

    @property
    def _limit(self) -> Limit:
        return LIMITS[self.kind]

    @property
    def is_size(self) -> bool:
        """True for a size, which shapes alone tell."""
        return self._limit.what == "size"

    @property
    def is_resource(self) -> bool:
        """True for a resource, which has to be measured, such as the time of a pass."""
        return self._limit.what == "resource"

    @property
    def is_error(self) -> bool:
        """True for an error."""
        return self._limit.what == "error"

    @property
    def is_fraction(self) -> bool:
        """True for a share of the rewritten layers; other sizes are of the whole model."""
        return self._limit.share

    @property
    def limits_each(self) -> bool:
        """True for a limit on the error of each layer; other errors are sums over all layers."""
        return self._limit.each

    @property
    def unit(self) -> str:
        """Unit of the limit."""
        return self._limit.unit

    def __str__(self) -> str:
        """Write it as an option, such as `--target-params 30,000,000`."""
        return f"--{self.kind.replace('_', '-')} {self._limit.written.format(self.limit)}"
