"""Where everything goes in a picture: panels below each other on one time axis, in units of a pixel.

    title        makespan, span, bubble, peak
    rank 0      |####|####|....|########|           ops to scale, waits hatched with the op that is waited for
       copy     |  ######                           the copy lane, where something in it takes time
    rank 1      |....|####                          thin lines between ranks: transfers, from end to arrival
    rank 0      |__/--\\____                         what each rank holds, all on one scale, its peak at the right
                0        5        10

The result is a list of shapes, which SVG, PNG and HTML write down each in their way. Shapes that stand for a time are
apart from the rest, so that a page can stretch them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fpipe.pictures.box_labels import GLYPH, SIZES, Labels, first_that_fits, legend, names_of, needs, outline, size_in
from fpipe.pictures.drawn_shapes import EDGE, PIXEL, Area, Drawing, Line, Rect, Shape, Text, clock, ticks
from fpipe.pictures.panel import Bar, Panel, awaited
from fpipe.pictures.style import PLAIN, Style, ink_on
from fpipe.program import LANES, Op, kind_of, lane_of
from fpipe.timing.lanes import Transfer
from fpipe.timing.waiting import Wait

ARROW_ROOM = 10.0
"""Width of an op that has an arrow at each end."""


def lay_out(panels: Sequence[Panel], width: float | None = None, style: Style = PLAIN, every: bool = False) -> Drawing:
    """Lay out the shapes of some panels.

    Args:
        panels: what to draw, from above.
        width: of the picture, in pixels; by default enough for the names of half the ops, from 720 to 2000.
        style: what is drawn, and how.
        every: keep names and arrows for which there is no room, for a page that shows them when there is.
    """
    start, end = (max((getattr(panel, word) for panel in panels), default=0.0) for word in ("start", "end"))
    time, unit = clock(end), style.unit
    left, right = _margins(panels, style, time.unit or "time")
    if style.width_mm is not None:
        width = style.width_mm / 25.4 / unit
    elif width is None:
        width = min(2000.0, max(720.0, left + right + (end - start) * pixels_a_second(panels, style)))
    else:
        width = width * PIXEL / unit
    if width - left - right < LEAST:
        raise ValueError(
            f"the picture is too narrow: beside the names of ranks {max(0.0, width - left - right):.0f} of at least "
            f"{LEAST:.0f} pixels are left for the ops. Give it more width, or a smaller font."
        )
    span = width - left - right
    drawing = Drawing(width, 0.0, left, span, start, end, time, unit)
    fit = every or typical_length(panels) * span >= ARROW_ROOM * (end - start)  # a picture has all arrows or none
    arrows = fit if style.arrows is None else style.arrows
    y = EDGE
    for panel in panels:
        timelines = [other.timeline for other in panels if other.timeline.in_bytes is panel.timeline.in_bytes]
        alike = [peak for timeline in timelines for peak in timeline.peak]
        y = _Painter(drawing, panel, style, arrows, every).paint(y, max(alike, default=0.0) if style.memory else 0.0)
    y = _axis(drawing, y)
    drawing.height = (legend(drawing, panels, style, arrows, y) if style.legend else y) + EDGE
    drawing.timed.sort(key=_layer)  # those that look alike in a row, to be written or drawn at once
    return drawing


THIN = 0.25
"""Width of the paper between narrow ops, and between those that share a label."""
SEAM = 0.3
"""Pixels by which boxes without a line between them lie one over the other."""
LEAST = 80.0
"""Pixels that the ops of a picture have at least."""

_LAYERS = (Rect, Area, Line, Text)


def _layer(shape: Shape) -> tuple[bool, int, str, float]:
    layer = -1 if isinstance(shape, Line) and shape.behind else _LAYERS.index(type(shape))
    return not shape.grid, layer, shape.paint, shape.size if isinstance(shape, Text) else 0.0


def _margins(panels: Sequence[Panel], style: Style, unit: str) -> tuple[float, float]:
    """Room for the names of ranks, and for peaks and the unit of time."""
    heads = [panel.rank_name(rank) for panel in panels for rank in range(panel.ranks)]
    peaks = [panel.amount(peak) for panel in panels for peak in panel.timeline.peak] if style.memory else []
    right = max(14 + 11 * GLYPH * len(unit), *(8 + 11 * GLYPH * len(peak) for peak in peaks), 0)
    return EDGE + 12 * GLYPH * max(map(len, heads), default=0) + 10, right + 6


def typical_length(panels: Sequence[Panel]) -> float:
    """The seconds that three quarters of the ops that a schedule names take at least."""
    events = (event for panel in panels for events in panel.lanes.values() for event in events)
    lengths = sorted(event.end - event.start for event in events if kind_of(event.op.kind).time)
    return lengths[len(lengths) // 4] if lengths else 0.0


def pixels_a_second(panels: Sequence[Panel], style: Style = PLAIN) -> float:
    """A scale that gives half of all ops room for their whole names, and half of each kind for the short ones."""
    bars = [bar for panel in panels for bars in panel.bars.values() for bar in bars if bar.op.kind in "FBIW"]
    groups = [(bars, 0)] + [([bar for bar in bars if bar.op.kind == kind], -1) for kind in "FBIW"]
    scales = [0.0]
    for group, which in groups:
        lengths = sorted(bar.end - bar.start for bar in group if bar.end > bar.start)
        if lengths:
            letters = max(len([*names_of(bar.op, "main", style), ""][:2][which]) for bar in group)
            scales.append((8.5 + GLYPH * 11 * letters) / lengths[len(lengths) // 2])
    return max(scales)


def _bold(name: str) -> float:
    """About how far a name goes in bold letters of 13 pixels, and a gap after it."""
    return sum(10.0 if letter.isupper() or letter.isdigit() else 9.0 for letter in name) + 10 if name else 0.0


def _axis(drawing: Drawing, y: float) -> float:
    time, scale = drawing.clock, drawing.span / (drawing.end - drawing.start or 1.0)
    drawing.bottom = y
    start, end = (at * time.per_second for at in (drawing.start, drawing.end))
    for tick in ticks(start, end, int(drawing.span // 64)):
        x = drawing.left + (tick / time.per_second - drawing.start) * scale
        drawing.timed += [Line(((x, above), (x, below)), "rule", grid=True) for above, below in drawing.bands]
        drawing.timed.append(Text(x, y + 14, f"{tick:g}", "faint", 11, "middle", grid=True))
    drawing.still.append(Text(drawing.left + drawing.span + 14, y + 14, time.unit or "time", "faint", 11))
    return y + 22


class _Painter:
    def __init__(self, drawing: Drawing, panel: Panel, style: Style, arrows: bool, every: bool) -> None:
        self.drawing, self.panel, self.style, self.arrows, self.every = drawing, panel, style, arrows, every
        self.time, self.scale = drawing.clock, drawing.span / (drawing.end - drawing.start or 1.0)
        self.height = 26.0 if panel.ranks <= 8 else 20.0 if panel.ranks <= 16 else 14.0
        narrow = typical_length([panel]) * self.scale
        self.edge = 1.0 if narrow > 7 else THIN if narrow > 2 else 0.0  # of the narrowest, paper would be a third
        self.gap = 9.0 if panel.ranks <= 8 else 5.0
        self.low = style.width_mm is not None  # on paper rows are as low as their text allows
        if self.low:
            shared = any(bar.depth < 1 for (_, lane), bars in panel.bars.items() if lane == "main" for bar in bars)
            self.height, self.gap = min(self.height, 22.5 if shared else 16.0), min(self.gap, 7.0)
        self.y: dict[tuple[int, str], tuple[float, float]] = {}
        self.labels = Labels(panel, style, self.scale, self.height)

    def x(self, seconds: float) -> float:
        """Where a time is; what is outside of the window is at its edge."""
        drawing = self.drawing
        return drawing.left + (min(max(seconds, drawing.start), drawing.end) - drawing.start) * self.scale

    def stretch(self, start: float, end: float) -> tuple[float, float]:
        """Left edge and width of what goes from start to end."""
        return self.x(start), self.x(end) - self.x(start)

    def paint(self, y: float, top: float) -> float:
        """Draw below y; `top` is the most that any rank of such a panel holds. Returns where the panel ends."""
        still, panel = self.drawing.still, self.panel
        y = above = self.heading(y)
        for rank in range(panel.ranks):
            self.y[rank, "main"] = y, self.height
            still.append(Text(EDGE, y + self.height / 2 + 4, panel.rank_name(rank), size=min(12, self.height - 2)))
            y += self.height
            for lane in (lane for lane in LANES[1:] if (rank, lane) in panel.lanes):
                depth = self.height * 0.5
                self.y[rank, lane] = y + 2, depth
                still.append(Text(self.drawing.left - 8, y + 2 + depth / 2 + 3, lane, "faint", 9, "end"))
                y += depth + 2
            y += self.gap
        for wait in panel.waits if self.style.waits else ():
            self.wait(wait)
        for lane, bars in panel.bars.items():
            labels = {} if self.every else {bar: self.label(lane, bar) for bar in bars}
            merged = self.runs(lane, [bar for bar, label in labels.items() if not label])
            for bar in bars:
                self.bar(lane, bar, merged.get(bar, self.edge), labels.get(bar))
        for transfer in panel.sending:
            self.sending(transfer)
        for transfer in panel.transfers if self.arrows else ():
            self.transfer(transfer)
        self.critical_path()
        below = self.held(y, top) if top else y
        self.drawing.bands += [(above, y), (y + 12, below)] if top else [(above, below)]  # no rule through words
        for end in panel.timeline.iterations[:-1]:
            if self.drawing.start < end < self.drawing.end:
                x = self.x(end)
                title = f"an iteration ends at {self.time.full(end)}"
                self.drawing.timed.append(Line(((x, above - 4), (x, below)), "faint", 1.5, title=title))
        return below + 10

    def heading(self, y: float) -> float:
        """The name and the figures, in as many lines as their words need."""
        room = self.drawing.width - 2 * EDGE
        names = textwrap.wrap(self.panel.name, max(1, int((room - 10) / 10)))
        facts = textwrap.wrap(self.panel.facts, max(1, int(room / (12 * GLYPH)))) if self.style.figures else []
        for name in names:
            self.drawing.still.append(Text(EDGE, y + 13, name, size=13, bold=True))
            y += 18
        if names and facts and _bold(names[-1]) + 12 * GLYPH * len(self.panel.facts) <= room:
            self.drawing.still.append(Text(EDGE + _bold(names[-1]), y - 5, self.panel.facts, "faint", 12))
            facts = []
        for line in facts:
            self.drawing.still.append(Text(EDGE, y + 13, line, "faint", 12))
            y += 18
        return y + 6 if names or self.style.figures else y

    def label(self, lane: tuple[int, str], bar: Bar) -> tuple[str, float] | None:
        return self.labels.label(bar, lane[1], self.stretch(bar.start, bar.end)[1], bar.depth * self.y[lane][1])

    def bar(self, lane: tuple[int, str], bar: Bar, edge: float, label: tuple[str, float] | None) -> None:
        y, height = self.y[lane]
        x, width = self.stretch(bar.start, bar.end)
        paint = self.style.fill(bar.op, bar.shade)
        words = f"{bar.op.cell}, rank {lane[0]}: {self.time(bar.start)} to {self.time.full(bar.end)}"
        reads, writes = (" ".join(map(str, values)) for values in (bar.op.reads, bar.op.writes))
        top, depth = y + bar.top * height, bar.depth * height
        title = f"{words}\nreads {reads}\nwrites {writes}"
        over = 0.0 if edge else SEAM
        self.drawing.timed.append(Rect(x, top, width + over, depth, paint, title, edge))
        if self.every:
            self.page_label(x, width, top, depth, names_of(bar.op, lane[1], self.style), ink_on(paint))
        elif label:
            self.word(x, width, top, depth, *label, ink_on(paint))

    def runs(self, lane: tuple[int, str], bars: Sequence[Bar]) -> dict[Bar, float]:
        """Write one label for a run of microbatches none of which has room for a label; return the edges of their bars:
        none where the label is."""
        y, height = self.y[lane]
        edges: dict[Bar, float] = {}
        for run, names in self.labels.runs(bars):
            x, width = self.stretch(run[0].start, run[-1].end)
            top, depth = y + run[0].top * height, run[0].depth * height
            if label := first_that_fits(names, size_in(depth), width):
                name, size = label
                self.word(x, width, top, depth, name, size, ink_on(self.style.fill(run[0].op, run[0].shade)))
                middle, half = x + width / 2, needs(name, size) / 2
                for bar in run:
                    left, wide = self.stretch(bar.start, bar.end)
                    edges[bar] = 0.0 if left < middle + half and left + wide > middle - half else min(THIN, self.edge)
        return edges

    def word(
        self, x: float, width: float, y: float, height: float, name: str, size: float, paint: str, **more: Any
    ) -> None:
        place = x + width / 2, y + height / 2 + size * 0.36
        self.drawing.timed.append(Text(*place, name, paint, size, "middle", **more))

    def page_label(self, x: float, width: float, y: float, height: float, names: Sequence[str], paint: str) -> None:
        if names:
            self.word(x, width, y, height, names[0], size_in(height), paint, room=width, short=names[-1])

    def wait(self, wait: Wait) -> None:
        y, height = self.y[wait.rank, "main"]
        x, width = self.stretch(wait.start, wait.end)
        title = f"rank {wait.rank} waits from {self.time(wait.start)} to {self.time.full(wait.end)}"
        whom = awaited(wait)
        self.drawing.timed.append(Rect(x, y + 2, width, height - 4, "hatched", f"{title}\n{whom}".rstrip(), self.edge))
        if not whom or wait.on is None or self.style.labels != "all":
            return
        names = (f"waits for {wait.on.cell}", wait.on.cell)
        if self.every:
            self.page_label(x, width, y, height, names, "faint")
        elif label := first_that_fits(names, size_in(height), width, SIZES[:1]):
            half = needs(*label) / 2  # no hatching through words
            self.drawing.timed.append(Rect(x + width / 2 - half, y + 2, 2 * half, height - 4, "wait", title))
            self.word(x, width, y, height, *label, "faint")

    def critical_path(self) -> None:
        """Frames around ops, thick arrows for transfers. A SEND that the program has not is in its rank's main lane."""
        for step in self.panel.path if self.style.critical_path else ():
            if isinstance(step.what, Op):
                rank, lane = step.what.rank, lane_of(step.what)
                y, height = self.y[rank, lane if (rank, lane) in self.y else "main"]
                x, width = self.stretch(step.start, step.end)
                self.drawing.timed.append(outline(x, y, width, height, f"{step.what.cell} is on the critical path"))
            else:
                self.transfer(step.what, "ink", 2.0)

    def transfer(self, transfer: Transfer, paint: str = "", thick: float = 0.0) -> None:
        """From lane to lane; at the edge of the window it is cut."""
        (y0, height0), (y1, height1) = (self.y[rank, "main"] for rank in (transfer.source, transfer.target))
        y0, y1 = (y0 + height0, y1) if y1 > y0 else (y0, y1 + height1)
        seconds = transfer.end - transfer.start or 1.0
        start, end = max(transfer.start, self.drawing.start), min(transfer.end, self.drawing.end)
        points = tuple((self.x(at), y0 + (y1 - y0) * (at - transfer.start) / seconds) for at in (start, end))
        if transfer.start == transfer.end:
            points = (points[0], (points[1][0], y1))
        near = abs(transfer.source - transfer.target) == 1  # others pass behind the lanes between
        usual, width = ("arrow", 1.0) if near else ("faint", 0.5)
        whole, title = end == transfer.end, self.said_of(transfer)
        self.drawing.timed.append(Line(points, paint or usual, thick or width, whole, title, behind=not near))

    def sending(self, transfer: Transfer) -> None:
        """A sender that does nothing else."""
        y, height = self.y[transfer.source, "main"]
        x, width = self.stretch(transfer.start, transfer.end)
        paint, title = self.style.of_kind("SEND"), self.said_of(transfer)
        self.drawing.timed.append(Rect(x, y, width, height, paint, title, self.edge))

    def said_of(self, transfer: Transfer) -> str:
        times = f"{self.time(transfer.start)} to {self.time.full(transfer.end)}"
        return f"{transfer.value}, rank {transfer.source} to {transfer.target}: {times}"

    def held(self, y: float, top: float) -> float:
        panel, drawing = self.panel, self.drawing
        height, gap = (12.0, 3.0) if self.low else (22.0 if panel.ranks <= 8 else 13.0, 4.0)
        what = "bytes held" if panel.timeline.in_bytes else "microbatches held"
        drawing.still.append(Text(drawing.left + 3, y + 10, what, "faint", 10))
        y += 12
        for rank in range(panel.ranks):
            base = y + height
            changes = [(panel.start, 0.0), *panel.held(rank), (panel.end, 0.0)]
            points = [(self.x(panel.start), base)]
            for (_, before), (time, now) in pairwise(changes):
                points += [(self.x(time), base - held / top * height) for held in (before, now)]
            peak = panel.amount(panel.timeline.peak[rank])
            right, size = drawing.left + drawing.span, min(11.0, height)
            drawing.timed += [
                Area(tuple(points), "held", f"rank {rank} holds at most {peak}"),
                Line(tuple(points[1:-1]), "curve"),
                Line(((drawing.left, base), (right, base)), "rule"),
            ]
            drawing.still.append(Text(EDGE, base - 3, panel.rank_name(rank), "faint", size))
            drawing.still.append(Text(right + 8, base - 3, peak, "faint", size))
            y += height + gap
        return y
