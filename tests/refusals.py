"""Refusals written like doctests: a call, and indented below it the error that it raises."""

from collections.abc import Callable
from typing import Any

import pytest

ERRORS = ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, OSError, AssertionError


def refusals(names: dict[str, Any], text: str) -> Callable[[str, str], None]:
    """Return a test with a case per call: it raises an error of the class whose message contains the sentence.

    Calls are evaluated with the names of the file. Long calls and errors continue on the next line; # starts a comment.
    """
    lines = [line for line in text.strip().splitlines() if not line.startswith("#")]
    cases: list[tuple[str, str]] = []
    for number, line in enumerate(lines):
        call, error = cases.pop() if number and (line[0] == " " or lines[number - 1][0] != " ") else ("", "")
        cases.append((call, in_a_line(f"{error} {line}")) if line[0] == " " else (in_a_line(f"{call} {line}"), ""))

    @pytest.mark.parametrize(("call", "error"), cases, ids=[call for call, _ in cases])
    def test(call: str, error: str) -> None:
        error_name, _, sentence = error.partition(": ")
        with pytest.raises(ERRORS) as error_info:
            eval(call, names)
        assert error_name in [base.__name__ for base in type(error_info.value).__mro__]
        assert sentence in in_a_line(str(error_info.value))

    return test


def in_a_line(text: str) -> str:
    return " ".join(text.split())
