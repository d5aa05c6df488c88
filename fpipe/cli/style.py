"""Read a style as it is typed: width_mm=84,labels=none,memory=no,window=0/20,F=#2a66be."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from fpipe.pictures.style import SWITCHES, Style
from fpipe.program import KINDS

WORDS = tuple(each.name for each in fields(Style) if each.name != "colours")


def parse(text: str) -> Style:
    """Read a list of what a style has; the name of a kind gives it a colour.

    >>> style = parse("width_mm=84,labels=none,memory=no,window=0/20,ranks=a/b,F=#2a66be")
    >>> style.width_mm, style.labels, style.memory, style.window, style.ranks, style.colours
    (84.0, 'none', False, (0.0, 20.0), ['a', 'b'], {'F': '#2a66be'})
    """
    found: dict[str, Any] = {}
    colours: dict[str, str] = {}
    for part in text.split(","):
        word, _, said = part.strip().partition("=")
        if word in KINDS:
            colours[word] = said
        elif word in WORDS:
            found[word] = _value(word, said)
        else:
            close = difflib.get_close_matches(word, WORDS, 1)
            meant = f"did you mean {close[0]}?" if close else f"known: {', '.join(WORDS)}."
            raise ValueError(f"a style has no {word!r}; {meant} Colours are said by kind: F=#2a66be.")
    return Style(**found, colours=colours)


def _value(word: str, said: str) -> Any:
    if word in SWITCHES:
        if said not in ("yes", "no"):
            raise ValueError(f"{word}= is yes or no, found {said!r}.")
        return said == "yes"
    if word == "labels":
        return said
    if word == "ranks":
        return said.split("/")
    try:
        numbers = tuple(map(float, said.split("/")))
    except ValueError:
        raise ValueError(f"{word}= is {'start/end' if word == 'window' else 'a number'}, found {said!r}.") from None
    return numbers if word == "window" else numbers[0]
