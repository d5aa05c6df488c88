"""Draw timelines as text: a grid of ticks, or several with time to scale, in colour on a terminal.

pieces (text, op) --> lines --> Picture: the plain text is its value, colours only show when it prints
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from fpipe.pictures.drawn_shapes import clock, ticks
from fpipe.pictures.panel import Panel
from fpipe.pictures.style import KIND_NAMES, PLAIN, Style, on_terminal
from fpipe.program import LANES, HtmlRepr, Op, lane_of

Piece = tuple[str, Op | None]
"""A part of a line, and the op that it shows, if any."""


class Picture(str, HtmlRepr):
    """A string that prints in colour on a terminal and is shown as a picture in a notebook.

    >>> import fpipe
    >>> picture = fpipe.plot(fpipe.program(1), colour=True)
    >>> print(picture)
    rank 0 | \x1b[38;5;231;48;5;25m0F0\x1b[0m \x1b[38;5;231;48;5;36m0B0\x1b[0m
    >>> picture == "rank 0 | 0F0 0B0"
    True
    """

    panels: tuple[Panel, ...]
    style: Style
    coloured: str
    colour: bool | None

    @staticmethod
    def from_lines(
        panels: Sequence[Panel], lines: Iterable[tuple[Panel, list[Piece]]], colour: bool | None, style: Style
    ) -> Picture:
        """Make a picture from lines of panels, plain and in colour."""
        rows = [(panel, _strip_right(pieces)) for panel, pieces in lines]
        picture = Picture("\n".join("".join(text for text, _ in pieces) for _, pieces in rows))
        picture.coloured = "\n".join("".join(_coloured(panel, *piece) for piece in pieces) for panel, pieces in rows)
        picture.panels, picture.colour, picture.style = tuple(panels), colour, style
        return picture

    def __str__(self) -> str:
        return self.coloured if (_shows_colours() if self.colour is None else self.colour) else self[:]

    # Formatted into another text it is plain, since that may be written to a file.
    def __format__(self, spec: str) -> str:
        return format(self[:], spec)


def draw_grid(panel: Panel, colour: bool | None = None, width: int | None = None, style: Style = PLAIN) -> Picture:
    """Draw a line for each rank and a column for each tick, of a timeline whose clock counts ticks.

    Lines of more than `width` characters go on below, under a line that says from which tick.
    """
    events = [event for event in panel.timeline.events if event.end > event.start]
    columns = round(max((event.end for event in events), default=0))
    rows: list[list[Piece]] = [[(".", None)] * columns for _ in range(panel.ranks)]
    for op, start, _ in events:
        rows[op.rank][round(start)] = op.cell, op
    cell_width = max((len(text) for row in rows for text, _ in row), default=1)
    ticks_per_line = columns if width is None else max(1, (width - len(_row_head(panel, 0)) - 1) // (cell_width + 1))
    lines: list[tuple[Panel, list[Piece]]] = []
    for first_tick in range(0, max(columns, 1), max(ticks_per_line, 1)):
        if first_tick:
            lines.append((panel, [(f"from tick {first_tick}:", None)]))
        for rank, row in enumerate(rows):
            line: list[Piece] = [(f"{_row_head(panel, rank)}| ", None)]
            for text, op in row[first_tick : first_tick + ticks_per_line]:
                # Centred; of an odd remainder the larger half is to the left if the cell width is odd.
                padding = (cell_width - len(text)) // 2 + ((cell_width - len(text)) & cell_width & 1)
                line += [(" " * padding, None), (text, op), (" " * (cell_width - len(text) - padding + 1), None)]
            lines.append((panel, line))
    return Picture.from_lines([panel], lines, colour, style)


def draw_to_scale(
    panels: Sequence[Panel], width: int = 120, colour: bool | None = None, style: Style = PLAIN
) -> Picture:
    """Draw panels with time to the right, a line for each lane and one axis below; dots are idle time.

    A second has as many characters as the shortest op needs for its name, fewer where that is wider than `width`; then
    the names of a kind without room for all of them shrink to its letter, and at last a character stands for whatever
    fills most of it; a last line says so.
    """
    # 1. The scale, in characters a second, and the kinds for which it is too small to show names.
    start, end = (max((getattr(panel, bound) for panel in panels), default=0.0) for bound in ("start", "end"))
    margin = max((len(_row_head(panel, rank)) for panel in panels for rank in range(panel.ranks)), default=0) + 2
    events = [event for panel in panels for event in panel.events if event.end > event.start]
    bars = [event for event in events if lane_of(event.op) == "main"]
    scale_for_names = max(((len(op.cell) + 1) / (until - since) for op, since, until in bars), default=1.0)
    scale = min(scale_for_names, (width - margin) / (end - start)) if end > start else 1.0
    short_kinds = {op.kind for op, since, until in bars if (until - since) * scale < (len(op.cell) + 1) * (1 - 1e-9)}
    # 2. Headings and lanes, the axis, and the legend if names were shortened.
    lines: list[tuple[Panel, list[Piece]]] = []
    for panel in panels:
        if panel.name or len(panels) > 1:
            heading = f"{panel.name}: {panel.figures}" if style.figures else panel.name
            lines.extend((panel, [(line, None)]) for line in textwrap.wrap(heading, width))
        for rank in range(panel.ranks):
            for lane in LANES:
                if lane == "main" or (rank, lane) in panel.lanes:
                    head = _row_head(panel, rank)
                    head = head if lane == "main" else f"{lane} ".rjust(len(head))
                    pieces = _lane_pieces(panel, (rank, lane), scale, short_kinds)
                    lines.append((panel, [(head + "| ", None), *pieces]))
    lines.append((panels[-1], [(_axis_line(start, end, scale, margin, width), None)]))
    if short_kinds:
        drawn_kinds = {part.kind for op, _, _ in bars for part in op.parts or (op,)}
        kinds = [f"{kind} {name}" for kind, name in KIND_NAMES.items() if kind in drawn_kinds]
        unit = f"{float(f'{1 / scale:.3g}'):g} second"
        legend = f"{', '.join(kinds)}, - goes on, . idle; a character is {unit}{'s' * (unit != '1 second')}"
        lines.extend((panels[-1], [(line, None)]) for line in textwrap.wrap(legend, width))
    return Picture.from_lines(panels, lines, colour, style)


def _lane_pieces(panel: Panel, lane: tuple[int, str], scale: float, short_kinds: set[str]) -> list[Piece]:
    # A character shows the op that overlaps most with its column, if the lane is busy for half of it.
    columns = round((panel.end - panel.start) * scale)
    busy = [0.0] * columns
    largest: list[tuple[float, Op | None]] = [(0.0, None)] * columns
    for op, *times in panel.lanes.get(lane, ()):
        start, stop = ((time - panel.start) * scale for time in times)
        for column in range(max(0, int(start)), min(columns, int(stop) + 1)):
            overlap = min(stop, column + 1) - max(start, column)
            busy[column] += overlap
            if overlap > largest[column][0] + 1e-9:
                largest[column] = overlap, op
    ops = [op if overlap >= 0.5 else None for overlap, (_, op) in zip(busy, largest, strict=True)]
    pieces: list[Piece] = []
    for op, group in groupby(ops):
        room = len([*group])
        pieces += [("." * room, None)] if op is None else _op_pieces(op, room, op.kind in short_kinds)
    return pieces


def _op_pieces(op: Op, width: int, is_short: bool) -> list[Piece]:
    """Write an op's name in a given width; a blank at the end separates it from the next op."""
    if width > len(op.cell) and not is_short:
        return [(op.cell.ljust(width - 1, "-"), op), (" ", None)]
    name = next(name for name in (op.cell, op.kind, op.kind[:1])[is_short:] if width >= len(name))
    return [(name.ljust(width, "-"), op)]


def _axis_line(start: float, end: float, scale: float, margin: int, width: int) -> str:
    time = clock(end)
    line = time.unit.rjust(margin - 1).ljust(margin)
    for tick in ticks(start * time.per_second, end * time.per_second, max(1, round((end - start) * scale) // 6)):
        column = margin + round((tick / time.per_second - start) * scale)
        if column >= len(line) and column + len(f"{tick:g}") <= width:
            line = f"{line.ljust(column)}{tick:g} "
    return line


def _row_head(panel: Panel, rank: int) -> str:
    if panel.rank_names is not None:
        return f"{panel.rank_name(rank):{max(map(len, panel.rank_names))}} "
    return f"rank {rank:>{len(str(panel.ranks - 1))}} "


def _strip_right(pieces: list[Piece]) -> list[Piece]:
    while pieces and not pieces[-1][0].rstrip():
        pieces = pieces[:-1]
    return [*pieces[:-1], (pieces[-1][0].rstrip(), pieces[-1][1])] if pieces else []


def _coloured(panel: Panel, text: str, op: Op | None) -> str:
    return text if op is None else on_terminal((op.parts or (op,))[0].kind, panel.shade(op), text)


def _shows_colours() -> bool:
    """Whether to print colours: to a terminal that can, unless NO_COLOR is set (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
