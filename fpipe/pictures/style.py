"""Style of pictures: colours of kinds and roles, and the options of `fpipe.Style`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import inf
from typing import Any, Literal

from fpipe.limits import checked_init
from fpipe.pictures.drawn_shapes import PIXEL
from fpipe.program import Op, kind_of
from fpipe.timing.memory import HOLDERS

# Colours of kinds as in the zero-bubble papers, and distinct to the colour-blind too.
#
# F is blue, I cyan, W green and B, which is both, lies between. In CIELAB any two of F, B, I, W and R are at least 25
# apart to most eyes and at least 20 to each kind of colour-blind ones. A second direction or chunk is lighter.

FILLS = {
    "F": "#2a66be",
    "B": "#14a08c",
    "I": "#7edbea",
    "W": "#b5cf3c",
    "R": "#cf4a1c",
    **dict.fromkeys(("SEND", "RECV", "OFFLOAD", "REDUCE", "SCATTER"), "#c58ad6"),
    "LOAD": "#7d4ba6",
}
OTHER_FILL = "#59616e"
KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recompute",
    "UPDATE": "optimizer",
}

ROLES = {
    "paper": ("#ffffff", "#0f1419"),
    "ink": ("#1c2128", "#e6edf3"),
    "faint": ("#646d78", "#9aa5b1"),
    "rule": ("#e4e7eb", "#2a313a"),
    "wait": ("#eef0f3", "#1e252d"),
    "hatch": ("#d3d8de", "#36404b"),
    "held": ("#cdd9ee", "#2b3f61"),
    "weights": ("#c3b1de", "#57447a"),
    "optimizer": ("#ecd096", "#75602c"),
    "gradients": ("#c5dd9d", "#4c662c"),
    "passing": ("#9fd8cf", "#22645c"),
    "curve": ("#5b7fb8", "#7ea6e0"),
    "arrow": ("#4d5663", "#aeb8c4"),
    "differs": ("#d01f3c", "#ff6b7d"),
}
"""Colours of all but ops, by their role: on light paper, on dark paper."""
HOLDER_ROLES = {name: name for name in HOLDERS} | {"residuals": "held", "in flight": "passing"}
"""The role of each holder of memory."""


@cache
def lighten(colour: str, shade: float = 0.0) -> str:
    """Lighten a colour: not at all at shade 0, 40 % towards white at shade 1."""
    channels = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * 0.4 * shade):02x}" for part in channels)


@cache
def ink_on(paper: str) -> str:
    """Return black or white, whichever reads better on a colour."""
    # The relative luminance of sRGB (Rec. 709 weights), with 2.2 for its gamma.
    red, green, blue = ((int(paper[index : index + 2], 16) / 255) ** 2.2 for index in (1, 3, 5))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.3 else "#10151b"


def on_terminal(kind: str, shade: float, text: str) -> str:
    """Write a text on the colour of a kind, for a terminal with 256 colours."""
    paper = lighten(FILLS.get(kind, OTHER_FILL), shade)
    return f"\x1b[38;5;{_nearest_of_256(ink_on(paper))};48;5;{_nearest_of_256(paper)}m{text}\x1b[0m"


_LEVELS = (0, 95, 135, 175, 215, 255)


def _nearest_of_256(colour: str) -> int:
    """Return the number of the nearest colour in the 6 x 6 x 6 cube of a terminal, which starts at 16."""
    channels = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    red, green, blue = (min(range(6), key=lambda level: abs(_LEVELS[level] - part)) for part in channels)
    return 16 + 36 * red + 6 * green + blue


@checked_init
@dataclass(frozen=True, kw_only=True)
class Style:
    """Options of `fpipe.plot` on size, labels, colours and parts, to be set once for all pictures of a paper.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(2))(fpipe.program(2))
    >>> print(fpipe.plot(program, style=fpipe.Style(window=(3, 9), ranks=["first", "last"])))
    first | 0F3 ............0B0----
    last  | 1F2 1F3 1B0---- 1B1----
                4       6       8
    >>> paper = fpipe.Style(width_mm=84, font_pt=7, labels="microbatch", memory=False)  # for file="gpipe.pdf"

    Args:
        width_mm: width on paper, in millimetres; of SVG, PNG (at 300 dots an inch) and PDF.
        font_pt: size of the names of ranks, in points; other words and all distances go with it. 9 by default.
        labels: of ops. "all": whole names, of kinds most of whose boxes have room for them, else microbatches;
            "microbatch": only these; "none". Every box that can hold its microbatch, in digits of three quarters of
            the size, does; runs of others have one label.
        memory: what each rank holds.
        waits: hatched idle times.
        arrows: transfers, each an arrow; None, the default: where there is room for all of them.
        figures: makespan, span, bubble and peak in the heading.
        legend: what the colours are.
        critical_path: outline the ops and transfers that make the step as long as it is, `Timeline.critical_path`.
        differences: how many ops to outline and name whose seconds differ most from those in the first timeline.
        window: (start, end) in seconds: what overlaps it is drawn. Figures stay those of the whole.
        colours: by kind, such as {"F": "#2a66be"}, or a function of the op; by default those of the papers.
        ranks: their names, one for each.

    Raises:
        ValueError: a value of another kind than said here.
    """

    width_mm: float | None = None
    font_pt: float | None = None
    labels: Literal["all", "microbatch", "none"] = "all"
    memory: bool = True
    waits: bool = True
    arrows: bool | None = None
    figures: bool = True
    legend: bool = True
    critical_path: bool = False
    differences: int = 0
    window: tuple[float, float] | None = None
    colours: Mapping[str, str] | Callable[[Op], str] = field(default_factory=dict[str, str])
    ranks: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for option in ("width_mm", "font_pt"):
            size = getattr(self, option)
            if size is not None and not 0 < size < inf:
                raise ValueError(f"{option}= is a positive number; found {size!r}.")
        if self.differences < 0:
            raise ValueError(f"differences= is a number of ops; found {self.differences!r}.")
        if self.window is not None and not 0 <= self.window[0] < self.window[1] < inf:
            raise ValueError(f"window= is (start, end) in seconds, 0 <= start < end; found {self.window!r}.")
        if isinstance(self.colours, Mapping):
            for kind, colour in self.colours.items():
                kind_of(kind)
                _checked_colour(colour, kind)

    @property
    def unit(self) -> float:
        """Inches of a pixel of the picture; names of ranks are 12 pixels high."""
        return PIXEL if self.font_pt is None else self.font_pt / 12 / 72

    def colour_of(self, op: Op, shade: float = 0.0) -> str:
        """Return the colour of an op; shade 0 is the first direction or chunk, 1 the last and lightest."""
        if callable(self.colours):
            return _checked_colour(self.colours(op), op.cell)
        return self.colour_of_kind(op.kind, shade)

    def colour_of_kind(self, kind: str, shade: float = 0.0) -> str:
        """Return the colour of a kind."""
        colours = self.colours if isinstance(self.colours, Mapping) else {}
        return lighten(colours.get(kind, FILLS.get(kind, OTHER_FILL)), shade)

    def refuse_others(self, form: str, *accepted: str) -> None:
        """Raise a ValueError if an option is set that a form of picture does not take."""
        for option in (option.name for option in fields(self)):
            if option not in accepted and getattr(self, option) != getattr(PLAIN, option):
                hint = "The others are for .svg, .png, .pdf and ax=."
                raise ValueError(f"{form} has no {option}=; of a style it takes {', '.join(accepted)}. {hint}")


SWITCHES = ("memory", "waits", "arrows", "figures", "legend", "critical_path")
"""Parts of a picture that may be drawn or not."""


def _checked_colour(colour: Any, subject: str) -> str:
    if not isinstance(colour, str) or not re.fullmatch("#[0-9a-fA-F]{6}", colour):
        raise ValueError(f"a colour is written as '#2a66be'; found {colour!r} for {subject}.")
    return colour


PLAIN = Style()
"""The default style."""
