"""Errors of layers by block and role, as a table of shades."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tcompress.reporting.tree import LayerReport, mean_errors
from tcompress.reporting.words import error_name, short_blocks

_LIGHTEST, _DARKEST = 4, 62  # per cent; darker shades would take the contrast from the numbers


@dataclass(frozen=True)
class Shade:
    """One cell.

    Attributes:
        value: The error; the mean where a block has several layers of a role.
        shade: How dark the cell is, in per cent.
    """

    value: float
    shade: int


@dataclass(frozen=True)
class Heat:
    """The table.

    Attributes:
        kind: What the errors are.
        blocks: Blocks, one for each column.
        rows: A role and its cells; None where a block has no such layer.
        worst: Where the error is greatest: block, role and error.
        least: The smallest error, which has the lightest shade.
    """

    kind: str
    blocks: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Shade | None, ...]], ...]
    worst: tuple[str, str, float]
    least: float


def heat_of(layers: Sequence[LayerReport]) -> Heat | None:
    """Makes the table of the most telling kind of error, if there are errors."""
    kind = next(iter(mean_errors(layers)), None)
    if kind is None:
        return None
    short = short_blocks(layers)
    blocks = list(short)
    roles = list(dict.fromkeys(layer.role for layer in layers))
    found: dict[tuple[str, str], list[float]] = {}
    for layer in layers:
        if kind in layer.errors:
            found.setdefault((layer.role, layer.block), []).append(layer.errors[kind])
    means = {place: sum(errors) / len(errors) for place, errors in found.items()}
    place = max(means, key=lambda place: means[place])
    low, top = min(means.values()), means[place]
    rows = tuple(
        (role, tuple(_shade(means.get((role, block)), low, top) for block in blocks))
        for role in roles
    )
    worst = (short[place[1]], place[0], means[place])
    return Heat(error_name(kind), _columns(list(short.values())), rows, worst, low)


def _shade(value: float | None, low: float, top: float) -> Shade | None:
    """Shades span what errors there are: differences show, though all are small or all large."""
    if value is None:
        return None
    share = (value - low) / (top - low) if top > low else 0.5
    return Shade(value, round(_LIGHTEST + share * (_DARKEST - _LIGHTEST)))


def _columns(names: Sequence[str]) -> tuple[str, ...]:
    """Drops what all names begin with, such as `layer.`, where only numbers are left."""
    numbers = [name.rpartition(".")[2] for name in names]
    alone = len({name.rpartition(".")[0] for name in names}) == 1
    return tuple(numbers if alone else names)
