"""Render a drawing through matplotlib, as PNG or PDF, or on the caller's Axes.

Shapes that look alike are drawn as one collection of matplotlib, rather than an artist for each of thousands.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from fpipe.pictures.drawn_shapes import PIXEL, Area, Drawing, Line, Rect, Shape, Text, arrow_head
from fpipe.pictures.layout import lay_out
from fpipe.pictures.panel import Panel
from fpipe.pictures.style import ROLES, Style

DOTS = {"screen": 192, "paper": 300}
"""Dots per inch: two for each pixel of a screen, and 300 as journals ask for."""


def render_raster(drawing: Drawing, style: Style, ending: str) -> bytes:
    """Return the bytes of a PNG or PDF file of a drawing."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError(
            f"a .{ending} needs matplotlib: pip install matplotlib, or write .svg or .html."
        ) from None
    dots = DOTS["screen" if style.width_mm is None else "paper"]
    size = drawing.width * drawing.unit, drawing.height * drawing.unit
    figure = Figure(size, dpi=dots, facecolor=ROLES["paper"][0])
    FigureCanvasAgg(figure)
    _draw_shapes(drawing, figure.add_axes((0, 0, 1, 1)))
    file = io.BytesIO()
    # Without the version or the date, equal drawings are equal files.
    metadata = {"Software": None} if ending == "png" else {"CreationDate": None}
    with matplotlib.rc_context({"pdf.fonttype": 42}):  # TrueType: journals refuse Type 3 fonts
        figure.savefig(file, format=ending, metadata=metadata)
    return file.getvalue()


def draw_onto(panels: Sequence[Panel], style: Style, axes: Any) -> None:
    """Fill Axes of matplotlib with the picture; x is the time in seconds, and the height is stretched to fit.

    If axes are lower than the texts need, rows are as low as texts allow, and then texts are smaller.
    """
    if not callable(getattr(axes, "get_window_extent", None)) or not hasattr(axes, "transData"):
        raise TypeError(f"ax= is a matplotlib Axes, as plt.subplots() makes; found {type(axes).__name__}.")
    box, dots = axes.get_window_extent(), axes.figure.dpi
    drawing = lay_out(panels, box.width / dots / PIXEL, style)
    # First a width in mm makes rows as low as on paper, then fonts shrink. Each changes what fits, hence the rounds.
    for _ in range(3):
        excess = drawing.height * drawing.unit / (box.height / dots)
        if excess <= 1:
            break
        font = style.unit * 12 * 72 / (excess if style.width_mm else 1.0)
        style = replace(style, width_mm=box.width / dots * 25.4, font_pt=font)
        drawing = lay_out(panels, style=style)
    _draw_shapes(drawing, axes)


def _draw_shapes(drawing: Drawing, axes: Any) -> None:
    from matplotlib.transforms import Affine2D

    seconds = (drawing.end - drawing.start or 1.0) / drawing.span
    time_transform = Affine2D().translate(-drawing.left, 0).scale(seconds, 1).translate(drawing.start, 0)
    edges = time_transform.transform([(0, 0), (drawing.width, 0)])
    axes.set(xlim=(edges[0][0], edges[1][0]), ylim=(drawing.height, 0))
    axes.set_axis_off()
    pen = _Pen(axes, time_transform + axes.transData, drawing.unit * 72)
    for index, (sample, group) in enumerate(groupby((*drawing.fixed, *drawing.timed), _group_key)):
        order = index * 1e-4  # keeps the order of groups, below whatever else is drawn on these axes
        if isinstance(sample, Text):
            for shape in group:
                pen.write(shape, order)
        else:
            pen.draw(sample, list(group), order)


def _group_key(shape: Shape) -> Shape:
    """Return a sample shape, equal for shapes that may be drawn in one collection."""
    if isinstance(shape, Text):
        return Text(0, 0, "")
    if isinstance(shape, Line):
        return Line((), shape.paint, shape.width)
    return Rect(0, 0, 0, 0, shape.paint, edge=shape.edge if isinstance(shape, Rect) else 0)


class _Pen(NamedTuple):
    """Pen on axes; `points`: points of a pixel, the unit of fonts and strokes; `transform`: from pixels to the axes."""

    axes: Any
    transform: Any
    points: float

    def draw(self, sample: Shape, shapes: Sequence[Any], order: float) -> None:
        from matplotlib.collections import LineCollection, PolyCollection

        options: dict[str, Any] = {"zorder": order, "transform": self.transform}
        if isinstance(sample, Line):
            strokes = [stroke for line in shapes for stroke in (line.points, *(arrow_head(line) if line.arrow else ()))]
            options |= {"colors": _light_colour(sample.paint), "linewidths": sample.width * self.points}
            lines = LineCollection(strokes, **options)
            self.axes.add_collection(lines, autolim=False)
            return
        outlines = [shape.points if isinstance(shape, Area) else _corners(shape) for shape in shapes]
        edge, face, line = 0.0, _light_colour(sample.paint), ROLES["paper"][0]
        if sample.paint == "hatched":
            face, line = ROLES["wait"][0], ROLES["hatch"][0]
            options["hatch"] = "////"
        elif isinstance(sample, Rect):
            edge = sample.edge * self.points
        boxes = PolyCollection(outlines, facecolors=face, edgecolors=line, linewidths=edge, **options)
        self.axes.add_collection(boxes, autolim=False)

    def write(self, text: Any, order: float) -> None:
        alignment = {"start": "left", "middle": "center", "end": "right"}[text.anchor]
        font = {"fontsize": text.size * self.points, "weight": "bold" if text.bold else "normal"}
        layout = {"ha": alignment, "va": "baseline", "zorder": order, "transform": self.transform}
        # matplotlib reads what stands between dollars as a formula.
        escaped_text = text.text.replace("$", r"\$")
        self.axes.text(text.x, text.y, escaped_text, color=_light_colour(text.paint), **font, **layout)


def _corners(rect: Rect) -> tuple[tuple[float, float], ...]:
    right, bottom = rect.x + rect.width, rect.y + rect.height
    return ((rect.x, rect.y), (right, rect.y), (right, bottom), (rect.x, bottom))


def _light_colour(paint: str) -> str:
    return ROLES[paint][0] if paint in ROLES else paint
