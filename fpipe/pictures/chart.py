"""Draw a chart of a plan: time against memory of many ways to run.

step | o
     |  1---+   o  o
     |      2----+  o  o
     +---------------- memory
"""

from __future__ import annotations

from itertools import pairwise

from fpipe.pictures.box_labels import draw_swatches
from fpipe.pictures.drawn_shapes import EDGE, PIXEL, Area, Drawing, Line, Text, clock, draw_dot, ticks
from fpipe.pictures.style import FILLS, Style
from fpipe.planning.run_plan import PlanRow, RunPlan
from fpipe.timing.amounts import byte_unit, format_amount

COLOUR_BY_POLICY = {"never": FILLS["F"], "except_last": FILLS["I"], "always": FILLS["R"], "auto": FILLS["W"]}
CAPTION_BY_POLICY = {
    "never": "recompute nothing",
    "except_last": "recompute all but the last microbatch",
    "always": "recompute all",
    "auto": "recompute what a search chose",
}


def draw_chart(plan: RunPlan, width_px: float | None, style: Style) -> Drawing:
    """Draw every way to run as a point, with memory to the right and time upwards.

    The Pareto front is numbered, joined by a line and named below.
    """
    style.refuse_others("a chart", "width_mm", "font_pt")
    unit = style.unit
    width = (width_px or 720.0) * PIXEL / unit if style.width_mm is None else style.width_mm / 25.4 / unit
    # 1. What is compared: seconds of a step, or of a row if batches differ in size.
    rows = plan.rows
    is_per_step = len({round(row.rows * row.microbatches, 6) for row in rows}) == 1

    def seconds_of(row: PlanRow) -> float:
        return row.makespan if is_per_step else row.seconds_per_row

    time = clock(max(map(seconds_of, rows)))
    # 2. The scales: the range of values, and 5 to 8 % around it. A range of no width gets some.
    in_bytes = plan.unit == "bytes"
    memory_unit, scale = byte_unit(max(row.peak_memory for row in rows)) if in_bytes else ("", 1.0)
    left, top, height = EDGE + 52, EDGE + 34, 300.0
    span, bottom = width - left - EDGE - 12, top + height
    low_memory, high_memory = min(row.peak_memory for row in rows) / scale, max(row.peak_memory for row in rows) / scale
    high_memory += (high_memory - low_memory or high_memory or 1.0) * 0.05
    low_memory = max(0.0, low_memory - (high_memory - low_memory) * 0.08)
    drawing = Drawing(width, 0.0, left, span, low_memory, high_memory, clock(0), unit)
    times = [seconds * time.per_second for seconds in map(seconds_of, rows)]
    low_time, high_time = min(times), max(times)
    low_margin, high_margin = ((high_time - low_time or limit) * 0.08 for limit in (low_time, high_time))
    low_time, high_time = low_time - low_margin, high_time + high_margin

    def x_of(amount: float) -> float:
        return left + (amount - low_memory) / (high_memory - low_memory) * span

    def y_of(seconds: float) -> float:
        return top + (high_time - seconds * time.per_second) / (high_time - low_time) * height

    y_title = f"{time.unit or 'seconds'} of a {'step' if is_per_step else 'row'}"
    x_title = f"{memory_unit} that the fullest rank holds" if in_bytes else "rows held by the fullest rank"
    # 3. Titles, rules with their numbers, and the limit of memory.
    drawing.fixed.append(Text(EDGE, EDGE + 14, "Time against memory", "ink", 13, bold=True))
    drawing.fixed.append(Text(EDGE, EDGE + 28, y_title, "faint", 11))
    for tick in ticks(low_time, high_time, 7):
        y = y_of(tick / time.per_second)
        drawing.fixed.append(Line(((left, y), (left + span, y)), "rule"))
        drawing.fixed.append(Text(left - 6, y + 4, f"{tick:g}", "faint", 11, "end"))
    for mark in ticks(low_memory, high_memory, int(span // 64)):
        x = x_of(mark)
        drawing.fixed.append(Line(((x, top), (x, bottom)), "rule"))
        drawing.fixed.append(Text(x, bottom + 14, f"{mark:g}", "faint", 11, "middle"))
    drawing.fixed.append(Text(left + span, bottom + 30, x_title, "faint", 11, "end"))
    limit = min(plan.cap) / scale
    if low_memory < limit < high_memory:
        x = x_of(limit)
        drawing.fixed += [Line(((x, top), (x, bottom)), "ink", 1.2), Text(x - 4, top + 11, "memory", "ink", 11, "end")]
    # 4. Points; over them the front, as stairs: between two of its ways, the one to the left is the best that fits.
    points = [(row, x_of(row.peak_memory / scale), y_of(seconds_of(row))) for row in rows]
    drawing.fixed += [_draw_point(x, y, 3.0, row, plan) for row, x, y in points if row not in plan.front]
    front_points = sorted((point for point in points if point[0] in plan.front), key=lambda point: point[1])
    front_line = [corner for (_, x, y), (_, next_x, _) in pairwise(front_points) for corner in ((x, y), (next_x, y))]
    drawing.fixed.append(Line((*front_line, *(point[1:] for point in front_points[-1:])), "curve", 1.5))
    number_by_row = {id(row): number for number, row in enumerate(plan.front, 1)}
    for row, x, y in front_points:
        drawing.fixed.append(_draw_point(x, y, 5.5, row, plan))
        drawing.fixed.append(Text(x - 7, y + 13, str(number_by_row[id(row)]), "ink", 11, "end", bold=True))
    # 5. The legend, and the names of the front.
    policies = [policy for policy in COLOUR_BY_POLICY if any(row.checkpoint == policy for row in rows)]
    swatch_rows = [([COLOUR_BY_POLICY[policy]], CAPTION_BY_POLICY[policy]) for policy in policies]
    swatch_rows += [] if all(row.fits for row in rows) else [(["hatch"], "does not fit")]
    y = draw_swatches(drawing, swatch_rows, bottom + 46) + 4
    for front_number, row in enumerate(plan.front, 1):
        memory_text = format_amount(row.peak_memory, in_bytes, 4) + ("" if in_bytes else " rows")
        seconds = f"{time.full(row.makespan)}{'' if time.unit else ' s'}"
        drawing.fixed.append(Text(left - 6, y + 12, str(front_number), "ink", 11, "end", bold=True))
        drawing.fixed.append(Text(left, y + 12, f"{row.name}: {seconds}, {memory_text}{_misfit_note(row)}", "ink", 11))
        y += 16
    drawing.height = y + EDGE
    return drawing


def _misfit_note(row: PlanRow) -> str:
    return "" if row.fits else ", too much"


def _draw_point(x: float, y: float, size: float, row: PlanRow, plan: RunPlan) -> Area:
    """Draw a dot, or a diamond for a schedule that a search found; hovering names it."""
    paint = COLOUR_BY_POLICY[row.checkpoint] if row.fits else "hatch"
    memory_text = format_amount(row.peak_memory, plan.unit == "bytes")
    title = f"{row.name}: {row.makespan:.4g} s, holds {memory_text}{_misfit_note(row)}"
    if row.schedule == "found":
        size *= 1.3
        return Area(((x, y + size), (x + size, y), (x, y - size), (x - size, y)), paint, title)
    return draw_dot(x, y, size, paint, title)
