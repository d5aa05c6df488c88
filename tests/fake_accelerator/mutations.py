"""Take a call that waits out of fpipe's runtimes, one at a time: a test on the fake accelerator has to notice.

stream.wait_event(event)        --> without_wait -->        None
leaf.clone()                    --> without_wait -->        leaf

So are calls by which a graph has its inputs, its generators and results of its own.
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
OF_PROCESSES = (*WAITS, "wait", "wait_for", "wait_on")
_OF_CAPTURES = ("clear_workspaces", "_make_pool", "disable")
OF_GRAPHS = (*WAITS, "wait_for_caller", "register_generators", "seed", "copy_", *_OF_CAPTURES)
RESULTS = "lowering/slots.py"
"""The file that clones the results of a graph."""
UNSEEN = (
    "CombinedWork.wait",
    "ExchangeLane._wait_for_launched",
    "Replicas._free_finished",
    "StepGraph._time_replay",
    "Voters.vote",
    "run_audited",
)
"""Functions that wait for what gloo carries alone, for a loss behind an exchange, for memory or for a clock."""
UNSEEN_CALLS = {("GraphStream.capture", "clear_workspaces", 1)}
"""Calls that free memory alone."""
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

    @property
    def of_graphs(self) -> bool:
        """Whether graphs that are captured wait there, or their results are cloned."""
        return Path(self.file).parent.name == "capture" or self.call == "clone"


def find_waits() -> list[Wait]:
    """List the waits in fpipe's runtimes, calls of helpers in the same file that wait among them."""
    removable_waits = list[Wait]()
    for path in sorted((ROOT / "runtimes").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = _removable_names(path)
        for name, node in _functions(tree):
            calls = [_called_name(call) for call in _calls(node, tree, names) if name not in UNSEEN]
            removable_waits += [
                Wait(str(path.relative_to(ROOT)), name, call, calls[:index].count(call))
                for index, call in enumerate(calls)
            ]
    return [wait for wait in removable_waits if wait[1:] not in UNSEEN_CALLS]


def _removable_names(path: Path) -> tuple[str, ...]:
    clones = ("clone",) if path.match(RESULTS) else ()
    return {"processes": OF_PROCESSES, "capture": OF_GRAPHS}.get(path.parent.name, (*WAITS, *clones))


@contextmanager
def without_wait(wait: Wait) -> Iterator[None]:
    """Run the body with one wait removed from the runtime."""
    module = importlib.import_module("fpipe." + wait.file.removesuffix(".py").replace("/", "."))
    tree = ast.parse((ROOT / wait.file).read_text())
    (node,) = (node for name, node in _functions(tree) if name == wait.function)
    removed_call = [call for call in _calls(node, tree, (wait.call,)) if _called_name(call) == wait.call][wait.number]
    ast.fix_missing_locations(_WithoutCall(removed_call).visit(tree))
    # The mutated file is compiled as a whole, and the function's code is found in the nested code constants by its
    # dotted name. Swapping `__code__` changes the function for all modules that have imported it already.
    function: Any = module
    code: Any = compile(tree, str(ROOT / wait.file), "exec")
    for part in wait.function.split("."):
        function = getattr(function, part)
        codes = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
        (code,) = (code for code in codes if code.co_name == part)
    function = inspect.unwrap(function)
    original_code, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = original_code


class _WithoutCall(ast.NodeTransformer):
    """Replace one call by None; by the call on whose result it waits, or by the tensor that it clones."""

    def __init__(self, removed_call: ast.Call) -> None:
        self.removed_call = removed_call

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is not self.removed_call:
            return self.generic_visit(node)
        if _called_name(node) == "_make_pool":
            return ast.parse("self._pool", mode="eval").body  # instead of a new pool the present one
        waited = node.func.value if isinstance(node.func, ast.Attribute) else None
        return waited if isinstance(waited, ast.Call) or _called_name(node) == "clone" else ast.Constant(None)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            yield statement.name, statement
        for method in statement.body if isinstance(statement, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef):
                yield f"{statement.name}.{method.name}", method


def _calls(function: ast.FunctionDef, tree: ast.Module, names: tuple[str, ...]) -> list[ast.Call]:
    helpers = {helper.name for helper in tree.body if isinstance(helper, ast.FunctionDef) and _has_call(helper, WAITS)}
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return [
        call
        for call in calls
        if _called_name(call) in names or (isinstance(call.func, ast.Name) and call.func.id in helpers)
    ]


def _has_call(function: ast.FunctionDef, names: tuple[str, ...]) -> bool:
    return any(isinstance(node, ast.Call) and _called_name(node) in names for node in ast.walk(function))


def _called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
