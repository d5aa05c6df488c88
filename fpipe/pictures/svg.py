"""A drawing as SVG: one file that any browser, editor or page shows alike, on light paper and on dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import groupby

from fpipe.pictures.colours import ROLES
from fpipe.pictures.drawn_shapes import PIXEL, Area, Drawing, Line, Rect, Shape, Text, heads
from fpipe.pictures.style import Style

FONT = "ui-sans-serif,system-ui,Helvetica,Arial,sans-serif"


def svg(drawing: Drawing, said: str, style: Style) -> str:
    """A drawing as SVG text; `said`: what it shows, in words."""
    body = "\n".join([*shapes(drawing.still), *shapes(drawing.timed)])
    return frame(drawing, f"<title>{_escaped(said)}</title>\n{body}", "mm" if style.width_mm is not None else "")


def _escaped(words: str) -> str:
    return html.escape(words, quote=False)


def frame(drawing: Drawing, body: str, size_in: str = "") -> str:
    """An svg element around shapes, with its paper, the colours of dark paper and the hatching of waits; its size is
    in millimetres, or pixels."""
    width, height = number(drawing.width), number(drawing.height)
    inch = 25.4 if size_in == "mm" else 1 / PIXEL
    wide, high = (f"{number(size * drawing.unit * inch)}{size_in}" for size in (drawing.width, drawing.height))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {width} {height}" '
        f'font-family="{FONT}">\n<style>{STYLE}</style>\n{PATTERN}\n'
        f'<rect class="fpipe-paper" width="{width}" height="{height}" rx="6" fill="{ROLES["paper"][0]}"/>\n'
        f"{body}\n</svg>\n"
    )


_DARK = (f".fpipe-{role}{{fill:{dark}}}.fpipe-l-{role}{{stroke:{dark}}}" for role, (_, dark) in ROLES.items())
STYLE = f"@media (prefers-color-scheme:dark){{{''.join(_DARK)}}}"
"""Light colours are attributes, which every program that reads SVG knows; dark ones override them where asked."""

PATTERN = (
    '<defs><pattern id="fpipe-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect class="fpipe-wait" width="6" height="6" fill="{ROLES["wait"][0]}"/>'
    f'<rect class="fpipe-hatch" width="1.5" height="6" fill="{ROLES["hatch"][0]}"/></pattern></defs>'
)


def shapes(drawn: Iterable[Shape]) -> list[str]:
    """Elements, those in a row that look alike in one group."""
    found: list[str] = []
    for look, group in groupby(drawn, _look):
        found += [f"<g {look}>", *map(element, group), "</g>"]
    return found


def _look(shape: Shape) -> str:
    """The attributes that shapes may share."""
    if isinstance(shape, Line):
        return f'fill="none" {_painted(shape.paint, "stroke")} stroke-width="{number(shape.width)}"'
    if isinstance(shape, Text):
        bold = ' font-weight="600"' if shape.bold else ""
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        return f'{_painted(shape.paint)} font-size="{number(shape.size)}"{anchor}{bold}'
    edge = shape.edge if isinstance(shape, Rect) else 0
    return _painted(shape.paint) + (f' {_painted("paper", "stroke")} stroke-width="{number(edge)}"' if edge else "")


def _painted(paint: str, what: str = "fill") -> str:
    if paint == "hatched":
        return f'{what}="url(#fpipe-hatch)"'
    if paint not in ROLES:
        return f'{what}="{paint}"'
    return f'class="fpipe-{"l-" if what == "stroke" else ""}{paint}" {what}="{ROLES[paint][0]}"'


def element(shape: Shape) -> str:
    """One shape, without what its group says."""
    if isinstance(shape, Text):
        room = f' data-room="{number(shape.room)}" data-short="{_escaped(shape.short)}"' if shape.room else ""
        return f'<text x="{number(shape.x)}" y="{number(shape.y)}"{room}>{_escaped(shape.words)}</text>'
    title = f"<title>{_escaped(shape.title)}</title>" if shape.title else ""
    if isinstance(shape, Rect):
        box = (f'{word}="{number(getattr(shape, word))}"' for word in ("x", "y", "width", "height"))
        return _closed("rect", " ".join(box), title)
    path = _path(shape.points)
    if isinstance(shape, Area):
        return _closed("path", f'd="{path}Z"', title)
    arrow = "".join(map(_path, heads(shape))) if shape.arrow else ""
    return _closed("path", f'd="{path}{arrow}"', title)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + " ".join(f"{number(x)},{number(y)}" for x, y in points)


def _closed(name: str, attributes: str, inside: str) -> str:
    return f"<{name} {attributes}>{inside}</{name}>" if inside else f"<{name} {attributes}/>"


def number(given: float) -> str:
    """A coordinate to a hundredth of a pixel."""
    return f"{given:.2f}".rstrip("0").rstrip(".")
