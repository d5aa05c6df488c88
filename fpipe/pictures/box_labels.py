"""Label the boxes of ops: with their microbatch where it fits, and runs of narrow boxes with one label.

For each kind it is decided once in a picture whether boxes show whole names, and how large: so that boxes of one kind
look alike. A box without room for that has its microbatch in small digits; where even these do not fit, a run of
microbatches has one label, F0-15, over their boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from fpipe.pictures.drawn_shapes import EDGE, Drawing, Line, Rect, Shape, Text
from fpipe.pictures.panel import Bar, Panel
from fpipe.pictures.style import HOLDER_ROLES, KIND_NAMES, Style
from fpipe.program import Op

GLYPH = 0.62
"""Mean width of a character in units of its size; browsers choose the font, so this is on the safe side."""
SIZES = ((1.0, 0.45), (0.75, 0.2))
"""(scale, margin) of labels that are tried: before one is left out, it may be smaller and closer to the sides."""
MIN_SIZE = 6.0
"""The least size of a label, in pixels."""


def width_needed(text: str, size: float, margin: float = 0.45) -> float:
    """Return the width of a box for a label with its margin, which is in units of its size."""
    return len(text) * size * GLYPH + size * margin


def text_size(height: float) -> float:
    """Return the size of labels in a box of this height."""
    return min(11.0, height * 0.72)


def fitting_label(
    names: Sequence[str], size: float, width: float, sizes: Sequence[tuple[float, float]] = SIZES
) -> tuple[str, float] | None:
    """Return the first name that a box has room for, and its size; only the last name is made smaller."""
    for scale, margin in sizes:
        for name in names if scale == 1 else names[-1:]:
            if size * scale >= MIN_SIZE and width_needed(name, size * scale, margin) <= width:
                return name, size * scale
    return None


def label_candidates(op: Op, lane: str, style: Style) -> list[str]:
    """Return candidate labels of an op's box, the longest first."""
    # 2F0.1 shortens to its microbatch, 0.1; a copy or collective is no cell of a table, and shortens to O, L, ..
    short = op.cell.removeprefix(f"{op.stage}{op.kind}")
    if style.labels == "none":
        return []
    if lane != "main":
        return [op.cell, op.kind, op.kind[:1]] if style.labels == "all" else [op.kind, op.kind[:1]]
    if op.microbatch is None:
        return [op.cell]
    return [op.cell, short] if style.labels == "all" else [short]


class BoxLabels:
    """Labels of the boxes of a panel; `scale` is in pixels a second, `height` the pixels of a lane."""

    def __init__(self, panel: Panel, style: Style, scale: float, height: float) -> None:
        self.style = style
        # Boxes of a kind look alike: decided box by box, of 64 microbatches 0 to 9 had labels and the others none.
        # So a form, the index of a candidate, is chosen for each kind and lane: the longest for which the box of median
        # length has room; None if even the shortest does not fit there.
        self.form_by_kind: dict[tuple[str, str], int | None] = {}
        bars_by_kind: dict[tuple[str, str], list[Bar]] = defaultdict(list)
        for (_, lane), bars in panel.bars.items():
            for bar in bars:
                bars_by_kind[bar.op.kind, lane].append(bar)
        for (kind, lane), bars in bars_by_kind.items():
            lengths = sorted(bar.end - bar.start for bar in bars)
            width = lengths[len(lengths) // 2] * scale
            name_columns = zip(*(label_candidates(bar.op, lane, style) for bar in bars), strict=False)
            longest = (max(map(len, names)) for names in name_columns)
            fits = (width_needed("0" * length, text_size(height)) <= width for length in longest)
            self.form_by_kind[kind, lane] = next((form for form, has_room in enumerate(fits) if has_room), None)

    def label_of(self, bar: Bar, lane: str, width: float, depth: float) -> tuple[str, float] | None:
        """Return the label of a box and its size; None if it has no room."""
        form, names = self.form_by_kind[bar.op.kind, lane], label_candidates(bar.op, lane, self.style)
        if text_size(depth) < MIN_SIZE:
            return None
        return fitting_label(names[form or 0 :], text_size(depth), width, SIZES[form is None :])

    def unlabelled_runs(self, bars: Iterable[Bar]) -> Iterator[tuple[list[Bar], list[str]]]:
        """Yield runs of bars whose microbatches follow each other without a gap, with candidate labels of each run."""
        if self.style.labels == "none":
            return
        run: list[Bar] = []
        for bar in (*bars, None):  # None ends the last run
            if run and (bar is None or not _continues_run(run[-1], bar)):
                if len(run) > 1:
                    op, span = run[0].op, f"{run[0].op.microbatch}-{run[-1].op.microbatch}"
                    full = [f"{op.stage}{op.kind}{span}", f"{op.kind}{span}"]
                    yield run, [*full, span] if self.style.labels == "all" else [span]
                run = []
            if bar is not None:
                run.append(bar)


def _continues_run(previous: Bar, bar: Bar) -> bool:
    """Whether a bar is the next microbatch of the same stage and kind, right after the bar before."""
    traits = [(box.op.kind, box.op.stage, box.op.slice, box.top, box.depth) for box in (previous, bar)]
    is_next = previous.op.microbatch is not None and bar.op.microbatch == previous.op.microbatch + 1
    return traits[0] == traits[1] and is_next and abs(bar.start - previous.end) <= 1e-9 * max(1.0, bar.start)


def draw_legend(drawing: Drawing, panels: Sequence[Panel], style: Style, has_arrows: bool, y: float) -> float:
    """Draw swatches of colours and signs with a word for each, below y; return where the legend ends."""
    kinds = {bar.op.kind for panel in panels for bars in panel.bars.values() for bar in bars}
    kinds |= {"SEND" for panel in panels if panel.blocking_transfers}
    rows: list[tuple[list[str], str]] = []
    if not callable(style.colours):
        rows += [([style.colour_of_kind(kind)], f"{kind} {name}") for kind, name in KIND_NAMES.items() if kind in kinds]
        kinds_by_colour: dict[str, list[str]] = defaultdict(list)
        for kind in sorted(kinds - KIND_NAMES.keys()):
            kinds_by_colour[style.colour_of_kind(kind)].append(kind)
        rows += [([paint], " ".join(names)) for paint, names in kinds_by_colour.items()]
        sample = "F" if "F" in kinds else min(kinds, default="")
        shadings = sorted((panel.shading[0], [*panel.shading[1].values()]) for panel in panels)
        for shading, shades in dict(shadings).items():  # of each word the last, which is the longest
            if sample and len(shades) > 1:
                rows.append(([style.colour_of_kind(sample, shade) for shade in shades], _LEGEND_BY_SHADING[shading]))
    if style.waits and any(panel.waits for panel in panels):
        rows.append((["hatched"], "waits, and for whom" if style.labels == "all" else "waits"))
    if has_arrows and any(panel.transfers for panel in panels):
        rows.append((["transfer"], "transfer"))
    if style.critical_path and any(panel.path for panel in panels):
        rows.append((["critical"], "critical path"))
    if any(panel.differences for panel in panels):
        rows.append((["differs"], "differs most"))
    if style.memory:
        held_in_bytes = {holder for panel in panels if panel.timeline.in_bytes for holder in panel.holders}
        rows += [([role], holder) for holder, role in HOLDER_ROLES.items() if holder in held_in_bytes]
    return draw_swatches(drawing, rows, y) if rows else y


def draw_swatches(drawing: Drawing, rows: Sequence[tuple[Sequence[str], str]], y: float) -> float:
    """Draw rows of (colours or signs, caption), in as many lines as needed; return where they end."""
    x = drawing.left
    for paints, caption in rows:
        # 12 pixels for each swatch, the caption in letters of 11, and gaps of 6 and 14.
        room = 12 * len(paints) + 6 + GLYPH * 11 * len(caption) + 14
        if x > drawing.left and x + room > drawing.width - EDGE:
            x, y = drawing.left, y + 18
        for index, paint in enumerate(paints):
            drawing.fixed.append(_swatch(x + 12 * index, y + 2, paint))
        drawing.fixed.append(Text(x + 12 * len(paints) + 6, y + 11, caption, "faint", 11))
        x += room
    return y + 16


_LEGEND_BY_SHADING = {"chunk": "first to last chunk of a rank", "direction": "first and second direction"}


def _swatch(x: float, y: float, paint: str) -> Shape:
    if paint == "transfer":
        return Line(((x, y), (x + 12, y + 10)), "faint", 1.2, arrow=True)
    if paint in ("critical", "differs"):
        return path_frame(x, y, 12, 10)._replace(paint="ink" if paint == "critical" else paint)
    return Rect(x, y, 12, 10, paint)


def path_frame(x: float, y: float, width: float, height: float, title: str = "") -> Line:
    """Return the mark of an op, such as of the critical path: a frame inside the edges of its box."""
    # The stroke goes on over the first side, so that its first corner is joined too.
    left, top, right, bottom = x + 1, y + 1, x + max(width, 2) - 1, y + height - 1
    corners = ((left, top), (right, top), (right, bottom), (left, bottom), (left, top), (right, top))
    return Line(corners, "ink", max(0.5, min(2.0, width / 5)), title=title)
