"""Boxes, strokes, outlines and words of a picture, in units of a pixel, for each format to write down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fpipe.pictures.axis import Clock

PIXEL = 1 / 96
"""Inches of a pixel, as browsers have it: 12 of them are 9 points."""
EDGE = 12.0
"""The margin around a picture."""


class Rect(NamedTuple):
    """A filled box. `paint`: a colour, or a role of `colours.ROLES`; `edge`: the width of a stroke in the colour of the
    paper, which parts it from its neighbours. `title`: what hovering says. `grid`: part of the time axis."""

    x: float
    y: float
    width: float
    height: float
    paint: str
    title: str = ""
    edge: float = 0.0
    grid: bool = False


class Line(NamedTuple):
    """A stroke through points; `arrow`: with a head at its end; `behind`: below the boxes, so through no words."""

    points: tuple[tuple[float, float], ...]
    paint: str
    width: float = 1.0
    arrow: bool = False
    title: str = ""
    grid: bool = False
    behind: bool = False


class Area(NamedTuple):
    """A filled outline."""

    points: tuple[tuple[float, float], ...]
    paint: str
    title: str = ""
    grid: bool = False


class Text(NamedTuple):
    """Words whose baseline is at y. `room`: the width they must fit into, and `short` what else would do, where a page
    may give them more."""

    x: float
    y: float
    words: str
    paint: str = "ink"
    size: float = 12.0
    anchor: str = "start"
    bold: bool = False
    room: float = 0.0
    short: str = ""
    grid: bool = False


def heads(line: Line) -> list[tuple[tuple[float, float], ...]]:
    """The head of an arrow: two short strokes that meet at its end."""
    (x0, y0), (x1, y1) = line.points[-2:]
    length = max(1e-9, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
    back, aside = ((x0 - x1) / length * 4, (y0 - y1) / length * 4), ((y0 - y1) / length * 2.4, (x1 - x0) / length * 2.4)
    return [((x1 + back[0] + side * aside[0], y1 + back[1] + side * aside[1]), (x1, y1)) for side in (-1, 1)]


Shape = Rect | Line | Area | Text


@dataclass
class Drawing:
    """A picture as shapes: those that stand still, and those that stand for a time, within `left` and `left + span`.
    The times are those from `start` to `end`, in seconds. `unit`: inches on paper of what is called a pixel here.
    `bands`: from where to where the lines of the axis go; `bottom`: where its numbers stand below."""

    width: float
    height: float
    left: float
    span: float
    start: float
    end: float
    clock: Clock
    unit: float
    still: list[Shape] = field(default_factory=list)
    timed: list[Shape] = field(default_factory=list)
    bottom: float = 0.0
    bands: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
