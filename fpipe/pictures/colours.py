"""The colours of kinds: those of the zero-bubble papers, apart for the colour-blind too.

F is blue, I cyan, W green and B, which is both, lies between. In CIELAB any two of F, B, I, W and R are at least 25
apart to most eyes and at least 20 to each kind of colour-blind ones. A second direction or chunk is lighter.
"""

from __future__ import annotations

from functools import cache

FILLS = {
    "F": "#2a66be",
    "B": "#14a08c",
    "I": "#7edbea",
    "W": "#b5cf3c",
    "R": "#cf4a1c",
    **dict.fromkeys(("SEND", "RECV", "OFFLOAD", "REDUCE", "SCATTER"), "#c58ad6"),
    "LOAD": "#7d4ba6",
}
OTHER = "#59616e"
WORDS = {
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
    "curve": ("#5b7fb8", "#7ea6e0"),
    "arrow": ("#4d5663", "#aeb8c4"),
}
"""Everything but the ops, on light paper and on dark."""


@cache
def lighter(colour: str, shade: float = 0.0) -> str:
    """A colour as it is at shade 0, and 40 % nearer to white at shade 1."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * 0.4 * shade):02x}" for part in parts)


@cache
def ink_on(paper: str) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = ((int(paper[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.3 else "#10151b"


def terminal(kind: str, shade: float, text: str) -> str:
    """Text on the colour of a kind, for a terminal that knows 256 colours."""
    paper = lighter(FILLS.get(kind, OTHER), shade)
    return f"\x1b[38;5;{_of_256(ink_on(paper))};48;5;{_of_256(paper)}m{text}\x1b[0m"


_LEVELS = (0, 95, 135, 175, 215, 255)


def _of_256(colour: str) -> int:
    """The nearest of the 6 x 6 x 6 colours."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    red, green, blue = (min(range(6), key=lambda level: abs(_LEVELS[level] - part)) for part in parts)
    return 16 + 36 * red + 6 * green + blue
