"""Chart of a plan: time against memory of many ways to run.

step | o
     |  1---+   o  o
     |      2----+  o  o
     +---------------- memory
"""

from __future__ import annotations

from itertools import pairwise

from fpipe.pictures.box_labels import swatches
from fpipe.pictures.drawn_shapes import EDGE, PIXEL, Area, Drawing, Line, Text, clock, ticks
from fpipe.pictures.style import FILLS, Style
from fpipe.planning.run_plan import PlanRow, RunPlan
from fpipe.timing.amounts import amount, byte_unit

POLICY = {"never": FILLS["F"], "except_last": FILLS["I"], "always": FILLS["R"], "auto": FILLS["W"]}
WORDS = {
    "never": "recompute nothing",
    "except_last": "recompute all but the last microbatch",
    "always": "recompute all",
    "auto": "recompute what a search chose",
}


def chart(plan: RunPlan, wide: float | None, style: Style) -> Drawing:
    """Draw every way as a point, memory to the right and time upwards.

    Ways than which none is both shorter and smaller are numbered, joined by a line and named below.
    """
    style.only("a chart", "width_mm", "font_pt")
    unit = style.unit
    width = (wide or 720.0) * PIXEL / unit if style.width_mm is None else style.width_mm / 25.4 / unit
    rows = plan.rows
    steps = len({round(row.rows * row.microbatches, 6) for row in rows}) == 1

    def taken(row: PlanRow) -> float:
        return row.makespan if steps else row.seconds_per_row

    time = clock(max(map(taken, rows)))
    in_bytes = plan.unit == "bytes"
    memory, scale = byte_unit(max(row.most for row in rows)) if in_bytes else ("", 1.0)
    left, top, height = EDGE + 52, EDGE + 34, 300.0
    span, bottom = width - left - EDGE - 12, top + height
    least, most = min(row.most for row in rows) / scale, max(row.most for row in rows) / scale
    most += (most - least or most or 1.0) * 0.05
    least = max(0.0, least - (most - least) * 0.08)
    drawing = Drawing(width, 0.0, left, span, least, most, clock(0), unit)
    times = [seconds * time.per_second for seconds in map(taken, rows)]
    low, high = min(times), max(times)
    low, high = low - (high - low or low) * 0.08, high + (high - low or high) * 0.08

    def across(held: float) -> float:
        return left + (held - least) / (most - least) * span

    def upward(seconds: float) -> float:
        return top + (high - seconds * time.per_second) / (high - low) * height

    above = f"{time.unit or 'seconds'} of a {'step' if steps else 'row'}"
    below = f"{memory} that the fullest rank holds" if in_bytes else "rows held by the fullest rank"
    drawing.still.append(Text(EDGE, EDGE + 14, "Time against memory", "ink", 13, bold=True))
    drawing.still.append(Text(EDGE, EDGE + 28, above, "faint", 11))
    for tick in ticks(low, high, 7):
        y = upward(tick / time.per_second)
        drawing.still.append(Line(((left, y), (left + span, y)), "rule"))
        drawing.still.append(Text(left - 6, y + 4, f"{tick:g}", "faint", 11, "end"))
    for mark in ticks(least, most, int(span // 64)):
        x = across(mark)
        drawing.still.append(Line(((x, top), (x, bottom)), "rule"))
        drawing.still.append(Text(x, bottom + 14, f"{mark:g}", "faint", 11, "middle"))
    drawing.still.append(Text(left + span, bottom + 30, below, "faint", 11, "end"))
    limit = min(plan.cap) / scale
    if least < limit < most:
        x = across(limit)
        drawing.still += [Line(((x, top), (x, bottom)), "ink", 1.2), Text(x - 4, top + 11, "memory", "ink", 11, "end")]
    points = [(row, across(row.most / scale), upward(taken(row))) for row in rows]
    drawing.still += [_point(x, y, 3.0, row, plan) for row, x, y in points if row not in plan.front]
    chosen = sorted((point for point in points if point[0] in plan.front), key=lambda point: point[1])
    stairs = [corner for (_, x, y), (_, next_x, _) in pairwise(chosen) for corner in ((x, y), (next_x, y))]
    drawing.still.append(Line((*stairs, *(point[1:] for point in chosen[-1:])), "curve", 1.5))
    numbers = {id(row): number for number, row in enumerate(plan.front, 1)}
    for row, x, y in chosen:
        drawing.still.append(_point(x, y, 5.5, row, plan))
        drawing.still.append(Text(x - 7, y + 13, str(numbers[id(row)]), "ink", 11, "end", bold=True))
    entries = [([POLICY[policy]], WORDS[policy]) for policy in POLICY if any(row.checkpoint == policy for row in rows)]
    entries += [] if all(row.fits for row in rows) else [(["hatch"], "does not fit")]
    y = swatches(drawing, entries, bottom + 46) + 4
    for at, row in enumerate(plan.front, 1):
        held = amount(row.most, in_bytes, 4) + ("" if in_bytes else " rows")
        seconds = f"{time.full(row.makespan)}{'' if time.unit else ' s'}"
        drawing.still.append(Text(left - 6, y + 12, str(at), "ink", 11, "end", bold=True))
        drawing.still.append(Text(left, y + 12, f"{row.name}: {seconds}, {held}{_misfit(row)}", "ink", 11))
        y += 16
    drawing.height = y + EDGE
    return drawing


def _misfit(row: PlanRow) -> str:
    return "" if row.fits else ", too much"


def _point(x: float, y: float, size: float, row: PlanRow, plan: RunPlan) -> Area:
    """Draw a dot, or a diamond for what a search found; hovering says what it is."""
    paint = POLICY[row.checkpoint] if row.fits else "hatch"
    held = amount(row.most, plan.unit == "bytes")
    title = f"{row.name}: {row.makespan:.4g} s, holds {held}{_misfit(row)}"
    if row.schedule == "found":
        size *= 1.3
        return Area(((x, y + size), (x + size, y), (x, y - size), (x - size, y)), paint, title)
    half = size * 0.41
    octagon = ((half, size), (size, half), (size, -half), (half, -size))
    corners = octagon + tuple((-across, -down) for across, down in octagon)
    return Area(tuple((x + across, y + down) for across, down in corners), paint, title)
