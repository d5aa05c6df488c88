"""Lay out a picture: panels below each other on one time axis, in units of a pixel.

    title        makespan, span, bubble, peak
    rank 0      |####|####|....|########|           ops to scale, waits hatched with the op that is waited for
       copy     |  ######                           the copy lane, where something in it takes time
    rank 1      |....|####                          thin lines between ranks: transfers, from end to arrival
    rank 0      |__/--\\____                         what each rank holds, all on one scale, its peak at the right
                0        5        10

The result is a list of shapes, which SVG, PNG and HTML each write in their way. Shapes that stand for a time have a
list of their own, so that a page can stretch them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fpipe.pictures.box_labels import (
    GLYPH,
    SIZES,
    BoxLabels,
    draw_legend,
    fitting_label,
    label_candidates,
    path_frame,
    text_size,
    width_needed,
)
from fpipe.pictures.drawn_shapes import EDGE, PIXEL, Area, Drawing, Line, Rect, Shape, Text, clock, ticks
from fpipe.pictures.panel import Bar, Panel, awaited_op
from fpipe.pictures.style import HOLDER_ROLES, PLAIN, Style, ink_on
from fpipe.program import LANES, Op, kind_of, lane_of
from fpipe.timing.lanes import Transfer
from fpipe.timing.waiting import Wait

ARROW_ROOM = 10.0
"""Width of an op that has an arrow at each end."""


def lay_out(
    panels: Sequence[Panel], width: float | None = None, style: Style = PLAIN, keep_all: bool = False
) -> Drawing:
    """Lay out the shapes of some panels.

    Args:
        panels: what to draw, from top to bottom.
        width: of the picture, in pixels; by default enough for the names of half the ops, from 720 to 2000.
        style: what is drawn, and how.
        keep_all: keep names and arrows for which there is no room, for a page that shows them when there is.
    """
    # 1. Widths: the margins follow from words, the rest is for time.
    start, end = (max((getattr(panel, name) for panel in panels), default=0.0) for name in ("start", "end"))
    time, unit = clock(end), style.unit
    left, right = _side_margins(panels, style, time.unit or "time")
    if style.width_mm is not None:
        width = style.width_mm / 25.4 / unit
    elif width is None:
        width = min(2000.0, max(720.0, left + right + (end - start) * pixels_per_second(panels, style)))
    else:
        width = width * PIXEL / unit
    if width - left - right < MIN_SPAN:
        room = max(0.0, width - left - right)
        raise ValueError(
            f"the picture is too narrow: {room:.0f} of at least {MIN_SPAN:.0f} pixels are left for ops. Give it more "
            "width, or a smaller font."
        )
    span = width - left - right
    drawing = Drawing(width, 0.0, left, span, start, end, time, unit)
    # Whether there are arrows is decided once for the picture, so that it has all of them or none.
    has_room = keep_all or typical_length(panels) * span >= ARROW_ROOM * (end - start)
    arrows = has_room if style.arrows is None else style.arrows
    # 2. Panels from top to bottom. Memory curves in one unit share their scale, so that panels can be compared.
    y = EDGE
    for panel in panels:
        max_peak = _max_peak(panels, panel.timeline.in_bytes) if style.memory else 0.0
        y = _Painter(drawing, panel, style, arrows, keep_all).paint(y, max_peak)
    y = _draw_axis(drawing, y)
    drawing.height = (draw_legend(drawing, panels, style, arrows, y) if style.legend else y) + EDGE
    # 3. Shapes that look alike in a row, so that a format can write or draw them at once.
    drawing.timed.sort(key=_drawing_order)
    return drawing


THIN = 0.25
"""Width of the paper between narrow ops, and between those that share a label."""
SEAM = 0.3
"""Pixels by which boxes without a line between them lie one over the other."""
MIN_SPAN = 80.0
"""Pixels that the ops of a picture have at least."""

_LAYERS = (Rect, Area, Line, Text)


def _drawing_order(shape: Shape) -> tuple[bool, int, str, float]:
    layer = -1 if isinstance(shape, Line) and shape.is_behind else _LAYERS.index(type(shape))
    return not shape.grid, layer, shape.paint, shape.size if isinstance(shape, Text) else 0.0


def _max_peak(panels: Sequence[Panel], in_bytes: bool) -> float:
    peaks = [peak for panel in panels if panel.timeline.in_bytes is in_bytes for peak in panel.timeline.peak]
    return max(peaks, default=0.0)


def _side_margins(panels: Sequence[Panel], style: Style, unit: str) -> tuple[float, float]:
    """Return the room on the left for names of ranks, and on the right for peaks and the unit of time."""
    rank_names = [panel.rank_name(rank) for panel in panels for rank in range(panel.ranks)]
    peaks = [panel.format_amount(peak) for panel in panels for peak in panel.timeline.peak] if style.memory else []
    right = max(14 + 11 * GLYPH * len(unit), *(8 + 11 * GLYPH * len(peak) for peak in peaks), 0)
    return EDGE + 12 * GLYPH * max(map(len, rank_names), default=0) + 10, right + 6


def typical_length(panels: Sequence[Panel]) -> float:
    """Return the lower quartile of the seconds of ops that a schedule names."""
    events = (event for panel in panels for events in panel.lanes.values() for event in events)
    lengths = sorted(event.end - event.start for event in events if kind_of(event.op.kind).time)
    return lengths[len(lengths) // 4] if lengths else 0.0


def pixels_per_second(panels: Sequence[Panel], style: Style = PLAIN) -> float:
    """Return a scale with room for the whole names of half of all ops, and the short names of half of each kind."""
    bars = [bar for panel in panels for bars in panel.bars.values() for bar in bars if bar.op.kind in "FBIW"]
    groups = [(bars, 0)] + [([bar for bar in bars if bar.op.kind == kind], -1) for kind in "FBIW"]
    scales = [0.0]
    for group, name_index in groups:
        lengths = sorted(bar.end - bar.start for bar in group if bar.end > bar.start)
        if lengths:
            name_length = max(len([*label_candidates(bar.op, "main", style), ""][:2][name_index]) for bar in group)
            scales.append((8.5 + GLYPH * 11 * name_length) / lengths[len(lengths) // 2])
    return max(scales)


def _bold_width(name: str) -> float:
    """Estimate the width of a name in bold letters of 13 pixels, with a gap after it."""
    return sum(10.0 if letter.isupper() or letter.isdigit() else 9.0 for letter in name) + 10 if name else 0.0


def _draw_axis(drawing: Drawing, y: float) -> float:
    time, scale = drawing.clock, drawing.span / (drawing.end - drawing.start or 1.0)
    drawing.bottom = y
    start, end = (seconds * time.per_second for seconds in (drawing.start, drawing.end))
    for tick in ticks(start, end, int(drawing.span // 64)):
        x = drawing.left + (tick / time.per_second - drawing.start) * scale
        drawing.timed += [Line(((x, top), (x, bottom)), "rule", grid=True) for top, bottom in drawing.bands]
        drawing.timed.append(Text(x, y + 14, f"{tick:g}", "faint", 11, "middle", grid=True))
    drawing.fixed.append(Text(drawing.left + drawing.span + 14, y + 14, time.unit or "time", "faint", 11))
    return y + 22


class _Painter:
    """Painter of a panel: it knows its scale, the sizes of its lanes, and where each lane is."""

    def __init__(self, drawing: Drawing, panel: Panel, style: Style, arrows: bool, keep_all: bool) -> None:
        self.drawing, self.panel, self.style, self.has_arrows, self.keep_all = drawing, panel, style, arrows, keep_all
        self.clock, self.scale = drawing.clock, drawing.span / (drawing.end - drawing.start or 1.0)
        self.height = 26.0 if panel.ranks <= 8 else 20.0 if panel.ranks <= 16 else 14.0
        # Ops are parted by a line of paper. On ops of 3 pixels it would be a third, so there it is thin, and then none.
        typical_width = typical_length([panel]) * self.scale
        self.edge = 1.0 if typical_width > 7 else THIN if typical_width > 2 else 0.0
        self.gap = 9.0 if panel.ranks <= 8 else 5.0
        # On paper rows are as low as their text allows; two ops that share a lane have half of it each.
        self.is_on_paper = style.width_mm is not None
        if self.is_on_paper:
            is_shared = any(bar.depth < 1 for (_, lane), bars in panel.bars.items() if lane == "main" for bar in bars)
            self.height, self.gap = min(self.height, 22.5 if is_shared else 16.0), min(self.gap, 7.0)
        self.top_and_height: dict[tuple[int, str], tuple[float, float]] = {}
        self.labels = BoxLabels(panel, style, self.scale, self.height)

    def x_of(self, seconds: float) -> float:
        """Return the x of a time; times outside of the window are at its edges."""
        drawing = self.drawing
        return drawing.left + (min(max(seconds, drawing.start), drawing.end) - drawing.start) * self.scale

    def x_and_width(self, start: float, end: float) -> tuple[float, float]:
        return self.x_of(start), self.x_of(end) - self.x_of(start)

    def paint(self, y: float, max_peak: float) -> float:
        """Draw the panel below y, and return where it ends.

        `max_peak` is the top of the memory scale: the peak of all ranks of panels in this unit; 0 draws no memory.
        """
        fixed, panel = self.drawing.fixed, self.panel
        # 1. Names of ranks and lanes, and with them where each lane is.
        y = panel_top = self.draw_heading(y)
        for rank in range(panel.ranks):
            self.top_and_height[rank, "main"] = y, self.height
            fixed.append(Text(EDGE, y + self.height / 2 + 4, panel.rank_name(rank), size=min(12, self.height - 2)))
            y += self.height
            for lane in (lane for lane in LANES[1:] if (rank, lane) in panel.lanes):
                depth = self.height * 0.5
                self.top_and_height[rank, lane] = y + 2, depth
                fixed.append(Text(self.drawing.left - 8, y + 2 + depth / 2 + 3, lane, "faint", 9, "end"))
                y += depth + 2
            y += self.gap
        # 2. Waits, ops, transfers, the critical path: each over what came before it.
        for wait in panel.waits if self.style.waits else ():
            self.draw_wait(wait)
        for lane, bars in panel.bars.items():
            # A page decides on labels itself while it is zoomed, so all are kept. Elsewhere a bar without room for a
            # label may be part of a run of bars that share one.
            labels = {} if self.keep_all else {bar: self.label_of(lane, bar) for bar in bars}
            edge_by_bar = self.draw_run_labels(lane, [bar for bar, label in labels.items() if not label])
            for bar in bars:
                self.draw_bar(lane, bar, edge_by_bar.get(bar, self.edge), labels.get(bar))
        for transfer in panel.blocking_transfers:
            self.draw_sending(transfer)
        for transfer in panel.transfers if self.has_arrows else ():
            self.draw_transfer(transfer)
        self.draw_critical_path()
        bottom = self.draw_memory(y, max_peak) if max_peak else y
        # 3. Rules of the time axis, interrupted where the title of the memory curves is; ends of iterations.
        self.drawing.bands += [(panel_top, y), (y + 12, bottom)] if max_peak else [(panel_top, bottom)]
        for end in panel.timeline.iterations[:-1]:
            if self.drawing.start < end < self.drawing.end:
                x = self.x_of(end)
                title = f"an iteration ends at {self.clock.full(end)}"
                self.drawing.timed.append(Line(((x, panel_top - 4), (x, bottom)), "faint", 1.5, title=title))
        return bottom + 10

    def draw_heading(self, y: float) -> float:
        """Draw the name and the figures, in as many lines as they need; return where they end."""
        width = self.drawing.width - 2 * EDGE
        names = textwrap.wrap(self.panel.name, max(1, int((width - 10) / 10)))
        figures = textwrap.wrap(self.panel.figures, max(1, int(width / (12 * GLYPH)))) if self.style.figures else []
        for name in names:
            self.drawing.fixed.append(Text(EDGE, y + 13, name, size=13, bold=True))
            y += 18
        if names and figures and _bold_width(names[-1]) + 12 * GLYPH * len(self.panel.figures) <= width:
            self.drawing.fixed.append(Text(EDGE + _bold_width(names[-1]), y - 5, self.panel.figures, "faint", 12))
            figures = []
        for line in figures:
            self.drawing.fixed.append(Text(EDGE, y + 13, line, "faint", 12))
            y += 18
        return y + 6 if names or self.style.figures else y

    def label_of(self, lane: tuple[int, str], bar: Bar) -> tuple[str, float] | None:
        width, depth = self.x_and_width(bar.start, bar.end)[1], bar.depth * self.top_and_height[lane][1]
        return self.labels.label_of(bar, lane[1], width, depth)

    def draw_bar(self, lane: tuple[int, str], bar: Bar, edge: float, label: tuple[str, float] | None) -> None:
        y, height = self.top_and_height[lane]
        x, width = self.x_and_width(bar.start, bar.end)
        paint = self.style.colour_of(bar.op, bar.shade)
        times_text = f"{bar.op.cell}, rank {lane[0]}: {self.clock(bar.start)} to {self.clock.full(bar.end)}"
        reads, writes = (" ".join(map(str, values)) for values in (bar.op.reads, bar.op.writes))
        top, depth = y + bar.top * height, bar.depth * height
        title = f"{times_text}\nreads {reads}\nwrites {writes}"
        # Boxes without a line between them overlap a little, so that no paper shows through the seam.
        overlap = 0.0 if edge else SEAM
        self.drawing.timed.append(Rect(x, top, width + overlap, depth, paint, title, edge))
        if bar.op.cell in self.panel.differences:
            note = "{} takes {}, not {}".format(bar.op.cell, *map(self.clock.full, self.panel.differences[bar.op.cell]))
            self.drawing.timed.append(path_frame(x, top, width, depth, note)._replace(paint="differs"))
        if self.keep_all:
            self.draw_page_text(x, width, top, depth, label_candidates(bar.op, lane[1], self.style), ink_on(paint))
        elif label:
            self.draw_text(x, width, top, depth, *label, ink_on(paint))

    def draw_run_labels(self, lane: tuple[int, str], bars: Sequence[Bar]) -> dict[Bar, float]:
        """Write one label for each run of microbatches without room for labels of their own.

        Return the edges of their bars: thin lines, and none through the label.
        """
        y, height = self.top_and_height[lane]
        edges: dict[Bar, float] = {}
        for run, names in self.labels.unlabelled_runs(bars):
            x, width = self.x_and_width(run[0].start, run[-1].end)
            top, depth = y + run[0].top * height, run[0].depth * height
            if label := fitting_label(names, text_size(depth), width):
                name, size = label
                self.draw_text(x, width, top, depth, name, size, ink_on(self.style.colour_of(run[0].op, run[0].shade)))
                middle, half = x + width / 2, width_needed(name, size) / 2
                for bar in run:
                    bar_x, bar_width = self.x_and_width(bar.start, bar.end)
                    is_under_label = bar_x < middle + half and bar_x + bar_width > middle - half
                    edges[bar] = 0.0 if is_under_label else min(THIN, self.edge)
        return edges

    def draw_text(
        self, x: float, width: float, y: float, height: float, name: str, size: float, paint: str, **options: Any
    ) -> None:
        # The baseline is 0.36 of the size below the middle, so that capitals and digits are centred.
        position = x + width / 2, y + height / 2 + size * 0.36
        self.drawing.timed.append(Text(*position, name, paint, size, "middle", **options))

    def draw_page_text(self, x: float, width: float, y: float, height: float, names: Sequence[str], paint: str) -> None:
        if names:
            self.draw_text(x, width, y, height, names[0], text_size(height), paint, room=width, short=names[-1])

    def draw_wait(self, wait: Wait) -> None:
        y, height = self.top_and_height[wait.rank, "main"]
        x, width = self.x_and_width(wait.start, wait.end)
        title = f"rank {wait.rank} waits from {self.clock(wait.start)} to {self.clock.full(wait.end)}"
        awaited_text = awaited_op(wait)
        hint = f"{title}\n{awaited_text}".rstrip()
        self.drawing.timed.append(Rect(x, y + 2, width, height - 4, "hatched", hint, self.edge))
        if not awaited_text or wait.writer is None or self.style.labels != "all":
            return
        names = (f"waits for {wait.writer.cell}", wait.writer.cell)
        if self.keep_all:
            self.draw_page_text(x, width, y, height, names, "faint")
        elif label := fitting_label(names, text_size(height), width, SIZES[:1]):
            half = width_needed(*label) / 2  # no hatching through words
            self.drawing.timed.append(Rect(x + width / 2 - half, y + 2, 2 * half, height - 4, "wait", title))
            self.draw_text(x, width, y, height, *label, "faint")

    def draw_critical_path(self) -> None:
        """Draw frames around ops of the critical path, and thick arrows for its transfers."""
        for step in self.panel.path if self.style.critical_path else ():
            if isinstance(step.activity, Op):
                # A SEND that the program does not name has no lane in the picture: the main lane stands for it.
                rank, lane = step.activity.rank, lane_of(step.activity)
                y, height = self.top_and_height[rank, lane if (rank, lane) in self.top_and_height else "main"]
                x, width = self.x_and_width(step.start, step.end)
                title = f"{step.activity.cell} is on the critical path"
                self.drawing.timed.append(path_frame(x, y, width, height, title))
            else:
                self.draw_transfer(step.activity, "ink", 2.0)

    def draw_transfer(self, transfer: Transfer, paint: str = "", line_width: float = 0.0) -> None:
        """Draw a transfer as an arrow from lane to lane, cut at the edges of the window."""
        y0, height0 = self.top_and_height[transfer.source, "main"]
        y1, height1 = self.top_and_height[transfer.target, "main"]
        y0, y1 = (y0 + height0, y1) if y1 > y0 else (y0, y1 + height1)
        # Both ends are inside the window; on a cut arrow, y is in proportion to the time.
        seconds = transfer.end - transfer.start or 1.0
        start, end = max(transfer.start, self.drawing.start), min(transfer.end, self.drawing.end)
        points = tuple((self.x_of(time), y0 + (y1 - y0) * (time - transfer.start) / seconds) for time in (start, end))
        if transfer.start == transfer.end:
            points = (points[0], (points[1][0], y1))
        # Between neighbours an arrow crosses only the gap; others pass behind the lanes between, so through no words.
        is_near = abs(transfer.source - transfer.target) == 1
        default_paint, default_width = ("arrow", 1.0) if is_near else ("faint", 0.5)
        has_head, title = end == transfer.end, self.describe_transfer(transfer)
        line = Line(points, paint or default_paint, line_width or default_width, has_head, title, is_behind=not is_near)
        self.drawing.timed.append(line)

    def draw_sending(self, transfer: Transfer) -> None:
        """Draw a transfer in the main lane of its sender, which it keeps busy."""
        y, height = self.top_and_height[transfer.source, "main"]
        x, width = self.x_and_width(transfer.start, transfer.end)
        paint, title = self.style.colour_of_kind("SEND"), self.describe_transfer(transfer)
        self.drawing.timed.append(Rect(x, y, width, height, paint, title, self.edge))

    def describe_transfer(self, transfer: Transfer) -> str:
        times = f"{self.clock(transfer.start)} to {self.clock.full(transfer.end)}"
        return f"{transfer.value}, rank {transfer.source} to {transfer.target}: {times}"

    def draw_memory(self, y: float, max_peak: float) -> float:
        """Draw a memory curve for each rank, all on one scale; return where they end."""
        panel, drawing = self.panel, self.drawing
        height, gap = (12.0, 3.0) if self.is_on_paper else (22.0 if panel.ranks <= 8 else 13.0, 4.0)
        title = "bytes held" if panel.timeline.in_bytes else "microbatches held"
        drawing.fixed.append(Text(drawing.left + 3, y + 10, title, "faint", 10))
        y += 12
        for rank in range(panel.ranks):
            base = y + height
            states = [(panel.start, {}), *panel.memory_by_holder(rank), (panel.end, {})]
            # Layers from the bottom up. An area goes along the top of its layer, and back along that of the one below.
            outline = [(self.x_of(panel.start), base), (self.x_of(panel.end), base)]
            for index, holder in enumerate(panel.holders):
                levels = [sum(amounts.get(name, 0.0) for name in panel.holders[: index + 1]) for _, amounts in states]
                floor, outline = outline, [(self.x_of(panel.start), base)]
                for (level_before, level_after), (seconds, _) in zip(pairwise(levels), states[1:], strict=True):
                    rises = (level / max_peak * height for level in (level_before, level_after))
                    outline += [(self.x_of(seconds), base - rise) for rise in rises]
                peak = panel.format_amount(max(amounts.get(holder, 0.0) for _, amounts in states))
                note = f"rank {rank} holds at most {peak}" + f" of {holder}" * panel.timeline.in_bytes
                drawing.timed.append(Area((*outline, *floor[::-1]), HOLDER_ROLES[holder], note))
            peak = panel.format_amount(panel.timeline.peak[rank])
            right, size = drawing.left + drawing.span, min(11.0, height)
            drawing.timed += [
                Line(tuple(outline[1:-1]), "curve"),
                Line(((drawing.left, base), (right, base)), "rule"),
            ]
            drawing.fixed.append(Text(EDGE, base - 3, panel.rank_name(rank), "faint", size))
            drawing.fixed.append(Text(right + 8, base - 3, peak, "faint", size))
            y += height + gap
        return y
