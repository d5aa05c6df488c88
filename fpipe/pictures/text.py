"""Timelines as text: one as a grid of ticks, several with time to scale, in colour on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from fpipe.pictures.axis import clock, ticks
from fpipe.pictures.colours import terminal
from fpipe.pictures.panel import Panel
from fpipe.program import HtmlRepr, Op

Piece = tuple[str, Op | None]
"""Some characters of a line, and the op they stand for."""


class Picture(str, HtmlRepr):
    """Text that prints in colour on a terminal and shows itself as a picture in a notebook; else a string like any.

    >>> import fpipe
    >>> picture = fpipe.plot(fpipe.program(1), colour=True)
    >>> print(picture)
    rank 0 | \x1b[38;5;231;48;5;25m0F0\x1b[0m \x1b[38;5;231;48;5;36m0B0\x1b[0m
    >>> picture == "rank 0 | 0F0 0B0"
    True
    """

    panels: tuple[Panel, ...]
    coloured: str
    colour: bool | None

    @staticmethod
    def of(panels: Sequence[Panel], lines: Iterable[tuple[Panel, list[Piece]]], colour: bool | None) -> Picture:
        """The lines of some panels; what is written in colour is known to be longer than it looks."""
        kept = [(panel, _rstripped(pieces)) for panel, pieces in lines]
        made = Picture("\n".join("".join(text for text, _ in pieces) for _, pieces in kept))
        made.coloured = "\n".join("".join(_inked(panel, *piece) for piece in pieces) for panel, pieces in kept)
        made.panels, made.colour = tuple(panels), colour
        return made

    def __str__(self) -> str:
        return self.coloured if (_colourful() if self.colour is None else self.colour) else self[:]

    def __format__(self, spec: str) -> str:  # inside another text it may end in a file
        return format(self[:], spec)


def grid(panel: Panel, colour: bool | None = None, width: int | None = None) -> Picture:
    """One line a rank, one column a tick; for timelines of the clock that counts in ticks.

    What is wider than `width` characters goes on below, from the tick that it says.
    """
    events = [event for event in panel.timeline.events if event.end > event.start]
    columns = round(max((event.end for event in events), default=0))
    rows: list[list[Piece]] = [[(".", None)] * columns for _ in range(panel.ranks)]
    for op, start, _ in events:
        rows[op.rank][round(start)] = op.cell, op
    wide = max((len(text) for row in rows for text, _ in row), default=1)
    many = columns if width is None else max(1, (width - len(_head(panel, 0)) - 1) // (wide + 1))
    lines: list[tuple[Panel, list[Piece]]] = []
    for first in range(0, max(columns, 1), max(many, 1)):
        if first:
            lines.append((panel, [(f"from tick {first}:", None)]))
        for rank, row in enumerate(rows):
            line: list[Piece] = [(f"{_head(panel, rank)}| ", None)]
            for text, op in row[first : first + many]:
                left = (wide - len(text)) // 2 + ((wide - len(text)) & wide & 1)
                line += [(" " * left, None), (text, op), (" " * (wide - len(text) - left + 1), None)]
            lines.append((panel, line))
    return Picture.of([panel], lines, colour)


def to_scale(panels: Sequence[Panel], width: int = 120, colour: bool | None = None) -> Picture:
    """Time to the right, a line for each lane, all panels under one axis; dots are idle time.

    A second has as many characters as the shortest op needs for its name, fewer where that is wider than `width`; then
    names shrink to the letter of the kind, and at last a character stands for whatever fills most of it.
    """
    end = max((panel.end for panel in panels), default=0.0)
    margin = max((len(_head(panel, rank)) for panel in panels for rank in range(panel.ranks)), default=0) + 2
    bars = [bar for panel in panels for (_, lane), events in panel.lanes.items() if lane == "main" for bar in events]
    wanted = max(((len(op.cell) + 1) / (until - start) for op, start, until in bars), default=1.0)
    scale = min(wanted, (width - margin) / end) if end else 1.0
    lines: list[tuple[Panel, list[Piece]]] = []
    for panel in panels:
        if panel.name or len(panels) > 1:
            lines.append((panel, [(f"{panel.name}: {panel.facts}", None)]))
        for rank in range(panel.ranks):
            lines.append((panel, [(_head(panel, rank) + "| ", None), *_lane(panel, (rank, "main"), scale)]))
            if (rank, "copy") in panel.lanes:
                head = "copy ".rjust(len(_head(panel, rank)))
                lines.append((panel, [(head + "| ", None), *_lane(panel, (rank, "copy"), scale)]))
    lines.append((panels[-1], [(_axis(end, scale, margin, width), None)]))
    return Picture.of(panels, lines, colour)


def _lane(panel: Panel, lane: tuple[int, str], scale: float) -> list[Piece]:
    columns = round(panel.end * scale)
    busy = [0.0] * columns
    most: list[tuple[float, Op | None]] = [(0.0, None)] * columns
    for op, start, until in panel.lanes.get(lane, ()):
        for column in range(int(start * scale), min(columns, int(until * scale) + 1)):
            share = min(until * scale, column + 1) - max(start * scale, column)
            busy[column] += share
            if share > most[column][0] + 1e-9:
                most[column] = share, op
    filled = [op if share >= 0.5 else None for share, (_, op) in zip(busy, most, strict=True)]
    pieces: list[Piece] = []
    at = 0
    while at < columns:
        op, stop = filled[at], at + 1
        while stop < columns and filled[stop] is op:
            stop += 1
        pieces += [("." * (stop - at), None)] if op is None else _named(op, stop - at)
        at = stop
    return pieces


def _named(op: Op, room: int) -> list[Piece]:
    """An op's name and what is left of its room; a blank at the end tells it from the next."""
    if room > len(op.cell):
        return [(op.cell.ljust(room - 1, "-"), op), (" ", None)]
    name = next(name for name in (op.cell, op.kind, op.kind[:1]) if room >= len(name))
    return [(name.ljust(room, "-"), op)]


def _axis(end: float, scale: float, margin: int, width: int) -> str:
    time = clock(end)
    line = time.unit.rjust(margin - 1).ljust(margin)
    for tick in ticks(end * time.per_second, max(1, round(end * scale) // 6)):
        at = margin + round(tick / time.per_second * scale)
        if at >= len(line) and at + len(f"{tick:g}") <= width:
            line = f"{line.ljust(at)}{tick:g} "
    return line


def _head(panel: Panel, rank: int) -> str:
    return f"rank {rank:>{len(str(panel.ranks - 1))}} "


def _rstripped(pieces: list[Piece]) -> list[Piece]:
    while pieces and not pieces[-1][0].rstrip():
        pieces = pieces[:-1]
    return [*pieces[:-1], (pieces[-1][0].rstrip(), pieces[-1][1])] if pieces else []


def _inked(panel: Panel, text: str, op: Op | None) -> str:
    return text if op is None else terminal((op.parts or (op,))[0].kind, panel.shade(op), text)


def _colourful() -> bool:
    """Whether what is printed now is read by someone who sees colours; NO_COLOR (no-color.org) says not to."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
