"""A drawing through matplotlib: as PNG or PDF, or on Axes of one's own."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from fpipe.pictures.drawn_shapes import PIXEL, Area, Drawing, Line, Rect, Shape, Text, heads
from fpipe.pictures.layout import lay_out
from fpipe.pictures.panel import Panel
from fpipe.pictures.style import ROLES, Style

DOTS = {"screen": 192, "paper": 300}
"""An inch has these: two for each pixel of a screen, and what journals ask for."""


def raster(drawing: Drawing, style: Style, ending: str) -> bytes:
    """Draw the bytes of a PNG or PDF file."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError(
            f"a .{ending} is drawn by matplotlib, which is not here: pip install 'fpipe[plot]', or write .svg or .html."
        ) from None
    dots = DOTS["screen" if style.width_mm is None else "paper"]
    size = drawing.width * drawing.unit, drawing.height * drawing.unit
    figure = Figure(size, dpi=dots, facecolor=ROLES["paper"][0])
    FigureCanvasAgg(figure)
    _draw(drawing, figure.add_axes((0, 0, 1, 1)))
    file = io.BytesIO()
    about = {"Software": None} if ending == "png" else {"CreationDate": None}
    with matplotlib.rc_context({"pdf.fonttype": 42}):  # TrueType: journals refuse Type 3
        figure.savefig(file, format=ending, metadata=about)
    return file.getvalue()


def draw_onto(panels: Sequence[Panel], style: Style, axes: Any) -> None:
    """Fill Axes of matplotlib's with the picture; x is the time, in seconds, and the height is stretched to fit. Where
    axes are lower than the words need, rows are as low as these allow, and then words are smaller."""
    if not callable(getattr(axes, "get_window_extent", None)) or not hasattr(axes, "transData"):
        raise TypeError(f"ax= is an Axes of matplotlib's, as plt.subplots() makes them; found {type(axes).__name__}.")
    box, dots = axes.get_window_extent(), axes.figure.dpi
    drawing = lay_out(panels, box.width / dots / PIXEL, style)
    for _ in range(3):
        over = drawing.height * drawing.unit / (box.height / dots)
        if over <= 1:
            break
        font = style.unit * 12 * 72 / (over if style.width_mm else 1.0)
        style = replace(style, width_mm=box.width / dots * 25.4, font_pt=font)
        drawing = lay_out(panels, style=style)
    _draw(drawing, axes)


def _draw(drawing: Drawing, axes: Any) -> None:
    from matplotlib.transforms import Affine2D

    seconds = (drawing.end - drawing.start or 1.0) / drawing.span
    place = Affine2D().translate(-drawing.left, 0).scale(seconds, 1).translate(drawing.start, 0)
    edges = place.transform([(0, 0), (drawing.width, 0)])
    axes.set(xlim=(edges[0][0], edges[1][0]), ylim=(drawing.height, 0))
    axes.set_axis_off()
    pen = _Pen(axes, place + axes.transData, drawing.unit * 72)
    for at, (look, group) in enumerate(groupby((*drawing.still, *drawing.timed), _look)):
        order = at * 1e-4  # below whatever else is drawn on these axes
        if isinstance(look, Text):
            for shape in group:
                pen.write(shape, order)
        else:
            pen.draw(look, list(group), order)


def _look(shape: Shape) -> Shape:
    """A shape that equals those which may be drawn at once."""
    if isinstance(shape, Text):
        return Text(0, 0, "")
    if isinstance(shape, Line):
        return Line((), shape.paint, shape.width)
    return Rect(0, 0, 0, 0, shape.paint, edge=shape.edge if isinstance(shape, Rect) else 0)


class _Pen(NamedTuple):
    """Draws on axes; `points`: what a pixel of the drawing is in fonts and strokes."""

    axes: Any
    place: Any
    points: float

    def draw(self, look: Shape, shapes: Sequence[Any], order: float) -> None:
        from matplotlib.collections import LineCollection, PolyCollection

        alike: dict[str, Any] = {"zorder": order, "transform": self.place}
        if isinstance(look, Line):
            strokes = [stroke for shape in shapes for stroke in (shape.points, *(heads(shape) if shape.arrow else ()))]
            lines = LineCollection(strokes, colors=_light(look.paint), linewidths=look.width * self.points, **alike)
            self.axes.add_collection(lines, autolim=False)
            return
        outlines = [shape.points if isinstance(shape, Area) else _corners(shape) for shape in shapes]
        edge, face, line = 0.0, _light(look.paint), ROLES["paper"][0]
        if look.paint == "hatched":
            face, line = ROLES["wait"][0], ROLES["hatch"][0]
            alike["hatch"] = "////"
        elif isinstance(look, Rect):
            edge = look.edge * self.points
        boxes = PolyCollection(outlines, facecolors=face, edgecolors=line, linewidths=edge, **alike)
        self.axes.add_collection(boxes, autolim=False)

    def write(self, text: Any, order: float) -> None:
        self.axes.text(
            text.x,
            text.y,
            text.words.replace("$", r"\$"),
            color=_light(text.paint),
            fontsize=text.size * self.points,
            ha={"start": "left", "middle": "center", "end": "right"}[text.anchor],
            va="baseline",
            weight="bold" if text.bold else "normal",
            zorder=order,
            transform=self.place,
        )


def _corners(rect: Rect) -> tuple[tuple[float, float], ...]:
    right, bottom = rect.x + rect.width, rect.y + rect.height
    return ((rect.x, rect.y), (right, rect.y), (right, bottom), (rect.x, bottom))


def _light(paint: str) -> str:
    return ROLES[paint][0] if paint in ROLES else paint
