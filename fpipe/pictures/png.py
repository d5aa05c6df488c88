"""A drawing through matplotlib: PNG at twice the size on screen, or PDF."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from fpipe.pictures.colours import ROLES
from fpipe.pictures.layout import lay_out
from fpipe.pictures.panel import Panel
from fpipe.pictures.shapes import Area, Drawing, Line, Rect, Shape, Text, heads

SHARPNESS = 2
"""Dots for a pixel of the drawing."""


def raster(panels: Sequence[Panel], width: float | None, ending: str) -> bytes:
    """The picture of some panels as the bytes of a PNG or PDF file."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError(
            f"a .{ending} is drawn by matplotlib, which is not here: pip install 'fpipe[plot]', or write .svg or .html."
        ) from None
    drawing = lay_out(panels, width)
    figure = Figure((drawing.width / 100, drawing.height / 100), dpi=100 * SHARPNESS, facecolor=ROLES["paper"][0])
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.set_axis_off()
    draw(drawing, axes)
    file = io.BytesIO()
    figure.savefig(file, format=ending, metadata={"Software": None} if ending == "png" else {"CreationDate": None})
    return file.getvalue()


def draw(drawing: Drawing, axes: Any) -> None:
    """Put a drawing's shapes on axes whose units are its pixels; those in a row that look alike at once."""
    for order, (look, group) in enumerate(groupby((*drawing.still, *drawing.timed), _look)):
        if isinstance(look, Text):
            for shape in group:
                _write(axes, shape, order)
        else:
            axes.add_collection(_collection(look, list(group), order), autolim=False)


_POINTS = 72 / 100
"""A pixel of the drawing, a hundredth of an inch, in the points of fonts and strokes."""


def _look(shape: Shape) -> Shape:
    """The shape with all that may differ between shapes drawn at once set to nothing."""
    if isinstance(shape, Text):
        return Text(0, 0, "")
    if isinstance(shape, Line):
        return Line((), shape.paint, shape.width)
    return Rect(0, 0, 0, 0, shape.paint, edge=shape.edge if isinstance(shape, Rect) else 0)


def _collection(look: Shape, shapes: Sequence[Any], order: int) -> Any:
    from matplotlib.collections import LineCollection, PolyCollection

    if isinstance(look, Line):
        strokes = [stroke for shape in shapes for stroke in (shape.points, *(heads(shape) if shape.arrow else ()))]
        return LineCollection(strokes, colors=_light(look.paint), linewidths=look.width * _POINTS, zorder=order)
    outlines = [shape.points if isinstance(shape, Area) else _corners(shape) for shape in shapes]
    if look.paint == "hatched":
        ground, lines = ROLES["wait"][0], ROLES["hatch"][0]
        return PolyCollection(outlines, facecolors=ground, edgecolors=lines, hatch="////", linewidths=0, zorder=order)
    edge = look.edge * _POINTS if isinstance(look, Rect) else 0.0
    paper = ROLES["paper"][0]
    return PolyCollection(outlines, facecolors=_light(look.paint), edgecolors=paper, linewidths=edge, zorder=order)


def _write(axes: Any, text: Any, order: int) -> None:
    axes.text(
        text.x,
        text.y,
        text.words.replace("$", r"\$"),
        color=_light(text.paint),
        fontsize=text.size * _POINTS,
        ha={"start": "left", "middle": "center", "end": "right"}[text.anchor],
        va="baseline",
        weight="bold" if text.bold else "normal",
        zorder=order,
    )


def _corners(rect: Rect) -> tuple[tuple[float, float], ...]:
    right, bottom = rect.x + rect.width, rect.y + rect.height
    return ((rect.x, rect.y), (right, rect.y), (right, bottom), (rect.x, bottom))


def _light(paint: str) -> str:
    return ROLES[paint][0] if paint in ROLES else paint
