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

from collections.abc import Sequence

from fpipe.pictures.axis import amount, clock, ticks
from fpipe.pictures.colours import WORDS, fill, ink_on
from fpipe.pictures.panel import Bar, Panel, awaited
from fpipe.pictures.shapes import Area, Drawing, Line, Rect, Shape, Text
from fpipe.program import Op, kind_of
from fpipe.timing.lanes import Transfer
from fpipe.timing.waiting import Wait

LEFT, RIGHT, EDGE = 68.0, 62.0, 12.0
ARROW_ROOM = 10.0
"""Width of an op that has an arrow at each end."""
GLYPH = 0.62
"""Mean width of a character in units of its size, on the safe side for the fonts that a browser takes."""


def lay_out(panels: Sequence[Panel], width: float | None = None, every: bool = False) -> Drawing:
    """The shapes of some panels.

    Args:
        panels: what to draw, from above.
        width: of the picture, in pixels; by default enough for the names of half the ops, from 720 to 2000.
        every: keep names and arrows for which there is no room, for a page that shows them when there is.
    """
    end = max((panel.end for panel in panels), default=0.0)
    if width is None:
        width = LEFT + RIGHT + end * pixels_a_second(panels)
        width = min(2000.0, max(720.0, width))
    drawing = Drawing(width, 0.0, LEFT, width - LEFT - RIGHT, end, clock(end))
    tops = {
        in_bytes: max(
            (max(panel.timeline.peak, default=0) for panel in panels if panel.in_bytes is in_bytes), default=0.0
        )
        for in_bytes in (False, True)
    }
    y = EDGE
    for panel in panels:
        y = _Painter(drawing, panel, every).paint(y, tops[panel.in_bytes])
    y = _axis(drawing, y)
    drawing.height = _legend(drawing, panels, every, y) + EDGE
    drawing.timed.sort(key=_layer)  # those that look alike in a row, to be written or drawn at once
    return drawing


_LAYERS = (Rect, Area, Line, Text)


def _layer(shape: Shape) -> tuple[bool, int, str, float]:
    return not shape.grid, _LAYERS.index(type(shape)), shape.paint, shape.size if isinstance(shape, Text) else 0.0


def typical_length(panels: Sequence[Panel]) -> float:
    """The median time of an op that a schedule names, in seconds."""
    events = (event for panel in panels for events in panel.lanes.values() for event in events)
    lengths = sorted(event.end - event.start for event in events if kind_of(event.op.kind).time)
    return lengths[len(lengths) // 2] if lengths else 0.0


def pixels_a_second(panels: Sequence[Panel]) -> float:
    """What gives half of all ops room for their whole names, and half of each kind for the short ones."""
    bars = [bar for panel in panels for bars in panel.bars.values() for bar in bars if bar.op.kind in "FBIW"]
    wanted = [(bars, 0)] + [([bar for bar in bars if bar.op.kind == kind], -1) for kind in "FBIW"]
    found = [0.0]
    for some, which in wanted:
        lengths = sorted(bar.end - bar.start for bar in some if bar.end > bar.start)
        if lengths:
            letters = max(len(_names(bar.op, "main")[which]) for bar in some)
            found.append((8.5 + GLYPH * 11 * letters) / lengths[len(lengths) // 2])
    return max(found)


def _bold(name: str) -> float:
    """About how far a name goes in bold letters of 13 pixels, and a gap after it."""
    return sum(10.0 if letter.isupper() or letter.isdigit() else 9.0 for letter in name) + 10 if name else 0.0


def _arrows_fit(drawing: Drawing, panel: Panel) -> bool:
    """Whether arrows can be told apart."""
    return typical_length([panel]) * drawing.span >= ARROW_ROOM * drawing.end


def _axis(drawing: Drawing, y: float) -> float:
    time, scale = drawing.clock, drawing.span / (drawing.end or 1.0)
    drawing.bottom = y
    for tick in ticks(drawing.end * time.per_second, int(drawing.span // 64)):
        x = drawing.left + tick / time.per_second * scale
        drawing.timed += [Line(((x, above), (x, below)), "rule", grid=True) for above, below in drawing.bands]
        drawing.timed.append(Text(x, y + 14, f"{tick:g}", "faint", 11, "middle", grid=True))
    drawing.still.append(Text(drawing.left + drawing.span + 14, y + 14, time.unit or "time", "faint", 11))
    return y + 22


def _legend(drawing: Drawing, panels: Sequence[Panel], all_arrows: bool, y: float) -> float:
    found = {bar.op.kind for panel in panels for bars in panel.bars.values() for bar in bars}
    found |= {"SEND" for panel in panels if panel.sending}
    entries = [(fill(kind), f"{kind} {word}") for kind, word in WORDS.items() if kind in found]
    by_colour: dict[str, list[str]] = {}
    for kind in sorted(found - WORDS.keys()):
        by_colour.setdefault(fill(kind), []).append(kind)
    entries += [(paint, " ".join(kinds)) for paint, kinds in by_colour.items()]
    if any(panel.waits for panel in panels):
        entries.append(("hatched", "waits, and for whom"))
    if any(panel.transfers and (all_arrows or _arrows_fit(drawing, panel)) for panel in panels):
        entries.append(("transfer", "transfer"))
    x = drawing.left
    for paint, words in entries:
        room = 18 + GLYPH * 11 * len(words) + 14
        if x > drawing.left and x + room > drawing.width - EDGE:
            x, y = drawing.left, y + 18
        if paint == "transfer":
            drawing.still.append(Line(((x, y + 2), (x + 12, y + 12)), "faint", 1.2, arrow=True))
        else:
            drawing.still.append(Rect(x, y + 2, 12, 10, paint))
        drawing.still.append(Text(x + 18, y + 11, words, "faint", 11))
        x += room
    return y + 16


def _names(op: Op, lane: str) -> list[str]:
    """What may stand in an op's box, the longest first: 2F0.1, or which microbatch; of a copy at least O or L."""
    if lane == "copy":
        return [op.cell, op.kind, op.kind[:1]]
    return [op.cell] if op.microbatch is None else [op.cell, op.cell.removeprefix(f"{op.stage}{op.kind}")]


class _Painter:
    """Draws one panel."""

    def __init__(self, drawing: Drawing, panel: Panel, every: bool) -> None:
        self.drawing, self.panel, self.every = drawing, panel, every
        self.time, self.scale = drawing.clock, drawing.span / (drawing.end or 1.0)
        self.height = 26.0 if panel.ranks <= 8 else 20.0 if panel.ranks <= 16 else 14.0
        self.edge = 1.0 if typical_length([panel]) * self.scale > 7 else 0.25
        self.gap = 9.0 if panel.ranks <= 8 else 5.0
        self.y: dict[tuple[int, str], tuple[float, float]] = {}

    def x(self, seconds: float) -> float:
        """Where a time is."""
        return self.drawing.left + seconds * self.scale

    def paint(self, y: float, top: float) -> float:
        """Draw below y; `top` is the most that any rank of such a panel holds. Returns where the panel ends."""
        still, panel = self.drawing.still, self.panel
        name = panel.name
        still.append(Text(EDGE, y + 13, name, size=13, bold=True))
        still.append(Text(EDGE + _bold(name), y + 13, panel.facts, "faint", 12))
        y += 24
        above = y
        for rank in range(panel.ranks):
            self.y[rank, "main"] = y, self.height
            still.append(Text(EDGE, y + self.height / 2 + 4, f"rank {rank}", size=min(12, self.height - 2)))
            y += self.height
            if (rank, "copy") in panel.lanes:
                depth = self.height * 0.5
                self.y[rank, "copy"] = y + 2, depth
                still.append(Text(self.drawing.left - 8, y + 2 + depth / 2 + 3, "copy", "faint", 9, "end"))
                y += depth + 2
            y += self.gap
        for wait in panel.waits:
            self.wait(wait)
        for lane, bars in panel.bars.items():
            for bar in bars:
                self.bar(lane, bar)
        for transfer in panel.sending:
            self.sending(transfer)
        if self.every or _arrows_fit(self.drawing, panel):
            for transfer in panel.transfers:
                self.transfer(transfer)
        below = self.held(y, top) if top else y
        self.drawing.bands.append((above, below))
        for end in panel.timeline.iterations[:-1]:
            x = self.x(end)
            title = f"an iteration ends at {self.time.full(end)}"
            self.drawing.timed.append(Line(((x, above - 4), (x, below)), "faint", 1.5, title=title))
        return below + 10

    def bar(self, lane: tuple[int, str], bar: Bar) -> None:
        y, height = self.y[lane]
        x, width = self.x(bar.start), (bar.end - bar.start) * self.scale
        paint = fill(bar.op.kind, bar.shade)
        words = f"{bar.op.cell}, rank {lane[0]}: {self.time(bar.start)} to {self.time.full(bar.end)}"
        title = "\n".join(
            [words, "reads " + " ".join(map(str, bar.op.reads)), "writes " + " ".join(map(str, bar.op.writes))]
        )
        top, depth = y + bar.top * height, bar.depth * height
        self.drawing.timed.append(Rect(x, top, width, depth, paint, title, self.edge))
        self.label(x, width, top, depth, _names(bar.op, lane[1]), ink_on(paint))

    def label(self, x: float, width: float, y: float, height: float, names: Sequence[str], paint: str) -> None:
        """The first name that fits, in the middle of a box."""
        size = min(11.0, height * 0.72)
        fitting = [name for name in names if len(name) * size * GLYPH + 5 <= width] if size >= 6 else []
        middle = y + height / 2 + size * 0.36
        if self.every:
            text = Text(x + width / 2, middle, names[0], paint, size, "middle", room=width, short=names[-1])
            self.drawing.timed.append(text)
        elif fitting:
            self.drawing.timed.append(Text(x + width / 2, middle, fitting[0], paint, size, "middle"))

    def wait(self, wait: Wait) -> None:
        y, height = self.y[wait.rank, "main"]
        x, width = self.x(wait.start), (wait.end - wait.start) * self.scale
        title = f"rank {wait.rank} waits from {self.time(wait.start)} to {self.time.full(wait.end)}"
        whom = awaited(wait)
        self.drawing.timed.append(Rect(x, y + 2, width, height - 4, "hatched", f"{title}\n{whom}".rstrip(), self.edge))
        if whom and wait.on:
            self.label(x, width, y, height, (f"waits for {wait.on.cell}", wait.on.cell), "faint")

    def transfer(self, transfer: Transfer) -> None:
        """From lane to lane."""
        (y0, height0), (y1, height1) = (self.y[rank, "main"] for rank in (transfer.source, transfer.target))
        down = y1 > y0
        start = (self.x(transfer.start), y0 + height0 if down else y0)
        end = (self.x(transfer.end), y1 if down else y1 + height1)
        near = abs(transfer.source - transfer.target) == 1  # others cross the lanes between
        paint, width = ("arrow", 1.0) if near else ("faint", 0.5)
        self.drawing.timed.append(Line((start, end), paint, width, True, self.said_of(transfer)))

    def sending(self, transfer: Transfer) -> None:
        """A sender that does nothing else."""
        y, height = self.y[transfer.source, "main"]
        x, width = self.x(transfer.start), (transfer.end - transfer.start) * self.scale
        self.drawing.timed.append(Rect(x, y, width, height, fill("SEND"), self.said_of(transfer), self.edge))

    def said_of(self, transfer: Transfer) -> str:
        times = f"{self.time(transfer.start)} to {self.time.full(transfer.end)}"
        return f"{transfer.value}, rank {transfer.source} to {transfer.target}: {times}"

    def held(self, y: float, top: float) -> float:
        """What each rank holds, as steps."""
        panel, drawing = self.panel, self.drawing
        height = 22.0 if panel.ranks <= 8 else 13.0
        what = "bytes held" if panel.in_bytes else "microbatches held"
        drawing.still.append(Text(drawing.left + 3, y + 10, what, "faint", 10))
        y += 12
        for rank in range(panel.ranks):
            base = y + height
            points = [(self.x(0), base)]
            level = 0.0
            for time, held in panel.timeline.held(rank):
                points += [(self.x(time), base - level / top * height), (self.x(time), base - held / top * height)]
                level = held
            points += [(self.x(panel.end), base - level / top * height), (self.x(panel.end), base)]
            peak = panel.timeline.peak[rank]
            title = f"rank {rank} holds at most {amount(peak, panel.in_bytes)}"
            drawing.timed += [Area(tuple(points), "held", title), Line(tuple(points[1:-1]), "curve")]
            drawing.timed.append(Line(((drawing.left, base), (drawing.left + drawing.span, base)), "rule"))
            size = min(11.0, height)
            drawing.still.append(Text(EDGE, base - 3, f"rank {rank}", "faint", size))
            drawing.still.append(
                Text(drawing.left + drawing.span + 8, base - 3, amount(peak, panel.in_bytes), "faint", size)
            )
            y += height + 4
        return y
