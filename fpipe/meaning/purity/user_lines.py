"""Find the line of the user's code in which an error was raised: not torch's, not Python's, and not this package's.

aten._local_scalar_dense.default        --> line_of -->        at net.py:12, in forward: if x.sum() > 0:
"""

from __future__ import annotations

import inspect
import linecache
import traceback
from functools import cache
from pathlib import Path

import torch

TORCH = Path(torch.__file__).parent
_OURS, _PYTHONS = Path(__file__).parents[2], Path(inspect.__file__).parent


@cache
def is_users(file: str) -> bool:
    """Whether a file is of the user's, or of a library's that the user has a net from: not torch's, not this package's,
    and not Python's or what it makes of strings."""
    path = Path(file)
    known = path.parent == _PYTHONS or path.is_relative_to(_OURS) or path.is_relative_to(TORCH)
    return not known and not file.startswith(("<string", "<frozen"))


def line_at(file: str, line: int | None, function: str) -> str:
    """A line of code and where it is, as errors quote it."""
    return f"at {Path(file).name}:{line}, in {function}: {linecache.getline(file, line or 0).strip()}"


def line_of(error: BaseException) -> str:
    """The innermost line of the user's code that an error was raised in, or one that it comes from; "" without."""
    inner = "" if error.__cause__ is None else line_of(error.__cause__)
    users = [one for one in traceback.extract_tb(error.__traceback__) if is_users(one.filename)]
    return inner or (line_at(users[-1].filename, users[-1].lineno, users[-1].name) if users else "")
