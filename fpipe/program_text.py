"""Read the text of a program: a line is an input, an op or an output, each of values.

g[0,3] = B[0,3] params[0] res[0,3] @ 1        -->        Op("B", 0, 3, None, 1, reads, writes)
"""

from __future__ import annotations

import ast
import re
from typing import Any

from fpipe.limits import LONGEST_WORD, expression, shortened
from fpipe.ops import Input, Op, Output, ProgramError, Value, kind_of, pair


def parsed(text: str) -> tuple[list[Input], list[Op], list[Output]]:
    """The inputs, ops and outputs of a program's text, one a line.

    Raises:
        ProgramError: a line that is none of them, with its number.
    """
    inputs: list[Input] = []
    ops: list[Op] = []
    outputs: list[Output] = []
    for number, line in enumerate(readable(text).splitlines(), 1):
        if not line.strip():
            continue
        try:
            what, at, where = line.rpartition(" @ ")
            homes = tuple(map(int, where.split(","))) if re.fullmatch(rf" *{_N}(,{_N})* *", where) else ()
            if not at or not homes:
                raise ProgramError("a line ends in ' @ ' and the ranks, as in 'params[0] @ 0'")
            left, equals, right = what.partition(" = ")
            if what.lstrip().startswith("{"):
                ops.append(_parse_pair(what.strip(), homes[0]))
            elif right.lstrip()[:1].isupper():
                ops.append(_parse_op(what, homes[0]))
            elif equals:
                outputs.append(Output(_parse_value(left), _parse_value(right), homes))
            else:
                inputs.append(Input(_parse_value(what), homes))
        except ProgramError as error:
            raise ProgramError(f"line {number}: {error}\n    {shortened(line)}") from None
    return inputs, ops, outputs


_N = r"(?:0|[1-9][0-9]{0,8})"
_PLACE = rf"(?:\[({_N})?(?:,(?=[0-9.])({_N})?(?:\.({_N}))?)?\])?"
_VALUE = re.compile(rf"([a-z_]+){_PLACE}(?::({_N}))?((?:@(?:{_N}|host)(?:\.{_N})?|>{_N}(?:\.{_N})?)*)")
_HEAD = re.compile(r"([A-Z]+)" + _PLACE)


def _place(*texts: str | None) -> tuple[int | None, int | None, int | None]:
    stage, microbatch, piece = (None if text is None else int(text) for text in texts)
    return stage, microbatch, piece


def _parse_value(text: str) -> Value:
    found = _VALUE.fullmatch(text.strip())
    if not found:
        raise ProgramError(
            f"{text.strip()!r} is not a value; a value reads like y[2,0], params[1]:1, res[0,3.1] or y[2,0]@1"
        )
    name, *place, port, at = found.groups()
    return Value(name, *_place(*place), int(port or 0), at)


def _parse_pair(text: str, rank: int) -> Op:
    if not text.endswith("}"):
        raise ProgramError("a PAIR reads { op ; op } @ rank")
    return pair(*(_parse_op(part, rank) for part in text[1:-1].split(" ; ")))


def _parse_op(text: str, rank: int) -> Op:
    text = text.strip()
    left, _, right = text.partition(" = ")
    right, has_how, how = right.partition(" {")
    head, *reads = right.split() or [text]
    found = _HEAD.fullmatch(head)
    if not found:
        raise ProgramError(f"{head!r} is not an op; an op reads like y[2,0] = F[2,0] params[2] y[1,0]")
    kind, *place = found.groups()
    kind_of(kind)
    read = tuple(map(_parse_value, reads))
    writes = () if left.strip() == "_" else tuple(map(_parse_value, left.split()))
    return Op(kind, *_place(*place), rank, read, writes, (), _parse_how(how.rstrip()) if has_how else ())


def _parse_how(text: str) -> tuple[tuple[str, Any], ...]:
    try:
        assert text.endswith("}")
        call = expression(f"how({text[:-1]})")
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        assert (call.end_col_offset, call.args) == (len(text.encode()) + 4, [])
        names = [word.arg for word in call.keywords]
        assert None not in names
        assert len(set(names)) == len(names)
        how = tuple((word.arg or "", ast.literal_eval(word.value)) for word in call.keywords)
        hash(how)
    except (ValueError, AssertionError, TypeError):
        raise ProgramError(
            f"{{{shortened(text)} is not a list of name=literal, each of a value that can be hashed"
        ) from None
    return how


def readable(text: str) -> str:
    """A text of which no word is over the limit: then errors may quote it."""
    for number, line in enumerate(text.splitlines(), 1):
        longest = max(line.replace(",", " ").split(), key=len, default="")
        if len(longest) > LONGEST_WORD:
            raise ProgramError(
                f"line {number}: {shortened(longest, 20)!r} is a word of {len(longest)} characters; the longest that "
                f"are read have {LONGEST_WORD}."
            )
    return text
