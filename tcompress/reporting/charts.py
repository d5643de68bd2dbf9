"""Drawings in SVG: what quality costs, what became of each layer, how training went.

On a page their colours are the page's, so that they follow light and dark; in files of their own
they are the light ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.etree import ElementTree

from markupsafe import Markup, escape

from tcompress.artifact.manifest import AttentionMap, Interval, TrainingFacts
from tcompress.reporting.formatting import count_text, tick_text, value_text
from tcompress.reporting.tree import unbeaten

WIDE, HIGH = 440, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 424, 30, 238  # of the plot inside

COLOURS = 8
GREY = COLOURS - 1
LIGHT = {
    "paper": "#fdfdfc",
    "panel": "#f5f5f2",
    "ink": "#1c1d1f",
    "soft": "#5b5f66",
    "rule": "#dcdcd6",
    "faint": "#e9e9e4",
    **dict(zip((f"k{index}" for index in range(COLOURS)), (
        "#2f6690", "#a23b2a", "#3b7a57", "#7a4e9e", "#8a6100", "#1d7480", "#9c2f66", "#57606a"
    ), strict=True)),
}  # fmt: skip
"""Colours by name; a page has darker and lighter ones for the night."""

_BOLD = {"stroke": "var(--paper)", "paint-order": "stroke", "stroke-linejoin": "round"}
STYLES: dict[str, dict[str, str]] = {
    "text": {"fill": "var(--soft)", "font-size": "11.5px"},
    ".label": {"fill": "var(--ink)", "font-size": "12px"},
    ".note": {"fill": "var(--ink)", "stroke-width": "4px", **_BOLD},
    ".grid": {"stroke": "var(--faint)"},
    ".frontier": {
        "fill": "none",
        "stroke": "var(--soft)",
        "stroke-width": "2",
        "stroke-dasharray": "2 4",
        "stroke-linecap": "round",
    },
    ".curve": {"fill": "none", "stroke": "var(--k0)", "stroke-width": "1.8"},
    ".second": {"fill": "none", "stroke": "var(--k2)", "stroke-width": "1.8"},
    ".best": {"fill": "none", "stroke": "var(--ink)", "stroke-dasharray": "2 3"},
    ".peak": {"fill": "var(--paper)", "stroke": "var(--ink)", "stroke-width": "2"},
    ".dot": {"fill": "var(--k)", "stroke": "var(--paper)", "stroke-width": "1.5"},
    ".dense": {"fill": "var(--paper)", "stroke": "var(--ink)", "stroke-width": "2"},
    ".interval": {"stroke": "var(--k)", "stroke-width": "2", "opacity": "0.55"},
    ".mark": {"fill": "var(--k)", "font-weight": "680", "stroke-width": "3px", **_BOLD},
    ".limit": {"stroke": "var(--k7)", "stroke-width": "1.5", "stroke-dasharray": "6 4"},
    ".tile": {"fill": "var(--panel)", "stroke": "var(--faint)"},
    ".full": {"fill": "var(--k0)", "opacity": "0.45"},
    ".more": {"fill": "var(--k0)"},
    ".less": {"fill": "var(--k1)"},
    ".gone": {"fill": "none", "stroke": "var(--rule)", "stroke-dasharray": "3 3"},
    ".count": {"fill": "var(--ink)", "font-size": "10.5px"},
}
"""How parts of drawings look, by selector, in the colours of `LIGHT` and `--k`, the model's."""

_FAINTEST = 0.02  # share of the largest weight that is drawn
_MOST_POINTS = 400  # of a curve; more cannot be told apart at this size

Write = Callable[[float], str]
Point = tuple[float, float]


class Dot(NamedTuple):
    """A model in a picture of quality against cost.

    Without a letter it is a ring: the dense baseline, or what one would take in its place.
    """

    mark: str
    name: str
    cost: float
    quality: float
    interval: Interval | None = None
    colour: int = 0
    label: str = "dense"  # beside a ring

    @property
    def text(self) -> str:
        """Text beside the point."""
        return self.mark or self.label


class Mark(NamedTuple):
    """A cost that is known of something whose quality is not."""

    name: str
    cost: float


class Tile(NamedTuple):
    """Share of a layer that is kept, None where it is gone with its block, and its tooltip."""

    share: float | None
    words: str


@dataclass(frozen=True)
class Axis:
    """Values along one side of a chart: from `low` at pixel `start` to `high` at pixel `end`."""

    low: float
    high: float
    start: float
    end: float
    label: str
    write: Write

    @classmethod
    def over(
        cls, values: Iterable[float], margin: float, ends: Point, label: str, write: Write
    ) -> Axis:
        """Makes an axis that holds all values, with a margin as a part of what they span."""
        found = [value for value in values if math.isfinite(value)] or [0.0]
        low, high = min(found), max(found)
        room = (high - low) * margin or abs(high) * 0.1 or 1.0
        return cls(low - room, high + room, *ends, label, write)

    def place(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def is_late(self, pixel: float) -> bool:
        """Return whether a pixel is beyond the middle."""
        return abs(pixel - self.start) > abs(pixel - self.end)

    @property
    def ticks(self) -> list[float]:
        """Round values inside the axis, about five."""
        rough = (self.high - self.low) / 5
        power: float = 10.0 ** math.floor(math.log10(rough))
        step = next(power * size for size in (1, 2, 2.5, 5, 10) if power * size >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def trade_off(
    dots: Sequence[Dot],
    costs: str,
    qualities: str,
    write: Write,
    higher: bool = True,
    limits: Sequence[Mark] = (),
) -> Markup:
    """Draws quality against cost; a line joins the models that no other one beats in both.

    Of what is in `limits` the cost alone is known: an upright line.
    """
    spread = [*(dot.cost for dot in dots), *(item.cost for item in limits)]
    x = Axis.over(spread, 0.1, (_LEFT, _RIGHT), costs, write)
    intervals = [dot.interval for dot in dots if dot.interval is not None]
    ends = [end for interval in intervals for end in (interval.low, interval.high)]
    label = qualities + ("" if higher else " (lower is better)")
    values = [*ends, *(dot.quality for dot in dots)]
    y = Axis.over(values, 0.12, (_BOTTOM, _TOP), label, tick_text)
    best = unbeaten(dots, lambda dot: (dot.cost, dot.quality), higher)
    front = sorted((dot.cost, dot.quality) for dot in best)
    said = [_said(dot, write) for dot in sorted(dots, key=lambda dot: dot.cost)]
    said += [f"{item.name}: {write(item.cost)}, quality not measured" for item in limits]
    marks = [part for i, item in enumerate(limits) for part in _limit(item, x, y, i)]
    sides = _sides(dots, x, y)
    drawn = (_dot(dot, x, y, side) for dot, side in zip(dots, sides, strict=True))
    marks += [_polyline(front, x, y, "frontier"), *drawn]
    return _chart(f"{qualities} against {costs}", "; ".join(said), x, y, marks)


def _limit(item: Mark, x: Axis, y: Axis, number: int) -> list[Markup]:
    """An upright line; names of neighbours stand above each other."""
    across = x.place(item.cost)
    side, anchor = (-5, "end") if x.is_late(across) else (5, "start")
    line = _line(across, y.end, across, y.start, "limit")
    return [line, _text(item.name, across + side, y.start - 6 - 15 * number, "note", anchor)]


def _said(dot: Dot, write: Write) -> str:
    return f"{dot.name}: {write(dot.cost)}, {value_text(dot.quality)}"


class _Side(NamedTuple):
    """Where the text of a dot stands, from its middle."""

    right: float
    down: float
    anchor: str

    def box(self, dot: Dot, x: Axis, y: Axis) -> tuple[float, float, float, float]:
        """Left, right, upper and lower end of the text, roughly."""
        width = len(dot.text) * _CHARACTER
        start = x.place(dot.cost) + self.right
        start -= {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        base = y.place(dot.quality) + self.down
        return start, start + width, base - 10, base + 3


def _sides(dots: Sequence[Dot], x: Axis, y: Axis) -> list[_Side]:
    """Choose a side for the text of each dot, where no dot and no other text is."""
    places = [(x.place(dot.cost), y.place(dot.quality)) for dot in dots]
    taken = [(across - 6, across + 6, down - 6, down + 6) for across, down in places]
    chosen = []
    for dot in dots:
        right, left = _Side(9, 4, "start"), _Side(-9, 4, "end")
        # Neighbours stay readable; a ring's text stays inside.
        turned = dot.colour % 2 if dot.mark else x.is_late(x.place(dot.cost))
        order = [*((left, right) if turned else (right, left))]
        order += [_Side(0, -10, "middle"), _Side(0, 20, "middle")]
        free = (side for side in order if _is_free(side.box(dot, x, y), taken, x))
        side = next(free, order[0])
        taken.append(side.box(dot, x, y))
        chosen.append(side)
    return chosen


def _is_free(
    box: tuple[float, float, float, float],
    taken: Iterable[tuple[float, float, float, float]],
    x: Axis,
) -> bool:
    """Tell whether a box lies inside the chart and meets no other."""
    left, right, upper, lower = box
    if left < x.start or right > x.end + 10:
        return False
    return not any(
        left < other[1] and other[0] < right and upper < other[3] and other[2] < lower
        for other in taken
    )


def _dot(dot: Dot, x: Axis, y: Axis, side: _Side) -> Markup:
    across, down = x.place(dot.cost), y.place(dot.quality)
    parts = [_tag("title", _said(dot, x.write))]
    if dot.interval is not None:
        ends = y.place(dot.interval.low), y.place(dot.interval.high)
        parts.append(_line(across, ends[0], across, ends[1], "interval"))
    radius, circle, text = (5.0, "dot", "mark") if dot.mark else (5.5, "dense", "note")
    parts.append(_tag("circle", cx=across, cy=down, r=radius, class_=circle))
    parts.append(_text(dot.text, across + side.right, down + side.down, text, side.anchor))
    return _tag("g", _join(parts), class_=f"c{dot.colour}")


_SIDE, _HIGH, _GAP, _HEADS = 34, 22, 3, 18  # of the tiles of layers, and the line above them
_CHARACTER = 7.2  # widest of a label of 11.5 px, roughly


def layer_map(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Tile | None]]]) -> Markup:
    """Draws a tile for each layer, by role and block, as full as the layer is kept."""
    left = max(len(role) for role, _ in rows) * _CHARACTER + 10
    height = _HEADS + len(rows) * (_HIGH + _GAP)
    step = max(_SIDE, *(round(len(name) * _CHARACTER) for name in columns)) + _GAP
    parts = []
    for index, name in enumerate(columns):
        parts.append(_text(name, left + index * step + (step - _GAP) / 2, 11, "tick"))
    for line, (role, tiles) in enumerate(rows):
        top = _HEADS + line * (_HIGH + _GAP)
        parts.append(_text(role, left - 8, top + _HIGH / 2 + 4, "tick", "end"))
        for index, tile in enumerate(tiles):
            if tile is not None:
                parts.append(_tile(tile, left + index * step, float(top), step - _GAP))
    title = "parameters kept of every layer"
    shares = [tile.share for _, tiles in rows for tile in tiles if tile and tile.share is not None]
    gone = {name for _, tiles in rows for name, t in zip(columns, tiles, strict=True)
            if t and t.share is None}  # fmt: skip
    said = f"from {min(shares):.1%} to {max(shares):.1%}" if shares else "none"
    said += f"; dropped: {', '.join(name for name in columns if name in gone)}" if gone else ""
    return _map(title, said, parts, round(left + len(columns) * step), height)


def _map(title: str, said: str, parts: Sequence[Markup], width: int, height: int) -> Markup:
    """Makes a drawing of its own size; title and description are for those who cannot see it."""
    drawn = _join([_tag("title", title), _tag("desc", said), *parts])
    how = {"role": "img", "aria_label": f"{title}: {said}", "class_": "map"}
    return _tag("svg", drawn, viewBox=f"0 0 {width} {height}", width=width, **how)


def _tile(tile: Tile, x: float, y: float, width: float) -> Markup:
    box: dict[str, Any] = {"x": x, "width": width, "rx": 3}
    middle, parts = x + width / 2, [_tag("title", tile.words)]
    if tile.share is None:
        parts.append(_tag("rect", y=y, height=_HIGH, class_="gone", **box))
        return _tag("g", _join([*parts, _text("–", middle, y + _HIGH / 2 + 4, "count")]))
    full = _HIGH * min(1.0, tile.share)
    parts.append(_tag("rect", y=y, height=_HIGH, class_="tile", **box))
    parts.append(_tag("rect", y=y + _HIGH - full, height=full, class_="full", **box))
    parts.append(_text(f"{tile.share:.0%}", middle, y + _HIGH / 2 + 4, "count"))
    return _tag("g", _join(parts))


_CELL = 13  # pixels of a weight


def attention_picture(shown: AttentionMap) -> Markup:
    """Draws weights by query and key, as dark as they are large; negative ones in red."""
    left = max(map(len, shown.rows)) * _CHARACTER + 10
    top = max(map(len, shown.columns)) * _CHARACTER * 0.85 + 14
    largest = max((abs(value) for row in shown.weights for value in row), default=0.0) or 1.0
    parts = []
    for index, name in enumerate(shown.columns):
        x, y = left + (index + 0.6) * _CELL, top - 5
        turned = f"rotate(-58 {_number(x)} {_number(y)})"
        parts.append(_tag("text", name, x=x, y=y, class_="tick", transform=turned))
    for line, (name, row) in enumerate(zip(shown.rows, shown.weights, strict=True)):
        y = top + line * _CELL
        parts.append(_text(name, left - 6, y + _CELL - 3, "tick", "end"))
        for index, value in enumerate(row):
            share = abs(value) / largest
            if share >= _FAINTEST:
                box = {"x": left + index * _CELL, "y": y, "width": _CELL - 1, "height": _CELL - 1}
                which = "more" if value > 0 else "less"
                parts.append(_tag("rect", class_=which, fill_opacity=share, **box))
    title = "weights of queries (rows) and keys (columns)"
    said = f"the largest is {value_text(largest)}"
    width = round(left + len(shown.columns) * _CELL + top * 0.55)
    return _map(title, said, parts, width, round(top + len(shown.rows) * _CELL + 4))


def training_charts(run: TrainingFacts) -> dict[str, Markup]:
    """Draws the loss, and the validated number with the best step, where they were recorded."""
    losses = _known((point.step, point.loss) for point in run.curve)
    validated = _known((point.step, point.validation) for point in run.curve)
    charts = {}
    if len(losses) > 1:
        charts["loss"] = _curve(losses, "training loss", "curve", None)
    if len(validated) > 1:
        label = f"validation: {run.validation}"
        best = next((point for point in validated if point[0] == run.best_step), None)
        charts["validation"] = _curve(validated, label, "second", best)
    return charts


def _known(points: Iterable[tuple[int, float | None]]) -> list[Point]:
    return [(float(step), v) for step, v in points if v is not None and math.isfinite(v)]


def _curve(points: list[Point], label: str, class_: str, best: Point | None) -> Markup:
    shown = [*points, best] if best else points
    steps, values = [0.0, *(step for step, _ in shown)], [value for _, value in shown]
    x = Axis.over(steps, 0.02, (_LEFT, _RIGHT), "steps", count_text)
    y = Axis.over(values, 0.08, (_BOTTOM, _TOP), label, tick_text)
    thin = points[:: math.ceil(len(points) / _MOST_POINTS)]
    if thin[-1] != points[-1]:
        thin.append(points[-1])
    marks = [_polyline(thin, x, y, class_)]
    described = f"from {value_text(points[0][1])} to {value_text(points[-1][1])}"
    if best is not None:
        step, value = f"{best[0]:,.0f}", value_text(best[1])
        across, down = x.place(best[0]), y.place(best[1])
        side, anchor = (-9, "end") if x.is_late(across) else (9, "start")
        # The text goes to the other end, clear of the curve.
        height = y.start - 8 if y.is_late(down) else y.end + 12
        marks.append(_line(across, y.end, across, y.start, "best"))
        marks.append(_tag("circle", cx=across, cy=down, r=4.5, class_="peak"))
        marks.append(_text(f"best {value} at {step}", across + side, height, "note", anchor))
        described += f", best {value} at step {step}"
    return _chart(label, described, x, y, marks)


def _chart(title: str, description: str, x: Axis, y: Axis, marks: Sequence[Markup]) -> Markup:
    """Draws a chart; title and description are for those who cannot see it."""
    parts = [_tag("title", title), _tag("desc", description)]
    for tick in x.ticks:
        place = x.place(tick)
        parts.append(_line(place, _TOP, place, _BOTTOM, "grid"))
        parts.append(_text(x.write(tick), place, _BOTTOM + 16, "tick"))
    for tick in y.ticks:
        place = y.place(tick)
        parts.append(_line(_LEFT, place, _RIGHT, place, "grid"))
        parts.append(_text(y.write(tick), _LEFT - 7, place + 4, "tick", "end"))
    parts.append(_tag("text", y.label, x=_LEFT, y=14, class_="label"))
    long = len(x.label) * _CHARACTER > _RIGHT
    pressed = {"textLength": _RIGHT - 4, "lengthAdjust": "spacingAndGlyphs"} if long else {}
    where = {"x": _RIGHT, "y": HIGH - 6, "text_anchor": "end"}
    parts.append(_tag("text", x.label, class_="label", **where, **pressed))
    box, label = f"0 0 {WIDE} {HIGH}", f"{title}. {description}"
    return _tag("svg", _join([*parts, *marks]), viewBox=box, role="img", aria_label=label)


def style_sheet() -> str:
    """Writes `STYLES` as CSS for drawings in a page."""
    rules = []
    for selector, style in STYLES.items():
        written = "; ".join(f"{key}: {value}" for key, value in style.items())
        rules.append(f"svg {selector} {{ {written}; }}")
    return "\n".join(rules)


def alone(drawing: Markup) -> str:
    """Writes a drawing as a file that needs no page: its colours stand in every element."""
    root = ElementTree.fromstring(str(drawing))
    _, _, width, height = root.attrib["viewBox"].split()
    sheet = ElementTree.Element("rect", fill=LIGHT["paper"], width=width, height=height)
    _paint(root, LIGHT["k0"])
    root.insert(2, sheet)  # after title and description
    face = {"xmlns": "http://www.w3.org/2000/svg", "font-family": "Helvetica, Arial, sans-serif"}
    root.attrib.update(face, width=width, height=height)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def _paint(element: ElementTree.Element, colour: str) -> None:
    """Write the style of its class into an element, and into what is in it, as attributes."""
    classes = element.attrib.pop("class", "").split()
    for name in classes:
        colour = LIGHT.get(name.replace("c", "k", 1), colour) if name[0] == "c" else colour
    style = dict(STYLES["text"]) if element.tag == "text" else {}
    for name in classes:
        style |= STYLES.get(f".{name}", {})
    for key, value in style.items():
        name = value.removeprefix("var(--").removesuffix(")")
        found = colour if name == "k" else LIGHT.get(name, value)
        element.set(key, found.removesuffix("px"))
    for child in element:
        _paint(child, colour)


def _tag(name: str, content: object = "", **attributes: Any) -> Markup:
    """Writes an element, escaped; in names of attributes `_` stands for `-`."""
    named = {key.strip("_").replace("_", "-"): _number(item) for key, item in attributes.items()}
    written = "".join(f' {key}="{escape(value)}"' for key, value in named.items())
    return Markup(f"<{name}{written}>{escape(content)}</{name}>")


def _join(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def _polyline(points: Iterable[Point], x: Axis, y: Axis, class_: str) -> Markup:
    pixels = " ".join(f"{_number(x.place(a))},{_number(y.place(b))}" for a, b in points)
    return _tag("polyline", points=pixels, class_=class_)


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return _tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def _text(content: str, x: float, y: float, class_: str, anchor: str = "middle") -> Markup:
    return _tag("text", content, x=x, y=y, class_=class_, text_anchor=anchor)


def _number(value: Any) -> Any:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
