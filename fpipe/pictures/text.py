"""Timelines as text: one as a grid of ticks, several with time to scale, in colour on a terminal."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from fpipe.pictures.drawn_shapes import clock, ticks
from fpipe.pictures.panel import Panel
from fpipe.pictures.style import PLAIN, WORDS, Style, terminal
from fpipe.program import LANES, HtmlRepr, Op, lane_of

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
    style: Style
    coloured: str
    colour: bool | None

    @staticmethod
    def of(
        panels: Sequence[Panel], lines: Iterable[tuple[Panel, list[Piece]]], colour: bool | None, style: Style
    ) -> Picture:
        """Make a picture of the lines of some panels, plain and in colour."""
        stripped = [(panel, _rstripped(pieces)) for panel, pieces in lines]
        picture = Picture("\n".join("".join(text for text, _ in pieces) for _, pieces in stripped))
        picture.coloured = "\n".join("".join(_inked(panel, *piece) for piece in pieces) for panel, pieces in stripped)
        picture.panels, picture.colour, picture.style = tuple(panels), colour, style
        return picture

    def __str__(self) -> str:
        return self.coloured if (_colourful() if self.colour is None else self.colour) else self[:]

    def __format__(self, spec: str) -> str:  # inside another text it may end in a file
        return format(self[:], spec)


def grid(panel: Panel, colour: bool | None = None, width: int | None = None, style: Style = PLAIN) -> Picture:
    """Draw one line a rank, one column a tick; for timelines of the clock that counts in ticks.

    Lines of more than `width` characters go on below, from the tick that is said there.
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
    return Picture.of([panel], lines, colour, style)


def to_scale(panels: Sequence[Panel], width: int = 120, colour: bool | None = None, style: Style = PLAIN) -> Picture:
    """Draw time to the right, a line for each lane, all panels under one axis; dots are idle time.

    A second has as many characters as the shortest op needs for its name, fewer where that is wider than `width`; then
    the names of a kind without room for all of them shrink to its letter, and at last a character stands for whatever
    fills most of it; a last line says so.
    """
    start, end = (max((getattr(panel, word) for panel in panels), default=0.0) for word in ("start", "end"))
    margin = max((len(_head(panel, rank)) for panel in panels for rank in range(panel.ranks)), default=0) + 2
    events = [event for panel in panels for event in panel.events if event.end > event.start]
    bars = [event for event in events if lane_of(event.op) == "main"]
    wanted = max(((len(op.cell) + 1) / (until - since) for op, since, until in bars), default=1.0)
    scale = min(wanted, (width - margin) / (end - start)) if end > start else 1.0
    short = {op.kind for op, since, until in bars if (until - since) * scale < (len(op.cell) + 1) * (1 - 1e-9)}
    lines: list[tuple[Panel, list[Piece]]] = []
    for panel in panels:
        if panel.name or len(panels) > 1:
            heading = f"{panel.name}: {panel.facts}" if style.figures else panel.name
            lines.extend((panel, [(line, None)]) for line in textwrap.wrap(heading, width))
        for rank in range(panel.ranks):
            for lane in LANES:
                if lane == "main" or (rank, lane) in panel.lanes:
                    head = _head(panel, rank) if lane == "main" else f"{lane} ".rjust(len(_head(panel, rank)))
                    lines.append((panel, [(head + "| ", None), *_lane(panel, (rank, lane), scale, short)]))
    lines.append((panels[-1], [(_axis(start, end, scale, margin, width), None)]))
    if short:
        drawn = {part.kind for op, _, _ in bars for part in op.parts or (op,)}
        kinds = [f"{kind} {word}" for kind, word in WORDS.items() if kind in drawn]
        unit = f"{float(f'{1 / scale:.3g}'):g} second"
        key = f"{', '.join(kinds)}, - goes on, . idle; a character is {unit}{'s' * (unit != '1 second')}"
        lines.extend((panels[-1], [(line, None)]) for line in textwrap.wrap(key, width))
    return Picture.of(panels, lines, colour, style)


def _lane(panel: Panel, lane: tuple[int, str], scale: float, short: set[str]) -> list[Piece]:
    columns = round((panel.end - panel.start) * scale)
    busy = [0.0] * columns
    most: list[tuple[float, Op | None]] = [(0.0, None)] * columns
    for op, *times in panel.lanes.get(lane, ()):
        start, until = ((time - panel.start) * scale for time in times)
        for column in range(max(0, int(start)), min(columns, int(until) + 1)):
            share = min(until, column + 1) - max(start, column)
            busy[column] += share
            if share > most[column][0] + 1e-9:
                most[column] = share, op
    ops = [op if share >= 0.5 else None for share, (_, op) in zip(busy, most, strict=True)]
    pieces: list[Piece] = []
    for op, group in groupby(ops):
        room = len([*group])
        pieces += [("." * room, None)] if op is None else _named(op, room, op.kind in short)
    return pieces


def _named(op: Op, room: int, short: bool) -> list[Piece]:
    """Write an op's name in its room; a blank at the end tells it from the next."""
    if room > len(op.cell) and not short:
        return [(op.cell.ljust(room - 1, "-"), op), (" ", None)]
    name = next(name for name in (op.cell, op.kind, op.kind[:1])[short:] if room >= len(name))
    return [(name.ljust(room, "-"), op)]


def _axis(start: float, end: float, scale: float, margin: int, width: int) -> str:
    time = clock(end)
    line = time.unit.rjust(margin - 1).ljust(margin)
    for tick in ticks(start * time.per_second, end * time.per_second, max(1, round((end - start) * scale) // 6)):
        at = margin + round((tick / time.per_second - start) * scale)
        if at >= len(line) and at + len(f"{tick:g}") <= width:
            line = f"{line.ljust(at)}{tick:g} "
    return line


def _head(panel: Panel, rank: int) -> str:
    if panel.rank_names is not None:
        return f"{panel.rank_name(rank):{max(map(len, panel.rank_names))}} "
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
