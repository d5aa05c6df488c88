"""Look at programs and timelines: as text, or as a picture in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from fpipe.pictures.box_labels import GLYPH
from fpipe.pictures.chart import chart
from fpipe.pictures.drawn_shapes import PIXEL, Area, Drawing, Line, Rect, Shape, Text, heads
from fpipe.pictures.layout import ARROW_ROOM, lay_out, typical_length
from fpipe.pictures.panel import Panel, panels_of
from fpipe.pictures.perfetto import perfetto
from fpipe.pictures.png import draw_onto, raster
from fpipe.pictures.style import PLAIN, ROLES, SWITCHES, Style
from fpipe.pictures.text import Picture, grid, to_scale
from fpipe.planning.run_plan import RunPlan
from fpipe.program import HtmlRepr, Program
from fpipe.timing.costs import Costs, Ticks
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline


def plot(
    what: Program | Timeline | RunPlan,
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
        what, more: programs, which are simulated, and timelines, simulated or measured (`result.timeline` of a step
            that was built with `record=True`). Or what `fpipe.plan_run` gives, alone: a chart of time against
            memory, as `.svg`, `.png` or `.pdf`.
        costs: seconds of the programs' ops; by default `fpipe.Costs()`.
        file: where to write a picture; its ending says which. `.svg`: for a page, on light paper and dark; hovering
            over an op says when it runs, what it reads and writes. `.png`, `.pdf`: for a document, by matplotlib
            (`pip install 'fpipe[plot]'`). `.html`: a page by itself, to zoom into. `.json`: for
            https://ui.perfetto.dev, a process for each rank.
        names: what to call each of them; by default 1, 2, ...
        colour: of printed text; by default where it is printed on a terminal and NO_COLOR is not set.
        width: of the whole, in characters at most for text (120 to scale; a grid goes on below what is given), in
            pixels for a picture (else what its ops need).
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
    if width is not None and (not isinstance(width, int) or width < 40):
        raise ValueError(f"width= is a number of characters, or of pixels in a picture, at least 40; found {width!r}.")
    if file is not None and not isinstance(file, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"file= is the name of a file, such as 'picture.svg', found {file!r}.")
    if not isinstance(style, Style):
        raise TypeError(f"style= is a fpipe.Style, such as fpipe.Style(memory=False); found {style!r}.")
    if width is not None and (style.width_mm is not None or ax is not None):
        raise ValueError("width= is in pixels: leave it out where width_mm= or the Axes say how wide the picture is.")
    if isinstance(what, RunPlan):
        return _chart(what, file, width, style, {"more": more, "costs": costs, "names": names, "ax": ax})
    drawn = (what, *more)
    if ax is not None:
        if file is not None:
            raise ValueError("ax= is drawn onto and file= is written: say one of the two; ax.figure.savefig writes it.")
        if style.width_mm is not None:
            raise ValueError("the Axes say how wide the picture is: leave width_mm= out.")
        panels = panels_of(drawn, names, costs, style.window, style.ranks)
        draw_onto(panels, style, ax)
        return "\n".join(panel.caption for panel in panels)
    if file is not None:
        return _write(Path(file), panels_of(drawn, names, costs, style.window, style.ranks), width, style)
    style.only("text", "figures", "window", "ranks")
    if len(drawn) == 1 and isinstance(what, Program) and costs is None and names is None and style.window is None:
        (panel,) = panels_of([simulate(what, Ticks())], ranks=style.ranks)
        return grid(panel, colour, width, style)
    return to_scale(panels_of(drawn, names, costs, style.window, style.ranks), width or 120, colour, style)


def _chart(what: RunPlan, file: Any, width: int | None, style: Style, others: dict[str, Any]) -> str:
    for word, argument in others.items():
        if argument:
            raise ValueError(f"a {type(what).__name__} is drawn alone, into a file: leave out {word}.")
    return str(what) if file is None else _write(Path(file), what, width, style)


def _write(file: Path, what: RunPlan | Sequence[Panel], width: float | None, style: Style) -> str:
    ending, endings, kind = file.suffix, (".svg", ".png", ".pdf", ".html", ".json"), "picture"
    if isinstance(what, RunPlan):
        endings, kind = endings[:3], "chart"
    if ending not in endings:
        raise ValueError(f"a {kind}'s file ends in {', '.join(endings)}; found {file.name!r}.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{str(file.parent)!r} is not a folder: make it before a picture is written there.")
    if ending == ".html" and not isinstance(what, RunPlan):
        content = _page(what, width, style)
    elif ending == ".json" and not isinstance(what, RunPlan):
        content = perfetto(what, style)
    else:
        is_chart = isinstance(what, RunPlan)
        drawing = chart(what, width, style) if is_chart else lay_out(what, width, style)
        words = str(what) if is_chart else _words(what)
        content = _svg(drawing, words, style) if ending == ".svg" else raster(drawing, style, ending[1:])
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(file)


def _words(panels: Sequence[Panel]) -> str:
    return "; ".join(panel.caption for panel in panels)


def _paint(what: HtmlRepr) -> str:
    """The HTML for a notebook; text instead where a picture would choke it."""
    if isinstance(what, Program | Timeline):
        return _pictured(panels_of([what]), PLAIN)
    if isinstance(what, Picture):
        return _pictured(what.panels, what.style)
    words = f"<pre>{escape(str(what))}</pre>"
    if isinstance(what, RunPlan):
        return words + _svg(chart(what, None, PLAIN), str(what), PLAIN)
    timelines = what.pictured
    return words + _pictured(panels_of([*timelines.values()], [*timelines]), PLAIN) if timelines else words


def _pictured(panels: Sequence[Panel], style: Style) -> str:
    if sum(len(panel.timeline.events) for panel in panels) > _MOST:
        facts = "\n".join(panel.caption for panel in panels)
        return f"<pre>{facts}\nfpipe.plot(..., file='picture.html') draws it.</pre>"
    return f'<div style="overflow-x:auto">{_svg(lay_out(panels, None, style), _words(panels), style)}</div>'


_MOST = 10_000

HtmlRepr.painter = _paint


def _page(panels: Sequence[Panel], width: float | None = None, style: Style = PLAIN) -> str:
    """The panels as one HTML file that needs no other.

    What stands for a time is stretched by the viewBox of a picture inside the picture. Words must not be stretched and
    the axis needs other ticks: the page's script sets both.
    """
    style.only("a page", "labels", *SWITCHES, "window", "colours", "ranks")
    drawing = lay_out(panels, width or 1400, style, every=True)
    left, span, height = _number(drawing.left), _number(drawing.span), _number(drawing.height)
    timed = [shape for shape in drawing.timed if not shape.grid]
    words = [shape for shape in timed if isinstance(shape, Text)]
    # An arrow's head would be stretched.
    stretched = [shape._replace(arrow=False) if isinstance(shape, Line) else shape for shape in timed]
    stretched = [shape for shape in stretched if not isinstance(shape, Text)]
    place = f'x="{left}" y="0" width="{span}" height="{height}"'
    body = (
        *_groups(drawing.still),
        f'<svg id="axis" {place} viewBox="0 0 {span} {height}" overflow="visible" font-size="11" text-anchor="middle">',
        f'</svg><svg id="time" {place} viewBox="{left} 0 {span} {height}" preserveAspectRatio="none">',
        f'<rect x="{left}" width="{span}" height="{height}" fill="transparent"/>',
        *_groups(stretched),
        f'</svg><svg id="words" {place} viewBox="0 0 {span} {height}">',
        *_groups(words),
        "</svg>",
    )
    seconds = drawing.end - drawing.start or 1.0
    wide = typical_length(panels) * drawing.span / seconds
    facts = {
        "left": drawing.left,
        "span": drawing.span,
        "height": drawing.height,
        "arrows": ARROW_ROOM / wide if wide and style.arrows is None else 0.0,
        "start": drawing.start * drawing.clock.per_second,
        "seconds": seconds * drawing.clock.per_second,
        "bands": drawing.bands,
        "bottom": drawing.bottom,
    }
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    for role in ("wait", "rule", "faint", "ink"):
        for paper, colour in zip(("LIGHT", "DARK"), ROLES[role], strict=True):
            page = page.replace(f"{paper}_{role.upper()}", colour)
    for word, text in {
        "LIGHT": ROLES["paper"][0],
        "DARK": ROLES["paper"][1],
        "FONT": _FONT,
        "GLYPH": str(GLYPH),
        "FACTS": json.dumps(facts),
        "TITLE": escape(", ".join(panel.name for panel in panels if panel.name) or "fpipe"),
        "PICTURE": _frame(drawing, "\n".join(body)),
    }.items():
        page = page.replace(word, text)
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


def _svg(drawing: Drawing, words: str, style: Style) -> str:
    body = "\n".join([*_groups(drawing.still), *_groups(drawing.timed)])
    title = f"<title>{escape(words, quote=False)}</title>"
    return _frame(drawing, f"{title}\n{body}", "mm" if style.width_mm is not None else "")


def _frame(drawing: Drawing, body: str, size_in: str = "") -> str:
    """Put an svg element with paper, dark colours and hatching around shapes; its size is in "mm", or pixels."""
    width, height = _number(drawing.width), _number(drawing.height)
    inch = 25.4 if size_in == "mm" else 1 / PIXEL
    wide, high = (f"{_number(size * drawing.unit * inch)}{size_in}" for size in (drawing.width, drawing.height))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {width} {height}" '
        f'font-family="{_FONT}">\n<style>{_CSS}</style>\n{_HATCHING}\n'
        f'<rect class="fpipe-paper" width="{width}" height="{height}" rx="6" fill="{ROLES["paper"][0]}"/>\n'
        f"{body}\n</svg>\n"
    )


def _groups(shapes: Iterable[Shape]) -> list[str]:
    """Write shapes, those in a row that look alike in one group."""
    lines: list[str] = []
    for look, group in groupby(shapes, _look):
        lines += [f"<g {look}>", *map(_element, group), "</g>"]
    return lines


def _look(shape: Shape) -> str:
    """The attributes that shapes may share."""
    if isinstance(shape, Line):
        return f'fill="none" {_painted(shape.paint, "stroke")} stroke-width="{_number(shape.width)}"'
    if isinstance(shape, Text):
        bold = ' font-weight="600"' if shape.bold else ""
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        return f'{_painted(shape.paint)} font-size="{_number(shape.size)}"{anchor}{bold}'
    edge = shape.edge if isinstance(shape, Rect) else 0
    return _painted(shape.paint) + (f' {_painted("paper", "stroke")} stroke-width="{_number(edge)}"' if edge else "")


def _painted(paint: str, attribute: str = "fill") -> str:
    if paint == "hatched":
        return f'{attribute}="url(#fpipe-hatch)"'
    if paint not in ROLES:
        return f'{attribute}="{paint}"'
    return f'class="fpipe-{"l-" if attribute == "stroke" else ""}{paint}" {attribute}="{ROLES[paint][0]}"'


def _element(shape: Shape) -> str:
    """Write one shape, without what its group says."""
    if isinstance(shape, Text):
        short = escape(shape.short, quote=False)
        room = f' data-room="{_number(shape.room)}" data-short="{short}"' if shape.room else ""
        words = escape(shape.words, quote=False)
        return f'<text x="{_number(shape.x)}" y="{_number(shape.y)}"{room}>{words}</text>'
    if isinstance(shape, Rect):
        name = "rect"
        attributes = " ".join(f'{word}="{_number(getattr(shape, word))}"' for word in ("x", "y", "width", "height"))
    else:
        name, tail = "path", "Z" if isinstance(shape, Area) else ""
        arrow = "".join(map(_path, heads(shape))) if isinstance(shape, Line) and shape.arrow else ""
        attributes = f'd="{_path(shape.points)}{tail}{arrow}"'
    title = f"<title>{escape(shape.title, quote=False)}</title>" if shape.title else ""
    return f"<{name} {attributes}>{title}</{name}>" if title else f"<{name} {attributes}/>"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(coordinate: float) -> str:
    """A coordinate to a hundredth of a pixel."""
    return f"{coordinate:.2f}".rstrip("0").rstrip(".")
