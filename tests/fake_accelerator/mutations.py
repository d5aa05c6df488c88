"""Take a call that waits out of fpipe's runtimes, one at a time: a test on the fake accelerator has to notice.

stream.wait_event(made)        --> without -->        None
"""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fpipe

WAITS = ("wait_event", "wait_stream", "record_stream", "synchronize")
UNSEEN = ("CombinedWork.wait", "ExchangeLane._wait_for_launched", "Replicas._free_finished")
"""Functions that wait for what gloo carries alone, for a loss behind an exchange, or to let go of memory."""
ROOT = Path(fpipe.__file__).parent


class Wait(NamedTuple):
    """A call that waits, or makes the allocator wait: in which file and function, which of its calls of that name."""

    file: str
    function: str
    call: str
    number: int

    @property
    def of_processes(self) -> bool:
        """Whether ranks in processes of their own wait there."""
        return Path(self.file).parent.name == "processes"


def waits() -> list[Wait]:
    """All of them in fpipe's runtimes; a call of a helper of the same file that has one is one, too."""
    found = list[Wait]()
    for path in sorted((ROOT / "runtimes").rglob("*.py")):
        whole = ast.parse(path.read_text())
        names = (*WAITS, "wait", "wait_for", "wait_on") if path.parent.name == "processes" else WAITS
        for name, node in _functions(whole):
            calls = [_called(one) for one in _calls(node, whole, names) if name not in UNSEEN]
            found += [
                Wait(str(path.relative_to(ROOT)), name, call, calls[:at].count(call)) for at, call in enumerate(calls)
            ]
    return found


@contextmanager
def without(wait: Wait) -> Iterator[None]:
    """The runtime without one of them."""
    module = importlib.import_module("fpipe." + wait.file.removesuffix(".py").replace("/", "."))
    whole = ast.parse((ROOT / wait.file).read_text())
    (node,) = (node for name, node in _functions(whole) if name == wait.function)
    gone = [one for one in _calls(node, whole, (wait.call,)) if _called(one) == wait.call][wait.number]
    ast.fix_missing_locations(_Without(gone).visit(whole))
    function: Any = module
    code: Any = compile(whole, str(ROOT / wait.file), "exec")
    for part in wait.function.split("."):
        function = getattr(function, part)
        (code,) = (one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == part)
    function = inspect.unwrap(function)
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


class _Without(ast.NodeTransformer):
    """A tree without one call: None in its place, or what it waits for."""

    def __init__(self, gone: ast.Call) -> None:
        self.gone = gone

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is not self.gone:
            return self.generic_visit(node)
        waited = node.func.value if isinstance(node.func, ast.Attribute) else None
        return waited if isinstance(waited, ast.Call) else ast.Constant(None)


def _functions(whole: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for one in whole.body:
        if isinstance(one, ast.FunctionDef):
            yield one.name, one
        for inner in one.body if isinstance(one, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef):
                yield f"{one.name}.{inner.name}", inner


def _calls(function: ast.FunctionDef, whole: ast.Module, names: tuple[str, ...]) -> list[ast.Call]:
    helpers = {one.name for one in whole.body if isinstance(one, ast.FunctionDef) and _any(one, WAITS)}
    calls = (one for one in ast.walk(function) if isinstance(one, ast.Call))
    return [
        one for one in calls if _called(one) in names or (isinstance(one.func, ast.Name) and one.func.id in helpers)
    ]


def _any(function: ast.FunctionDef, names: tuple[str, ...]) -> bool:
    return any(isinstance(one, ast.Call) and _called(one) in names for one in ast.walk(function))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
