"""The pictures of a report, as inline SVG: what quality costs, and how training went."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from tcompress.artifact.manifest import TrainingFacts
from tcompress.reporting.formatting import count_text, tick_text, value_text
from tcompress.reporting.tree import unbeaten

# Small charts as inline SVG: their colours are the page's, so that they follow light and dark.


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


# The pictures of a report: what quality costs, and how training went.


_MOST_POINTS = 400  # of a curve; more cannot be told apart at this size


@dataclass(frozen=True)
class Dot:
    """A model in a picture of quality against cost.

    Attributes:
        mark: Letter of the model; empty for the dense baseline.
        name: Its name.
        cost: Where it is horizontally.
        quality: Where it is vertically.
        low: Lower end of the interval.
        high: Upper end.
        colour: Number of the colour.
    """

    mark: str
    name: str
    cost: float
    quality: float
    low: float | None = None
    high: float | None = None
    colour: int = 0


def trade_off(
    dots: Sequence[Dot], costs: str, qualities: str, write: Write, higher: bool = True
) -> Markup:
    """Draws quality against cost; a line joins the models that no other one beats in both.

    Args:
        dots: The models and their baselines.
        costs: What the cost is.
        qualities: What the quality is.
        write: Writes a cost.
        higher: Whether more quality is a greater number.
    """
    x = x_axis([dot.cost for dot in dots], costs, write, margin=0.1)
    ends = [end for dot in dots for end in (dot.low, dot.high, dot.quality) if end is not None]
    direction = "" if higher else " (lower is better)"
    y = y_axis(ends, qualities + direction, tick_text, margin=0.12)
    best = sorted(unbeaten(dots, _place, higher), key=lambda dot: dot.cost)
    frontier = polyline([(x.place(dot.cost), y.place(dot.quality)) for dot in best], "frontier")
    described = "; ".join(
        f"{dot.name}: {write(dot.cost)}, {value_text(dot.quality)}"
        for dot in sorted(dots, key=lambda dot: dot.cost)
    )
    marks = [frontier, *(_dot(dot, x, y, write) for dot in dots)]
    return chart(f"{qualities} against {costs}", described, x, y, marks)


def training_charts(run: TrainingFacts) -> list[Markup]:
    """Draws the loss, and the validated number with the best step, where they were recorded."""
    losses = [(point.step, point.loss) for point in run.curve]
    validated = [(point.step, point.validation) for point in run.curve]
    charts = []
    if len(known := _known(losses)) > 1:
        charts.append(_curve(known, "training loss", "curve", None))
    if len(known := _known(validated)) > 1:
        best = (float(run.best_step), run.best) if math.isfinite(run.best) else None
        charts.append(_curve(known, f"validation: {run.validation}", "curve second", best))
    return charts


def _curve(
    points: Sequence[tuple[float, float]],
    label: str,
    class_: str,
    best: tuple[float, float] | None,
) -> Markup:
    shown = [*points, best] if best else points
    x = x_axis([0.0, *(step for step, _ in shown)], "steps", count_text, margin=0.02)
    y = y_axis([value for _, value in shown], label, tick_text)
    thin = points[:: math.ceil(len(points) / _MOST_POINTS)]
    if thin[-1] != points[-1]:
        thin = [*thin, points[-1]]
    marks = [polyline([(x.place(step), y.place(value)) for step, value in thin], class_)]
    described = f"from {value_text(points[0][1])} to {value_text(points[-1][1])}"
    if best is not None:
        marks.append(_best(x, y, *best))
        described += f", best {value_text(best[1])} at step {best[0]:,.0f}"
    return chart(label, described, x, y, marks)


def _best(x: Axis, y: Axis, step: float, value: float) -> Markup:
    across, down = x.place(step), y.place(value)
    side, anchor = (-9, "end") if across > (x.start + x.end) / 2 else (9, "start")
    words = f"best {value_text(value)} at {step:,.0f}"
    low = down > (y.start + y.end) / 2  # the text goes to the other end, clear of the curve
    return join(
        [
            line(across, y.end, across, y.start, "best"),
            tag("circle", cx=across, cy=down, r=4.5, class_="best"),
            text(words, across + side, y.end + 12 if low else y.start - 8, "note", anchor),
        ]
    )


def _dot(dot: Dot, x: Axis, y: Axis, write: Write) -> Markup:
    across, down = x.place(dot.cost), y.place(dot.quality)
    parts = [tag("title", f"{dot.name}: {write(dot.cost)}, {value_text(dot.quality)}")]
    if dot.low is not None and dot.high is not None:
        bar = line(across, y.place(dot.low), across, y.place(dot.high), "interval")
        parts.append(bar)
    if dot.mark:
        side, anchor = (-8, "end") if dot.colour % 2 else (8, "start")  # neighbours stay readable
        parts.append(tag("circle", cx=across, cy=down, r=5, class_="dot"))
        parts.append(text(dot.mark, across + side, down + 4, "mark", anchor))
    else:
        late = across > (x.start + x.end) / 2
        side, anchor = (-10, "end") if late else (10, "start")
        parts.append(tag("circle", cx=across, cy=down, r=5.5, class_="dense"))
        parts.append(text("dense", across + side, down + 4, "note", anchor))
    return tag("g", join(parts), class_=f"c{dot.colour}")


def _place(dot: Dot) -> tuple[float, float]:
    return dot.cost, dot.quality


def _known(points: Sequence[tuple[int, float | None]]) -> list[tuple[float, float]]:
    return [
        (float(step), value) for step, value in points if value is not None and math.isfinite(value)
    ]
