"""Charts of plans: time against memory of many ways to run, and how far makespans vary.

step | o                          |----[  | ]------<>   one_f_one_b
     |  1---+   o  o                |--[ |]--<>        zb_h1
     |      2----+  o  o
     +---------------- memory     +------------------- time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from fpipe.pictures.axis import clock, ticks
from fpipe.pictures.box_labels import GLYPH
from fpipe.pictures.colours import FILLS
from fpipe.pictures.drawn_shapes import EDGE, PIXEL, Area, Drawing, Line, Rect, Shape, Text
from fpipe.pictures.legend import swatches
from fpipe.pictures.style import Style
from fpipe.planning.run_plan import PlanRow, RunPlan
from fpipe.timing.amounts import amount, byte_unit
from fpipe.timing.robustness import Robustness

POLICY = {"never": FILLS["F"], "except_last": FILLS["I"], "always": FILLS["R"], "auto": FILLS["W"]}
WORDS = {
    "never": "recompute nothing",
    "except_last": "recompute all but the last microbatch",
    "always": "recompute all",
    "auto": "recompute what a search chose",
}
LOWER = 0.05
"""The share of draws below the line of a spread, and above its other end."""


def chart(what: RunPlan | Robustness, width: float | None, style: Style) -> Drawing:
    """The picture of a plan or of spreads."""
    style.only("a chart", "width_mm", "font_pt")
    wide = (width or 720.0) * PIXEL / style.unit if style.width_mm is None else style.width_mm / 25.4 / style.unit
    return front(what, wide, style.unit) if isinstance(what, RunPlan) else spreads(what, wide, style.unit)


def front(plan: RunPlan, width: float, unit: float) -> Drawing:
    """Every way as a point, memory to the right and time upwards; those than which none is both shorter and smaller
    are numbered, joined by a line and named below."""
    rows = [row for row in plan.rows if row.seconds(plan.at) is not None]
    steps = len({round(row.rows * row.microbatches, 6) for row in rows}) == 1

    def shared(row: PlanRow, seconds: float) -> float:
        return seconds / (1 if steps else row.rows * row.microbatches)

    def taken(row: PlanRow) -> float:
        return shared(row, row.seconds(plan.at) or 0.0)

    def spread(row: PlanRow) -> list[float]:
        return [shared(row, row.spread.at(share)) for share in (LOWER, 1 - LOWER)] if row.spread else []

    time = clock(max(map(taken, rows)))
    in_bytes = plan.unit == "bytes"
    memory, scale = byte_unit(max(row.most for row in rows)) if in_bytes else ("", 1.0)
    left, top, height = EDGE + 52, EDGE + 34, 300.0
    span, bottom = width - left - EDGE - 12, top + height
    least, most = min(row.most for row in rows) / scale, max(row.most for row in rows) / scale
    most += (most - least or most or 1.0) * 0.05
    least = max(0.0, least - (most - least) * 0.08)
    drawing = Drawing(width, 0.0, left, span, least, most, clock(0), unit)
    times = [seconds * time.per_second for row in rows for seconds in (taken(row), *spread(row))]
    low, high = min(times), max(times)
    low, high = low - (high - low or low) * 0.08, high + (high - low or high) * 0.08

    def across(held: float) -> float:
        return left + (held - least) / (most - least) * span

    def upward(seconds: float) -> float:
        return top + (high - seconds * time.per_second) / (high - low) * height

    of = {"nominal": "", "median": ", median", "p95": ", 95th percentile"}[plan.at]
    above = f"{time.unit or 'seconds'} of a {'step' if steps else 'row'}{of}"
    below = f"{memory} that the fullest rank holds" if in_bytes else "rows held by the fullest rank"
    drawing.still.append(Text(EDGE, EDGE + 14, "Time against memory", "ink", 13, bold=True))
    drawing.still.append(Text(EDGE, EDGE + 28, above, "faint", 11))
    for tick in ticks(low, high, 7):
        y = upward(tick / time.per_second)
        drawing.still += [
            Line(((left, y), (left + span, y)), "rule"),
            Text(left - 6, y + 4, f"{tick:g}", "faint", 11, "end"),
        ]
    _upright(drawing, across, ticks(least, most, int(span // 64)), top, bottom)
    drawing.still.append(Text(left + span, bottom + 30, below, "faint", 11, "end"))
    limit = min(plan.cap) / scale
    if least < limit < most:
        x = across(limit)
        drawing.still += [Line(((x, top), (x, bottom)), "ink", 1.2), Text(x - 4, top + 11, "memory", "ink", 11, "end")]
    points = [(row, across(row.most / scale), upward(taken(row))) for row in rows]
    drawing.still += [_point(x, y, 3.0, row, plan) for row, x, y in points if row not in plan.front]
    chosen = sorted((point for point in points if point[0] in plan.front), key=lambda point: point[1])
    stairs = [corner for one, other in pairwise(chosen) for corner in (one[1:], (other[1], one[2]))]
    drawing.still.append(Line((*stairs, *(point[1:] for point in chosen[-1:])), "curve", 1.5))
    for row, x, _ in chosen:
        if ends := spread(row):
            ends[0] = min(ends[0], taken(row))
            drawing.still.append(Line(tuple((x, max(top, min(bottom, upward(end)))) for end in ends), "arrow", 1.2))
    numbers = {id(row): at for at, row in enumerate(plan.front, 1)}
    for row, x, y in chosen:
        drawing.still.append(_point(x, y, 5.5, row, plan))
        drawing.still.append(Text(x - 7, y + 13, str(numbers[id(row)]), "ink", 11, "end", bold=True))
    entries = [([POLICY[policy]], WORDS[policy]) for policy in POLICY if any(row.checkpoint == policy for row in rows)]
    entries += [] if all(row.fits for row in rows) else [(["hatch"], "does not fit")]
    entries += [(["arrow"], "90 of 100 draws")] if any(row.spread for row in plan.front) else []
    y = swatches(drawing, entries, bottom + 46) + 4
    for at, row in enumerate(plan.front, 1):
        held = amount(row.most, in_bytes, 4) + ("" if in_bytes else " rows")
        seconds = f"{time.full(row.seconds(plan.at) or 0.0)}{'' if time.unit else ' s'}"
        drawing.still += [
            Text(left - 6, y + 12, str(at), "ink", 11, "end", bold=True),
            Text(left, y + 12, f"{row.name}: {seconds}, {held}{_misfit(row)}", "ink", 11),
        ]
        y += 16
    drawing.height = y + EDGE
    return drawing


def _misfit(row: PlanRow) -> str:
    return "" if row.fits else ", too much"


def _upright(
    drawing: Drawing, across: Callable[[float], float], marks: Iterable[float], top: float, bottom: float
) -> None:
    """Lines of the axis to the right, and their numbers below."""
    for mark in marks:
        x = across(mark)
        drawing.still += [
            Line(((x, top), (x, bottom)), "rule"),
            Text(x, bottom + 14, f"{mark:g}", "faint", 11, "middle"),
        ]


def _point(x: float, y: float, size: float, row: PlanRow, plan: RunPlan) -> Shape:
    """A dot, a diamond for what a search found; hovering says what it is."""
    paint = POLICY[row.checkpoint] if row.fits else "hatch"
    held = amount(row.most, plan.unit == "bytes")
    title = f"{row.name}: {row.makespan:.4g} s, holds {held}{_misfit(row)}"
    if row.schedule == "found":
        return _diamond(x, y, size * 1.3, paint, title)
    half = size * 0.41
    octagon = ((half, size), (size, half), (size, -half), (half, -size))
    corners = octagon + tuple((-across, -down) for across, down in octagon)
    return Area(tuple((x + across, y + down) for across, down in corners), paint, title)


def _diamond(x: float, y: float, size: float, paint: str, title: str) -> Area:
    return Area(((x, y + size), (x + size, y), (x, y - size), (x - size, y)), paint, title)


def spreads(found: Robustness, width: float, unit: float) -> Drawing:
    """A line for each program: from the 5th to the 95th percentile of its makespans, a box around the middle half, a
    bar at the median, and a dot at the nominal makespan."""
    rows = found.rows
    least = min(min(row.at(LOWER), row.nominal) for row in rows)
    most = max(max(row.at(1 - LOWER), row.nominal) for row in rows)
    time = clock(most)
    margin = (most - least or most or 1.0) * 0.05
    start, end = max(0.0, least - margin), most + margin
    left = EDGE + 12 * GLYPH * max(len(row.name) for row in rows) + 10
    span = width - left - EDGE - 12 * GLYPH * 6
    drawing = Drawing(width, 0.0, left, span, start, end, time, unit)
    drawing.still.append(Text(EDGE, EDGE + 14, "Makespan when costs vary", "ink", 13, bold=True))
    drawing.still.append(Text(width - EDGE, EDGE + 14, "p95", "faint", 11, "end"))
    top, each = EDGE + 26, 26.0
    bottom = top + each * len(rows)

    def across(seconds: float) -> float:
        return left + (seconds - start) / (end - start) * span

    marks = ticks(start * time.per_second, end * time.per_second, int(span // 64))
    _upright(drawing, lambda mark: across(mark / time.per_second), marks, top, bottom)
    drawing.still.append(Text(width - EDGE, bottom + 14, time.unit or "seconds", "faint", 11, "end"))
    for at, row in enumerate(rows):
        y = top + each * (at + 0.5)
        low, first, third, high = (across(row.at(share)) for share in (LOWER, 0.25, 0.75, 1 - LOWER))
        title = (
            f"{row.name}: nominal {time.full(row.nominal)}, median {time.full(row.median)}, p95 {time.full(row.p95)}"
        )
        middle = across(row.median)
        drawing.still += [
            Text(EDGE, y + 4, row.name, "ink", 12),
            Line(((low, y), (high, y)), "arrow", 1.2),
            *(Line(((x, y - 5), (x, y + 5)), "arrow", 1.2) for x in (low, high)),
            Rect(first, y - 7, max(third - first, 1.0), 14, "held", title),
            Line(((middle, y - 7), (middle, y + 7)), "ink", 2.0),
            _diamond(across(row.nominal), y, 4.5, FILLS["R"], title),
            Text(width - EDGE, y + 4, f"{row.fragile:+.0%}", "ink", 11, "end"),
        ]
    signs = ((FILLS["R"], "nominal"), ("ink", "median"), ("held", "half of the draws"), ("arrow", "90 of 100 draws"))
    drawing.height = swatches(drawing, [([paint], words) for paint, words in signs], bottom + 24) + 4 + EDGE
    return drawing
