"""Say where in a net something happens: the module that is called, and the line of the user's code.

ValueError: the net writes 'x' in place (aten.relu_), which is no buffer of its own; ...
  in module 'blocks.1' (Block), at net.py:12, in forward: return x.relu_()
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import get_current_meta, preserve_node_meta
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from fpipe.meaning.purity.attributes import TORCH, is_users, line_at
from fpipe.torch_private.fx import SET_GRAD, expression, has_floor

_LINE = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')


def place_of(node: fx.Node) -> str:
    """Where an operation of a trace is from, as a line to put below an error; nothing if the trace does not say."""
    matches = [_LINE.match(line.strip()) for line in (node.stack_trace or "").splitlines()]
    frames = [frame for frame in matches if frame and is_users(frame["file"])]
    lines = [line_at(frame["file"], int(frame["line"]), frame["function"]) for frame in frames[-1:]]
    stack: Iterable[tuple[str, Any]] = (node.meta.get("nn_module_stack") or {}).values()
    modules = [(path, str(kind).rpartition(".")[2]) for path, kind in stack]
    return _words(modules, lines)


def place_of_error(error: BaseException, modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Where an error was raised, as a line to put below it: the innermost of these modules that was called then, the
    innermost line of the user's code, and of the module of torch's that it calls."""
    frames = traceback.extract_tb(error.__traceback__)
    last = max((number for number, frame in enumerate(frames) if is_users(frame.filename)), default=len(frames))
    home = TORCH / "nn" / "modules"
    torchs = [frame for frame in frames[last:] if frame.name == "forward" and Path(frame.filename).parent == home]
    lines = [line_at(frame.filename, frame.lineno, frame.name) for frame in (*frames[last : last + 1], *torchs[-1:])]
    return _words(modules_in(error, modules), lines)


def modules_in(error: BaseException, modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, str]]:
    """Those of these modules that were called when an error was raised, the innermost last: path and class."""
    names = _names(modules)
    called: list[Any] = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [names[id(vars(self))] for self in called if isinstance(self, nn.Module) and id(vars(self)) in names]


def place_of_caller(module: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Where the user's code is now that does something to one of these modules, as a line."""
    found = [name for key, name in _names(modules).items() if key == id(vars(module))]
    frame = _users(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    lines = [] if frame is None else [line_at(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)]
    return _words(found, lines)


@contextmanager
def noting_places(
    modules: Mapping[nn.Module, str] | None = None, called: dict[nn.Module, str] | None = None
) -> Generator[None]:
    """Let nodes that are traced say which line of the user's code they are from, and which of these modules, with their
    paths; `called` takes all modules that this thread calls, each with its class's name."""
    noting = nullcontext() if modules is None or called is None else _noting_modules(modules, called)
    with preserve_node_meta(), _Lines(), noting:
        yield


def traced_with_grad(node: fx.Node) -> bool:
    """Whether gradients were on where an operation was traced; torch.export says so too, but not inside autocast."""
    return node.meta.get("custom", {}).get(_GRAD, True)


_GRAD = "fpipe_grad"


class _Lines(TorchFunctionMode):
    """Notes for each call of torch the line of the user's code that it is made in, and whether gradients are on. They
    are in the forward of a custom autograd.Function, where only torch has turned them off."""

    def __enter__(self) -> Any:
        self.grad = True
        self.outermost = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, noted = _users(sys._getframe(1), self.outermost), get_current_meta()  # pyright: ignore[reportPrivateUsage]
        if found is None:
            noted.pop("stack_trace", None)
        else:
            code = found.f_code
            noted["stack_trace"] = f'File "{code.co_filename}", line {found.f_lineno}, in {code.co_name}'
        if func is SET_GRAD:
            self.grad = bool(args[0])
        noted["custom"] = {_GRAD: self.grad or torch.is_grad_enabled()}
        return func(*args, **(kwargs or {}))


def _users(frame: FrameType | None, outermost: FrameType | None = None) -> FrameType | None:
    """The innermost frame of the user's code."""
    while frame is not None and frame is not outermost and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is outermost else frame


@contextmanager
def _noting_modules(names: Mapping[nn.Module, str], called: dict[nn.Module, str]) -> Generator[None]:
    stack: list[tuple[str, str]] = []
    thread = threading.get_ident()

    def enter(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == thread:
            called.setdefault(module, type(module).__name__)
            stack.append((names.get(module, ""), type(module).__name__))
            note()

    def leave(*_: Any) -> None:
        if threading.get_ident() == thread and stack:
            stack.pop()
            note()

    def note() -> None:
        get_current_meta()["nn_module_stack"] = {str(at): one for at, one in enumerate(stack)}

    with ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(enter).remove)
        hooks.callback(register_module_forward_hook(leave, always_call=True).remove)
        yield


def _names(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, tuple[str, str]]:
    """The modules by their attributes, which the proxies that a tracer calls in their place share."""
    return {id(vars(module)): (path, type(module).__name__) for path, module in modules}


def _words(modules: Iterable[tuple[str, str]], lines: Iterable[str]) -> str:
    """The innermost module that has a path, and lines of code."""
    inside = [f"in module {path!r} ({kind})" for path, kind in modules if path]
    words = [*inside[-1:], "; which calls torch ".join(lines)]
    place = ", ".join(filter(None, words))
    return f"\n  {place}" if place else ""


# Read the sizes that a trace leaves open as expressions: which a value has, and which follow from others.


def open_sizes(node: fx.Node) -> dict[int, Any]:
    """Of a value's dimensions those that the trace leaves open, each as an expression."""
    shape = getattr(node.meta.get("val"), "shape", ())
    exprs = {dim: expression(size) for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)}
    return {dim: expr for dim, expr in exprs.items() if expr.free_symbols}


def is_size(node: fx.Node) -> bool:
    """Whether a node is a size that the trace leaves open, or is computed of such."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt)


def expr_of(size: fx.Node) -> Any:
    """A size as an expression, of one symbol for what must be equal."""
    return expression(size.meta["val"])


def follows(expr: Any, known: Collection[Any]) -> bool:
    """Whether a size is one of those known, or can be computed from them; torch computes no floor of symbols."""
    return expr in known or (not has_floor(expr) and all(symbol in known for symbol in expr.free_symbols))
