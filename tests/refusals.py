"""Refusals written as a doctest writes them: a call, and indented below it the error that it ends in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ERRORS = ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, OSError, AssertionError


def refusals(names: dict[str, Any], text: str) -> Callable[[str, str], None]:
    """A test with a case for each call of a text: it raises an error of that class, and its message has the sentence.

    Calls know the names of the file. What is long goes on in the next line; a line that starts with # tells a story.
    """
    lines = [line for line in text.strip().splitlines() if not line.startswith("#")]
    cases: list[tuple[str, str]] = []
    for number, line in enumerate(lines):
        call, error = cases.pop() if number and (line[0] == " " or lines[number - 1][0] != " ") else ("", "")
        cases.append((call, in_a_line(f"{error} {line}")) if line[0] == " " else (in_a_line(f"{call} {line}"), ""))

    @pytest.mark.parametrize(("call", "error"), cases, ids=[call for call, _ in cases])
    def test(call: str, error: str) -> None:
        kind, _, sentence = error.partition(": ")
        with pytest.raises(ERRORS) as told:
            eval(call, names)
        assert kind in [base.__name__ for base in type(told.value).__mro__]
        assert sentence in in_a_line(str(told.value))

    return test


def in_a_line(text: str) -> str:
    return " ".join(text.split())
