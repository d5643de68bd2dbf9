"""The pictures of a report: what quality costs, and how training went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tcompress.artifact.manifest import TrainingFacts
from tcompress.reporting.choice import unbeaten
from tcompress.reporting.svg import (
    Axis,
    Write,
    chart,
    join,
    line,
    polyline,
    tag,
    text,
    x_axis,
    y_axis,
)
from tcompress.reporting.words import count_text, tick_text, value_text

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
