"""Draw a dot plot: names below each other, and for each quantity an axis with two dots, simulated and measured.

                 tokens/s              bubble
8 microbatches
one_f_one_b      |    o---x    |       |  x-o       |
zb_h1            |      o--x   |       | xo         |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fpipe.pictures.box_labels import GLYPH
from fpipe.pictures.drawn_shapes import EDGE, PIXEL, Area, Drawing, Line, Text, clock, draw_dot, ticks
from fpipe.pictures.style import FILLS, Style

ROW, HEADING, GAP, DOT = 18.0, 24.0, 22.0, 3.0
_SIZE = 11.0
MEASURED = FILLS["F"]


class DotPair(NamedTuple):
    """A simulated and a measured number; None for one that is unknown."""

    simulated: float | None
    measured: float | None


class DotRow(NamedTuple):
    """A name with its numbers, one pair for each quantity; without pairs, the heading of the rows below."""

    name: str
    pairs: Sequence[DotPair] = ()


def draw_dots(quantities: Sequence[str], rows: Sequence[DotRow], style: Style) -> Drawing:
    """Draw rows of dots, hollow for simulated and filled for measured numbers, on an axis from 0 for each quantity."""
    style.refuse_others("a dot plot", "width_mm", "font_pt")
    unit = style.unit
    width = 720.0 * PIXEL / unit if style.width_mm is None else style.width_mm / 25.4 / unit
    axis_left = EDGE + max(len(row.name) for row in rows) * _SIZE * GLYPH + 12
    span = (width - axis_left - EDGE - GAP * (len(quantities) - 1)) / len(quantities)
    top = EDGE + 40
    bottom = top + sum(ROW if row.pairs else HEADING for row in rows)
    drawing = Drawing(width, bottom + 40, axis_left, span, 0.0, 1.0, clock(0), unit)
    # 1. Names, and the height of each row.
    heights, y = list[float](), top
    for row in rows:
        y += ROW if row.pairs else HEADING
        drawing.fixed.append(Text(EDGE, y - 5, row.name, "ink", _SIZE, bold=not row.pairs))
        heights.append(y - ROW / 2)
    # 2. An axis for each quantity, and on it the dots of all rows.
    for column, quantity in enumerate(quantities):
        x0 = axis_left + column * (span + GAP)
        pairs = [(row.pairs[column], height) for row, height in zip(rows, heights, strict=True) if row.pairs]
        largest = max((number for pair, _ in pairs for number in pair if number is not None), default=0.0) or 1.0
        scale = span / (1.05 * largest)
        drawing.fixed.append(Text(x0, EDGE + 14, quantity, "ink", 12, bold=True))
        for tick in ticks(0.0, 1.05 * largest, int(span // 40)):
            x = x0 + tick * scale
            drawing.fixed.append(Line(((x, top), (x, bottom)), "rule"))
            drawing.fixed.append(Text(x, top - 6, f"{tick:g}", "faint", 10, "middle"))
        for (simulated, measured), height in pairs:
            if simulated is not None and measured is not None:
                ends = (x0 + simulated * scale, height), (x0 + measured * scale, height)
                drawing.fixed.append(Line(ends, "faint"))
            # A measured dot fits into the ring, so that equal numbers show both.
            if simulated is not None:
                drawing.fixed += _ring(x0 + simulated * scale, height, f"simulated {simulated:.4g}")
            if measured is not None:
                drawing.fixed.append(draw_dot(x0 + measured * scale, height, DOT, MEASURED, f"measured {measured:.4g}"))
    # 3. The legend.
    y = bottom + 22
    drawing.fixed += [*_ring(axis_left, y), Text(axis_left + 10, y + 4, "simulated", "faint", _SIZE)]
    x = axis_left + 10 + len("simulated") * _SIZE * GLYPH + 20
    drawing.fixed += [draw_dot(x, y, DOT, MEASURED), Text(x + 10, y + 4, "measured", "faint", _SIZE)]
    return drawing


def _ring(x: float, y: float, title: str = "") -> list[Area]:
    """Draw a hollow dot as a dot with one of the paper on it."""
    return [draw_dot(x, y, 1.6 * DOT, "ink", title), draw_dot(x, y, 1.2 * DOT, "paper", title)]
