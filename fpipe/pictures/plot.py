"""Draw programs, timelines and plans: as text, as a picture in a file, or on Axes.

Program --simulate--> Timeline --make_panels--> Panel --lay_out--> Drawing --> .svg .png .pdf .html
                                                      --> text, .json
RunPlan --draw_chart--> Drawing --> .svg .png .pdf
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from fpipe.pictures.box_labels import GLYPH
from fpipe.pictures.chart import draw_chart
from fpipe.pictures.drawn_shapes import PIXEL, Area, Drawing, Line, Rect, Shape, Text, arrow_head
from fpipe.pictures.layout import ARROW_ROOM, lay_out, typical_length
from fpipe.pictures.panel import Panel, make_panels
from fpipe.pictures.perfetto import perfetto
from fpipe.pictures.png import draw_onto, render_raster
from fpipe.pictures.style import PLAIN, ROLES, SWITCHES, Style
from fpipe.pictures.text import Picture, draw_grid, draw_to_scale
from fpipe.planning.run_plan import RunPlan
from fpipe.program import HtmlRepr, Program
from fpipe.timing.costs import Costs, Ticks
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline


def plot(
    subject: Program | Timeline | RunPlan,
    *more: Program | Timeline,
    costs: Costs | None = None,
    file: str | PathLike[str] | None = None,
    names: Sequence[str] | None = None,
    colour: bool | None = None,
    width: int | None = None,
    style: Style = PLAIN,
    ax: Any = None,
) -> str:
    """Draw a program or a timeline, or several on one time axis.

    One program alone is a grid: a row is a rank, a column a tick, in which each F, B, I, W and R takes one, and a dot
    is an idle tick. With costs, a timeline, or more than one, time is to scale.

    >>> import fpipe
    >>> one_f_one_b = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2))(fpipe.program(2))
    >>> print(fpipe.plot(one_f_one_b))
    rank 0 | 0F0 0F1  .  0B0 0F2 0B1 0F3 0B2  .  0B3
    rank 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3  .
    >>> gpipe = fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(2))(fpipe.program(2))
    >>> print(fpipe.plot(one_f_one_b, gpipe, names=["1F1B", "GPipe"], costs=fpipe.Costs(transfer=0.5)))
    1F1B: makespan 17, span 17, bubble 29.4%, peak 2
    rank 0 | 0F0 0F1 ............0B0---- 0F2 0B1---- 0F3 ....0B2---- ....0B3----
    rank 1 | ......1F0 1B0---- 1F1 1B1---- ....1F2 1B2---- 1F3 1B3---- ..........
    GPipe: makespan 16, span 16, bubble 25.0%, peak 4
    rank 0 | 0F0 0F1 0F2 0F3 ................0B0---- 0B1---- 0B2---- 0B3----
    rank 1 | ......1F0 1F1 1F2 1F3 1B0---- 1B1---- 1B2---- 1B3---- ..........
             0       2       4       6       8       10      12      14      16

    Args:
        subject, more: programs, which are simulated, and timelines, simulated or measured (`result.timeline` of a step
            that was built with `record=True`). Or what `fpipe.plan_run` gives, alone: a chart of time against
            memory, as `.svg`, `.png` or `.pdf`.
        costs: seconds of the programs' ops; by default `fpipe.Costs()`.
        file: where to write a picture; its ending says which. `.svg`: for a page, on light paper and dark; hovering
            over an op says when it runs, what it reads and writes. `.png`, `.pdf`: for a document, by matplotlib
            (the extra `plot`). `.html`: a page by itself, to zoom into. `.json`: for
            https://ui.perfetto.dev, a process for each rank.
        names: what to call each of them; by default 1, 2, ...
        colour: of printed text; by default where it is printed on a terminal and NO_COLOR is not set.
        width: of the whole, in characters at most for text (120 to scale; a grid goes on below what is given), in
            pixels for a picture (else what its ops need); a page has the width of its window, and at least this.
        style: a `fpipe.Style`: the size on paper, labels, colours, a window, and what is drawn or left out.
        ax: Axes of matplotlib's to draw onto instead of a file. Their x is the time, in seconds; the picture has their
            width, and is stretched to their height.

    Returns:
        The text, a string that shows itself as a picture in a notebook; with `file`, its name; with `ax`, the figures,
        for a caption.

    Raises:
        TypeError: something is neither a Program nor a Timeline.
        ValueError: an ending without a picture, a list of names that does not fit, costs without a program, a style
            that such a picture cannot have.
        FileNotFoundError: the file's folder is not there.
        ModuleNotFoundError: no matplotlib.
    """
    # 1. Check the options.
    if width is not None and width < 40:
        raise ValueError(f"width= is characters or pixels, at least 40; found {width!r}.")
    if width is not None and (style.width_mm is not None or ax is not None):
        raise ValueError("leave width= out: width_mm= or the Axes say it.")
    # 2. A chart of a plan; panels on Axes, or into a file.
    if isinstance(subject, RunPlan):
        return _draw_run_plan(subject, file, width, style, {"more": more, "costs": costs, "names": names, "ax": ax})
    drawn = (subject, *more)
    if ax is not None:
        if file is not None:
            raise ValueError("say ax= or file=, not both; ax.figure.savefig writes a file.")
        if style.width_mm is not None:
            raise ValueError("leave width_mm= out: the Axes say it.")
        panels = make_panels(drawn, names, costs, style)
        draw_onto(panels, style, ax)
        return "\n".join(panel.caption for panel in panels)
    if file is not None:
        return _write_file(Path(file), make_panels(drawn, names, costs, style), width, style)
    # 3. Text: a grid of ticks for one program without times, else to scale.
    style.refuse_others("text", "figures", "differences", "window", "ranks")
    if len(drawn) == 1 and isinstance(subject, Program) and costs is None and names is None and style.window is None:
        (panel,) = make_panels([simulate(subject, Ticks())], style=style)
        return draw_grid(panel, colour, width, style)
    return draw_to_scale(make_panels(drawn, names, costs, style), width or 120, colour, style)


def _draw_run_plan(run_plan: RunPlan, file: Any, width: int | None, style: Style, options: dict[str, Any]) -> str:
    for name, argument in options.items():
        if argument:
            raise ValueError(f"a {type(run_plan).__name__} is drawn alone, into a file: leave out {name}.")
    return str(run_plan) if file is None else _write_file(Path(file), run_plan, width, style)


def _write_file(file: Path, subject: RunPlan | Sequence[Panel], width: float | None, style: Style) -> str:
    ending, endings, noun = file.suffix, (".svg", ".png", ".pdf", ".html", ".json"), "picture"
    if isinstance(subject, RunPlan):
        endings, noun = endings[:3], "chart"
    if ending not in endings:
        raise ValueError(f"a {noun}'s file ends in {', '.join(endings)}; found {file.name!r}.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{str(file.parent)!r} is not a folder: create it first.")
    if ending == ".html" and not isinstance(subject, RunPlan):
        picture = _html_page(subject, width, style)
    elif ending == ".json" and not isinstance(subject, RunPlan):
        picture = perfetto(subject, style)
    else:
        is_chart = isinstance(subject, RunPlan)
        drawing = draw_chart(subject, width, style) if is_chart else lay_out(subject, width, style)
        write_drawing(file, drawing, str(subject) if is_chart else _captions(subject), style)
        return str(file)
    file.write_text(picture, encoding="utf-8")
    return str(file)


def write_drawing(file: Path, drawing: Drawing, title: str, style: Style = PLAIN) -> None:
    """Write a drawing as .svg, with a title for browsers, .png or .pdf."""
    is_svg = file.suffix == ".svg"
    file.write_bytes(
        _svg_document(drawing, title, style).encode() if is_svg else render_raster(drawing, style, file.suffix[1:])
    )


def _captions(panels: Sequence[Panel]) -> str:
    return "; ".join(panel.caption for panel in panels)


def _notebook_html(subject: HtmlRepr) -> str:
    """Return the HTML for a notebook, with text in place of a picture that would choke it."""
    if isinstance(subject, Program | Timeline):
        return _picture_html(make_panels([subject]), PLAIN)
    if isinstance(subject, Picture):
        return _picture_html(subject.panels, subject.style)
    text = f"<pre>{escape(str(subject))}</pre>"
    if isinstance(subject, RunPlan):
        return text + _svg_document(draw_chart(subject, None, PLAIN), str(subject), PLAIN)
    timelines = subject.pictured
    return text + _picture_html(make_panels([*timelines.values()], [*timelines]), PLAIN) if timelines else text


def _picture_html(panels: Sequence[Panel], style: Style) -> str:
    if sum(len(panel.timeline.events) for panel in panels) > _MAX_EVENTS:
        facts = "\n".join(panel.caption for panel in panels)
        return f"<pre>{facts}\nfpipe.plot(..., file='picture.html') draws it.</pre>"
    return f'<div style="overflow-x:auto">{_svg_document(lay_out(panels, None, style), _captions(panels), style)}</div>'


_MAX_EVENTS = 10_000
"""Ops that a picture in a notebook has at most."""

# A program's `_repr_html_` is defined in the core, which imports no pictures, and calls what is put here.
HtmlRepr.painter = _notebook_html


def _html_page(panels: Sequence[Panel], width: float | None = None, style: Style = PLAIN) -> str:
    """Write panels as one HTML file that needs no other, to zoom into.

    Shapes that stand for a time are in an svg of their own, and its viewBox stretches them to the window. Texts must
    not be stretched, and the axis needs other ticks: the page's script sets both, and moves what is right of the axis.
    """
    style.refuse_others("a page", "labels", *SWITCHES, "differences", "window", "colours", "ranks")
    drawing = lay_out(panels, width or 600, style, keep_all=True)
    left, span, height = map(_format_coordinate, (drawing.left, drawing.span, drawing.height))
    # 1. Shapes: the grid is the script's; an arrow's head would be stretched; texts stand apart.
    timed = [shape for shape in drawing.timed if not shape.grid]
    texts = [shape for shape in timed if isinstance(shape, Text)]
    stretched = [shape._replace(arrow=False) if isinstance(shape, Line) else shape for shape in timed]
    stretched = [shape for shape in stretched if not isinstance(shape, Text)]
    right_edge = drawing.left + drawing.span
    moving = [shape for shape in drawing.fixed if isinstance(shape, Text) and shape.x > right_edge]
    box = f'x="{left}" y="0" width="{span}" height="{height}"'
    body = (
        *_svg_groups(shape for shape in drawing.fixed if shape not in moving),
        *('<g id="right">', *_svg_groups(moving), "</g>"),
        f'<svg id="axis" {box} viewBox="0 0 {span} {height}" overflow="visible" font-size="11" text-anchor="middle">',
        f'</svg><svg id="time" {box} viewBox="{left} 0 {span} {height}" preserveAspectRatio="none">',
        f'<rect x="{left}" width="{span}" height="{height}" fill="transparent"/>',
        *_svg_groups(stretched),
        f'</svg><svg id="words" {box} viewBox="0 0 {span} {height}">',
        *_svg_groups(texts),
        "</svg>",
    )
    # 2. Numbers for the script, such as the zoom from which on arrows have room.
    seconds = drawing.end - drawing.start or 1.0
    op_width = typical_length(panels) * drawing.span / seconds
    facts = {
        "left": drawing.left,
        "span": drawing.span,
        "height": drawing.height,
        "arrows": ARROW_ROOM / op_width if op_width and style.arrows is None else 0.0,
        "start": drawing.start * drawing.clock.per_second,
        "seconds": seconds * drawing.clock.per_second,
        "bands": drawing.bands,
        "bottom": drawing.bottom,
    }
    # 3. Fill the placeholders of the page. The picture comes last: its texts may contain any word.
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    for role in ("wait", "rule", "faint", "ink"):
        for paper, colour in zip(("LIGHT", "DARK"), ROLES[role], strict=True):
            page = page.replace(f"{paper}_{role.upper()}", colour)
    for placeholder, text in {
        "LIGHT": ROLES["paper"][0],
        "DARK": ROLES["paper"][1],
        "FONT": _FONT,
        "GLYPH": str(GLYPH),
        "FACTS": json.dumps(facts),
        "TITLE": escape(", ".join(panel.name for panel in panels if panel.name) or "fpipe"),
        "PICTURE": _svg_frame(drawing, "\n".join(body)),
    }.items():
        page = page.replace(placeholder, text)
    return page


# SVG: one file that any browser, editor or page shows alike, on light paper and on dark. Light colours are attributes,
# which every program that reads SVG knows; dark ones override them where asked.

_FONT = "ui-sans-serif,system-ui,Helvetica,Arial,sans-serif"
_DARK = (f".fpipe-{role}{{fill:{dark}}}.fpipe-l-{role}{{stroke:{dark}}}" for role, (_, dark) in ROLES.items())
_CSS = f"@media (prefers-color-scheme:dark){{{''.join(_DARK)}}}"
_HATCHING = (
    '<defs><pattern id="fpipe-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect class="fpipe-wait" width="6" height="6" fill="{ROLES["wait"][0]}"/>'
    f'<rect class="fpipe-hatch" width="1.5" height="6" fill="{ROLES["hatch"][0]}"/></pattern></defs>'
)


def _svg_document(drawing: Drawing, title_text: str, style: Style) -> str:
    body = "\n".join([*_svg_groups(drawing.fixed), *_svg_groups(drawing.timed)])
    title = f"<title>{escape(title_text, quote=False)}</title>"
    return _svg_frame(drawing, f"{title}\n{body}", "mm" if style.width_mm is not None else "")


def _svg_frame(drawing: Drawing, body: str, size_unit: str = "") -> str:
    """Wrap shapes into an svg element with paper, dark colours and hatching; its size is in "mm", or pixels."""
    width, height = _format_coordinate(drawing.width), _format_coordinate(drawing.height)
    units_per_inch = 25.4 if size_unit == "mm" else 1 / PIXEL
    outer_width, outer_height = (
        f"{_format_coordinate(size * drawing.unit * units_per_inch)}{size_unit}"
        for size in (drawing.width, drawing.height)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{outer_width}" height="{outer_height}" '
        f'viewBox="0 0 {width} {height}" '
        f'font-family="{_FONT}">\n<style>{_CSS}</style>\n{_HATCHING}\n'
        f'<rect class="fpipe-paper" width="{width}" height="{height}" rx="6" fill="{ROLES["paper"][0]}"/>\n'
        f"{body}\n</svg>\n"
    )


def _svg_groups(shapes: Iterable[Shape]) -> list[str]:
    """Write shapes, with neighbours that look alike in one group."""
    lines: list[str] = []
    for look, group in groupby(shapes, _shared_attributes):
        lines += [f"<g {look}>", *map(_svg_element, group), "</g>"]
    return lines


def _shared_attributes(shape: Shape) -> str:
    if isinstance(shape, Line):
        return f'fill="none" {_paint_attribute(shape.paint, "stroke")} stroke-width="{_format_coordinate(shape.width)}"'
    if isinstance(shape, Text):
        bold = ' font-weight="600"' if shape.bold else ""
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        return f'{_paint_attribute(shape.paint)} font-size="{_format_coordinate(shape.size)}"{anchor}{bold}'
    edge = shape.edge if isinstance(shape, Rect) else 0
    stroke = f' {_paint_attribute("paper", "stroke")} stroke-width="{_format_coordinate(edge)}"'
    return _paint_attribute(shape.paint) + (stroke if edge else "")


def _paint_attribute(paint: str, attribute: str = "fill") -> str:
    if paint == "hatched":
        return f'{attribute}="url(#fpipe-hatch)"'
    if paint not in ROLES:
        return f'{attribute}="{paint}"'
    return f'class="fpipe-{"l-" if attribute == "stroke" else ""}{paint}" {attribute}="{ROLES[paint][0]}"'


def _svg_element(shape: Shape) -> str:
    if isinstance(shape, Text):
        short = escape(shape.short, quote=False)
        room = f' data-room="{_format_coordinate(shape.room)}" data-short="{short}"' if shape.room else ""
        text = escape(shape.text, quote=False)
        return f'<text x="{_format_coordinate(shape.x)}" y="{_format_coordinate(shape.y)}"{room}>{text}</text>'
    if isinstance(shape, Rect):
        name = "rect"
        sizes = {field: _format_coordinate(getattr(shape, field)) for field in ("x", "y", "width", "height")}
        attributes = " ".join(f'{attribute}="{size}"' for attribute, size in sizes.items())
    else:
        name, tail = "path", "Z" if isinstance(shape, Area) else ""
        arrow = "".join(map(_svg_path, arrow_head(shape))) if isinstance(shape, Line) and shape.arrow else ""
        attributes = f'd="{_svg_path(shape.points)}{tail}{arrow}"'
    title = f"<title>{escape(shape.title, quote=False)}</title>" if shape.title else ""
    return f"<{name} {attributes}>{title}</{name}>" if title else f"<{name} {attributes}/>"


def _svg_path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + " ".join(f"{_format_coordinate(x)},{_format_coordinate(y)}" for x, y in points)


def _format_coordinate(coordinate: float) -> str:
    """Write a coordinate to a hundredth of a pixel."""
    return f"{coordinate:.2f}".rstrip("0").rstrip(".")
