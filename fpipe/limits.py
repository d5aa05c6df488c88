"""Limits on the length, nesting and numbers of texts and arguments.

A program, a table or an option may come from an untrusted source. Whatever exceeds a limit is refused before anything
is built from it, so that no text takes all memory, all time or the whole stack of its reader.
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


def check_whole_number(name: str, number: object, *, minimum: int = 1, maximum: float = LARGEST_SIZE) -> int:
    """Return a whole number if it is within limits, else raise ValueError.

    >>> check_whole_number("ranks", 10**8)
    Traceback (most recent call last):
    ValueError: ranks is a whole number, at most 20000; found 100000000.
    """
    if type(number) is not int or number < minimum:
        raise ValueError(f"{name} is a whole number, at least {minimum}; found {number!r}.")
    if number > maximum:
        raise ValueError(f"{name} is a whole number, at most {maximum}; found {shortened(repr(number), 30)}.")
    return number


def refuse_too_many_ops(forwards: int, microbatches: int) -> None:
    """Raise ValueError if the forwards and backwards alone exceed the ops of a program, before any is made."""
    ops = 2 * forwards
    if ops * check_whole_number("microbatches", microbatches) > MOST_OPS:
        raise ValueError(f"{microbatches} microbatches of {ops} ops are more than the {MOST_OPS} ops of a program.")


def read_text(stream: TextIO, name: str) -> str:
    """Read a text up to the longest that is accepted; a device such as /dev/zero has no end.

    >>> import io
    >>> read_text(io.StringIO("0F0 0B0"), "table.txt")
    '0F0 0B0'
    """
    text = stream.read(LONGEST_TEXT + 1)
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"{name} has more than {LONGEST_TEXT} characters, which no program needs.")
    return text


def shortened(text: str, max_length: int = 200) -> str:
    """Return the beginning of a text, as errors quote it."""
    return text if len(text) <= max_length else f"{text[:max_length]}..."


def parse_expression(text: str) -> ast.expr:
    """Parse a Python expression from an untrusted text; nothing is evaluated.

    >>> ast.unparse(parse_expression("{'dim': 1}"))
    "{'dim': 1}"
    >>> parse_expression("(" * 1000)
    Traceback (most recent call last):
    ValueError: '((((((((((((((((((((...' is no Python literal, or nests too deeply.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two are the parser's own limits
        raise ValueError(f"{shortened(text, 20)!r} is no Python literal, or nests too deeply.") from None
    # 10**400 as an int would raise OverflowError wherever it meets a float; `not <` catches nan as well.
    for node in ast.walk(tree):
        number = node.value if isinstance(node, ast.Constant) else 0
        if isinstance(number, int | float | complex) and not abs(number) < LARGEST_NUMBER:
            raise ValueError(f"a number in {shortened(text)!r} is beyond {LARGEST_NUMBER:.3g}.")
    return tree
