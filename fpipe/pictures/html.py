"""A page by itself: the picture, to zoom into along the time axis; names appear as soon as there is room for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fpipe.pictures.box_labels import GLYPH
from fpipe.pictures.colours import ROLES
from fpipe.pictures.drawn_shapes import Area, Line, Rect, Shape, Text
from fpipe.pictures.layout import ARROW_ROOM, lay_out, typical_length
from fpipe.pictures.panel import Panel
from fpipe.pictures.style import PLAIN, SWITCHES, Style
from fpipe.pictures.svg import FONT, frame, number, shapes


def html(panels: Sequence[Panel], width: float | None = None, style: Style = PLAIN) -> str:
    """The panels as one HTML file that needs no other.

    What stands for a time is stretched by the viewBox of a picture inside the picture. Words must not be stretched and
    the axis needs other ticks: the page's script sets both.
    """
    style.only("a page", "labels", *SWITCHES, "window", "colours", "ranks")
    drawing = lay_out(panels, width or 1400, style, every=True)
    left, span, height = number(drawing.left), number(drawing.span), number(drawing.height)
    stretched = [_plain(shape) for shape in drawing.timed if isinstance(shape, Rect | Area | Line) and not shape.grid]
    words = [shape for shape in drawing.timed if isinstance(shape, Text) and not shape.grid]
    place = f'x="{left}" y="0" width="{span}" height="{height}"'
    body = (
        *shapes(drawing.still),
        f'<svg id="axis" {place} viewBox="0 0 {span} {height}" overflow="visible" font-size="11" text-anchor="middle">',
        f'</svg><svg id="time" {place} viewBox="{left} 0 {span} {height}" preserveAspectRatio="none">',
        f'<rect x="{left}" width="{span}" height="{height}" fill="transparent"/>',
        *shapes(stretched),
        f'</svg><svg id="words" {place} viewBox="0 0 {span} {height}">',
        *shapes(words),
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
    for word, given in {
        "LIGHT": ROLES["paper"][0],
        "DARK": ROLES["paper"][1],
        "FONT": FONT,
        "GLYPH": str(GLYPH),
        "FACTS": json.dumps(facts),
        "TITLE": escape(", ".join(panel.name for panel in panels if panel.name) or "fpipe"),
        "PICTURE": frame(drawing, "\n".join(body)),
    }.items():
        page = page.replace(word, given)
    return page


def _plain(shape: Shape) -> Shape:
    """Without an arrow's head, which would be stretched."""
    return shape._replace(arrow=False) if isinstance(shape, Line) else shape
