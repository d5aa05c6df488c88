"""Find where in a net something happens: the module that is called, and the line of the user's code.

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

from fpipe.meaning.purity.attributes import TORCH_FOLDER, is_user_file, quote_line
from fpipe.torch_private.fx import SET_GRAD, has_floor, sympy_expression

_LINE = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')


def location_of(node: fx.Node) -> str:
    """Return where a traced op comes from, as a line to append to an error; empty if the trace does not say."""
    matches = [_LINE.match(line.strip()) for line in (node.stack_trace or "").splitlines()]
    frames = [frame for frame in matches if frame and is_user_file(frame["file"])]
    lines = [quote_line(frame["file"], int(frame["line"]), frame["function"]) for frame in frames[-1:]]
    stack: Iterable[tuple[str, Any]] = (node.meta.get("nn_module_stack") or {}).values()
    modules = [(path, str(kind).rpartition(".")[2]) for path, kind in stack]
    return _format_location(modules, lines)


def location_of_error(error: BaseException, modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Return where an error was raised, as a line to append to it.

    It names the innermost of these modules that was running, the innermost line of the user's code, and the line of the
    torch module that this calls.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last_user_frame = max((i for i, frame in enumerate(frames) if is_user_file(frame.filename)), default=len(frames))
    folder = TORCH_FOLDER / "nn" / "modules"
    forwards = [frame for frame in frames[last_user_frame:] if frame.name == "forward"]
    torch_frames = [frame for frame in forwards if Path(frame.filename).parent == folder]
    quoted_frames = (*frames[last_user_frame : last_user_frame + 1], *torch_frames[-1:])
    lines = [quote_line(frame.filename, frame.lineno, frame.name) for frame in quoted_frames]
    return _format_location(modules_called_in(error, modules), lines)


def modules_called_in(error: BaseException, modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, str]]:
    """Return path and class of the modules that were running when an error was raised, the innermost last."""
    names = _module_names(modules)
    called: list[Any] = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [names[id(vars(self))] for self in called if isinstance(self, nn.Module) and id(vars(self)) in names]


def location_of_caller(module: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Return the line of the user's code that is running now, for something that it does to a module."""
    module_names = [name for key, name in _module_names(modules).items() if key == id(vars(module))]
    frame = _innermost_user_frame(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    lines = [] if frame is None else [quote_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)]
    return _format_location(module_names, lines)


@contextmanager
def record_locations(
    modules: Mapping[nn.Module, str] | None = None, called_modules: dict[nn.Module, str] | None = None
) -> Generator[None]:
    """Record in each traced node the line of the user's code, and the modules that were running.

    Args:
        modules: modules to name, with their paths; None where torch.export records them.
        called_modules: is filled with each module that this thread calls, and the name of its class.
    """
    recorder = nullcontext() if modules is None or called_modules is None else _record_modules(modules, called_modules)
    with preserve_node_meta(), _LineRecorder(), recorder:
        yield


def was_traced_with_grad(node: fx.Node) -> bool:
    """Whether gradients were on where an op was traced; torch.export records that too, but not inside autocast."""
    return node.meta.get("custom", {}).get(_GRAD_KEY, True)


_GRAD_KEY = "fpipe_grad"


class _LineRecorder(TorchFunctionMode):
    """Records for each call of torch the line of the user's code, and whether gradients are on.

    Inside the forward of a custom autograd.Function torch turns gradients off; they count as on there.
    """

    def __enter__(self) -> Any:
        self.grad = True
        self.outermost = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A mode sees each call of torch while the frames of the user's code are on the stack. What it puts into the
        # current meta, fx copies into the nodes of this call.
        user_frame, node_meta = _innermost_user_frame(sys._getframe(1), self.outermost), get_current_meta()  # pyright: ignore[reportPrivateUsage]
        if user_frame is None:
            node_meta.pop("stack_trace", None)
        else:
            code = user_frame.f_code
            node_meta["stack_trace"] = f'File "{code.co_filename}", line {user_frame.f_lineno}, in {code.co_name}'
        if func is SET_GRAD:
            self.grad = bool(args[0])
        node_meta["custom"] = {_GRAD_KEY: self.grad or torch.is_grad_enabled()}
        return func(*args, **(kwargs or {}))


def _innermost_user_frame(frame: FrameType | None, outermost: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame of the user's code, from this frame outwards; None if there is none."""
    while frame is not None and frame is not outermost and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is outermost else frame


@contextmanager
def _record_modules(path_by_module: Mapping[nn.Module, str], called_modules: dict[nn.Module, str]) -> Generator[None]:
    stack: list[tuple[str, str]] = []
    # Global hooks fire in all threads, so those of others are ignored.
    thread = threading.get_ident()

    def enter(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == thread:
            called_modules.setdefault(module, type(module).__name__)
            stack.append((path_by_module.get(module, ""), type(module).__name__))
            update_meta()

    def leave(*_: Any) -> None:
        if threading.get_ident() == thread and stack:
            stack.pop()
            update_meta()

    def update_meta() -> None:
        get_current_meta()["nn_module_stack"] = {str(i): path_and_class for i, path_and_class in enumerate(stack)}

    with ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(enter).remove)
        hooks.callback(register_module_forward_hook(leave, always_call=True).remove)
        yield


def _module_names(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, tuple[str, str]]:
    """Return path and class of each module, by the id of its `__dict__`, which a tracer's proxy of it shares."""
    return {id(vars(module)): (path, type(module).__name__) for path, module in modules}


def _format_location(modules: Iterable[tuple[str, str]], lines: Iterable[str]) -> str:
    module_parts = [f"in module {path!r} ({kind})" for path, kind in modules if path]
    parts = [*module_parts[-1:], "; which calls torch ".join(lines)]
    location = ", ".join(filter(None, parts))
    return f"\n  {location}" if location else ""


# Symbolic sizes as expressions: which a value has, and which can be computed from others.


def open_sizes(node: fx.Node) -> dict[int, Any]:
    """Return the symbolic sizes of a value by dimension, as expressions."""
    shape = getattr(node.meta.get("val"), "shape", ())
    exprs = {dim: sympy_expression(size) for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)}
    return {dim: expr for dim, expr in exprs.items() if expr.free_symbols}


def is_size(node: fx.Node) -> bool:
    """Whether a node is a symbolic size, or computed from symbolic sizes."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt)


def expr_of(size: fx.Node) -> Any:
    """Return a size as an expression, in which sizes that must be equal are one symbol."""
    return sympy_expression(size.meta["val"])


def is_computable(size_expr: Any, known_exprs: Collection[Any]) -> bool:
    """Whether a size is one of these, or can be computed from them; torch cannot compute a floor of symbols."""
    return size_expr in known_exprs or (
        not has_floor(size_expr) and all(symbol in known_exprs for symbol in size_expr.free_symbols)
    )
