"""Small charts as inline SVG: their colours are the page's, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

WIDTH, HEIGHT = 440, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 16, 30, 42

Write = Callable[[float], str]


def tag(name: str, content: object = "", **attributes: Any) -> Markup:
    """Writes an element; contents and attributes are escaped unless they are markup.

    Args:
        name: Name of the element.
        content: What it holds.
        **attributes: Its attributes; `_` stands for `-`, numbers are rounded, None is left out.
    """
    written = [
        f' {key.strip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return Markup(f"<{name}{''.join(written)}>{escape(content)}</{name}>")


def join(parts: Iterable[Markup]) -> Markup:
    """Puts elements one after the other."""
    return Markup("").join(parts)


@dataclass(frozen=True)
class Axis:
    """Values along one side of a chart.

    Attributes:
        low: Value at the start.
        high: Value at the end.
        start: Pixel of the start.
        end: Pixel of the end.
        label: What the values are.
        write: Writes a value.
    """

    low: float
    high: float
    start: float
    end: float
    label: str
    write: Write

    def place(self, value: float) -> float:
        """Gives the pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round values inside the axis, about five."""
        rough = (self.high - self.low) / 5
        power: float = 10.0 ** math.floor(math.log10(rough))
        step = next(power * size for size in (1, 2, 2.5, 5, 10) if power * size >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def x_axis(values: Iterable[float], label: str, write: Write, margin: float = 0.06) -> Axis:
    """Makes a horizontal axis that holds all values."""
    low, high = _span(values, margin)
    return Axis(low, high, _LEFT, WIDTH - _RIGHT, label, write)


def y_axis(values: Iterable[float], label: str, write: Write, margin: float = 0.08) -> Axis:
    """Makes a vertical axis that holds all values."""
    low, high = _span(values, margin)
    return Axis(low, high, HEIGHT - _BOTTOM, _TOP, label, write)


def chart(title: str, description: str, x: Axis, y: Axis, marks: Sequence[Markup]) -> Markup:
    """Draws a chart.

    Args:
        title: What it shows, for those who cannot see it.
        description: What is to be seen.
        x: Horizontal axis.
        y: Vertical axis.
        marks: What is drawn over the grid.
    """
    lines = [_vertical(x.place(tick), x.write(tick)) for tick in x.ticks]
    lines += [_horizontal(y.place(tick), y.write(tick)) for tick in y.ticks]
    labels = [
        tag("text", y.label, x=_LEFT, y=14, class_="label"),
        tag("text", x.label, x=WIDTH - _RIGHT, y=HEIGHT - 6, class_="label", text_anchor="end"),
    ]
    return tag(
        "svg",
        join([tag("title", title), tag("desc", description), *lines, *labels, *marks]),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}. {description}",
    )


def polyline(points: Iterable[tuple[float, float]], class_: str) -> Markup:
    """Draws a line through pixels."""
    written = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return tag("polyline", points=written, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Draws a straight line between two pixels."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def text(content: str, x: float, y: float, class_: str, anchor: str = "middle") -> Markup:
    """Writes at a pixel."""
    return tag("text", content, x=x, y=y, class_=class_, text_anchor=anchor)


def _vertical(place: float, label: str) -> Markup:
    bottom = HEIGHT - _BOTTOM
    return join([line(place, _TOP, place, bottom, "grid"), text(label, place, bottom + 16, "tick")])


def _horizontal(place: float, label: str) -> Markup:
    return join(
        [
            line(_LEFT, place, WIDTH - _RIGHT, place, "grid"),
            text(label, _LEFT - 7, place + 4, "tick", "end"),
        ]
    )


def _span(values: Iterable[float], margin: float) -> tuple[float, float]:
    found = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(found), max(found)
    room = (high - low) * margin or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _number(value: Any) -> Any:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
