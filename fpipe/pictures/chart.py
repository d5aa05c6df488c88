"""Charts of plans: time against memory of many ways to run, and how far makespans stray.

step | o                          |----[  | ]------<>   one_f_one_b
     |  1---+   o  o                |--[ |]--<>        zb_h1
     |      2----+  o  o
     +---------------- memory     +------------------- time
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from fpipe.pictures.axis import amount, clock, ticks
from fpipe.pictures.colours import FILLS
from fpipe.pictures.labels import GLYPH
from fpipe.pictures.layout import PIXEL
from fpipe.pictures.png import rastered
from fpipe.pictures.shapes import EDGE, Area, Drawing, Line, Rect, Shape, Text
from fpipe.pictures.style import Style
from fpipe.pictures.svg import drawn
from fpipe.planning.run_plan import PlanRow, RunPlan
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


def chart(what: RunPlan | Robustness, file: Path, width: float | None, style: Style) -> None:
    """Write the picture of a plan or of spreads, as its ending says."""
    endings = (".svg", ".png", ".pdf")
    if file.suffix not in endings:
        raise ValueError(f"a chart's file ends in {', '.join(endings)}; found {file.name!r}.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{str(file.parent)!r} is not a folder: make it before a picture is written there.")
    style.only("a chart", "width_mm", "font_pt")
    unit = PIXEL if style.font_pt is None else style.font_pt / 12 / 72
    wide = (width or 720.0) * PIXEL / unit if style.width_mm is None else style.width_mm / 25.4 / unit
    drawing = front(what, wide, unit) if isinstance(what, RunPlan) else spreads(what, wide, unit)
    if file.suffix == ".svg":
        file.write_text(drawn(drawing, str(what), style), encoding="utf-8")
    else:
        file.write_bytes(rastered(drawing, style, file.suffix[1:]))


def front(plan: RunPlan, width: float, unit: float) -> Drawing:
    """Every way as a point, memory to the right and time upwards; those than which none is both shorter and smaller
    are numbered, joined by a line and named below."""
    rows = [row for row in plan.rows if row.seconds(plan.at) is not None]
    steps = len({round(row.rows * row.microbatches, 6) for row in rows}) == 1
    times = [(row.seconds(plan.at) or 0.0) / (1 if steps else row.rows * row.microbatches) for row in rows]
    time = clock(max(times))
    in_bytes = plan.unit == "bytes"
    scale = _power(max(row.most for row in rows)) if in_bytes else 1.0
    of = {"said": "", "median": ", median", "p95": ", 95th percentile"}[plan.at]
    left, top, height = EDGE + 52, EDGE + 34, 300.0
    span = width - left - EDGE - 12
    least, most = min(row.most for row in rows) / scale, max(row.most for row in rows) / scale
    most += (most - least or most or 1.0) * 0.05
    least = max(0.0, least - (most - least) * 0.08)
    drawing = Drawing(width, 0.0, left, span, least, most, clock(0), unit)
    shares = [(row, (row.seconds(plan.at) or 1.0) / seconds) for row, seconds in zip(rows, times, strict=True)]
    ends = [row.spread.at(end) / share for row, share in shares if row.spread for end in (LOWER, 1 - LOWER)]
    low, high = (pick([*times, *ends]) * time.per_second for pick in (min, max))
    low, high = low - (high - low or low) * 0.08, high + (high - low or high) * 0.08

    def across(row: PlanRow) -> float:
        return left + (row.most / scale - least) / (most - least) * span

    def upward(seconds: float) -> float:
        return top + (high - seconds * time.per_second) / (high - low) * height

    above = f"seconds of a {'step' if steps else 'row'}{of}".replace("seconds", time.unit or "seconds")
    name = (
        f"{amount(scale, True).split()[1]} that the fullest rank holds" if in_bytes else "rows held by the fullest rank"
    )
    drawing.still.append(Text(EDGE, EDGE + 14, "Time against memory", "ink", 13, bold=True))
    drawing.still.append(Text(EDGE, EDGE + 28, above, "faint", 11))
    for tick in ticks(low, high, 7):
        y = upward(tick / time.per_second)
        drawing.still += [
            Line(((left, y), (left + span, y)), "rule"),
            Text(left - 6, y + 4, f"{tick:g}", "faint", 11, "end"),
        ]
    bottom = top + height
    for tick in ticks(least, most, int(span // 64)):
        x = left + (tick - least) / (most - least) * span
        drawing.still += [
            Line(((x, top), (x, bottom)), "rule"),
            Text(x, bottom + 14, f"{tick:g}", "faint", 11, "middle"),
        ]
    drawing.still.append(Text(left + span, bottom + 30, name, "faint", 11, "end"))
    limit = min(plan.cap) / scale
    if least < limit < most:
        x = left + (limit - least) / (most - least) * span
        drawing.still += [Line(((x, top), (x, bottom)), "ink", 1.2), Text(x - 4, top + 11, "memory", "ink", 11, "end")]
    known = dict(zip(map(id, rows), times, strict=True))
    points = [(row, across(row), upward(known[id(row)])) for row in rows]
    for row, x, y in points:
        if row not in plan.front:
            drawing.still.append(_point(x, y, 3.0, POLICY[row.checkpoint] if row.fits else "hatch", row, plan))
    chosen = [point for point in points if point[0] in plan.front]
    chosen.sort(key=lambda point: point[1])
    stairs = [corner for one, other in pairwise(chosen) for corner in (one[1:], (other[1], one[2]))]
    drawing.still.append(Line((*stairs, *(point[1:] for point in chosen[-1:])), "curve", 1.5))
    for row, x, _ in chosen:
        if row.spread is not None:
            share = (row.seconds(plan.at) or 1.0) / known[id(row)]
            ends = min(row.seconds(plan.at) or 0.0, row.spread.at(LOWER)), row.spread.at(1 - LOWER)
            points_of = tuple((x, max(top, min(bottom, upward(end / share)))) for end in ends)
            drawing.still.append(Line(points_of, "arrow", 1.2))
    numbers = {id(row): at for at, row in enumerate(plan.front, 1)}
    for row, x, y in chosen:
        drawing.still.append(_point(x, y, 5.5, POLICY[row.checkpoint] if row.fits else "hatch", row, plan))
        drawing.still.append(Text(x - 7, y + 13, str(numbers[id(row)]), "ink", 11, "end", bold=True))
    y = _legend(drawing, rows, plan, bottom + 46)
    for at, row in enumerate(plan.front, 1):
        seconds = row.seconds(plan.at) or 0.0
        held = amount(row.most, in_bytes) + ("" if in_bytes else " rows")
        said = f"{row.name}: {time.full(seconds)}{'' if time.unit else ' s'}, {held}{'' if row.fits else ', too much'}"
        drawing.still += [
            Text(left - 6, y + 12, str(at), "ink", 11, "end", bold=True),
            Text(left, y + 12, said, "ink", 11),
        ]
        y += 16
    drawing.height = y + EDGE
    return drawing


def _power(held: float) -> float:
    """The binary unit that suits some bytes."""
    unit = 1.0
    while held / unit >= 1024 and unit < 2.0**40:
        unit *= 1024
    return unit


def _point(x: float, y: float, size: float, paint: str, row: PlanRow, plan: RunPlan) -> Shape:
    """A dot, a diamond for what a search found; hovering says what it is."""
    half = size * 0.41
    octagon = ((half, size), (size, half), (size, -half), (half, -size))
    corners = octagon + tuple((-across, -down) for across, down in octagon)
    if row.schedule == "found":
        size *= 1.3
        corners = ((0.0, size), (size, 0.0), (0.0, -size), (-size, 0.0))
    held = amount(row.most, plan.unit == "bytes")
    title = f"{row.name}: {row.makespan:.4g} s, holds {held}{'' if row.fits else ', too much'}"
    return Area(tuple((x + across, y + down) for across, down in corners), paint, title)


def _legend(drawing: Drawing, rows: Sequence[PlanRow], plan: RunPlan, y: float) -> float:
    entries = [(POLICY[policy], WORDS[policy]) for policy in POLICY if any(row.checkpoint == policy for row in rows)]
    if not all(row.fits for row in rows):
        entries.append(("hatch", "does not fit"))
    if any(row.spread for row in plan.front):
        entries.append(("arrow", "90 of 100 draws"))
    return _swatches(drawing, entries, y)


def _swatches(drawing: Drawing, entries: Sequence[tuple[str, str]], y: float) -> float:
    x = drawing.left
    for paint, words in entries:
        room = 18 + GLYPH * 11 * len(words) + 14
        if x > drawing.left and x + room > drawing.width - EDGE:
            x, y = drawing.left, y + 18
        drawing.still += [Rect(x, y + 2, 12, 10, paint), Text(x + 18, y + 11, words, "faint", 11)]
        x += room
    return y + 20


def spreads(found: Robustness, width: float, unit: float) -> Drawing:
    """A line for each program: from the 5th to the 95th percentile of its makespans, a box around the middle half, a
    bar at the median, and a dot where it was said to be."""
    rows = found.rows
    ends = [row.at(1 - LOWER) for row in rows] + [row.said for row in rows]
    starts = [row.at(LOWER) for row in rows] + [row.said for row in rows]
    time = clock(max(ends))
    margin = (max(ends) - min(starts) or max(ends) or 1.0) * 0.05
    start, end = max(0.0, min(starts) - margin), max(ends) + margin
    left = EDGE + 12 * GLYPH * max(len(row.name) for row in rows) + 10
    span = width - left - EDGE - 12 * GLYPH * 6
    drawing = Drawing(width, 0.0, left, span, start, end, time, unit)
    drawing.still.append(Text(EDGE, EDGE + 14, "Makespan when costs stray", "ink", 13, bold=True))
    drawing.still.append(Text(width - EDGE, EDGE + 14, "p95", "faint", 11, "end"))
    top, each = EDGE + 26, 26.0
    bottom = top + each * len(rows)

    def across(seconds: float) -> float:
        return left + (seconds - start) / (end - start) * span

    for tick in ticks(start * time.per_second, end * time.per_second, int(span // 64)):
        x = across(tick / time.per_second)
        drawing.still += [
            Line(((x, top), (x, bottom)), "rule"),
            Text(x, bottom + 14, f"{tick:g}", "faint", 11, "middle"),
        ]
    drawing.still.append(Text(width - EDGE, bottom + 14, time.unit or "seconds", "faint", 11, "end"))
    for at, row in enumerate(rows):
        y = top + each * (at + 0.5)
        low, first, third, high = (across(row.at(share)) for share in (LOWER, 0.25, 0.75, 1 - LOWER))
        title = f"{row.name}: said {time.full(row.said)}, median {time.full(row.median)}, p95 {time.full(row.p95)}"
        middle = across(row.median)
        drawing.still += [
            Text(EDGE, y + 4, row.name, "ink", 12),
            Line(((low, y), (high, y)), "arrow", 1.2),
            *(Line(((x, y - 5), (x, y + 5)), "arrow", 1.2) for x in (low, high)),
            Rect(first, y - 7, max(third - first, 1.0), 14, "held", title),
            Line(((middle, y - 7), (middle, y + 7)), "ink", 2.0),
            Area(_diamond(across(row.said), y, 4.5), FILLS["R"], title),
            Text(width - EDGE, y + 4, f"{row.fragile:+.0%}", "ink", 11, "end"),
        ]
    entries = [(FILLS["R"], "as said"), ("ink", "median"), ("held", "half of the draws"), ("arrow", "90 of 100 draws")]
    drawing.height = _swatches(drawing, entries, bottom + 24) + EDGE
    return drawing


def _diamond(x: float, y: float, size: float) -> tuple[tuple[float, float], ...]:
    return (x, y + size), (x + size, y), (x, y - size), (x - size, y)
