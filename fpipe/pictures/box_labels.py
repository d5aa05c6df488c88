"""Label the boxes of ops: every box that can hold its microbatch has it, and runs of the others have one label.

For each kind it is decided once in a picture whether boxes show whole names, and how large: so that boxes of one kind
look alike. A box without room for that has its microbatch in small digits; where even these do not fit, a run of
microbatches has one label, F0-15, over their boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from fpipe.pictures.drawn_shapes import EDGE, Drawing, Line, Rect, Shape, Text
from fpipe.pictures.panel import Bar, Panel
from fpipe.pictures.style import WORDS, Style
from fpipe.program import Op

GLYPH = 0.62
"""Mean width of a character in units of its size, on the safe side for the fonts that a browser takes."""
SIZES = ((1.0, 0.45), (0.75, 0.2))
"""Words may be a quarter smaller, and closer to the sides of their box, before they are left out."""
LEAST = 6.0
"""The size of words in a box that is just high enough for any."""


def needs(name: str, size: float, margin: float = 0.45) -> float:
    """The width of a box for a name and its margin, which is in units of its size."""
    return len(name) * size * GLYPH + size * margin


def size_in(height: float) -> float:
    """The size of words in a box."""
    return min(11.0, height * 0.72)


def first_that_fits(
    names: Sequence[str], size: float, width: float, sizes: Sequence[tuple[float, float]] = SIZES
) -> tuple[str, float] | None:
    """The first name that a box has room for, and its size; only the last name is made smaller."""
    for scale, margin in sizes:
        for name in names if scale == 1 else names[-1:]:
            if size * scale >= LEAST and needs(name, size * scale, margin) <= width:
                return name, size * scale
    return None


def names_of(op: Op, lane: str, style: Style) -> list[str]:
    """Candidate labels of an op's box, the longest first: 2F0.1, or which microbatch; of a copy at least O or L."""
    short = op.cell.removeprefix(f"{op.stage}{op.kind}")
    if style.labels == "none":
        return []
    if lane != "main":
        return [op.cell, op.kind, op.kind[:1]] if style.labels == "all" else [op.kind, op.kind[:1]]
    if op.microbatch is None:
        return [op.cell]
    return [op.cell, short] if style.labels == "all" else [short]


class Labels:
    """The labels of a panel: `scale` in pixels a second, `height` of a lane in pixels."""

    def __init__(self, panel: Panel, style: Style, scale: float, height: float) -> None:
        self.style = style
        self.forms: dict[tuple[str, str], int | None] = {}  # which of their names most boxes of a kind have room for
        bars_by_kind: dict[tuple[str, str], list[Bar]] = defaultdict(list)
        for (_, lane), bars in panel.bars.items():
            for bar in bars:
                bars_by_kind[bar.op.kind, lane].append(bar)
        for (kind, lane), bars in bars_by_kind.items():
            lengths = sorted(bar.end - bar.start for bar in bars)
            width = lengths[len(lengths) // 2] * scale
            columns = zip(*(names_of(bar.op, lane, style) for bar in bars), strict=False)
            longest = (max(map(len, names)) for names in columns)
            fitting = (form for form, n in enumerate(longest) if needs("0" * n, size_in(height)) <= width)
            self.forms[kind, lane] = next(fitting, None)

    def label(self, bar: Bar, lane: str, width: float, depth: float) -> tuple[str, float] | None:
        """The label of a box and its size; None if it has no room."""
        form, names = self.forms[bar.op.kind, lane], names_of(bar.op, lane, self.style)
        if size_in(depth) < LEAST:
            return None
        return first_that_fits(names[form or 0 :], size_in(depth), width, SIZES[form is None :])

    def runs(self, bars: Iterable[Bar]) -> Iterator[tuple[list[Bar], list[str]]]:
        """Join unlabelled bars to runs of microbatches one right after the other, each with names for it."""
        if self.style.labels == "none":
            return
        run: list[Bar] = []
        for bar in (*bars, None):
            if run and (bar is None or not _follows(run[-1], bar)):
                if len(run) > 1:
                    op, span = run[0].op, f"{run[0].op.microbatch}-{run[-1].op.microbatch}"
                    full = [f"{op.stage}{op.kind}{span}", f"{op.kind}{span}"]
                    yield run, [*full, span] if self.style.labels == "all" else [span]
                run = []
            if bar is not None:
                run.append(bar)


def _follows(before: Bar, bar: Bar) -> bool:
    """Whether a bar is the next microbatch of the same stage and kind, right after the bar before."""
    places = [(one.op.kind, one.op.stage, one.op.slice, one.top, one.depth) for one in (before, bar)]
    is_next = before.op.microbatch is not None and bar.op.microbatch == before.op.microbatch + 1
    return places[0] == places[1] and is_next and abs(bar.start - before.end) <= 1e-9 * max(1.0, bar.start)


def legend(drawing: Drawing, panels: Sequence[Panel], style: Style, arrows: bool, y: float) -> float:
    """Write swatches of colours and signs with a word for each below y; return where the legend ends."""
    kinds = {bar.op.kind for panel in panels for bars in panel.bars.values() for bar in bars}
    kinds |= {"SEND" for panel in panels if panel.sending}
    entries: list[tuple[list[str], str]] = []
    if not callable(style.colours):
        entries += [([style.of_kind(kind)], f"{kind} {word}") for kind, word in WORDS.items() if kind in kinds]
        kinds_by_colour: dict[str, list[str]] = defaultdict(list)
        for kind in sorted(kinds - WORDS.keys()):
            kinds_by_colour[style.of_kind(kind)].append(kind)
        entries += [([paint], " ".join(names)) for paint, names in kinds_by_colour.items()]
        shown = "F" if "F" in kinds else min(kinds, default="")
        ladders = sorted((panel.shading[0], [*panel.shading[1].values()]) for panel in panels)
        for word, shades in dict(ladders).items():  # of each word the last, which is the longest
            if shown and len(shades) > 1:
                entries.append(([style.of_kind(shown, shade) for shade in shades], _LIGHTER[word]))
    if style.waits and any(panel.waits for panel in panels):
        entries.append((["hatched"], "waits, and for whom" if style.labels == "all" else "waits"))
    if arrows and any(panel.transfers for panel in panels):
        entries.append((["transfer"], "transfer"))
    if style.critical_path and any(panel.path for panel in panels):
        entries.append((["critical"], "critical path"))
    return swatches(drawing, entries, y) if entries else y


def swatches(drawing: Drawing, entries: Sequence[tuple[Sequence[str], str]], y: float) -> float:
    """Write colours, or signs, and the words for them, in as many lines as it takes; return where they end."""
    x = drawing.left
    for paints, words in entries:
        room = 12 * len(paints) + 6 + GLYPH * 11 * len(words) + 14
        if x > drawing.left and x + room > drawing.width - EDGE:
            x, y = drawing.left, y + 18
        for number, paint in enumerate(paints):
            drawing.still.append(_swatch(x + 12 * number, y + 2, paint))
        drawing.still.append(Text(x + 12 * len(paints) + 6, y + 11, words, "faint", 11))
        x += room
    return y + 16


_LIGHTER = {"chunk": "first to last chunk of a rank", "direction": "first and second direction"}


def _swatch(x: float, y: float, paint: str) -> Shape:
    if paint == "transfer":
        return Line(((x, y), (x + 12, y + 10)), "faint", 1.2, arrow=True)
    return outline(x, y, 12, 10) if paint == "critical" else Rect(x, y, 12, 10, paint)


def outline(x: float, y: float, width: float, height: float, title: str = "") -> Line:
    """The mark of the critical path: a frame within the edges of a box."""
    left, top, right, bottom = x + 1, y + 1, x + max(width, 2) - 1, y + height - 1
    corners = ((left, top), (right, top), (right, bottom), (left, bottom), (left, top), (right, top))
    return Line(corners, "ink", max(0.5, min(2.0, width / 5)), title=title)
