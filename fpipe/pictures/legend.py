"""The legend: below a picture, swatches of its colours and signs and a word for each."""

from __future__ import annotations

from collections.abc import Sequence

from fpipe.pictures.box_labels import GLYPH
from fpipe.pictures.colours import WORDS
from fpipe.pictures.drawn_shapes import EDGE, Drawing, Line, Rect, Shape, Text
from fpipe.pictures.panel import Panel
from fpipe.pictures.style import Style


def legend(drawing: Drawing, panels: Sequence[Panel], style: Style, arrows: bool, y: float) -> float:
    """Write the legend below y, in as many lines as it takes; returns where it ends."""
    found = {bar.op.kind for panel in panels for bars in panel.bars.values() for bar in bars}
    found |= {"SEND" for panel in panels if panel.sending}
    entries: list[tuple[list[str], str]] = []
    if not callable(style.colours):
        entries += [([style.of_kind(kind)], f"{kind} {word}") for kind, word in WORDS.items() if kind in found]
        by_colour: dict[str, list[str]] = {}
        for kind in sorted(found - WORDS.keys()):
            by_colour.setdefault(style.of_kind(kind), []).append(kind)
        entries += [([paint], " ".join(kinds)) for paint, kinds in by_colour.items()]
        shown = "F" if "F" in found else min(found, default="")
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
    """Write colours, or signs, and the words for them, in as many lines as it takes; returns where they end."""
    x = drawing.left
    for paints, words in entries:
        room = 12 * len(paints) + 6 + GLYPH * 11 * len(words) + 14
        if x > drawing.left and x + room > drawing.width - EDGE:
            x, y = drawing.left, y + 18
        for at, paint in enumerate(paints):
            drawing.still.append(_swatch(x + 12 * at, y + 2, paint))
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
