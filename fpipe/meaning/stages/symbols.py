"""Say in words what a trace leaves open: it writes a number of rows as a symbol, such as s93.

(s93, 4)        -->        (rows, 4)
"""

from __future__ import annotations

import re

_OPEN = re.compile(r"\bs\d+\b")


def in_words(found: object) -> str:
    """A size, a shape or a condition on sizes as text, with the word for its symbols.

    >>> in_words("(2*s93, 4)")
    '(2*rows, 4)'
    """
    return _OPEN.sub("rows", str(found))


def symbols_in(text: str) -> set[str]:
    """The symbols that a text of torch's has.

    >>> symbols_in("The size of tensor a (s93) must match")
    {'s93'}
    """
    return set(_OPEN.findall(text))
