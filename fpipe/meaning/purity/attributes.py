"""Find the modules and tensors that a function names, and notice tensors that a call binds to plain attributes.

self.mean = 0.9 * self.mean         refused where it is a plain attribute: what a module remembers is a buffer
self.calls += 1                     happens once, when the stage is traced, and is undone, as everything in attributes
"""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.meaning.purity.own_memory import memory
from fpipe.positional_stage import PositionalStage

Modules = Sequence[tuple[str, nn.Module]]
"""Modules with their paths."""


class Attributes:
    """The attributes of modules before a call, with the `contents` of dicts, lists and sets if they may be restored."""

    def __init__(self, modules: Modules, contents: bool = False) -> None:
        self.before = [(path, module, dict(vars(module))) for path, module in modules]
        values = (value for _, _, attributes in self.before for value in attributes.values())
        self.contents = [(value, copy(value)) for value in values if contents and type(value) in _CONTAINERS]

    def changed_tensor(self, who: str, read: set[Any]) -> str | None:
        """Describe the first tensor that has another in its place now; `read` are the storages that the call read."""
        for path, module, attributes in self.before:
            for name, value in attributes.items():
                if isinstance(value, Tensor) and vars(module).get(name) is not value and memory(value) in read:
                    return (
                        f"{who} changes {name!r} of module {path!r} ({type(module).__name__}) as it runs, a tensor "
                        "that is no buffer: what a module remembers is state. Say "
                        f"self.register_buffer({name!r}, ...)."
                    )
        return None

    def restore(self) -> None:
        """Give modules back the attributes that they had, and containers among them their contents."""
        for _, module, attributes in self.before:
            for name in [*vars(module)]:
                if name not in attributes:
                    del vars(module)[name]
            vars(module).update(attributes)
        for container, content in self.contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


_CONTAINERS = (dict, OrderedDict, list, set)


def modules_of(function: Any) -> Modules:
    """Return the modules that a function closes over or names, with those inside.

    >>> net = nn.Sequential(nn.Linear(2, 2))
    >>> [path for path, _ in modules_of(lambda x: net(x))]
    ['net', 'net.0']
    """
    if isinstance(function, PositionalStage):
        return function.modules
    paths: dict[nn.Module, str] = {}
    for name, value in _named_values(function):
        for path, module in value.named_modules() if isinstance(value, nn.Module) else ():
            paths.setdefault(module, f"{name}.{path}" if path else name)
    return [(path, module) for module, path in paths.items()]


def closed_over(function: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a function closes over or names, with those of such modules, each by a name."""
    for name, value in _named_values(function):
        if isinstance(value, nn.Module):
            tensors = (*value.named_buffers(), *value.named_parameters())
            yield from ((f"{name}.{path}", tensor) for path, tensor in tensors)
        else:
            yield name, value


def _named_values(function: Any) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yield tensors and modules by the names that lead to them: through functions of the user's, and containers."""
    seen: dict[int, Any] = {}  # the values too, so that none that is made meanwhile has the id of another
    todo: list[tuple[str, Any]] = [("it", function)]
    while todo:
        name, value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor | nn.Module):
            yield name, value
        elif isinstance(value, FunctionType):
            todo += _variables(value) if str(value.__module__).partition(".")[0] not in _LIBRARIES else []
        elif isinstance(value, MethodType):
            todo += [(name, value.__func__), (name, value.__self__)]
        elif isinstance(value, partial):
            todo += [(name, value.func), *((name, arg) for arg in value.args), *value.keywords.items()]
        elif isinstance(value, dict):
            todo += [(f"{name}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            todo += [(f"{name}.{at}", item) for at, item in enumerate(value)]


_LIBRARIES = frozenset(("torch", *sys.stdlib_module_names))
"""Packages whose functions name nothing of the user's."""


def _variables(function: FunctionType) -> list[tuple[str, Any]]:
    """Return what a function closes over, its defaults, and the globals that its code names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed = [(name, cell.cell_contents) for name, cell in cells if cell != _EMPTY]
    defaults = [(function.__name__, value) for value in function.__defaults__ or ()]
    known = function.__globals__
    return closed + defaults + [(name, known[name]) for name in _names(function.__code__) if name in known]


_EMPTY = CellType()


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in code and in the functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


# Find the line of the user's code in which an error was raised: not torch's, not Python's, and not this package's.

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


# Compare values that Python holds: plain ones and their containers by value, all others by identity.


def value_key(value: Any, unsupported: list[Any], ancestors: tuple[int, ...] = ()) -> Any:
    """Return a key to compare and hash a value by; it keeps nothing alive that can be referred to weakly.

    Args:
        value: anything. Functions, classes and Python's modules count as what they are when a trace sees them.
        unsupported: takes every other object, which may change and stay the same object.
        ancestors: the ids of the containers that the value is in: one that contains itself ends there.

    >>> value_key([1, 0.0], []) == value_key([True, -0.0], []), value_key({"a": (1,)}, []) == value_key({"a": (1,)}, [])
    (False, True)
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), repr(value)  # -0.0 is not 0.0, and NaN is NaN
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        if id(value) in ancestors:
            return "ancestor", ancestors.index(id(value))
        items: Any = value.items() if isinstance(value, Mapping) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        keys = (value_key(item, unsupported, (*ancestors, id(value))) for item in items)
        return type(value), frozenset(keys) if isinstance(value, set | frozenset) else tuple(keys)
    if not isinstance(value, _CODE):
        unsupported.append(value)
    return Same(value)


_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)


class Same:
    """Equal for one object and no other."""

    def __init__(self, what: Any) -> None:
        try:
            self._what: Any = weakref.ref(what)
        except TypeError:
            self._what = lambda: what
        self._number = id(what)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._what() is not None and self._what() is other._what()

    def __hash__(self) -> int:
        return self._number
