"""Shapes of a picture, in units of a pixel, which each format writes in its way; units and ticks of its time axis."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

PIXEL = 1 / 96
"""Inches of a pixel, as browsers have it: 12 of them are 9 points."""
EDGE = 12.0
"""The margin around a picture."""


class Rect(NamedTuple):
    """A filled box.

    `paint`: a colour, or a role of `style.ROLES`; `edge`: the width of a stroke in the colour of the paper, which parts
    it from its neighbours; `title`: the text on hovering; `grid`: whether it is part of the time axis.
    """

    x: float
    y: float
    width: float
    height: float
    paint: str
    title: str = ""
    edge: float = 0.0
    grid: bool = False


class Line(NamedTuple):
    """A stroke through points; `arrow`: with a head at its end; `is_behind`: drawn below the boxes."""

    points: tuple[tuple[float, float], ...]
    paint: str
    width: float = 1.0
    arrow: bool = False
    title: str = ""
    grid: bool = False
    is_behind: bool = False


class Area(NamedTuple):
    """A filled outline."""

    points: tuple[tuple[float, float], ...]
    paint: str
    title: str = ""
    grid: bool = False


class Text(NamedTuple):
    """A text whose baseline is at y.

    On a page that can be zoomed, `room` is the width it must fit into, and `short` the text where it does not.
    """

    x: float
    y: float
    text: str
    paint: str = "ink"
    size: float = 12.0
    anchor: str = "start"
    bold: bool = False
    room: float = 0.0
    short: str = ""
    grid: bool = False


def arrow_head(line: Line) -> list[tuple[tuple[float, float], ...]]:
    """Return the head of an arrow: two short strokes that meet at its end."""
    # From the end go back 4 pixels along the line, and 2.4 to either side of it.
    (x0, y0), (x1, y1) = line.points[-2:]
    length = max(1e-9, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
    dx, dy = (x0 - x1) / length, (y0 - y1) / length
    return [((x1 + dx * 4 + sign * dy * 2.4, y1 + dy * 4 - sign * dx * 2.4), (x1, y1)) for sign in (-1, 1)]


def draw_dot(x: float, y: float, size: float, paint: str, title: str = "") -> Area:
    """Draw a dot as a regular octagon, whose half side is tan(22.5 degrees) = 0.41 of its inner radius."""
    half = size * 0.41
    octagon = ((half, size), (size, half), (size, -half), (half, -size))
    corners = octagon + tuple((-dx, -dy) for dx, dy in octagon)
    return Area(tuple((x + dx, y + dy) for dx, dy in corners), paint, title)


class Clock(NamedTuple):
    """A unit of time for a picture, and how many of it are a second."""

    unit: str
    per_second: float

    def __call__(self, seconds: float) -> str:
        """Write a time without its unit."""
        return f"{seconds * self.per_second:.5g}"

    def full(self, seconds: float) -> str:
        """Write a time with its unit; plain numbers are seconds."""
        return f"{self(seconds)} {self.unit}".rstrip()


def clock(end: float) -> Clock:
    """Return the clock for times up to `end` seconds.

    >>> clock(18).full(18), clock(0.0123).full(0.004)
    ('18', '4 ms')
    """
    for unit, size in (("", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if end * size >= 1 or not end:
            return Clock(unit, size)
    return Clock("ns", 1e9)


def ticks(start: float, end: float, max_count: int) -> list[float]:
    """Return at most `max_count` round times from start to end, in steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0, 18, 10)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0]
    >>> ticks(7, 18, 5)
    [10.0, 15.0]
    """
    if end <= start:
        return [start]
    min_step = (end - start) / max(1, max_count)
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= min_step * (1 - 1e-9))
    return [index * step for index in range(math.ceil(start / step - 1e-9), math.floor(end / step * (1 + 1e-9)) + 1)]


Shape = Rect | Line | Area | Text


@dataclass
class Drawing:
    """A picture as shapes: `fixed` ones, and `timed` ones, whose x stands for a time.

    Times from `start` to `end`, in seconds, go from `left` to `left + span`. `unit`: inches on paper of a pixel.
    `bands`: (top, bottom) of each part of the lines of the time axis; `bottom`: where its numbers stand below.
    """

    width: float
    height: float
    left: float
    span: float
    start: float
    end: float
    clock: Clock
    unit: float
    fixed: list[Shape] = field(default_factory=list)
    timed: list[Shape] = field(default_factory=list)
    bottom: float = 0.0
    bands: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
