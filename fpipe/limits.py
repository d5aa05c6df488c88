"""Limits of what is read: how long a word, how deep a nesting, how large a number a text or an argument may have.

A program, a table or an option may come from elsewhere. What is over a limit is refused in one sentence before anything
is made of it, so that no text takes all memory, all time or the whole stack of its reader.
"""

from __future__ import annotations

import ast
import warnings
from typing import TextIO

LONGEST_TEXT = 2**28  # characters of a file: a program of a million ops has 10**8
LONGEST_WORD = 1_000  # characters between spaces and commas: a cell, a value, a literal
LARGEST_SIZE = 20_000  # ranks, stages, microbatches, slices: each alone makes a program that is slow to print
MOST_OPS_OF_A_SHARE = 500  # of one kind, into which a schedule by name cuts a rank's share of a microbatch
MOST_OPS = 10_000_000  # of a program that is split; a million take 11 s and 1.3 GiB
MOST_PARTS = 16  # of a PAIR; hardware overlaps two
LARGEST_NUMBER = 2**64  # in a literal, of seconds or of bytes


def whole(word: str, found: object, *, least: int = 1, most: float = LARGEST_SIZE) -> int:
    """A whole number within limits.

    >>> whole("ranks", 10**8)
    Traceback (most recent call last):
    ValueError: ranks is a whole number, at most 20000; found 100000000.
    """
    if type(found) is not int or found < least:
        raise ValueError(f"{word} is a whole number, at least {least}; found {found!r}.")
    if found > most:
        raise ValueError(f"{word} is a whole number, at most {most}; found {shortened(repr(found), 30)}.")
    return found


def refuse_too_many_ops(forwards: int, microbatches: int) -> None:
    """Raise ValueError if forwards and backwards alone are more than the ops of a program, before any is made."""
    ops = 2 * forwards
    if ops * whole("microbatches", microbatches) > MOST_OPS:
        raise ValueError(f"{microbatches} microbatches of {ops} ops are more than the {MOST_OPS} ops of a program.")


def read_text(stream: TextIO, name: str) -> str:
    """Read a text to its end, which a device may not have.

    >>> import io
    >>> read_text(io.StringIO("0F0 0B0"), "table.txt")
    '0F0 0B0'
    """
    text = stream.read(LONGEST_TEXT + 1)
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"{name} has more than {LONGEST_TEXT} characters, which no program or table needs.")
    return text


def shortened(text: str, most: int = 200) -> str:
    """The beginning of a text, as errors quote it."""
    return text if len(text) <= most else f"{text[:most]}..."


def expression(text: str) -> ast.expr:
    """Parse a Python expression, whatever stands in the text.

    >>> ast.unparse(expression("{'dim': 1}"))
    "{'dim': 1}"
    >>> expression("(" * 1000)
    Traceback (most recent call last):
    ValueError: '((((((((((((((((((((...' is no Python literal, or nests too deeply.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            found = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two are the parser's own limits
        raise ValueError(f"{shortened(text, 20)!r} is no Python literal, or nests too deeply.") from None
    for node in ast.walk(found):
        number = node.value if isinstance(node, ast.Constant) else 0
        if isinstance(number, int | float | complex) and not abs(number) < LARGEST_NUMBER:
            raise ValueError(f"a number in {shortened(text)!r} is beyond {LARGEST_NUMBER:.3g}.")
    return found
